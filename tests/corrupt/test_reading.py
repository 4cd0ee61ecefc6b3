"""What `verify` read and did not, findings by their causes, files that were changed on purpose, and hollow models."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from corrupt import damage
from samples import Tensors, content, safetensors_bytes, shard_model, tensor, write_model

import ckpt_tools
from ckpt_tools import api
from ckpt_tools.cli import main
from ckpt_tools.errors import StorageError, UnreadableError, UsageError

RANKS = 16
BLOCKS: Tensors = {
    f"model.layers.{layer}.{kind}.weight": tensor("F32", 32, 24, seed=8 * layer + at)
    for layer in range(3)
    for at, kind in enumerate("qkvogud")
} | {"model.norm.weight": tensor("F32", 48, seed=99)}
FLIPPED = {2: "model.layers.0.k.weight", 7: "model.layers.1.u.weight", 15: "model.layers.2.d.weight"}

UNREADABLE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (Path.unlink, "missing-file"),
    "empty": (lambda path: path.write_bytes(b""), "short-file"),
    "cut": (lambda path: damage.truncate(path, 200), "short-file"),
    "noise": (lambda path: path.write_bytes(content(path.stat().st_size)), "bad-item"),
}


@pytest.fixture
def run16(tmp_path: Path) -> Path:
    return shard_model(tmp_path, f"dp_shard={RANKS}", BLOCKS)


def verify_json(capsys, *argv: object) -> tuple[int, dict]:
    code = main(["verify", *map(str, argv), "--json"])
    return code, json.loads(capsys.readouterr().out)


def sizes_of(rows: list[dict]) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in rows:
        found[row["file"]] = found.get(row["file"], 0) + row["bytes"]
    return found


# The chunk is the unit


@pytest.mark.parametrize("manifest", [True, False])
@pytest.mark.parametrize("kind", UNREADABLE)
def test_file_that_cannot_be_read_hides_no_damage_in_others(run16: Path, capsys, kind: str, manifest: bool) -> None:
    if not manifest:
        damage.forget_manifest(run16)
    intact = verify_json(capsys, run16)[1]
    assert intact["not_read"] == []
    entries = {entry.fqn: entry for entry in api.open_checkpoint(run16).tensors}
    for rank, fqn in FLIPPED.items():
        span = next(c.span for c in entries[fqn].chunks if c.span.file == f"__{rank}_0.distcp")
        damage.flip(run16 / span.file, span.offset + span.nbytes // 2)
    change, code = UNREADABLE[kind]
    change(run16 / "__12_0.distcp")
    exit_code, document = verify_json(capsys, run16)
    assert exit_code == 3
    found = {(each["file"], each["tensor"]) for each in document["findings"] if each["code"] == "damaged-data"}
    assert found == {(f"__{rank}_0.distcp", fqn) for rank, fqn in FLIPPED.items()}
    assert {row["file"] for row in document["not_read"]} == {"__12_0.distcp"}
    before, now, left = (sizes_of(rows) for rows in (intact["read"], document["read"], document["not_read"]))
    assert {file: now.get(file, 0) + left.get(file, 0) for file in before} == before
    assert all(now[file] == before[file] for file in before if file != "__12_0.distcp")
    causes = [cause for cause in document["causes"] if cause["code"] == code]
    assert len(causes) == 1
    assert causes[0]["count"] >= (1 if kind == "cut" else len(BLOCKS))
    assert len(document["causes"]) == 4


def test_missing_file_is_one_line_of_text(run16: Path, capsys) -> None:
    (run16 / "__12_0.distcp").unlink()
    assert main(["verify", str(run16)]) == 3
    out, err = capsys.readouterr()
    (line,) = (line for line in out.splitlines() if line.startswith("error:"))
    assert line.startswith("error: missing-file: __12_0.distcp, in 22 of 22 tensors, ")
    assert line.endswith("KiB: its file is missing")
    assert "not read: 1 file" in err
    assert "missing-file (__12_0.distcp)" in err
    assert main(["verify", str(run16), "-v"]) == 3
    assert capsys.readouterr().out.count("its file is missing") == 1 + len(BLOCKS)


def test_unread_ranks_are_drawn_as_unread(run16: Path, tmp_path: Path) -> None:
    (run16 / "__12_0.distcp").unlink()
    damage.truncate(run16 / "__3_0.distcp", 400)
    assert main(["verify", str(run16), "--html", str(tmp_path / "page.html"), "-q"]) == 3
    page = (tmp_path / "page.html").read_text()
    assert "Ranks with errors: 2 of 16" in page
    assert page.count('class="unread') >= 2
    assert "missing-file: __12_0.distcp, in 22 of 22 tensors" in page


def test_structure_reads_headers_only_and_says_so(run16: Path, capsys) -> None:
    _, document = verify_json(capsys, run16, "--level", "structure")
    assert {row["file"] for row in document["read"]} == {".metadata", damage.MANIFEST}
    assert {row["why"] for row in document["not_read"]} == {"only headers were read"}
    everything = sizes_of(verify_json(capsys, run16)[1]["read"])
    assert sizes_of(document["read"]) | sizes_of(document["not_read"]) == everything


def test_parts_together_read_what_one_reads(run16: Path, capsys) -> None:
    total: dict[str, int] = {}
    for part in ("0/3", "1/3", "2/3"):
        for file, nbytes in sizes_of(verify_json(capsys, run16, "--part", part)[1]["read"]).items():
            total[file] = total.get(file, 0) + nbytes if file.endswith(".distcp") else nbytes
    assert total == sizes_of(verify_json(capsys, run16)[1]["read"])


def test_frames_of_whole_files_are_checked_while_one_is_missing(run16: Path, capsys) -> None:
    span = damage.item_span(run16, "model.norm.weight")
    damage.flip(run16 / span.file, span.offset + 10)  # a time in a zip header: no checksum but the manifest's has it
    (run16 / "__12_0.distcp").unlink()
    codes = {each["code"] for each in verify_json(capsys, run16)[1]["findings"]}
    assert codes == {"missing-file", "changed-frames"}


# Every file has a word


def test_files_that_nobody_understands_are_listed_by_name(tmp_path: Path, capsys) -> None:
    model = write_model(tmp_path / "model")
    strange = {f"notes-{number:02d}.dat": b"x" for number in range(20)} | {"old.bin": b"xyz", "run/log.txt": b"hello"}
    for name, text in strange.items():
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_bytes(text)
    code, document = verify_json(capsys, model)
    assert code == 0
    assert sizes_of(document["not_read"]) == {name: len(text) for name, text in strange.items()}
    assert all(row["why"] for row in document["not_read"])
    main(["verify", str(model), "-v"])
    err = capsys.readouterr().err
    assert all(name in err for name in strange)


# Causes


def test_wrong_reference_is_a_few_causes(tmp_path: Path, capsys) -> None:
    ours = write_model(tmp_path / "ours", BLOCKS)
    others = {fqn.replace("layers.2", "layers.7"): tensor(*row[:1], *row[1], seed=500) for fqn, row in BLOCKS.items()}
    theirs = write_model(tmp_path / "theirs", others)
    code, document = verify_json(capsys, ours, "--against", theirs)
    assert code == 3
    assert [(cause["code"], cause["count"]) for cause in document["causes"]] == [
        ("missing-tensor", 7),
        ("extra-tensor", 7),
        ("different-tensor", 15),
    ]
    places = [at for cause in document["causes"] for at in cause["findings"]]
    assert sorted(places) == list(range(len(document["findings"])))
    assert all(
        document["findings"][at]["code"] == cause["code"] for cause in document["causes"] for at in cause["findings"]
    )


# Assets


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A model directory that ckpt wrote."""
    assets = {
        "config.json": b'{"model_type": "none"}\n',
        "generation_config.json": b'{"top_k": 50}\n',
        "tokenizer_config.json": b'{"pad": "x"}\n',
        "tokenizer.json": b'{"added_tokens": []}\n',
        "merges.txt": b"a b\n",
        "README.md": b"# A model\n",
    }
    run = shard_model(tmp_path, "dp_shard=2")
    shutil.rmtree(run)
    shutil.rmtree(tmp_path / "model")
    write_model(tmp_path / "model", assets=assets)
    api.shard(tmp_path / "model", run, mesh="dp_shard=2")
    api.gather(run, tmp_path / "own")
    return tmp_path / "own"


