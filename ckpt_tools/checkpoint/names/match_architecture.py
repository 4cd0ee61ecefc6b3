"""Names compared with an architecture: what transformers would leave to chance, and what it would not load."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ckpt_tools.checkpoint.names.keymap_steps import look_up
from ckpt_tools.checkpoint.names.patterns import matches, missing, pattern_of, tree
from ckpt_tools.checkpoint.names.table import Config, Expected, load_table
from ckpt_tools.checkpoint.names.transformers_renames import rename
from ckpt_tools.checkpoint.quantised_units import are_told, weights_of
from ckpt_tools.text import first_few

# Where shapes contradict a config.json: a model that is built as it says would not take these tensors. No torch

_KEYS = {
    "vocab_size": re.compile(r".*vocab_size.*"),
    "hidden_size": re.compile(r".*hidden_size.*|d_model|n_embd|dim|.*embed.*(?:dim|size)"),
    "intermediate_size": re.compile(r".*(?:intermediate|ffn|mlp).*|n_inner|d_ff"),
}
_WORDS = ("embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embed_in", "shared", "lm_head", "embed_out")
_MATRICES = (
    (tuple(f".{name}.weight" for name in _WORDS), ("vocab_size", "hidden_size")),
    ((".mlp.gate_proj.weight", ".mlp.up_proj.weight"), ("intermediate_size", "hidden_size")),
    ((".mlp.down_proj.weight",), ("hidden_size", "intermediate_size")),
)
"""Ends of names, and of which kind the numbers of rows and columns are."""
_ODD = ("csm", "deimv2", "glm4v_", "imagegpt", "kyutai_speech_to_text", "mllama", "molmo2", "moshi")
"""Model types with sizes that no key names: embeddings of more rows than words, for instance."""
_WORDLESS = re.compile(r"vision|visual|image|audio|speech|vq|backbone|attn|quantiz|rope|generation")
"""Parts of a config that are not about text."""


class Misfit(str):
    """What a tensor's size and the config say, for people."""

    is_part = False  # The config says a multiple of the size, as where ranks have cut a tensor


def config_misfits(config: Config, tensors: Iterable[tuple[str, Sequence[int]]]) -> list[Misfit]:
    """Return where tensors (names as on the hub, wrapped or not; shapes) contradict a config.json, if that is known."""
    types = [str(part.get("model_type", "")) for _, part in _parts(config)]
    is_odd = not types[0] or any(each.startswith(_ODD) for each in types)
    listed = config.get("architectures")
    is_known = not isinstance(listed, list) or not listed or listed[0] in load_table().architectures
    if is_odd or not is_known or any("pad_vocab" in key for key in config):
        return []
    shapes = dict(tensors)
    packed = {name.rpartition(".")[0] for name in shapes if not name.endswith((".weight", ".bias"))}
    found: list[Misfit] = []
    for ends, kinds in _MATRICES:
        names = [name for name, shape in shapes.items() if len(shape) == 2 and f".{name}".endswith(ends)]
        names = [name for name in names if packed.isdisjoint((name, name.removesuffix(".weight")))]
        for dim, kind in enumerate(kinds):
            said = _said(config, kind)
            wrong = [name for name in names if shapes[name][dim] not in said]
            # Of layers of several sizes, one that fits shows that the config is about this model.
            if said and wrong and (kind == "vocab_size" or len(wrong) == len(names)):
                own = shapes[wrong[0]][dim]
                numbers = config.get(kind) or " or ".join(map(str, sorted(said)))
                size = f"{own} {('rows', 'columns')[dim]}"
                found.append(Misfit(f"{wrong[0]} has {size}, but config.json has {kind} {numbers}"))
                found[-1].is_part = any(0 < own < each and each % own == 0 for each in said)
    return found


def _said(config: Config, kind: str) -> set[int]:
    """Return all sizes of a kind; none where a part that must have one leaves it to its class."""
    said: set[int] = set()
    for path, part in _parts(config):
        values = [value for key, value in part.items() if _KEYS[kind].fullmatch(key)]
        own = {n for value in values for n in (value if isinstance(value, list) else [value]) if type(n) is int}
        if path and not own and not _WORDLESS.search(path):
            return set()
        said |= own
    return said


