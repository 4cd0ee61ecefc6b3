"""Every command through `main(argv)`: text, JSON documents, options, environment, exit codes."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable
from functools import partialmethod
from importlib import metadata
from pathlib import Path

import pytest
import torch
from corrupt import damage
from safetensors.torch import load_file, save_file
from samples import ASSETS, MODEL, files_of, safetensors_bytes, shard_model, staging_left, tensor, write_model
from tqdm import tqdm

from ckpt_tools import api
from ckpt_tools.cli import main
from ckpt_tools.cli.commands import COMMANDS
from ckpt_tools.cli.output import waiting
from ckpt_tools.options.output import OutputOptions

UP = "model.layers.0.up.weight"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return shard_model(tmp_path)


Ckpt = Callable[..., tuple[int, str, str]]


@pytest.fixture
def ckpt(capsys) -> Ckpt:
    """Run a command; returns (exit code, stdout, stderr)."""

    def call(*argv: object) -> tuple[int, str, str]:
        code = main([str(arg) for arg in argv])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return call


@pytest.fixture
def ckpt_json(ckpt: Ckpt):
    """Run a command with --json, assert its exit code, return its document."""

    def call(*argv: object, code: int = 0) -> dict:
        found, out, err = ckpt(*argv, "--json")
        assert found == code, err
        if code in (0, 3):
            assert len(out.splitlines()) == 1
            assert err == ""
            document = json.loads(out)
        else:
            assert out == ""
            assert len(err.splitlines()) == 1
            document = json.loads(err)
            assert document["exit_code"] == code
            assert set(document["error"]) == {"code", "what", "where", "hint"}
        assert document["schema_version"] == 1
        return document

    return call


# Documents


def test_shard_json_has_the_documented_fields(model: Path, tmp_path: Path, ckpt_json) -> None:
    document = ckpt_json("shard", model, tmp_path / "run", "--mesh", "dp_shard=2")
    assert document["source"] == str(model)
    assert document["destination"] == str(tmp_path / "run")
    assert document["num_tensors"] == len(MODEL)
    assert document["verified"] is True
    on_disk = {p.name: p.stat().st_size for p in (tmp_path / "run").iterdir()}
    assert set(document["files"]) == on_disk.keys()
    assert document["bytes_read"] == sum(len(raw) for _, _, raw in MODEL.values())
    assert 0 < document["bytes_written"] <= sum(on_disk.values())
    assert document["seconds"] >= 0
    assert document["throughput_bytes_per_s"] >= 0
    assert 10 << 20 < document["peak_rss_bytes"] < 64 << 30
    assert document["notes"] == []


def test_gather_and_reshard_json_have_the_documented_fields(run: Path, tmp_path: Path, ckpt_json) -> None:
    document = ckpt_json("gather", run, tmp_path / "out")
    assert document["num_tensors"] == len(MODEL)
    assert document["checked"] == {"digests": len(MODEL), "crcs": 9, "sizes": 2, "shapes": len(MODEL)}
    assert set(document["files"]) == {"model.safetensors", "ckpt_manifest.json", *ASSETS}
    document = ckpt_json("reshard", run, tmp_path / "resharded", "--mesh", "dp_shard=3")
    assert {"__0_0.distcp", "__1_0.distcp", "__2_0.distcp", ".metadata"} < set(document["files"])


@pytest.mark.parametrize("verb", ["shard", "gather", "reshard"])
@pytest.mark.parametrize("flag", ["-n", "--dry-run"])
def test_dry_run_json_is_a_plan_and_writes_nothing(verb: str, flag: str, run: Path, tmp_path: Path, ckpt_json) -> None:
    source = tmp_path / "model" if verb == "shard" else run
    options = () if verb == "gather" else ("--mesh", "dp_shard=2")
    before = sorted(tmp_path.iterdir())
    document = ckpt_json(verb, source, tmp_path / "out", flag, *options)
    assert sorted(tmp_path.iterdir()) == before
    plan = document["plan"]
    assert plan["bytes"] > sum(len(raw) for _, _, raw in MODEL.values())
    assert plan["peak_bytes"] > 0
    assert all(set(row) == {"file", "nbytes"} for row in plan["files"])
    assert "bytes_written" not in document
    done = ckpt_json(verb, source, tmp_path / "out", *options)
    assert [row["file"] for row in plan["files"]] == done["files"]
    for row in plan["files"]:
        if verb == "gather" or row["file"].endswith(".distcp"):  # tests/cli/test_plan.py has the others
            assert row["nbytes"] == (tmp_path / "out" / row["file"]).stat().st_size


def test_inspect_json_tensor_lists_its_chunks(run: Path, ckpt_json) -> None:
    (entry,) = ckpt_json("inspect", run, "--tensor", UP)["tensors"]
    assert (entry["fqn"], entry["dtype"], entry["shape"]) == (UP, "BF16", [16, 8])
    assert entry["placements"] == {"dp_shard": "S(0)"}
    assert [(c["rank"], c["offsets"], c["sizes"]) for c in entry["chunks"]] == [
        (0, [0, 0], [8, 8]),
        (1, [8, 0], [8, 8]),
    ]
    assert all(set(chunk) >= {"file", "offset", "nbytes"} for chunk in entry["chunks"])
    assert len(ckpt_json("inspect", run, "--tensors")["tensors"]) == len(MODEL)


def test_verify_json_has_the_documented_fields(run: Path, ckpt_json) -> None:
    document = ckpt_json("verify", run)
    assert document["ok"] is True
    assert document["level"] == "data"
    assert document["checked"] == {"tensors": 6, "chunks": 10, "bytes": 924, "values": None}
    assert document["findings"] == []
    assert document["not_checked"] == ["whether the values are finite (use --level values)"]
    document = ckpt_json("verify", run, "--level", "values")
    assert document["checked"]["values"] == {"tensors": 5, "elements": 358, "nan": 0, "inf": 0, "zero": 0}
    assert document["not_checked"] == []
    document = ckpt_json("verify", run, "--level", "structure")
    assert document["checked"]["bytes"] == 0
    assert document["not_checked"]


def test_verify_findings_are_exit_3(run: Path, ckpt: Ckpt, ckpt_json) -> None:
    (run / "__1_0.distcp").unlink()
    document = ckpt_json("verify", run, code=3)
    assert document["ok"] is False
    assert set(document["findings"][0]) == {"code", "severity", "where", "what", "hint", "tensor", "file"}
    code, out, _ = ckpt("verify", run)
    assert code == 3
    assert "error: missing-file" in out
    assert "NOT ok" in out
    code, out, _ = ckpt("verify", run, "-q")
    assert code == 3
    assert "NOT ok" not in out
    assert "error: missing-file" in out


def test_verify_against_another_format_compares_bits(run: Path, tmp_path: Path, ckpt_json) -> None:
    assert ckpt_json("verify", run, "--against", tmp_path / "model")["ok"]
    other = dict(MODEL) | {UP: tensor("BF16", 16, 8, seed=99)}
    del other["model.step"]
    other["model.more"] = tensor("U8", 3)
    write_model(tmp_path / "other", other)
    document = ckpt_json("verify", run, "--against", tmp_path / "other", code=3)
    assert {f["code"] for f in document["findings"]} == {"different-tensor", "missing-tensor", "extra-tensor"}


def test_diff_json_has_the_documented_fields(run: Path, tmp_path: Path, ckpt: Ckpt, ckpt_json) -> None:
    document = ckpt_json("diff", tmp_path / "model", run)
    assert [identity["format"] for identity in document.pop("identities")] == ["hf", "dcp"]
    assert document == {
        "schema_version": 1, "equal": True, "only_in_a": [], "only_in_b": [], "changed": [],
        "num_equal": len(MODEL), "notes": [], "keys_only": False, "terms": [],
    }  # fmt: skip
    other = {k: v for k, v in MODEL.items() if k != "model.step"} | {UP: tensor("BF16", 16, 8, seed=99)}
    write_model(tmp_path / "other", other | {"x": tensor("U8", 1), "model.empty": tensor("F32", 0, 4)})
    document = ckpt_json("diff", tmp_path / "model", tmp_path / "other", code=3)
    assert document["only_in_a"] == ["model.step"]
    assert document["only_in_b"] == ["x"]
    assert {change["fqn"] for change in document["changed"]} == {UP, "model.empty"}
    limited = ckpt_json("diff", tmp_path / "model", tmp_path / "other", "--include", "**embed**")
    assert (limited["equal"], limited["terms"]) == (True, ["--include **embed**"])
    assert ckpt_json("diff", tmp_path / "model", tmp_path / "other", "--exclude", "{x,**}", code=2)
    code, out, _ = ckpt("diff", tmp_path / "model", tmp_path / "other")
    assert code == 3
    assert "- model.step" in out
    assert "+ x" in out
    assert f"~ {UP}: values differ in" in out
    assert out.splitlines()[-1] == f"2 differ, {len(MODEL) - 3} equal, 1 only in A, 1 only in B"
    assert document["num_equal"] == len(MODEL) - 3


def test_diff_keys_only_reads_no_values(run: Path, tmp_path: Path, ckpt_json) -> None:
    write_model(tmp_path / "other", dict(MODEL) | {UP: tensor("BF16", 16, 8, seed=99)})
    assert ckpt_json("diff", run, tmp_path / "other", "--keys-only")["equal"]


def test_diff_within_a_tolerance_is_equal(tmp_path: Path, ckpt_json) -> None:
    for name, value in (("a", 1.0), ("b", 1.001)):
        raw = torch.full((8,), value).numpy().tobytes()
        write_model(tmp_path / name, {"w": ("F32", (8,), raw), "n": tensor("I64", 2)})
    a, b = tmp_path / "a", tmp_path / "b"
    assert ckpt_json("diff", a, b, code=3)["changed"][0]["fqn"] == "w"
    assert ckpt_json("diff", a, b, "--atol", "0.01")["equal"]
    assert ckpt_json("diff", a, b, "--rtol", "0.01")["equal"]
    assert "0.001" in ckpt_json("diff", a, b, "--atol", "1e-6", code=3)["changed"][0]["what"]


def test_env_lists_versions(ckpt: Ckpt, ckpt_json) -> None:
    assert ckpt_json("env")["env"]["torch"] == metadata.version("torch")
    code, out, _ = ckpt("env")
    assert code == 0
    assert {line.split()[0] for line in out.splitlines()} >= {"ckpt", "python", "torch", "safetensors"}


# Exit codes and errors


def test_help_of_every_command_names_the_exit_codes(ckpt: Ckpt) -> None:
    words = ("0 done", "1 failed", "2 usage", "3 ", "4 not a complete", "5 destination", "130 interr")
    code, out, _ = ckpt("--help")
    shown = " ".join(out.split())
    assert (code, [word for word in words if word not in shown]) == (0, [])
    for verb in COMMANDS:  # which of the others a command has: tests/cli/test_front_door.py
        code, out, _ = ckpt(verb, "--help")
        assert (code, [word for word in words[:3] if word not in " ".join(out.split())]) == (0, []), verb


@pytest.mark.parametrize(
    "argv",
    [
        ("nonsense",),
        ("shard",),
        ("shard", "{model}", "{out}"),
        ("shard", "{model}", "{out}", "--mesh", "dp_shard"),
        ("shard", "{model}", "{out}", "--mesh", "warp=2"),
        ("shard", "{model}", "{out}", "--mesh", "dp_shard=0"),
        ("shard", "{model}", "{out}", "--mesh", "dp_shard=-1"),
        ("shard", "{model}", "{out}", "--mesh", "dp_shard=2,dp_shard=2"),
        ("shard", "{model}", "{out}", "--mesh", "dp_shard=2", "--world-size", "3"),
        ("shard", "{model}", "{out}", "--mesh", "dp_shard=2", "--world-size", "0"),
        ("shard", "{model}", "{out}", "--mesh", "dp_shard=2", "--set", "nothing=tp:S(0)"),
        ("shard", "{model}", "{out}", "--mesh", "dp_shard=2,tp=2", "--set", "nothing=tp:S(0)"),
        ("shard", "{model}", "{out}", "--mesh", "dp_shard=2,tp=2", "--set", "**up**=tp:S(7)"),
        ("shard", "{model}", "{out}", "--mesh", "dp_shard=2", "--set", "**up**"),
        ("shard", "{model}", "{out}", "--mesh", "dp_shard=2", "--rules", "{model}/missing.yaml"),
        ("shard", "{model}", "{out}", "--mesh", "dp_shard=2", "--rules", "{model}/config.json"),
        ("shard", "{model}", "{out}", "--mesh", "dp_shard=2", "--tp-plan", "magic"),
        ("shard", "{model}", "{out}", "--mesh", "dp_shard=2", "--dtype", "int3"),
        ("shard", "{model}", "{out}", "--mesh", "dp_shard=2", "--engine", "steam"),
        ("shard", "{model}", "{out}", "--mesh", "dp_shard=2", "--include", "ghost"),
        ("shard", "{model}", "{out}", "--mesh", "dp_shard=2", "--include", "{{"),
        ("shard", "{model}", "{out}", "--mesh", "dp_shard=2", "--exclude", "**"),
        ("shard", "{model}", "{out}", "--mesh", "dp_shard=2", "--from", "zip"),
        ("shard", "{model}", "{out}", "--mesh", "dp_shard=2", "--progress", "fast"),
        ("shard", "{model}", "{out}", "--mesh", "dp_shard=2", "-j", "0"),
        ("shard", "{model}", "{out}", "--mesh", "dp_shard=2", "-j", "many"),
        ("shard", "{model}", "{model}", "--mesh", "dp_shard=2", "--overwrite"),
        ("shard", "{model}", "{model}/inside", "--mesh", "dp_shard=2"),
        ("shard", "{model}", "{model}/..", "--mesh", "dp_shard=2", "--overwrite"),
        ("shard", "{run}", "{out}", "--mesh", "dp_shard=2"),
        ("reshard", "{model}", "{out}", "--mesh", "dp_shard=2"),
        ("gather", "{run}", "{out}", "--max-shard-size", "big"),
        ("gather", "{run}", "{out}", "--max-shard-size", "0"),
        ("gather", "{run}", "{out}", "--strip-prefix", "zebra"),
        ("gather", "{run}", "{out}", "--assets", "{model}/config.json"),
        ("gather", "{run}", "{out}", "--like", "{model}", "--dtype", "bf16"),
        ("gather", "{run}", "{out}.safetensors"),
        ("verify", "{run}", "--level", "deep"),
        ("inspect", "{run}", "--tensor", "ghost"),
        ("inspect", "{run}", "--by", "colour"),
        ("inspect", "{run}", "--set", "**=tp:S(0)"),
        ("diff", "{run}"),
        ("diff", "{run}", "{model}", "--atol", "-1"),
    ],
    ids=lambda argv: " ".join(argv).replace("{", "").replace("}", ""),
)
def test_usage_errors_are_exit_2_and_write_nothing(argv, run: Path, tmp_path: Path, ckpt: Ckpt, ckpt_json) -> None:
    places = {"model": tmp_path / "model", "run": run, "out": tmp_path / "out"}
    argv = tuple(arg.format(**places) for arg in argv)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    document = ckpt_json(*argv, code=2)
    assert document["error"]["code"] == "usage"
    assert document["error"]["what"]
    code, out, err = ckpt(*argv)
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_no_command_shows_help(ckpt: Ckpt) -> None:
    code, out, err = ckpt()
    assert code in (0, 2)
    assert "shard" in out + err


@pytest.mark.parametrize(("verb", "options"), [("shard", ("--mesh", "dp_shard=2")), ("gather", ()), ("inspect", ())])
def test_no_such_source_is_exit_4(tmp_path: Path, ckpt: Ckpt, ckpt_json, verb: str, options) -> None:
    argv = (verb, tmp_path / "gone", *(() if verb == "inspect" else (tmp_path / "out",)), *options)
    document = ckpt_json(*argv, code=4)
    assert document["error"]["code"] == "unreadable"
    assert document["error"]["where"] == str(tmp_path / "gone")
    code, _, err = ckpt(*argv)
    assert code == 4
    assert err.splitlines() == ["error: no such file or directory", f"   at: {tmp_path / 'gone'}"]


@pytest.mark.parametrize("kind", ["directory", "empty", "file", "link", "dangling"])
def test_destination_that_exists_is_exit_5_and_replaced_only_if_a_checkpoint(
    run: Path, tmp_path: Path, ckpt_json, kind: str
) -> None:
    out = tmp_path / "out"
    if kind in ("directory", "empty"):
        out.mkdir()
    if kind == "directory":
        (out / "thesis.tex").write_text("mine")
    elif kind == "file":
        out.write_text("mine")
    elif kind == "link":
        (tmp_path / "real").mkdir()
        out.symlink_to("real")
    elif kind == "dangling":
        out.symlink_to(tmp_path / "nowhere")
    before = sorted(tmp_path.rglob("*"))
    document = ckpt_json("gather", run, out, code=5)
    assert document["error"]["code"] == "destination-exists"
    assert "--overwrite" in document["error"]["hint"]
    assert ckpt_json("gather", run, out, "-n", code=5)
    if kind in ("directory", "file", "link"):
        ckpt_json("gather", run, out, "--overwrite", code=2)
    assert sorted(tmp_path.rglob("*")) == before
    if kind == "empty":
        ckpt_json("gather", run, out, "--overwrite")
        assert files_of(out) == files_of(tmp_path / "model")


def test_overwrite_replaces_a_checkpoint(model: Path, tmp_path: Path, ckpt_json) -> None:
    ckpt_json("shard", model, tmp_path / "run", "--mesh", "dp_shard=4")
    ckpt_json("shard", model, tmp_path / "run", "--mesh", "dp_shard=2", "--overwrite")
    assert sorted(p.name for p in (tmp_path / "run").glob("*.distcp")) == ["__0_0.distcp", "__1_0.distcp"]
    assert staging_left(tmp_path) == []


def test_overwrite_that_fails_leaves_the_old_checkpoint(run: Path, tmp_path: Path, ckpt_json) -> None:
    ckpt_json("gather", run, tmp_path / "out")
    before = files_of(tmp_path / "out", manifest=True)
    (run / "__1_0.distcp").unlink()
    ckpt_json("gather", run, tmp_path / "out", "--overwrite", code=4)
    assert files_of(tmp_path / "out", manifest=True) == before
    assert staging_left(tmp_path) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_destination_without_permission_is_exit_1(run: Path, tmp_path: Path, ckpt_json) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    ckpt_json("gather", run, tmp_path / "locked" / "out", code=1)


# Output


def test_quiet_prints_nothing(model: Path, tmp_path: Path, ckpt: Ckpt) -> None:
    assert ckpt("shard", model, tmp_path / "run", "--mesh", "dp_shard=2", "-q") == (0, "", "")
    assert ckpt("verify", tmp_path / "run", "-q") == (0, "", "")
    assert ckpt("gather", tmp_path / "run", tmp_path / "out", "--quiet") == (0, "", "")
    assert ckpt("diff", model, tmp_path / "out", "-q") == (0, "", "")


def test_text_says_what_was_written_and_checked(model: Path, tmp_path: Path, ckpt: Ckpt) -> None:
    code, out, err = ckpt("shard", model, tmp_path / "run", "--mesh", "dp_shard=2")
    assert (code, err.count("\n")) == (0, 1)
    assert "1 layer " in err
    assert "whole or not: not known" in err
    assert f"wrote 6 tensors, 6 files" in out  # noqa: F541
    code, out, err = ckpt("gather", tmp_path / "run", tmp_path / "out", "-v")
    assert "checked: structure of the result, 6 tensors against the source's digests, 9 chunks" in out
    assert "model.safetensors" in out
    code, out, _ = ckpt("reshard", tmp_path / "run", tmp_path / "again", "--mesh", "dp_shard=4", "-n")
    assert "would write" in out
    assert "__3_0.distcp" in out
    assert not (tmp_path / "again").exists()


def test_uneven_cut_is_refused_or_left_out_with_a_note(model: Path, tmp_path: Path, ckpt_json) -> None:
    rule = "model.layers.*.{up,norm}.*=tp:S(0)"
    argv = ["shard", model, tmp_path / "run", "--mesh", "dp_shard=2,tp=2", "--set", rule]
    error = ckpt_json(*argv, code=2)["error"]
    assert "norm.weight" in error["what"]
    assert "--tp-uneven replicate" in error["hint"]
    (note,) = ckpt_json(*argv, "--tp-uneven", "replicate")["notes"]
    assert note == "replicated on tp, which does not divide them (--tp-uneven replicate): model.layers.0.norm.weight"
    tensors = {one["fqn"]: one for one in ckpt_json("inspect", tmp_path / "run", "--tensors")["tensors"]}
    assert len(tensors[UP]["chunks"]) == 4
    assert len(tensors["model.layers.0.norm.weight"]["chunks"]) == 2


@pytest.mark.parametrize("mode", ["auto", "bar", "plain", "none"])
def test_progress_goes_to_stderr_alone(model: Path, tmp_path: Path, capfd, mode: str) -> None:
    assert main(["shard", str(model), str(tmp_path / "run"), "--mesh", "dp_shard=2", "--progress", mode]) == 0
    out, err = capfd.readouterr()
    assert out.startswith("wrote")
    assert ("B/s" in err or "%" in err) == (mode == "bar")


def test_a_tensor_of_several_blocks_counts_once(tmp_path: Path) -> None:
    save_file({"large": torch.zeros(5 << 20), "small": torch.zeros(2)}, tmp_path / "m.safetensors")
    counted = []

    class Receiver:
        def __call__(self, nbytes: int) -> None: ...

        def count(self, *told: object) -> None:
            counted.append(told)

    api.verify(tmp_path / "m.safetensors", level="values", progress=lambda _: Receiver())
    assert counted == [("tensor", 1, 2), ("tensor", 2, 2)]


def test_command_without_a_total_says_that_it_goes_on(capsys, monkeypatch):
    monkeypatch.setattr("ckpt_tools.cli.output.PLAIN_INTERVAL_S", 0.01)
    told = threading.Event()
    monkeypatch.setattr("ckpt_tools.cli.output.note", lambda text: (print(text), told.set()))
    with waiting(OutputOptions(), "estimating") as say_instead:
        assert told.wait(10)
        assert capsys.readouterr().out.startswith("estimating: 0:00:00\n")
        say_instead("tracing 3 of 12 ways")
        told.clear()
        assert told.wait(10)
    assert "tracing 3 of 12 ways: 0:00:00\n" in capsys.readouterr().out
    told.clear()
    with waiting(OutputOptions(json=True), "estimating"), waiting(OutputOptions(quiet=True), "estimating"):
        assert not told.wait(0.1)
    assert not [thread for thread in threading.enumerate() if thread.name == "ckpt-waiting"]


def test_progress_counts_tensors_on_a_line_that_changes(model: Path, ckpt: Ckpt, monkeypatch) -> None:
    """A bar of tqdm's, drawn at every step."""
    monkeypatch.setattr("tqdm.tqdm.__init__", partialmethod(tqdm.__init__, mininterval=0, miniters=1))
    for command in ("stats", "verify"):
        code, _, err = ckpt(command, model, "--progress", "bar")
        assert code == 0
        shown = [line for line in err.split("\r") if "B/s" in line]
        counted = [int(found[1]) for line in shown if (found := re.search(r", tensor (\d) of 6\]", line))]
        assert counted == sorted(counted)
        assert counted[-1] >= 5  # one has no bytes
        assert any("100%" in line and "924/924" in line for line in shown)
    for quiet in ("-q", "--json"):
        assert "tensor" not in ckpt("stats", model, "--progress", "bar", quiet)[2]


