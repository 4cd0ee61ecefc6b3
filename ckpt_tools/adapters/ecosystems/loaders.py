"""What ComfyUI, InvokeAI, kohya's trainers, vLLM and SGLang make of an adapter."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpt_tools.adapters.adapter import Shape
from ckpt_tools.adapters.architectures import ARCHITECTURES
from ckpt_tools.adapters.architectures.architecture import Architecture, ComfyUI, ModelPart, Spelling
from ckpt_tools.adapters.architectures.names import find, find_as
from ckpt_tools.adapters.base.model import parents_of
from ckpt_tools.adapters.ecosystems.diffusers_loader import convert, cut
from ckpt_tools.adapters.ecosystems.loader_report import AdapterFile, Loading, RejectedError
from ckpt_tools.adapters.ecosystems.peft.config_rules import MODEL_TYPES, variants_in
from ckpt_tools.adapters.ecosystems.peft.files import ROOT
from ckpt_tools.adapters.families.family import MERGE_HINT
from ckpt_tools.adapters.read.sidecars import ADAPTER_CONFIG, BASE_NORM, DORA_SCALE, PEFT_FILE

# ComfyUI: it never fails, it warns and goes on.
#
# Source: ComfyUI, comfy/lora.py (`load_lora`, `model_lora_keys_unet`, `model_lora_keys_clip`), comfy/utils.py
# (`flux_to_diffusers`, `mmdit_to_diffusers`, `unet_to_diffusers`), comfy/weight_adapter.

_COMFYUI_SUFFIX = re.compile(
    r"(?P<module>.+?)(?:\.(?P<suffix>lora_up\.weight|lora_down\.weight|lora_mid\.weight|lora_[AB]\.(?:default\.)?weight"
    r"|lora\.up\.weight|lora\.down\.weight|lora_linear_layer\.(?:up|down)\.weight|alpha|dora_scale|hada_\w+|lokr_\w+"
    r"|diff|diff_b|w_norm|b_norm|set_weight|reshape_weight|oft_blocks|rescale|[ab][12]\.weight)"
    r"|(?P<old>_lora\.(?:up|down)\.weight))"
)
_WRONG = {
    "lora_magnitude_vector": "ComfyUI reads a magnitude only from dora_scale: a DoRA loses its magnitude",
    "lora_B.bias": "ComfyUI does not support the bias of a LoRA",
}


def load_in_comfyui(file: AdapterFile, loading: Loading) -> None:
    """Apply ComfyUI's rules."""
    architecture = _family_of(file, "comfyui", "ComfyUI", loading)
    if architecture is None:
        return
    if any({*marks} <= file.tensors.keys() for marks in architecture.tools):
        for name in file.tensors:
            loading.use(name, name.partition(".lora_")[0].partition(".processor")[0])
        return
    for name in file.tensors:
        wrong = next((reason for end, reason in _WRONG.items() if end in name), None)
        if wrong is not None:
            loading.ignored[name] = wrong
            continue
        hit = _COMFYUI_SUFFIX.fullmatch(name)
        module = None if hit is None else _module(hit["module"], architecture, is_old=hit["old"] is not None)
        if hit is not None and module is not None:
            loading.use(name, module)
            _say_misread(name, hit["module"], hit["suffix"], file, loading)
    _drop_bare_alphas(loading)


def _family_of(file: AdapterFile, field: str, who: str, loading: Loading) -> Architecture | None:
    """Return the model family if a loader supports it."""
    family = ARCHITECTURES.get(file.architecture or "")
    if family is not None and getattr(family, field):
        return family
    title = "language models" if family is None else family.title
    loading.ignored |= dict.fromkeys(file.tensors, f"{who} does not support {title}")
    return None


def _say_misread(name: str, module: str, suffix: str | None, file: AdapterFile, loading: Loading) -> None:
    """Say what ComfyUI loads, and computes in another way than LyCORIS and PEFT do.

    Source: comfy/weight_adapter/base.py (`weight_decompose`), oft.py.
    """
    shape, what = file.tensors[name].shape, ""
    if suffix == "dora_scale" and len(shape) > 1 and shape[0] > 1 and file.metadata.get(DORA_SCALE) != BASE_NORM:
        what = "divides a DoRA of the output axis by ‖W‖ instead of ‖W + ΔW‖ (ComfyUI PR #15458)"
    elif suffix == "oft_blocks" and any(m.path == module and m.alpha and m.alpha.value for m in file.modules):
        what = "uses alpha as the constraint itself, LyCORIS alpha times the outputs"
    elif suffix == "rescale":
        what = "reads rescale but does not use it"
    if what:
        loading.misreads(module, f"ComfyUI {what}: the effect differs", MERGE_HINT)


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


