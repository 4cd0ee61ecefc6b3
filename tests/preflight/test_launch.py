"""What people launch with: several configs, launch lines, scripts, options after `--`, and what CI gets."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from ckpt_tools.cli import main
from ckpt_tools.errors import UsageError
from ckpt_tools.preflight.configs import Config, read_config

ACCELERATE = """\
distributed_type: FSDP
mixed_precision: bf16
num_machines: 1
num_processes: 8
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_state_dict_type: SHARDED_STATE_DICT
"""
ARGUMENTS = """\
model_name_or_path: org/model
output_dir: out
per_device_train_batch_size: 2
max_length: 4096
bf16: true
"""
TITAN = "[training]\nseq_len = 4096\nlocal_batch_size = 2\n\n[parallelism]\ntensor_parallel_degree = 2\n"
DEEPSPEED = '{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}'
LLAMAFACTORY = "model_name_or_path: m\nstage: sft\nfinetuning_type: lora\ntemplate: x\ncutoff_len: 100\noutput_dir: o\n"
AXOLOTL = "base_model: m\nsequence_len: 100\nmicro_batch_size: 1\n"
FILES = {
    "acc.yaml": ACCELERATE, "args.yaml": ARGUMENTS, "titan.toml": TITAN, "ds.json": DEEPSPEED, "lf.yaml": LLAMAFACTORY,
    "axo.yaml": AXOLOTL, "configs/acc4.yaml": ACCELERATE.replace("num_processes: 8", "num_processes: 4"),
}  # fmt: skip


def written(folder: Path, **files: str) -> Path:
    for name, text in {**FILES, **files}.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
    return folder


def script(folder: Path, text: str, *words: str, name: str = "run.sh") -> Config:
    written(folder, **{name: text})
    return read_config(str(folder / name), overrides=words)


MINE = "distributed_type: MULTI_GPU\nnum_processes: $((2 * 8))\n"
LAUNCHES: dict[str, tuple[str, dict[str, Any]]] = {
    "accelerate with its config": (
        "accelerate launch --config_file acc.yaml sft.py --model_name_or_path m --per_device_train_batch_size 3 --bf16",
        {"engine": "fsdp2", "world_size": 8, "batch_size": 3, "model": "m", "reduce_dtype": "bf16"},
    ),
    "options of the launcher win": (
        "accelerate launch --config_file=configs/acc4.yaml --num_processes 16 --fsdp_offload_params 1 a.py args.yaml",
        {"world_size": 16, "offload_params": True, "seq_len": 4096},
    ),
    "without a config of the launcher": (
        "accelerate launch --use_fsdp --fsdp_version 2 --num_processes 4 -m trl.scripts.sft --config args.yaml",
        {"engine": "fsdp2", "world_size": 4, "seq_len": 4096, "batch_size": 2},
    ),
    "as a module": (
        "python -u -m accelerate.commands.launch --config_file acc.yaml -m trl.scripts.sft --config args.yaml",
        {"engine": "fsdp2", "world_size": 8},
    ),
    "torchrun": (
        "torchrun --nnodes 2 --nproc_per_node 8 train.py args.yaml",
        {"engine": "ddp", "world_size": 16, "batch_size": 2},
    ),
    "deepspeed": (
        "deepspeed --num_gpus 4 train.py --deepspeed ds.json --per_device_train_batch_size 5 --bf16 --output_dir o",
        {"engine": "deepspeed", "strategy": "full_shard", "world_size": 4, "batch_size": 5},
    ),
    "switches before the program": (
        "torchrun --nproc_per_node=2 --standalone train.py args.yaml --seed {1,2} 2>&1 | tee log.txt &",
        {"world_size": 2, "batch_size": 2},
    ),
    "a function that is called last": (
        'main() {\n torchrun --nproc_per_node=2 train.py args.yaml "$@"\n}\n[ -n "$X" ] || main --max_length 7',
        {"world_size": 2, "seq_len": 7},
    ),
    "trl": ("trl sft --config args.yaml --max_length=512", {"framework": "trainer", "seq_len": 512, "batch_size": 2}),
    "llamafactory": (
        "FORCE_TORCHRUN=1 llamafactory-cli train lf.yaml cutoff_len=2048 per_device_train_batch_size=4",
        {"framework": "llamafactory", "seq_len": 2048, "batch_size": 4},
    ),
    "axolotl": (
        "axolotl train axo.yaml --micro-batch-size 4 --launcher torchrun",
        {"framework": "axolotl", "batch_size": 4, "seq_len": 100},
    ),
    "torchtitan": (
        "F=${F:-./titan.toml}; torchrun --nproc-per-node 8 -m torchtitan.train --config_file $F --training.seq_len=9",
        {"framework": "torchtitan", "seq_len": 9, "world_size": 8},
    ),
    "srun": (
        "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\nsrun python train.py args.yaml",
        {"world_size": 8, "seq_len": 4096},
    ),
    "an array in a function in a file": (
        "source lib/common.sh\nstart 6 args.yaml --bf16 False",
        {"world_size": 6, "param_dtype": None, "batch_size": 2},
    ),
    "a config that the script writes": (
        f"cat > mine.yaml <<EOF\n{MINE}EOF\naccelerate launch --config_file mine.yaml sft.py args.yaml",
        {"engine": "ddp", "world_size": 16},
    ),
    "a shell of its own": (
        "export N=8\nsrun bash -c 'torchrun --nproc_per_node $N train.py args.yaml'",
        {"world_size": 8},
    ),
}
COMMON = """COMMON=(--nnodes 1)
start() {
  local n=$1
  shift
  torchrun "${COMMON[@]}" --nproc_per_node $n train.py "$@"
}
"""


@pytest.mark.parametrize("name", LAUNCHES)
def test_launch_line_says_what_its_parts_say(name: str, tmp_path: Path) -> None:
    text, expected = LAUNCHES[name]
    written(tmp_path, **{"lib/common.sh": COMMON})
    config = script(tmp_path, text + "\n")
    assert {field: getattr(config.spec, field) for field in expected} == expected
    assert config.why_not == ""


def test_script_from_stdin_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(written(tmp_path))
    stdin = io.TextIOWrapper(io.BytesIO(b"torchrun --nproc_per_node 2 train.py args.yaml"))
    monkeypatch.setattr("sys.stdin", stdin)
    assert read_config("-").spec.world_size == 2


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("accelerate launch --config_file $CONFIG sft.py args.yaml", "the config $CONFIG is not in the script"),
        ("accelerate launch --config_file none.yaml sft.py args.yaml", "the config none.yaml is not here"),
        ("trl sft --config none.yaml", "the config none.yaml is not here"),
        ("cat > a.yaml <<EOF\nx: 1\nEOF\nsed -i s/1/2/ a.yaml\naccelerate launch --config_file a.yaml b.py args.yaml",
         "the script changes its config a.yaml as it runs"),
        ("echo hello --world", "this is not a config of a known trainer"),
    ],
)  # fmt: skip
def test_config_that_cannot_be_followed_is_named(text: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        script(tmp_path, text)
    assert caught.value.what == what


def test_script_that_starts_two_runs_is_not_green(tmp_path: Path) -> None:
    line = "accelerate launch --config_file acc.yaml sft.py args.yaml\n"
    for text in (line + line, "source ./run.sh\n" + line):  # which reads itself in
        assert "more than one trainer" in script(tmp_path, text).why_not


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ("--nnodes 2", [("warning", "nothing says where they meet")]),
        ("--nnodes=2 --standalone", [("error", "a run of its own")]),
        ("--nnodes 2 --master-addr a", [("warning", "takes itself for the first")]),
        ("--nnodes 2 --master_addr a --node_rank 1", []),
        ("--nnodes 2 --rdzv_backend c10d --rdzv_endpoint $HEAD:29500", []),
        ("--nnodes 1 --standalone", []),
        ("--nnodes $N", []),
        ("", []),
    ],
)
def test_machines_of_a_torchrun_must_be_told_where_they_meet(options: str, found: Any, tmp_path: Path) -> None:
    line = f"torchrun {options} --nproc-per-node 8 train.py --per_device_train_batch_size 1 --output_dir o"
    (tmp_path / "run.sh").write_text(line)
    findings = [one for one in read_config(str(tmp_path / "run.sh")).findings if one.code == "meeting"]
    assert [one.severity for one in findings] == [severity for severity, _ in found]
    assert all(words in one.what for one, (_, words) in zip(findings, found, strict=True))


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
    with pytest.raises(UsageError, match="not read together"):
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
    files = {"acc.yaml": ACCELERATE.replace(launcher, ours), "args.yaml": ARGUMENTS.replace(arguments, theirs)}
    folder = written(tmp_path, **files)
    config = read_config(str(folder / "acc.yaml"), str(folder / "args.yaml"))
    found = [(one.severity, one.where) for one in config.findings if one.code == "contradiction"]
    assert found == [(severity, where)]


def test_accumulation_that_deepspeed_is_told_otherwise_is_an_error(tmp_path: Path) -> None:
    text = "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  zero_stage: 2\n"
    steps = "  gradient_accumulation_steps: {}\n"
    for ours, theirs, is_found in ((4, 8, True), (8, 8, False), ("auto", 8, False)):
        arguments = f"{ARGUMENTS}gradient_accumulation_steps: {theirs}\n"
        folder = written(tmp_path, **{"acc.yaml": text + steps.format(ours), "args.yaml": arguments})
        findings = read_config(str(folder / "acc.yaml"), str(folder / "args.yaml")).findings
        assert [one.where for one in findings] == ["deepspeed_config.gradient_accumulation_steps"] * is_found


def test_arguments_below_a_launcher_are_not_blamed_for_what_it_says(tmp_path: Path, capsys: Any) -> None:
    folder = written(tmp_path)
    assert main(["preflight", str(folder / "acc.yaml"), str(folder / "args.yaml"), "--only", "rules", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["findings"] == []
    assert document["framework"] == "accelerate + trainer"


OVERRIDES: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "args.yaml": ("trainer", ("--max_length", "128", "--bf16=False", "--fp16"), {"seq_len": 128, "param_dtype": "f16"}),
    "titan.toml": (
        "torchtitan",
        ("--training.seq-len=64", "--parallelism.tensor_parallel_degree", "1"),
        {"seq_len": 64},
    ),
    "lf.yaml": ("llamafactory", ("cutoff_len=64", "bf16=true"), {"seq_len": 64, "param_dtype": "bf16"}),
    "axo.yaml": ("axolotl", ("--sequence-len", "64"), {"seq_len": 64}),
    "acc.yaml": ("accelerate", ("--num_processes", "2"), {"world_size": 2}),
}


@pytest.mark.parametrize("name", OVERRIDES)
def test_words_after_dashes_override_the_file(name: str, tmp_path: Path) -> None:
    framework, words, expected = OVERRIDES[name]
    config = read_config(str(written(tmp_path) / name), overrides=words)
    assert config.framework == framework
    assert {field: getattr(config.spec, field) for field in expected} == expected


@pytest.mark.parametrize("word", ["a..b=1", "=x", "~", "x[0]=1", "value"])
def test_word_after_dashes_that_sets_nothing_is_refused(word: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="sets no option"):
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
    titan = TITAN.replace("_degree = 2", "_degree = 3") + "\n[checkpoint]\nenable_checkpoin = true\n"
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
    assert "--ignore CKPT000: there is no such finding" in out


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
        assert (code, "NOT ok, strictly" in out) == (expected, bool(expected)), (name, options)


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
