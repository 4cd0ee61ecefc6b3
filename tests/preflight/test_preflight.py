"""`ckpt preflight` from a config to the exit code: green means something, red names what, and the rest is said."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import forked
import pytest
import toys
import yaml
from safetensors.torch import load_file, save_file

from ckpt_tools import api
from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.checkpoint.layout import parse_mesh
from ckpt_tools.cli import main
from ckpt_tools.cli.output import ChangingLine
from ckpt_tools.cli.preflight import _lines, _located
from ckpt_tools.errors import UsageError
from ckpt_tools.preflight import run as run_module
from ckpt_tools.preflight.model_facts import find_sources
from ckpt_tools.preflight.places import ConfigLocation
from ckpt_tools.preflight.report import CHECKS
from ckpt_tools.preflight.spec import ParallelSpec

LIMIT_S = 60
"""Seconds that a preflight may take."""
FIELDS = {
    "schema_version", "ok", "config", "framework", "mesh", "spec", "checks", "findings", "estimate", "verify",
    "checkpoint", "smoke", "not_checked", "notes", "options", "ignored",
}  # fmt: skip
RIGHT = {
    "distributed_type": "FSDP",
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 8,
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": True,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": True,
    },
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small Llama as transformers saves it."""
    return toys.save("llama", tmp_path_factory.mktemp("models") / "llama", num_hidden_layers=3)


def write(tmp_path, fsdp=None, **changes):
    """An accelerate config: the right one, changed."""
    document = RIGHT | changes
    document["fsdp_config"] = RIGHT["fsdp_config"] | (fsdp or {})
    path = tmp_path / "accelerate.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def run(capsys, *argv, main=main):
    """Exit code and JSON document."""
    status = main(["preflight", *map(str, argv), "--json"])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.full
def test_rules_alone_build_the_model_only_where_its_files_do_not_tell(model, tmp_path, capsys, monkeypatch):
    built = []
    original = run_module.look_at_model
    monkeypatch.setattr(
        run_module, "look_at_model", lambda *args, **more: built.append(args) or original(*args, **more)
    )
    argv = ["--model", model, "--only", "rules"]
    status, document = run(capsys, write(tmp_path), *argv)
    assert (status, built) == (0, [])
    assert next(each["ok"] for each in document["checks"] if each["name"] == "rules")
    status, document = run(capsys, write(tmp_path, {"fsdp_transformer_layer_cls_to_wrap": "LlamaDecodr"}), *argv)
    assert (status, len(built)) == (3, 1)
    assert [one["code"] for one in document["findings"] if one["severity"] == "error"] == ["CKPT040"]


LIGHT = "import sys; from ckpt_tools.cli import main; sys.exit(main(sys.argv[1:]) or 100 * ('torch' in sys.modules))"


