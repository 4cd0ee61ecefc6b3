"""What is written to a store is there whole or not at all, whatever happens to any one request."""

from __future__ import annotations

import hashlib
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings as given_settings, strategies as st
from remote.fault_proxy import Fault, Proxy
from remote.servers import SECRETS, Server
from samples import MODEL, files_of, small_blocks, tensor, write_model

from ckpt_tools import api
from ckpt_tools.convert import finish
from ckpt_tools.convert.job import Conversion
from ckpt_tools.errors import CkptError, DestinationExistsError, StorageError, UnreadableError, UsageError
from ckpt_tools.storage.remote import object_sink, upload
from ckpt_tools.storage.remote.object_sink import WriteSettings, cut_passes
from ckpt_tools.storage.remote.store import Bucket
from ckpt_tools.storage.remote.upload import PartStream
from ckpt_tools.storage.staging import Staging

pytest.importorskip("obstore", reason="obstore is missing: pip install 'ckpt-tools[remote]'")
QUICK = [
    "test_marker_is_put_last",
    "test_what_a_store_cannot_do_is_refused_before_it_is_asked",
    "test_what_only_disks_take_makes_no_directory_of_that_name",
    "test_passes_hold_every_file_once_and_fit",
]
pytestmark = pytest.mark.full(but=QUICK)

FAULTS: tuple[Fault, ...] = ("reset", "no-answer", "answer-lost", "error-body", "500", "503", "403", "409", "412")
PART = 5 << 20
"""The least that S3 takes."""
BIG = {**MODEL, "big": tensor("BF16", 8, 1 << 20, seed=7)}
"""Its files have several parts."""


def objects(path: str) -> dict[str, str]:
    """SHA-256 of every object below a prefix, by relative name; without ckpt's manifest."""
    bucket = Bucket(path)
    found = {each.key.removeprefix(f"{bucket.key}/") for each in bucket.list(bucket.key)}
    return {
        name: hashlib.sha256(bucket.get_whole(f"{bucket.key}/{name}", max_bytes=1 << 30)[1]).hexdigest()
        for name in sorted(found - {"ckpt_manifest.json"})
    }


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "MIN_PART_BYTES", PART)