def test_progress_plain_prints_a_line_per_interval(model: Path, tmp_path: Path, ckpt: Ckpt, monkeypatch) -> None:
    monkeypatch.setattr("ckpt_tools.cli.output.PLAIN_INTERVAL_S", 0.0)
    code, _, err = ckpt("shard", model, tmp_path / "run", "--mesh", "dp_shard=2", "--progress", "plain")
    assert code == 0
    last = err.splitlines()[-2]  # what was opened comes last
    assert "100%" in last
    assert "/s ETA 0:00:00" in last


@pytest.mark.parametrize("name", ["CKPT_JSON", "CKPT_QUIET"])
def test_output_is_steered_by_the_environment(model: Path, tmp_path: Path, ckpt: Ckpt, monkeypatch, name) -> None:
    monkeypatch.setenv(name, "1")
    code, out, _ = ckpt("shard", model, tmp_path / "run", "--mesh", "dp_shard=2")
    assert code == 0
    assert (tmp_path / "run" / "__1_0.distcp").exists()
    if name == "CKPT_QUIET":
        assert out == ""
        return
    assert json.loads(out)["num_tensors"] == 6
    code, out, err = ckpt("inspect", tmp_path / "gone")
    assert (code, out, json.loads(err)["exit_code"]) == (4, "", 4)


