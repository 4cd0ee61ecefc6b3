"""What an attack is: how it is built, what it tries, and what every command must do with it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from samples import MODEL, shard_model, write_model

VERBS = ("inspect", "structure", "data", "diff", "gather", "mesh")
"""inspect; verify at either level; diff against a sound checkpoint; gather; shard or, of a sharded source, reshard."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One attack on disk."""

    root: Path
    """Directory of this case; everything below but the source and the destination's parent is out of bounds."""
    bases: Mapping[str, Path]
    """Sound checkpoints by name: see `build_bases`."""

    @property
    def source(self) -> Path:
        """The checkpoint."""
        return self.root / "in" / "source"

    @property
    def canary(self) -> Path:
        """A file that comes into being when a payload runs."""
        return self.root / "outside" / "canary"

    @property
    def secret(self) -> Path:
        """A sound safetensors file that nobody may open."""
        return self.root / "outside" / "secret.safetensors"

    @property
    def shell(self) -> str:
        """A command that makes the canary."""
        return f"touch {self.canary}"

    def start_from(self, base: str) -> Path:
        """Make the source a copy of a sound checkpoint."""
        shutil.copytree(self.bases[base], self.source, symlinks=True)
        return self.source


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One attack."""

    name: str
    tries: str
    """What it tries, in one line."""
    build: Callable[[Case], object]
    codes: Mapping[str, tuple[int, ...]]
    """Verb → exit codes that are right."""
    words: str = ""
    """What every refusal (4) must say, in lower case; "" for anything."""
    mesh_verb: str = "reshard"
    reference: str = "small"
    """The sound checkpoint that `diff` compares with."""
    source: str = "in/source"
    """SRC, relative to the case."""
    roots: tuple[str, ...] = ("in/source",)
    """Where files may be opened, relative to the case."""
    options: tuple[str, ...] = ()
    """Options of the conversions."""
    seconds: float = 10.0
    """Most processor time that one run may take."""


ALL: dict[str, Recipe] = {}


def refused(code: int = 4) -> dict[str, tuple[int, ...]]:
    """No command gets past the headers."""
    return dict.fromkeys(VERBS, (code,))


def harmless() -> dict[str, tuple[int, ...]]:
    """Strange, but sound: every command works. `diff` with the sound checkpoint may find that they differ."""
    return {**dict.fromkeys(VERBS, (0,)), "diff": (0, 3)}


def carried(diff: int = 0, mesh: int = 0) -> dict[str, tuple[int, ...]]:
    """A sound checkpoint with a pickle that would call something: `verify` says so, and what copies it does not."""
    return {**harmless(), "structure": (3,), "data": (3,), "diff": (diff, 3), "mesh": (mesh,)}


def found(*, inspect: int = 0, diff: int = 4, convert: int = 4, structure: int = 3) -> dict[str, tuple[int, ...]]:
    """The headers can be shown; `verify` finds what is wrong, and no conversion takes it."""
    return {
        "inspect": (inspect,),
        "structure": (structure,),
        "data": (3,),
        "diff": (diff, 3) if diff == 0 else (diff,),
        "gather": (convert,),
        "mesh": (convert,),
    }


def attack(
    name: str, tries: str, codes: Mapping[str, tuple[int, ...]] | None = None, **options
) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Register a function of a `Case` as a recipe; refused by default."""

    def register(build: Callable[..., object]) -> Callable[..., object]:
        add(name, tries, build, codes, **options)
        return build

    return register


def add(name: str, tries: str, build: Callable[[Case], object], codes=None, **options) -> None:
    """Register a recipe."""
    assert name not in ALL, name
    ALL[name] = Recipe(name=name, tries=tries, build=build, codes=refused() if codes is None else codes, **options)


@dataclass
class Corpus:
    """All attacks, built below one directory."""

    root: Path
    cases: dict[str, Case] = field(default_factory=dict)

    def build(self, only: str = "") -> None:
        """Run every recipe whose name begins with `only`."""
        bases = build_bases(self.root / "bases")
        for name, recipe in ALL.items():
            if not name.startswith(only):
                continue
            case = Case(root=self.root / "cases" / name, bases=bases)
            for part in ("in", "outside"):
                (case.root / part).mkdir(parents=True)
            shutil.copyfile(bases["hf"] / "model.safetensors", case.secret)
            recipe.build(case)
            self.cases[name] = case


def build_bases(root: Path) -> dict[str, Path]:
    """Write the sound checkpoints."""
    from corrupt.attacks import opcodes

    root.mkdir(parents=True)
    dcp = shard_model(root)
    plain = root / "plain"
    shutil.copytree(dcp, plain)
    (plain / "ckpt_manifest.json").unlink()
    sharded = root / "sharded"
    sharded.mkdir()
    for rank in range(2):
        (sharded / f"shard-0000{rank + 1}-model-00001-of-00001.safetensors").write_bytes(opcodes.hf_shard(rank))
    opcodes.write_run(root / "small")
    changed = {fqn: (dtype, shape, bytes(len(raw))) for fqn, (dtype, shape, raw) in MODEL.items()}
    write_model(root / "changed", changed)
    return {
        "small": root / "small",
        "changed": root / "changed",
        "dcp": dcp,
        "plain": plain,
        "hf": root / "model",
        "index": write_model(root / "index", num_files=2),
        "sharded": sharded,
    }
