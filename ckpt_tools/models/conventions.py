"""Names that are neither the hub's nor transformers': whose they are, and what all that have them make of them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from ckpt_tools.checkpoint.names.convert import Converted, to_hub, to_live
from ckpt_tools.checkpoint.names.keymap import KeyMap, load_key_maps
from ckpt_tools.checkpoint.names.keymap_steps import look_up
from ckpt_tools.checkpoint.names.match_architecture import NameMatch, match_names
from ckpt_tools.checkpoint.names.mosaic import Mosaic
from ckpt_tools.checkpoint.names.table import load_table
from ckpt_tools.errors import UsageError
from ckpt_tools.text import first_few

CONVENTIONS = ("torchtitan", "megatron", "meta", "torchtune")  # Each is a file of `names`; see `names.keymap`
_Config = Mapping[str, object]


class UnclearNamesError(UsageError):
    """What tensors are by the hub's names is not clear, so that nobody is to go on as if it were."""

    code = "unclear-names"


@dataclass(frozen=True, slots=True, kw_only=True)
class Convention:
    """One that has certain names for a model."""

    name: str
    key_map: KeyMap
    is_of_class: bool  # Is the map of the model's class itself, rather than of its `model_type`?


def map_of(maps: Mapping[str, KeyMap], architecture: str, config: _Config) -> KeyMap | None:
    """Return the map of a model: that of its class, or of its `model_type`."""
    return maps.get(architecture) or maps.get(str(config.get("model_type")))


def conventions_of(names: Collection[str], architecture: str, config: _Config) -> tuple[Convention, ...]:
    """Return the conventions that have all of these names for a model."""
    found = []
    for name in CONVENTIONS:
        maps = load_key_maps(name)
        key_map = map_of(maps, architecture, config)
        if key_map is not None and key_map.knows(names):
            found.append(Convention(name=name, key_map=key_map, is_of_class=architecture in maps))
    return tuple(found)


def agreed(known: Sequence[Convention], tensors: Mapping[str, Mosaic], config: _Config) -> Converted:
    """Return what conventions make of tensors for the hub; raise `UnclearNamesError` where they disagree."""
    first, *others = (convention.key_map.backward(tensors, config) for convention in known)
    if any(other.mosaics != first.mosaics or other.aliases != first.aliases for other in others):
        names = [convention.name for convention in known]
        what = f"these are names of {' and of '.join(names)}, for different tensors"
        raise UnclearNamesError(what, hint=f"choose one: --names {' or --names '.join(names)}")
    return first


def refuse_lost(lost: Sequence[str], *, where: str) -> None:
    """Refuse what the hub has no place for: without it, the model may compute something else."""
    if lost:
        glob = shlex.quote("**" + re.sub(r"\d+", "*", lost[0]))
        what = f"the hub has no place for {first_few(lost)}: without it, the model may not compute what was trained"
        raise UnclearNamesError(what, where=where, hint=f"leave it out where it does not matter: --exclude {glob}")


_OTHERWISE = {
    "apply_layernorm_1p": "weights of norms are stored minus 1",
    "layernorm_zero_centered_gamma": "weights of norms are stored minus 1",
    "rotary_interleaved": "rows of queries and keys are in another order",
    "attention_output_gate": "rows of gates lie between those of queries and keys",
}
"""Megatron's settings under which its tensors are not those of `names/megatron.txt`."""
_CUTS = {
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
}
"""Megatron's settings → keys of config.json, by which fused rows are taken apart."""
_OTHERS = {"rotary_base": ("rope_parameters.rope_theta", "rope_theta"), "norm_epsilon": ("rms_norm_eps",)}
"""Megatron's settings → keys of config.json that no tensor shows."""


def check_settings(settings: _Config, config: _Config) -> tuple[str, ...]:
    """Compare config.json with what Megatron noted of the model; return where the result would compute otherwise."""
    for name, what in _OTHERWISE.items():
        if settings.get(name) is True:
            hint = "use Megatron-Bridge (AutoBridge.export_ckpt), or keep the names: --names live"
            raise UsageError(f"the model was trained with {name}: {what}, which ckpt does not undo", hint=hint)
    cuts = {} if settings.get("multi_latent_attention") is True else _CUTS
    for name, key in cuts.items():
        own, said = settings.get(name), look_up(key, config)
        if name == "num_query_groups" and settings.get("group_query_attention") is not True:
            has_none = settings.get("group_query_attention") is False  # then its 1 is a default that means nothing
            own = settings.get("num_attention_heads") if has_none else None
        if type(own) is int and type(said) is int and own != said:
            what = f"{key} is {said} in config.json, and the model was trained with {name} {own}"
            raise UsageError(what, hint="pass the config of this model: --assets DIR")
    found = []
    for name, keys in _OTHERS.items():
        own, said = settings.get(name), next((v for key in keys if (v := look_up(key, config)) is not None), None)
        if type(own) in (int, float) and type(said) in (int, float) and own != said:
            found.append(f"{keys[-1]} is {said} in config.json, and the model was trained with {name} {own}")
    return tuple(found)


def named_by(key_map: KeyMap, hub: Mapping[str, Mosaic], architecture: str, config: _Config) -> tuple[Converted, str]:
    """Return what a convention's map makes of the hub's tensors, and the digest of all rules by which it does."""
    # transformers saves experts one by one where its modules hold all of a layer in one tensor, or as the modules hold
    # them (`save_original_format=False`). A map reads one of these forms; the other is brought into it first. Refuse a
    # file in which tensors are lacking, where the architecture is known: a library's model lacks them too.
    expected = load_table().expected(architecture, config)
    form, digest = hub, key_map.digest
    if expected is not None and not key_map.reads(hub):
        live = to_live(hub, expected, config).mosaics
        form = live if key_map.reads(live) else to_hub(live, expected, config).mosaics
        rules = repr((digest, expected.digest, expected.save_rules))
        digest = blake2b(rules.encode(), digest_size=16).hexdigest()
    found = key_map.forward(form, config)
    held = NameMatch() if expected is None else match_names(hub, expected, config)
    if lacking := [*held.missing, *held.incomplete]:
        raise UsageError(f"a {architecture} has tensors that are not in the file: {first_few(lacking, 4)}")
    return found, digest