@pytest.mark.parametrize(("value", "code"), [("2", 0), ("0", 2), ("many", 2)])
def test_num_workers_come_from_the_environment(model: Path, ckpt: Ckpt, monkeypatch, value, code) -> None:
    monkeypatch.setenv("CKPT_NUM_WORKERS", value)
    assert ckpt("verify", model)[0] == code


def test_environment_says_nothing_of_what_is_done(model: Path, tmp_path: Path, ckpt_json, monkeypatch) -> None:
    for name, value in (("MESH", "dp_shard=2"), ("INCLUDE", "**up**"), ("DRY_RUN", "true"), ("BASE", "gone")):
        monkeypatch.setenv(f"CKPT_{name}", value)
    assert ckpt_json("shard", model, tmp_path / "run", code=2)["error"]["what"] == "no mesh is given"
    document = ckpt_json("shard", model, tmp_path / "run", "--mesh", "dp_shard=3")
    assert document["num_tensors"] == 6
    assert (tmp_path / "run" / "__2_0.distcp").exists()


def test_help_names_the_variables_that_count(ckpt: Ckpt) -> None:
    found = {name for verb in COMMANDS for name in re.findall(r"CKPT_[A-Z_]+", ckpt(verb, "--help")[1])}
    assert found == {"CKPT_JSON", "CKPT_NUM_WORKERS", "CKPT_PATIENCE", "CKPT_PROGRESS", "CKPT_QUIET", "CKPT_VERBOSE"}


