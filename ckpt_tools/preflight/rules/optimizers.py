"""CKPT08x: optimizers that cannot work on sharded or offloaded parameters."""

from __future__ import annotations

from collections.abc import Iterator

from ckpt_tools.preflight.rules.engines import wants_fsdp
from ckpt_tools.preflight.rules.rule import Case, Setting, Violation, error_rule

_BNB_TP = ("paged_adamw_8bit", "adamw_8bit", "adamw_bnb_8bit")
_BNB = (
    *_BNB_TP,
    "paged_adamw_32bit",
    "ademamix",
    "ademamix_8bit",
    "paged_ademamix_8bit",
    "paged_ademamix_32bit",
    "lion_8bit",
    "lion_32bit",
    "paged_lion_8bit",
    "paged_lion_32bit",
    "rmsprop_bnb",
    "rmsprop_bnb_8bit",
    "rmsprop_bnb_32bit",
)
"""Names of transformers' `OptimizerNames` that bitsandbytes implements."""


def _optimizer(case: Case) -> Setting | None:
    return case.get("optimizer") if case.framework == "axolotl" else case.get("optim")


@error_rule(
    "CKPT080: an optimizer of bitsandbytes under FSDP2",
    why="Its kernels refuse DTensors in the first step: they have no sharding rule",
    fix="adamw_torch_fused, or torchao's adamw_torch_8bit",
    frameworks=("axolotl", "trainer"),
)
def bitsandbytes_fsdp2(case: Case) -> Iterator[Violation]:
    """Source: axolotl `check_fsdp2_w_8bit_optimizer` (of which Trainer builds the same); bitsandbytes 0.50 itself."""
    found = _optimizer(case)
    if found is not None and case.is_fsdp2 and found.text in _BNB:
        fix = f"{found.key}: adamw_torch_8bit" if "8bit" in found.text else f"{found.key}: adamw_torch_fused"
        yield Violation(found.key, f"{found} under FSDP2", fix)


@error_rule(
    "CKPT081: an 8-bit optimizer on offloaded parameters",
    why="Its kernels run only on the GPU, and FSDP1 keeps the parameters on the host",
    fix="offload_params: false, or another optimizer",
    frameworks=("axolotl",),
)
def eight_bit_offload(case: Case) -> Iterator[Violation]:
    """Source: axolotl `check_fsdp_offload_w_8bit_optimizer`."""
    found, offload = _optimizer(case), case.fsdp_option("offload_params")
    if found is None or case.spec.engine != "fsdp1" or offload is None or not offload.is_on:
        return
    if "8bit" in found.text:
        yield Violation(found.key, f"{found} with {offload}", f"{offload.key}: false")


@error_rule(
    "CKPT082: bitsandbytes' 8-bit AdamW with tensor parallelism",
    why="axolotl refuses it",
    fix="adamw_torch_fused",
    frameworks=("axolotl",),
)
def eight_bit_tp(case: Case) -> Iterator[Violation]:
    """Source: axolotl `check_tensor_parallel_optimizer`."""
    found, tp = _optimizer(case), case.get("tensor_parallel_size")
    if found is None or tp is None or case.count(tp.key) <= 1 or found.text not in _BNB_TP:
        return
    if not case.is_fsdp2:  # CKPT080 has it
        yield Violation(found.key, f"{found} with {tp}", f"{found.key}: adamw_torch_fused")


@error_rule(
    "CKPT083: an optimizer that this engine does not have",
    why="axolotl refuses Muon, GaLore and the flash optimizers under DeepSpeed and FSDP1",
    fix="fsdp_version: 2, or another optimizer",
    frameworks=("axolotl",),
)
def engine_has_optimizer(case: Case) -> Iterator[Violation]:
    """Source: axolotl `check_muon_deepspeed_fsdp`, `check_flashoptim_deepspeed_fsdp`, `check_qgalore`."""
    found, speed = _optimizer(case), case.get("deepspeed")
    if found is None or not (found.text in ("muon", "q_galore_adamw8bit") or found.text.startswith("flash_")):
        return
    if speed is not None and speed.value:
        yield Violation(found.key, f"{found} with DeepSpeed", "FSDP2 instead of deepspeed")
    elif wants_fsdp(case) is not None and not case.is_fsdp2:
        yield Violation(found.key, f"{found} with FSDP1", "fsdp_version: 2")


@error_rule(
    "CKPT084: GaLore with what it cannot be combined with",
    why="axolotl refuses it: it projects whole parameters",
    fix="no adapter, and fsdp_config.use_orig_params: true",
    frameworks=("axolotl",),
)
def galore(case: Case) -> Iterator[Violation]:
    """Source: axolotl `check_qgalore`."""
    found, adapter = _optimizer(case), case.get("adapter")
    if found is None or found.text != "q_galore_adamw8bit":
        return
    if adapter is not None:
        yield Violation(found.key, f"{found} with {adapter}", "remove adapter, or another optimizer")
    kept = case.fsdp_option("use_orig_params")
    if case.is_fsdp2 and (kept is None or kept.value is not True):
        yield Violation(
            "fsdp_config.use_orig_params",
            f"{found} wants fsdp_config.use_orig_params: true",
            "fsdp_config.use_orig_params: true",
        )
