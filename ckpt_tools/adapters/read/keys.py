"""From tensor names to (module path, family, role): the suffixes of every convention. Pure.

Source: peft 0.21 `tuners/*/layer.py`, `utils/save_and_load.py`; lycoris-lora 4.1 `modules/*.py` (`weight_list`);
diffusers 0.42 `loaders/lora_conversion_utils.py`; kohya-ss `networks/lora.py`; torchtune `modules/peft/lora.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ckpt_tools.adapters.adapter import FamilyName
from ckpt_tools.adapters.families import FAMILIES
from ckpt_tools.adapters.families.carried import Carried
from ckpt_tools.adapters.families.family import Style

_NAME = r"(?:\.(?P<adapter>[^.]+))?"
"""PEFT's adapter name: there in a model's own state dict, absent in a saved adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """What a tensor's name says."""

    path: str
    """Module path, or a flattened name; "" for what all modules share."""
    family: FamilyName
    """Of the factor; "lora" for roles that several families have, until the module's other factors decide."""
    role: str
    """As in `adapter.py`; "alpha" for the scalar."""
    style: Style
    adapter: str | None = None
    """PEFT's adapter name, when the tensor's name has it."""
    nesting: int = 0
    """Number of `base_layer` in front of the suffix."""
    is_weak: bool = False
    """The suffix alone does not prove an adapter: a base model may have such names as well."""


_WEAK_ROWS: tuple[tuple[str, FamilyName, str], ...] = (
    (r"alpha", "lora", "alpha"),
    (r"rescale", "oft", "rescale"),
    (r"magnitude", "lora", "magnitude"),
    (r"(?:diff|w_norm)", "full", "diff"),
    (r"(?:diff_b|b_norm)", "full", "diff_b"),
)
"""LyCORIS' suffixes that a base model's names may have as well."""


_Rule = tuple[re.Pattern[str], Style, FamilyName, str]


def _rule(suffix: str, style: Style, family: FamilyName, role: str, path: str = ".+") -> _Rule:
    return re.compile(rf"(?P<path>{path})\.{suffix}"), style, family, role


def _strong() -> Iterator[_Rule]:
    """Yield the suffixes of the families' tables; of one that several have, the first family's."""
    weak = [re.compile(suffix) for suffix, _, _ in _WEAK_ROWS]
    seen: set[str] = set()
    for name, family in FAMILIES.items():
        if isinstance(family, Carried):
            continue
        for style, pattern, role in family.also_read:
            yield _rule(pattern, style, name, role)
        for role, suffix in family.peft_names.items():
            head, dot, rest = suffix.partition(".")
            seen.add(suffix)
            yield _rule(f"{head}{_NAME}{re.escape(dot + rest)}", "peft", name, role)
        for role, suffix in family.lycoris_names.items():
            if suffix not in seen and not any(pattern.fullmatch(suffix) for pattern in weak):
                seen.add(suffix)
                path = r"(?:lycoris|lora)_[^.]+|diffusion_model\..+" if family.needs_own_paths else ".+"
                yield _rule(re.escape(suffix), "lycoris", name, role, path)


def _of_carried(family: Carried, *, weak: bool) -> Iterator[_Rule]:
    """Yield rules whose role is the name's end, without the adapter's name: `head` and `rest`."""
    anywhere = r"(?:(?:.+\.)?base_model|(?P<path>.+))\." if family.root else r"(?P<path>)(?:.+\.)?"
    for front, names in ((r"(?P<path>.+)\.", family.names), (anywhere, family.shared)):
        for head, rest in names:
            if (head in family.weak) is weak:
                parts = rf"(?P<head>{head}){_NAME}" + (rf"(?P<rest>\.{rest})" if rest else "(?P<rest>)")
                yield re.compile(front + parts), "peft", family.name, ""
    for style, pattern, role in family.also_read if not weak else ():
        yield re.compile(rf"(?P<path>)(?:.+\.)?{pattern}"), style, family.name, role


_CARRIED = [family for family in FAMILIES.values() if isinstance(family, Carried)]
_STRONG = [*_strong(), *(rule for family in _CARRIED for rule in _of_carried(family, weak=False))]
_WEAK = [
    *(_rule(suffix, "lycoris", family, role) for suffix, family, role in _WEAK_ROWS),
    *(rule for family in _CARRIED for rule in _of_carried(family, weak=True)),
]
_PROCESSOR = re.compile(r"(?P<path>.+)\.processor\.(?P<part>\w+)_lora\.(?P<side>down|up)\.weight")
"""Attention processors of old diffusers: the module is named by the processor's attribute."""
_SAVED = re.compile(r"(?P<path>.+)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<role>.+)")
_BASE_LAYERS = re.compile(r"(?:\.base_layer)+$")