@pytest.mark.full
def test_preflight_of_a_right_config_is_green_and_checks_everything(model, tmp_path):
    (tmp_path / "args.yaml").write_text(
        "per_device_train_batch_size: 1\nmax_length: 128\noutput_dir: out\nbf16: true\n"
    )
    configs = [str(write(tmp_path)), str(tmp_path / "args.yaml")]
    argv = ["preflight", *configs, "--model", str(model), "--gpu-memory", "80GB", "--json"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", LIGHT, *argv], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # What it computes, and not how long it waits for a machine that others use.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < LIMIT_S
    assert done.returncode == 0, done.stdout + done.stderr  # 100: this process has imported torch
    document = json.loads(done.stdout)
    assert set(document) == FIELDS
    assert document["ok"]
    assert [(check["name"], check["ok"]) for check in document["checks"]] == [(name, True) for name in CHECKS]
    assert document["not_checked"] == []
    assert [f for f in document["findings"] if f["severity"] != "info"] == []
    assert (document["framework"], document["mesh"]) == ("accelerate + trainer", "dp_shard=8")
    assert document["verify"]["ok"]
    assert document["estimate"]["fits"]
    assert document["checkpoint"]["num_matched"] == 30
    smoke = document["smoke"]
    assert smoke["ok"]
    assert (smoke["mesh"], smoke["strategy"], smoke["source"]) == ("dp_shard=2", "full_shard", str(model))
    assert any("dp_shard=8 to 2" in note for note in document["notes"])


@pytest.mark.full
def test_preflight_of_a_wrong_config_is_red_with_exactly_these_ids(model, tmp_path, capsys):
    wrong = {"num_processes": 6, "parallelism_config": {"parallelism_config_dp_shard_size": 4}}
    path = write(tmp_path, {"fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayr"}, **wrong)
    status, document = run(capsys, path, "--model", model, "--no-smoke", main=forked.main)
    assert status == 3
    assert not document["ok"]
    errors = [f for f in document["findings"] if f["severity"] == "error"]
    assert {f["code"] for f in errors} == {"CKPT001", "CKPT040"}
    assert all(f["where"] and f["hint"] for f in errors)
    assert document["mesh"] is None


@pytest.mark.full
def test_preflight_of_a_checkpoint_and_a_device_that_are_not_enough_is_red_and_still_smokes(model, tmp_path, capsys):
    other = tmp_path / "other"
    shutil.copytree(model, other)
    state = load_file(model / "model.safetensors")
    del state["model.norm.weight"]
    save_file(state, other / "model.safetensors", metadata={"format": "pt"})
    argv = ("--model", model, "--checkpoint", other, "--gpu-memory", "1MB")
    status, document = run(capsys, write(tmp_path), *argv, main=forked.main)
    assert status == 3
    errors = [f["code"] for f in document["findings"] if f["severity"] == "error"]
    assert errors == ["part-of-a-model", "checkpoint-missing-key", "memory-does-not-fit"]
    assert document["estimate"]["fits"] is False
    assert document["smoke"]["ok"]
    assert any("the checkpoint is not loaded" in note for note in document["notes"])


def test_preflight_without_a_model_says_what_it_did_not_check(tmp_path, capsys):
    status, document = run(capsys, write(tmp_path))
    assert status == 0
    checks = {check["name"]: check["ok"] for check in document["checks"]}
    assert checks == {"config": True, "rules": True, "memory": None, "checkpoint": None, "smoke": None}
    told = " ".join(document["not_checked"])
    assert all(word in told for word in ("the model", "a checkpoint", "a smoke run", "whether it fits"))


@pytest.mark.parametrize(("options", "total"), [((), 5), (("--host",), 6), (("--only", "rules"), 5)])
def test_preflight_counts_its_checks(tmp_path, capsys, monkeypatch, options, total):
    shown = []
    monkeypatch.setattr(ChangingLine, "show", lambda _, text: shown.append(text))
    run(capsys, write(tmp_path), *options)
    assert [text.partition(":")[0] for text in shown] == [f"check {n} of {total}" for n in range(1, total + 1)]


def test_findings_come_by_severity_then_file_and_line():
    kinds = [
        ("info", "a", 1),
        ("error", "b", 2),
        ("warning", "b", 10),
        ("error", "a", 9),
        ("error", "", 0),
        ("error", "b", 1),
    ]
    found = [getattr(Finding, kind)(f"c{i}", "key", "what") for i, (kind, _, _) in enumerate(kinds)]
    places = {one: ConfigLocation(path, line) for one, (_, path, line) in zip(found, kinds, strict=True) if path}
    shown = [(one.severity, one.where) for one in _located(found, places).values()]
    errors = [("error", f"{place}key") for place in ("a:9: ", "b:1: ", "b:2: ", "")]
    assert shown == [*errors, ("warning", "b:10: key"), ("info", "a:1: key")]


SECRETS = """
export WANDB_API_KEY=hunter2
torchrun --nproc 8 train.py --hub_token hunter2 --lr 1e-4
  --password=hunter2 \\
  "hub_token": "hunter2",
password = \'\'\'
hunter2
\'\'\'
token: |
  hunter2
- token: hunter2
db: postgres://me:hunter2@host/db
passphrase: hunter2
credentials:
  - hunter2
  pw: hunter2
api_key:
  hunter2
secret: {a: hunter2}
url: https://x/?sig=hunter2
innocent: hf_%s
"""


def test_lines_of_a_config_are_shown_without_secrets(tmp_path):
    random = "QwErTyUiOpAsDfGhJkLzXcVbNmPlOkIjUh"
    (tmp_path / "c.yaml").write_text(
        SECRETS % random + "tokenizer: gpt2\nmax_tokens: 512\nuse_auth_token: true\n# why\n"
    )
    shown = [line for _, line in _lines(str(tmp_path / "c.yaml"), range(99))]
    assert not [line for line in shown if "hunter2" in line or random in line]
    assert shown[2] == "torchrun --nproc 8 train.py --hub_token …"
    assert "db: postgres://…@host/db" in shown
    assert shown[-4:] == ["tokenizer: gpt2", "max_tokens: 512", "use_auth_token: true", "# why"]


def test_page_pins_findings_on_the_lines_of_the_config_the_worst_first(tmp_path, capsys):
    path = write(
        tmp_path, {"fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}, fsdp_typo=1, hub_token="hunter2"
    )
    args = tmp_path / "args.yaml"
    args.write_text(
        "per_device_train_batch_size: 2\nrun_name: </script><b>x\nbf16: true\nfp16: true\noutput_dir: run\nb: 1\n"
    )
    page = tmp_path / "page.html"
    argv = ["preflight", str(path), str(args), "--only", "rules", "--html", str(page)]
    assert main(argv) == 3
    out, text = capsys.readouterr().out, page.read_text()
    ranks = [
        ("error", "warning", "info").index(word) for word in re.findall(r"^(error|warning|info): ", out, re.MULTILINE)
    ]
    assert ranks == sorted(ranks)
    assert len(set(ranks)) > 1
    shown = re.findall(r'<p class="line( alarm)?"><span class="dim">(\d+)</span><code>(.*)</code></p>', text)
    assert (" alarm", "4", "fp16: true") in shown
    assert ("", "2", "run_name: &lt;/script&gt;&lt;b&gt;x") in shown
    assert ("", "6", "b: 1") in shown or (" alarm", "6", "b: 1") in shown
    assert "hunter2" not in text
    pins = re.findall(r'class="pin" id="(place-\d+)" [^>]*href="#(finding-\d+)"', text)
    assert len(pins) == len(ranks)
    assert all(f'id="{finding}"' in text and f'href="#{place}"' in text for place, finding in pins)
    severities = re.findall(r'<summary><span class="tag (\w+)">', text)
    assert severities == sorted(severities, key=("error", "warning", "info").index)


def test_preflight_takes_the_number_of_ranks_that_it_is_told(tmp_path, capsys):
    document = RIGHT | {"num_processes": None}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in document.items() if value is not None}))
    _, document = run(capsys, path, "--no-smoke", "--world-size", "4")
    assert document["mesh"] == "dp_shard=4"
    _, without = run(capsys, path, "--no-smoke")
    assert without["mesh"] is None
    assert any("--world-size N" in text for text in without["not_checked"])
    assert "a smoke run: --no-smoke" in document["not_checked"]


