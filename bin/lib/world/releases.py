"""The releases that are pinned: fetched from the package index once, checked, unpacked outside the tree.

Nothing of a release is imported or run; that is why pip itself does not fetch them (it would ask an sdist's build code
for its metadata). The index is the one that pip is set up for, its pages are those of PEP 503.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import ssl
import subprocess
import sys
import tarfile
import tempfile
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

HERE = Path(__file__).resolve().parent
_SECONDS = 120


class IndexUnreachableError(Exception):
    """The package index did not answer, or has no such file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """One line of releases.tsv."""

    project: str
    version: str
    file: str
    sha256: str
    tree: Path | None = None
    """Where it lies unpacked, of one that is not from the index."""

    @property
    def name(self) -> str:
        """Return how the tables name it: verl-0.9.1."""
        return f"{self.project}-{self.version}"


def rows(path: Path) -> list[list[str]]:
    """Return the lines of a table, without comments."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line.split("\t") for line in lines if line and not line.startswith("#")]


def pinned() -> list[Release]:
    """Return releases.tsv."""
    return [Release(project=p, version=v, file=f, sha256=s) for p, v, f, s in rows(HERE / "releases.tsv")]


def cache_directory() -> Path:
    """Return where releases lie between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ckpt-world"


def unpacked(release: Release) -> Path:
    """Return the directory of a release, fetched if it is not there yet.

    Raises:
        IndexUnreachableError: It is not there, and the index cannot be asked.
    """
    if release.tree is not None:
        return release.tree
    home = cache_directory() / release.sha256[:16]
    if not home.is_dir():
        home.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home.parent) as scratch:
            archive = Path(scratch) / release.file
            _fetch(release, archive)
            _unpack(archive, Path(scratch) / "tree")
            os.rename(Path(scratch) / "tree", home)
    inner = list(home.iterdir())
    # An sdist holds one directory; a wheel holds packages.
    return inner[0] if release.file.endswith(".tar.gz") and len(inner) == 1 else home


def given_release(project: str, path: Path) -> Release:
    """Return a release that lies on this machine: a directory, a wheel or an sdist."""
    if not path.is_dir():
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        home = cache_directory() / sha256[:16]
        if not home.is_dir():
            home.parent.mkdir(parents=True, exist_ok=True)
            _unpack(path, home)
        version = path.name.removesuffix(".tar.gz").split("-")[1]
        return Release(project=project, version=version, file=path.name, sha256=sha256)
    return Release(project=project, version=f"at {path}", file="", sha256="", tree=path)


def newest_release(project: str) -> Release:
    """Return the newest final release of a project on the index: its sdist, or a wheel where it has none.

    Raises:
        IndexUnreachableError: The index cannot be asked, or has none.
    """
    from packaging.version import InvalidVersion, Version

    best: tuple[Version, bool, Release] | None = None
    for link in _links(project):
        file = urllib.parse.unquote(urllib.parse.urlsplit(link).path).rpartition("/")[2]
        sha256 = urllib.parse.urlsplit(link).fragment.removeprefix("sha256=")
        text = file.removesuffix(".tar.gz").rpartition("-")[2] if file.endswith(".tar.gz") else file.split("-")[1:2]
        try:
            version = Version(text if isinstance(text, str) else "".join(text))
        except InvalidVersion:
            continue
        is_sdist = file.endswith(".tar.gz")
        if version.is_prerelease or not (is_sdist or file.endswith(".whl")) or len(sha256) != 64:
            continue
        if best is None or (version, is_sdist) > best[:2]:
            release = Release(project=project, version=str(version), file=file, sha256=sha256)
            best = (version, is_sdist, release)
    if best is None:
        raise IndexUnreachableError(f"the index has no release of {project}")
    return best[2]


def _unpack(archive: Path, to: Path) -> None:
    if archive.name.endswith(".whl"):
        with zipfile.ZipFile(archive) as packed:
            packed.extractall(to)
        return
    with tarfile.open(archive) as packed:
        packed.extractall(to, filter="data")


def _fetch(release: Release, to: Path) -> None:
    url = _address(release)
    print(f"world: fetching {release.file}", file=sys.stderr, flush=True)
    try:
        with _open(url) as answer, to.open("wb") as out:
            shutil.copyfileobj(answer, out)
    except (OSError, urllib.error.URLError) as error:
        raise IndexUnreachableError(f"{release.file}: {error}") from error
    found = hashlib.sha256(to.read_bytes()).hexdigest()
    if found != release.sha256:
        raise IndexUnreachableError(f"{release.file} has sha256 {found}, releases.tsv says {release.sha256}")


def _address(release: Release) -> str:
    for link in _links(release.project):
        if urllib.parse.unquote(urllib.parse.urlsplit(link).path).rpartition("/")[2] == release.file:
            return link
    raise IndexUnreachableError(f"the index has no {release.file}")


def _links(project: str) -> list[str]:
    """Return the addresses of a project's files, with their hashes as fragments."""
    page = f"{_index().rstrip('/')}/{project}/"
    try:
        with _open(page) as answer:
            links = _Links()
            links.feed(answer.read().decode("utf-8", "replace"))
    except (OSError, urllib.error.URLError) as error:
        raise IndexUnreachableError(f"{project}: {error}") from error
    return [urllib.parse.urljoin(page, link) for link in links.found]


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.found += [value for name, value in attrs if name == "href" and value]


def _open(url: str):
    context = ssl.create_default_context(cafile=os.environ.get("PIP_CERT")) if url.startswith("https:") else None
    request = urllib.request.Request(url, headers={"Accept": "text/html"})
    return urllib.request.urlopen(request, timeout=_SECONDS, context=context)


def _index() -> str:
    """Return the index that pip would ask."""
    asked = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True, text=True, check=False
    )
    if os.environ.get("PIP_INDEX_URL"):
        return os.environ["PIP_INDEX_URL"]
    if asked.returncode == 0 and asked.stdout.strip():
        return asked.stdout.strip()
    from pip._internal.models.index import PyPI

    return str(PyPI.simple_url)
