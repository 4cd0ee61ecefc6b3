"""Plain LoRA for llama.cpp (GGUF) and mlx-lm, and what these make of a file.

Source: llama.cpp, convert_lora_to_gguf.py and src/llama-adapter.cpp, November 2026: one alpha for all, divided by the
columns of each lora_b. mlx-lm 0.32, tuner/{utils,lora,dora}.py: one scale and one rank for all, layers counted from the
last. It refuses tensors that it has no place for (older versions leave them out), and misses none.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import replace

from ckpt_tools.adapters.adapter import Adapter
from ckpt_tools.adapters.base.gguf_names import architecture_of, names_of, patterns_of, row_order
from ckpt_tools.adapters.base.model import BaseModel, parents_of
from ckpt_tools.adapters.ecosystems.loader_report import AdapterFile, Loading, RejectedError
from ckpt_tools.adapters.ecosystems.output import Written, file_name
from ckpt_tools.adapters.ecosystems.place_modules import Fitting
from ckpt_tools.adapters.families import family_of
from ckpt_tools.adapters.families.family import MERGE_HINT, Module, refuse
from ckpt_tools.adapters.integrity import NUMBER
from ckpt_tools.adapters.read.sidecars import ADAPTER_CONFIG, MLX_FILE
from ckpt_tools.checkpoint.formats.gguf import ALPHA
from ckpt_tools.errors import UnsupportedError, UsageError
from ckpt_tools.transfer.arrays import Array

_MODULES = "ckpt_modules"  # In the header: how many an export wrote, which may be fewer than mlx-lm itself adapts
_LAYER = re.compile(r"(?P<list>.*\blayers)\.(?P<number>\d+)\.(?P<key>.+)")
_ENDS = ("model.embed_tokens", "lm_head")


def _pairs(adapter: Adapter[Array], base: BaseModel | None, who: str, *, takes_dora: bool) -> Iterator[Module]:
    """Yield every module with factors A and B of two dims; raise InexpressibleError for what the target has not."""
    for module in adapter.modules:
        lacking = module.factors.keys() - {"A", "B", "A_embedding", "B_embedding", *(["magnitude"] * takes_dora)}
        is_embedding = "A_embedding" in module.factors
        if lacking or module.is_saved or module.parameter != "weight":
            raise refuse(module, f"{who} has no place for {', '.join(sorted(lacking)) or module.target}", MERGE_HINT)
        if is_embedding and module.is_dora:
            raise refuse(module, f"{who} divides an embedding's DoRA by other norms than PEFT", MERGE_HINT)
        if module.path in _ENDS and (base is None or base.config.get("tie_word_embeddings", True)):
            why = "the base ties its head to the embedding" if base else "whether the base ties its head is not known"
            raise refuse(module, f"{why}: {who} would change both, or none", MERGE_HINT if base else "give --base DIR")
        factors = {role.removesuffix("_embedding"): factor for role, factor in module.factors.items()}
        if any(factors[role].ndim != 2 for role in ("A", "B")):
            raise refuse(module, f"{who} has factors of matrices alone", MERGE_HINT)
        yield replace(module, factors=factors, family="lora")


def to_gguf(adapter: Adapter[Array], base: BaseModel | None) -> Written:
    """Write llama.cpp's names, the rows in its order, and one alpha; what other scales need is multiplied into B."""
    if base is None or not base.config:
        what = "llama.cpp's names, and the order of rows, depend on the base's config.json"
        raise UsageError(what, where="--base", hint="give the base model: --base DIR")
    import numpy as np

    modules = list(_pairs(adapter, base, "llama.cpp", takes_dora=False))
    alpha = float(np.float32(_most_common(family_of(each).scale(each) * _rank(each) for each in modules)))
    fitting, tensors = Fitting(), {}
    weights = (f"{module.path}.weight" for module in modules)
    places = {hub: (name, steps) for hub, name, steps in names_of(weights, base.config)}
    for module in modules:
        if f"{module.path}.weight" not in places:
            kind = architecture_of(base.config)
            raise refuse(module, f"ckpt's map of llama.cpp's {kind} has no such weight", MERGE_HINT)
        name, steps = places[f"{module.path}.weight"]
        down, up = _baked(fitting, module, alpha / _rank(module))
        order = row_order(steps, up.shape[0], base.config)
        tensors[f"{name}.lora_a"] = down.T if module.path == _ENDS[0] else down
        tensors[f"{name}.lora_b"] = up if order is None else up[order]
    metadata = {"general.architecture": architecture_of(base.config), "general.type": "adapter"}
    metadata |= {"adapter.type": "lora", ALPHA: repr(alpha)}
    file = file_name(adapter.name).replace(".safetensors", ".gguf")
    return fitting.written(file, {name: np.ascontiguousarray(each) for name, each in tensors.items()}, metadata)


