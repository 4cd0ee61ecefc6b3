"""What `pipe.load_lora_weights` does with an adapter's names, per model family.

Source: diffusers 0.42, loaders/lora_pipeline.py (the families' mixins), lora_conversion_utils.py, peft.py,
utils/peft_utils.py; and what these were seen to do (tests/adapters/test_check.py runs them).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping

from ckpt_tools.adapters.adapter import Shape
from ckpt_tools.adapters.architectures import ARCHITECTURES
from ckpt_tools.adapters.architectures.architecture import Architecture, KeyConversion, ModelPart
from ckpt_tools.adapters.architectures.names import ModulePlace, find, find_as, lines_of
from ckpt_tools.adapters.base.model import parents_of
from ckpt_tools.adapters.ecosystems.loader_report import AdapterFile, Loading, RejectedError
from ckpt_tools.adapters.ecosystems.peft.config_rules import Config, expected, is_target, rank_of
from ckpt_tools.adapters.ecosystems.peft.files import ROOT
from ckpt_tools.adapters.families import FAMILIES
from ckpt_tools.adapters.read.assemble import parse_key
from ckpt_tools.adapters.read.sidecars import DIFFUSERS_FILE, DIFFUSERS_KEY, DIFFUSERS_TRAPS

_OLD_UNET = (
    (".to_out_lora.up", ".to_out.0.lora_B"),
    (".to_out_lora.down", ".to_out.0.lora_A"),
    *((f".to_{x}_lora.{old}", f".to_{x}.lora_{new}") for x in "qkv" for old, new in (("down", "A"), ("up", "B"))),
    (".lora.up", ".lora_B"),
    (".lora.down", ".lora_A"),
)
_FLUX1_BLOCKS = {"double_blocks": 19, "single_blocks": 38}
_ENDS = (".lora_A.weight", ".lora_B.weight", ".lora_B.bias", ".lora_magnitude_vector")

COMPONENTS = ("transformer", "unet", "text_encoder", "text_encoder_2", "text_encoder_3")  # Models of a pipeline

Keys = dict[str, str]  # Name after a conversion → name in the file


def load(file: AdapterFile, loading: Loading) -> None:
    """Apply diffusers' rules; raise RejectedError where it raises."""
    _check_file(file)
    if file.architecture is None:
        _load_for_any(file, loading)
        return
    if file.architecture == "llm":
        raise RejectedError("it has no loader for language models")
    architecture = ARCHITECTURES[file.architecture]
    keys = {name: name for name in file.tensors}
    for name in [name for name in keys if "dora_scale" in name]:
        loading.ignored[name] = "dora_scale is dropped, so a DoRA loses its magnitude"
        del keys[name]
    _READERS[architecture.reader](keys, file, architecture, loading)


def _check_file(file: AdapterFile) -> None:
    if file.is_named:
        return
    everything = (file.file, *file.siblings)
    allowed = [name for name in everything if not any(trap in name for trap in DIFFUSERS_TRAPS)]
    if not allowed:
        raise RejectedError(f"it ignores files with {', '.join(DIFFUSERS_TRAPS)} in their names; no other is there")
    if file.file not in allowed and DIFFUSERS_FILE not in allowed:
        raise RejectedError(f"it ignores {file.file!r} and loads {allowed[0]!r} instead")


def _flux1(keys: Keys, file: AdapterFile, architecture: Architecture, loading: Loading) -> None:
    if any(".lora_down.weight" in key for key in keys):
        keys = _flux1_kohya(keys, architecture, loading)
    elif any("processor" in key for key in keys):
        keys = _flux1_xlabs(keys, architecture)
    elif any("query_norm.scale" in key for key in keys):
        loading.unchecked(file.file, "BFL's own format is not simulated")
        return
    elif any("base_model" in key for key in keys):
        keys = _flux1_named(keys, architecture, ROOT)
    else:
        keys = _without_alphas(keys, file)
        loading.spreads_alphas = True
    if not any("lora" in key for key in keys):
        raise RejectedError("no name contains 'lora'")
    _inject(keys, architecture, file, loading)


