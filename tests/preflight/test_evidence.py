"""Green is what was read, matched and proven: what was not read is not checked, and no exit 0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from preflight.config_examples import ACCELERATE, AXOLOTL, BASES, read

from ckpt_tools.cli import main
from ckpt_tools.preflight.configs import NotReadError
from ckpt_tools.preflight.configs.schema import decides
from ckpt_tools.preflight.plain_values import is_typo, read_rows

VERL = "python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.strategy=fsdp2 "
RLHF = "torchrun --nproc_per_node=8 -m openrlhf.cli.train_sft --zero_stage 3 "

_TABLES: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("evidence.yaml").read_text(encoding="utf-8"))
UNREAD, FOREIGN, MISSPELT = (_TABLES[name] for name in ("unread", "foreign", "misspelt"))


def run(tmp_path: Path, capsys: Any, config: dict[str, Any] | str, *argv: str) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON document for a config."""
    path = tmp_path / ("run.sh" if isinstance(config, str) else "config.yaml")
    if not isinstance(config, str):
        config = yaml.safe_dump(BASES.get(config.get("of", ""), {}) | {k: v for k, v in config.items() if k != "of"})
    path.write_text(config)
    status = main(["preflight", str(path), "--no-smoke", "--json", *argv])
    return status, json.loads(capsys.readouterr().out)


# Options that were not read


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (ACCELERATE | {"distributed_type": "MEGATRON_LM"}, "distributed_type is MEGATRON_LM"),
        (VERL.replace("fsdp2", "megatron"), "actor_rollout_ref.actor.strategy is megatron"),
    ],
)
def test_engine_that_is_not_read_is_not_checked(config: Any, says: str, tmp_path: Path, capsys: Any) -> None:
    status, document = run(tmp_path, capsys, config)
    assert (status, document["ok"]) == (3, False)
    assert says in document["not_checked"][0]


@pytest.mark.parametrize("name", UNREAD)
def test_options_that_were_not_read_are_not_checked(name: str, tmp_path: Path, capsys: Any) -> None:
    config, unread = UNREAD[name]
    status, document = run(tmp_path, capsys, config)
    assert status == 3
    assert document["ok"] is False
    assert document["checks"][0]["ok"] is None
    assert document["not_checked"][0].startswith("the config: ")
    if unread is not None:
        assert unread in document["options"]["unread"]
        assert unread in document["not_checked"][0]
    assert [item for item in document["findings"] if item["severity"] == "error"] == []


def test_options_that_the_script_itself_says_are_read(tmp_path: Path, capsys: Any) -> None:
    script = f"""
    MODEL_PATH=${{MODEL_PATH:-Qwen/Qwen3-8B}}
    NNODES=2
    max_len=$((1024 * 8))
    ARGS=(
        trainer.nnodes=$NNODES   # machines
        trainer.n_gpus_per_node=8
        actor_rollout_ref.model.path="$MODEL_PATH"
        actor_rollout_ref.actor.fsdp_config.fsdp_size=-1
    )
    ARGS+=(data.max_prompt_length=1024 "data.max_response_length=$max_len")
    {VERL} "${{ARGS[@]}}" data.train_files="$HOME/x.parquet" trainer.experiment_name=$NAME
    """
    status, document = run(tmp_path, capsys, script)
    assert status == 0
    spec = document["spec"]
    assert (spec["world_size"], spec["mesh"], spec["seq_len"]) == (16, {"dp_shard": 16}, 9216)
    assert spec["model"] == "Qwen/Qwen3-8B"
    assert document["options"]["unread"] == []
    assert any("the script does not set MODEL_PATH" in note for note in document["notes"])


