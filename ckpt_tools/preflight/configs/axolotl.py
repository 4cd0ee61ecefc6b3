"""axolotl's YAML.

Source: axolotl 0.21: `utils/schemas/` (fields and defaults; a key that is none is dropped silently),
`utils/schemas/validation.py:check_fsdp_version_in_fsdp_config` (a missing version is 1), `utils/distributed.py:
_get_parallel_config_kwargs`, `utils/trainer.py:setup_fsdp_envs` and `prepare_optim_env`, `utils/config/__init__.py`
(dtypes), `monkeypatch/accelerate/parallelism_config.py` (expert parallelism is an axis of its own, the outermost).
"""

from __future__ import annotations

from collections.abc import Mapping

from ckpt_tools.preflight.configs.deepspeed import deepspeed_rows
from ckpt_tools.preflight.configs.field_rows import Given, ReaderInput, Table, TrainerReader, read_table, row
from ckpt_tools.preflight.configs.fsdp_plugin import SECTION, plugin_rows, without_prefix
from ckpt_tools.preflight.configs.schema import section
from ckpt_tools.preflight.configs.trainer import DEFAULTS
from ckpt_tools.preflight.plain_values import as_truth, find_value
from ckpt_tools.preflight.spec import AdapterSpec, Engine, build_mesh

_QUANTIZED = {"load_in_4bit": "nf4", "load_in_8bit": "int8", "gptq": "gptq"}
ORDER = ("ep", "dp_replicate", "dp_shard", "cp", "tp")  # Rank order
_OPTIONS = section("axolotl")


def _engine(given: Given) -> Engine:
    raw = given.raw
    if raw.fsdp or find_value(given.values, SECTION):
        # Releases that take the list `fsdp` mean FSDP1 by a missing version; 0.20 and later have none but FSDP2.
        version = raw.fsdp_version or raw.fsdp_config.version or (1 if raw.fsdp else 2)
        return "fsdp2" if version == 2 else "fsdp1"
    if raw.deepspeed:
        return "deepspeed"
    return "none" if given.spec.world_size == 1 else "ddp"


def _axes(given: Given) -> dict[str, int]:
    """Return the axes, with what axolotl fills in: all ranks that are left, to shard over or to replicate over."""
    sizes, engine = {axis: size for axis, size in given.spec.axes.items() if size > 1}, given.spec.engine
    if engine == "none":
        return sizes
    if "dp_shard" in sizes:
        sizes.setdefault("dp_replicate", -1)
    elif engine in ("fsdp1", "fsdp2", "deepspeed"):
        sizes["dp_shard"] = -1
    elif "dp_replicate" not in sizes:
        sizes["dp_replicate"] = -1
    return sizes


def _dtypes(given: Given) -> tuple[str, str | None, str]:
    """Return the dtypes of computation, averaging, and what is trained, which axolotl's own FSDP2 does not widen."""
    compute, stored, is_mixed = _precision(given)
    is_widened = given.spec.engine == "fsdp1" and is_mixed
    return compute, compute if given.is_fsdp else None, "f32" if is_widened else stored


def _precision(given: Given) -> tuple[str, str, bool]:
    """Return the dtypes of computation and loading, and whether accelerate mixes; bf16: auto gives way to fp16."""
    raw = given.raw
    word = "auto" if raw.bf16 is None else raw.bf16.lower()
    if as_truth(word) is True or (word == "auto" and not raw.fp16):
        return "bf16", "bf16", True
    if word == "full" or raw.bfloat16:
        return "bf16", "bf16", False
    if raw.fp16:
        return "f16", "f16", True
    if raw.float16:
        return "f16", "f16", False
    return ("bf16", "f32", True) if raw.fp8 else ("f32", "f32", False)


def _recomputes(given: Given) -> bool:
    words = (given.raw.gradient_checkpointing, given.raw.activation_checkpointing)
    return any(word is not None and as_truth(word) is not False for word in words)


def _adapter(given: Given) -> AdapterSpec | None:
    raw = given.raw
    if raw.adapter is None or as_truth(raw.adapter) is False:
        return None
    kind = "lora" if raw.adapter.lower() == "qlora" else raw.adapter.lower()
    targets = ("all-linear",) if raw.lora_target_linear else raw.lora_target_modules or ()
    return AdapterSpec(kind=kind, rank=raw.lora_r, alpha=raw.lora_alpha, targets=targets)


_TABLE = read_table(
    "axolotl",
    engine=_engine,
    cp=lambda given: given.raw.context_parallel_size or given.raw.sequence_parallel_degree,
    axes=_axes,
    mesh=lambda given: build_mesh(given.spec.axes, given.spec.world_size, order=ORDER),
    dtypes=_dtypes,
    recomputes=_recomputes,
    adapter=_adapter,
    quantize=lambda given: next((kind for name, kind in _QUANTIZED.items() if getattr(given.raw, name)), None),
)
# axolotl hands its options on to TrainingArguments, whose defaults count.
_BY_ENGINE: Mapping[Engine, Table] = {
    "deepspeed": deepspeed_rows(),
    **plugin_rows(DEFAULTS, offload=row("fsdp_config.offload_params", default=False)),
}


READER = TrainerReader(
    name="axolotl",
    looks_like=lambda document: "base_model" in (document.values or {}),
    prepare=lambda document: without_prefix(
        ReaderInput(model=_OPTIONS, table=_TABLE, by_engine=_BY_ENGINE, values=document.keyed())
    ),
)
