"""Types of PEFT's that ckpt carries: names, bytes and configuration stay PEFT's own, and PEFT itself judges them.

A role is the end of the tensor's name, without the adapter's own name. Refused by name are the types whose names or
tensors depend on the whole model: ADAPTION_PROMPT, FROD, SHADOW, XLORA.

Source: peft 0.21 `tuners/*/{config,layer,model}.py`, `utils/save_and_load.py`.
"""

from __future__ import annotations

import os.path
import re
from typing import ClassVar

from ckpt_tools.adapters.families.family import PEFT_COMMON, Family

_LITERAL = re.compile(r"[\w.]+")


class Carried(Family):
    """Factors that PEFT alone computes with."""

    is_carried = True
    names: ClassVar[tuple[tuple[str, str], ...]] = ()
    """(pattern before the adapter's own name, pattern behind it) of every tensor in a module."""
    weak: ClassVar[frozenset[str]] = frozenset()
    """Of these patterns those that prove no such type: others have them as well."""
    root: ClassVar[str] = "base_model."  # What stands in front of tensors that all modules share
    shared: ClassVar[tuple[tuple[str, str], ...]] = ()
    """As `names`, of these tensors; a live model has them in its modules as well."""
    peft_fields = frozenset(PEFT_COMMON.split())

    def peft_suffix(self, role: str) -> str | None:
        """Return the role, which is PEFT's own name."""
        return role

    def shared_name(self, role: str) -> str | None:
        """Return the whole name of a tensor that all modules share; None for one of a module."""
        is_shared = any(re.fullmatch(head + (rf"\.{rest}" if rest else ""), role) for head, rest in self.shared)
        return self.root + role if is_shared else None

    def may_be_flat(self, role: str) -> bool:
        """Many are vectors."""
        return True

    def may_be_whole(self, role: str) -> bool:
        """Places in a weight."""
        return "indices" in role


def _carried(peft_type: str, title: str, names: str, shared: str = "", **others: object) -> Carried:
    """Return a type; in small letters `peft_type` is the family's name.

    `names` are ends of the tensors' names, as patterns: what stands behind the adapter's own name follows an "@"; with
    "~" in front it may lack, with "?" it proves nothing. `shared` is like `names`.
    """
    heads = [_parts(name)[0] for name in f"{names} {shared}".split()]
    must = [name.lstrip("?").replace("@", ".") for name in names.split() if name[0] != "~"]
    attributes = {
        "name": peft_type.lower(),
        "title": title,
        "peft_type": peft_type,
        "marker": os.path.commonprefix(heads).partition("[")[0],  # noqa: RUF071 - letters, not parts of paths
        "names": tuple(map(_parts, names.split())),
        "weak": frozenset(_parts(name)[0] for name in names.split() if name[0] == "?"),
        "required": tuple(filter(_LITERAL.fullmatch, must)),
        "shared": tuple(map(_parts, shared.split())),
    }
    return type(title, (Carried,), attributes | others)()  # type: ignore[no-any-return]  # of a class that is made here


def _parts(name: str) -> tuple[str, str]:
    head, _, rest = name.lstrip("?~").partition("@")
    return head, rest


CARRIED: tuple[Carried, ...] = (
    _carried("ADALORA", "AdaLoRA", "?lora_A ?lora_B lora_E", may_prune=True),
    _carried("ADAMSS", "AdaMSS", r"adamss_A@\d+ adamss_B@\d+ adamss_newB"),
    _carried("BEFT", "BEFT", "beft_bias"),
    _carried("C3A", "C³A", "c3a_kernel"),
    _carried("DEFT", "DEFT", "deft_P ~deft_R"),
    _carried("DELORA", "DeLoRA", "delora_A delora_B delora_lambda delora_w_norm"),
    _carried("FOURIERFT", "FourierFT", "fourierft_spectrum"),
    _carried("GLORA", "PEFT's GLoRA", r"glora_[A-E]@\w+", name="peft_glora"),
    _carried("GRALORA", "GraLoRA", "gralora_A gralora_B ~gralora_A_general@weight ~gralora_B_general@weight"),
    _carried("HIRA", "HiRA", "hira_[AB] hira_embedding_[AB]"),
    _carried("HRA", "HRA", "hra_u"),
    _carried("IA3", "IA³", "ia3_l"),
    _carried("LILY", "Lily", "lily_A@weight lily_B@weight lily_router@weight"),
    _carried("LN_TUNING", "LN tuning", "ln_tuning_layers@weight ~ln_tuning_layers@bias"),
    _carried("MISS", "MiSS", "miss_block"),
    _carried("OSF", "OSF", "osf_svd_params@[SUV]_low"),
    _carried("PEANUT", "PEANuT", r"peanut_A@weight peanut_B@weight peanut_(?:en|de)coders@\d+\.weight"),
    _carried("POLY", "Poly", "poly_lora_A poly_lora_B poly_router@module_logits"),
    _carried("PSOFT", "PSOFT", "psoft_R@(?:weight|vector_[ab])"),
    _carried("PVERA", "PVeRA", "pvera_lambda_b pvera_lambda_d", "pvera_A pvera_B"),
    _carried("RANDLORA", "RandLoRA", "randlora_lambda randlora_gamma", "randlora_A randlora_B"),
    _carried("ROAD", "RoAd", "road_theta road_alpha"),
    _carried("SHIRA", "SHiRA", "shira_weight shira_indices"),
    _carried("SUPERTUNING", "SuperTuning", "supertuning_values ~supertuning_indices supertuning_lora_[AB]@weight"),
    _carried("TINYLORA", "TinyLoRA", "~tinylora_A ~tinylora_B ~tinylora_P", r"tinylora_v@\d+"),
    _carried("UNILORA", "Uni-LoRA", r"~unilora_(?:indices|scales)\w*", "unilora_theta_d"),
    _carried("VBLORA", "VB-LoRA", "vblora_logits_[AB](?:_topk_(?:indices|weights))?", "vblora_vector_bank"),
    _carried("VERA", "VeRA", "vera_lambda_b vera_lambda_d", "vera_A vera_B"),
    _carried("WAVEFT", "WaveFT", "waveft_spectrum"),
    _carried(
        "PROMPT_TUNING",  # embeddings of virtual tokens, of a whole model: which kind, the configuration alone says
        "prompt tuning",
        "",
        "prompt_embeddings prefix_task_(?:cols|rows)",
        name="prompt",
        also_types=("PREFIX_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "CPT", "CARTRIDGE"),
        marker="prompt_e",
        root="",
        required=("prompt_embeddings",),
        also_read=(
            ("peft", r"prompt_encoder\.(?P<adapter>[^.]+)\.embedding\.weight", "prompt_embeddings"),
            ("peft", r"prompt_encoder\.(?P<adapter>[^.]+)\.prefix_task_cols", "prefix_task_cols"),
            ("peft", r"prompt_encoder\.(?P<adapter>[^.]+)\.prefix_task_rows", "prefix_task_rows"),
        ),
    ),
)