def _without_alphas(keys: Keys, file: AdapterFile) -> Keys:
    alphas = [key for key in keys if "alpha" in key]
    for key in alphas:
        if not file.tensors[keys[key]].dtype.name.startswith(("F", "BF")):
            raise RejectedError(f"{key} is not a floating-point number")
    if alphas and own_metadata(file, ""):
        raise RejectedError("it has alphas as tensors and lora_adapter_metadata in its header")
    return {key: name for key, name in keys.items() if key not in alphas} | {f"\0{key}": keys[key] for key in alphas}


def _flux1_kohya(keys: Keys, architecture: Architecture, loading: Loading) -> Keys:
    if any(key.startswith("transformer.") for key in keys):
        kept = {key: name for key, name in keys.items() if key.startswith("transformer.")}
        return {
            key.replace("lora_down.weight", "lora_A.weight").replace("lora_up.weight", "lora_B.weight"): name
            for key, name in kept.items()
        }
    if any(key.startswith("lora_transformer_") for key in keys):
        kept = {key: name for key, name in keys.items() if not key.startswith("lora_unet_")}
        return _flux1_named(kept, architecture, "lora_transformer_")
    found: Keys = {}
    for key, name in keys.items():
        flat = key.replace("diffusion_model.", "lora_unet_").replace("text_encoders.clip_l.transformer.", "lora_te_")
        module, suffix = cut(flat)
        if not flat.startswith(("lora_unet_", "lora_te_", "lora_te1_")) or "text_projection" in flat:
            continue
        if ".diff" in flat or "position_embedding" in flat:
            loading.ignored[name] = "full differences are filtered out"
            continue
        module = module.replace(".", "_")
        part = architecture.parts[0 if module.startswith("lora_unet_") else 1]
        inner = re.sub(r"^lora_(?:unet|te1?)_", "", module)
        place = _native(part, inner)
        if place is None or suffix not in ("lora_down.weight", "lora_up.weight", "alpha"):
            raise RejectedError(f"incompatible key {key}")
        if part.is_encoder:
            found |= _spread(place, suffix, name)
            continue
        container = place.native.split(".")[0]
        number = next(iter(place.numbers), 0)
        if container not in _FLUX1_BLOCKS:
            loading.ignored[name] = "outside the blocks its conversion drops the prefix that its loader requires"
        elif number >= _FLUX1_BLOCKS[container]:
            raise RejectedError(f"incompatible key {key}: block {number} of {_FLUX1_BLOCKS[container]}")
        else:
            found |= _spread(place, suffix, name)
    return found


def _flux1_xlabs(keys: Keys, architecture: Architecture) -> Keys:
    found: Keys = {}
    for key, name in keys.items():
        hit = parse_key(key)
        path = "" if hit is None else hit.path
        place = find_as(path.replace("linear1_qkv", "linear1"), architecture.main, "native")
        if hit is None or place is None:
            found[key] = name
            continue
        parts = _spread(place, f"lora_{hit.role}.weight", name)
        found |= dict(list(parts.items())[:3]) if path.endswith("linear1_qkv") else parts
    return found


def _flux1_named(keys: Keys, architecture: Architecture, start: str) -> Keys:
    """Convert names of fal and OneTrainer, of which the family's table has the rules."""
    conversion = next((each for each in architecture.conversions if re.search(each.when, start)), None)
    if conversion is None:
        raise RejectedError(f"it takes names with {start} for those of FLUX.1")
    encoder = {key: name for key, name in keys.items() if key.startswith("lora_te1_")}
    found = convert(conversion, {key: name for key, name in keys.items() if key not in encoder}, architecture.main)
    for key, name in encoder.items():
        module, suffix = cut(key)
        place = _native(architecture.parts[1], module.removeprefix("lora_te1_"))
        found |= _spread(place, suffix, name) if place is not None else {}
    return found