# Options of the conversions


@pytest.mark.parametrize(
    ("options", "mesh"),
    [
        (("dp_shard=-1,tp=2", "--world-size", "8"), {"dp_shard": 4, "tp": 2}),
        (("ddp=2,fsdp=2",), {"dp_replicate": 2, "dp_shard": 2}),
    ],
)
def test_axis_is_inferred_and_known_by_its_aliases(model: Path, tmp_path: Path, ckpt_json, options, mesh) -> None:
    ckpt_json("shard", model, tmp_path / "run", "--mesh", *options)
    assert ckpt_json("inspect", tmp_path / "run")["mesh"] == mesh


def test_tp_without_rules_is_warned_of(model: Path, tmp_path: Path, ckpt_json) -> None:
    (warning,) = ckpt_json("shard", model, tmp_path / "run", "--mesh", "dp_shard=2,tp=2")["warnings"]
    assert "nothing is cut along tp" in warning
    assert "--tp-plan auto" in warning
    cut = ckpt_json("shard", model, tmp_path / "cut", "--mesh", "tp=2", "--set", f"{UP}=tp:S(0)")
    assert cut["warnings"] == []


def test_plan_of_a_step_takes_the_config_of_its_model(tmp_path: Path, ckpt_json) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": 8}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1, **sizes}
    cut = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    matrices = [f"model.layers.0.{name}.weight" for name in cut] + ["model.embed_tokens.weight", "lm_head.weight"]
    norms = [
        f"model.{name}.weight" for name in ("norm", "layers.0.input_layernorm", "layers.0.post_attention_layernorm")
    ]
    tensors = {name: tensor("F32", 8, 8) for name in matrices} | {name: tensor("F32", 8) for name in norms}
    base = write_model(tmp_path / "base", tensors, assets={"config.json": json.dumps(config).encode()})
    ckpt_json("shard", base, tmp_path / "run", "--mesh", "dp_shard=2")
    for name in ("config.json", "ckpt_manifest.json"):  # as a trainer leaves it
        (tmp_path / "run" / name).unlink()
    plan = ("--mesh", "tp=2", "--tp-plan", "auto")
    assert "--assets" in ckpt_json("reshard", tmp_path / "run", tmp_path / "cut", *plan, code=2)["error"]["hint"]
    ckpt_json("reshard", tmp_path / "run", tmp_path / "cut", *plan, "--assets", base)
    placed = {t["fqn"]: t["placements"]["tp"] for t in ckpt_json("inspect", tmp_path / "cut", "--tensors")["tensors"]}
    assert (placed[matrices[0]], placed[matrices[3]], placed[norms[0]]) == ("S(0)", "S(1)", "R")
    assert ckpt_json("reshard", tmp_path / "run", tmp_path / "x", "--mesh", "tp=2", "--assets", base, code=2)


