"""Configs of seven trainers: examples, unknown keys, wrong types, whose it is, what is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from preflight.config_examples import (
    ACCELERATE,
    AXOLOTL,
    BASES,
    EXAMPLES,
    FILES,
    FIXTURES,
    READINGS,
    mesh,
    read,
    written,
)

from ckpt_tools.errors import LimitError, UnreadableError, UsageError
from ckpt_tools.preflight.configs import Config, read_config
from ckpt_tools.preflight.configs.document import MAX_BYTES
from ckpt_tools.preflight.configs.overrides import read_flags, resolve
from ckpt_tools.preflight.plain_values import find_value
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


def reading(row: dict[str, Any], folder: Path) -> Config:
    name = row.get("launched") or row.get("file") or ("run.sh" if "script" in row else "config.yaml")
    files = dict(row.get("files", {}))
    if "script" in row:
        files[name] = row["script"] + "\n"
    elif "launched" not in row:
        values = BASES.get(row.get("of", ""), {}) | row.get("config", {})
        files[name] = json.dumps(values) if name.endswith(".json") else yaml.safe_dump(values)
    path = written(folder, FILES if "launched" in row else {}, **files) / name
    words = tuple(row.get("words", ()))
    return read_config(str(path), framework=row.get("framework"), world_size=row.get("ranks"), overrides=words)


@pytest.mark.parametrize("name", READINGS)
def test_config_is_read_as_its_row_says(name: str, tmp_path: Path) -> None:
    row = READINGS[name]
    if "refused" in row:
        with pytest.raises(UsageError) as caught:
            reading(row, tmp_path)
        assert caught.value.what == row["refused"]
        return
    config = reading(row, tmp_path)
    assert {field: getattr(config.spec, field) for field in row["spec"]} == row["spec"]
    assert row.get("axes", {}).items() <= config.spec.axes.items()
    assert config.framework == row.get("framework_is", config.framework)
    for path, value in row.get("values", {}).items():
        assert find_value(config.values, path) == value
    for option, value in row.get("options", {}).items():
        assert getattr(config.options, option) == (tuple(value) if isinstance(value, list) else value)
    found = [f"{one.code} {one.severity} {one.where.replace(str(tmp_path / 'run.sh'), '@')}" for one in config.findings]
    assert found == row.get("found", found)
    text = "\n".join(one.what for one in config.findings)
    assert [words for words in row.get("what", ()) if words not in text] == []
    assert "hint" not in row or config.findings[0].hint == row["hint"]
    assert "is_whole" not in row or (config.why_not == "") is row["is_whole"]


# Unknown keys, wrong types


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
        ("a.txt", "hello", "not YAML"),
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


@pytest.mark.parametrize("framework", ["verl", "torchtitan", "ai-toolkit", "trainer", "axolotl"])
def test_config_of_another_framework_than_the_one_named_is_refused(framework: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"{framework} reads") as error:
        read(tmp_path, ACCELERATE, framework=framework)
    assert error.value.hint == "this looks like a config of accelerate: --framework accelerate"


def test_experts_with_ranks_of_their_own_are_sharded_over_all_of_them(tmp_path: Path) -> None:
    spec = read(tmp_path, AXOLOTL | {"expert_parallel_size": 4, "dp_shard_size": 2}, world_size=8).spec
    assert (spec.strategy, shard_mesh(spec.mesh)) == ("full_shard", mesh(dp_shard=8))
    alone = read(tmp_path, AXOLOTL | {"expert_parallel_size": 8}, world_size=8).spec
    assert (alone.strategy, shard_mesh(alone.mesh)) == ("full_shard", mesh(dp_shard=8))


def test_nothing_in_a_script_is_executed(tmp_path: Path) -> None:
    target = tmp_path / "touched"
    options = f"--max_len $(touch {target}) --save_path `touch {target}`"
    read(tmp_path, f"touch {target}\ntorchrun -m openrlhf.cli.train_sft {options}\n", name="run.sh")
    assert not target.exists()


def test_flags_are_split_as_argparse_does() -> None:
    values, unread = read_flags(
        ["--a", "1", "--b-c=x", "--d", "--e", "p", "q", "--f", '{"k": 1}', "--no_g", "--h", "-1", "--i", "$V", "$ARGS"]
    )
    assert values == {
        "a": "1", "b_c": "x", "d": True, "e": ["p", "q"], "f": {"k": 1}, "g": False, "h": "-1", "i": "$V",
    }  # fmt: skip
    assert unread == ("$ARGS",)


def _reads_zero3(path: Path) -> bool:
    config = read_config(str(path), framework="axolotl")
    return config.spec.strategy == "full_shard" and not config.options.unread


def test_deepspeed_file_is_found_from_where_the_run_starts_and_from_where_the_config_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a config in a linked folder, from where it is linked; of what a script writes, from where the script lies."""
    text, zero3 = "base_model: m\ndeepspeed: ds.json\n", json.dumps({"zero_optimization": {"stage": 3}})
    for folder in ("cwd", "elsewhere/cfg", "proj"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "elsewhere/cfg/c.yaml").write_text(text)
    assert not _reads_zero3(tmp_path / "elsewhere/cfg/c.yaml")
    (tmp_path / "cwd/ds.json").write_text(zero3)
    monkeypatch.chdir(tmp_path / "cwd")
    assert _reads_zero3(tmp_path / "elsewhere/cfg/c.yaml")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "proj/ds.json").write_text(zero3)
    (tmp_path / "proj/cfg").symlink_to(tmp_path / "elsewhere/cfg")
    assert _reads_zero3(tmp_path / "proj/cfg/c.yaml")
    script = f"cat > gen/c.yaml <<EOF\n{text}EOF\naxolotl train gen/c.yaml\n"
    (tmp_path / "proj/run.sh").write_text(script)
    assert _reads_zero3(tmp_path / "proj/run.sh")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"a": [1], "a[-5]": {"x": "${.y}", "y": 5}}, 5),
        ({"a": [1], "a[x]": {"x": "${.y}", "y": 5}}, 5),
        ({"fsdp_config.x": {"x": "${.r}", "r": 2}}, 2),
    ],
)
def test_interpolation_in_a_mapping_with_a_key_that_looks_like_a_path_is_followed(values: dict, expected: int) -> None:
    found = resolve(values)
    assert next(each["x"] for each in found.values() if isinstance(each, dict)) == expected