def _flux2(keys: Keys, file: AdapterFile, architecture: Architecture, loading: Loading) -> None:
    part = architecture.main
    if any(".lora_down.weight" in key for key in keys):
        keys = _flux2_kohya(keys, part)
    else:
        keys = {key.replace("base_model.model.", "diffusion_model."): name for key, name in keys.items()}
        is_native = any(key.startswith("diffusion_model.") for key in keys)
        if any(".lokr_" in key for key in keys):
            _lokr(keys, architecture, loading)
            return
        if is_native:
            keys = _flux2_native(keys, part, loading)
    wrong = next((key for key in keys if "lora" not in key and "lokr" not in key and key[0] != "\0"), None)
    if wrong is not None:
        raise RejectedError(f"{wrong} is neither LoRA nor LoKr")
    _inject(keys, architecture, file, loading)


def _flux2_kohya(keys: Keys, part: ModelPart) -> Keys:
    outside = {"img_in", "txt_in", "time_in.in_layer", "time_in.out_layer", "final_layer.linear"}
    found: Keys = {}
    for key, name in keys.items():
        module, suffix = cut(key)
        place = _native(part, module.removeprefix("lora_unet_")) if module.startswith("lora_unet_") else None
        if place is not None and ("_blocks" in place.native or place.native in outside):
            found |= _spread(place, suffix, name)
    return found


def _flux2_native(keys: Keys, part: ModelPart, loading: Loading) -> Keys:
    found: Keys = {}
    for key, name in keys.items():
        inner = key.removeprefix("diffusion_model.").replace("lora_down", "lora_A").replace("lora_up", "lora_B")
        module, suffix = cut(inner)
        if inner.startswith(("single_transformer_blocks.", "transformer_blocks.", "sformer_blocks.")):
            inner = inner.replace("sformer_blocks.", "transformer_blocks.", 1) if inner.startswith("sf") else inner
            found[f"transformer.{inner}"] = name
            continue
        place = _native(part, module)
        if place is None or suffix not in ("lora_A.weight", "lora_B.weight"):
            raise RejectedError(f"it does not know {key}")
        if place.is_swapped:
            what = f"diffusers copies {key} without swapping its halves, so scale and shift are exchanged"
            loading.misreads(name, what, "swap them with ckpt export-lora SRC DST --to diffusers")
        found |= _spread(place, suffix, name)
    return found


def _lokr(keys: Keys, architecture: Architecture, loading: Loading) -> None:
    prefixes: tuple[str, ...] = ("diffusion_model.", "transformer.", "lycoris_", "")
    of_lycoris = [key.startswith("lycoris_") for key in keys]
    if architecture.reader is None:  # without rules of its own: all names are converted, or none
        is_converted = any(key.startswith("diffusion_model.") or key.endswith(".alpha") for key in keys)
        prefixes = ("diffusion_model.", "") if is_converted else ("transformer.",)
    elif any(of_lycoris) and not all(of_lycoris):
        raise RejectedError(f"{list(keys)[of_lycoris.index(False)]} is not a LyCORIS name, but other keys are")
    for key, name in keys.items():
        module, suffix = cut(key)
        if suffix == "alpha" or suffix.startswith("lokr_"):
            for prefix in prefixes:
                inner = module.removeprefix(prefix)
                place = find_as(inner, architecture.main, *architecture.lokr) if module.startswith(prefix) else None
                if place is not None:
                    loading.use(name, f"transformer.{place.diffusers[place.at or 0]}")
                    break
        else:
            raise RejectedError(f"{key} is not LoKr")
    if any("lokr_t2" in key for key in keys):
        raise RejectedError("it does not support lokr_t2")
    if not loading.used:
        loading.ignored |= dict.fromkeys(keys.values(), "no module has that name")


def _converted(keys: Keys, file: AdapterFile, architecture: Architecture, loading: Loading) -> None:
    """Apply the conversion of the family that the names ask for, if any."""
    if architecture.lokr and any(".lokr_" in key for key in keys):
        _lokr(keys, architecture, loading)
        return
    conversion = next((each for each in architecture.conversions if each.applies(keys)), None)
    if conversion is not None:
        keys = convert(conversion, keys, architecture.main)
    elif file.base_class in architecture.classes and _applies_to_any(file):
        _load_for_any(file, loading)
        return
    _all_lora([key for key in keys if not key.startswith("\0")])
    _inject(keys, architecture, file, loading)