def test_rules_file_and_set_place_tensors(model: Path, tmp_path: Path, ckpt_json) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        "version: 1\nmesh: {dp_shard: 2, tp: 2}\nrules:\n"
        '  - match: "model.layers.*.{up,down}.weight"\n    place: {tp: S(0)}\n'
        '  - match: "**norm**"\n    place: {}\n'
    )
    ckpt_json("shard", model, tmp_path / "run", "--rules", rules, "--set", "**down**=tp:S(1),dp_shard:R")
    tensors = {t["fqn"]: t for t in ckpt_json("inspect", tmp_path / "run", "--tensors")["tensors"]}
    assert tensors[UP]["placements"] == {"dp_shard": "S(0)", "tp": "S(0)"}
    assert tensors["model.layers.0.down.weight"]["placements"] == {"dp_shard": "R", "tp": "S(1)"}
    assert tensors["model.layers.0.norm.weight"]["placements"] == {"dp_shard": "S(0)", "tp": "R"}
    # TP cuts first and FSDP inside: rank 1 (dp 0, tp 1) begins at row 8, rank 2 (dp 1, tp 0) at row 4.
    assert {c["rank"]: c["offsets"][0] for c in tensors[UP]["chunks"]} == {0: 0, 1: 8, 2: 4, 3: 12}


def test_set_repeats_and_the_first_match_wins(model: Path, tmp_path: Path, ckpt_json) -> None:
    sets = ("--set", f"{UP}=", "--set", "model.layers.**.weight=tp:S(0)")
    ckpt_json("shard", model, tmp_path / "run", "--mesh", "dp_shard=2,tp=1", *sets)
    tensors = {t["fqn"]: t for t in ckpt_json("inspect", tmp_path / "run", "--tensors")["tensors"]}
    assert tensors[UP]["placements"]["tp"] == "R"
    assert tensors["model.layers.0.down.weight"]["placements"]["tp"] == "S(0)"


