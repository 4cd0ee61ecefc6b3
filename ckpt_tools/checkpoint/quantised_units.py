"""Which tensors one quantised weight is stored in: by the endings that libraries put beside its name.

One of them at least is packed, or of 8 bits. All that lies in a module with codes of another kind, or in one of its
children, is one weight as well, but for a bias; without a config that says so, codes are matrices of integers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from ckpt_tools.checkpoint.entries import TensorEntry

_IN_MODULE = re.compile(
    r"(.+\.|)(?:qweight|qzeros|scales|biases|g_idx|SCB|weight_format|scale_weight|scale_input|comfy_quant|W_q"
    r"|scale|zero|activation_scale|pre_quant_scale|[qkv]_scale|(?:input|output)_(?:scale|zero_point|global_scale))"
)
"""Parts of the `weight` of their module."""
_TORCHAO = re.compile(r"(.+\.|)_(\w+?)_(?:qdata|scale_and_zero|per_tensor_scale|scale|zero_point|act_\w+)")
_OF_NAME = re.compile(
    r"(.+?)(?:_scale_inv|_scale_2|_bias_scale|_global_scale|_input_scale|_activation_scale|_scales?|_blocks|_packed"
    r"|_shape|_zero_point|_g_idx|\.(?:absmax|quant_map|nested_absmax|nested_quant_map|quant_state\..+|SCB"
    r"|weight_format)|(?<=weight)\.(?:shape|scale|data|_data(?:\._data)?|_scale|_shift))"
)
_CODES = re.compile(r".*(?:\.(?:qweight|W_q|SCB|weight\.(?:absmax|_data(?:\._data)?))|_weight_qdata|\.weight_packed)")
"""Names that nothing but a quantised weight has."""
_NO_CODES = ("I64", "BOOL", "C32", "C64", "C128")  # buffers


def is_code(entry: TensorEntry) -> bool:
    """Is a tensor packed, or of a precision that weights have only when they are quantised?"""
    return not entry.dtype.is_float and entry.dtype.name not in _NO_CODES


def are_told(names: Iterable[str], config: Mapping[str, object]) -> bool:
    """Do names or a config.json say that weights are quantised?"""
    return isinstance(config.get("quantization_config"), Mapping) or any(map(_CODES.fullmatch, names))


def weights_of(names: Collection[str]) -> dict[str, str]:
    """Return tensor → weight, of all that may be parts of one: several of a name lie together."""
    found: dict[str, str] = {}
    for name in names:
        if match := _IN_MODULE.fullmatch(name):
            found[name] = f"{match[1]}weight"
        elif match := _TORCHAO.fullmatch(name) or _OF_NAME.fullmatch(name):
            found[name] = "".join(match.groups())
    groups = grouped(found | {weight: weight for weight in found.values() if weight in names})
    return {name: found.get(name, name) for name in names if len(groups.get(found.get(name, name), ())) > 1}


def find_units(tensors: Iterable[TensorEntry], *, is_told: bool = False) -> dict[str, str]:
    """Return tensor → name of the quantised weight that it is a part of; `is_told` by a config that there are some."""
    entries = {entry.fqn: entry for entry in tensors}
    if not is_told and not any(is_code(entry) or fqn.endswith(".absmax") for fqn, entry in entries.items()):
        return {}
    weights = weights_of(entries)  # bitsandbytes' codes may be stored in any dtype
    coded = {weight for n, weight in weights.items() if is_code(entries[n]) or n == f"{weight}.absmax"}
    found = {name: weight for name, weight in weights.items() if weight in coded}
    codes = (entry for fqn, entry in entries.items() if is_code(entry) and fqn not in found)
    sure = (e.fqn for e in codes if is_told or (len(e.shape) > 1 and "." in e.fqn and e.dtype.name[0] in "IU"))
    homes = {fqn.rpartition(".")[0] for fqn in sure}
    more: dict[str, str] = {}
    for fqn in [fqn for fqn in entries if fqn not in found] if homes else []:
        module, _, leaf = fqn.rpartition(".")
        home = module if module in homes else module.rpartition(".")[0]
        if home in homes and leaf != "bias":
            more[fqn] = f"{home}.weight"
    alone = set() if is_told else {weight for weight, parts in grouped(more).items() if len(parts) == 1}
    found |= {fqn: weight for fqn, weight in more.items() if weight not in alone}
    return found


def grouped(parts: Mapping[str, str]) -> dict[str, frozenset[str]]:
    """Return weight → its tensors."""
    found: dict[str, list[str]] = {}
    for name, weight in parts.items():
        found.setdefault(weight, []).append(name)
    return {weight: frozenset(names) for weight, names in found.items()}