def _main(name: str, part: ModelPart, maps: ComfyUI | None, *, is_old: bool) -> str | None:
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


def _encoder(name: str, part: ModelPart) -> str | None:
    prefixes = [(f"{part.comfyui}.", "."), *((f"{prefix}_", "_") for prefix in part.kohya)]
    if part.component != "text_encoder_3" and "t5" not in part.comfyui:
        prefixes.insert(1, (f"{part.component}.", "."))
    for prefix, dot in prefixes:
        inner = name.removeprefix(prefix)
        place = next(find(inner, part), None) if name.startswith(prefix) else None
        if place is not None and inner == place.native.replace(".", dot):
            return f"{part.comfyui}.{place.native}"
    return None


# InvokeAI, whose formats the families' tables have. Source: InvokeAI 6.14, backend/patches/layer_patcher.py, layers;
# backend/model_manager/load/model_loaders/lora.py.


def load_in_invokeai(file: AdapterFile, loading: Loading) -> None:
    """Apply InvokeAI's rules; raise RejectedError where it raises, or does not recognise the file."""
    family = _family_of(file, "invokeai", "InvokeAI", loading)
    names = {name: name for name in file.tensors if not name.startswith("bundle_emb")}
    if family is None:
        return
    if any(".processor." in name or name.endswith("_norm.scale") for name in names):
        loading.unchecked(file.file, "X-Labs' names and control LoRAs are not simulated for InvokeAI")
        return
    conversion = next((each for each in family.invokeai if each.applies(names)), None)
    if conversion is None:
        raise RejectedError("it recognises none of its formats by these names")
    for name in [name for name in names if name.startswith(conversion.encoders)]:
        conversion = replace(conversion, needs="")  # encoders tell the family as well
        if (module := _module(cut(names.pop(name))[0], family, is_old=False)) is not None:
            loading.use(name, module)
    keys = convert(conversion, names, family.main)
    for key, name in keys.items():
        if not key.startswith("\0"):
            loading.use(name, cut(key)[0])
        if name.endswith(".dora_scale") and file.tensors[name].shape[0] > 1:
            what = "InvokeAI divides a DoRA by the norms of the columns: the effect of one by rows differs"
            loading.misreads(name, what, MERGE_HINT)
    loading.used |= {name: (key[1:],) for key, name in keys.items() if key[1:] in loading.modules}
    joined = Counter(hit[1] for path in loading.modules if (hit := re.fullmatch(conversion.joins, path)))
    if any(count < 3 for count in joined.values()):
        raise RejectedError(f"it joins q, k and v, and finds not all of {min(joined, key=joined.__getitem__)}")


# kohya's trainers, when they load network weights, with LyCORIS beside sd-scripts.
#
# Source: kohya-ss/sd-scripts, networks/lora.py, lora_flux.py, lora_sd3.py, and musubi-tuner, networks/lora.py
# (`create_network_from_weights`); lycoris-lora 4.1, kohya.py, modules/*.py (`make_module_from_state_dict`).

_KOHYA_SUFFIX = re.compile(
    r"(?P<module>[^.]+)\.(?P<suffix>lora_(?:up|down|mid)\.weight|alpha|dora_scale|hada_\w+|lokr_\w+|diff|diff_b"
    r"|oft_blocks|oft_diag|rescale|[ab][12]\.weight)"
)
_PLAIN = ("lora_up.weight", "lora_down.weight", "alpha")
_WITHOUT_ALPHA = {"diff", "diff_b"}