BROKEN_JSON = {"empty": b"", "cut": b'{"a": ', "bytes": b"\xff\xfe\x00", "deep": b"[" * 100_000}


@pytest.mark.parametrize("kind", BROKEN_JSON)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
def test_asset_that_is_no_json_is_an_error_and_is_not_carried_on(tmp_path: Path, capsys, name: str, kind: str) -> None:
    model = write_model(tmp_path / "model")
    (model / name).write_bytes(BROKEN_JSON[kind])
    code, document = verify_json(capsys, model)
    assert code == 3
    assert [(each["code"], each["where"]) for each in document["findings"]] == [("damaged-asset", name)]
    with pytest.raises(UnreadableError, match="not valid JSON"):
        api.shard(model, tmp_path / "run", mesh="dp_shard=2")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "text", [b'{"a": 1, "a": 2}', b'{"limit": Infinity}', b'{"a": -0}', b'{"\\ud83d": "x"}', b" {}\n\n"]
)
def test_json_that_python_reads_is_no_damage(tmp_path: Path, text: bytes) -> None:
    model = write_model(tmp_path / "model", assets={"config.json": text, "vocab.json": text, "notes.json": b"{"})
    assert api.verify(model).findings == ()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "merges.txt", "README.md"])
@pytest.mark.parametrize("same_size", [True, False])
def test_asset_that_changed_is_red_until_it_is_accepted(
    own: Path, tmp_path: Path, capsys, name: str, same_size: bool
) -> None:
    recorded = json.loads((own / damage.MANIFEST).read_text())["assets"][name]["digest"]
    text = (own / name).read_bytes()
    changed = text[:-1] + b" " if same_size else text + b"\n"
    (own / name).write_bytes(changed)
    is_for_people = name == "README.md"
    code, document = verify_json(capsys, own)
    (finding,) = document["findings"]
    assert (code, finding["severity"]) == ((0, "warning") if is_for_people else (3, "error"))
    assert finding["code"] == ("digest-mismatch" if same_size else "changed-asset")
    if not is_for_people:
        with pytest.raises(UnreadableError, match=f"{name} is not what") as refused:
            api.shard(own, tmp_path / "again", mesh="dp_shard=2")
        for hint in (finding["hint"], refused.value.hint):  # the hint leads there
            *_, command = str(hint).partition("on purpose: ckpt ")
            assert main(command.split()) == 0
    else:
        assert main(["verify", str(own), "--accept", name]) == 0
    assert f": {name}" in capsys.readouterr().out.partition("accepted on 20")[2]
    said = json.loads((own / damage.MANIFEST).read_text())["accepted"][name]
    assert said["recorded"] in (recorded, said["digest"])  # accepted twice: what was recorded the second time
    result = api.shard(own, tmp_path / "again", mesh="dp_shard=2")
    assert result.warnings == ()
    assert api.verify(tmp_path / "again").findings == ()
    (own / name).write_bytes(text)
    assert api.verify(own).ok is is_for_people  # what was accepted is what counts now