def to_mlx(adapter: Adapter[Array], base: BaseModel | None) -> Written:
    """Write mlx-lm's directory: transposed factors, one scale, and one rank by padding with zeros."""
    import numpy as np

    modules = list(_pairs(adapter, base, "mlx-lm", takes_dora=True))
    if 0 < sum(module.is_dora for module in modules) < len(modules):
        raise refuse(modules[0], "mlx-lm has DoRA for all modules or for none", MERGE_HINT)
    scale, rank = _most_common(family_of(each).scale(each) for each in modules), max(map(_rank, modules))
    fitting, tensors = Fitting(), {}
    for module in modules:
        down, up = _baked(fitting, module, scale)
        if missing := rank - _rank(module):
            fitting.count(f"padded with zeros to rank {rank}, mlx-lm's one for all modules")
        tensors[f"{module.path}.lora_a"] = np.pad(down, ((0, missing), (0, 0))).T
        tensors[f"{module.path}.lora_b"] = np.pad(up, ((0, 0), (0, missing))).T
        if module.is_dora:
            tensors[f"{module.path}.m"] = fitting.magnitude_by_row(module)
    hits = [_LAYER.fullmatch(module.path) for module in modules]
    depth = base.config.get("num_hidden_layers") if base is not None else None
    first = min((int(hit["number"]) for hit in hits if hit), default=0)
    config = {
        "fine_tune_type": "dora" if modules[0].is_dora else "lora",
        "num_layers": depth - first if isinstance(depth, int) and depth > first else -1,
        "lora_parameters": {
            "rank": rank,
            "scale": scale,
            "dropout": 0.0,
            "keys": sorted({hit["key"] if hit else module.path for hit, module in zip(hits, modules, strict=True)}),
        },
    }
    if base is None:
        fitting.note(
            "names were not compared with a model: pass --base DIR; mlx-lm refuses names that it does not have"
        )
    metadata = {"format": "mlx", _MODULES: str(len(modules))}
    written = fitting.written(MLX_FILE, {n: np.ascontiguousarray(t) for n, t in tensors.items()}, metadata)
    return replace(written, documents={ADAPTER_CONFIG: json.dumps(config, indent=2).encode()})


def _rank(module: Module) -> int:
    return int(module.factors["A"].shape[0])


def _most_common(values: Iterator[float]) -> float:
    return Counter(value for value in values if value).most_common(1)[0][0]


def _baked(fitting: Fitting, module: Module, scale: float) -> tuple[Array, Array]:
    factors = fitting.baked(module, scale).factors
    return factors["A"], factors["B"]


