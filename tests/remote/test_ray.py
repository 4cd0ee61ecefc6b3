"""`--on ray`: the parts of a conversion on a cluster of two nodes, one of which is lost; and what is refused without.

Ray is 240 MB and no dependency of the tests: `PYTHONPATH=DIR_WITH_RAY bin/test tests/remote/test_ray.py` runs them.
"""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from samples import files_of, tensor, write_model

import ckpt_tools
from ckpt_tools.cli import main
from ckpt_tools.convert.on_ray import convert_on_ray
from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.storage.claim import staging_path

has_ray = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not has_ray, reason="needs ray: pip install 'ckpt-tools[ray]'")


@pytest.mark.skipif(has_ray, reason="Ray is installed")
def test_without_ray_the_way_on_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        convert_on_ray(ckpt_tools.shard, {"source": tmp_path, "destination": tmp_path / "out"}, on="ray")
    assert "ckpt-tools[ray]" in (caught.value.hint or "")


@pytest.mark.parametrize(
    "words",
    [["--parts", "7"], ["--parts", "many"], ["--on", "ray", "--part", "0/2"], ["--on", "ray", "--dry-run"]],
    ids=" ".join,
)
def test_words_that_do_not_go_together(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["shard", str(tmp_path), str(tmp_path / "out"), "--mesh", "dp_shard=2", *words]) == 2
    assert "--part" in capsys.readouterr().err


@pytest.fixture(scope="module")
def cluster() -> Iterator[object]:
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    made.connect()
    yield made
    import ray

    ray.shutdown()
    made.shutdown()


@needs_ray
@pytest.mark.full
@pytest.mark.timeout(280)
@pytest.mark.filterwarnings("ignore")
def test_a_cluster_that_loses_a_node_writes_what_one_process_writes(cluster, tmp_path: Path) -> None:
    tensors = {f"layers.{i}.weight": tensor("BF16", 512, 2048, seed=i) for i in range(24)}
    source = write_model(tmp_path / "model", tensors)
    alone, together = tmp_path / "alone", tmp_path / "together"
    ckpt_tools.shard(source, alone, mesh="dp_shard=16")
    second = cluster.add_node(num_cpus=2, include_dashboard=False)
    cluster.wait_for_nodes()
    shared = Path(staging_path(str(together)), ".ckpt")

    def lose() -> None:
        ends = time.monotonic() + 120
        while not list(shared.glob("share-*")) and time.monotonic() < ends:
            time.sleep(0.01)
        cluster.remove_node(second, allow_graceful=False)

    thread = threading.Thread(target=lose)
    thread.start()
    said: list[str] = []
    given = {"source": source, "destination": together, "mesh": "dp_shard=16"}
    result = convert_on_ray(ckpt_tools.shard, given, on="ray", num_parts=16, say=said.append)
    thread.join()
    assert result.published
    assert said[-1] == "16 of 16 parts are done"
    assert files_of(together) == files_of(alone)
    assert ckpt_tools.verify(together, against=source).ok


@needs_ray
@pytest.mark.full
@pytest.mark.timeout(280)
@pytest.mark.filterwarnings("ignore")
def test_an_error_of_a_part_is_the_error(cluster, tmp_path: Path) -> None:
    given = {"source": tmp_path / "missing", "destination": tmp_path / "out", "mesh": "dp_shard=2"}
    with pytest.raises(UnreadableError, match="no such file"):
        convert_on_ray(ckpt_tools.shard, given, on="ray", num_parts=3)
    assert list(tmp_path.iterdir()) == []
