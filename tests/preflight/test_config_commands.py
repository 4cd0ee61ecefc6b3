"""Command lines and Hydra's overrides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from preflight.config_examples import found, mesh, read

from ckpt_tools.preflight.spec import AdapterSpec

VERL = "python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.strategy=fsdp2 "


@pytest.mark.parametrize(
    ("words", "path", "value"),
    [
        ("a.b=3", "a.b", 3),
        ("a.b=-1", "a.b", -1),
        ("a.b=1e-6", "a.b", "1e-6"),
        ("a.b=True", "a.b", True),
        ("a.b=null", "a.b", None),
        ("a.b=", "a.b", None),
        ("a.b='x y'", "a.b", "x y"),
        ("a.b='[q_proj,\"v\"]'", "a.b", ["q_proj", "v"]),
        ("+a.b='{c:1,d:x}'", "a.b", {"c": 1, "d": "x"}),
        ("++a.b.c=s3://x/y", "a.b.c", "s3://x/y"),
        ("a.b=2 a.b=3", "a.b", 3),
        ("a.b.c=2 ~a.b.c a.b.d=1", "a.b", {"d": 1}),
        ("a.b=hf/x#1", "a.b", "hf/x#1"),
    ],
)
def test_override_has_the_value_that_hydra_reads(words: str, path: str, value: object, tmp_path: Path) -> None:
    node: Any = read(tmp_path, VERL + words + "\n", name="run.sh").values
    for part in path.split("."):
        node = node[part]
    assert node == value


def test_overrides_of_variables_leave_no_mesh(tmp_path: Path) -> None:
    words = "actor_rollout_ref.actor.fsdp_config.fsdp_size=$SIZE trainer.nnodes=$N"
    config = read(tmp_path, VERL + words + "\n", name="run.sh", world_size=8)
    assert config.spec.mesh is None
    assert [item[2] for item in found(config)] == ["actor_rollout_ref.actor.fsdp_config.fsdp_size"]  # N is 8 by now
    assert read(tmp_path, VERL + words + "\n", name="run.sh").spec.world_size is None


def test_override_below_a_value_is_a_finding(tmp_path: Path) -> None:
    config = read(tmp_path, VERL + "trainer.nnodes=2 trainer.nnodes.x=3\n", name="run.sh")
    assert found(config) == [("wrong-type", "error", "trainer.nnodes.x")]


def test_key_that_is_added_on_purpose_is_not_unknown(tmp_path: Path) -> None:
    config = read(tmp_path, VERL + "+trainer.my_option=1 trainer.your_option=1\n", name="run.sh")
    assert found(config) == [("unknown-key", "warning", "trainer.your_option")]


def test_script_with_two_runs_is_read_for_the_first(tmp_path: Path) -> None:
    config = read(tmp_path, f"{VERL} trainer.nnodes=2\n{VERL} trainer.nnodes=4\n", name="run.sh")
    assert config.spec.world_size == 16
    assert [item[0] for item in found(config)] == ["several-commands"]
    text = "deepspeed --num_gpus 4 train_sft.py --zero_stage 3\ndeepspeed train_sft.py --zero_stage 2\n"
    config = read(tmp_path, text, name="run.sh")
    assert (config.spec.world_size, config.spec.strategy) == (4, "full_shard")
    assert [item[0] for item in found(config)] == ["several-commands"]


RLHF = "torchrun --nproc_per_node=8 -m openrlhf.cli.train_sft "


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--backend fsdp2", {"engine": "fsdp2", "mesh": mesh(dp_shard=8), "strategy": "full_shard"}),
        ("--fsdp2_tp_size 2 --fsdp2_cp_size 2", {"engine": "fsdp2", "mesh": mesh(dp_shard=2, cp=2, tp=2)}),
        (
            "--fsdp2_cpu_offload --fsdp2_reshard_after_forward False",
            {"offload_params": True, "strategy": "shard_grad_op"},
        ),
        ("--backend fsdp2 --fsdp_tensor_parallel_size=4", {"mesh": mesh(dp_shard=2, tp=4)}),
        ("--zero_stage 3", {"engine": "deepspeed", "strategy": "full_shard", "reshard_after_forward": None}),
        ("--ds.zero_stage 3 --ds.tensor_parallel_size 2", {"engine": "deepspeed", "mesh": mesh(dp_shard=4, tp=2)}),
        ("--backend deepspeed --ds_tensor_parallel_size 2", {"engine": "deepspeed", "mesh": mesh(dp_shard=4, tp=2)}),
        ("--ds.ring_attn_size 4", {"mesh": mesh(dp_shard=2, cp=4), "axes": {"dp_shard": -1, "sp": 4, "tp": 1}}),
        ("--fsdp2_tp_size 3", {"mesh": None}),
        ("--max_len 100 --micro_train_batch_size 3", {"seq_len": 100, "batch_size": 3}),
        (
            "--ds.lora.rank 8 --ds.lora.target_modules a b",
            {"adapter": AdapterSpec(rank=8, alpha=16.0, targets=("a", "b"))},
        ),
        ("--lora_rank 0", {"adapter": None}),
        ("--load_checkpoint --ckpt_path c", {"resume_from": "c"}),
        ("--ckpt_path c", {"resume_from": None}),
    ],
)
def test_openrlhf_options_of_every_version_mean_the_same(words: str, expected: dict[str, Any], tmp_path: Path) -> None:
    config = read(tmp_path, RLHF + words + "\n", name="run.sh")
    assert {field: getattr(config.spec, field) for field in expected} == expected
    assert config.findings == ()


@pytest.mark.parametrize(
    ("words", "findings"),
    [
        ("--zero_stag 3", [("unknown-key", "error", "--zero_stag")]),
        ("--packing_samples 3", [("wrong-type", "error", "--packing_samples")]),
        ("--max_len", [("wrong-type", "error", "--max_len")]),
        ("--max_len 3 4", [("wrong-type", "error", "--max_len")]),
        ("--backend fsdp3", [("wrong-type", "error", "--backend")]),
        ("--max_len many", [("wrong-type", "error", "--max_len")]),
        ("--fsdp2_tp_size $TP", [("unknown-value", "warning", "--fsdp2_tp_size")]),
        ("--save_path ${OUT}/x", [("unknown-value", "info", "--save_path")]),
        ("--zero_stage 2 --ds.packing_samples", [("mixed-options", "error", "--zero_stage")]),
        ("--zero_stage 2 \\\n # --lora_rank 3 \\\n --max_len 4", [("lost-option", "error", "--max_len")]),
    ],
)
def test_openrlhf_options_that_argparse_would_refuse_are_reported(
    words: str, findings: list[tuple[str, str, str]], tmp_path: Path
) -> None:
    assert found(read(tmp_path, RLHF + words + "\n", name="run.sh")) == findings


def test_variable_in_the_size_of_an_axis_leaves_no_mesh(tmp_path: Path) -> None:
    config = read(tmp_path, RLHF + "--fsdp2_tp_size $TP\n", name="run.sh")
    assert config.spec.mesh is None
    assert config.options.unread == ("--fsdp2_tp_size",)


def test_nothing_in_a_script_is_executed(tmp_path: Path) -> None:
    target = tmp_path / "touched"
    read(tmp_path, f"touch {target}\n{RLHF} --max_len $(touch {target}) --save_path `touch {target}`\n", name="run.sh")
    assert not target.exists()


@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [
        ("torchrun --nproc-per-node 4 --nnodes 2 -m openrlhf.cli.train_sft", 8),
        ("python -m torch.distributed.run --nproc_per_node=2 train_sft.py", 2),
        ("torchrun --nproc_per_node=gpu -m openrlhf.cli.train_sft", None),
        ("torchrun --nproc_per_node=4 --nnodes=1:2 -m openrlhf.cli.train_sft", None),
        ("deepspeed --num_nodes 2 --num_gpus 8 --module openrlhf.cli.train_sft", 16),
        ("deepspeed --module openrlhf.cli.train_sft", None),
        ("accelerate launch --num_processes 6 train_sft.py", 6),
        ("python -m openrlhf.cli.train_ppo_ray --actor_num_nodes 2 --actor_num_gpus_per_node 4", 8),
        ("python -m openrlhf.cli.train_ppo_ray", 8),
    ],
)
def test_ranks_are_those_of_the_launcher(launcher: str, ranks: int | None, tmp_path: Path) -> None:
    assert read(tmp_path, f"{launcher} --zero_stage 3\n", name="run.sh").spec.world_size == ranks


def test_here_document_of_options_is_read(tmp_path: Path) -> None:
    text = "read -r -d '' commands <<EOF\nopenrlhf.cli.train_dpo \\\n  --ds.zero_stage 3 \\\n  --data.max_len 99\nEOF\n"
    config = read(tmp_path, text + "deepspeed --num_gpus 2 --module $commands\n", name="run.sh")
    assert (config.spec.seq_len, config.spec.world_size, config.spec.batch_size) == (99, 2, 8)
    assert config.findings == ()
