"""Names and shapes of a checkpoint against those of the model: findings. Pure; no torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.checkpoint.transform import WRAPPERS, strip_wrappers
from ckpt_tools.options.preflight import Framework
from ckpt_tools.preflight.model_comparison import Comparison
from ckpt_tools.text import counted, escape_name

DCP_ROOTS: Mapping[str, str] = {"accelerate": "model.", "trainer": "model.", "axolotl": "model.", "torchtitan": ""}
"""What the names of a DCP checkpoint must begin with for the trainer to find them. Source: `load_fsdp_model` of
accelerate 1.15 (`{"model": state_dict}`), which Trainer and axolotl use; torchtitan's `CheckpointManager` keeps the
model's names at the root."""
_NATIVE_TITAN = ("tok_embeddings.weight", "layers.0.attention.wq.weight")
_TRANSIENT_LEAVES = ("inv_freq", "position_ids", "masked_bias", "token_type_ids", "original_inv_freq")
"""Buffers that older versions of transformers saved and that today's models make anew."""
_MAX_SHOWN = 6
_DIGITS = re.compile(r"(?<![^.])\d+(?![^.])")

_PEFT_ROOT = re.compile(r"(^|\.)base_model\.model\.")
_PEFT_PARTS = re.compile(r"\.(base_layer|modules_to_save\.[^.]+|original_module)(?=\.)")


def check_names(
    comparison: Comparison, *, where: str, by_dcp: bool, framework: Framework, mesh: str
) -> Iterator[Finding]:
    """Yield what is wrong with the names and shapes of a checkpoint, which `dcp.load` reads or transformers."""
    if comparison.refused is not None:
        what, hint = comparison.refused
        yield Finding.error("checkpoint-unexpected-key", where, what, hint)
        return
    if not comparison.found:
        yield from _nothing(comparison, where, framework)
        return
    yield from _check_prefix(comparison, where, framework, mesh, by_dcp=by_dcp)
    if by_dcp and framework != "torchtitan":  # whose own models are compared with nothing here
        yield from _check_live(comparison, where, mesh)
    yield from _check_missing(comparison, where, by_dcp=by_dcp)
    yield from _check_left(comparison, where)
    yield from _check_shapes(comparison, where)


def group_names(names: Iterable[str], *, most: int = _MAX_SHOWN) -> str:
    """Return names for people: numbers of layers as `*`, at most a handful."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_DIGITS.sub("*", name), []).append(name)
    counts = sorted(groups, key=lambda name: -len(groups[name]))
    shown = [
        escape_name(groups[name][0]) if len(groups[name]) == 1 else f"{escape_name(name)} ({len(groups[name])} tensors)"
        for name in counts[:most]
    ]
    more = len(counts) - len(shown)
    return ", ".join(shown) + (f" and {more} more names" if more > 0 else "")


def _nothing(comparison: Comparison, where: str, framework: Framework) -> Iterator[Finding]:
    """No name agrees."""
    if comparison.adapters:
        return  # said where adapters are looked at
    names = {strip_wrappers(name) for name in comparison.left}
    if framework == "torchtitan" and is_native_titan(names):
        return  # not comparable; the report says so
    expected = next(iter(comparison.tensors), "none")
    has = f"but {group_names(comparison.left, most=2)}; the model expects for example {expected}"
    what = f"the checkpoint contains no tensor name of {comparison.title}, {has}"
    hint = "this may be another model's checkpoint: `ckpt inspect --tensors` lists its names"
    yield Finding.error("checkpoint-missing-key", where, what, hint)


def is_native_titan(names: Iterable[str]) -> bool:
    """Are these torchtitan's own names of a Llama-like model, which are not those of transformers?"""
    return any(name.endswith(_NATIVE_TITAN) for name in names)


def without_peft(name: str) -> str:
    """Return what a name of the base model was before PEFT put its modules around it."""
    return _PEFT_PARTS.sub("", _PEFT_ROOT.sub(r"\1", name, count=1))


def _roots(comparison: Comparison) -> tuple[str | None, str | None, bool]:
    """Return what most names have in front of the model's, what they lack, and whether wrappers are in them."""
    extra: Counter[str] = Counter()
    lacking: Counter[str] = Counter()
    wrapped = False
    for name, found in comparison.found.items():
        if len(found.fqns) != 1:
            continue
        plain = strip_wrappers(found.fqns[0])
        wrapped |= plain != found.fqns[0]
        plain = without_peft(plain)
        if plain.endswith(name):
            extra[plain[: len(plain) - len(name)]] += 1
        elif name.endswith("." + plain):
            lacking[name[: len(name) - len(plain)]] += 1
    if not extra and not lacking:  # all are renamed
        return "", None, wrapped
    if extra.total() >= lacking.total():
        return extra.most_common(1)[0][0], None, wrapped
    return None, lacking.most_common(1)[0][0], wrapped


