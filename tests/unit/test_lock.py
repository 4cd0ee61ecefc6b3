"""`bin/requirements.lock`: what bin/setup installs is what the package asks for, with hashes, from no named place."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from itertools import pairwise
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCK = (ROOT / "bin" / "requirements.lock").read_text()
HASH = re.compile(r" {4}--hash=sha256:[0-9a-f]{64}")
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
# Asked of the metadata: `find_spec("pip")` makes setuptools take pip for running and hand out the standard library's
# distutils for the rest of the process, in which PEFT's BOFT then cannot be imported.
HAS_PIP = any(metadata.distributions(name="pip"))


def locked(python: str) -> dict[str, str]:
    """Name → version on Linux."""
    environment = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux",
                   "platform_machine": "x86_64", "platform_python_implementation": "CPython"}  # fmt: skip
    found = {}
    for line in LOCK.splitlines():
        if re.match(r"[a-zA-Z]", line):
            pin, _, marker = line.removesuffix(" \\").partition(" ; ")
            if not marker or Marker(marker).evaluate(environment):
                name, _, version = pin.partition("==")
                found[name] = version
    return found


def test_lock_names_versions_and_hashes_and_nothing_else():
    lines = LOCK.splitlines()
    assert lines[0].startswith("# What bin/setup installs")
    for before, line in pairwise(lines):
        if re.match(r"[a-zA-Z]", line):
            assert re.fullmatch(r"[a-z0-9-]+==\S+( ; .+)? \\", line), line
        else:
            assert HASH.match(line), line
            assert before.endswith("\\"), line  # no hash without a package
    assert "://" not in LOCK


@pytest.mark.parametrize("python", PYTHONS)
def test_lock_gives_what_the_package_asks_for(python: str):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    asked = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    asked += [line for name in ("dev", "hf", "qlora", "demo") for line in extras[name]]
    versions = locked(python)
    for requirement in map(Requirement, asked):
        version = versions.get(canonicalize_name(requirement.name))
        assert version is not None, requirement
        assert requirement.specifier.contains(version), requirement


@pytest.mark.full
@pytest.mark.skipif(not HAS_PIP, reason="this environment was made without pip")
def test_lock_with_another_hash_is_refused_by_pip(tmp_path: Path):
    """What bin/setup asks pip for, on a file of our own."""
    project = tmp_path / "thing-1.0.dist-info"
    project.mkdir()
    wheel = tmp_path / "thing-1.0-py3-none-any.whl"
    (project / "METADATA").write_text("Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n")
    (project / "WHEEL").write_text("Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    (project / "RECORD").write_text("")
    pack = "import sys, zipfile, pathlib; z = zipfile.ZipFile(sys.argv[1], 'w')\n"
    pack += "for f in pathlib.Path(sys.argv[2]).iterdir(): z.write(f, 'thing-1.0.dist-info/' + f.name)\nz.close()"
    subprocess.run([sys.executable, "-c", pack, wheel, project], check=True)
    lock = tmp_path / "requirements.lock"
    lock.write_text(f"thing==1.0 \\\n    --hash=sha256:{'0' * 64}\n")
    command = [sys.executable, "-m", "pip", "install", "--require-hashes", "--only-binary", ":all:", "--no-deps"]
    command += ["--no-index", "--find-links", tmp_path, "--dry-run", "--requirement", lock]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr
