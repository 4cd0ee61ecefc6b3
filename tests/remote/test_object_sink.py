"""What is written to a store is there whole or not at all, whatever happens to any one request."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from remote.fault_proxy import Fault, Proxy
from remote.servers import SECRETS, Server
from samples import MODEL, files_of, tensor, write_model

from ckpt_tools import api
from ckpt_tools.errors import CkptError, DestinationExistsError
from ckpt_tools.remote import object_sink, upload
from ckpt_tools.remote.object_sink import WriteSettings
from ckpt_tools.remote.store import Bucket

pytest.importorskip("obstore", reason="obstore is missing: pip install 'ckpt-tools[remote]'")

FAULTS: tuple[Fault, ...] = ("reset", "no-answer", "answer-lost", "error-body", "500", "503", "403", "409", "412")
PART = 5 << 20
"""The least that S3 takes."""
BIG = {**MODEL, "big": tensor("BF16", 5, 1 << 20, seed=7)}
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
    api.gather(root / "shard", root / "gather", max_shard_size="6MiB")
    api.gather(root / "shard", root / "single")
    api.gather(root / "shard", root / "torch", to="torch")
    return root


COMMANDS: dict[str, Callable[[Path, str], api.Conversion]] = {
    "shard": lambda root, out: api.shard(root / "model", out, mesh="dp_shard=3"),
    "reshard": lambda root, out: api.reshard(root / "shard", out, mesh="dp_shard=2,tp=2"),
    "gather": lambda root, out: api.gather(root / "shard", out, max_shard_size="6MiB"),
    "single": lambda root, out: api.gather(root / "shard", out),
    "torch": lambda root, out: api.gather(root / "shard", out, to="torch"),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("memory_parts", [200, 4, 1])
def test_same_bytes_as_on_a_disk(
    model: Path,
    seaweed: Server,
    use: Callable[..., str],
    settings: Callable[..., None],
    command: str,
    memory_parts: int,
) -> None:
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


@pytest.mark.full
def test_any_request_may_fail(
    model: Path, proxy: Proxy, seaweed: Server, use: Callable[..., str], impatient: None, request: pytest.FixtureRequest
) -> None:
    base = use(seaweed, proxy.url)
    proxy.arm(None)
    COMMANDS["shard"](model, f"{base}/sweep-nothing")
    cases = [(fault, at) for at in range(len(proxy.seen)) for fault in FAULTS]
    step = 1 if request.config.getoption("--zoo", default=False) else 7
    _check_sweep(model, base, proxy, cases[::step])
