"""The shim, compiled once per session, and a server that runs commands under it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.harness import Server
from samples import memory_directory, tensor, write_model

from ckpt_tools import api

SHIM = Path(__file__).parent / "shim" / "shim.c"


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The preload library; skips when nothing can compile it."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler: the fault tests preload a small library (install cc)")
    library = tmp_path_factory.mktemp("shim") / "shim.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SHIM), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return library


@pytest.fixture(scope="session")
def memory() -> Iterator[Path]:
    """A directory in memory, where an fsync costs nothing."""
    with memory_directory() as directory:
        yield Path(directory)


TINY = {
    "model.a.weight": tensor("F32", 6, 4, seed=1),
    "model.b.weight": tensor("BF16", 4, 6, seed=2),
    "model.step": tensor("I64", seed=3),
}
"""Few tensors, so that a run makes few calls: cut, and on one rank alone."""


@pytest.fixture(scope="session")
def sources(memory: Path) -> dict[str, Path]:
    """What the commands of the sweep read: by verb."""
    hf = write_model(memory / "hf", TINY, num_files=2, assets={"config.json": b"{}\n"})
    run = memory / "run"
    api.shard(hf, run, mesh="dp_shard=2", num_workers=1)
    return {"shard": hf, "gather": run, "reshard": run}


OPTIONS = {"shard": ("--mesh", "dp_shard=2"), "gather": (), "reshard": ("--mesh", "dp_shard=3")}
"""What every verb needs besides source and destination."""


@pytest.fixture(scope="session")
def server(shim: Path, sources: dict[str, Path], memory: Path) -> Iterator[Server]:
    """Runs commands under the shim."""
    warm_up = []
    for verb, source in sources.items():
        argv = [verb, str(source), str(memory / f"warm-{verb}"), *OPTIONS[verb], "-j", "2"]
        warm_up += [argv, [*argv, "--overwrite"]]
    server = Server(shim, warm_up)
    yield server
    server.close()


@pytest.fixture(scope="session")
def references(sources: dict[str, Path], memory: Path) -> dict[str, Path]:
    """What every verb makes of its source when nothing goes wrong."""
    made = {}
    for verb, source in sources.items():
        made[verb] = memory / f"reference-{verb}"
        if verb == "gather":
            api.gather(source, made[verb], num_workers=2)
        else:
            getattr(api, verb)(source, made[verb], mesh=OPTIONS[verb][1], num_workers=2)
        assert api.verify(made[verb], level="data").ok
    return made


@pytest.fixture
def case(memory: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A directory in memory for the cases of one test, below what the shim watches."""
    path = memory / f"cases-{abs(hash(request.node.name))}"
    path.mkdir()
    yield path
    shutil.rmtree(path)


def pytest_terminal_summary(terminalreporter) -> None:
    """Say how many points the sweeps went through."""
    passed = terminalreporter.stats.get("passed", ())
    points = [value for report in passed for name, value in report.user_properties if name == "points"]
    if points:
        terminalreporter.write_line(f"fault sweeps: {len(points)} kinds, {sum(points)} points, nothing lost")
