"""What a run needs of each of its machines: out of its config, and out of what the scheduler has set."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from ckpt_tools.preflight.configs.config import Config
from ckpt_tools.preflight.model_facts import ModelFacts
from ckpt_tools.preflight.rules.rule import Case, NotKnownError, Setting

_PROCESS = "config.process[0]."
_SAVES: Mapping[str, tuple[str, ...]] = {
    "trainer": ("output_dir",),
    "llamafactory": ("output_dir",),
    "axolotl": ("output_dir",),
    "torchtitan": ("job.dump_folder", "dump_folder"),
    "verl": ("trainer.default_local_dir",),
    "openrlhf": ("ckpt.output_dir", "ckpt.path", "save_path", "ckpt_path"),
    "ai-toolkit": (f"{_PROCESS}training_folder",),
}
_DATA: Mapping[str, tuple[str, ...]] = {
    "trainer": ("train_file", "validation_file", "dataset_dir"),
    "llamafactory": ("dataset_dir",),
    "axolotl": ("datasets[].path", "test_datasets[].path", "dataset_prepared_path"),
    "torchtitan": ("training.dataset_path", "dataloader.dataset_path"),
    "verl": ("data.train_files", "data.val_files"),
    "openrlhf": ("data.dataset", "data.prompt_dataset", "dataset", "prompt_data"),
    "ai-toolkit": (f"{_PROCESS}datasets[].folder_path",),
}
_KEPT = ("save_total_limit", "checkpoint.keep_latest_k", "trainer.max_actor_ckpt_to_keep", "ckpt.max_num")
_PER_NODE: Mapping[str, tuple[str, ...]] = {
    "verl": ("trainer.n_gpus_per_node",),
    "openrlhf": ("actor.num_gpus_per_node", "actor_num_gpus_per_node"),
}
_ONE_NODE = ("accelerate", "verl")
"""Trainers whose configs mean one machine where they name none; a launcher says it for the others."""
_NODES = ("num_machines", "trainer.nnodes", "actor.num_nodes", "actor_num_nodes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a run needs of a machine. None: the config does not say."""

    ranks: int | None = None
    """That start here."""
    world_size: int | None = None
    nodes: int | None = None
    uses_gpus: bool = True
    saves: tuple[str, ...] = ()
    """Directories that checkpoints go to."""
    reads: tuple[str, ...] = ()
    """Files and directories of the data and the model that the config names as paths."""
    checkpoint_bytes: int | None = None
    """Of one checkpoint, with the optimizer."""
    kept: int = 1
    """Checkpoints that are kept."""
    gathered_bytes: int = 0
    """What one rank gathers in host memory at a save."""
    resident_bytes: int = 0
    """What the ranks of this machine keep in host memory: offloaded parameters and moments."""
    meeting: tuple[str, int] = ("", 0)
    """Host and port at which the ranks meet."""
    is_first: bool = True
    """Is this the machine at which they meet, as far as the environment says?"""

    @property
    def paths(self) -> tuple[str, ...]:
        """All paths."""
        return tuple(dict.fromkeys((*self.saves, *self.reads)))


def needs_of(
    configs: tuple[Config, ...], facts: ModelFacts | None, environment: Mapping[str, str] = os.environ
) -> Needs:
    """Return what a run needs of this machine; several configs are parts of one run, the arguments last."""
    cases = [Case(config=one, facts=facts or ModelFacts(where="")) for one in configs]
    spec = configs[-1].spec if configs else None
    world = _number(environment, "WORLD_SIZE") or (None if spec is None else spec.world_size)
    nodes = _number(environment, "NNODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES") or _whole(cases, *_NODES)
    if any(case.framework in _ONE_NODE for case in cases):
        nodes = nodes or 1
    ranks = _number(environment, "LOCAL_WORLD_SIZE")
    for case in cases:
        ranks = ranks or _whole([case], *_PER_NODE.get(case.framework, ()))
    params = None if facts is None or (spec is not None and spec.adapter is not None) else facts.num_params
    width = 2 if spec is not None and spec.master_dtype in ("bf16", "f16") else 4
    state = None if params is None else 3 * width * params  # parameters and Adam's two moments
    is_full = any(_full_state(case) for case in cases)
    address, port = environment.get("MASTER_ADDR", ""), _number(environment, "MASTER_PORT") or 0
    return Needs(
        ranks=ranks or (None if world is None or nodes is None else -(-world // nodes)),
        world_size=world,
        nodes=nodes,
        uses_gpus=not any(one.is_on for one in _options(cases, "use_cpu", "no_cuda")),
        saves=tuple(_paths(cases, _SAVES)),
        reads=(*_paths(cases, _DATA), *([spec.model] if spec and spec.model and _is_path(spec.model) else [])),
        checkpoint_bytes=state,
        kept=_whole(cases, *_KEPT) or 1,
        gathered_bytes=3 * 4 * params if is_full and params is not None else 0,
        resident_bytes=(state or 0) // (nodes or 1) if spec is not None and spec.offload_params else 0,
        meeting=(address or _text(cases, "main_process_ip"), port or _whole(cases, "main_process_port") or 0),
        is_first=environment.get("SLURM_NODEID", environment.get("NODE_RANK", "0")) == "0",
    )


def _number(environment: Mapping[str, str], *names: str) -> int | None:
    return next((int(text) for name in names if (text := environment.get(name, "")).isdecimal() and int(text)), None)


def _options(cases: list[Case], *names: str) -> Iterator[Setting]:
    """Yield the options that are there, and are known."""
    for case in cases:
        for name in names:
            with suppress(NotKnownError):
                found = case.option(name)
                if found is not None:
                    yield found


def _whole(cases: list[Case], *names: str) -> int | None:
    return next((one.count for one in _options(cases, *names) if one.count), None)


def _text(cases: list[Case], *names: str) -> str:
    return next((one.text for one in _options(cases, *names)), "")


def _full_state(case: Case) -> bool:
    with suppress(NotKnownError):
        return case.is_fsdp and case.spec.state_dict_type == "FULL_STATE_DICT"
    return False


def _paths(cases: list[Case], names: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """Yield the paths of some options; a name that is not written as a path may be the hub's."""
    for case in cases:
        for name in names.get(case.framework, ()):
            head, is_list, tail = name.partition("[].")
            for found in _options([case], head):
                items = found.value if isinstance(found.value, list) else [found.value]
                values = [one.get(tail) if is_list and isinstance(one, Mapping) else one for one in items]
                always = names is _SAVES
                texts = [one for one in values if isinstance(one, str) and one and "://" not in one]
                yield from (one for one in texts if always or _is_path(one))


def _is_path(text: str) -> bool:
    """Is it one path, and neither a pattern, a list, a URL nor the hub's name of something?"""
    is_one = not any(sign in text for sign in ("*", "?", "[", ",", "@"))
    return is_one and (text.startswith(("/", "./", "../")) or text.endswith(_ENDINGS))


_ENDINGS = (".json", ".jsonl", ".parquet", ".csv", ".arrow")
