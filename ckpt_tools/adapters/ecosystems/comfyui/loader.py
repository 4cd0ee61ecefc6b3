"""What ComfyUI does with an adapter's names: it never fails, it warns and goes on.

Source: github.com/comfyanonymous/ComfyUI, comfy/lora.py (`load_lora`, `model_lora_keys_unet`, `model_lora_keys_clip`),
comfy/utils.py (`flux_to_diffusers`, `mmdit_to_diffusers`, `unet_to_diffusers`), comfy/weight_adapter.
"""

from __future__ import annotations

import re

from ckpt_tools.adapters.architectures import ARCHITECTURES
from ckpt_tools.adapters.architectures.architecture import Architecture, ComfyUI, Part, Spelling
from ckpt_tools.adapters.architectures.names import find, find_as
from ckpt_tools.adapters.ecosystems.simulation import AdapterFile, Loading
from ckpt_tools.adapters.read.sidecars import BASE_NORM, DORA_SCALE

_SUFFIX = re.compile(
    r"(?P<module>.+?)(?:\.(?P<suffix>lora_up\.weight|lora_down\.weight|lora_mid\.weight|lora_A\.weight|lora_B\.weight"
    r"|lora\.up\.weight|lora\.down\.weight|lora_linear_layer\.(?:up|down)\.weight|alpha|dora_scale|hada_\w+|lokr_\w+"
    r"|diff|diff_b|w_norm|b_norm|set_weight|reshape_weight|oft_blocks|rescale|[ab][12]\.weight)"
    r"|(?P<old>_lora\.(?:up|down)\.weight))"
)
_WRONG = {
    "lora_magnitude_vector": "ComfyUI reads a magnitude only from dora_scale: a DoRA loses its magnitude",
    "lora_B.bias": "ComfyUI does not support the bias of a LoRA",
}


def load(file: AdapterFile, loading: Loading) -> None:
    """Apply ComfyUI's rules."""
    if file.architecture is None:
        loading.unchecked(
            file.file,
            "ComfyUI's map depends on the model family, which ckpt does not know",
            "--architecture names one that ckpt knows",
        )
        return
    if file.architecture == "llm":
        loading.ignored |= dict.fromkeys(file.tensors, "ComfyUI patches image models")
        return
    architecture = ARCHITECTURES[file.architecture]
    if architecture.comfyui is None:
        loading.ignored |= dict.fromkeys(file.tensors, f"ComfyUI does not support {architecture.title}")
        return
    for name in file.tensors:
        wrong = next((reason for end, reason in _WRONG.items() if end in name), None)
        if wrong is not None:
            loading.ignored[name] = wrong
            continue
        hit = _SUFFIX.fullmatch(name)
        module = None if hit is None else _module(hit["module"], architecture, is_old=hit["old"] is not None)
        if hit is not None and module is not None:
            loading.use(name, module)
            _say_misread(name, hit["module"], hit["suffix"], file, loading)
    _drop_bare_alphas(loading)


def _say_misread(name: str, module: str, suffix: str | None, file: AdapterFile, loading: Loading) -> None:
    """Say what ComfyUI loads, and computes in another way than LyCORIS and PEFT do.

    Source: comfy/weight_adapter/base.py (`weight_decompose`), oft.py.
    """
    hint = "merge it into the base: ckpt merge-lora BASE ADAPTER DST"
    shape = file.tensors[name].shape
    if suffix == "dora_scale" and len(shape) > 1 and shape[0] > 1 and file.metadata.get(DORA_SCALE) != BASE_NORM:
        loading.misreads(
            module,
            "ComfyUI divides a DoRA of the output axis by ‖W‖ instead of ‖W + ΔW‖ (ComfyUI PR #15458): the effect "
            "differs",
            hint,
        )
    elif suffix == "oft_blocks" and module in file.constrained:
        what = "ComfyUI uses alpha as the constraint itself, LyCORIS alpha times the outputs: the rotation differs"
        loading.misreads(module, what, hint)
    elif suffix == "rescale":
        what = "ComfyUI reads rescale but does not use it: the effect differs"
        loading.misreads(module, what, hint)


def _drop_bare_alphas(loading: Loading) -> None:
    """An alpha without factors is read, and changes nothing."""
    changing = {each for name, each in loading.used.items() if not name.endswith((".alpha", ".dora_scale"))}
    for name, modules in list(loading.used.items()):
        if modules not in changing:
            del loading.used[name]
            loading.ignored[name] = "it has no factors beside it"


def _module(name: str, architecture: Architecture, *, is_old: bool) -> str | None:
    for part in architecture.parts:
        found = _encoder(name, part) if part.is_encoder else _main(name, part, architecture.comfyui, is_old=is_old)
        if found is not None:
            return found
    return None


def _main(name: str, part: Part, maps: ComfyUI | None, *, is_old: bool) -> str | None:
    maps = maps or ComfyUI()
    takes_dotted = not maps.has_processors or is_old or ".processor." in name or ".to_" not in name
    ways: list[tuple[str, Spelling, bool]] = [
        (f"{part.comfyui}.", "native", True),
        *((prefix, "alias", True) for prefix in maps.aliases),
        *((prefix, "diffusers", True) for prefix in maps.dotted if takes_dotted),
        *((prefix, "native", False) for prefix in maps.flat_native),
        *((prefix, "diffusers", False) for prefix in maps.flat),
    ]
    for prefix, spelling, is_dotted in ways:
        rest = name.removeprefix(prefix)
        if not name.startswith(prefix) or (not is_dotted and "." in rest):
            continue
        if spelling == "diffusers" and is_dotted and maps.has_processors:
            rest = rest.replace(".processor.to_", ".to_")
            rest = f"{rest}.0" if rest.endswith(".to_out") else rest
        place = find_as(rest, part, spelling)
        if place is None or (is_dotted and rest != place.found):
            continue
        if spelling == "native" or not any(each in place.found for each in maps.lacks):
            return f"{part.comfyui}.{place.native}"
    return None


def _encoder(name: str, part: Part) -> str | None:
    prefixes = [(f"{part.comfyui}.", "."), *((f"{prefix}_", "_") for prefix in part.kohya)]
    if part.component != "text_encoder_3" and "t5" not in part.comfyui:
        prefixes.insert(1, (f"{part.component}.", "."))
    for prefix, dot in prefixes:
        inner = name.removeprefix(prefix)
        place = next(find(inner, part), None) if name.startswith(prefix) else None
        if place is not None and inner == place.native.replace(".", dot):
            return f"{part.comfyui}.{place.native}"
    return None