def test_preflight_for_people_is_a_table_a_list_and_a_verdict(tmp_path, capsys):
    path = write(tmp_path, parallelism_config={"parallelism_config_dp_shard_size": 3})
    assert main(["preflight", str(path), "--no-smoke"]) == 3
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("error: CKPT001: ")  # before anything slow
    begin = next(i for i, line in enumerate(lines) if line.startswith(f"{path}: accelerate, fsdp2"))
    assert [line.split()[0] for line in lines[begin + 2 : begin + 7]] == [name for name in CHECKS if name != "host"]
    assert "FAILED" in lines[begin + 3]
    assert any(line.startswith("not checked: a smoke run") for line in lines)
    assert lines[-1].startswith("NOT ok: 1 error")
    assert main(["preflight", str(path), "--no-smoke", "--quiet"]) == 3
    quiet = capsys.readouterr().out.splitlines()
    assert quiet[0].startswith("error: CKPT001: ")
    assert len(quiet) == 3


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--model", "absent"], "no such model"),
        (["--checkpoint", "absent"], "no such checkpoint"),
        (["--framework", "keras"], "--framework must be one of"),
        (["--gpu-memory", "much"], "not a size"),
    ],
)
def test_preflight_of_what_is_not_there_is_a_usage_error(tmp_path, capsys, argv, word):
    assert main(["preflight", str(write(tmp_path)), *argv]) == 2
    assert word in capsys.readouterr().err


def test_preflight_of_a_model_directory_without_a_config_is_a_usage_error(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"no config\.json"):
        api.preflight(write(tmp_path), model=tmp_path / "empty", smoke=False)