def test_include_and_exclude_choose_tensors(model: Path, tmp_path: Path, ckpt_json) -> None:
    options = ("--mesh", "dp_shard=2", "--include", "model.layers.*.{up,down}.weight", "--include", "model.step")
    ckpt_json("shard", model, tmp_path / "run", *options, "--exclude", "*.layers.*.down.*")
    tensors = ckpt_json("inspect", tmp_path / "run", "--tensors")["tensors"]
    assert {t["fqn"] for t in tensors} == {UP, "model.step"}
    assert ckpt_json("inspect", model, "--include", "model.*")["num_tensors"] == 2  # * stays in one component


@pytest.mark.parametrize("name", [UP, "model." + UP])
def test_globs_match_the_names_of_either_side(name: str, model: Path, tmp_path: Path, ckpt_json) -> None:
    ckpt_json("shard", model, tmp_path / "run", "--mesh", "dp_shard=2", "--prefix", "model.")
    for sides in ((model, tmp_path / "run"), (tmp_path / "run", model)):
        assert ckpt_json("diff", *sides, "--exclude", name)["num_equal"] == len(MODEL) - 1
    rows = ckpt_json("stats", tmp_path / "run", "--against", model, "--exclude", name)["tensors"]
    assert UP not in {row["fqn"].removeprefix("model.") for row in rows}
    ckpt_json("gather", tmp_path / "run", tmp_path / "back", "--include", name)
    assert ckpt_json("inspect", tmp_path / "back")["num_tensors"] == 1
    ckpt_json("shard", model, tmp_path / "part", "--mesh", "dp_shard=2", "--prefix", "model.", "--include", name)
    assert ckpt_json("inspect", tmp_path / "part")["num_tensors"] == 1
    cut = ("--mesh", "dp_shard=2,tp=2", "--set", f"{name}=tp:S(1)", "--dtype-for", f"{name}=f32")
    ckpt_json("shard", model, tmp_path / "cut", *cut, "--prefix", "model.")
    ckpt_json("gather", tmp_path / "run", tmp_path / "wide", *cut[4:])
    for made, own, placed in (("cut", "model." + UP, "S(1)"), ("wide", UP, None)):
        found = {t["fqn"]: t for t in ckpt_json("inspect", tmp_path / made, "--tensors")["tensors"]}
        assert (found[own]["dtype"], (found[own].get("placements") or {}).get("tp")) == ("F32", placed)
    against = ("stats", tmp_path / "run", "--against", model, "--frozen")
    assert ckpt_json(*against, name, code=3)["findings"]  # NaN in random bytes, and nothing of what is frozen
    for ghost in (("--dtype-for", "ghost=f32"), ("--set", "ghost="), ("--include", "ghost"), ("--exclude", "ghost")):
        refused = ckpt_json("shard", model, tmp_path / "x", "--mesh", "dp_shard=2", *ghost, code=2)["error"]
        assert ("matches no tensor" in refused["what"], "nearest" in refused["hint"]) == (True, True)
    assert "nearest" in ckpt_json(*against, "ghost", code=2)["error"]["hint"]
    assert "nearest" in ckpt_json("diff", model, tmp_path / "run", "--exclude", "ghost.**", code=2)["error"]["hint"]


def test_a_glob_that_names_one_tensor_in_the_source_and_another_as_written_takes_both(
    tmp_path: Path, ckpt_json
) -> None:
    source = write_model(tmp_path / "model", {name: tensor("F32", 4, 4, seed=ord(name)) for name in "xyz"}, assets={})
    (tmp_path / "map").write_text("[*]\nx = y\ny = x\nz = z\n")
    ckpt_json("rename", source, tmp_path / "out", "--map", tmp_path / "map", "--dtype-for", "x=bf16")
    found = {t["fqn"]: t["dtype"] for t in ckpt_json("inspect", tmp_path / "out", "--tensors")["tensors"]}
    assert found == {"x": "BF16", "y": "BF16", "z": "F32"}


@pytest.mark.parametrize("text", ["", "# nothing\n\n", "[*]\n", "[*]\nfoo = model.step\n"])
def test_a_map_that_does_not_name_every_tensor_is_refused(text: str, model: Path, tmp_path: Path, ckpt_json) -> None:
    (tmp_path / "map").write_text(text)
    ckpt_json("shard", model, tmp_path / "run", "--mesh", "dp_shard=2")
    sharded = ("shard", model, tmp_path / "x", "--mesh", "dp_shard=2")
    for command in (("rename", model, tmp_path / "x"), sharded, ("gather", tmp_path / "run", tmp_path / "x")):
        error = ckpt_json(*command, "--map", tmp_path / "map", code=2)["error"]
        assert ("is empty" in error["what"]) == ("[*]" not in text)
        assert "--names" not in error["hint"]


