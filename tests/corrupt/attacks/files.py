"""Attacks through the file system: links, pipes and names of files."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
from pathlib import Path

from corrupt.attacks.opcodes import item, text, write_run
from corrupt.attacks.recipe import Case, add, attack, found, harmless, refused

CARRIED = {**harmless(), "gather": (4,), "mesh": (4,)}
"""A conversion meets the file when it carries the assets along."""


def _replace(path: Path, target: str | Path) -> None:
    path.unlink()
    path.symlink_to(target)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


# Sources


def _file(title: str, tries: str, plant, codes=None, name: str = "__0_0.distcp", **options) -> None:
    """`plant` does something to one file of a sound DCP directory."""

    def build(case: Case) -> None:
        write_run(case.source)
        plant(case, case.source / name)

    add(title, tries, build, found() if codes is None else codes, **options)


def _link_out(case: Case, file: Path, target: str | Path = "../../outside/data") -> None:
    """Move a file out, and let a link lead there."""
    shutil.move(file, case.root / "outside" / "data")
    file.symlink_to(target)


def _link_inside(case: Case, file: Path) -> None:
    file.rename(case.source / "data.distcp")
    file.symlink_to("data.distcp")


def _link_chain(case: Case, file: Path) -> None:
    _link_out(case, file, "b")
    (case.source / "b").symlink_to("../../outside/data")


def _socket(case: Case, file: Path) -> None:
    file.unlink()
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(case.source)  # a socket's path is short
        try:
            server.bind(file.name)
        finally:
            os.chdir(here)


# fmt: off
_file("link-metadata-out", ".metadata is a link to somewhere else", _link_out, refused(), ".metadata",
    words="leads out")
_file("link-data-out", "a data file is a link to somewhere else", _link_out, words="leads out")
_file("link-data-absolute", "a data file is an absolute link",
    lambda case, file: _link_out(case, file, case.root / "outside" / "data"), words="leads out")
_file("link-inside", "a data file is a link to another inside: legal", _link_inside, harmless())
_file("link-chain", "a chain of links that ends outside", _link_chain, words="leads out")
_file("link-loop", "a link to itself", lambda case, file: _replace(file, file.name))
_file("link-dangling", "a link to nothing", lambda case, file: _replace(file, "nowhere"))
_file("link-to-directory", "a data file is a link to its own directory", lambda case, file: _replace(file, "."))
for device in ("/dev/zero", "/dev/tty", "/dev/random", "/proc/self/mem", "/proc/self/fd/0",
               "/proc/self/root/etc/passwd"):
    _file(f"link-{device[1:].replace('/', '-')}", f"a data file is a link to {device}",
        lambda case, file, device=device: _replace(file, device))
_file("fifo-data", "a data file is a pipe that nobody writes to", lambda case, file: _pipe(file))
_file("fifo-metadata", ".metadata is a pipe", lambda case, file: _pipe(file), refused(), ".metadata")
_file("fifo-metadata-forced", ".metadata is a pipe, and --from dcp insists", lambda case, file: _pipe(file), refused(),
    ".metadata", options=("--from", "dcp"))
_file("socket-data", "a data file is a socket", _socket)
_file("directory-data", "a data file is a directory", lambda case, file: (file.unlink(), file.mkdir()))
_file("directory-metadata", ".metadata is a directory", lambda case, file: (file.unlink(), file.mkdir()), refused(),
    ".metadata")
_file("hard-link", "a data file has another name outside: legal, and must not change",
    lambda case, file: os.link(file, case.root / "outside" / "data"), harmless())
_file("sparse-data", "a data file of a terabyte, nearly all hole", lambda case, file: os.truncate(file, 1 << 40),
    harmless())
# fmt: on


@attack("link-directory-out", "a data file lies in a directory that is a link out", found())
def _link_directory(case: Case) -> None:
    write_run(case.source, path=text("sub/__0_0.distcp"))
    (case.root / "outside" / "__0_0.distcp").write_bytes(item())
    (case.source / "sub").symlink_to("../../outside")


@attack("source-empty", "an empty directory")
def _empty(case: Case) -> None:
    case.source.mkdir()


@attack("source-names", "directories of other tools, named to drive the terminal", words="a directory of checkpoints")
def _names(case: Case) -> None:
    (case.source / "pytorch_model_fsdp\x1b[2J\u202e").mkdir(parents=True)
    (case.source / "pytorch_model_fsdp\x1b[2J\u202e" / ".metadata").write_bytes(b"")


@attack(
    "source-checkpoints", "a directory of checkpoints, named to drive the terminal", words="directory of checkpoints"
)
def _checkpoints(case: Case) -> None:
    (case.source / "step-1\x1b[2J\u202e\n").mkdir(parents=True)
    (case.source / "step-1\x1b[2J\u202e\n" / ".metadata").write_bytes(b"")


@attack("source-pickles", "pickled weights", words="does not execute")
def _pickles(case: Case) -> None:
    case.source.mkdir()
    (case.source / "pytorch_model.bin").write_bytes(b"\x80\x02cos\nsystem\nX\x02\0\0\0id\x85R.")


# The cache of the hub


def _cache(case: Case) -> tuple[Path, Path]:
    """A repository of the hub's cache: its directory, and a snapshot of links."""
    repo = case.root / "hub" / "models--org--name"
    snapshot = repo / "snapshots" / "0123456789abcdef"
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    for path in case.bases["index"].iterdir():
        raw = path.read_bytes()
        blob = hashlib.sha256(raw).hexdigest()
        (repo / "blobs" / blob).write_bytes(raw)
        (snapshot / path.name).symlink_to(f"../../blobs/{blob}")
    return repo, snapshot