def test_preflight_that_is_interrupted_ends_at_once_and_leaves_nothing(model, tmp_path):
    (tmp_path / "tmp").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "ckpt_tools", "preflight", str(write(tmp_path)), "--model", str(model)],
        stderr=subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(tmp_path / "tmp")},
        text=True,
    )
    deadline = time.monotonic() + 60
    while len(list((tmp_path / "tmp").glob("ckpt-*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    try:
        assert "interrupted" in process.communicate(timeout=60)[1]
    finally:
        process.kill()
    # Where the signal comes within exec() of text, as dataclasses are made by it, CPython ends itself by that signal
    # whoever has caught it, and nothing is tidied up; for a shell that is 130 as well.
    assert process.returncode in (130, -signal.SIGINT)
    assert process.returncode == -signal.SIGINT or list((tmp_path / "tmp").iterdir()) == []


FIXTURES = sorted(path for path in (Path(__file__).parent / "fixtures").glob("*/*") if path.name != "fsdp.json")


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_preflight_of_every_fixture_has_an_answer_and_says_what_it_lacks(path, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    status, document = run(capsys, path)
    assert status in (0, 3)
    assert document["framework"] == path.parent.name.replace("_", "-")
    assert document["ok"] is (status == 0)
    assert any(text.startswith("the model") for text in document["not_checked"])
    assert document["checks"][1]["ok"] is not None


def test_preflight_of_torchtitan_wants_the_optimizer_only_where_it_is_loaded(model, tmp_path, capsys):
    api.shard(model, tmp_path / "step-5", mesh="dp_shard=2")
    codes = {}
    for only_model in (True, False):
        document = {
            "parallelism": {"data_parallel_shard_degree": -1},
            "checkpoint": {
                "enable": True,
                "initial_load_path": str(tmp_path / "step-5"),
                "initial_load_model_only": only_model,
            },
        }
        (tmp_path / "job.json").write_text(json.dumps(document))
        argv = (tmp_path / "job.json", "--framework", "torchtitan", "--world-size", "2", "--no-smoke")
        codes[only_model] = {f["code"] for f in run(capsys, *argv)[1]["findings"]}
    assert "checkpoint-no-optimizer" not in codes[True]
    assert "checkpoint-no-optimizer" in codes[False]


def sources(tmp_path, model=None, checkpoint=None, **fields):
    spec = ParallelSpec(framework="axolotl", engine="fsdp2", mesh=parse_mesh("dp_shard=2"), **fields)
    return find_sources(spec, config_path=str(tmp_path / "config.yaml"), model=model, checkpoint=checkpoint)


def test_sources_take_the_model_that_the_config_names_from_beside_it(model, tmp_path):
    shutil.copytree(model, tmp_path / "base")
    found = sources(tmp_path, model=None, checkpoint=None)
    assert found.model is None
    spec = ParallelSpec(framework="axolotl", engine="fsdp2", model="base")
    named = find_sources(spec, config_path=str(tmp_path / "config.yaml"), model=None, checkpoint=None)
    assert named.model == named.checkpoint == str(tmp_path / "base")
    assert not named.resumes
    assert named.not_checked == ()


def test_sources_of_a_hub_id_that_is_not_here_say_so(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    spec = ParallelSpec(framework="axolotl", engine="fsdp2", model="nobody/never-was", keys={"model": "base_model"})
    found = find_sources(spec, config_path="config.yaml", model=None, checkpoint=None)
    assert found.model is None
    assert any("base_model names nobody/never-was, which is not on this machine" in text for text in found.not_checked)


def test_sources_of_a_resume_are_the_checkpoint_it_names(model, tmp_path):
    shutil.copytree(model, tmp_path / "run")
    found = sources(tmp_path, model=str(model), resume_from="run")
    assert found.checkpoint == str(tmp_path / "run")
    assert found.resumes
    absent = sources(tmp_path, model=str(model), resume_from="gone")
    assert absent.checkpoint == str(model)
    assert not absent.resumes
    assert any("resumes from (gone)" in text for text in absent.not_checked)


def test_sources_of_a_diffusers_pipeline_say_what_is_not_checked(tmp_path):
    (tmp_path / "flux").mkdir()
    (tmp_path / "flux" / "model_index.json").write_text("{}")
    found = sources(tmp_path, model=str(tmp_path / "flux"))
    assert found.model is None
    assert any("diffusers pipeline" in text for text in found.not_checked)
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "config.json").write_text('{"_class_name": "FluxTransformer2DModel"}')
    part = sources(tmp_path, model=str(tmp_path / "part"))
    assert part.model == str(tmp_path / "part")


def test_long_line_of_a_config_is_cut_and_costs_little(tmp_path: Path) -> None:
    """A config of one line, made so that a search for secrets would look everywhere from everywhere."""
    file = tmp_path / "a.yaml"
    file.write_text("x: 1\n" + "token" * 400_000 + "\ny: 2\n")
    lines = dict(_lines(str(file), {1, 2}))  # it took hours: pytest's timeout
    assert list(lines) == [1, 2]
    assert all(len(line) <= 400 for line in lines.values())