def load_in_kohya(file: AdapterFile, loading: Loading) -> None:
    """Apply kohya's rules."""
    architecture = _family_of(file, "kohya", "kohya (sd-scripts, musubi-tuner)", loading)
    if architecture is None or (kohya := architecture.kohya) is None:
        return
    needs_lycoris = False
    outside: list[str] = []
    ends: dict[str, set[str]] = {}
    for name in file.tensors:
        hit = _KOHYA_SUFFIX.fullmatch(name)
        if hit is None:
            continue
        for part in architecture.parts:
            prefix = f"{part.kohya[0]}_"
            if not hit["module"].startswith(prefix):
                continue
            spelling = "native" if part.is_encoder else kohya.spelling
            place = find_as(hit["module"].removeprefix(prefix), part, spelling)
            if place is not None:
                loading.use(name, f"{part.component}.{place.found}")
                needs_lycoris |= hit["suffix"] not in _PLAIN
                ends.setdefault(hit["module"], set()).add(hit["suffix"])
                native = place.native
                if not part.is_encoder and (not native.startswith(kohya.blocks) or native.startswith(kohya.outside)):
                    outside.append(native)
    _check_alphas(ends, takes_rank=kohya.takes_rank and not needs_lycoris)
    if outside and not needs_lycoris:
        loading.needs(
            outside[0],
            f"{kohya.tool}'s networks look for modules inside the blocks, and skip others unless they are configured "
            "for them: load it with --network_module lycoris.kohya",
        )
    if needs_lycoris:
        what = f"networks.lora of {kohya.tool} supports only plain LoRA: load it with --network_module lycoris.kohya"
        loading.say("loader-needs", "info", file.file, what)


def _check_alphas(ends: Mapping[str, set[str]], *, takes_rank: bool) -> None:
    """Of the loaders networks.lora alone takes the rank for an alpha that is missing; the others end with an error."""
    lacking = [module for module, found in ends.items() if "alpha" not in found and not found <= _WITHOUT_ALPHA]
    if lacking and not takes_rank:
        raise RejectedError(f"{len(lacking)} modules have no alpha, which it reads for each: {lacking[0]}")


# vLLM (`--enable-lora`), with an adapter of PEFT.
#
# Source: vllm-project/vllm 0.33, vllm/lora/peft_helper.py, lora_model.py, utils.py, worker_manager.py; issues
# #9280 (modules_to_save), #2847 (rank), #21500 (lm_head).

_NAME = re.compile(r"(?P<module>.+)\.(?:lora_[AB]\.weight|lora_embedding_[AB])")
_DEFAULT_RANK = 16
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # Values that --max-lora-rank takes
_FROZEN = (".embed_tokens.base_layer.weight", ".lm_head.base_layer.weight")
_EMBEDDINGS = ("embed_tokens", "lm_head", "wte", "word_embeddings")
_INNER = ".base_layer"
_EXPERTS = (".experts", f".experts{_INNER}")
_HEADS = ("classifier", "score")  # What modules_to_save may name: the head of a classification model
_HARMLESS_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")  # lora_ga changes the base all the same


def load_in_vllm(file: AdapterFile, loading: Loading) -> None:
    """Apply vLLM's rules; raise RejectedError where it raises."""
    if file.architecture not in (None, "llm"):
        loading.ignored |= dict.fromkeys(file.tensors, "vLLM serves language models")
        return
    config = _checked_config(file)
    _check_rank(file, config, loading)
    loading.say_scale("lora_alpha", config.get("lora_alpha"))
    modules = parents_of(file.base) if file.base is not None else None
    if modules is None:
        loading.needs_base(file.file, "vLLM skips modules that the model does not have: give --base")
    embeddings = set()
    saved = _saved_in(config)
    for name, head in file.tensors.items():
        hit = _NAME.fullmatch(name)
        if name.endswith(_FROZEN):
            _leave_frozen(name, "vLLM", file, loading)
            continue
        if hit is None and name.rpartition(".")[0].rpartition(".")[2] in saved:
            loading.use(name, name.rpartition(".")[0])
            continue
        if hit is None:
            raise RejectedError(f"{name} is an unsupported LoRA weight")
        if len(head.shape) < 2 or 0 in head.shape:
            raise RejectedError(f"{name} has the shape {list(head.shape)}, and is copied into a matrix")
        module = hit["module"].removeprefix(ROOT)
        if modules is not None and module.removesuffix(_INNER) not in modules:
            loading.ignored[name] = "the base model has no such module"
            continue
        if module.rpartition(".")[2] in _EMBEDDINGS:
            embeddings.add(module)
        loading.use(name, module)
    _check_experts(loading)
    _say_variants(config, "vLLM", loading)
    if saved:
        what = "vLLM loads no head but that of a classification model, with --max-lora-cls-labels"
        loading.needs(file.file, what)
    if embeddings:
        what = "vLLM accepts adapters of embeddings and of lm_head for some models only, and refuses them for others"
        loading.needs(min(embeddings), what)


