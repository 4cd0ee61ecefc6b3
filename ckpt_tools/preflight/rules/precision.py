"""CKPT05x and CKPT06x: dtypes; what is saved and can be loaded again, and memory that is spent twice."""

from __future__ import annotations

from collections.abc import Iterator

from ckpt_tools.preflight.plain_values import dtype_name
from ckpt_tools.preflight.rules.rule import AI_PROCESS, Stated, Subject, Violation, enabled, error_rule, warning_rule
from ckpt_tools.units import format_size

# CKPT05x: dtypes that contradict each other, or lose what they should keep.

_BITS = {"bf16": 16, "f16": 16, "f32": 32}
_MIXES = ("no", "fp16", "bf16", "fp8")
_VERL = "actor_rollout_ref.actor.fsdp_config"


@error_rule(
    "CKPT050 (trainer, axolotl): fp16 and bf16 at once",
    why="Only one compute dtype is possible; the trainer rejects two",
    fix="keep bf16 if the GPUs support it",
)
def one_half(case: Subject) -> Iterator[Violation]:
    """Source: `transformers/training_args.py:_validate_args`; axolotl hands both on to it."""
    half = [case.first("fp16", "float16"), case.first("bf16", "bfloat16")]
    if all(map(enabled, half)):
        yield Violation("fp16", "fp16 and bf16 are both on; only one can be", "fp16: false")


@warning_rule(
    "CKPT051 (openrlhf, ai-toolkit): fp16 without loss scaling",
    why="Small gradients become zero in fp16: FSDP's mixed precision scales no loss, and this trainer has no scaler",
    fix="bf16",
)
def needs_scaler(case: Subject) -> Iterator[Violation]:
    """Source: OpenRLHF's FSDP2 notes, ai-toolkit's FSDP plan; accelerate, verl and DeepSpeed bring a scaler."""
    if case.framework == "openrlhf":
        found = case.flag("param_dtype")
        wants = case.is_fsdp2
    else:
        found, wants = case.ai_option("train.fsdp_mixed_precision"), case.wants_ai_fsdp
    if found is not None and wants and dtype_name(found.text) == "f16":
        yield Violation(found.key, f"{found} under FSDP, without loss scaling", f"{found.key} bf16")


@warning_rule(
    "CKPT052: gradients are averaged in a narrower dtype than they were computed in",
    why="The sum over ranks loses precision that each rank had",
    fix="reduce in the compute dtype, or in f32",
)
def reduce_width(case: Subject) -> Iterator[Violation]:
    """Compare reduce_dtype with param_dtype."""
    compute, reduce = case.spec.param_dtype, case.spec.reduce_dtype
    if not case.is_fsdp or compute is None or reduce is None:
        return
    if _BITS.get(reduce, 0) < _BITS.get(compute, 0):
        key = case.key("reduce_dtype", case.key("param_dtype"))
        yield Violation(key, f"computed in {compute}, averaged in {reduce}", f"{key}: {compute}")


@warning_rule(
    "CKPT053 (torchtitan, verl): no f32 copy of the weights that are trained",
    why="An update smaller than the spacing of 16-bit numbers is rounded away: training stalls at small learning rates",
    fix="use f32 weights with bf16 computation",
)
def master_weights(case: Subject) -> Iterator[Violation]:
    """Source: torchtitan `config/configs.py:TrainingConfig.dtype`, verl `FSDPEngineConfig.model_dtype`."""
    if case.spec.master_dtype in ("bf16", "f16") and case.spec.adapter is None:
        key = case.key("master_dtype")
        what = f"weights and optimizer state are only in {case.spec.master_dtype}"
        yield Violation(key, what, f"{key}: {'float32' if case.framework == 'torchtitan' else 'fp32'}")