HUB = {
    "source": "hub/models--org--name/snapshots/0123456789abcdef",
    "roots": ("hub/models--org--name/snapshots/0123456789abcdef", "hub/models--org--name/blobs"),
    "mesh_verb": "shard",
    "reference": "hf",
}
FIRST = "model-00001-of-00002.safetensors"


@attack("hub-cache", "a snapshot of the hub's cache, all links: legal", harmless(), **HUB)
def _hub(case: Case) -> None:
    _cache(case)


@attack(
    "hub-cache-by-link", "the same through a link to the snapshot: legal", harmless(), **{**HUB, "source": "in/source"}
)
def _hub_link(case: Case) -> None:
    _, snapshot = _cache(case)
    case.source.symlink_to(snapshot)


@attack("hub-cache-other-repository", "a link into another repository", words="leads out", **HUB)
def _hub_other(case: Case) -> None:
    repo, snapshot = _cache(case)
    other = repo.parent / "models--other--private" / "blobs"
    other.mkdir(parents=True)
    shutil.copyfile(snapshot / FIRST, other / "abc")
    _replace(snapshot / FIRST, "../../../models--other--private/blobs/abc")


@attack("hub-cache-through-blobs", "a link that passes the blobs and goes on", words="leads out", **HUB)
def _hub_through(case: Case) -> None:
    _, snapshot = _cache(case)
    _replace(snapshot / FIRST, "../../blobs/../../../outside/secret.safetensors")


@attack("hub-cache-refs", "a link to another part of the repository", words="leads out", **HUB)
def _hub_refs(case: Case) -> None:
    repo, snapshot = _cache(case)
    shutil.copyfile(snapshot / FIRST, repo / "refs")
    _replace(snapshot / FIRST, "../../refs")


@attack("hub-cache-blob-link", "a blob that is itself a link out", words="leads out", **HUB)
def _hub_blob(case: Case) -> None:
    repo, snapshot = _cache(case)
    _replace(repo / "blobs" / os.path.basename(os.readlink(snapshot / FIRST)), case.secret)


@attack("hub-cache-no-cache", "links to blobs where there is no cache", words="leads out", mesh_verb="shard")
def _hub_none(case: Case) -> None:
    case.start_from("hf")
    blobs = case.root / "blobs"
    blobs.mkdir()
    shutil.move(case.source / "model.safetensors", blobs / "abc")
    (case.source / "model.safetensors").symlink_to("../../blobs/abc")