def convert(conversion: KeyConversion, keys: Keys, part: ModelPart) -> Keys:
    """Rename what a conversion renames; raise RejectedError where it raises. A NUL in front marks alphas."""
    found: Keys = {}
    natives: set[str] = set()
    alphas: set[str] = set()
    if conversion.strips:
        keys = {key.replace(conversion.strips, ""): name for key, name in keys.items()}
    for key, name in keys.items():
        prefix = next((each for each in conversion.prefixes if key.startswith(each)), None)
        inner = key.removeprefix(prefix or "")
        module, suffix = cut(inner)
        if re.fullmatch(conversion.ignores, inner):
            continue
        if prefix is None or not re.fullmatch(conversion.suffixes, suffix) or re.fullmatch(conversion.refuses, inner):
            raise RejectedError(f"it cannot convert {key}")
        place = find_as(module, part, *conversion.spellings)
        path = "" if place is None else place.found
        is_known = module == (path.replace(".", "_") if prefix.endswith("_") else path)
        is_lacking = any(re.fullmatch(conversion.lacks, each) for each in (path, f"{path}.{suffix}"))
        if place is not None and is_known and not is_lacking:
            found |= _spread(place, suffix, name)
            natives.add(place.native)
            alphas |= {place.native} if suffix == "alpha" else set()
        elif conversion.others == "raise":
            raise RejectedError(f"it cannot convert {key}")
        elif suffix != "alpha" and conversion.others == "keep":
            found[f"{part.component}.{inner}"] = name
    if (reason := conversion.why_not(natives)) is not None:
        raise RejectedError(reason)
    if conversion.needs_alpha and (lacking := natives - alphas):
        raise RejectedError(f"it looks up {min(lacking)}.alpha, which is missing")
    if conversion.needs_blocks:
        _check_blocks(natives, part, conversion.optional)
    return found


def _check_blocks(natives: Collection[str], part: ModelPart, optional: str) -> None:
    """Raise where a block is not adapted as a whole, or one before it is not adapted at all."""
    numbers: dict[str, set[str]] = {}
    for block, number, _ in (path.split(".", 2) for path in natives if path.count(".") > 1):
        numbers.setdefault(block, set()).add(number)
    for block, found in numbers.items():
        every = [line.spellings[0].names[0] for line in lines_of(part.sections)]
        own = [path for path in every if path.startswith(f"{block}.*.")]
        used = {re.sub(r"\.\d+\.", ".*.", path, count=1) for path in natives}
        own = [path for path in own if path in used or not re.fullmatch(optional, path)]
        for path in (each.replace("*", str(number)) for number in range(len(found)) for each in own):
            if path not in natives:
                raise RejectedError(f"it looks up {path}, which has no adapter")


def _ldm(keys: Keys, file: AdapterFile, architecture: Architecture, loading: Loading) -> None:
    if all(key.startswith(("lora_te_", "lora_unet_", "lora_te1_", "lora_te2_")) for key in keys):
        keys = _ldm_kohya(keys, architecture)
        loading.spreads_alphas = True
        if own_metadata(file, "") and any(key.startswith("\0") for key in keys):
            raise RejectedError("it has alphas as tensors and lora_adapter_metadata in its header")
    else:
        _all_lora(keys)
    _inject(keys, architecture, file, loading)