def _parts(config: Config, path: str = "") -> Iterator[tuple[str, Config]]:
    yield path, config
    for key, value in config.items():
        if isinstance(value, Mapping) and (key.endswith("_config") or "model_type" in value):
            yield from _parts(value, f"{path}.{key}")


_OLD_BUFFERS = re.compile(r"(^|\.)(rotary_emb\.inv_freq|position_ids|masked_bias)$")
"""Buffers that old files hold and that models compute by now; some of their modules no longer have them at all."""
_POOLER = re.compile(r"(^|\.)pooler\.")  # What `add_pooling_layer` adds: files have it or lack it, whatever the class


@dataclass(frozen=True, slots=True, kw_only=True)
class NameContract:
    """The names of a model, and of a file, that the other does not have."""

    computed: tuple[str, ...] = ()  # Names of the model that its modules compute, and that files need not hold
    anew: tuple[str, ...] = ()  # Of a head that the file does not have: they start as their initialiser has them
    missing: tuple[str, ...] = ()  # Names of the model that nothing fills
    ignored: tuple[str, ...] = ()  # Names of the file that loading leaves out, and that are no sign of another model
    unexpected: tuple[str, ...] = ()  # Names of the file that the model should have and does not

    @property
    def notes(self) -> tuple[str, ...]:
        """What is to be said even where everything is as it should be."""
        others = [name for name in self.ignored if not _OLD_BUFFERS.search(name)]
        anew = "a head that the checkpoint does not have starts with new random values, as with from_pretrained"
        both = (self.anew, anew), (others, "not part of the model, and left out by from_pretrained")
        return tuple(f"{what}: {first_few(names, 4)}" for names, what in both if names)


def settle(
    missing: Iterable[str],
    left: Iterable[str],
    *,
    present: Collection[str],
    may_miss: Iterable[str],
    ignored: Iterable[str],
    base: str,
    is_other: bool,
) -> NameContract:
    """Judge the names that only one side has: of the model, whose others are `present`, or of the file (`left`)."""
    # `may_miss` and `ignored` are transformers' `_keys_to_ignore_on_load_missing` and `…_unexpected`, `base` is its
    # `base_model_prefix`. `is_other`: the file's config names another class, or its names lack that prefix.
    computes, ignores = ([re.compile(pattern) for pattern in patterns] for patterns in (may_miss, ignored))
    missing = tuple(missing)
    computed = tuple(name for name in missing if any(regex.search(name) for regex in computes))
    rest = tuple(name for name in missing if name not in set(computed))
    root = f"{base}."
    is_headed = bool(base) and any(name.startswith(root) for name in present)
    filled = {name.rpartition(".")[0] for name in present}

    def starts_anew(name: str) -> bool:
        is_outside = is_headed and not name.startswith(root) and name.rpartition(".")[0] not in filled
        return is_outside or bool(base and _POOLER.search(name))

    anew = rest if is_other and all(map(starts_anew, rest)) else ()
    own = (name.removeprefix(root) for name in present if name.startswith(root) or not is_headed)
    inside = {base, *(name.partition(".")[0] for name in own)}

    def is_out(name: str) -> bool:
        is_known = _OLD_BUFFERS.search(name) or any(regex.search(name) for regex in ignores)
        is_of_head = is_other and anew == rest and inside.isdisjoint(name.split(".")[:3])
        return bool(is_known or (base and (is_of_head or _POOLER.search(name))))

    out = tuple(filter(is_out, left := tuple(left)))
    return NameContract(
        computed=computed,
        anew=anew,
        missing=() if anew else rest,
        ignored=out,
        unexpected=tuple(name for name in left if name not in set(out)),
    )


EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Keys of config.json that say how many experts a layer has, one or the other in every family."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NameMatch:
    """What came of it."""

    missing: tuple[str, ...] = ()  # Live names of tensors that nothing fills: transformers gives them random values
    foreign: tuple[str, ...] = ()  # Names of the file that the architecture does not have
    incomplete: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Live name → what is not there of the several tensors that it is put together from."""

    contract: NameContract = field(
        default_factory=NameContract
    )  # Of all names that only one side has, harmless ones too

    @property
    def is_whole(self) -> bool:
        """Does everything load, and fill everything?"""
        return not (self.missing or self.foreign or self.incomplete)

    def split(self, before: NameMatch) -> tuple[NameMatch, NameMatch]:
        """Return what is new, and what `before` has as well."""
        missing, foreign = set(before.missing), set(before.foreign)
        new, old = (
            NameMatch(
                missing=tuple(name for name in self.missing if (name in missing) is known),
                foreign=tuple(name for name in self.foreign if (name in foreign) is known),
                incomplete={n: lacks for n, lacks in self.incomplete.items() if (n in before.incomplete) is known},
            )
            for known in (False, True)
        )
        return new, old


def match_names(names: Iterable[str], expected: Expected, config: Mapping[str, object]) -> NameMatch:
    """Compare the names of a file, or of a live model, with what an architecture expects (`Table.expected`)."""
    given = {name: name for name in names}
    if are_told(given, config):
        given |= {n: w for n, w in weights_of(given).items() if not matches(expected.names, n, expected.counts)}
    renamed = rename(
        set(given.values()),
        expected.rules,
        expected.base,
        lambda name: matches(expected.names, name, expected.counts),
        min((count for key in EXPERT_COUNTS if type(count := look_up(key, config)) is int), default=0),
    )
    ties = [(re.compile(tie.target), re.compile(tie.source)) for tie in expected.ties]
    absent = []
    found = (*missing(expected.names, tree(renamed.live), expected.counts), *_lost_biases(renamed.live, expected))
    for name in dict.fromkeys(found):
        partners = [source for target, source in ties if target.match(name)]
        partners += [target for target, source in ties if source.match(name)]
        if not any(partner.match(live) for partner in partners for live in renamed.live):
            absent.append(name)
    contract = settle(
        absent,
        renamed.foreign,
        present=renamed.live,
        may_miss=expected.may_miss,
        ignored=expected.ignored,
        base=expected.base,
        is_other=False,  # who converts a model without its head says so: --as-part
    )
    outside = set(contract.unexpected)
    return NameMatch(
        missing=contract.missing,
        foreign=tuple(name for name, plain in given.items() if plain in outside),
        incomplete=renamed.incomplete,
        contract=contract,
    )


def _lost_biases(live: Collection[str], expected: Expected) -> Iterator[str]:
    """Yield the biases that are not there beside a weight, where the same module of other layers has one."""
    # A config says for all layers alike whether a module has one; biases that the table requires are found without
    # this.
    kinds = {pattern_of(expected.names, name) for name in live if name.endswith(".bias")}
    for name in live:
        bias = name.removesuffix("weight") + "bias"
        is_lost = name.endswith(".weight") and bias not in live and pattern_of(expected.names, bias) in kinds
        if is_lost and matches(expected.names, bias, expected.counts):
            yield bias


def live_names(names: Iterable[str], expected: Expected) -> dict[str, str]:
    """Return name in the live model → name in a file, for the parameters that are the same tensor in both."""
    plain = [rule for rule in expected.rules if rule.kind != "convert"]
    renamed = rename(names, plain, expected.base, lambda name: matches(expected.names, name, expected.counts))
    return {live: first for live, (first, *more) in renamed.live.items() if not more}


def tied(one: str, other: str, expected: Expected) -> bool:
    """Does the architecture, with this config, give both live names to one tensor?"""
    return any(
        (re.match(tie.target, one) and re.match(tie.source, other))
        or (re.match(tie.target, other) and re.match(tie.source, one))
        for tie in expected.ties
    )


def group_names(names: Iterable[str], expected: Expected | None) -> tuple[str, ...]:
    """Return names with the numbers of layers as ``*``, each once, in order."""
    root = expected.names if expected is not None else None
    if root is None:
        return tuple(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names))
    return tuple(dict.fromkeys(pattern_of(root, name) for name in names))
