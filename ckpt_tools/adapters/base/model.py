"""What is known of a base model: its parameters' shapes, and their names on disk and in the live model. Pure.

Adapters have the live model's names: those of the class that config.json names (`maps`), without one of the kinds in
`_RECIPES`. Stacked experts are `slots.stacked_experts`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ckpt_tools.adapters.adapter import Adapter, F, Shapes, Sourced
from ckpt_tools.adapters.architectures.choose import BaseFamily
from ckpt_tools.checkpoint.entries import TensorEntry
from ckpt_tools.checkpoint.names import live_names, load_table, origins_of
from ckpt_tools.errors import UsageError
from ckpt_tools.models.conventions import CONVENTIONS

_LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,6})\.")
_STACK = re.compile(r"((?:model\.)*(?:bert\.)?(?:layers|encoder\.layer)|(?:transformer\.)?h)\.(\d{1,6})\.")
"""The layers that PEFT can replicate."""
_MAX_LAYERS = 10_000
_EXPERT = re.compile(r"\.experts\.\d+\.")
_STACKED = re.compile(r"\.experts\.\w+$")
"""Experts one by one, as many models have them on disk, and stacked, as the live model has them."""
_FRONTS = ("", "diffusion_model.", "model.diffusion_model.", "transformer.", "unet.", "base_model.model.")
"""What the ecosystems put in front of a model's own module paths."""
FLAT = re.compile(r"^(?:lora_(?:unet|transformer|prior_unet|te[12]?)|lycoris|lora)_")
"""What kohya and its relatives put in front of flattened paths."""
_ROOTS = ("model", "transformer", "backbone")
"""Names of the inner model in transformers' classes with a head, beside those called like the model's type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModel:
    """What is known of the base model."""

    shapes: Shapes  # Parameter → shape; by the names on disk until `as_named`
    source: str  # For people: "--base", "the base model in the source"
    task_type: Sourced[object] | None = None  # PEFT's task type, by the architecture in its config.json
    family: BaseFamily
    config: Mapping[str, object] = field(default_factory=dict)

    @property
    def class_name(self) -> str | None:
        """Diffusers' class."""
        return self._text("_class_name")

    @property
    def model_type(self) -> str | None:
        """Transformers' type."""
        return self._text("model_type")

    def _text(self, name: str) -> str | None:
        value = self.config.get(name)
        return value if isinstance(value, str) else None


def parents_of(names: Iterable[str]) -> frozenset[str]:
    """Return the paths of all modules that hold the named parameters, themselves or through others."""
    found: set[str] = set()
    for name in names:
        path = name.rpartition(".")[0]
        while path and path not in found:
            found.add(path)
            path = path.rpartition(".")[0]
    return frozenset(found)


def module_finder(base_names: Collection[str]) -> Callable[[str], str | None]:
    """Return what tells which module of a base a name means, whatever tools put in front of it; None for no one."""
    modules = parents_of(base_names)
    flat: dict[str, str | None] = {}  # By names with underscores; None where two modules have the same
    for module in modules:
        key = module.replace(".", "_")
        flat[key] = None if key in flat else module

    def find(path: str) -> str | None:
        dotted = (path.removeprefix(front) for front in _FRONTS)
        return next((name for name in dotted if name in modules), None) or flat.get(FLAT.sub("", path))

    return find


def base_path(path: str) -> str:
    """Return a module's path in the plain base model: PEFT wraps attention layers whose own parts it adapts as well."""
    return path.replace(".base_layer.", ".")


