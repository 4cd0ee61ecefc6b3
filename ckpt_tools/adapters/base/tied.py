"""Bases that tie their head to their embedding: a change of one of the two cannot be merged. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

from ckpt_tools.adapters.adapter import TOKENS, Adapter
from ckpt_tools.adapters.read.sidecars import base_config
from ckpt_tools.checkpoint.entries import TensorEntry
from ckpt_tools.checkpoint.formats.opening import Opened
from ckpt_tools.checkpoint.transform import plain_names
from ckpt_tools.errors import UsageError
from ckpt_tools.transfer.execute import scan

if TYPE_CHECKING:
    from ckpt_tools.adapters.base.matching import BaseMatch

EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embed_in", "shared")
HEADS = ("lm_head", "embed_out", "output_layer", "output", "proj_out")
HEAD = "lm_head.weight"  # Of every language model of transformers, whatever its own parts are called
_LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Ends of architectures' names whose models have a head, stored or tied."""
UNTIE = "--untie gives the head its own weight, as in training (and records that in config.json)"
Pair = tuple[TensorEntry, TensorEntry]
"""An embedding and a head that may be one parameter in the model: the one that is changed, and the other."""


def suspects(base: Opened, tensors: Mapping[str, TensorEntry], changed: Collection[str]) -> tuple[Pair, ...]:
    """Return the pairs that must not hold the same values; refuse to change an embedding that is the head too."""
    is_tied = _says_tied(base)
    if is_tied is False:
        return ()
    embeddings, heads = list(_named(tensors, EMBEDDINGS)), list(_named(tensors, HEADS))
    if is_tied and not heads:
        for entry in embeddings:
            if entry.fqn in changed:
                what = (
                    f"the base ties its head to {entry.fqn}: merging the adapter of the embedding would "
                    "also change the head, which training did not"
                )
                raise UsageError(what, where=entry.fqn, hint=UNTIE)
    pairs = (pair for both in product(embeddings, heads) for pair in (both, both[::-1]))
    return tuple(
        (one, other)
        for one, other in pairs
        if one.fqn in changed and other.fqn not in changed and (one.shape, one.dtype) == (other.shape, other.dtype)
    )


def untied(base: Opened) -> tuple[Opened, Mapping[str, object]]:
    """Return a base whose head has a weight of its own, at first the embedding's, and the config that says so."""
    tensors, config = plain_names(base.checkpoint), base_config(base)
    embeddings, heads = list(_named(tensors, EMBEDDINGS)), list(_named(tensors, HEADS))
    what = ""
    if not config:
        what = "needs the base's config.json, which tells loaders that the head has its own weight"
    elif config.get("is_encoder_decoder") or "shared.weight" in tensors:
        what = "does not support encoder-decoder models, which share more than the head and scale its input"
    elif _says_tied(base) is False or (not heads and len(embeddings) != 1):
        what = "needs a base that ties its head to an embedding; this one does not"
    if what:
        hint = "leave out --untie, or the modules that need it: --exclude GLOB"
        raise UsageError(f"--untie {what}", where=base.source.root, hint=hint)
    said: dict[str, object] = {**config, "tie_word_embeddings": False}
    if isinstance(nested := config.get("text_config"), dict):
        said["text_config"] = {**nested, "tie_word_embeddings": False}
    if heads:
        return base, said
    (name,) = (name for name, entry in tensors.items() if entry is embeddings[0])
    head = replace(embeddings[0], fqn=embeddings[0].fqn.removesuffix(name) + HEAD, path=())
    checkpoint = replace(base.checkpoint, tensors=(*base.checkpoint.tensors, head))
    return replace(base, checkpoint=checkpoint, origin=None), said


def with_tied_heads(
    base: Opened, tensors: Mapping[str, TensorEntry], adapter: Adapter[TensorEntry], match: BaseMatch
) -> tuple[BaseMatch, frozenset[str]]:
    """Return the match with trained tokens' rows in tied heads too, as in training, and the tensors so changed."""
    parts = dict(match.parts)
    settled: set[str] = set()
    for entry in _named(tensors, EMBEDDINGS) if _says_tied(base) else ():
        rows = match.parts.get(entry.fqn, ())
        if rows and all(adapter.modules[part.module].family == TOKENS for part in rows):
            heads = {head.fqn for head in _named(tensors, HEADS) if head.shape == entry.shape}
            if twice := sorted(heads & match.parts.keys()):
                what = f"the base ties {twice[0]} to {entry.fqn}, and the adapter changes them differently"
                raise UsageError(what, where=twice[0], hint=UNTIE)
            parts |= dict.fromkeys(heads, rows)
            settled |= {entry.fqn, *heads}
    return replace(match, parts=parts), frozenset(settled)


def tied_embeddings(base: Opened, tensors: Mapping[str, TensorEntry]) -> tuple[TensorEntry, ...]:
    """Return the embeddings of a base that are its head too and stored once: its model has a module for the head."""
    heads = list(_named(tensors, HEADS))
    return () if heads or not _says_tied(base) else tuple(_named(tensors, EMBEDDINGS))


def refuse_equal(pairs: Collection[Pair], base: Opened, *, num_workers: int) -> None:
    """Refuse pairs that hold the same, a tied parameter under two names: a tied model would load only one of them."""
    for pair in pairs:
        found = scan(pair, base.source, num_workers=num_workers).digests
        changed, kept = (entry.fqn for entry in pair)
        if found[changed] == found[kept]:
            raise UsageError(
                f"{changed} and {kept} hold the same values, as a tied embedding and head do, but the adapter changes "
                "only one of them: a model that ties them would load only one of the two",
                where=changed,
                hint=f"{UNTIE}; if they are not tied, declare it in a config.json beside the base: "
                '{"tie_word_embeddings": false}',
            )


def _named(tensors: Mapping[str, TensorEntry], leaves: Collection[str]) -> Iterator[TensorEntry]:
    for name, entry in tensors.items():
        path, _, parameter = name.rpartition(".")
        if parameter == "weight" and path.rpartition(".")[2] in leaves and len(entry.shape) == 2:
            yield entry


def _says_tied(base: Opened) -> bool | None:
    """Does the base's configuration tie them? None where it does not say."""
    config = base_config(base)
    nested = config.get("text_config")
    for fields in (config, nested if isinstance(nested, dict) else {}):
        if isinstance(found := fields.get("tie_word_embeddings"), bool):
            return found
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    return True if any(isinstance(name, str) and name.endswith(_LANGUAGE_MODELS) for name in names) else None
