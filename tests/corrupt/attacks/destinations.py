"""Attacks on destinations: somebody else was there before."""

from __future__ import annotations

import os
from pathlib import Path

from corrupt.attacks.recipe import Case, attack, harmless


def _destination(title: str, tries: str, plant, code: int = 5, **options) -> None:
    codes = {**harmless(), "gather": (code,), "mesh": (code,)}

    @attack(f"destination-{title}", tries, codes, mesh_verb="shard", reference="hf", **options)
    def _build(case: Case) -> None:
        case.start_from("hf")
        for worker in ("gather", "mesh"):
            parent = case.root / "out" / worker
            parent.mkdir(parents=True)
            plant(case, parent, parent / "destination")


def _victim(case: Case) -> Path:
    path = case.root / "outside" / "victim"
    path.mkdir(exist_ok=True)
    (path / "model.safetensors").write_bytes(b"precious")
    (path / "__0_0.distcp").write_bytes(b"precious")
    return path


def _staging(destination: Path) -> Path:
    from ckpt_tools.storage.claim import staging_path

    return Path(staging_path(str(destination)))


FORCE = {"options": ("--overwrite",)}
# fmt: off
_destination("link-to-directory", "the destination is a link to a directory",
    lambda case, p, d: d.symlink_to(_victim(case)))
_destination("link-to-file", "the destination is a link to a file", lambda case, p, d: d.symlink_to(case.secret))
_destination("link-dangling", "the destination is a link to nothing",
    lambda case, p, d: d.symlink_to(case.root / "outside" / "new"))
_destination("link-overwritten", "the same with --overwrite", lambda case, p, d: d.symlink_to(_victim(case)), 2,
    **FORCE)
_destination("link-dangling-overwritten", "a link to nothing with --overwrite",
    lambda case, p, d: d.symlink_to(case.root / "outside" / "new"), 2, **FORCE)
_destination("not-a-checkpoint", "--overwrite of a directory that is no checkpoint",
    lambda case, p, d: (d.mkdir(), (d / "thesis.txt").write_text("precious")), 2, **FORCE)
_destination("staging-is-link", "the staging directory's name is a link",
    lambda case, p, d: _staging(d).symlink_to(_victim(case)), 1)
_destination("staging-is-file", "the staging directory's name is a file",
    lambda case, p, d: _staging(d).write_text("precious"), 1)
# fmt: on
_destination("staging-is-fifo", "the staging directory's name is a pipe", lambda case, p, d: os.mkfifo(_staging(d)), 1)


def _plant_links(case: Case, parent: Path, destination: Path) -> None:
    staging = _staging(destination)
    staging.mkdir()
    for name in (
        "model.safetensors",
        "__0_0.distcp",
        ".metadata",
        "ckpt_manifest.json",
        ".ckpt-journal",
        "config.json",
    ):
        (staging / name).symlink_to(_victim(case) / "model.safetensors")
    (staging / "directory").symlink_to(_victim(case))


_destination("staging-has-links", "links wait in the staging directory", _plant_links, 0)


def _plant_hard_links(case: Case, parent: Path, destination: Path) -> None:
    destination.mkdir()
    victim = _victim(case)
    for name in ("model.safetensors", "__0_0.distcp"):
        os.link(victim / name, destination / name)


_destination("hard-links-overwritten", "files of the old checkpoint have other names elsewhere", _plant_hard_links, 0,
    **FORCE)  # fmt: skip


def _plant_inner_links(case: Case, parent: Path, destination: Path) -> None:
    destination.mkdir()
    for name in ("model.safetensors", "__0_0.distcp", "config.json"):
        (destination / name).symlink_to(_victim(case) / "model.safetensors")
    (destination / "sub").symlink_to(_victim(case))
    (destination / ".metadata").write_bytes(b"x")


_destination("inner-links-overwritten", "links inside of the old checkpoint", _plant_inner_links, 0, **FORCE)
