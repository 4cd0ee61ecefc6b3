"""Which model family an adapter is for: said, or following from its names, its header, its shapes or its base."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Literal

from ckpt_tools.adapters.adapter import Adapter
from ckpt_tools.adapters.naming.architecture import ARCHITECTURES, ArchitectureName, candidates, detect_architecture
from ckpt_tools.adapters.naming.resolve import readings
from ckpt_tools.errors import UsageError

if TYPE_CHECKING:
    import torch

_HEADERS = {
    "ss_base_model_version": {each.base_version: name for name, each in ARCHITECTURES.items()},
    "modelspec.architecture": {each.model_spec: name for name, each in ARCHITECTURES.items()},
}


def choose_architectures(
    adapter: Adapter[torch.Tensor],
    *,
    architecture: ArchitectureName | Literal["llm"] | None,
    base_names: Collection[str] | None,
) -> tuple[ArchitectureName, ...]:
    """Return the families that the adapter can be for; several only where nothing tells them apart.

    Raises:
        UsageError: A language model, or a family that ckpt has no names for.
    """
    paths = [module.path for module in adapter.modules]
    if architecture is None and base_names is not None:
        architecture = detect_architecture(
            name.rpartition(".")[0] if name.endswith((".weight", ".bias")) else name for name in base_names
        )
    if architecture == "llm" or (architecture is None and detect_architecture(paths) == "llm"):
        raise UsageError(
            "diffusers, kohya and ComfyUI have no names for the modules of a language model",
            where=paths[0] if paths else None,
            hint="--to peft is what transformers, vLLM and PEFT read",
        )
    if architecture is not None:
        if architecture not in ARCHITECTURES:
            raise UsageError(
                f"{architecture!r} is no model family with names", hint=f"one of {', '.join(ARCHITECTURES)}"
            )
        return (architecture,)
    found = candidates(paths)
    if not found:
        raise UsageError(
            "the adapter's modules are of no model family that ckpt has names for",
            where=paths[0] if paths else None,
            hint=f"known are {', '.join(each.title for each in ARCHITECTURES.values())}",
        )
    said = _by_header(adapter)
    if said in found:
        return (said,)
    return _by_shape(adapter, found) if len(found) > 1 else found


def _by_header(adapter: Adapter[torch.Tensor]) -> ArchitectureName | None:
    for key, names in _HEADERS.items():
        if key in adapter.settings and (name := names.get(str(adapter.settings[key].value))) is not None:
            return name
    return None


def _by_shape(adapter: Adapter[torch.Tensor], found: tuple[ArchitectureName, ...]) -> tuple[ArchitectureName, ...]:
    """FLUX.1 and FLUX.2 share names, but not the width of their MLPs."""
    from ckpt_tools.adapters.naming.rows import columns_of, rows_of

    fitting = list(found)
    for module in adapter.modules:
        rows, columns = rows_of(module), columns_of(module)
        if rows is None or columns is None:
            continue
        for name in tuple(fitting):
            for each in readings(module.path, ARCHITECTURES[name]):
                ratio = each.match.rule.ratio
                is_whole = each.match.part is None or len(each.match.rule.diffusers) == 1
                if ratio is not None and is_whole and rows != round(ratio * columns):
                    fitting.remove(name)
                    break
    return tuple(fitting) or found
