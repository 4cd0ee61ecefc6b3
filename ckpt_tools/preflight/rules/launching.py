"""CKPT12x: devices of the processes that a launcher starts, and of inference engines beside training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckpt_tools.options.preflight import Framework
from ckpt_tools.preflight.rules.rule import Case, Violation, error_rule

_TENSOR: Mapping[Framework, tuple[str, ...]] = {
    "verl": ("actor_rollout_ref.rollout.tensor_model_parallel_size",),
    "openrlhf": ("vllm.tensor_parallel_size", "vllm_tensor_parallel_size"),
}
"""Ranks over which one inference engine cuts its tensors."""


@error_rule(
    "CKPT120: devices that the processes of a machine do not have",
    why="Only the devices of gpu_ids are visible: a process beyond them stops with an invalid device ordinal",
    fix="one id per process of a machine, or gpu_ids: all",
    frameworks=("accelerate",),
)
def device_ids(case: Case) -> Iterator[Violation]:
    """Source: accelerate 1.15.0 `utils/launch.py:264-277`, `commands/launch.py:_validate_launch_command`."""
    found, processes = case.option("gpu_ids"), case.count("num_processes", 0)
    if found is None or found.text.lower() in ("all", "") or case.is_on("use_cpu"):
        return
    ids, machines = [one.strip() for one in found.text.split(",") if one.strip()], max(case.count("num_machines"), 1)
    kind = case.get("distributed_type")
    if len(set(ids)) < len(ids):
        right = ",".join(map(str, range(len(ids))))
        yield Violation(found.key, f"{found} names a device twice", f"{found.key}: '{right}'")
    elif len(ids) < processes // machines:
        yield Violation(
            found.key,
            f"{processes // machines} processes on a machine, and {len(ids)} devices ({found})",
            f"{found.key}: all, or num_processes: {len(ids) * machines}",
        )
    elif len(ids) < 2 and machines == 1 and kind is not None and kind.text.startswith("MULTI_"):
        yield Violation(found.key, f"{kind} with one device ({found})", f"{found.key}: all")


@error_rule(
    "CKPT121: inference engines that do not fill the devices of training",
    why="Engines that share the devices of the actor take all of them in equal parts: verl and OpenRLHF assert it",
    fix="engines × tensor parallel size = ranks of the actor",
    frameworks=("verl", "openrlhf"),
)
def engines_fill(case: Case) -> Iterator[Violation]:
    """Source: verl 0.9.1 `workers/engine_workers.py:655-660`, OpenRLHF 0.11.2 `cli/train_ppo_ray.py:56-64`."""
    ranks, size = case.spec.world_size, case.option(*_TENSOR[case.framework])
    if ranks is None:
        return
    if case.framework == "verl":
        at = "actor_rollout_ref.rollout."
        if size is None or size.count is None or size.count < 1 or case.count(f"{at}nnodes", 0) > 0:
            return
        engine = size.count * case.count(f"{at}data_parallel_size") * case.count(f"{at}pipeline_model_parallel_size")
        if engine > 0 and ranks % engine:
            what = f"an engine of {engine} ranks, and {ranks} ranks are no multiple of it"
            yield Violation(size.key, what, f"{size.key}: a divisor of {ranks}")
        return
    engines = case.option("vllm.num_engines", "vllm_num_engines")
    if not case.is_on("train.colocate_all", "colocate_all_models") or case.is_on("train.async_enable", "async_train"):
        return
    width = 1 if size is None else size.count
    if engines is None or engines.count is None or engines.count < 1 or width is None or width < 1:
        return
    if engines.count * width != ranks:
        yield Violation(
            engines.key,
            f"{engines.count} engines of {width} ranks, and the actor has {ranks}",
            case.written(engines.key, ranks // width) if ranks % width == 0 else f"engines × their ranks = {ranks}",
        )


@error_rule(
    "CKPT122: an inference engine whose ranks do not divide the attention heads",
    why="vLLM and SGLang cut attention by heads, and refuse a tensor parallel size that does not divide them",
    fix="a divisor of the heads",
    frameworks=("verl", "openrlhf"),
)
def engine_heads(case: Case) -> Iterator[Violation]:
    """Source: vLLM `config/model.py:verify_with_parallel_config`."""
    size, heads, ranks = case.option(*_TENSOR[case.framework]), case.facts.num_heads, case.spec.world_size
    if size is None or size.count is None or size.count < 2 or heads is None or heads % size.count == 0:
        return
    common = [one for one in range(1, size.count) if heads % one == 0 and (ranks or one) % one == 0]
    yield Violation(size.key, f"{size} does not divide {heads} attention heads", case.written(size.key, common[-1]))