@pytest.mark.parametrize(
    ("config", "argv"),
    [
        (VERL + "trainer.nnodes=$NNODES trainer.n_gpus_per_node=8", ("--world-size", "16")),
        (RLHF.replace("train_sft", "train_ppo_ray") + "--actor_num_nodes $N", ("--world-size", "16")),
        (ACCELERATE | {"num_processes": "${WORLD_SIZE}"}, ("--world-size", "16")),
        (RLHF.replace("=8", " $GPUS"), ("--world-size", "16")),
    ],
)
def test_what_is_passed_need_not_be_read(config: Any, argv: Any, tmp_path: Path, capsys: Any) -> None:
    assert run(tmp_path, capsys, config)[0] == 3
    status, document = run(tmp_path, capsys, config, *argv)
    assert (status, document["spec"]["world_size"], document["options"]["unread"]) == (0, 16, [])


def test_rule_that_asks_for_what_was_not_read_finds_nothing(tmp_path: Path, capsys: Any) -> None:
    sizes = {"parallelism_config_dp_shard_size": 4, "parallelism_config_tp_size": "$TP"}
    status, document = run(tmp_path, capsys, ACCELERATE | {"num_processes": 16, "parallelism_config": sizes})
    assert (status, document["mesh"]) == (3, None)
    assert {item["severity"] for item in document["findings"]} == {"warning"}
    # What does not depend on it is still wrong.
    config = ACCELERATE | {"num_processes": 16, "parallelism_config": sizes}
    config["fsdp_config"] = ACCELERATE["fsdp_config"] | {"fsdp_reshard_after_forward": "FULL_SHARD"}
    _, document = run(tmp_path, capsys, config)
    assert [item["code"] for item in document["findings"] if item["severity"] == "error"] == ["CKPT020"]


# Another trainer's config


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("argv", [(), ("--framework", "trainer")], ids=["detected", "named"])
def test_config_of_a_trainer_that_is_not_read_is_named(name: str, argv: Any, tmp_path: Path, capsys: Any) -> None:
    status, document = run(tmp_path, capsys, FOREIGN[name], *argv)
    assert (status, document["ok"], document["framework"]) == (3, False, name)
    assert document["findings"] == []
    assert document["not_checked"] == [f"the config: this is a config of {name}, which preflight does not support"]


@pytest.mark.parametrize(("script", "name"), _TABLES["foreign scripts"])
def test_launch_line_of_a_trainer_that_is_not_read_is_named(script: str, name: str, tmp_path: Path) -> None:
    with pytest.raises(NotReadError) as error:
        read(tmp_path, script + "\n", name="run.sh")
    assert (error.value.name, error.value.exit_code) == (name, 3)


def test_names_of_trainers_that_are_not_read_are_each_once() -> None:
    names = [row["name"] for row in read_rows("ckpt_tools.preflight.configs", "others.tsv")]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("argv", [(), ("--framework", "trainer")], ids=["detected", "named"])
def test_config_whose_keys_are_mostly_unknown_is_not_checked(argv: Any, tmp_path: Path, capsys: Any) -> None:
    values = {"output_dir": "o", "optim": {"lr": 1}, "widget": 1, "colour": 2, "shape": 3}
    status, document = run(tmp_path, capsys, values, *argv)
    assert (status, document["ok"], document["findings"]) == (3, False, [])
    assert "trainer knows 2 of its 5 options" in document["not_checked"][0]
    assert document["options"]["understood"] == 2


def test_unknown_option_that_may_decide_memory_is_not_checked(tmp_path: Path, capsys: Any) -> None:
    values = {"output_dir": "o", "per_device_train_batch_size": 1, "bf16": True, "seed": 1, "learning_rate": 1e-5}
    assert run(tmp_path, capsys, values | {"my_colour": "red"})[0] == 0
    status, document = run(tmp_path, capsys, values | {"my_lora_rank": 64, "my_colour": "red"})
    assert (status, document["ok"], document["options"]["unknown"]) == (3, False, ["my_colour", "my_lora_rank"])
    assert document["not_checked"][0].endswith("unknown options that may affect memory or sharding: my_lora_rank")


def test_script_without_an_option_is_not_checked(tmp_path: Path, capsys: Any) -> None:
    status, document = run(tmp_path, capsys, "python3 -m verl.trainer.main_ppo\n")
    assert (status, document["ok"]) == (3, False)
    assert "no option of verl" in document["not_checked"][0]


# What is understood