def refuse_trainers_names(adapter: Adapter[F], *, is_proven: bool) -> None:
    """Refuse to pass on modules of a trainer's own model: a model of transformers has none of them.

    `is_proven`: they are matched with a base that the user names.
    """
    if adapter.convention == "gguf":
        what = "the modules have llama.cpp's names, and the base's config.json tells the order of their rows"
        raise UsageError(what, where=adapter.modules[0].path, hint="give the base model: --base DIR")
    if adapter.convention == "trainer":
        raise UsageError(
            "the adapter has the module names of its trainer's own model (torchtitan, torchtune, Megatron), where rows "
            "may be in a different order",
            where=adapter.modules[0].path,
            hint="give the model that was trained, with its config.json: --base DIR",
        )
    for module in () if is_proven or "peft_type" in adapter.settings else adapter.modules:
        found = next((origin for origin in origins_of([f"{module.path}.weight"]) if origin.code in CONVENTIONS), None)
        if found is not None:
            what = f"the adapter's module names are {found.what}, which transformers models do not use"
            hint = f"export it with {found.code} in transformers' names; if your model has these names, pass --base DIR"
            raise UsageError(what, where=module.path, hint=hint)


_VISION = (
    (r"\.attention\.attention\.query\.", ".attention.q_proj."),
    (r"\.attention\.attention\.key\.", ".attention.k_proj."),
    (r"\.attention\.attention\.value\.", ".attention.v_proj."),
    (r"\.attention\.output\.dense\.", ".attention.o_proj."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"(\d)\.output\.dense\.", r"\1.mlp.fc2."),
)
_RECIPES = tuple(
    tuple((re.compile(pattern), new) for pattern, new in recipe)
    for recipe in (
        ((r"\.block_sparse_moe\.", ".mlp."),),  # Mixtral, MiniMax
        ((r"\.block_sparse_moe\.gate\.", ".mlp.router."),),  # PhiMoE
        (  # GraniteMoE
            (r"\.block_sparse_moe\.router\.layer\.", ".block_sparse_moe.router."),
            (r"\.block_sparse_moe\.input_linear\.weight$", ".block_sparse_moe.experts.gate_up_proj"),
            (r"\.block_sparse_moe\.output_linear\.weight$", ".block_sparse_moe.experts.down_proj"),
        ),
        ((r"\.mlp\.shared_expert\.", ".mlp.shared_experts."),),  # Laguna
        ((r"^embed_out\.", "lm_head."),),  # GPT-NeoX
        ((r"(^|\.)encoder\.layer\.", r"\1layers."), *_VISION),  # ViT, DeiT, BEiT
        _VISION,  # DINOv2
    )
)
"""Replacements that belong together, in their order."""


def names_in_model(names: Iterable[str], config: Mapping[str, object]) -> dict[str, str]:
    """Return name that a parameter may have in a model → name on disk, where the two differ."""
    found: dict[str, str] = {}
    for renamed in renamings(tuple(names), config):
        found = {**renamed, **found}
    return found


def live_tensors(tensors: Mapping[str, TensorEntry], config: Mapping[str, object]) -> dict[str, TensorEntry]:
    """Return a base's tensors by the names on disk, and by those that they have in a model."""
    return {**{new: tensors[old] for new, old in names_in_model(tensors, config).items()}, **tensors}


def renamings(names: Collection[str], config: Mapping[str, object]) -> Iterator[Mapping[str, str]]:
    """Yield, for every kind of model that is saved under other names, name in the model → name on disk.

    Of one model at most one of the kinds is right; the one that the config names comes first.
    """
    if by_class := _by_class(names, config):
        yield by_class
    for recipe in _RECIPES:
        renamed = {}
        for name in names:
            new = name
            for pattern, replacement in recipe:
                new = pattern.sub(replacement, new)
            if new != name:
                renamed[new] = name
        if renamed:
            yield renamed


def _by_class(names: Collection[str], config: Mapping[str, object]) -> Mapping[str, str]:
    """Return what the class in config.json makes of the names on disk; of several tensors it makes one elsewhere."""
    classes = config.get("architectures")
    name = classes[0] if isinstance(classes, list) and classes else None
    expected = load_table().expected(name, config) if isinstance(name, str) else None
    if expected is None:
        return {}
    return {new: old for new, old in live_names(names, expected).items() if new != old}