def _ldm_kohya(keys: Keys, architecture: Architecture) -> Keys:
    found: Keys = {}
    (conversion,) = architecture.conversions
    encoders = {part.component: part for part in architecture.parts if part.is_encoder}
    for key, name in keys.items():
        module, suffix = cut(key)
        if suffix not in ("lora_down.weight", "lora_up.weight", "alpha"):
            raise RejectedError(f"it cannot rename {key}")
        if not {f"{module}.lora_down.weight", f"{module}.lora_up.weight"} <= keys.keys():
            raise RejectedError(f"{module} has no pair of lora_down and lora_up")
        if module.startswith("lora_unet_"):
            place = find_as(module.removeprefix("lora_unet_"), architecture.main, *conversion.spellings)
        else:
            part = encoders.get("text_encoder_2" if module.startswith("lora_te2_") else "text_encoder")
            inner = re.sub("^lora_te[12]?_", "", module)
            place = None if part is None else _native(part, inner)
        if place is None or re.fullmatch(conversion.lacks, place.found):
            continue
        for new, old in _spread(place, suffix, name).items():
            module, _, side = new.partition(".lora_")
            if (
                place.part.is_encoder and ".mlp." in new and side
            ):  # so diffusers recognises an adapter of the MLPs alone
                found[f"{module}.lora_linear_layer.{'down' if side.startswith('A') else 'up'}.weight"] = old
            else:
                found[new] = old
    return found


def _all_lora(keys: Iterable[str]) -> None:
    if (wrong := next((key for key in keys if "lora" not in key), None)) is not None:
        raise RejectedError(f"{wrong} does not contain 'lora'")


def _native(part: ModelPart, name: str) -> ModulePlace | None:
    """Read a native path, dotted or with underscores."""
    return next(find(name, part), None) if part.is_encoder else find_as(name, part, "native")


def _spread(place: ModulePlace, suffix: str, name: str) -> Keys:
    """Name what a tensor becomes: one of several modules where the native one is fused."""
    ends = {"lora_down.weight": "lora_A.weight", "lora_up.weight": "lora_B.weight", "diff_b": "lora_B.bias"}
    paths = place.diffusers if place.at is None else (place.diffusers[place.at],)
    prefix = f"{place.part.component}."
    if suffix == "alpha":
        return {f"\0{prefix}{paths[0]}": name}
    return {f"{prefix}{path}.{ends.get(suffix, suffix)}": name for path in paths}


def cut(key: str) -> tuple[str, str]:
    """Split a name into module and suffix."""
    match = re.search(r"\.(?:lora_\w+(?:\.\w+)?|lokr_\w+|hada_\w+|alpha|diff(?:_b)?|dora_scale|\w+_blocks)$", key)
    return (key, "") if match is None else (key[: match.start()], key[match.start() + 1 :])


def _inject(keys: Keys, architecture: Architecture, file: AdapterFile, loading: Loading) -> None:
    """Put what has a component's prefix into the component; a NUL in front marks alphas, which were understood."""
    by_component: dict[str, Keys] = {}
    alphas: dict[str, str] = {}
    for key, name in keys.items():
        if key.startswith("\0"):
            alphas[key[1:]] = name
            continue
        for part in architecture.parts:
            if part.is_in_diffusers and key.startswith(f"{part.component}."):
                by_component.setdefault(part.component, {})[key[len(part.component) + 1 :]] = name
    for part in architecture.parts:
        if inside := by_component.get(part.component):
            _inject_one(inside, part, file, loading)
            if own_metadata(file, f"{part.component}.") == {}:
                what = f"its header has no configuration of {part.component}: PEFT's defaults (rank 8) are used"
                raise RejectedError(what)
    modules = set(loading.modules)
    loading.used |= {
        name: (module,) for key, name in alphas.items() if (module := key.removesuffix(".alpha")) in modules
    }


def _inject_one(keys: Keys, part: ModelPart, file: AdapterFile, loading: Loading) -> None:
    if part.is_encoder:
        keys = _encoder_names(keys, part)
    elif "lora_A" not in next(iter(keys)):
        keys = {_renamed(key): name for key, name in keys.items()}
    if not any("lora_B" in key for key in keys):
        raise RejectedError(f"it finds no rank among the names of {part.component}")
    for key, name in keys.items():
        end = next((each for each in _ENDS if key.endswith(each)), "")
        path = key.removesuffix(end)
        found = find(path, part) if end else ()
        if any(part.is_encoder or (each.is_spelled("diffusers") and each.found == path) for each in found):
            loading.use(name, f"{part.component}.{path}")
            _check_rank(path, end, file, name, part)
    if not any(name in loading.used for name in keys.values()):
        raise RejectedError(f"none of its names is a module of {part.component}")