def _leave_frozen(name: str, who: str, file: AdapterFile, loading: Loading) -> None:
    """Judge the base's embedding that PEFT saved along, of which a server uses its own."""
    own = None if file.base is None else file.base.get(name.removeprefix(ROOT).replace(".base_layer.", "."))
    if own is None or own == tuple(file.tensors[name].shape):
        loading.use(name, name.removeprefix(ROOT).rpartition(".base_layer.")[0])
        loading.needs(name, f"{who} uses the base's own embedding, not the one that PEFT saved: they must be equal")
    else:
        loading.ignored[name] = f"{who} uses the base's own embedding, and this one has another size"


def _say_variants(config: Mapping[str, object], who: str, loading: Loading) -> None:
    for name, reason in variants_in(config):
        hint = "try ckpt export-lora or merge-lora, which report whether another way can serve it"
        loading.misreads(ADAPTER_CONFIG, f"{who} ignores {name} and loads the factors as plain ones: {reason}", hint)


def _served_config(file: AdapterFile) -> Mapping[str, object]:
    config = file.config
    if config is None:
        raise RejectedError("there is no adapter_config.json beside it")
    missing = [name for name in ("r", "lora_alpha", "target_modules") if name not in config]
    if missing:
        raise RejectedError(f"adapter_config.json has no {', '.join(missing)}")
    if config.get("peft_type") != "LORA":
        raise RejectedError(f"peft_type is {config.get('peft_type')!r}, but it supports only LORA")
    alpha = config["lora_alpha"]
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise RejectedError(f"lora_alpha must be a number, got {alpha!r}")
    return config


def _checked_config(file: AdapterFile) -> Mapping[str, object]:
    config = _served_config(file)
    if file.file != PEFT_FILE:
        raise RejectedError(f"it looks for {PEFT_FILE}, but this is {file.file}")
    if other := [name for name in _saved_in(config) if name not in _HEADS]:
        raise RejectedError(f"modules_to_save may name {' or '.join(_HEADS)} only, not {other[0]!r}")
    for name, what in MODEL_TYPES["vllm_refuses"].items():
        if config.get(name):
            raise RejectedError(f"it does not support {what}")
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower() not in _HARMLESS_INITS:
        raise RejectedError(f"init_lora_weights is {init!r}: PEFT changes the base for it")
    if config.get("bias", "none") != "none":
        raise RejectedError(f"bias is {config['bias']!r}, but it supports none")
    return config


def _saved_in(config: Mapping[str, object]) -> Sequence[object]:
    value = config.get("modules_to_save") or ()
    return value if isinstance(value, list) else (value,) if value else ()


def _check_experts(loading: Loading) -> None:
    """Of fused experts (PEFT's target_parameters) it takes both parameters, one wrapped in the other."""
    fused = [module for module in loading.modules if module.endswith(_EXPERTS)]
    for module in fused:
        if f"{module.removesuffix(_INNER)}{_INNER}" not in fused or module.removesuffix(_INNER) not in fused:
            raise RejectedError(f"{module} has factors for only one parameter of the experts; vLLM requires both")
    if fused:
        loading.needs(
            fused[0],
            "vLLM loads factors of fused experts for models whose experts it keeps fused; for others start it with "
            "--enable-mixed-moe-lora-format, and set is_3d_lora_weight in the request",
        )


def _check_rank(file: AdapterFile, config: Mapping[str, object], loading: Loading) -> None:
    pattern = config.get("rank_pattern")
    heads = [head for name, head in file.tensors.items() if name.endswith("lora_A.weight") and head.shape]
    rank = max((head.shape[0] for head in heads), default=1)
    for each in (config.get("r"), *(pattern.values() if isinstance(pattern, dict) else ())):
        if not isinstance(each, int) or isinstance(each, bool) or each < 1:
            raise RejectedError(f"a rank is {each!r}, not a positive integer")
        rank = max(rank, each)
    if rank > _RANKS[-1]:
        raise RejectedError(f"its rank is {rank}, the maximum is {_RANKS[-1]}")
    if rank > _DEFAULT_RANK:
        needed = next(each for each in _RANKS if each >= rank)
        what = f"rank {rank} is above vLLM's default of {_DEFAULT_RANK}: start it with --max-lora-rank {needed}"
        loading.say("loader-needs", "info", file.file, what)


# SGLang (`--enable-lora`) with an adapter of PEFT: it knows a module by its layer's number and its last name.
# Source: sglang 0.5.23, srt/lora/lora_config.py, lora.py, lora_manager.py, mem_pool.py, utils.py.