def without_predictors(shapes: Shapes, config: Mapping[str, object]) -> Shapes:
    """Leave out layers that predict further tokens: checkpoints hold them behind the others, models do not load them.

    Source: transformers, models/deepseek_v3 and models/glm4_moe, `_keys_to_ignore_on_load_unexpected`.
    """
    depth = config.get("num_hidden_layers")
    if not config.get("num_nextn_predict_layers") or not isinstance(depth, int):
        return shapes
    layers = {name: _LAYER.search(name) for name in shapes}
    return {name: shapes[name] for name, layer in layers.items() if layer is None or int(layer[1]) < depth}


def adapted_paths(adapter: Adapter[F]) -> frozenset[str]:
    """Return the paths in the plain base model of what has factors."""
    return frozenset(base_path(module.path) for module in adapter.modules if not module.is_saved)


def as_named(base: BaseModel, paths: Collection[str]) -> BaseModel:
    """Return the base with the names of the live model that an adapter was trained on.

    On disk a model may have other names (older ones; none of a head's inner model, as GPT-2 is published).
    """
    on_disk = base.shapes
    if not any(_EXPERT.search(path) for path in paths) and any(_STACKED.search(name) for name in on_disk):
        on_disk = {name: shape for name, shape in on_disk.items() if not _EXPERT.search(name)}
    ways = [on_disk]
    for renamed in renamings(on_disk, base.config):
        gone = set(renamed.values())
        kept = {name: shape for name, shape in on_disk.items() if name not in gone}
        ways.append(kept | {new: on_disk[old] for new, old in renamed.items()})
    ways += [_with_root(way, base.model_type, paths) for way in tuple(ways)]
    shapes = max(map(_with_shared, ways), key=lambda way: len(parents_of(way) & set(paths)))
    return replace(base, shapes=shapes)


def _with_shared(shapes: Shapes) -> Shapes:
    """Add the embeddings that an encoder and a decoder share (T5, BART): on disk they are one tensor."""
    found = dict(shapes)
    for name, shape in shapes.items():
        root, _, leaf = name.rpartition("shared.weight")
        if not leaf and name.endswith("shared.weight") and (not root or root.endswith(".")):
            for side in ("encoder", "decoder"):
                found.setdefault(f"{root}{side}.embed_tokens.weight", shape)
    return found


def _with_root(shapes: Shapes, model_type: str | None, paths: Collection[str]) -> Shapes:
    """Put the inner model's name in front, as transformers does when it loads what was saved without a head."""
    roots = {path.partition(".")[0] for path in paths}
    root = next(iter(roots), "")
    known = root in _ROOTS or (model_type or "").replace("-", "_").startswith(root)
    if model_type is None or len(roots) != 1 or not known or any(name.startswith(f"{root}.") for name in shapes):
        return shapes
    return {f"{root}.{name}": shape for name, shape in shapes.items()}


def replicated(shapes: Shapes, layer_map: object) -> Shapes:
    """Return the parameters of the model that PEFT's layer_replication makes: [[0, 2], [1, 2]] is layers 0, 1, 1.

    Source: peft 0.21 `tuners/tuners_utils.py`, `replicate_layers`.
    """
    if not isinstance(layer_map, list) or not all(_is_range(pair) for pair in layer_map):
        return shapes
    copies: dict[int, list[int]] = defaultdict(list)
    total = 0
    for start, end in layer_map:
        for index in range(start, min(end, start + _MAX_LAYERS - total)):
            copies[index].append(total)
            total += 1
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        layer = _STACK.match(name)
        if layer is None:
            found[name] = shape
            continue
        found |= {f"{layer[1]}.{new}.{name[layer.end() :]}": shape for new in copies[int(layer[2])]}
    return found


def _is_range(pair: object) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(type(each) is int and each >= 0 for each in pair)
