"""What ComfyUI does with an adapter's names: it never fails, it warns and goes on.

Source: github.com/comfyanonymous/ComfyUI, comfy/lora.py (`load_lora`, `model_lora_keys_unet`, `model_lora_keys_clip`),
comfy/utils.py (`flux_to_diffusers`, `mmdit_to_diffusers`, `unet_to_diffusers`), comfy/weight_adapter.
"""

from __future__ import annotations

import re

from ckpt_tools.adapters.architectures import ARCHITECTURES
from ckpt_tools.adapters.architectures.architecture import Architecture, Part
from ckpt_tools.adapters.architectures.rule import Match
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
_NOT_IN_MAP = {"flux2": ("time_guidance_embed.", "_stream_modulation")}
"""diffusers' names of FLUX.2 that ComfyUI's map, made for FLUX.1, does not have."""


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
    """What ComfyUI loads, and computes in another way than LyCORIS and PEFT do.

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
        found = _encoder(name, part) if part.is_encoder else _main(name, part, architecture, is_old=is_old)
        if found is not None:
            return found
    return None


def _main(name: str, part: Part, architecture: Architecture, *, is_old: bool) -> str | None:
    def native(text: str) -> Match | None:
        return next((match for match in part.names.find(text) if match.is_native), None)

    def diffusers(text: str) -> Match | None:
        lacking = _NOT_IN_MAP.get(architecture.name, ())
        if any(each in text or each.replace(".", "_") in text for each in lacking):
            return None
        return next((match for match in part.names.find(text) if match.is_diffusers), None)

    dotted = {"diffusion_model.": native}
    flat = {"lora_unet_": native, "lora_prior_unet_": native}
    if architecture.name == "sdxl":
        if is_old or ".processor." in name or ".to_" not in name:
            dotted |= {"unet.": diffusers, "": diffusers}
            name = re.sub(r"\.processor\.to_", ".to_", name)
            name = f"{name}.0" if name.endswith(".to_out") else name
        flat |= {"lycoris_": diffusers}
    else:
        dotted |= {"transformer.": diffusers}
        dotted |= {"": diffusers} if architecture.name != "sd3" else {"base_model.model.": diffusers}
        flat |= {"lycoris_": diffusers, "lora_transformer_": diffusers}
    for prefix, find in dotted.items():
        rest = name[len(prefix) :]
        if name.startswith(prefix) and ("." in rest or "_" not in rest or not rest.startswith("lora_")):
            match = find(rest)
            if match is not None and rest in (match.native(), *match.diffusers()):
                return f"{part.comfyui}.{match.native()}"
    for prefix, find in flat.items():
        match = find(name[len(prefix) :]) if name.startswith(prefix) and "." not in name else None
        if match is not None:
            return f"{part.comfyui}.{match.native()}"
    if architecture.name == "sdxl" and name.startswith("lora_unet_") and "." not in name:
        match = diffusers(name.removeprefix("lora_unet_"))
        return None if match is None else f"{part.comfyui}.{match.native()}"
    return None


def _encoder(name: str, part: Part) -> str | None:
    prefixes = [(f"{part.comfyui}.", "."), *((f"{prefix}_", "_") for prefix in part.kohya)]
    if part.component != "text_encoder_3" and "t5" not in part.comfyui:
        prefixes.insert(1, (f"{part.component}.", "."))
    for prefix, dot in prefixes:
        inner = name.removeprefix(prefix)
        match = next(iter(part.names.find(inner)), None) if name.startswith(prefix) else None
        if match is not None and inner == match.native().replace(".", dot):
            return f"{part.comfyui}.{match.native()}"
    return None