def _check_prefix(
    comparison: Comparison, where: str, framework: Framework, mesh: str, *, by_dcp: bool
) -> Iterator[Finding]:
    extra, lacking, wrapped = _roots(comparison)
    by_peft = any(without_peft(fqn) != fqn for found in comparison.found.values() for fqn in found.fqns)
    if by_peft and not by_dcp:
        problem = "the names are those of a PEFT model (base_model.model., base_layer.), which no model loader accepts"
        advice = f"use the base model as the model, and extract the adapter: ckpt export-lora {where} NEW --to peft"
        yield Finding.error("checkpoint-prefix", where, problem, advice)
    if by_dcp:
        yield from _check_dcp_root(extra, lacking, where, framework, mesh)
    elif lacking is not None and lacking != comparison.base_prefix:
        problem = f"names match with the prefix {lacking!r}, but {framework} does not add it"
        advice = f"ckpt shard {where} NEW --mesh {mesh} --prefix {lacking}, then ckpt gather NEW HF --strip-prefix none"
        yield Finding.error("checkpoint-prefix", where, problem, advice)
    elif extra and extra != comparison.base_prefix:
        what = f"names match without the prefix {extra!r}, but {framework} does not remove it"
        yield Finding.error("checkpoint-prefix", where, what, f"ckpt gather {where} NEW --strip-prefix {extra}")
    if wrapped:
        fqns = [fqn for found in comparison.found.values() for fqn in found.fqns]
        at_root = next((w for w in WRAPPERS if all(fqn.startswith(w) for fqn in fqns)), None)
        hint = "save the unwrapped model: accelerator.unwrap_model(model).state_dict()"
        if by_dcp or at_root is not None:
            hint = f"ckpt gather {where} NEW --strip-prefix {'auto' if by_dcp else at_root}"
        tell = Finding.warning if by_dcp else Finding.error
        what = "names contain parts that wrappers added (_orig_mod., _checkpoint_wrapped_module., …)"
        what += "; a model that is wrapped differently does not find them"
        yield tell("checkpoint-prefix", where, what, hint)


def _check_dcp_root(
    extra: str | None, lacking: str | None, where: str, framework: Framework, mesh: str
) -> Iterator[Finding]:
    wanted = DCP_ROOTS.get(framework)
    if framework == "torchtitan":
        others = "torchtitan's models use others (tok_embeddings.weight, layers.0.attention.wq.weight)"
        what = f"the checkpoint uses the names of transformers; {others}"
        hint = "point torchtitan to the HF directory, with checkpoint.initial_load_in_hf = true"
        yield Finding.warning("checkpoint-naming", where, what, hint)
        return
    root = extra if lacking is None else f"(without {lacking})"
    if wanted is None:
        if root:
            yield Finding.info("checkpoint-prefix", where, f"the names have the prefix {root!r} before the model's own")
        return
    if root == wanted:
        return
    has = f"have {root!r} instead" if root else "do not have it"
    if lacking is None and wanted.endswith(root or ""):
        missing = wanted[: len(wanted) - len(root or "")]
        hint = f"ckpt reshard {where} NEW --mesh {mesh} --prefix {missing}"
    else:
        hint = f"ckpt gather {where} HF --strip-prefix auto, then ckpt shard HF NEW --mesh {mesh} --prefix {wanted}"
    what = f"{framework} expects {wanted!r} before the model's names in a DCP checkpoint; the names here {has}"
    yield Finding.error("checkpoint-prefix", where, what, hint)


def _check_live(comparison: Comparison, where: str, mesh: str) -> Iterator[Finding]:
    """Yield an error when names fit by transformers' map alone: `dcp.load` renames nothing, and ties nothing."""
    mapped = []
    for name, found in comparison.found.items():
        names = [without_peft(strip_wrappers(fqn)) for fqn in found.fqns]
        if len(names) > 1 or any(not (one.endswith(name) or name.endswith("." + one)) for one in names):
            mapped.append(name)
    mapped += [
        name
        for group in comparison.ties
        if any(name in comparison.found for name in group)
        for name in group
        if name not in comparison.found
    ]
    if mapped:
        what = (
            f"dcp.load finds tensors by the live model's names, but the checkpoint has other names for {len(mapped)} "
            f"of them: {group_names(mapped)}"
        )
        yield Finding.error("checkpoint-naming", where, what, f"ckpt reshard {where} NEW --mesh {mesh} --names live")


