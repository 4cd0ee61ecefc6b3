"""`ckpt commit`: what parts have written is published by what stands beside it, and by nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from samples import files_of, shard_model, staging_left, tensor, write_model

import ckpt_tools
from ckpt_tools.convert import commands as commands, run as share
from ckpt_tools.errors import DestinationExistsError, StorageError, UnreadableError, UsageError

BIG = {f"layers.{i}.weight": tensor("F32", 8, 16, seed=i) for i in range(4)}


def die(*_: object, **__: object) -> None:
    raise StorageError("the machine is gone")


@pytest.mark.parametrize("verb", ["shard", "reshard", "gather"])
def test_what_all_parts_have_written_is_published(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = shard_model(tmp_path, "dp_shard=2", BIG)
    source = tmp_path / "model" if verb == "shard" else run
    options = {"max_shard_size": "600"} if verb == "gather" else {"mesh": "dp_shard=3"}
    function = getattr(ckpt_tools, verb)
    function(source, tmp_path / "one", **options)
    out = tmp_path / "out"
    for index in (2, 0):
        function(source, out, part=f"{index}/3", **options)
    with pytest.raises(StorageError, match="part 1 of 3 is missing") as caught:
        ckpt_tools.commit(out)
    assert "--part 1/3" in (caught.value.hint or "")
    with monkeypatch.context() as dying:
        dying.setattr(share, "commit", die)  # between its record and the last step
        with pytest.raises(StorageError, match="the machine is gone"):
            function(source, out, part="1/3", **options)
    assert not out.exists()
    monkeypatch.chdir(tmp_path)
    assert ckpt_tools.commit("out").published
    assert files_of(out) == files_of(tmp_path / "one")
    assert staging_left(tmp_path) == []
    with pytest.raises(DestinationExistsError, match="nothing to publish"):
        ckpt_tools.commit(out)


def test_nothing_is_made_where_nothing_is_being_written(tmp_path: Path) -> None:
    with pytest.raises(UnreadableError, match="no conversion is in progress"):
        ckpt_tools.commit(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_source_that_changed_meanwhile_is_refused(tmp_path: Path) -> None:
    source, out = write_model(tmp_path / "model", BIG), tmp_path / "out"
    for index in range(2):
        ckpt_tools.shard(source, out, mesh="dp_shard=4", part=f"{index}/4")
    write_model(tmp_path / "new", BIG | {"layers.1.weight": tensor("F32", 8, 16, seed=77)})
    (tmp_path / "new" / "model.safetensors").replace(source / "model.safetensors")
    with pytest.raises(DestinationExistsError, match="the source has changed"):
        ckpt_tools.commit(out)


def test_a_command_says_what_is_made_and_no_more(tmp_path: Path) -> None:
    given = {"mesh": "dp_shard=2", "exclude": ["a.**", "b"], "dtype": "bf16", "part": "1/2", "num_workers": 3}
    options = commands.ShardOptions(tmp_path / "model", tmp_path / "out", **given)
    verb, said = commands.parse_command(commands.build_command(options))
    assert verb == "shard"
    assert said == {
        "source": str(tmp_path / "model"), "mesh": "dp_shard=2", "exclude": ["a.**", "b"], "dtype": "bf16"
    }  # fmt: skip


NO_COMMANDS = [
    "",
    "{}",
    "[1, 2]",
    "[" * 9999,
    '["push", {}]',
    '["shard", []]',
    '["shard", {}]',
    '[["shard"], {}]',
    '["shard", {"source": 5}]',
    *(
        f'["shard", {{"source": "/", {more}}}]'
        for more in (
            '"destination": "/"',
            '"nonsense": 1',
            '"mesh": 5.5',
            '"dequantize": "yes"',
            '"trainer": "nobody"',
            '"exclude": [1]',
        )
    ),
]


@pytest.mark.parametrize("text", NO_COMMANDS)
def test_what_is_no_command_is_not_run(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert commands.parse_command(text) is None
    source, out = write_model(tmp_path / "model", BIG), tmp_path / "out"
    monkeypatch.setattr("ckpt_tools.convert.commands.build_command", lambda *_: text)
    ckpt_tools.shard(source, out, mesh="dp_shard=2", part="0/2")
    with pytest.raises(UsageError, match="does not record its command"):
        ckpt_tools.commit(out)


def test_a_bucket_does_not_choose_what_is_read_of_this_machine(tmp_path: Path, seaweed, use) -> None:
    source, prefix = write_model(tmp_path / "model", BIG), f"{use(seaweed)}/commit"
    ckpt_tools.shard(source, f"{prefix}/local", mesh="dp_shard=2", part="0/2")
    with pytest.raises(UsageError, match="on the machine that started it"):
        ckpt_tools.commit(f"{prefix}/local")
    ckpt_tools.shard(source, f"{prefix}/start", mesh="dp_shard=2")
    ckpt_tools.reshard(f"{prefix}/start", f"{prefix}/again", mesh="dp_shard=4", part="0/2")
    with pytest.raises(StorageError, match="part 1 of 2 is missing"):
        ckpt_tools.commit(f"{prefix}/again")
