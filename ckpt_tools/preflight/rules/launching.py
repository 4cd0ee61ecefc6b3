"""CKPT12x: who is started where: machines, devices, ports, and roles that share devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckpt_tools.preflight.rules.rule import Case, Setting, Violation, error_rule, shown, warning_rule
from ckpt_tools.preflight.spec import Framework

_MAX_PORT = 65_535
_TENSOR: Mapping[Framework, tuple[str, ...]] = {
    "verl": ("actor_rollout_ref.rollout.tensor_model_parallel_size",),
    "openrlhf": ("vllm.tensor_parallel_size", "vllm_tensor_parallel_size"),
}
"""Ranks over which one inference engine cuts its tensors."""


@error_rule(
    "CKPT120: a machine that does not exist",
    why="torchrun refuses a node rank outside of its nodes, or waits for a node that never comes: they count from 0",
    fix="0 on the first machine, num_machines - 1 on the last",
    frameworks=("accelerate",),
)
def machine_rank(case: Case) -> Iterator[Violation]:
    """Source: accelerate 1.15.0 `utils/launch.py:214-219`, which passes it on when there are several machines."""
    found, machines = case.option("machine_rank"), case.count("num_machines")
    if found is not None and found.count is not None and machines > 1 and not 0 <= found.count < machines:
        what = f"{found} of {machines} machines, which count from 0"
        yield Violation(found.key, what, f"{found.key}: {machines - 1} on the last machine")


@warning_rule(
    "CKPT121: several machines and no address of the first",
    why="accelerate then tells torchrun to meet at the host None, unless the command line has --main_process_ip",
    fix="main_process_ip and main_process_port of the machine whose rank is 0",
    frameworks=("accelerate",),
)
def main_process(case: Case) -> Iterator[Violation]:
    """DeepSpeed's own multi-node launchers find the first machine in the host file.

    Source: accelerate 1.15.0 `utils/launch.py:220-224`.
    """
    if case.count("num_machines") > 1 and case.spec.engine != "deepspeed" and case.option("main_process_ip") is None:
        machines = case.count("num_machines")
        yield Violation("main_process_ip", f"{machines} machines, and no main_process_ip", "main_process_ip: HOST")


@error_rule(
    "CKPT122: devices that the processes of a machine do not have",
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
    "CKPT123: a port that does not exist",
    why="No process can listen there: the launch fails, or ends without a word",
    fix="a free port from 1024 to 65535",
    frameworks=("accelerate",),
)
def port(case: Case) -> Iterator[Violation]:
    """Ports have 16 bits; 0 lets accelerate choose one."""
    found = case.option("main_process_port")
    if found is not None and found.count is not None and not 0 <= found.count <= _MAX_PORT:
        yield Violation(found.key, f"{found}: ports end at {_MAX_PORT}", f"{found.key}: 29500, at most {_MAX_PORT}")


@error_rule(
    "CKPT124: inference engines that do not fill the devices of training",
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
            f"{engines.key} {ranks // width}" if ranks % width == 0 else f"engines × their ranks = {ranks}",
        )


@error_rule(
    "CKPT125: an inference engine whose ranks do not divide the attention heads",
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
    equals = " " if case.framework == "openrlhf" else ": "
    yield Violation(size.key, f"{size} does not divide {heads} attention heads", f"{size.key}{equals}{common[-1]}")


_SHARING = (
    (("train.colocate_all", "colocate_all_models", "train.colocate_actor_ref", "colocate_actor_ref"), "actor", "ref"),
    (("train.colocate_critic_reward", "colocate_critic_reward"), "critic", "reward"),
)
"""What makes two roles share devices, and the roles."""


@error_rule(
    "CKPT126: roles that share devices, and differ in number",
    why="Each rank of one role lies on the device of a rank of the other: OpenRLHF asserts that there are as many",
    fix="the same nodes and GPUs per node for both",
    frameworks=("openrlhf",),
)
def equal_roles(case: Case) -> Iterator[Violation]:
    """Source: OpenRLHF 0.11.2 `cli/train_ppo_ray.py:41-46,109-113`."""
    for switches, first, second in _SHARING:
        if not any(case.is_on(switch) for switch in switches):
            continue
        for size in ("num_nodes", "num_gpus_per_node"):
            one, other = (_size(case, role, size) for role in (first, second))
            if one is not None and other is not None and one.text != other.text:
                yield Violation(other.key, f"{shown(one.value)} for {one.key}, and {other}", f"{other.key} {one.text}")


def _size(case: Case, role: str, size: str) -> Setting | None:
    return case.option(f"{role}.{size}", f"{role}_{size}")
