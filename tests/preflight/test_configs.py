"""Configs of seven trainers: examples, unknown keys, wrong types, whose it is, what is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from preflight.config_examples import ACCELERATE, AXOLOTL, EXAMPLES, FIXTURES, mesh, read

from ckpt_tools.errors import LimitError, UnreadableError, UsageError
from ckpt_tools.preflight.configs import read_config
from ckpt_tools.preflight.configs.document import MAX_BYTES
from ckpt_tools.preflight.spec import ParallelSpec, shard_mesh


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_is_detected_and_means_what_its_trainer_makes_of_it(name: str) -> None:
    framework, world_size, expected = EXAMPLES[name]
    config = read_config(str(FIXTURES / name), world_size=world_size)
    assert config.framework == framework
    found = {field: getattr(config.spec, field) for field in ParallelSpec.__slots__ if field != "keys"}
    default = ParallelSpec(framework=framework, engine="none")
    wanted = {field: getattr(default, field) for field in found} | {"framework": framework} | expected
    assert found == wanted
    assert [finding for finding in config.findings if finding.severity != "info"] == []


def test_examples_cover_all_files_and_every_framework_twice() -> None:
    files = {str(path.relative_to(FIXTURES)) for path in FIXTURES.rglob("*.*")} - {"trainer/fsdp.json"}
    assert files == set(EXAMPLES)
    frameworks = [framework for framework, _, _ in EXAMPLES.values()]
    assert all(frameworks.count(name) >= 2 for name in set(frameworks))
    assert len(set(frameworks)) == 7


@pytest.mark.parametrize("name", EXAMPLES)
def test_keys_of_a_spec_lead_to_options_in_the_file(name: str) -> None:
    config = read_config(str(FIXTURES / name), world_size=EXAMPLES[name][1])
    assert config.spec.keys
    for field, path in config.spec.keys.items():
        assert field.removeprefix("axes.") in {
            *ParallelSpec.__slots__,
            "pp",
            "dp_replicate",
            "dp_shard",
            "cp",
            "tp",
            "ep",
            "sp",
        }
        if path.startswith("--"):
            assert path[2:] in config.values
            continue
        node: Any = config.values
        for part in path.replace("[0]", ".0").split("."):
            node = node[int(part)] if part.isdigit() else node[part]
        assert node is not None


# Unknown keys, wrong types


@pytest.mark.parametrize(
    ("values", "where", "near", "severity"),
    [
        (ACCELERATE | {"num_proceses": 4}, "num_proceses", "num_processes", "error"),
        (ACCELERATE | {"fsdp_config": {"fsdp_versoin": 2}}, "fsdp_config.fsdp_versoin", "fsdp_version", "error"),
        (ACCELERATE | {"fsdp_config": {"versoin": 2}}, "fsdp_config.versoin", "version", "error"),
        (
            ACCELERATE | {"fsdp_config": {"fsdp_cpu_offload": 1}},
            "fsdp_config.fsdp_cpu_offload",
            "fsdp_offload_params",
            "error",
        ),
        (AXOLOTL | {"adaptor": "lora"}, "adaptor", "adapter", "error"),
        (
            {"output_dir": "o", "fsdp": True, "fsdp_config": {"offload_params": True}},
            "fsdp_config.offload_params",
            "cpu_offload",
            "error",
        ),
        ({"output_dir": "o", "gradient_checkpoint": True}, "gradient_checkpoint", "gradient_checkpointing", "error"),
        ({"output_dir": "o", "favourite_colour": "red"}, "favourite_colour", None, "info"),
        (
            {"parallelism": {"tensor_parallel_degre": 2, "data_parallel_shard_degree": 1}},
            "parallelism.tensor_parallel_degre",
            "tensor_parallel_degree",
            "error",
        ),
        (
            {"config": {"process": [{"train": {"gradient_checkpoint": True}}]}},
            "config.process[0].train.gradient_checkpoint",
            "gradient_checkpointing",
            "error",
        ),
        (
            {"actor_rollout_ref": {"actor": {"fsdp_config": {"fsdp_sise": 1}}}},
            "actor_rollout_ref.actor.fsdp_config.fsdp_sise",
            "fsdp_size",
            "error",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unknown_key_is_reported_with_the_nearest_known_one(
    values: dict[str, Any], where: str, near: str | None, severity: str, tmp_path: Path
) -> None:
    (finding,) = read(tmp_path, values).findings
    assert (finding.code, finding.severity, finding.where) == ("unknown-key", severity, where)
    assert (finding.hint == f"write {near}") == (near is not None)


@pytest.mark.parametrize(
    ("values", "where", "expected", "shown"),
    [
        (ACCELERATE | {"num_processes": "eight"}, "num_processes", "a whole number", "'eight'"),
        (ACCELERATE | {"num_processes": True}, "num_processes", "a whole number", "true"),
        (ACCELERATE | {"num_processes": 2.5}, "num_processes", "a whole number", "2.5"),
        (ACCELERATE | {"fsdp_config": [1]}, "fsdp_config", "a mapping", "a list"),
        (
            ACCELERATE | {"fsdp_config": {"fsdp_version": 2, "fsdp_offload_params": "maybe"}},
            "fsdp_config.fsdp_offload_params",
            "true or false",
            "'maybe'",
        ),
        (ACCELERATE | {"distributed_type": "fsdp"}, "distributed_type", "one of DEEPSPEED, FSDP", "'fsdp'"),
        (ACCELERATE | {"fsdp_config": {"fsdp_version": 3}}, "fsdp_config.fsdp_version", "1 or 2", "the number 3"),
        (
            ACCELERATE | {"fsdp_config": {"state_dict_type": "SHARDED"}},
            "fsdp_config.state_dict_type",
            "one of FULL_STATE_DICT",
            "'SHARDED'",
        ),
        (
            {"parallelism": {"tensor_parallel_degree": 1, "fsdp_reshard_after_forward": "sometimes"}},
            "parallelism.fsdp_reshard_after_forward",
            "one of default, always, never",
            "'sometimes'",
        ),
        (
            {"config": {"process": [{"train": {"dist_mode": "fdsp"}}]}},
            "config.process[0].train.dist_mode",
            "one of none, ddp, fsdp",
            "'fdsp'",
        ),
        (
            {"actor_rollout_ref": {"actor": {"strategy": "fsdp3"}}},
            "actor_rollout_ref.actor.strategy",
            "one of fsdp, fsdp2",
            "'fsdp3'",
        ),
        (
            {"actor_rollout_ref": {"actor": {"fsdp_config": {"model_dtype": "bf61"}}}},
            "actor_rollout_ref.actor.fsdp_config.model_dtype",
            "a dtype",
            "'bf61'",
        ),
        (AXOLOTL | {"lora_target_modules": 3}, "lora_target_modules", "names", "the number 3"),
        (AXOLOTL | {"lora_alpha": "much"}, "lora_alpha", "a number", "'much'"),
        ({"config": {"process": 4}}, "config.process", "a list", "the number 4"),
        ({"config": {"process": [{"train": 5}]}}, "config.process[0].train", "a mapping", "the number 5"),
        ({"output_dir": ["o"], "fsdp": True, "optim": ["a"]}, "optim", "text", "a list of 1"),
        (
            {"parallelism": {"data_parallel_shard_degree": None, "tensor_parallel_degree": "two"}},
            "parallelism.tensor_parallel_degree",
            "a whole number",
            "'two'",
        ),
        (
            {"actor_rollout_ref": {"actor": {"fsdp_config": {"mixed_precision": "bf16"}}}},
            "actor_rollout_ref.actor.fsdp_config.mixed_precision",
            "a mapping",
            "'bf16'",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_type_is_a_finding_with_key_expected_and_found(
    values: dict[str, Any], where: str, expected: str, shown: str, tmp_path: Path
) -> None:
    wrong = [finding for finding in read(tmp_path, values).findings if finding.code == "wrong-type"]
    (finding,) = wrong
    assert (finding.severity, finding.where) == ("error", where)
    assert f"expected {expected}" in finding.what
    assert finding.what.endswith(f"found text {shown}" if shown.startswith("'") else shown) or shown in finding.what


def test_option_of_a_wrong_type_counts_as_not_given(tmp_path: Path) -> None:
    config = read(tmp_path, ACCELERATE | {"num_processes": "eight"})
    assert config.spec.world_size is None
    assert config.spec.mesh is None
    assert config.values["num_processes"] == "eight"


def test_keys_of_hostile_names_are_escaped(tmp_path: Path) -> None:
    config = read(tmp_path, ACCELERATE | {"\x1b[31mnum": "\x07"})
    (finding,) = config.findings
    assert "\x1b" not in finding.where + finding.what + str(finding.hint)


def test_unknown_keys_that_are_no_errors_are_one_finding_and_hide_none(tmp_path: Path) -> None:
    config = read(
        tmp_path, AXOLOTL | {"hello": 1, "swanlab_x": 2, "dataset_prepared_pth": 3, "context_parapllel_size": 2}
    )
    error, others = config.findings
    assert (error.severity, error.where, error.hint) == (
        "error",
        "context_parapllel_size",
        "write context_parallel_size",
    )
    assert (others.severity, others.code) == ("warning", "unknown-key")
    assert others.what.startswith("3 keys are not known: dataset_prepared_pth (dataset_prepared_path?), hello")


@pytest.mark.full
def test_thousands_of_unknown_keys_are_not_all_reported(tmp_path: Path) -> None:
    config = read(tmp_path, ACCELERATE | {f"num_proceses{'x' * i}": i for i in range(1000)})
    assert len(config.findings) <= 200
    (finding,) = read(tmp_path, ACCELERATE | {f"key{i}": i for i in range(1000)}).findings
    assert (finding.severity, len(finding.what) < 300) == ("warning", True)


# Whose it is


def test_config_of_nobody_is_refused_with_the_candidates(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a config of a known trainer") as error:
        read(tmp_path, {"name": "x"})
    assert error.value.exit_code == 2
    assert error.value.hint is not None
    assert "--framework accelerate|trainer|torchtitan|axolotl|ai-toolkit|verl|openrlhf" in error.value.hint


def test_config_of_several_is_refused_with_those(tmp_path: Path) -> None:
    values = {"base_model": "m", "per_device_train_batch_size": 1}
    with pytest.raises(UsageError, match="of trainer and of axolotl") as error:
        read(tmp_path, values)
    assert error.value.hint is not None
    assert "--framework trainer|axolotl" in error.value.hint
    assert read(tmp_path, values, framework="axolotl").framework == "axolotl"


@pytest.mark.parametrize("framework", ["accelerate", "openrlhf"])
def test_framework_of_another_kind_of_file_is_refused(framework: Any, tmp_path: Path) -> None:
    text = "python -m openrlhf.cli.train_sft --backend fsdp2\n"
    name = "run.sh" if framework == "accelerate" else "run.yaml"
    with pytest.raises(UsageError, match="expected a"):
        read(tmp_path, text if framework == "accelerate" else {"a": 1}, name=name, framework=framework)


def test_world_size_that_is_passed_wins(tmp_path: Path) -> None:
    assert read(tmp_path, ACCELERATE, world_size=32).spec.mesh == mesh(dp_shard=32)


# Ten lines that stand for a billion values.
BOMB = "k: &c0 [1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"k{i}: &c{i} [{', '.join([f'*c{i - 1}'] * 10)}]\n" for i in range(1, 9)
)


# Files that are no configs


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.yaml", "- a\n- b\n", "found a list"),
        ("a.yaml", "", "found nothing"),
        ("a.yaml", "a: [", "not YAML"),
        ("a.yaml", "[" * 100_000, "inside one another"),
        ("a.yaml", "a: &x [*x]\n", "inside one another"),
        ("a.yaml", "a: !!python/object/apply:os.system ['true']\n", "not YAML"),
        ("a.yaml", BOMB, "values"),
        ("a.yaml", "a: 1\na: 2\n", "written twice"),
        ("a.json", '{"a": 1, "a": 2}', "written twice"),
        ("a.json", "[" * 100_000, "nested too deep"),
        ("a.json", '{"a": ' + "9" * 5000 + "}", "not JSON"),
        ("a.json", "", "not JSON"),
        ("a.toml", "a = " + "[" * 100_000, "nested too deep"),
        ("a.toml", "a", "not TOML"),
        ("a.sh", "echo 'a", "no closing quotation"),
        ("a.txt", "hello", "neither YAML"),
    ],
)
def test_file_that_is_no_config_is_refused(name: str, text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(UnreadableError, match=says):
        read(tmp_path, text, name=name)


def test_path_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for path, says in ((str(tmp_path / "no"), "no such file"), (str(tmp_path), "a directory"), ("a\0b", "not a path")):
        with pytest.raises(UnreadableError, match=says):
            read_config(path)
    (tmp_path / "latin").write_bytes(b"a: \xff\n")
    with pytest.raises(UnreadableError, match="not UTF-8"):
        read_config(str(tmp_path / "latin"))
    (tmp_path / "long.yaml").write_bytes(b"#" * (MAX_BYTES + 1))
    with pytest.raises(LimitError, match="more than"):
        read_config(str(tmp_path / "long.yaml"))


def test_numbers_and_merges_are_read_as_pyyaml_reads_them(tmp_path: Path) -> None:
    text = "base_model: m\nx-size: &b {lora_r: 8}\nsequence_len: 16_384\nlearning_rate: 2.0e-5\nlora_alpha: 1.6e+1\n"
    config = read(tmp_path, text + "datasets:\n  - <<: *b\n    path: p\n")
    assert config.values == yaml.safe_load(text + "datasets:\n  - <<: *b\n    path: p\n")
    assert config.spec.seq_len == 16384


@pytest.mark.parametrize(
    ("values", "where"),
    [
        (ACCELERATE | {"num_processes": 0}, "num_processes"),
        (ACCELERATE | {"num_processes": -3}, "num_processes"),
        (ACCELERATE | {"num_machines": 0}, "num_machines"),
        (AXOLOTL | {"sequence_len": -5}, "sequence_len"),
        (AXOLOTL | {"micro_batch_size": 0}, "micro_batch_size"),
        ({"output_dir": "x", "per_device_train_batch_size": "0"}, "per_device_train_batch_size"),
    ],
)
def test_count_of_what_no_run_is_without_below_one_is_an_error(
    values: dict[str, Any], where: str, tmp_path: Path
) -> None:
    found = [(f.code, f.severity, f.where) for f in read(tmp_path, values).findings]
    assert found == [("wrong-type", "error", where)]


def test_processes_that_the_launcher_is_to_be_told_are_no_error(tmp_path: Path) -> None:
    config = read(tmp_path, ACCELERATE | {"num_processes": -1})
    assert config.findings == ()
    assert config.spec.world_size is None


@pytest.mark.parametrize("framework", ["verl", "torchtitan", "ai-toolkit", "trainer", "axolotl"])
def test_config_of_another_framework_than_the_one_named_is_refused(framework: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"{framework} reads") as error:
        read(tmp_path, ACCELERATE, framework=framework)
    assert error.value.hint == "this looks like a config of accelerate: --framework accelerate"


@pytest.mark.parametrize(
    ("policy", "wraps"),
    [(None, False), ("NO_WRAP", False), ("TRANSFORMER_BASED_WRAP", True), ("SIZE_BASED_WRAP", True)],
)
def test_blocks_are_wrapped_where_a_policy_says_so(policy: str | None, wraps: bool, tmp_path: Path) -> None:
    options = ACCELERATE["fsdp_config"] | ({} if policy is None else {"fsdp_auto_wrap_policy": policy})
    assert read(tmp_path, ACCELERATE | {"fsdp_config": options}).spec.wraps_blocks is wraps


def test_experts_with_ranks_of_their_own_are_sharded_over_all_of_them(tmp_path: Path) -> None:
    spec = read(tmp_path, AXOLOTL | {"expert_parallel_size": 4, "dp_shard_size": 2}, world_size=8).spec
    assert (spec.strategy, shard_mesh(spec.mesh)) == ("full_shard", mesh(dp_shard=8))
    alone = read(tmp_path, AXOLOTL | {"expert_parallel_size": 8}, world_size=8).spec
    assert (alone.strategy, shard_mesh(alone.mesh)) == ("full_shard", mesh(dp_shard=8))