def test_prefix_is_put_there_and_taken_away(model: Path, tmp_path: Path, ckpt_json) -> None:
    ckpt_json("shard", model, tmp_path / "run", "--mesh", "dp_shard=2", "--prefix", "app.")
    names = {t["fqn"] for t in ckpt_json("inspect", tmp_path / "run", "--tensors")["tensors"]}
    assert names == {"app." + fqn for fqn in MODEL}
    ckpt_json("gather", tmp_path / "run", tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(model)
    ckpt_json("reshard", tmp_path / "run", tmp_path / "again", "--mesh", "dp_shard=3", "--prefix", "x.")
    ckpt_json("gather", tmp_path / "again", tmp_path / "back2")
    assert files_of(tmp_path / "back2") == files_of(model)
    ckpt_json("gather", tmp_path / "run", tmp_path / "split", "--max-shard-size", "300")
    assert ckpt_json("diff", tmp_path / "split", model)["equal"]


@pytest.mark.parametrize(
    ("option", "names"),
    [
        (("--strip-prefix", "none"), {"app.model.w", "app.model._orig_mod.v"}),
        (("--strip-prefix", "app"), {"model.w", "model._orig_mod.v"}),
        (("--strip-prefix", "app.model."), {"w", "_orig_mod.v"}),
        ((), {"w", "v"}),
    ],
)
def test_strip_prefix_chooses_the_names(tmp_path: Path, ckpt_json, option, names) -> None:
    source = write_model(
        tmp_path / "model", {"app.model.w": tensor("F32", 4), "app.model._orig_mod.v": tensor("U8", 3)}
    )
    ckpt_json("shard", source, tmp_path / "run", "--mesh", "dp_shard=2")
    (tmp_path / "run" / "ckpt_manifest.json").unlink()
    ckpt_json("gather", tmp_path / "run", tmp_path / "out", *option)
    assert {t["fqn"] for t in ckpt_json("inspect", tmp_path / "out", "--tensors")["tensors"]} == names


def test_max_shard_size_splits_with_an_index(run: Path, tmp_path: Path, ckpt_json) -> None:
    document = ckpt_json("gather", run, tmp_path / "out", "--max-shard-size", "400B")
    files = sorted(name for name in document["files"] if name.endswith(".safetensors"))
    assert len(files) == 3
    assert files[0] == "model-00001-of-00003.safetensors"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == MODEL.keys()
    assert index["metadata"]["total_size"] == sum(len(raw) for _, _, raw in MODEL.values())
    for name in files:
        loaded = load_file(tmp_path / "out" / name)
        assert loaded.keys() == {fqn for fqn, file in index["weight_map"].items() if file == name}
    assert ckpt_json("diff", tmp_path / "model", tmp_path / "out")["equal"]


def test_like_restores_names_files_and_dtypes(run: Path, tmp_path: Path, ckpt_json) -> None:
    tensors = {
        fqn: ("F32", s, bytes(4 * len(r) // 2)) if d == "BF16" else (d, s, r) for fqn, (d, s, r) in MODEL.items()
    }
    reference = write_model(tmp_path / "ref", tensors, num_files=2, assets={"config.json": b"{}"}, metadata={"a": "b"})
    ckpt_json("gather", run, tmp_path / "out", "--like", reference)
    assert sorted(p.name for p in (tmp_path / "out").iterdir() if p.name != "ckpt_manifest.json") == sorted(
        {*(p.name for p in reference.iterdir()), "tokenizer.json"}
    )
    for path in reference.glob("*.safetensors"):
        theirs, ours = path.read_bytes(), (tmp_path / "out" / path.name).read_bytes()
        length = int.from_bytes(theirs[:8], "little")
        assert ours[: 8 + length] == theirs[: 8 + length]
        original = load_file(tmp_path / "model" / "model.safetensors")
        for fqn, value in load_file(tmp_path / "out" / path.name).items():
            assert value.dtype == (torch.float32 if original[fqn].dtype == torch.bfloat16 else original[fqn].dtype)
            bits = torch.int32 if value.dtype == torch.float32 else None
            expected = original[fqn].to(value.dtype)
            assert torch.equal(value.view(bits), expected.view(bits)) if bits else torch.equal(value, expected)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda t: t.pop("model.step"), "does not have"),
        (lambda t: t.update(ghost=tensor("F32", 2)), "does not have"),
        (lambda t: t.update({UP: tensor("BF16", 8, 16)}), "the reference has"),
        (lambda t: t.update({UP: tensor("I16", 16, 8)}), "the reference has"),
    ],
)
def test_like_another_model_is_refused(run: Path, tmp_path: Path, ckpt_json, change, word: str) -> None:
    tensors = dict(MODEL)
    change(tensors)
    reference = write_model(tmp_path / "ref", tensors)
    document = ckpt_json("gather", run, tmp_path / "out", "--like", reference, code=2)
    assert word in document["error"]["what"]


def test_assets_are_put_beside_the_weights(run: Path, tmp_path: Path, ckpt_json) -> None:
    extra = tmp_path / "extra"
    (extra / "sub").mkdir(parents=True)
    (extra / "generation_config.json").write_text('{"mine": 1}')
    (extra / "sub" / "chat.jinja").write_text("hi")
    (extra / "model.safetensors").write_bytes(safetensors_bytes({"no": tensor("U8", 1)}))
    ckpt_json("gather", run, tmp_path / "out", "--assets", extra)
    assert (tmp_path / "out" / "generation_config.json").read_text() == '{"mine": 1}'
    assert (tmp_path / "out" / "sub" / "chat.jinja").read_text() == "hi"
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == ASSETS["tokenizer.json"]
    assert len(ckpt_json("inspect", tmp_path / "out", "--tensors")["tensors"]) == len(MODEL)


@pytest.mark.parametrize(
    ("dtype", "target"), [("bf16", torch.bfloat16), ("f16", torch.float16), ("f32", torch.float32)]
)
@pytest.mark.parametrize("verb", ["shard", "gather", "reshard"])
def test_dtype_casts_as_torch_does(tmp_path: Path, ckpt_json, verb: str, dtype: str, target) -> None:
    values = torch.randn(64, 8, generator=torch.Generator().manual_seed(3)) * torch.logspace(-30, 9, 64)[:, None]
    values[0, :4] = torch.tensor([float("nan"), float("inf"), -0.0, 1 + 2**-9])
    raw = values.numpy().tobytes()
    bf16 = values.bfloat16().view(torch.int16).numpy().tobytes()
    tensors = {"w": ("F32", (64, 8), raw), "b": ("BF16", (64, 8), bf16), "i": tensor("I32", 9)}
    tensors["f8"] = tensor("F8_E4M3", 4)
    source = write_model(tmp_path / "model", tensors)
    steps = {
        "shard": [("shard", "--mesh", "dp_shard=3", "--dtype", dtype), ("gather",)],
        "gather": [("shard", "--mesh", "dp_shard=3"), ("gather", "--dtype", dtype)],
        "reshard": [
            ("shard", "--mesh", "dp_shard=3"),
            ("reshard", "--mesh", "dp_shard=2", "--dtype", dtype),
            ("gather",),
        ],
    }[verb]
    for i, step in enumerate(steps):
        ckpt_json(step[0], source, tmp_path / f"{i}", *step[1:])
        source = tmp_path / f"{i}"
    loaded = load_file(source / "model.safetensors")
    bits = torch.int32 if dtype == "f32" else torch.int16
    for fqn, original in (("w", values), ("b", values.bfloat16())):
        assert loaded[fqn].dtype == target
        found, expected = loaded[fqn], original.to(target)
        assert torch.equal(found.isnan(), expected.isnan())  # which NaN is nobody's promise
        assert torch.equal(found.nan_to_num(7.0).view(bits), expected.nan_to_num(7.0).view(bits))
    assert loaded["i"].numpy().tobytes() == tensors["i"][2]
    assert loaded["f8"].dtype == torch.float8_e4m3fn