def _check_rank(path: str, end: str, file: AdapterFile, name: str, part: ModelPart) -> None:
    config, rank = own_metadata(file, f"{part.component}."), file.tensors[name].shape[:1]
    if end == ".lora_A.weight" and config and rank != (rank_of(config, path),):
        raise RejectedError(f"size mismatch: {name} has rank {rank[0]}, its header says {rank_of(config, path)}")


def _renamed(key: str) -> str:
    key = key.replace(".processor.", ".")
    for old, new in _OLD_UNET:
        if old in key:
            return key.replace(old, new)
    return key


def _encoder_names(keys: Keys, part: ModelPart) -> Keys:
    """Diffusers recognises a text encoder's names by those of its attention, or by its own suffix."""
    is_peft = any(".lora_A.weight" in key for key in keys)
    has_own = any("lora_linear_layer" in key for key in keys)
    has_attention = is_peft and any(f".{x}_proj.lora_" in key for key in keys for x in ("q", "k", "v", "out"))
    if not (has_own or has_attention):
        raise RejectedError(f"an adapter of only the MLPs of {part.component}, under PEFT's names, is not recognised")
    for old, new in ((".lora_linear_layer.down", ".lora_A"), (".lora_linear_layer.up", ".lora_B")):
        keys = {key.replace(old, new): name for key, name in keys.items()}
    return keys


_READERS: Mapping[str | None, Callable[[Keys, AdapterFile, Architecture, Loading], None]] = {
    None: _converted,
    "flux1": _flux1,
    "flux2": _flux2,
    "ldm": _ldm,
}


# What `load_lora_adapter` of any diffusers model does: adapters of families without tables, compared with the base.
#
# Source: diffusers 0.42, loaders/peft.py (`PeftAdapterMixin.load_lora_adapter`), loaders/lora_pipeline.py
# (`lora_state_dict` of the mixins: what is not under diffusers' own names is converted first, by rules of each family).

FOREIGN = ("diffusion_model.", "model.diffusion_model.", "lora_unet_", "lora_transformer_", "lora_te", "lycoris_")
"""Beginnings that the pipelines' converters look for."""
_ENCODER = re.compile(r"text_encoder(?:_\d)?\.")
_KEY = re.compile(
    r"(?P<module>.+)\.(?:lora_(?P<side>[AB])\.weight|lora_B\.(?P<bias>bias)|lora_(?P<magnitude>magnitude)_vector)"
)


def _applies_to_any(file: AdapterFile) -> bool:
    """Are the base's modules known, and the names such as no pipeline converts?"""
    is_foreign = any(name.startswith(FOREIGN) or name.endswith(".alpha") for name in file.tensors)
    return file.base is not None and not is_foreign


def _load_for_any(file: AdapterFile, loading: Loading) -> None:
    """Apply the rules that all models share; raise RejectedError where diffusers raises."""
    if not _applies_to_any(file):
        what = "diffusers' conversions differ by model family, and ckpt has no tables for this one"
        loading.unchecked(file.file, what, "give the base model with --base")
        return
    wrong = next((name for name in file.tensors if "lora" not in name), None)
    if wrong is not None:
        raise RejectedError(f"{wrong} does not contain 'lora'")
    component = component_of(file)
    inside = {name.removeprefix(component): name for name in file.tensors if name.startswith(component)}
    for name in file.tensors:
        if _ENCODER.match(name):
            loading.use(name, name.rpartition(".lora")[0])
            what = "modules of a text encoder, which the base model does not contain"
            loading.needs_base(name, what)
        elif not name.startswith(component):
            loading.ignored[name] = f"the name does not begin with {component}"
    _load_inside(inside, file, own_metadata(file, component), loading)


