"""Names that transformers gives parameters in a model, where those on disk are others: adapters have the model's. Pure.

Source: transformers 5.23 `conversion_mapping.py`. Beginnings that differ (`model.language_model.`, …) are found by
`slots.resolve` without a table, and stacked experts by `slots.of_model`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping

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


def names_in_model(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield (name that a parameter may have in a model, name on disk), where the two differ.

    Args:
        names: On disk, as a plain model's.
    """
    for renamed in renamings(tuple(names)):
        yield from renamed.items()


def renamings(names: Collection[str]) -> Iterator[Mapping[str, str]]:
    """Yield, for every kind of model that is saved under other names, name in the model → name on disk.

    Args:
        names: On disk, as a plain model's. Of one model at most one of the kinds is right.
    """
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