def test_from_overrides_what_is_detected(run: Path, tmp_path: Path, ckpt_json) -> None:
    (run / "model.safetensors").write_bytes(safetensors_bytes({"w": tensor("U8", 4)}))
    assert ckpt_json("inspect", run)["format"] == "dcp"
    assert ckpt_json("inspect", run, "--from", "hf")["num_tensors"] == 1
    assert ckpt_json("inspect", tmp_path / "model", "--from", "dcp", code=4)
    assert ckpt_json("inspect", tmp_path / "model" / "config.json", "--from", "safetensors", code=4)


def test_single_file_is_a_source_and_never_touched(model: Path, tmp_path: Path, ckpt_json) -> None:
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in model.iterdir()}
    assert ckpt_json("inspect", model / "model.safetensors")["format"] == "safetensors"
    ckpt_json("shard", model / "model.safetensors", tmp_path / "run", "--mesh", "dp_shard=2")
    ckpt_json("gather", tmp_path / "run", tmp_path / "back")
    name = "model.safetensors"
    assert (tmp_path / "back" / name).read_bytes() == (model / name).read_bytes()
    ckpt_json("shard", model, tmp_path / "other", "--mesh", "dp_shard=2")
    assert {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in model.iterdir()} == before


def test_num_workers_does_not_change_a_byte(model: Path, tmp_path: Path, ckpt_json) -> None:
    for workers in ("1", "3", "16"):
        ckpt_json("shard", model, tmp_path / workers, "--mesh", "dp_shard=3", "-j", workers)
    assert files_of(tmp_path / "1") == files_of(tmp_path / "3") == files_of(tmp_path / "16")


def test_inspect_overlay_shows_a_layout_that_is_not_written(model: Path, ckpt: Ckpt, ckpt_json) -> None:
    document = ckpt_json("inspect", model, "--mesh", "dp_shard=64", "--tensor", "model.embed.weight")
    assert document["mesh"] == {"dp_shard": 64}
    chunks = document["tensors"][0]["chunks"]
    assert [c["sizes"] for c in chunks[:12]] == [[1, 8]] * 12
    code, out, _ = ckpt("inspect", model, "--mesh", "dp_shard=2", "--by", "rank")
    assert code == 0
    assert "rank" in out


@pytest.mark.parametrize("verb", ["shard", "gather", "reshard"])
def test_missing_parents_are_made_and_removed_when_nothing_comes_of_it(
    tmp_path: Path, run: Path, ckpt: Ckpt, verb: str
) -> None:
    source = tmp_path / "model" if verb == "shard" else run
    mesh = [] if verb == "gather" else ["--mesh", "dp_shard=2"]
    out = tmp_path / "new" / "deep" / "out"
    assert ckpt(verb, source, out, *mesh, "--dry-run")[0] == 0
    assert not (tmp_path / "new").exists()
    assert ckpt(verb, source, out, *mesh, "--include", "nothing")[0] == 2
    assert not (tmp_path / "new").exists()
    assert ckpt(verb, source, out, *mesh)[0] == 0
    assert api.verify(out).ok
    code, _, err = ckpt(verb, source, out / "config.json" / "in" / "a file", *mesh)
    assert code == 2
    assert "not a directory" in err


def test_parents_made_for_a_run_that_fails_are_removed_and_others_are_not(tmp_path: Path, run: Path, ckpt) -> None:
    (run / "ckpt_manifest.json").unlink()
    damage.flip(*damage.payload_offset(run, UP))
    (tmp_path / "old").mkdir()
    assert ckpt("gather", run, tmp_path / "old" / "new" / "out")[0] == 4
    assert list((tmp_path / "old").iterdir()) == []


STEP_FILES = {
    "meta.pt": b"\x80\x02cbuiltins\nset\nnever unpickled", "trainer_state.json": b"{}", "scheduler.pt": b"PK",
    "rng_state_0.pth": b"r", "sampler": b"",
}  # fmt: skip


def test_small_files_of_a_step_are_carried_by_reshard_and_not_by_gather(tmp_path: Path, run: Path, ckpt: Ckpt) -> None:
    damage.forget_manifest(run)
    for name, raw in STEP_FILES.items():
        (run / name).write_bytes(raw)
    (run / "whole.safetensors").write_bytes(b"x")
    (run / "more").mkdir()
    (run / "more" / "notes.txt").write_bytes(b"x")
    source = run
    for number in range(2):  # the second time from a checkpoint with a manifest
        out = tmp_path / f"out{number}"
        code, _, err = ckpt("reshard", source, out, "--mesh", "dp_shard=3")
        assert code == 0
        if number == 0:
            assert "left out" in err
            assert "whole.safetensors" in err
            assert "more/notes.txt" in err
        assert {name: (out / name).read_bytes() for name in STEP_FILES} == STEP_FILES
        assert not (out / "more").exists()
        assert api.verify(out).findings == ()
        source = out
    damage.flip(out / "meta.pt", 3)
    assert [finding.code for finding in api.verify(out).findings] == ["digest-mismatch"]
    assert ckpt("gather", source, tmp_path / "hf")[0] == 0
    assert not (tmp_path / "hf" / "meta.pt").exists()


def test_part_of_a_step_says_what_stays_behind(tmp_path: Path, run: Path, ckpt: Ckpt) -> None:
    run.rename(tmp_path / "pytorch_model_fsdp_0")
    code, _, err = ckpt("reshard", tmp_path / "pytorch_model_fsdp_0", tmp_path / "out", "--mesh", "dp_shard=3")
    assert code == 0
    assert "scheduler, RNG and trainer state are in the directory above" in err


@pytest.mark.parametrize("num_files", [1, 2])
def test_files_without_tensors_survive_the_round_trip(tmp_path: Path, ckpt: Ckpt, ckpt_json, num_files: int) -> None:
    model = write_model(tmp_path / "model", num_files=num_files)
    (model / "model-00009-of-00009.safetensors").write_bytes(safetensors_bytes({}, metadata={"format": "pt"}))
    (model / "broken.safetensors").write_bytes(b"\x02" + bytes(7) + b"{]")
    code, _, err = ckpt("shard", model, tmp_path / "run", "--mesh", "dp_shard=2")
    assert code == 0
    assert "broken.safetensors" in err
    assert "00009" not in err
    assert ckpt("gather", tmp_path / "run", tmp_path / "back")[0] == 0
    (model / "broken.safetensors").unlink()
    assert files_of(tmp_path / "back") == files_of(model)
    assert ckpt_json("verify", tmp_path / "back")["findings"] == []
