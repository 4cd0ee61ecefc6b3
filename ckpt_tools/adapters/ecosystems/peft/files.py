"""PEFT's own files: the names in adapter_model.safetensors, and the text of adapter_config.json. Pure.

Source: peft 0.21 `utils/save_and_load.py`, `config.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace

from ckpt_tools.adapters.adapter import Adapter, F, Sourced
from ckpt_tools.adapters.families import family_of
from ckpt_tools.errors import UsageError

ROOT = "base_model.model."
_PREFIXES = ("transformer.", "unet.", "text_encoder.", "text_encoder_2.", "text_encoder_3.", "base_model.model.")
"""Of one model in a pipeline; PEFT's adapters are for one model, and name its modules from its own root."""
_SURE = {"unet.", "text_encoder.", "text_encoder_2.", "text_encoder_3."}  # Those that no model has inside


def peft_names(adapter: Adapter[F]) -> Iterator[tuple[str, int, str]]:
    """Yield (name, number of the module, role) of every tensor of PEFT's file."""
    shared = set()
    adapted = {m.path: ".base_layer" * (m.nesting + 1) for m in adapter.modules if not m.is_saved}
    for number, module in enumerate(adapter.modules):
        for role in module.factors:
            if module.is_saved:
                yield f"{ROOT}{module.path}{adapted.get(module.path, '')}.{role}", number, role
                continue
            family = family_of(module)
            if (whole := family.shared_name(role)) is not None:
                if whole not in shared:
                    shared.add(whole)
                    yield whole, number, role
                continue
            suffix = family.peft_suffix(role)
            if suffix is None:
                raise UsageError(f"PEFT has no name for the factor {role} of {module.family}", where=module.path)
            yield f"{ROOT}{module.path}{'.base_layer' * module.nesting}.{suffix}", number, role


def renested(adapter: Adapter[F]) -> Adapter[F]:
    """Return the adapter with its wrappers counted anew: PEFT makes one for every parameter that is still adapted."""
    present: dict[str, set[int]] = {}
    for module in adapter.modules:
        if not module.is_saved:
            present.setdefault(module.path, set()).add(module.nesting)
    return adapter.with_modules(
        module if module.is_saved else replace(module, nesting=sorted(present[module.path]).index(module.nesting))
        for module in adapter.modules
    )


def from_one_model(adapter: Adapter[F], *, is_diffusion: bool = False) -> tuple[Adapter[F], str | None]:
    """Return the adapter with its model's own module paths, and the pipeline's name for the model that was taken off.

    `is_diffusion`: its paths are those of a diffusion model; a language model may have a `transformer` inside.
    """
    prefixes = {next((p for p in _PREFIXES if module.path.startswith(p)), "") for module in adapter.modules}
    if prefixes == {""} or (adapter.convention == "peft" and not (is_diffusion or prefixes & _SURE)):
        return adapter, None
    if len(prefixes) > 1:
        shown = ", ".join(prefix.rstrip(".") or "others" for prefix in sorted(prefixes))
        what = f"an adapter for {len(prefixes)} models ({shown}), but a PEFT adapter is for one model"
        raise UsageError(what, hint=f"export them one by one: --include '{max(prefixes)}**'")
    prefix = prefixes.pop()
    modules = tuple(replace(module, path=module.path[len(prefix) :]) for module in adapter.modules)
    omitted = frozenset(path.removeprefix(prefix) for path in adapter.omitted)
    inside = [name for name in adapter.base_shapes if name.startswith(prefix)]
    return replace(
        adapter.with_modules(modules),
        omitted=omitted,
        base_shapes={name.removeprefix(prefix): adapter.base_shapes[name] for name in inside},
        base_tensors={name.removeprefix(prefix): adapter.base_tensors[name] for name in inside},
    ), prefix.rstrip(".")


def config_text(config: Mapping[str, Sourced[object]]) -> bytes:
    """Return adapter_config.json."""
    document = {name: found.value for name, found in sorted(config.items())}
    return (json.dumps(document, indent=2) + "\n").encode()
