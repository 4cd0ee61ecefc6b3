"""Which model family an adapter is for: said, or following from its names, its header, its shapes or its base."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_tools.adapters.adapter import Adapter, F
from ckpt_tools.adapters.architectures import ARCHITECTURES, candidates
from ckpt_tools.adapters.architectures.architecture import ArchitectureName, ModelFamily
from ckpt_tools.adapters.architectures.of_base import BaseFamily
from ckpt_tools.adapters.architectures.resolve import is_language_model_path, readings
from ckpt_tools.adapters.architectures.rivals import rivals_of
from ckpt_tools.adapters.families import columns_of, rows_of
from ckpt_tools.errors import UsageError

_HEADERS = {
    "ss_base_model_version": {each.base_version: name for name, each in ARCHITECTURES.items()},
    "modelspec.architecture": {each.model_spec: name for name, each in ARCHITECTURES.items()},
}


def family_named(name: str | None) -> ModelFamily | None:
    """Return the model family that the user names.

    Raises:
        UsageError: There is none of this name.
    """
    known = ("llm", *ARCHITECTURES)
    if name is not None and name not in known:
        raise UsageError(f"unknown model family {name!r}", hint=f"--architecture takes {', '.join(known)}")
    return name  # type: ignore[return-value]  # one of the literals


def choose_family(adapter: Adapter[F], *, base: BaseFamily | None) -> ModelFamily | None:
    """Return the one family that an adapter is for; None where that is not known, or ckpt has no tables for it.

    The base goes before everything else; without one the names, the header and the shapes count.
    """
    if base is not None and len(base.possible) < 2:
        return base.name
    paths = [module.path for module in adapter.modules]
    possible = _possible(paths, base)
    if not possible:
        return "llm" if any(is_language_model_path(path) for path in paths) else None
    said = family_in_header(adapter)
    if said in possible:
        return said
    possible = _by_shape(adapter, possible)
    return possible[0] if len(possible) == 1 and (base is not None or not rivals_of(adapter, possible[0])) else None


def _possible(paths: Sequence[str], base: BaseFamily | None) -> tuple[ArchitectureName, ...]:
    found = candidates(paths)
    return found if base is None else tuple(name for name in found if name in base.possible)


def choose_architectures(
    adapter: Adapter[F],
    *,
    architecture: ModelFamily | None,
    base: BaseFamily | None,
) -> tuple[ArchitectureName, ...]:
    """Return the families that the adapter can be for; several only where nothing tells them apart.

    Whether models without tables have the same names is another question (`rivals_of`).

    Raises:
        UsageError: A language model, or a family that ckpt has no names for.
    """
    paths = [module.path for module in adapter.modules]
    where = paths[0] if paths else None
    if architecture is None and base is not None and len(base.possible) < 2:
        architecture = base.name
        if architecture is None:
            raise UsageError(
                f"ckpt has no tables for {base.title} ({base.source}), by which its modules get other names",
                where=where,
                hint="--to peft and --to diffusers keep the model's own names",
            )
    if architecture == "llm":
        raise UsageError(
            "diffusers, kohya and ComfyUI have no names for the modules of a language model",
            where=where,
            hint="--to peft is what transformers, vLLM and PEFT read",
        )
    if architecture is not None:
        return (architecture,)
    found = _possible(paths, base)
    said = family_in_header(adapter)
    strange = next((path for path in paths if not any(readings(path, ARCHITECTURES[name]) for name in found)), None)
    if not found or (strange is not None and said not in found):
        raise UsageError(
            "the adapter's modules do not belong to a model family that ckpt has tables for (these are "
            f"{', '.join(each.title for each in ARCHITECTURES.values())})",
            where=where if strange is None else strange,
            hint="--to peft takes any model's modules under their own names; --to diffusers needs the model for that: "
            "--base DIR",
        )
    if said in found:
        return (said,)
    return _by_shape(adapter, found) if len(found) > 1 else found


def family_in_header(adapter: Adapter[F]) -> ArchitectureName | None:
    """Return the family that the file's header names."""
    for key, names in _HEADERS.items():
        if key in adapter.settings and (name := names.get(str(adapter.settings[key].value))) is not None:
            return name
    return None


def _by_shape(adapter: Adapter[F], found: tuple[ArchitectureName, ...]) -> tuple[ArchitectureName, ...]:
    """FLUX.1 and FLUX.2 share names, but not the width of their MLPs."""
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