def load_in_llama_cpp(file: AdapterFile, loading: Loading) -> None:
    """Apply llama.cpp's rules; raise RejectedError where it throws."""
    if not file.file.endswith(".gguf"):
        raise RejectedError("it reads GGUF adapters alone")
    for key, wanted in (("general.type", "adapter"), ("adapter.type", "lora")):
        if file.metadata.get(key) != wanted:
            raise RejectedError(f"{key} must be {wanted!r}, got {file.metadata.get(key, '')!r}")
    weights = _weights_of(file, loading)
    pairs: dict[str, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for name, entry in file.tensors.items():
        stem, _, end = name.rpartition(".")
        if end in ("lora_a", "lora_b"):
            pairs[stem][end] = entry.shape
            loading.use(name, stem)
        elif name.endswith("_norm.weight"):
            loading.ignored[name] = "llama.cpp leaves out norms without a word"
        else:
            raise RejectedError(f"{name} has an unexpected suffix")
    for stem, sides in pairs.items():
        if len(sides) < 2:
            raise RejectedError(f"the pair of {stem} is missing one half")
        if weights is not None and stem not in weights:
            _judge_foreign(stem, file, loading)
            continue
        down, up = sides["lora_a"], sides["lora_b"]
        down = down[::-1] if stem == "token_embd.weight" else down
        if len(down) != 2 or len(up) != 2 or down[0] != up[1]:
            raise RejectedError(f"lora_a and lora_b of {stem} do not fit each other")
        shape = (down[1], up[0]) if stem == "token_embd.weight" else (up[0], down[1])
        if weights is not None and weights[stem] not in ((), shape):
            raise RejectedError(f"the factors of {stem} are for {list(shape)}, the base has {list(weights[stem])}")


def _weights_of(file: AdapterFile, loading: Loading) -> dict[str, tuple[int, ...]] | None:
    """Return the base's weights by llama.cpp's names; None without a base."""
    own, config = file.metadata.get("general.architecture", ""), file.base_config
    if file.base is None or not config:
        loading.needs_base(file.file, "llama.cpp refuses names, shapes and architectures that are not the base's")
        return None
    try:
        theirs = architecture_of(config)
    except UnsupportedError as error:
        loading.unchecked(file.file, error.what)
        return None
    if own != theirs:
        raise RejectedError(f"the adapter is for {own!r}, the base is {theirs!r}")
    weights = {place: file.base[hub] for hub, place, _ in names_of(file.base, config)}
    if config.get("tie_word_embeddings"):
        weights.pop("output.weight", None)
    return weights


def _judge_foreign(stem: str, file: AdapterFile, loading: Loading) -> None:
    """Judge a weight that the base does not have by the map: the map may lack some of llama.cpp's."""
    if NUMBER.sub("*", stem) in patterns_of(file.base_config):
        raise RejectedError(f"{stem} does not exist in the base")
    loading.unchecked(stem, "ckpt's map of llama.cpp's names does not have it, and llama.cpp may")


def load_in_mlx(file: AdapterFile, loading: Loading) -> None:
    """Apply mlx-lm's rules; raise RejectedError where it raises."""
    if file.file != MLX_FILE or file.config is None:
        raise RejectedError(f"it reads a directory with {MLX_FILE} and {ADAPTER_CONFIG} alone")
    parameters, last = file.config.get("lora_parameters"), file.config.get("num_layers")
    if not isinstance(parameters, dict) or not {"rank", "scale", "dropout"} <= parameters.keys():
        raise RejectedError(f"{ADAPTER_CONFIG} must have lora_parameters with rank, scale and dropout")
    if type(last) is not int:
        raise RejectedError(f"{ADAPTER_CONFIG} must have num_layers, a number")
    loading.say_scale("scale", parameters["scale"])
    keys, is_dora = parameters.get("keys"), file.config.get("fine_tune_type") == "dora"
    depth = file.base_config.get("num_hidden_layers")
    if file.base is None or (last > 0 and not isinstance(depth, int)):
        loading.needs_base(file.file, "mlx-lm refuses names that the model lacks, and counts layers from the last")
    sides: dict[str, set[str]] = defaultdict(set)
    for name, entry in file.tensors.items():
        path, _, end = name.rpartition(".")
        hit, why = _LAYER.fullmatch(path), ""
        if end not in ("lora_a", "lora_b", *(["m"] * is_dora)):
            why = f"{'DoRA' if is_dora else 'LoRA'} has no {end}"
        elif (path if hit is None else hit["key"]) not in (keys or ()) and (keys is not None or hit is None):
            why = "lora_parameters.keys does not name the module"
        elif hit is not None and last > 0 and isinstance(depth, int) and int(hit["number"]) < depth - last:
            why = f"num_layers is {last}, which leaves out the first {depth - last} layers"
        elif file.base is not None and f"{path}.weight" not in file.base:
            why = "the base has no such module"
        elif end != "m" and parameters["rank"] != entry.shape[-1 if end == "lora_a" else 0]:
            why = f"its shape is {list(entry.shape)}, the rank in {ADAPTER_CONFIG} is {parameters['rank']!r:.20}"
        if why:
            raise RejectedError(f"{name} has no place: {why}")
        loading.use(name, path)
        sides[path].add(end)
    wanted = {"lora_a", "lora_b", *(["m"] * is_dora)}
    for path, found in sides.items():
        if found != wanted:
            loading.incomplete(path, f"mlx-lm loads it without {', '.join(sorted(wanted - found))}, without a word")
    first = depth - last if last > 0 and isinstance(depth, int) else 0
    _compare_number(file, loading, sides.keys(), keys, first)


def _compare_number(file: AdapterFile, loading: Loading, paths: Collection[str], keys: object, first: int) -> None:
    """Say what is missing of the modules that an export counted, or of those that mlx-lm adapts from layer `first`."""
    told = file.metadata.get(_MODULES)
    if told is not None and told != str(len(paths)):
        loading.incomplete(file.file, f"{told} modules were written, and {len(paths)} are here")
    elif told is None and file.base is not None:
        hits = {path: hit for path in parents_of(file.base) if (hit := _LAYER.fullmatch(path))}
        ends = keys if isinstance(keys, list) else {hits[path]["key"] for path in paths if path in hits}
        wanted = {path for path, hit in hits.items() if hit["key"] in ends and int(hit["number"]) >= first}
        if lacking := sorted(wanted.difference(paths)):
            what = f"mlx-lm adapts it and finds no factors: {len(lacking)} modules are not here"
            loading.incomplete(lacking[0], what)
