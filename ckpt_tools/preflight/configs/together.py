"""Several configs of one run: accelerate's and the arguments of the script that it starts, DeepSpeed's beside them.

Source: accelerate 1.15 `accelerator.py` (a plugin that is passed wins over the environment that `launch` makes of its
config), transformers 5.23 `training_args.py` (`mixed_precision`; `fsdp_plugin_args`) and
`integrations/deepspeed.py:HfTrainerDeepSpeedConfig.trainer_config_process` (values that must agree).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ckpt_tools.description.checkpoint import Finding
from ckpt_tools.errors import UsageError
from ckpt_tools.preflight.configs.config import Config
from ckpt_tools.preflight.configs.document import Document
from ckpt_tools.preflight.plain_values import as_truth, find_value
from ckpt_tools.preflight.spec import ParallelSpec

_OF_LAUNCHER = (
    "engine", "world_size", "axes", "mesh", "strategy", "reshard_after_forward", "offload_params", "offload_optimizer",
    "wrap_classes", "wrap_min_num_params", "wraps_blocks", "state_dict_type", "cpu_ram_efficient_loading",
)  # fmt: skip
"""Fields of the spec that the launcher's config says, unless the arguments shard the model themselves."""
_OF_TRAINER = ("trainer", "llamafactory")
"""Whose arguments are TrainingArguments, with more of their own."""
_DTYPES = ("param_dtype", "reduce_dtype", "master_dtype")
_AGREE = ("gradient_accumulation_steps", "gradient_clipping")
_NAMES = {"gradient_clipping": "max_grad_norm"}
_DEFAULTS = {"gradient_accumulation_steps": 1, "max_grad_norm": 1.0}
"""Of TrainingArguments."""
_SHARDING = ("fsdp1", "fsdp2", "deepspeed")


def join(launcher: Config, run: Config) -> Config:
    """Return the config of a run of which accelerate's config says one part, and the script's arguments another."""
    if run.framework not in _OF_TRAINER:
        what = f"a config of {launcher.framework} and one of {run.framework} are not read together"
        raise UsageError(what, where=run.path, hint="check each of them on its own")
    shards_itself = run.spec.engine in _SHARDING
    taken = ("world_size",) if shards_itself else _OF_LAUNCHER
    fields = {name: getattr(launcher.spec, name) for name in taken}
    names = {*taken, *(f"axes.{axis}" for axis in launcher.spec.axes if "axes" in taken)}
    if not _is_mixed(run) and launcher.spec.param_dtype is not None:
        fields |= {name: getattr(launcher.spec, name) for name in _DTYPES}
        names |= set(_DTYPES)
    elif not shards_itself:
        fields |= _dtypes_of_arguments(launcher.spec, run.spec)
    recomputes = run.spec.activation_checkpointing or launcher.spec.activation_checkpointing
    keys = {name: key for name, key in run.spec.keys.items() if name not in names}
    keys |= {name: key for name, key in launcher.spec.keys.items() if name in names or name not in keys}
    spec = replace(run.spec, **fields, activation_checkpointing=recomputes, keys=keys)
    if not shards_itself:
        spec = replace(spec, framework=launcher.framework)
    whole = replace(launcher.spec if shards_itself else spec, keys=launcher.spec.keys if shards_itself else keys)
    findings = tuple(_contradictions(launcher, run))
    return replace(
        run,
        spec=spec,
        world_keys=(*launcher.world_keys, *run.world_keys),
        options=run.options.added_to(launcher.options),
        findings=run.findings + findings,
        beside=(replace(launcher, spec=whole),),
    )


def _dtypes_of_arguments(launcher: ParallelSpec, run: ParallelSpec) -> dict[str, str | None]:
    """Return the dtypes where the arguments say the mixed precision: FSDP averages in it, and widens the rest."""
    is_fsdp = launcher.engine in ("fsdp1", "fsdp2")
    widens = is_fsdp or launcher.engine == "deepspeed"
    return {
        "reduce_dtype": run.param_dtype if is_fsdp else run.reduce_dtype,
        "master_dtype": "f32" if widens and run.param_dtype in ("bf16", "f16") else run.master_dtype,
    }


def _contradictions(launcher: Config, run: Config) -> Iterator[Finding]:
    """Yield what both configs say, and not alike."""
    precision = find_value(launcher.values, "mixed_precision")
    said = next((name for name in ("bf16", "fp16") if _is_on(run, name)), None)
    if said and isinstance(precision, str) and precision.lower() not in (said, "no"):
        yield Finding.warning(
            "contradiction",
            "mixed_precision",
            f"mixed_precision: {precision}, and {said} in {run.path}: the training arguments win",
            f"mixed_precision: {said}",
        )
    key = run.spec.keys.get("engine", "fsdp")
    if run.spec.engine in _SHARDING and launcher.spec.engine in _SHARDING:
        is_same = run.spec.engine == launcher.spec.engine
        yield Finding(
            code="contradiction",
            severity="warning" if is_same or run.spec.engine != "deepspeed" else "error",
            where=key,
            what=f"{key} shards the model, and so does {launcher.path}: the training arguments win",
            hint=f"say it in one place: remove {key}, or distributed_type: MULTI_GPU in {launcher.path}",
        )
    if launcher.spec.engine == "deepspeed" and run.spec.engine != "deepspeed":
        for name in _AGREE:
            other = _NAMES.get(name, name)
            path = f"deepspeed_config.{name}"
            ours = find_value(launcher.values, path)
            theirs = find_value(run.values, other, _DEFAULTS[other])
            if ours not in (None, "auto", "none", "None") and _number(ours) != _number(theirs):
                yield Finding.error(
                    "contradiction",
                    path,
                    f"{path}: {ours}, and {other}: {theirs} in {run.path}: Trainer stops where they differ",
                    f"{path}: {theirs}, or auto",
                )


def _is_mixed(run: Config) -> bool:
    """Do the arguments, or their defaults (TRL's), say a mixed precision? A dtype of stored weights is none."""
    if any(_is_on(run, name) for name in ("bf16", "fp16")):
        return True
    is_off = as_truth(find_value(run.values, "bf16")) is False
    is_stored = run.spec.keys.get("param_dtype") in ("torch_dtype", "dtype")
    return run.spec.param_dtype is not None and not is_off and not is_stored


def _number(value: object) -> float | str:
    try:
        return float(str(value)[:40])
    except ValueError:
        return str(value)


def _is_on(config: Config, name: str) -> bool:
    return as_truth(find_value(config.values, name)) is True


def with_deepspeed(documents: Sequence[Document]) -> list[Document]:
    """Return the documents with DeepSpeed's file as the `deepspeed` of the arguments beside it, if there is one."""
    others = [one for one in documents if not (one.values is not None and "zero_optimization" in one.values)]
    files = [one for one in documents if one not in others]
    if len(files) != 1 or len(others) != 1 or others[0].values is None or others[0].values.get("deepspeed"):
        return list(documents)
    values = {**others[0].values, "deepspeed": files[0].path}
    return [replace(others[0], values=values, files=(*others[0].files, files[0].path))]