@pytest.mark.parametrize("name", ["model.safetensors", damage.MANIFEST, "nothing.json", "../own/config.json"])
def test_accept_takes_files_beside_the_weights(own: Path, name: str) -> None:
    before = (own / damage.MANIFEST).read_bytes()
    with pytest.raises((UsageError, UnreadableError)):
        api.verify(own, accept=[name])
    assert (own / damage.MANIFEST).read_bytes() == before


def test_accept_without_a_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs a ckpt_manifest"):
        api.verify(write_model(tmp_path / "model"), accept=["config.json"])


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_accept_that_fails_leaves_the_manifest_as_it_was(own: Path, monkeypatch, call: str) -> None:
    (own / "config.json").write_bytes(b"{}")
    before = sorted((path.name, path.read_bytes()) for path in own.iterdir())

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(StorageError, match="No space left"):
        api.verify(own, accept=["config.json"])
    assert sorted((path.name, path.read_bytes()) for path in own.iterdir()) == before


# Several


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = shard_model(tmp_path)
    for step in (20, 100, 3):
        shutil.copytree(run, tmp_path / "runs" / f"step-{step}")
    (tmp_path / "runs" / "step-20" / "__0_0.distcp").unlink()
    (tmp_path / "runs" / "log.txt").write_text("hello")
    return tmp_path / "runs"


def test_folder_of_steps_is_verified_step_by_step(folder: Path, capsys) -> None:
    code, document = verify_json(capsys, folder)
    assert code == 3
    rows = [(Path(row["source"]).name, row["ok"]) for row in document["checkpoints"]]
    assert rows == [("step-3", True), ("step-20", False), ("step-100", True)]
    assert document["checkpoints"][1]["causes"][0]["code"] == "missing-file"
    assert main(["verify", str(folder)]) == 3
    assert [line.split(": ")[1][:6] for line in capsys.readouterr().out.splitlines() if "runs/" in line] == [
        "ok (6 ", "NOT ok", "ok (6 "
    ]  # fmt: skip


