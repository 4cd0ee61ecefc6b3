"""Where shapes contradict a config.json: a model that is built as it says would not take these tensors. No torch.

A size is compared with all that the config, or a part of it, has under keys of its kind. Where a part leaves them to
the defaults of its class nothing is claimed, and packed weights have shapes of their own.

Source: transformers 5.23, of which every class that builds is tried (tests/names/test_misfits.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ckpt_tools.checkpoint.names.table import Config, load_table

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
                found.append(Misfit(f"{wrong[0]} has {size}, config.json says {kind} {numbers}"))
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