@warning_rule(
    "CKPT054 (axolotl, ai-toolkit, verl, torchtitan): two options name different dtypes for the same thing",
    why="One of them takes effect, and it may not be the intended one",
    fix="use the same dtype in both",
)
def same_dtype(case: Subject) -> Iterator[Violation]:
    """Source: axolotl `mixed_precision_policy`, verl `fsdp_workers.py`, torchtitan `TrainingConfig`."""
    if case.framework == "axolotl":
        policy = case.fsdp_option("mixed_precision_policy")
        flags = [one for path in ("bf16", "fp16") if (one := enabled(case.get(path)))]
        if policy is None or len(flags) != 1 or dtype_name(policy.text) is None:
            return
        if dtype_name(policy.text) != dtype_name(flags[0].key):
            yield Violation(policy.key, f"{policy}, but {flags[0]}", f"{policy.key}: {flags[0].key}")
        return
    pairs = {
        "verl": (case.get(f"{_VERL}.mixed_precision.param_dtype"), case.get(f"{_VERL}.dtype")),
        "ai-toolkit": (case.ai_option("train.fsdp_mixed_precision"), case.ai_option("train.dtype")),
    }
    if case.framework in pairs:
        first, second = pairs[case.framework]
        if case.framework == "ai-toolkit" and not case.wants_ai_fsdp:
            return
        if first is None or second is None or None in (dtype_name(first.text), dtype_name(second.text)):
            return
        if dtype_name(first.text) != dtype_name(second.text):
            yield Violation(first.key, f"{first}, but {second}", f"{second.key}: {first.text}")
        return
    stored, computed = case.get("training.dtype"), case.get("training.mixed_precision_param")
    if (
        stored is not None
        and computed is not None
        and (dtype_name(stored.text), dtype_name(computed.text)) == ("bf16", "f32")
    ):
        what = f"{stored}, but {computed}: bf16 weights are widened for each layer, which gains no precision"
        yield Violation(computed.key, what, f"{computed.key}: bfloat16")


@error_rule(
    "CKPT055 (accelerate): torchao's fp8 with cpu_ram_efficient_loading",
    why="accelerate refuses it",
    fix="fsdp_cpu_ram_efficient_loading: false",
)
def fp8_loading(case: Subject) -> Iterator[Violation]:
    """Source: `accelerate/accelerator.py:Accelerator.__init__`."""
    mixed, backend = case.get("mixed_precision"), case.first("fp8_config.backend", "fp8_config.fp8_backend")
    loading = case.fsdp_option("cpu_ram_efficient_loading")
    if mixed is None or mixed.text != "fp8" or backend is None or backend.text.upper() != "AO" or not case.is_fsdp:
        return
    if loading is None or loading.is_on:
        key = loading.key if loading is not None else "fsdp_config.fsdp_cpu_ram_efficient_loading"
        what = f"{loading or key + ' is missing, which means true'}, with {backend} and mixed_precision: fp8"
        yield Violation(key, what, f"{key}: false")


@error_rule(
    "CKPT056 (accelerate): a mixed_precision that does not exist", why="The launcher stops", fix="no, fp16, bf16 or fp8"
)
def known_precision(case: Subject) -> Iterator[Violation]:
    """Source: `accelerate/utils/launch.py` (`PrecisionType`), which compares in lower case."""
    mixed = case.get("mixed_precision")
    if mixed is None or mixed.is_off or mixed.text.lower() in _MIXES:  # a bare `no` in YAML is False
        return
    near = {"bf16": "bf16", "f16": "fp16", "f32": "'no'"}.get(dtype_name(mixed.text) or "", "bf16")
    yield Violation("mixed_precision", f"{mixed}; must be one of {', '.join(_MIXES)}", f"mixed_precision: {near}")