# Assets


def _asset(title: str, tries: str, plant, codes=None, **options) -> None:
    @attack(
        f"asset-{title}", tries, harmless() if codes is None else codes, mesh_verb="shard", reference="hf", **options
    )
    def _build(case: Case) -> None:
        plant(case, case.start_from("hf"))


# fmt: off
_asset("link-out", "config.json is a link to somewhere else",
    lambda case, source: _replace(source / "config.json", case.secret), CARRIED, words="leads out")
_asset("link-passwd", "vocab.txt is a link to a file of the system",
    lambda case, source: (source / "vocab.txt").symlink_to("/etc/passwd"), CARRIED, words="leads out")
_asset("link-dangling", "a link to nothing: left out",
    lambda case, source: (source / "vocab.txt").symlink_to("nowhere"))
_asset("directory-link-out", "a directory that is a link out: not followed",
    lambda case, source: (source / "sub").symlink_to("../../outside"))
_asset("directory-loop", "a directory that is a link to its parent: not followed",
    lambda case, source: (source / "sub").symlink_to("."))
_asset("fifo", "a pipe: left out", lambda case, source: os.mkfifo(source / "vocab.txt"))
_asset("deep", "directories twenty deep", lambda case, source: (source / "/".join("d" * 20)).mkdir(parents=True))
_asset("named-metadata", "an asset named .metadata turns the format around",
    lambda case, source: (source / ".metadata").write_bytes(b"x"), dict.fromkeys(harmless(), (4,)))
_asset("named-data", "an asset named __0_0.distcp: left out",
    lambda case, source: (source / "__0_0.distcp").write_bytes(b"x"),
    {**harmless(), "structure": (0, 3), "data": (0, 3)})
_asset("named-manifest", "an asset named ckpt_manifest.json",
    lambda case, source: (source / "ckpt_manifest.json").write_bytes(b"x"), dict.fromkeys(harmless(), (4,)),
    words="manifest")
_asset("named-manifest-below", "ckpt_manifest.json in a directory below: an asset like any",
    lambda case, source: ((source / "sub").mkdir(), (source / "sub" / "ckpt_manifest.json").write_bytes(b"x")))
_asset("named-staging", "an asset in a directory named as staging: hidden, left out",
    lambda case, source: ((source / ".ckpt-tmp-0").mkdir(), (source / ".ckpt-tmp-0" / "x").write_bytes(b"x")))
_asset("named-journal", "an asset named as the journal",
    lambda case, source: (source / ".ckpt-journal").write_bytes(b"x"), {**harmless(), "gather": (0, 4), "mesh": (0, 4)})
_asset("named-escape", "an asset named to drive the terminal",
    lambda case, source: (source / "\x1b[2J\u202e\n.txt").write_bytes(b"x"))
_asset("named-latin", "an asset whose name is not UTF-8",
    lambda case, source: Path(os.fsdecode(os.fsencode(source) + b"/\xff\xfe.txt")).write_bytes(b"x"))
_asset(
    "named-weights",
    "a directory named as a file that gather writes",
    lambda case, source: (
        (source / "model-00001-of-00002.safetensors").mkdir(),
        (source / "model-00001-of-00002.safetensors" / "config.json").write_bytes(b"x"),
    ),
)
_asset("script", "a script: carried along, never run",
    lambda case, source: (source / "modeling_evil.py").write_text(f"open({str(case.canary)!r}, 'w')"))
# fmt: on
_asset(
    "automap",
    "a config that asks for remote code",
    lambda case, source: (source / "config.json").write_text(
        '{"auto_map": {"AutoModel": "modeling_evil.Evil"}, "architectures": ["os.system"]}'
    ),
)
_asset(
    "sitecustomize",
    "modules that Python imports by itself",
    lambda case, source: [
        (source / name).write_text(f"open({str(case.canary)!r}, 'w')")
        for name in ("sitecustomize.py", "json.py", "numpy.py")
    ],
)