_IN_LAYER = re.compile(r"(?P<root>.*?)layers\.(?P<number>\d+)\.(?P<parent>.*?)(?P<leaf>[^.]+)")


def load_in_sglang(file: AdapterFile, loading: Loading) -> None:
    """Apply SGLang's rules; raise RejectedError where it raises."""
    if file.architecture not in (None, "llm"):
        loading.unchecked(file.file, "ckpt has rules for SGLang's language models only")
        return
    config = _served_config(file)
    if config.get("use_dora"):
        raise RejectedError("it does not support DoRA")
    loading.say_scale("lora_alpha", config["lora_alpha"])
    if file.siblings:
        loading.needs(file.siblings[0], "SGLang loads all safetensors files of the directory together")
    if file.base is None:
        loading.needs_base(file.file, "SGLang skips modules that the model does not have: give --base")
    targets = _sglang_targets(config["target_modules"])
    leaves: dict[tuple[str | Any, ...], set[str]] = defaultdict(set)
    for name in file.tensors:
        path, _, end = name.partition(".lora_")
        if (hit := _IN_LAYER.fullmatch(path)) is not None:
            _check_factor(name, hit["leaf"], end, targets, file.tensors[name].shape, config["r"], loading)
            leaves[hit.group("number", "parent")].add(hit["leaf"])
        elif name.endswith(_FROZEN):
            _leave_frozen(name, "SGLang", file, loading)
        elif end and path.rpartition(".")[2] in targets & {"embed_tokens", "lm_head"}:
            loading.use(name, path.removeprefix(ROOT))
        else:
            loading.ignored[name] = "outside the layers SGLang loads targeted embed_tokens and lm_head alone"
    for (number, _), found in leaves.items():
        if lacking := {each for leaf in found for each in MODEL_TYPES["sglang_needs"].get(leaf, ())} - found:
            raise RejectedError(f"layer {number} adapts {', '.join(sorted(found))} without {min(lacking)}")
    _compare_places(file, loading)
    _say_variants(config, "SGLang", loading)


def _sglang_targets(given: object) -> set[str]:
    """Return the modules that it makes room for, as it fuses them."""
    if given in ("all", "all-linear"):
        return {*MODEL_TYPES["sglang_modules"]}
    if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        raise RejectedError(f"target_modules is {given!r:.60}, and it takes a list of names")
    ends = {each.rpartition(".")[2] for each in given}  # w1 to w3 it renames in the file, and not here
    return {end if re.fullmatch("w[123]", end) else MODEL_TYPES["sglang_fused"].get(end, end) for end in ends}


def _check_factor(name: str, leaf: str, end: str, targets: set[str], shape: Shape, rank: object, to: Loading) -> None:
    fused = MODEL_TYPES["sglang_fused"].get(leaf, leaf)
    if not re.fullmatch(r"[AB]\.(default\.)?weight", end):
        raise RejectedError(f"it takes {name} for a lora_B.weight")
    if fused not in targets:
        raise RejectedError(f"{name} matches none of its target modules, {', '.join(sorted(targets))}")
    if len(shape) != 2 or shape[end[0] == "B"] != rank:
        raise RejectedError(f"{name} has the shape {list(shape)}, and the one rank is {rank!r:.20}")
    if fused not in MODEL_TYPES["sglang_modules"] or ".experts." in name:
        to.unchecked(name, f"whether SGLang's class of the model takes {leaf} is not known to ckpt")
    to.use(name, name.partition(".lora_")[0].removeprefix(ROOT))


def _compare_places(file: AdapterFile, loading: Loading) -> None:
    """Leave out what no layer of the base has, and say whose change goes to another module."""
    hits = {path: hit.group("number", "leaf") for path in loading.modules if (hit := _IN_LAYER.fullmatch(path))}
    counts = Counter(hits.values())
    own = {hit.group("number", "leaf") for hit in map(_IN_LAYER.fullmatch, parents_of(file.base or ())) if hit}
    for name, (path, *_) in [*loading.used.items()]:
        if path in hits and file.base is not None and hits[path] not in own:
            del loading.used[name]
            loading.ignored[name] = "the base model has no such module"
    for path, place in hits.items():
        if counts[place] > 1 or re.search("visual|vision|audio", path):
            what = "SGLang knows a module by its layer and last name, and gives this one's change to another"
            loading.misreads(path, what, MERGE_HINT)
