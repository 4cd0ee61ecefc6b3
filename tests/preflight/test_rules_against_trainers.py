"""The rules of accelerate and Trainer against accelerate and transformers themselves, on the very same files."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from preflight.rule_cases import CASES, LLAMA, NAMES, Edits, RuleCase, edited, text_of

from ckpt_tools.preflight.configs import read_config
from ckpt_tools.preflight.rules import check_rules

pytestmark = pytest.mark.filterwarnings("ignore")  # what they warn about is not compared

_NO_DEVICE = "no available devices"
"""What FSDP1 says at the end of its checks, on a machine without a GPU."""

LATER = {
    "CKPT003": "under DDP, axes that shard are silently not used",
    "CKPT007": "Trainer.__init__, after the process group is up",
    "CKPT010": "Trainer.__init__, and deepspeed must be installed",
    "CKPT012": "from_pretrained, see below",
    "CKPT055": "Accelerator.__init__, and an fp8 backend must be installed",
    "CKPT063": "Trainer.__init__, which needs GPUs to see FSDP",
    "CKPT064": "Trainer.__init__, which needs GPUs to see FSDP",
    "CKPT067": "Trainer.__init__, which needs GPUs to see FSDP",
    "CKPT070": "fully_shard",
    "CKPT073": "Trainer.__init__, once the model is there",
    "CKPT080": "the first step on a GPU",
    "CKPT100": "nothing refuses it before memory does",
    "CKPT102": "the optimizer, see below",
}
"""Errors that are not raised while a config is read, and where they are."""


@contextmanager
def environment(values: dict[str, str] | None = None) -> Any:
    before = dict(os.environ)
    if values is not None:
        os.environ.clear()
        os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def check_mesh(sizes: Any, plugin: Any, world_size: int) -> None:
    """Do what `Accelerator()` does with a ParallelismConfig."""
    from accelerate.utils.dataclasses import DistributedType

    sizes._validate_accelerator(
        SimpleNamespace(
            multi_device=plugin is None,
            num_processes=world_size,
            is_fsdp2=plugin is not None and plugin.fsdp_version == 2,
            distributed_type=DistributedType.MULTI_GPU if plugin is None else DistributedType.FSDP,
            is_main_process=False,
        )
    )


def start_accelerate(path: str, world_size: int) -> None:
    """Do what `accelerate launch` does, and then `Accelerator()`, up to where processes and GPUs are needed."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.launch import prepare_multi_gpu_env

    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(["--config_file", path, "train.py"]))
    with environment(prepare_multi_gpu_env(arguments)):
        plugin = None
        if os.environ.get("ACCELERATE_USE_FSDP") == "true":
            try:
                plugin = FullyShardedDataParallelPlugin()
            except RuntimeError as error:
                if _NO_DEVICE not in str(error):
                    raise
                plugin = FullyShardedDataParallelPlugin(sync_module_states=False, cpu_ram_efficient_loading=False)
        if os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG") == "true":
            check_mesh(ParallelismConfig(), plugin, world_size)


def start_trainer(path: str, world_size: int) -> None:
    """Parse the arguments as a training script does, and build the plugin that Trainer hands to accelerate."""
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import FullyShardedDataParallelPlugin
    from transformers import TrainingArguments

    values = json.loads(Path(path).read_text()) | {"use_cpu": True, "report_to": "none"}
    sizes = values.pop("parallelism_config", None)
    own = {one.name for one in dataclasses.fields(TrainingArguments)}
    with environment():
        os.environ.pop("ACCELERATE_USE_FSDP", None)
        # Scripts keep the other options (adapters, quantisation) for themselves.
        arguments = TrainingArguments(**{key: value for key, value in values.items() if key in own})
        plugin = None
        if arguments.fsdp_plugin_args is not None:
            try:
                plugin = FullyShardedDataParallelPlugin(**arguments.fsdp_plugin_args)
            except RuntimeError as error:
                if _NO_DEVICE not in str(error):
                    raise
        if sizes is not None:
            check_mesh(ParallelismConfig(**sizes), plugin, world_size)


STARTS: dict[str, Callable[[str, int], None]] = {"accelerate": start_accelerate, "trainer": start_trainer}
HELD = [
    pytest.param(case, edits, world_size, id=f"{case.rule}-{case.framework}-{which}")
    for case in CASES
    if case.framework in STARTS
    for which, edits, world_size in (
        ("fires", case.fires, case.world_size),
        ("near", case.near, case.near_world_size or case.world_size),
    )
]


@pytest.mark.full
@pytest.mark.parametrize(("case", "edits", "world_size"), HELD)
def test_errors_are_what_the_trainer_refuses(case: RuleCase, edits: Edits, world_size: int, tmp_path: Path) -> None:
    path = tmp_path / NAMES[case.framework]
    path.write_text(text_of(case.framework, edited(case.framework, edits)))
    config = read_config(str(path), framework=case.framework, world_size=world_size)
    errors = [finding for finding in check_rules(config) if finding.severity == "error"]
    if not errors:
        try:
            STARTS[case.framework](str(path), world_size)
        except (ImportError, RuntimeError) as error:
            if "FP8 is not available" not in str(error) and "deepspeed" not in str(error).lower():
                raise
        return
    if all(finding.code in LATER for finding in errors):
        return
    with pytest.raises((ValueError, KeyError)):
        STARTS[case.framework](str(path), world_size)


def test_negative_learning_rate_is_refused_by_torch() -> None:
    import torch

    with pytest.raises(ValueError, match="Invalid learning rate"):
        torch.optim.AdamW([torch.zeros(1)], lr=-2e-5)


def test_pipeline_stages_beside_fsdp_are_refused_by_transformers() -> None:
    from transformers.distributed import DistributedConfig

    DistributedConfig(fsdp_size=4, pp_size=1)
    with pytest.raises(ValueError, match="pipeline"):
        DistributedConfig(fsdp_size=4, pp_size=2)


def test_wrap_class_that_is_missing_is_refused_by_accelerate() -> None:
    import torch
    from accelerate import FullyShardedDataParallelPlugin
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**LLAMA))
    for name, is_known in (("LlamaDecoderLayer", True), ("LlamaDecoderlayer", False)):
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=[name]
        )
        if is_known:
            plugin.set_auto_wrap_policy(model)
        else:
            with pytest.raises(ValueError, match="Could not find the transformer layer class"):
                plugin.set_auto_wrap_policy(model)


@pytest.mark.parametrize("name", ["AdamW8bit", "PagedAdamW8bit", "Lion32bit"])
def test_bitsandbytes_refuses_dtensors(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import bitsandbytes
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = torch.nn.Linear(256, 256)
        fully_shard(model)
        optimizer = getattr(bitsandbytes.optim, name)(model.parameters(), lr=1e-3)
        model(torch.randn(2, 256)).sum().backward()
        with pytest.raises((RuntimeError, NotImplementedError), match=r"DTensor|sharding strategy"):
            optimizer.step()
    finally:
        dist.destroy_process_group()
