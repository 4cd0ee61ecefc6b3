"""What people launch with: several configs, launch lines, scripts, options after `--`, and what CI gets."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from preflight.config_examples import FILES, written

from ckpt_tools.cli import main
from ckpt_tools.errors import UsageError
from ckpt_tools.preflight.configs import Config, read_config

ACCELERATE = FILES["acc.yaml"]


def script(folder: Path, text: str, *words: str, name: str = "run.sh") -> Config:
    written(folder, **{name: text})
    return read_config(str(folder / name), overrides=words)


def test_script_from_stdin_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(written(tmp_path))
    stdin = io.TextIOWrapper(io.BytesIO(b"torchrun --nproc_per_node 2 train.py args.yaml"))
    monkeypatch.setattr("sys.stdin", stdin)
    assert read_config("-").spec.world_size == 2


def test_script_that_starts_two_runs_is_not_green(tmp_path: Path) -> None:
    line = "accelerate launch --config_file acc.yaml sft.py args.yaml\n"
    for text in (line + line, "source ./run.sh\n" + line):  # which reads itself in
        assert "more than one trainer" in script(tmp_path, text).why_not


def test_option_of_the_launcher_that_is_not_known_is_named(tmp_path: Path) -> None:
    line = "deepspeed --num_gpus=$NUM train.py --per_device_train_batch_size 1 --output_dir o --deepspeed ds.json"
    (tmp_path / "run.sh").write_text(line)
    findings = read_config(str(tmp_path / "run.sh")).findings
    assert [one.what for one in findings if one.where == "--num_gpus"] == [
        "--num_gpus is not in the file: its value is not checked"
    ]


def test_program_that_nobody_knows_leaves_the_launchers_config(tmp_path: Path) -> None:
    config = script(tmp_path, "accelerate launch --config_file acc.yaml own.py --my_batch 3 --depth 2\n")
    assert (config.framework, config.spec.world_size) == ("accelerate", 8)
    assert "the arguments of the program" in config.not_checked[0]
    assert script(tmp_path, "accelerate launch own.py --my_batch 3 --output_dir x\n").why_not  # nothing is left


def test_configs_of_one_run_are_read_together(tmp_path: Path) -> None:
    folder = written(tmp_path)
    for paths in (["acc.yaml", "args.yaml"], ["args.yaml", "acc.yaml"]):
        config = read_config(*(str(folder / path) for path in paths))
        spec = config.spec
        assert (spec.engine, spec.world_size, spec.strategy) == ("fsdp2", 8, "full_shard")
        assert (spec.batch_size, spec.seq_len, spec.param_dtype, spec.master_dtype) == (2, 4096, "bf16", "f32")
        assert config.findings == ()
    spec = read_config(str(folder / "args.yaml"), str(folder / "ds.json"), world_size=4).spec
    assert (spec.engine, spec.strategy, spec.batch_size) == ("deepspeed", "full_shard", 2)
    with pytest.raises(UsageError, match="same kind"):
        read_config(str(folder / "acc.yaml"), str(folder / "configs/acc4.yaml"), str(folder / "args.yaml"))
    with pytest.raises(UsageError, match="cannot be combined"):
        read_config(str(folder / "acc.yaml"), str(folder / "titan.toml"))


@pytest.mark.parametrize(
    ("launcher", "arguments", "expected"),
    [
        ("mixed_precision: bf16", "bf16: true", ("mixed_precision: fp16", "bf16: true", "warning", "mixed_precision")),
        ("mixed_precision: bf16", "bf16: true", ("mixed_precision: bf16", "fp16: true", "warning", "mixed_precision")),
        ("x", "bf16: true", ("x", "bf16: true\nfsdp: full_shard", "warning", "fsdp")),
        ("x", "bf16: true", ("x", "bf16: true\ndeepspeed: ds.json", "error", "deepspeed")),
    ],
)
def test_configs_that_contradict_each_other_are_found(
    launcher: str, arguments: str, expected: tuple[str, str, str, str], tmp_path: Path
) -> None:
    ours, theirs, severity, where = expected
    files = {"acc.yaml": ACCELERATE.replace(launcher, ours), "args.yaml": FILES["args.yaml"].replace(arguments, theirs)}
    folder = written(tmp_path, **files)
    config = read_config(str(folder / "acc.yaml"), str(folder / "args.yaml"))
    found = [(one.severity, one.where) for one in config.findings if one.code == "contradiction"]
    assert found == [(severity, where)]


def test_accumulation_that_deepspeed_is_told_otherwise_is_an_error(tmp_path: Path) -> None:
    text = "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  zero_stage: 2\n"
    steps = "  gradient_accumulation_steps: {}\n"
    for ours, theirs, is_found in ((4, 8, True), (8, 8, False), ("auto", 8, False)):
        arguments = f"{FILES['args.yaml']}gradient_accumulation_steps: {theirs}\n"
        folder = written(tmp_path, **{"acc.yaml": text + steps.format(ours), "args.yaml": arguments})
        findings = read_config(str(folder / "acc.yaml"), str(folder / "args.yaml")).findings
        assert [one.where for one in findings] == ["deepspeed_config.gradient_accumulation_steps"] * is_found


def test_arguments_below_a_launcher_are_not_blamed_for_what_it_says(tmp_path: Path, capsys: Any) -> None:
    folder = written(tmp_path)
    assert main(["preflight", str(folder / "acc.yaml"), str(folder / "args.yaml"), "--only", "rules", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["findings"] == []
    assert document["framework"] == "accelerate + trainer"


@pytest.mark.parametrize("word", ["a..b=1", "=x", "~", "x[0]=1", "value"])
def test_word_after_dashes_that_sets_nothing_is_refused(word: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not set an option"):
        read_config(str(written(tmp_path) / "lf.yaml"), overrides=(word,))


def test_overrides_of_hydra_add_change_and_remove(tmp_path: Path) -> None:
    tree = {"actor_rollout_ref": {"model": {"path": "m"}, "actor": {"strategy": "fsdp"}}, "trainer": {"nnodes": 2}}
    (tmp_path / "verl.yaml").write_text(yaml.safe_dump(tree))
    words = ("actor_rollout_ref.actor.strategy=fsdp2", "+trainer.n_gpus_per_node=4", "~actor_rollout_ref.model.path")
    spec = read_config(str(tmp_path / "verl.yaml"), overrides=words).spec
    assert (spec.engine, spec.world_size, spec.model) == ("fsdp2", 8, None)


def test_words_after_dashes_are_the_scripts_own_where_it_takes_some(tmp_path: Path) -> None:
    verl = "python -m verl.trainer.main_ppo actor_rollout_ref.actor.strategy=fsdp2 trainer.nnodes=$1"
    verl += " trainer.n_gpus_per_node=8"
    takes = f'N=$1\nshift\n{verl.replace("$1", "$N")} "$@"\n'
    assert script(tmp_path, takes, "2", "trainer.n_gpus_per_node=4").spec.world_size == 8
    assert script(tmp_path, takes).options.unread == ("trainer.nnodes",)
    takes_none = verl.replace("$1", "2") + "\n"
    assert script(tmp_path, takes_none, "trainer.nnodes=3").spec.world_size == 24
    config = script(tmp_path, f'{verl.replace("$1", "2")} "$@"\n')
    assert (config.why_not, config.assumed) == ("", ("$@",))
    assert script(tmp_path, takes_none, "$MORE").why_not


def located(document: dict[str, Any]) -> dict[str, tuple[str, int | None]]:
    return {one["where"]: (Path(one["file"]).name, one["line"]) for one in document["findings"] if one["file"]}


def test_findings_have_the_line_that_they_are_about(tmp_path: Path, capsys: Any) -> None:
    titan = FILES["titan.toml"].replace("_degree = 2", "_degree = 3") + "\n[checkpoint]\nenable_checkpoin = true\n"
    verl = "ARGS=(\n  actor_rollout_ref.actor.strategy=fsdp2\n  trainer.nnodes=zwei\n)\npython -m verl.trainer.main_ppo"
    files = {
        "acc.yaml": ACCELERATE.replace("fsdp_version: 2", "fsdp_version: 2\n  fsdp_offload_parms: true"),
        "args.json": '{\n\t"output_dir": "o",\n\t"bf16": "maybe",\n\t"per_device_train_batch_size": 1}',
        "titan.toml": titan,
        "run.sh": f'{verl} "${{ARGS[@]}}"',
        "launch.sh": "accelerate launch --config_file acc.yaml \\\n  --num_machines 0 \\\n a.py args.json --fp16 X",
    }
    folder = written(tmp_path, **files)
    expected: dict[str, dict[str, tuple[str, int | None]]] = {
        "acc.yaml": {"fsdp_config.fsdp_offload_parms": ("acc.yaml", 7)},
        "args.json": {"bf16": ("args.json", 3)},
        "titan.toml": {"checkpoint.enable_checkpoin": ("titan.toml", 9)},
        "run.sh": {"trainer.nnodes": ("run.sh", 3)},
        "launch.sh": {"num_machines": ("launch.sh", 2), "bf16": ("args.json", 3), "fp16": ("launch.sh", 3)},
    }
    for name, places in expected.items():
        main(["preflight", str(folder / name), "--only", "rules", "--json"])
        found = located(json.loads(capsys.readouterr().out))
        assert {key: found.get(key) for key in places} == places, name
    main(["preflight", str(folder / "acc.yaml"), "--only", "rules", "-q", "--", "--num_processes=0"])
    assert "at: the command line: num_processes" in capsys.readouterr().out


def run(capsys: Any, *argv: str) -> tuple[int, str]:
    code = main(["preflight", *argv])
    return code, capsys.readouterr().out


WRONG = ACCELERATE.replace("num_processes: 8", "num_processes: 0")


def test_checks_that_are_left_out_are_not_made(tmp_path: Path, capsys: Any) -> None:
    path = str(written(tmp_path) / "acc.yaml")
    made: dict[tuple[str, ...], list[str]] = {}
    for options in (("--only", "rules"), ("--only", "checkpoint"), ("--no-memory", "--no-smoke")):
        code, out = run(capsys, path, "--json", *options)
        assert code == 0
        made[options] = [one["what"] for one in json.loads(out)["checks"]]
    assert [what.startswith("--only") for what in made["--only", "rules"]] == [False, False, True, True, True]
    assert [what.startswith("--only") for what in made["--only", "checkpoint"]] == [False, True, True, False, True]
    assert made["--no-memory", "--no-smoke"][2] == "--no-memory"
    assert main(["preflight", path, "--only", "rule"]) == 2


def test_errors_that_are_ignored_are_listed_and_let_pass(tmp_path: Path, capsys: Any) -> None:
    path = str(written(tmp_path, **{"acc.yaml": WRONG}) / "acc.yaml")
    assert run(capsys, path, "--only", "rules", "-q")[0] == 3
    code, out = run(capsys, path, "--only", "rules", "--json", "--ignore", "wrong-type")
    document = json.loads(out)
    assert (code, document["findings"]) == (0, [])
    assert [(one["code"], one["severity"]) for one in document["ignored"]] == [("wrong-type", "error")]
    out = run(capsys, path, "--only", "rules", "--ignore", "wrong-type", "--ignore", "CKPT000")[1]
    assert "ignored error: wrong-type" in out
    assert out.splitlines()[-1].endswith("; ignored: wrong-type")
    assert "--ignore CKPT000: no such finding" in out


def test_strict_fails_on_warnings_and_on_what_was_not_checked(tmp_path: Path, capsys: Any) -> None:
    files = {"warns.yaml": ACCELERATE.replace("  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n", "")}
    folder = written(tmp_path, **files)
    for name, options, expected in (
        ("acc.yaml", ["--only", "rules"], 0),
        ("warns.yaml", ["--only", "rules"], 3),
        ("acc.yaml", ["--only", "rules", "--only", "memory"], 3),
        ("acc.yaml", ["--no-smoke", "--no-memory"], 3),
    ):
        path = str(folder / name)
        assert run(capsys, path, *options)[0] == 0
        code, out = run(capsys, path, "--strict", *options)
        assert (code, "NOT ok (--strict)" in out) == (expected, bool(expected)), (name, options)


def test_github_gets_annotations_that_cannot_break_out(tmp_path: Path, capsys: Any) -> None:
    text = ACCELERATE + '"odd,key:\\n::error::x%": 1\nnum_processe: 4\n'
    path = str(written(tmp_path, **{"a,b:c.yaml": text}) / "a,b:c.yaml")
    code, out = run(capsys, path, "--only", "rules", "--format", "github")
    lines = out.splitlines()
    assert code == 3
    assert all(line.startswith(("::error ", "::warning ", "::notice ")) for line in lines)
    escaped = path.replace(":", "%3A").replace(",", "%2C")
    assert f"::error file={escaped},line=10,title=unknown-key at num_processe::" in lines[0]
    assert lines[-1].startswith("::error title=ckpt preflight::NOT ok: 1 error")


@pytest.mark.parametrize("form", ["github", "sarif"])
@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a\x1b]0;owned\x07\u202egnp.yaml", WRONG, 3),
        ("a\n::error::b%0A.yaml", "a: [1\n", 4),
        ("a\udcff.yaml", WRONG, 3),
        ("a\udcff\x1b.yaml", None, 4),
    ],
)
def test_machines_get_a_document_of_any_file(tmp_path: Path, capsys: Any, form, name: str, text, expected: int) -> None:
    """Of one with a hostile name, of one that cannot be read, and of none: inert, with its exit code."""
    if text is not None:
        (tmp_path / name).write_text(text)
    code, out = run(capsys, str(tmp_path / name), "--only", "rules", "--format", form)
    assert code == expected
    assert all(line.isascii() and line.isprintable() for line in out.splitlines())
    if form == "github":
        assert all(line.startswith(("::error ", "::warning ", "::notice ")) for line in out.splitlines())
        return
    check_sarif(document := json.loads(out), SARIF)
    (invocation,) = document["runs"][0]["invocations"]
    assert invocation["executionSuccessful"] == (expected == 3)
    assert invocation["toolExecutionNotifications"][0]["level"] == "error"


SARIF: dict[str, Any] = {
    "version": str,
    "runs": [{
        "tool": {"driver": {"name": str, "version": str, "rules": [{"id": str}]}},
        "invocations": [
            {"executionSuccessful": bool, "toolExecutionNotifications": [{"level": str, "message": {"text": str}}]}
        ],
        "results": [{
            "ruleId": str, "ruleIndex": int, "level": str, "message": {"text": str},
            "locations": [{"physicalLocation": {"artifactLocation": {"uri": str}}}],
        }],
    }],
}  # fmt: skip
"""Properties that SARIF 2.1.0 requires of the objects that are written, and their types."""


def check_sarif(node: Any, form: Any) -> None:
    if isinstance(form, dict):
        for name, inner in form.items():
            check_sarif(node[name], inner)
    elif isinstance(form, list):
        assert isinstance(node, list)
        for item in node:
            check_sarif(item, form[0])
    else:
        assert isinstance(node, form)


def test_sarif_has_what_the_format_requires(tmp_path: Path, capsys: Any) -> None:
    folder = written(tmp_path, **{"bad one.yaml": WRONG + "num_processe: 4\n"})
    options = ["--only", "rules", "--format", "sarif", "--ignore", "wrong-type"]
    code, out = run(capsys, str(folder / "bad one.yaml"), *options)
    document = json.loads(out)
    check_sarif(document, SARIF)
    assert (code, document["version"]) == (3, "2.1.0")
    (only,) = document["runs"]
    rules = [rule["id"] for rule in only["tool"]["driver"]["rules"]]
    for result in only["results"]:
        assert rules[result["ruleIndex"]] == result["ruleId"]
        assert result["level"] in ("error", "warning", "note", "none")
        place = result["locations"][0]["physicalLocation"]
        assert place["artifactLocation"]["uri"].endswith("/bad%20one.yaml")
        assert place["region"]["startLine"] >= 1
    assert {result["ruleId"]: "suppressions" in result for result in only["results"]} == {
        "unknown-key": False, "wrong-type": True
    }  # fmt: skip
    code, out = run(capsys, str(folder / "acc.yaml"), *options)
    clean = json.loads(out)
    check_sarif(clean, SARIF)
    assert (code, clean["runs"][0]["results"]) == (0, [])


def test_formats_that_are_asked_for_twice_agree(tmp_path: Path, capsys: Any) -> None:
    path = str(written(tmp_path) / "acc.yaml")
    documents = [
        json.loads(run(capsys, path, "--only", "rules", *one)[1]) for one in (["--json"], ["--format", "json"])
    ]
    for document in documents:
        for check in document["checks"]:
            check["seconds"] = 0
    assert documents[0] == documents[1]
