"""Names that transformers gives parameters in a model, where those on disk are others: adapters have the model's. Pure.

By the class that config.json names (`maps`); without one by the kinds in `_RECIPES`. Stacked experts are
`slots.stacked_experts`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping

from ckpt_tools.adapters.adapter import Adapter, F
from ckpt_tools.description.checkpoint import TensorEntry
from ckpt_tools.errors import UsageError
from ckpt_tools.maps import live_names, load_table

_TRAINERS = (
    ("torchtitan", re.compile(r"layers\.\d+\.attention\.w[qkvo]")),
    (
        "Megatron",
        re.compile(r"decoder\.layers\.\d+\.(?:self_attention\.linear_(?:qkv|q|kv|proj)|mlp\.linear_fc[12])(?:\..+)?"),
    ),
)
"""Trainers with module names of their own, which no model of transformers has."""


def refuse_trainers_names(adapter: Adapter[F], *, is_proven: bool) -> None:
    """Refuse to pass on modules of a trainer's own model: a model of transformers has none of them.

    Args:
        adapter: From a training checkpoint.
        is_proven: Its modules are held against a base that the user names.

    Raises:
        UsageError: They are.
    """
    if adapter.convention == "torchtitan":
        raise UsageError(
            "the adapter has the module names of torchtune or torchtitan, whose rotary embeddings order the rows of "
            "q and k otherwise than transformers does",
            where=adapter.modules[0].path,
            hint="let the trainer export it (torchtune's checkpointer writes PEFT's format)",
        )
    for trainer, pattern in () if is_proven or "peft_type" in adapter.settings else _TRAINERS:
        found = next((module.path for module in adapter.modules if pattern.fullmatch(module.path)), None)
        if found is not None:
            raise UsageError(
                f"the adapter has {trainer}'s module names, which no model of transformers has",
                where=found,
                hint=f"let {trainer} export it in transformers' names; for a model that has these, name it: --base DIR",
            )


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
    """Return name that a parameter may have in a model → name on disk, where the two differ.

    Args:
        names: On disk, as a plain model's.
        config: The model's config.json; {} where there is none.
    """
    found: dict[str, str] = {}
    for renamed in renamings(tuple(names), config):
        found = {**renamed, **found}
    return found


def live_tensors(tensors: Mapping[str, TensorEntry], config: Mapping[str, object]) -> dict[str, TensorEntry]:
    """Return a base's tensors by the names on disk, and by those that they have in a model."""
    return {**{new: tensors[old] for new, old in names_in_model(tensors, config).items()}, **tensors}


def renamings(names: Collection[str], config: Mapping[str, object]) -> Iterator[Mapping[str, str]]:
    """Yield, for every kind of model that is saved under other names, name in the model → name on disk.

    Args:
        names: On disk, as a plain model's. Of one model at most one of the kinds is right.
        config: As for `names_in_model`; the kind that it names comes first.
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
