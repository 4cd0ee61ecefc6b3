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
    fields = ("project", "version", "file", "sha256")
    return [Release(**dict(zip(fields, row, strict=True))) for row in rows(HERE / "releases.tsv")]


def cache_directory() -> Path:
    """Return where releases lie between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ckpt-world"


def unpacked(release: Release) -> Path:
    """Return the directory of a release, fetched if it is not there yet.

    Raises:
        IndexUnreachableError: It is not there, and the index cannot be asked.
    """
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
    page = f"{_index().rstrip('/')}/{release.project}/"
    try:
        with _open(page) as answer:
            links = _Links()
            links.feed(answer.read().decode("utf-8", "replace"))
    except (OSError, urllib.error.URLError) as error:
        raise IndexUnreachableError(f"{release.project}: {error}") from error
    for link in links.found:
        if urllib.parse.unquote(urllib.parse.urlsplit(link).path).rpartition("/")[2] == release.file:
            return urllib.parse.urljoin(page, link)
    raise IndexUnreachableError(f"the index has no {release.file}")


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