def test_several_end_in_the_worst_of_their_codes(folder: Path, tmp_path: Path, capsys) -> None:
    good, bad, none = folder / "step-3", folder / "step-20", tmp_path / "none"
    for paths, worst in (((good, good), 0), ((good, bad), 3), ((good, none), 4), ((none, bad, good), 4)):
        code, document = verify_json(capsys, *paths)
        assert code == worst
        assert [row["source"] for row in document["checkpoints"]] == [str(path) for path in paths]
        assert document["ok"] is (worst == 0)
    assert verify_json(capsys, good)[1].keys() >= {"ok", "findings", "causes"}


def test_what_was_not_checked_of_several_is_said_once(folder: Path, capsys) -> None:
    steps = [str(folder / name) for name in ("step-3", "step-100")]
    assert main(["verify", *steps]) == 0
    said = capsys.readouterr().err
    assert said.count("not checked: whether the values are finite") == 1
    assert "checkpoints)" not in said
    assert main(["verify", *steps, str(folder / "step-20")]) == 3
    assert "(1 of 3 checkpoints)" in capsys.readouterr().err
    assert main(["verify", *steps, "-q"]) == 0
    assert "not checked" not in capsys.readouterr().err


@pytest.mark.parametrize("option", [("--against", "{}"), ("--part", "0/2"), ("--accept", "a"), ("--html", "{}/x.html")])
def test_options_of_one_checkpoint_are_refused_for_several(folder: Path, capsys, option: tuple[str, str]) -> None:
    given = [text.format(folder) for text in option]
    assert main(["verify", str(folder), *given]) == 2
    assert f"{option[0]} takes one checkpoint, got 3" in capsys.readouterr().err


# Hollow


def empty_of(*names: str) -> Tensors:
    return dict.fromkeys(names, ("F32", (0,), b""))


HOLLOW: dict[str, Tensors] = {
    "nothing": {},
    "all empty": empty_of("model.embed.weight", "model.layers.0.q.weight", "model.layers.0.q.bias"),
    "one weight": BLOCKS | empty_of("model.layers.3.q.weight"),
    "an adapter": empty_of("base_model.model.q.lora_A.weight", "base_model.model.q.lora_B.weight"),
    "most, by other names": empty_of("a.kernel", "b.kernel", "c.kernel") | {"d.kernel": tensor("F32", 3)},
}
FULL: dict[str, Tensors] = {
    "blocks": BLOCKS,
    "a buffer": BLOCKS | empty_of("model.layers.0.mask"),
    "extra state": {"q.weight": tensor("F32", 3)} | empty_of(*(f"layers.{i}.q._extra_state" for i in range(4))),
    "a row of none": BLOCKS | {"prompt.weight": ("F32", (0, 8), b"")},
    "wrapped": {fqn.replace("layers", "_fsdp_wrapped_module.layers"): row for fqn, row in BLOCKS.items()},
    "a scalar": {"step": tensor("I64", seed=5)},
}


@pytest.mark.parametrize("form", ["file", "directory", "dcp"])
@pytest.mark.parametrize("kind", [*HOLLOW, *FULL])
def test_hollow_checkpoints_are_findings_and_full_ones_are_not(tmp_path: Path, kind: str, form: str) -> None:
    tensors = {**HOLLOW, **FULL}[kind]
    path = write_model(tmp_path / "model", tensors)
    if form == "file":
        path = path / "model.safetensors"
    elif form == "dcp":
        if kind in HOLLOW:
            with pytest.raises(UnreadableError, match=r"it contains no tensors|have shape"):
                api.shard(path, tmp_path / "run", mesh="dp_shard=2")
            return
        api.shard(path, tmp_path / "run", mesh="dp_shard=2")
        path = tmp_path / "run"
    result = api.verify(path)
    assert [finding.code for finding in result.errors] == (["hollow"] if kind in HOLLOW else [])


def test_results_are_true_when_they_are_good(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", BLOCKS)
    other = write_model(tmp_path / "other", BLOCKS | {"more": tensor("F32", 2)})
    assert ckpt_tools.verify(model)
    assert ckpt_tools.diff(model, model)
    assert not ckpt_tools.diff(model, other)
    (model / "model.safetensors").write_bytes(safetensors_bytes(empty_of("a.weight")))
    assert not ckpt_tools.verify(model)