@error_rule(
    "CKPT057 (axolotl): fp8 all-gather without FSDP2",
    why="axolotl rejects it: FSDP1's flat parameters cannot be gathered in fp8",
    fix="fsdp_version: 2",
)
def fp8_gather(case: Subject) -> Iterator[Violation]:
    """Source: axolotl `check_fp8_config`, which reads the top-level fsdp_version alone."""
    found, version = enabled(case.get("fp8_enable_fsdp_float8_all_gather")), case.get("fsdp_version")
    if found is not None and (version is None or version.text != "2"):
        yield Violation(found.key, f"{found}, but {version or 'no fsdp_version'}", "fsdp_version: 2")


# CKPT06x: what is saved, what can be loaded again, and memory that is spent twice.

_MANY_BYTES = 64 * 10**9  # what rank 0 may gather on its host before it is worth a word
_VERL_SAVES = "actor_rollout_ref.actor.checkpoint"


def _gathered(case: Subject) -> int | None:
    """Return the bytes that rank 0 holds when it gathers parameters and Adam's two moments in f32."""
    params = case.facts.num_params
    return None if params is None else params * (4 if case.spec.adapter is not None else 12)


@warning_rule(
    "CKPT060 (accelerate, trainer, axolotl): FULL_STATE_DICT, because nothing else is set",
    why="Every save gathers all parameters and the optimizer's state in the host memory of rank 0, while others wait;"
    " resuming needs the same again",
    fix="state_dict_type: SHARDED_STATE_DICT; ckpt gather merges it into one model afterwards",
)
def full_by_default(case: Subject) -> Iterator[Violation]:
    """Source: accelerate `set_state_dict_type` (FULL under FSDP1, SHARDED under FSDP2), transformers (FULL)."""
    if not case.is_fsdp or case.fsdp_option("state_dict_type") is not None:
        return
    if case.framework == "accelerate" and case.is_fsdp2:
        return
    nbytes = _gathered(case)
    amount = f", {format_size(nbytes)} with the optimizer" if nbytes is not None else ""
    key = case.fsdp_key("state_dict_type")
    what = f"{key} is missing, which means FULL_STATE_DICT: rank 0 gathers everything{amount}"
    yield Violation(key, what, f"{key}: SHARDED_STATE_DICT")


@warning_rule(
    "CKPT061 (accelerate, trainer, axolotl): FULL_STATE_DICT of a large model",
    why="Rank 0 gathers all parameters and the optimizer's state in its host memory at every save",
    fix="use SHARDED_STATE_DICT; ckpt gather merges it into one model afterwards",
)
def full_and_large(case: Subject) -> Iterator[Violation]:
    """Compare what is gathered with what a host can be expected to spare."""
    found, nbytes = case.fsdp_option("state_dict_type"), _gathered(case)
    if found is None or not case.is_fsdp or found.text.upper() not in ("FULL_STATE_DICT", "1") or nbytes is None:
        return
    if nbytes > _MANY_BYTES:
        what = f"{found}: rank 0 gathers {format_size(nbytes)} on its host at every save"
        yield Violation(found.key, what, f"{found.key}: SHARDED_STATE_DICT")


@warning_rule(
    "CKPT065 (trainer, axolotl, torchtitan, verl, openrlhf): "
    "a run that resumes from checkpoints without optimizer state",
    why="Moments and step count start from zero: the loss jumps, and no message explains it",
    fix="save the optimizer too",
)
def resumes_without_optimizer(case: Subject) -> Iterator[Violation]:
    """Look for saves that leave the optimizer out, where an option loads them again."""
    found, resume = _leaves_out(case), _resumes(case)
    if found is not None and resume is not None:
        yield Violation(
            found.key, f"{found} leaves out the optimizer, but {resume} resumes from it", _with_optimizer(found)
        )


def _leaves_out(case: Subject) -> Stated | None:
    if case.framework in ("trainer", "axolotl"):
        return enabled(case.get("save_only_model"))
    if case.framework == "torchtitan":
        found = case.get("checkpoint.exclude_from_loading")
        return found if found is not None and "optimizer" in found.text else None
    if case.framework == "verl":
        for name in ("load_contents", "save_contents"):
            found = case.get(f"{_VERL_SAVES}.{name}")
            if found is not None and isinstance(found.value, list) and "optimizer" not in found.value:
                return found
        return None
    return enabled(case.flag("disable_ds_ckpt"))


