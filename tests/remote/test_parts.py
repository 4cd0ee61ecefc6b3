"""Parts of a conversion on a store: the bytes of one process, in any order and number of passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from remote.servers import Server
from remote.test_object_sink import BIG, PART, objects
from samples import files_of, write_model

from ckpt_tools import api
from ckpt_tools.errors import DestinationExistsError
from ckpt_tools.storage.remote import object_sink, upload
from ckpt_tools.storage.remote.object_sink import WriteSettings

pytest.importorskip("obstore", reason="obstore is missing: pip install 'ckpt-tools[remote]'")


@pytest.fixture
def small_passes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(upload, "MIN_PART_BYTES", PART)
    object_sink.set_write_settings(WriteSettings(memory_bytes=2 * PART))
    yield
    object_sink.set_write_settings(WriteSettings())


@pytest.mark.full
@pytest.mark.usefixtures("small_passes")
def test_parts_on_a_store_give_the_bytes_of_one_process(
    tmp_path: Path, seaweed: Server, use: Callable[..., str]
) -> None:
    source = write_model(tmp_path / "model", BIG)
    api.shard(source, tmp_path / "one", mesh="dp_shard=6")
    out = f"{use(seaweed)}/in-parts"
    results = [api.shard(source, out, mesh="dp_shard=6", part=f"{index}/3") for index in (2, 0, 2)]
    with pytest.raises(DestinationExistsError):
        api.shard(source, out, mesh="dp_shard=6", part="0/4")
    results.append(api.shard(source, out, mesh="dp_shard=6", part="1/3"))
    with pytest.raises(DestinationExistsError):
        api.shard(source, out, mesh="dp_shard=5", part="0/3")
    assert [result.waiting_for for result in results] == [(0, 1), (1,), (1,), ()]
    assert (results[2].bytes_read, results[3].published) == (0, True)
    assert objects(out) == files_of(tmp_path / "one")
    assert api.verify(out, against=source).ok