def test_share_of_options_that_were_understood_is_said(tmp_path: Path, capsys: Any) -> None:
    config = {
        "actor_rollout_ref": {
            "actor": {"strategy": "fsdp2"},
            "rollout": {"name": "vllm", "n": 8},
            "model": {"path": "m", "use_shm": False},
        },
        "trainer": {"nnodes": 1, "swirl": 3},
    }
    status, document = run(tmp_path, capsys, config)
    assert status == 0
    assert document["options"] == {
        "read": 7,
        "understood": 6,  # strategy, path and nnodes are used; on the other three nothing depends
        "passed_over": 0,
        "unknown": ["trainer.swirl"],
        "unread": [],
    }
    assert document["checks"][0]["what"] == "understood 6 of 7 options of verl"


@pytest.mark.parametrize("name", MISSPELT)
def test_misspelt_key_that_decides_memory_or_sharding_is_an_error(name: str, tmp_path: Path, capsys: Any) -> None:
    config, where, meant = MISSPELT[name]
    status, document = run(tmp_path, capsys, config)
    assert status == 3
    errors = [(item["where"], item["hint"]) for item in document["findings"] if item["severity"] == "error"]
    assert errors == [(where, f"write {meant}")]


@pytest.mark.parametrize(
    ("key", "name", "expected"),
    [
        ("fsdp_offload_parms", "fsdp_offload_params", True),
        ("context_parapllel_size", "context_parallel_size", True),
        ("fdsp_config", "fsdp_config", True),
        ("gradient_checkpoint", "gradient_checkpointing", True),
        ("gradientcheckpointing", "gradient_checkpointing", True),
        ("mixed-precision", "mixed_precision", True),
        ("load_in_8bit", "load_in_4bit", False),
        ("ep_size", "tp_size", False),
        ("encoder_lr", "decoder_lr", False),
        ("max_seq_len", "max_seq_length", False),  # a script's own
        ("lora_target_parameters", "lora_target_modules", False),
        ("eval_batch_size", "train_batch_size", False),
        ("tensor_parallel_size", "context_parallel_size", False),
        ("swanlab_project", "wandb_project", False),
    ],
)
def test_slip_of_the_pen_is_told_from_another_name(key: str, name: str, expected: bool) -> None:
    assert is_typo(key, name) is expected


def test_names_that_decide_what_a_run_needs() -> None:
    assert all(
        map(decides, ("fsdp_version", "optim_8bit", "tp_size", "lora_rank", "zero_stage", "torch_dtype", "max_len"))
    )
    assert not any(map(decides, ("wandb_project", "dataset_path", "logging_steps")))


# What people see


def test_findings_come_before_what_is_slow_and_errors_leave_that_out(tmp_path: Path, capsys: Any) -> None:
    from ckpt_tools import api

    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(ACCELERATE | {"num_machines": 0}))
    events: list[tuple[str, ...]] = []
    report = api.preflight(
        path,
        smoke=True,
        on_check=lambda name, state: events.append((name, state)),
        on_findings=lambda findings: events.append(tuple(finding.where for finding in findings)),
    )
    assert events.index(("num_machines",)) < events.index(("checkpoint", "begun"))
    assert {check.name: check.what for check in report.checks}["memory"] == "the config has errors"
    assert report.failed


def test_quiet_prints_errors_alone_or_why_nothing_was_checked(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(AXOLOTL | {"hello": 1, "sequence_len": -1}))
    assert main(["preflight", str(path), "--no-smoke", "-q"]) == 3
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0].strip() for line in lines] == ["error", "at", "hint"]
    path.write_text(yaml.safe_dump(AXOLOTL | {"hello": 1, "sequence_len": "$N"}))
    assert main(["preflight", str(path), "--no-smoke", "-q"]) == 3
    assert capsys.readouterr().out == "NOT CHECKED: the config: values that are not in the file: sequence_len\n"
    path.write_text(yaml.safe_dump(AXOLOTL | {"hello": 1}))
    assert main(["preflight", str(path), "--no-smoke", "-q"]) == 0
    assert capsys.readouterr().out == ""