_SURELY_REFUSED = (
    (
        r"(?:.+\.)?prompt_encoder\.[^.]+\.(?:(?:mlp|lstm)_head|transform\.[02]\.|(?:delta|trainable|frozen)_emb).*",
        "prompt tuning whose embeddings PEFT computes when it saves them",
    ),
    (r"(?:.+\.)?adaption_(?:prompt|gate)(?:\..+)?", "LLaMA-Adapter (adaption prompt)"),
    (r"(?:.+\.)?internal_xlora_classifier\..+", "X-LoRA"),
    (r".+\.oft_r(?:\..+)?", "OFT of PEFT before 0.16, which no PEFT since can load"),
    (r".+\.lora_arrow(?:\..+)?", "Arrow"),
    (r".+\.lora_monteclora_sampler(?:\..+)?", "MonteCLoRA"),
    (r".+\.lora_diag(?:\..+)?", "KaSA"),
)
"""Names that no base model has."""
_REFUSED = (
    (r"(?:.+\.)?prompt_encoder\..+", "prompt tuning"),
    (r"(?:.+\.)?on_input", "IA³"),
    (r"(?:.+\.)?(?:emb_params|string_to_param)(?:\..+)?|bundle_emb\..+", "textual inversion"),
    (r".+\.(?:a1|a2|b1|b2|bm)\.weight", "GLoRA"),
    (r".+\.lora_[AB]", "LoRA in the names of loralib and litgpt"),
    (r".+\.(?:[qp]_layer\.weight|lambda_layer)", "T-LoRA"),
    (r"(?:.+\.)?frod_\w+(?:\..+)?", "FRoD"),
    (r"(?:.+\.)?shadow_\w+(?:\..+)?", "Shadow"),
)
"""Names that a base model may have as well: they count only where no supported adapter is found."""
_SURE = [(re.compile(pattern), name) for pattern, name in _SURELY_REFUSED]
_UNSURE = [(re.compile(pattern), name) for pattern, name in _REFUSED]
_QUICK = re.compile(
    r"lora|hada_|lokr_|oft_|dora_scale|trainable_tokens_delta|\.adapter|\.(?:alpha|rescale|magnitude|diff|w_norm|diff_b|b_norm)$|modules_to_save|"
    r"\.[ab][12]\.weight$|"
    + "|".join(["prefix_task_", *(family.marker for family in FAMILIES.values() if family.is_carried)])
)
"""Whatever `parse_key` accepts contains one of these; base names, of which there are many, mostly do not."""


def parse_key(name: str) -> Key | None:
    """Return what a name says of an adapter, or None; root, wrappers and `base_model.model.` are off already."""
    if not _QUICK.search(name):
        return None
    saved = _SAVED.fullmatch(name)
    if saved:
        return Key(path=saved["path"], family="saved", role=saved["role"], style="peft", adapter=saved["adapter"])
    processor = _PROCESSOR.fullmatch(name)
    if processor:
        part = "to_out.0" if processor["part"] == "to_out" else processor["part"]
        role = "A" if processor["side"] == "down" else "B"
        return Key(path=f"{processor['path']}.{part}", family="lora", role=role, style="diffusers-old")
    for table in (_STRONG, _WEAK):
        for pattern, style, family, role in table:
            match = pattern.fullmatch(name)
            if match is None:
                continue
            parts = match.groupdict()
            path = parts["path"] or ""
            nested = _BASE_LAYERS.search(path)
            nesting = 0 if nested is None else nested[0].count(".")
            return Key(
                path=path if nested is None else path[: nested.start()],
                family=family,
                role=role or f"{parts['head']}{parts['rest']}",
                style=style,
                adapter=parts.get("adapter"),
                nesting=nesting,
                is_weak=table is _WEAK,
            )
    return None


_TRAINING_ONLY = re.compile(r".+\.(?:lora_velora_embed|ranknum)(?:\..+)?")
"""VeLoRA's: what its backward pass compresses activations with. AdaLoRA's: the rank that its configuration has."""


def is_for_training(name: str) -> bool:
    """Does a tensor of an adapter serve its training alone? What the adapter computes is the same without it."""
    return ("velora" in name or "ranknum" in name) and _TRAINING_ONLY.fullmatch(name) is not None


_QUICK_SURE = re.compile(r"lora_[adm]|prompt_encoder|adaption_|internal_xlora|oft_r")
"""Whatever is surely refused contains one of these."""


def refused_kind(name: str, *, sure: bool) -> str | None:
    """Return the kind of a recognised, unsupported adapter; with `sure` only by names that no base model has."""
    if sure and not _QUICK_SURE.search(name):
        return None
    table = _SURE if sure else _SURE + _UNSURE
    return next((kind for pattern, kind in table if pattern.fullmatch(name)), None)
