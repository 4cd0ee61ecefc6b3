"""Peak memory of whole processes: small, and the same whatever the size of the model."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.full

MIB = 1 << 20
LAYER_NBYTES = 20 * MIB
LIMIT_BYTES = 200 * MIB
NUM_LAYERS = {"small": 10, "large": 30}  # 200 MiB and 600 MiB


def write_model(path, num_layers):
    """BF16 layers of 20 MiB: a header, and then a hole that the file system reads as zeros."""
    header = {"__metadata__": {"format": "pt"}}
    for i in range(num_layers):
        span = [i * LAYER_NBYTES, (i + 1) * LAYER_NBYTES]
        header[f"layers.{i}.weight"] = {"dtype": "BF16", "shape": [1024, 10240], "data_offsets": span}
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.seek(0, 2)
        file.truncate(file.tell() + num_layers * LAYER_NBYTES)


def peak_of(*arguments):
    """Run one command as a process of its own; return the peak that the kernel saw."""
    command = [sys.executable, "-m", "ckpt_tools", *map(str, arguments), "--json", "--num-workers", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    return document["peak_rss_bytes"], document


@pytest.fixture(scope="module")
def peaks(tmp_path_factory):
    """Size → verb → peak bytes."""
    found = {}
    for size, num_layers in NUM_LAYERS.items():
        directory = tmp_path_factory.mktemp(size)
        model = directory / "model.safetensors"
        try:
            write_model(model, num_layers)
            found[size] = {}
            columns = ["--set", "**=tp:S(1)"]
            steps = (
                ("shard", model, directory / "dp", "--mesh", "dp_shard=8"),
                ("reshard", directory / "dp", directory / "tp", "--mesh", "dp_shard=2,tp=2", *columns),
                ("gather", directory / "tp", directory / "full"),
            )
            for step in steps:
                found[size][step[0]], document = peak_of(*step)
                assert document["bytes_read"] == num_layers * LAYER_NBYTES
                if step[0] != "shard":
                    shutil.rmtree(step[1])
        finally:
            shutil.rmtree(directory)  # pytest would keep a gigabyte
    return found


@pytest.mark.parametrize("verb", ["shard", "reshard", "gather"])
def test_peak_memory_is_bounded(peaks, verb):
    # The interpreter alone needs some MiB: a number below that was not measured.
    assert 10 * MIB < peaks["small"][verb] < LIMIT_BYTES
    assert 10 * MIB < peaks["large"][verb] < LIMIT_BYTES


@pytest.mark.parametrize("verb", ["shard", "reshard", "gather"])
def test_peak_memory_does_not_depend_on_the_size(peaks, verb):
    # 15 %: how far four threads' buffers overlap in time varies from run to run.
    assert peaks["large"][verb] == pytest.approx(peaks["small"][verb], rel=0.15)
