"""What accelerate and transformers themselves make of configs: run as a script, JSON in, JSON out.

In: [{"kind": "accelerate", "path": …} | {"kind": "trainer", "values": …}]. Out: a mapping for each.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from dataclasses import fields


def from_launcher(path: str) -> dict:
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    forget()  # the launcher passes on what it finds
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(["--config_file", path, "train.py"]))
    env = prepare_multi_gpu_env(args)
    os.environ.update({key: value for key, value in env.items() if key.startswith(("FSDP_", "PARALLELISM_"))})
    mesh = None
    if env.get("ACCELERATE_USE_PARALLELISM_CONFIG") == "true":
        from accelerate.parallelism_config import ParallelismConfig

        names, sizes = ParallelismConfig()._get_mesh()
        mesh = [list(pair) for pair in zip(names, sizes, strict=True)]
    return {**plugin({}, env["ACCELERATE_MIXED_PRECISION"]), "mesh": mesh, "num_processes": args.num_processes}


def from_arguments(values: dict) -> dict:
    from transformers import TrainingArguments

    forget()
    arguments = TrainingArguments(**values)
    mixed = "bf16" if arguments.bf16 else "fp16" if arguments.fp16 else "no"
    return {
        **plugin(arguments.fsdp_plugin_args, mixed),
        "optim": str(getattr(arguments.optim, "value", arguments.optim)),
        "batch_size": arguments.per_device_train_batch_size,
    }


def forget() -> None:
    for name in [name for name in os.environ if name.startswith(("FSDP_", "PARALLELISM_", "ACCELERATE_"))]:
        del os.environ[name]


def plugin(given: dict, mixed: str) -> dict:
    from accelerate.utils import FullyShardedDataParallelPlugin

    made = FullyShardedDataParallelPlugin(**given)
    if mixed != "no":
        made.set_mixed_precision(mixed)
    policy = made.mixed_precision_policy
    offload = made.cpu_offload
    return {
        "version": made.fsdp_version,
        "strategy": made.sharding_strategy.name if made.fsdp_version == 1 else None,
        "reshard": made.reshard_after_forward if made.fsdp_version == 2 else None,
        "offload": bool(getattr(offload, "offload_params", type(offload).__name__ == "CPUOffloadPolicy")),
        "state_dict_type": made.state_dict_type.name,
        "activation_checkpointing": made.activation_checkpointing,
        "cpu_ram_efficient_loading": made.cpu_ram_efficient_loading,
        "classes": made.transformer_cls_names_to_wrap,
        "min_num_params": made.min_num_params,
        "param_dtype": str(policy.param_dtype) if policy else None,
        "reduce_dtype": str(policy.reduce_dtype) if policy else None,
    }


def names() -> dict:
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser
    from transformers import Seq2SeqTrainingArguments

    options = [option.dest for option in launch_command_parser()._actions]
    return {
        "accelerate": [field.name for field in fields(ClusterConfig)],
        "fsdp_config": [name for name in options if name.startswith("fsdp_")],
        "parallelism_config": [name for name in options if name.startswith("parallelism_config_")],
        "trainer": [field.name for field in fields(Seq2SeqTrainingArguments)],
    }


def main() -> None:
    warnings.simplefilter("ignore")
    answers = []
    for question in json.load(sys.stdin):
        try:
            if question["kind"] == "names":
                answers.append(names())
            elif question["kind"] == "accelerate":
                answers.append(from_launcher(question["path"]))
            else:
                answers.append(from_arguments(question["values"]))
        except (ValueError, KeyError, TypeError) as error:
            answers.append({"error": f"{type(error).__name__}: {error}"})
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
