"""ai-toolkit's YAML: the options that it has, and those of its plan for FSDP.

Options that it does not know it drops silently (`kwargs.get`).

Source: ai-toolkit, August 2026: `toolkit/config_modules.py` (`TrainConfig`, `ModelConfig`, `NetworkConfig` and their
defaults), `jobs/process/BaseSDTrainProcess.py`; the FSDP plan: `train.dist_mode: fsdp` wraps with FSDP1
(`FullyShardedDataParallel`, `MixedPrecision`), blocks of FLUX.2 by class, and saves SHARDED_STATE_DICT.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckpt_tools.checkpoint.entries import Finding, Severity
from ckpt_tools.preflight.configs.document import Document
from ckpt_tools.preflight.configs.field_rows import Given, ReaderInput, TrainerReader, read_table
from ckpt_tools.preflight.configs.names import known
from ckpt_tools.preflight.configs.schema import section
from ckpt_tools.preflight.plain_values import dtype_name, find_value
from ckpt_tools.preflight.spec import AdapterSpec, Engine
from ckpt_tools.text import nearest

_ARCHS = known("ai_toolkit", "arch")
"""Models; another one is loaded as Stable Diffusion. Source: `toolkit/util/get_model.py:get_model_class`."""
_FLUX2_BLOCKS = ("DoubleStreamBlock", "SingleStreamBlock")


_OPTIONS, _PROCESS = section("ai-toolkit"), section("ai-toolkit.process")


def _engine(given: Given) -> Engine:
    mode, world = given.raw.train.dist_mode or "none", given.spec.world_size
    if mode.startswith("fsdp"):
        return "fsdp2" if mode == "fsdp2" else "fsdp1"
    return "ddp" if mode == "ddp" or (world is not None and world > 1) else "none"


def _axes(given: Given) -> dict[str, int]:
    if given.spec.engine == "none":
        return {}
    if given.spec.engine == "ddp":
        return {"dp_replicate": -1}
    return {"dp_replicate": -1, "dp_shard": -1} if given.raw.train.fsdp_sharding == "hybrid" else {"dp_shard": -1}


def _compute(given: Given) -> str | None:
    train = given.raw.train
    mixed = train.fsdp_mixed_precision if given.is_fsdp else None
    return dtype_name(mixed or train.dtype or "fp32")


def _wrap_classes(given: Given) -> tuple[str, ...]:
    is_flux2 = (given.raw.model.arch or "").lower().startswith("flux2")
    return _FLUX2_BLOCKS if is_flux2 and _wraps_blocks(given) else ()


def _wraps_blocks(given: Given) -> bool:
    return given.raw.train.fsdp_auto_wrap is not False


def _network(given: Given) -> Any:  # noqa: ANN401 - a section
    return given.raw.network if "network" in given.raw.model_fields_set else None


def _adapter(given: Given) -> AdapterSpec | None:
    """Return the adapter. A LoKr of full rank, the default, has no rank and no scale of its own."""
    network = _network(given)
    if network is None:
        return None
    kind = (network.type or "lora").lower()
    options = network.network_kwargs if isinstance(network.network_kwargs, Mapping) else {}
    named = options.get("only_if_contains")
    targets = tuple(str(name) for name in named) if isinstance(named, list) else ()
    if kind == "lokr" and network.lokr_full_rank is not False:
        return AdapterSpec(kind=kind, targets=targets)
    rank = next((size for size in (network.rank, network.linear) if size is not None), 4)
    alpha = next((value for value in (network.linear_alpha, network.alpha) if value is not None), 1.0)
    return AdapterSpec(kind=kind, rank=rank, alpha=alpha, targets=targets)


def _quantize(given: Given) -> str | None:
    model = given.raw.model
    return (model.qtype or "qfloat8").partition("|")[0] if model.quantize else None


_TABLE = read_table(
    "ai-toolkit",
    engine=_engine,
    axes=_axes,
    strategy=lambda given: f"{given.raw.train.fsdp_sharding or 'full'}_shard",
    compute=_compute,
    master_dtype=lambda given: "f32" if _network(given) is not None else dtype_name(given.raw.train.dtype or "fp32"),
    wrap_classes=_wrap_classes,
    wraps_blocks=_wraps_blocks,
    adapter=_adapter,
    quantize=_quantize,
)


def _check(given: Given) -> None:
    processes = find_value(given.document.values, "config.process")
    count = len(processes) if isinstance(processes, list) else 0
    if _is_process(given.document):
        what = "these options belong below config.process; ai-toolkit stops without it"
        hint = "put them into a job: config: {process: [...]}"
        given.findings.append(Finding.error("no-job", "train", what, hint))
        count = 1
    if count == 0:
        what, hint = "config.process is empty, so nothing is trained", "add a training process to config.process"
    else:
        what, hint = f"{count} processes run one after the other; the first one is checked", "check each one separately"
    severity: Severity = "error" if count == 0 else "info"
    if count != 1:
        given.findings.append(
            Finding(code="several-processes", severity=severity, where="config.process", what=what, hint=hint)
        )
    arch = (given.raw.model.arch or "").partition(":")[0]
    if arch and arch not in _ARCHS:
        near = nearest(arch, _ARCHS)
        what = f"{given.raw.model.arch} is not a model of ai-toolkit: unless you added it, Stable Diffusion is loaded"
        hint = f"arch: {near}" if near else "check which version of ai-toolkit has this model"
        given.findings.append(Finding.warning("unknown-value", given.spell("model.arch"), what, hint))
    if given.is_fsdp and given.raw.train.fsdp_sharding == "hybrid":
        problem = "hybrid shards within a machine, but the config does not set the ranks per machine: no mesh"
        advice = "fsdp_sharding: full shards over all ranks"
        given.findings.append(Finding.info("unknown-value", given.spell("train.fsdp_sharding"), problem, advice))


def _looks_like(document: Document) -> bool:
    job = (document.values or {}).get("config")
    return (isinstance(job, Mapping) and "process" in job) or _is_process(document)


def _is_process(document: Document) -> bool:
    """Is this a process without its job, as the plan for FSDP shows it?"""
    values = document.values or {}
    train = values.get("train")
    return "config" not in values and isinstance(train, Mapping) and "dist_mode" in train


def _prepare(document: Document) -> ReaderInput:
    """Make a file ready; the first process is the one that counts."""
    source = ReaderInput(
        model=_OPTIONS,
        table=_TABLE,
        values=document.keyed(),
        part=lambda raw: raw.config.process[0] if raw.config.process else _PROCESS(),
        root="config.process[0]",
        check=_check,
    )
    if not _is_process(document):
        return source
    options = {"config": {"process": [source.values]}}
    return replace(source, options=options, spell=lambda path: path.removeprefix("config.process[0]").lstrip("."))


READER = TrainerReader(name="ai-toolkit", looks_like=_looks_like, prepare=_prepare)