def _resumes(case: Subject) -> Stated | None:
    if case.framework in ("trainer", "axolotl"):
        found = case.first("resume_from_checkpoint", "auto_resume_from_checkpoints")
        return found if found is not None and not found.is_off else None
    if case.framework == "torchtitan":
        return enabled(case.first("checkpoint.enable", "checkpoint.enable_checkpoint"))
    if case.framework == "verl":
        found = case.get("trainer.resume_mode")
        return found if found is not None and found.text != "disable" else None
    return enabled(case.flag("load_checkpoint"))


def _with_optimizer(found: Stated) -> str:
    if found.key.endswith("_contents"):
        return f"{found.key}: [model, optimizer, extra]"
    if found.key.endswith("exclude_from_loading"):
        return f"{found.key} without optimizer"
    return f"remove {found.key}" if found.key.startswith("--") else f"{found.key}: false"


@error_rule(
    "CKPT066 (accelerate, axolotl): offloading of activations that are not recomputed",
    why="accelerate and axolotl reject it: only inputs of checkpointed blocks are offloaded",
    fix="enable activation checkpointing",
)
def offloaded_activations(case: Subject) -> Iterator[Violation]:
    """Source: `FullyShardedDataParallelPlugin.__post_init__`, axolotl `check_activation_offloading_wo_gc`."""
    if case.framework == "axolotl":
        found, needed = case.get("activation_offloading"), case.get("gradient_checkpointing")
        if found is not None and not found.is_off and (needed is None or needed.is_off):
            yield Violation(found.key, f"{found} without gradient_checkpointing", "gradient_checkpointing: true")
        return
    found = enabled(case.fsdp_option("activation_checkpointing_offload"))
    if found is None or not case.is_fsdp:
        return
    if not enabled(case.fsdp_option("activation_checkpointing")):
        yield Violation(
            found.key, f"{found} without activation_checkpointing", "fsdp_config.fsdp_activation_checkpointing: true"
        )
    elif not case.is_fsdp2:
        yield Violation(found.key, f"{found} needs FSDP2", "fsdp_config.fsdp_version: 2")


def _own_checkpointing(case: Subject) -> Stated | None:
    """Return Trainer's or axolotl's own checkpointing option if it is on (its old name too)."""
    found = case.first("activation_checkpointing", "gradient_checkpointing")
    return found if found is not None and not found.is_off else None


@warning_rule(
    "CKPT068 (trainer, axolotl, ai-toolkit): gradient checkpointing where FSDP does it better, or makes it unnecessary",
    why="Trainer's own gathers the parameters of every block once more in backward; ai-toolkit's costs a third of the"
    " speed for memory that sharding has freed",
    fix="use FSDP's own activation_checkpointing, or none",
)
def redundant_checkpointing(case: Subject) -> Iterator[Violation]:
    """Source: `transformers/training_args.py:_process_fsdp_args`; ai-toolkit's FSDP plan."""
    if case.framework == "ai-toolkit":
        found = enabled(case.ai_option("train.gradient_checkpointing"))
        if found is not None and case.wants_ai_fsdp:
            fix = f"{AI_PROCESS}.train.gradient_checkpointing: false, if ckpt estimate shows that it fits"
            yield Violation(found.key, f"{found} with dist_mode: fsdp, which already shards that memory", fix)
        return
    outer, inner = _own_checkpointing(case), enabled(case.fsdp_option("activation_checkpointing"))
    if case.is_fsdp and outer is not None and inner is None:
        what = f"{outer} under FSDP gathers every block once more in backward"
        yield Violation(outer.key, what, f"{outer.key}: false and fsdp_config.activation_checkpointing: true")