@pytest.fixture
def settings() -> Iterator[Callable[..., None]]:
    def change(**options: object) -> None:
        object_sink.set_write_settings(WriteSettings(**options))

    yield change
    object_sink.set_write_settings(WriteSettings())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and what local runs make of it."""
    root = tmp_path_factory.mktemp("local")
    write_model(root / "model", BIG)
    api.shard(root / "model", root / "shard", mesh="dp_shard=3")
    api.reshard(root / "shard", root / "reshard", mesh="dp_shard=2,tp=2")
    api.gather(root / "shard", root / "gather", max_shard_size="8MiB")
    api.gather(root / "shard", root / "single")
    api.gather(root / "shard", root / "torch", to="torch")
    return root


Command = Callable[[Path, str], Conversion]
COMMANDS: dict[str, Command] = {
    "shard": lambda root, out: api.shard(root / "model", out, mesh="dp_shard=3"),
    "reshard": lambda root, out: api.reshard(root / "shard", out, mesh="dp_shard=2,tp=2"),
    "gather": lambda root, out: api.gather(root / "shard", out, max_shard_size="8MiB"),
    "single": lambda root, out: api.gather(root / "shard", out),
    "torch": lambda root, out: api.gather(root / "shard", out, to="torch"),
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("command", "memory_parts"), [*zip(COMMANDS, (200, 4, 1, 200, 4), strict=True), ("shard", 1), ("torch", 1)]
)
def test_same_bytes_as_on_a_disk(model, seaweed, use, settings, command, memory_parts) -> None:
    settings(memory_bytes=memory_parts * PART, verify_all=memory_parts == 4)
    out = f"{use(seaweed)}/same-{command}-{memory_parts}"
    COMMANDS[command](model, out)
    assert objects(out) == files_of(model / command)
    again = COMMANDS[command](model, out)
    assert again.notes[-1] == "this conversion is complete: nothing was left to do"
    assert objects(out) == files_of(model / command)
    with pytest.raises(DestinationExistsError, match="not empty"):
        api.shard(model / "model", out, mesh="dp_shard=7")


def _outcome(model: Path, out: str) -> str:
    """Everything that is told of a run."""
    try:
        return str(COMMANDS["shard"](model, out))
    except CkptError as error:
        return str(error) + "".join(getattr(error, "__notes__", ()))


def _check_sweep(model: Path, base: str, proxy: Proxy, cases: list[tuple[Fault, int]]) -> None:
    expected = files_of(model / "shard")
    for fault, at in cases:
        out = f"{base}/sweep-{fault}-{at}"
        proxy.arm(fault, at=at, times=100 if fault in ("403", "412") else 1)
        said = _outcome(model, out)
        # A listing that lacks what was written is found by the check of the whole.
        assert out in said or "its own check" in said, (fault, at, said)
        assert proxy.num_damaged or at >= len(proxy.seen)
        assert not [each for each in SECRETS if each in said], (fault, at)
        proxy.arm(None)
        there = objects(out)
        if ".metadata" in there:
            assert {name: there[name] for name in expected} == expected, (fault, at)
        assert COMMANDS["shard"](model, out).published
        assert objects(out) == expected, (fault, at)


def _at_once(*runs: Callable[[], Conversion]) -> list[Conversion | CkptError]:
    def attempt(run: Callable[[], Conversion]) -> Conversion | CkptError:
        try:
            return run()
        except CkptError as error:
            return error

    with ThreadPoolExecutor() as threads:
        return list(threads.map(attempt, runs))


@pytest.mark.full
def test_of_two_rivals_one_wins_and_twins_both_do(model: Path, seaweed: Server, use: Callable[..., str]) -> None:
    for number in range(3):
        out = f"{use(seaweed)}/rivals-{number}"
        found = _at_once(*(partial(COMMANDS[name], model, out) for name in ("shard", "reshard")))
        (lost,) = [each for each in found if isinstance(each, CkptError)]
        assert isinstance(lost, DestinationExistsError), lost
        assert objects(out) == files_of(model / ("shard" if lost is found[1] else "reshard"))
        out = f"{use(seaweed)}/twins-{number}"
        found = _at_once(*[partial(COMMANDS["shard"], model, out)] * 2)
        assert not [each for each in found if isinstance(each, CkptError)], found
        assert objects(out) == files_of(model / "shard")


@pytest.mark.full
def test_killed_at_any_moment_and_run_again(model, seaweed, use, request) -> None:
    program = "import sys; from ckpt_tools.storage.remote import upload; upload.MIN_PART_BYTES = 5 << 20; "
    program += "from ckpt_tools.cli import main; sys.exit(main(sys.argv[1:]))"
    chance = random.Random(16)
    for number in range(20 if request.config.getoption("zoo") else 3):
        out = f"{use(seaweed)}/killed-{number}"
        command = [sys.executable, "-c", program, "shard", str(model / "model"), out, "--mesh", "dp_shard=3"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(command, env=os.environ, **quiet)
        try:
            process.wait(timeout=chance.uniform(0.3, 1.6))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
        there = objects(out)
        if ".metadata" in there:
            assert {name: there.get(name) for name in files_of(model / "shard")} == files_of(model / "shard")
        assert COMMANDS["shard"](model, out).published
        assert objects(out) == files_of(model / "shard")


def test_store_that_ignores_conditions_is_refused(model, careless, seaweed, use, settings) -> None:
    out = f"{use(careless)}/careless"
    with pytest.raises(StorageError, match="ignores If-None-Match"):
        COMMANDS["shard"](model, out)
    assert objects(out) == {}
    settings(needs_conditions=False)
    out = f"{use(seaweed)}/careless"  # what rclone serves has no ranges: ckpt reads nothing back from it
    result = COMMANDS["shard"](model, out)
    assert "--no-conditional-writes: there was no protection against a second writer" in result.notes
    assert objects(out) == files_of(model / "shard")


@pytest.mark.parametrize("options", [{"engine": "dtensor"}, {"overwrite": True}])
def test_what_a_store_cannot_do_is_refused_before_it_is_asked(model: Path, options: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        api.shard(model / "model", "s3://bucket/refused", mesh="dp_shard=2", **options)


@pytest.mark.parametrize(("command", "last"), [("gather", "index.json"), ("shard", ".metadata")])
def test_marker_is_put_last(model, proxy, seaweed, use, command, last) -> None:
    proxy.arm(None)
    COMMANDS[command](model, f"{use(seaweed, proxy.url)}/last-{command}")
    puts = [seen.target for seen in proxy.seen if seen.method == "PUT" and "/.ckpt/" not in seen.target]
    assert puts[-1].endswith(last)
    assert puts[-2].endswith("ckpt_manifest.json")


def test_what_only_disks_take_makes_no_directory_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="only be written to this machine's disks"):
        Staging("s3://bucket/adapter", overwrite=False)
    assert not list(tmp_path.iterdir())


def test_dry_run_tells_what_it_would_cost_and_asks_for_a_listing_alone(model, proxy, seaweed, use, settings) -> None:
    settings(memory_bytes=3 * PART)
    out = f"{use(seaweed, proxy.url)}/dry"
    proxy.arm(None)
    note, reading = api.shard(model / "model", out, mesh="dp_shard=3", dry_run=True).notes
    assert [seen.method for seen in proxy.seen] == ["GET"]
    assert "in 2 passes" in note
    told = int(re.search(r"about (\d+) PUT", note)[1])
    proxy.arm(None)
    COMMANDS["shard"](model, out)
    made = sum(seen.method in ("PUT", "POST") for seen in proxy.seen)
    assert abs(told - made) <= 3, (told, made)
    assert re.fullmatch(r"reads .* 1\.\d\d × what is written; .* takes 0:00:0\d", reading), reading
    with pytest.raises(DestinationExistsError):
        api.shard(model / "model", out, mesh="dp_shard=3", dry_run=True)


def test_interrupted_run_continues(model, seaweed, use, settings) -> None:
    settings(memory_bytes=PART)
    out = f"{use(seaweed)}/interrupted"
    told = 0

    def stop(total: int) -> Callable[[int], None]:
        def advance(nbytes: int) -> None:
            nonlocal told
            told += nbytes
            if told > total // 2:
                raise KeyboardInterrupt

        return advance

    with pytest.raises(KeyboardInterrupt) as stopped:
        api.shard(model / "model", out, mesh="dp_shard=3", progress=stop, num_workers=1)
    assert any("the same command continues" in note for note in stopped.value.__notes__)
    with pytest.raises(UnreadableError, match="a write was not finished"):
        api.inspect(out)
    whole = COMMANDS["shard"](model, f"{out}-not")
    assert COMMANDS["shard"](model, out).bytes_read < whole.bytes_read
    assert objects(out) == files_of(model / "shard")


@pytest.mark.full
@pytest.mark.parametrize("command", ["shard", "sharded", "torch"])
def test_little_is_held_beside_the_parts(tmp_path, seaweed, use, monkeypatch, command) -> None:
    """Also where a file has its tensors in another order than the source, and where CRC-32s follow payloads."""
    block, workers = 64 << 10, 2
    many = {f"m{i:02d}": tensor(("BF16", "F32")[i % 2], 8, 1 << 16, seed=i) for i in range(8)}
    most = 0
    add = PartStream.add

    def watch(stream: PartStream, *arguments: Any) -> int:
        nonlocal most
        written = add(stream, *arguments)
        most = max(most, stream._held)
        return written

    with small_blocks(block):
        write_model(tmp_path / "model", many)
        monkeypatch.setattr(PartStream, "add", watch)
        out = f"{use(seaweed)}/held-{command}"
        if command == "torch":
            api.shard(tmp_path / "model", tmp_path / "run", mesh="dp_shard=2")
            api.gather(tmp_path / "run", out, to="torch", num_workers=workers)
        else:
            options = {"serialization": "safetensors"} if command == "sharded" else {}
            api.shard(tmp_path / "model", out, mesh="dp_shard=2", num_workers=workers, **options)
    assert 0 < most <= 4 * workers * block


@given_settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 40 << 20), max_size=20), st.integers(1, 300 << 20))
def test_passes_hold_every_file_once_and_fit(sizes: list[int], memory: int) -> None:
    runs = cut_passes(sizes, memory)
    assert [i for run in runs for i in run] == list(range(len(sizes)))
    for run in runs:
        assert len(run) == 1 or sum(upload.held_bytes_of(sizes[i]) for i in run) <= memory


@pytest.mark.full
def test_any_request_may_fail(model, proxy, seaweed, use, impatient, request) -> None:
    base = use(seaweed, proxy.url)
    proxy.arm(None)
    COMMANDS["shard"](model, f"{base}/sweep-nothing")
    cases = [(fault, at) for at in range(len(proxy.seen)) for fault in FAULTS]
    step = 1 if request.config.getoption("zoo") else 61
    _check_sweep(model, base, proxy, cases[::step])


@pytest.mark.full
def test_parts_on_a_store_give_the_bytes_of_one_process(model, seaweed, use, settings) -> None:
    """In any order and number of passes."""
    settings(memory_bytes=2 * PART)
    source, out = model / "model", f"{use(seaweed)}/in-parts"
    results = [api.shard(source, out, mesh="dp_shard=3", part=f"{index}/3") for index in (2, 0, 2)]
    with pytest.raises(DestinationExistsError):
        api.shard(source, out, mesh="dp_shard=3", part="0/4")
    results.append(api.shard(source, out, mesh="dp_shard=3", part="1/3"))
    with pytest.raises(DestinationExistsError):
        api.shard(source, out, mesh="dp_shard=5", part="0/3")
    assert [result.waiting_for for result in results] == [(0, 1), (1,), (1,), ()]
    assert (results[2].bytes_read, results[3].published) == (0, True)
    assert objects(out) == files_of(model / "shard")
    assert api.verify(out, against=source).ok


def test_refused_result_leaves_nothing(
    model: Path, seaweed: Server, use: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what was written nor the claim: another command may write there."""
    out = f"{use(seaweed)}/refused"

    def refuse(*_: object) -> None:
        raise CkptError("no")

    with monkeypatch.context() as patch:
        patch.setattr(finish, "_check_result", refuse)
        with pytest.raises(CkptError, match="no"):
            COMMANDS["shard"](model, out)
    assert objects(out) == {}
    assert COMMANDS["reshard"](model, out).published


def test_changed_bits_are_found_when_they_are_read_back(
    model: Path, proxy: Proxy, seaweed: Server, use: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else notices what a proxy, a cache or a store does to a body."""
    out = f"{use(seaweed, proxy.url)}/flipped"
    proxy.arm(None)
    COMMANDS["shard"](model, f"{out}-not")
    at = next(i for i, seen in enumerate(proxy.seen) if seen.method == "GET" and "distcp" in seen.target and seen.range)
    proxy.arm("flipped", at=at)
    with pytest.raises(StorageError, match="are not those sent"):
        COMMANDS["shard"](model, out)
    proxy.arm(None)
    assert COMMANDS["shard"](model, out).published