def _check_missing(comparison: Comparison, where: str, *, by_dcp: bool) -> Iterator[Finding]:
    saved = (name for name, tensor in comparison.tensors.items() if tensor.kind != "transient")
    absent = [name for name in saved if name not in comparison.found and name not in comparison.contract.computed]
    tied = {name: group for group in comparison.ties for name in group}
    told = [name for name in absent if name in tied and any(other in comparison.found for other in tied[name])]
    for name in told:
        others = [other for other in tied[name] if other in comparison.found]
        yield Finding.info(
            "checkpoint-tied", where, f"{name} is not stored: the model ties it to {others[0]}, which is"
        )
    buffers = [name for name in absent if comparison.tensors[name].kind == "buffer"]
    if buffers:
        what = f"buffers that are not stored keep their initial values ({len(buffers)} in all): {group_names(buffers)}"
        yield Finding.warning("checkpoint-buffer", where, what)
    missing = [name for name in absent if name not in told and name not in buffers]
    # transformers makes a new head for a base model, and says so in a warning; DCP refuses.
    base = comparison.base_prefix
    is_head = bool(base) and all(not name.startswith(base) or "pooler" in name.split(".") for name in missing)
    if not missing:
        return
    output = any(name.endswith(("lm_head.weight", "embed_out.weight")) for name in missing)
    if not by_dcp and ((is_head and not output) or set(missing) <= set(comparison.contract.anew)):
        what = f"tensors of the model's head are not in the checkpoint and start at random ({len(missing)} in all)"
        hint = "this is expected for a new head; otherwise the checkpoint belongs to another model"
        yield Finding.warning("checkpoint-missing-key", where, f"{what}: {group_names(missing)}", hint)
        return
    num_saved = sum(tensor.kind != "transient" for tensor in comparison.tensors.values())
    hint = "the checkpoint belongs to another model or is incomplete; config.json defines what the model has"
    if output and len(missing) == 1:
        hint = 'set "tie_word_embeddings": true in config.json if the head shares the embedding'
    found = f"{len(missing)} of {num_saved} tensors of {comparison.title}"
    what = f"{found} are not in the checkpoint: {group_names(missing)}"
    yield Finding.error("checkpoint-missing-key", where, what, hint)


def _check_left(comparison: Comparison, where: str) -> Iterator[Finding]:
    transient = {name for name, t in comparison.tensors.items() if t.kind == "transient"}
    known = {_DIGITS.sub("*", name) for name in comparison.tensors}
    buffers, stacked, inside, others = (list[str]() for _ in range(4))
    layers = {layer for name in comparison.found for layer in _layers(name)}
    for fqn in comparison.left:
        name = strip_wrappers(fqn)
        tails = [name, *(name[i + 1 :] for i, char in enumerate(name) if char == ".")][:5]
        if any(tail in transient for tail in tails) or name.endswith(_TRANSIENT_LEAVES):
            buffers.append(fqn)
        elif any(_DIGITS.sub("*", tail) in known for tail in tails if "." in tail):
            stacked.append(fqn)
        elif any(_is_missed(tail, comparison) and any(layer in layers for layer in _layers(tail)) for tail in tails):
            inside.append(fqn)
        else:
            others.append(fqn)
    if buffers:
        what = f"stored buffers that the model computes itself are ignored ({len(buffers)} in all)"
        yield Finding.info("checkpoint-buffer", where, f"{what}: {group_names(buffers)}")
    fix = "correct num_hidden_layers (num_experts, …) in config.json, or use the checkpoint of this config"
    other = "the checkpoint belongs to another architecture: use its own config.json"
    for names, which, advice in (
        (stacked, "of layers or experts that the config does not have", fix),
        (inside, f"in layers of {comparison.title} where the model has none", other),
    ):
        if names:
            what = f"the checkpoint has {counted(len(names), 'tensor')} {which}: {group_names(names)}"
            yield Finding.error("checkpoint-unexpected-key", where, f"{what}; they would be silently ignored", advice)
    if others:
        what = f"tensors that do not belong to the model are ignored ({len(others)} in all): {group_names(others)}"
        hint = "this is expected if another head is trained; otherwise check the architecture in config.json"
        yield Finding.warning("checkpoint-unexpected-key", where, what, hint)


def _is_missed(name: str, comparison: Comparison) -> bool:
    """Is it a weight, or the bias of a module that has one? Others may be buffers: the mask of GPT-2 is attn.bias."""
    module, _, leaf = name.rpartition(".")
    return leaf == "weight" or (leaf == "bias" and f"{module}.weight" in comparison.tensors)


def _layers(name: str) -> Iterator[str]:
    """Yield the numbered modules that a tensor is in: `model.layers.0`."""
    parts = name.split(".")
    return (".".join(parts[: i + 1]) for i in range(1, len(parts) - 1) if parts[i].isdecimal())


def _check_shapes(comparison: Comparison, where: str) -> Iterator[Finding]:
    wrong = [
        (name, found)
        for name, found in comparison.found.items()
        if name in comparison.tensors and found.shape != comparison.tensors[name].shape
    ]
    if not wrong:
        return
    name, found = wrong[0]
    expected = comparison.tensors[name].shape
    hint = "config.json and the checkpoint belong to different models"
    if len(expected) == len(found.shape) == 2 and expected[1:] == found.shape[1:] and len(wrong) <= 2:
        hint = f'if the vocabulary was resized, write "vocab_size": {found.shape[0]} in config.json'
    what = f"shapes differ from the model's ({len(wrong)} in all): {escape_name(name)} is {list(found.shape)}"
    more = f"; also {group_names(other for other, _ in wrong[1:])}" if wrong[1:] else ""
    yield Finding.error("checkpoint-shape", where, f"{what}, but {list(expected)} in the model{more}", hint)
