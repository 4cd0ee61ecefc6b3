"""Attacks through a save of DeepSpeed's: what its ranks say of their vectors, and what lies beside them.

All start from ZeRO-3 of three ranks, which DeepSpeed itself saved (`tests/formats/deepspeed.tar.xz`).
"""

from __future__ import annotations

import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from corrupt.attacks.recipe import Case, add, carried, harmless
from corrupt.attacks.zips import archive

from ckpt_tools.checkpoint.formats._pickle_objects import parse_exactly
from ckpt_tools.checkpoint.formats._pickle_values import Record, build_pickle

SAMPLES = Path(__file__).parents[2] / "formats" / "deepspeed.tar.xz"
SAVE = "zero3-bf16"
TAG = "global_step2"
OPTIMIZER = f"{TAG}/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
MODEL = f"{TAG}/zero_pp_rank_1_mp_rank_00_model_states.pt"


def start(case: Case) -> Path:
    """The sound save."""
    with tarfile.open(SAMPLES) as packed:
        for member in packed:
            if member.name.startswith(f"{SAVE}/") and "universal" not in member.name:
                packed.extract(member, case.source.parent, filter="data")
    (case.source.parent / SAVE).rename(case.source)
    (case.source / "wanted.json").unlink()
    return case.source


def change(file: Path, edit: Callable[[Any], object]) -> None:
    """Write a file's pickle anew, changed, around the same storages."""
    with zipfile.ZipFile(file) as found:
        entries = [(name, found.read(name)) for name in found.namelist()]
    changed = []
    for name, content in entries:
        if name.endswith("/data.pkl"):
            value = parse_exactly(content)
            edit(value)
            changed.append((name, build_pickle(value)))
        else:
            changed.append((name, content))
    file.write_bytes(archive(entries=changed))


def shell(case: Case) -> Record:
    """What would run a command."""
    return Record("os.system", (case.shell,), None, 0)


def _changed(title: str, tries: str, name: str, edit: Callable[[Case, Any], object], codes=None, **options) -> None:
    def build(case: Case) -> None:
        change(start(case) / name, lambda value: edit(case, value))

    add(f"deepspeed-{title}", tries, build, codes, **options)


def _state(value: Any) -> dict[Any, Any]:
    state = value["optimizer_state_dict"]
    assert isinstance(state, dict)
    return state


def _append(mapping: Record, value: object) -> None:
    """Put one more value into an OrderedDict."""
    mapping.content = [*(mapping.content or ()), "x", value]


def _grow(call: Record, times: int) -> None:
    """Let a vector claim more elements than its storage has."""
    name, kind, (storage, offset, (length,), *rest), state = call.args if len(call.args) == 4 else (0, 0, call.args, 0)
    grown = (storage, offset, (length * times,), *rest)
    call.args = (name, kind, grown, state) if len(call.args) == 4 else grown


SOUND = {**harmless(), "diff": (3,)}

add("deepspeed-sound", "nothing: what the others start from", start, SOUND)
_changed("exploit-stage", "the stage of ZeRO is a call", OPTIMIZER, lambda c, v: _state(v).update(zero_stage=shell(c)))
_changed("exploit-group", "a vector is a call", OPTIMIZER, lambda c, v: _state(v).update(fp32_flat_groups=[shell(c)]))
# fmt: off
_changed("exploit-beside", "an object that executes, beside all", OPTIMIZER, lambda c, v: v.update(x=shell(c)),
    carried(3))
_changed("exploit-module", "a weight of the model is a call", MODEL, lambda c, v: _append(v["module"], shell(c)),
    carried(3))
_changed("exploit-shape", "shapes of parameters are calls", MODEL, lambda c, v: v.update(param_shapes=[shell(c)]))
_changed("vector-long", "a vector longer than its storage", OPTIMIZER,
    lambda _, v: _grow(_state(v)["fp32_flat_groups"][0], 1000))
_changed("vector-endless", "a vector of 2^60 elements", OPTIMIZER,
    lambda _, v: _grow(_state(v)["fp32_flat_groups"][0], 1 << 58))
_changed("count", "a rank that says how many there are, and lies", OPTIMIZER,
    lambda _, v: _state(v).update(partition_count=1 << 62))
# fmt: on
_changed("no-vectors", "a rank without vectors", OPTIMIZER, lambda _, v: _state(v).update(fp32_flat_groups=[]))
_changed("no-state", "a rank without anything", OPTIMIZER, lambda _, v: v.clear())
_changed("world", "a rank of another world", MODEL, lambda _, v: v.update(dp_world_size=1 << 40))


def _latest(title: str, tries: str, content: bytes, **options) -> None:
    def build(case: Case) -> None:
        (start(case) / "latest").write_bytes(content)

    add(f"deepspeed-{title}", tries, build, **options)


_latest("latest-out", "latest leads out of the directory", b"../../outside", words="which is missing")
_latest("latest-root", "latest is an absolute path", b"/etc", words="which is missing")
_latest("latest-long", "latest has megabytes", b"x" * (4 << 20))
_latest("latest-terminal", "latest drives the terminal", b"\x1b]0;x\x07", words="which is missing")