def component_of(file: AdapterFile) -> str:
    """Return what diffusers puts in front of the model's names."""
    if file.base_class is not None:
        return "unet." if file.base_class.startswith("UNet") else "transformer."
    return "unet." if any(name.startswith("unet.") for name in file.tensors) else "transformer."


def own_metadata(file: AdapterFile, component: str) -> Config | None:
    """Return the configuration of one model in the file's header; None where there is no header."""
    try:
        document = json.loads(file.metadata.get(DIFFUSERS_KEY, "{}"))
    except (ValueError, RecursionError):
        raise RejectedError("its lora_adapter_metadata is not JSON") from None
    if not isinstance(document, dict):
        raise RejectedError("its lora_adapter_metadata is not a JSON object")
    return {k.removeprefix(component): v for k, v in document.items() if k.startswith(component)} if document else None


def _load_inside(keys: Mapping[str, str], file: AdapterFile, config: Config | None, loading: Loading) -> None:
    base = file.base or {}
    modules = parents_of(base)
    if keys and not any(".lora_B." in key for key in keys):
        raise RejectedError("it finds no rank: there is no lora_B")
    if keys and config is not None and not config:
        raise RejectedError("its header has no configuration of this model: PEFT's defaults (rank 8) are used")
    found: dict[str, dict[str, Shape]] = {}
    for key, name in keys.items():
        hit = _KEY.fullmatch(key)
        if hit is None or hit["module"] not in modules:
            loading.ignored[name] = "the base model has no such module" if hit else "the suffix is not diffusers'"
            continue
        loading.use(name, hit["module"])
        role = hit["side"] or ("B_bias" if hit["bias"] else "magnitude")
        found.setdefault(hit["module"], {})[role] = file.tensors[name].shape
    is_dora = any("magnitude" in factors for factors in found.values())
    has_bias = any("B_bias" in factors for factors in found.values())
    for path, factors in found.items():
        own: Config = {"r": factors.get("B", (0, 0))[-1 if len(factors.get("B", ())) < 2 else 1]}
        settings = {**(own if config is None else config), "use_dora": is_dora, "lora_bias": has_bias}
        _check(path, factors, settings, base, loading)
    if config is not None:
        loading.say_scale("lora_alpha", config.get("lora_alpha"))
        missing = sorted(m for m in modules if f"{m}.weight" in base and m not in found and is_target(config, m))
        if missing and found:
            what = f"the header's target_modules name {len(missing)} modules that the file has no tensors for"
            loading.incomplete(missing[0], what, "was the adapter saved completely?")


def _check(
    path: str, factors: Mapping[str, Shape], config: Config, base: Mapping[str, Shape], loading: Loading
) -> None:
    weight = base.get(f"{path}.weight")
    if weight is None:
        raise RejectedError(f"{path} has no weight that PEFT could adapt")
    rank_of(config, path)
    ways = [way for way in expected(FAMILIES["lora"], config, path, weight) if "A" in way and "B" in way]
    for way in ways[:1]:  # of a Linear or a convolution: diffusers' models have no other order of dims
        for role, shape in factors.items():
            right = way.get(role)
            if right is not None and right != shape:
                raise RejectedError(f"size mismatch: {role} of {path} is {list(shape)}, the model's is {list(right)}")
        if len(weight) > 2:
            _check_kernel(path, factors, weight)
        lacking = sorted(way.keys() - factors.keys())
        if lacking:
            what = f"the file lacks {', '.join(lacking)} of a module: it is initialised instead"
            loading.incomplete(path, what, "was the adapter saved completely?")


def _check_kernel(path: str, factors: Mapping[str, Shape], weight: Shape) -> None:
    """Hold the factors of an ungrouped convolution against its kernel."""
    down, up = factors.get("A"), factors.get("B")
    if down is not None and down[1:] != weight[1:]:
        raise RejectedError(f"size mismatch: A of {path} is {list(down)}, the weight's is {list(weight)}")
    if up is not None and up[0] != weight[0]:
        raise RejectedError(f"size mismatch: B of {path} is {list(up)}, the weight's is {list(weight)}")
