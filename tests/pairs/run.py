"""All pairs of options, formats, roots and names: each row comes out right, bit for bit, or is refused with a way on.

    bin/pairs [N] [--seed S] [--only COMMAND]

Without N: rows of a covering array, for every command. With it: N random rows. Each is a command line on a toy Llama;
what it must write is computed by plain torch (`world.py`) and read by stock libraries. Exit code 1 with a wrong row.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import re
import shutil
import sys
import time
import traceback
import warnings
from collections import Counter
from functools import cache
from pathlib import Path

if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from formats.saved import Flat, flat
from oracle.run import difference
from oracle.seeds import load
from pairs.world import MAP, Model, cast, covering, hub, named, quantised, write
from samples import memory_directory

from ckpt_tools import cli

Row = dict[str, str]
NO = ""
"""The value of an option that is not given."""
_SOURCE = {
    "format": ("safetensors", "index", "dcp", "dcp-4", "hf-dcp", "pt", "ranks"),
    "root": (NO, "model.", "state.model.", "module."),
    "content": ("hub", "torchtitan", "map", "fp8"),
    "state": (NO, "optimizer"),
}
_CAST = {"dtype": (NO, "keep", "bf16", "f16", "f32"), "dtype-for": (NO, "**norm**=f32", "**down**=f16")}
_SELECT = {"include": (NO, "**norm**", "**.1.**"), "exclude": (NO, "**norm**")}
_SIZE = {"max-shard-size": (NO, "99999")}
_NAMES = {"names": (NO, "auto", "hub", "live", "torchtitan"), "map": (NO, "MAP")}
_MESH = {"mesh": ("dp_shard=2", "dp_shard=3", "dp_replicate=2,dp_shard=2", "dp_shard=2,tp=2"), "prefix": (NO, "new.")}
_MESH |= {"serialization": (NO, "safetensors"), "dequantize": (NO, "yes")}
COMMANDS = {
    "shard": _SOURCE | _CAST | _SELECT | _NAMES | _MESH,
    "reshard": _SOURCE | _CAST | _SELECT | _NAMES | _MESH,
    "gather": _SOURCE
    | _CAST
    | _SELECT
    | _NAMES
    | _SIZE
    | {"strip-prefix": (NO, "auto", "none", "ROOT"), "to": (NO, "torch"), "dequantize": (NO, "yes")}
    | {"quantize": (NO, "fp8"), "keep-precision": (NO, "**down**"), "allow-foreign-names": (NO, "yes")},
    "extract": _SOURCE | _CAST | _SELECT | _SIZE,
    "average": _SOURCE | _CAST | _SIZE,
    "rename": _SOURCE | _CAST | _SIZE | {"map": ("MAP",)},
}
"""Command → dimension → values; those of `_SOURCE` are no options."""
_BASE = {name: {"format": "dcp"} for name in ("reshard", "gather")} | {"extract": {"include": "**.1.**"}}
"""What a row has beside a pair, where that is not the first value."""


class Wrong(AssertionError):  # noqa: N818 - what it says is the row's verdict
    """A row came out wrong."""


def run_row(command: str, row: Row, work: Path) -> str:
    """Run one row; return "right" or why it was refused.

    Raises:
        Wrong: It is neither.
    """
    sources = [_source(work, row, 1.0)] + ([_source(work, row, 3.0)] if command == "average" else [])
    out = work / "out"
    shutil.rmtree(out, ignore_errors=True)
    argv = [command, *map(str, sources), str(out), *_options(row, work), "--json", "-j", "1"]
    said, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(errors), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            code = cli.main(argv)
        except Exception:
            raise Wrong(traceback.format_exc()) from None
    if code in (2, 4):
        return _check_refusal(command, json.loads(errors.getvalue().strip().splitlines()[-1])["error"], row)
    if code:
        raise Wrong(f"exit code {code}: {errors.getvalue()}")
    document = json.loads(said.getvalue())
    _check_result(command, row, out, document)
    return "right"


def _source(work: Path, row: Row, times: float) -> Path:
    key = "-".join(row[dim].strip(".") or "no" for dim in _SOURCE) + f"-{times:g}"
    path = work / "sources" / key
    if path.exists():
        return path / "m.pt" if row["format"] == "pt" else path
    model = _content(row["content"], times)[0]
    options = {"is_quantised": row["content"] == "fp8", "has_state": bool(row["state"])}
    return write(path, model, row["format"], row["root"], **options)


@cache
def _content(content: str, times: float) -> tuple[Model, Model]:
    """The model as it is stored, and as `--dequantize` must make it."""
    if content == "fp8":
        return quantised(hub(times))
    model = named(hub(times), content)
    return model, model


def _options(row: Row, work: Path) -> list[str]:
    (work / "map.txt").write_text(MAP)
    found = []
    for name, value in row.items():
        if name not in _SOURCE and value:
            text = {"MAP": str(work / "map.txt"), "ROOT": row["root"] or "auto"}.get(value, value)
            found += [f"--{name}"] if value == "yes" else [f"--{name}", text]
    return found


@cache
def _help(command: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        cli.main([command, "--help"])
    return said.getvalue()


def _check_refusal(command: str, error: dict, row: Row) -> str:
    """A hint must be there, and commands and options in it must exist."""
    hint = error.get("hint") or ""
    if not hint:
        raise Wrong(f"refused without a hint: {error}")
    meant = re.search(r"`ckpt ([a-z-]+) |^ckpt ([a-z-]+) [/A-Z]", hint)
    verb = meant and (meant[1] or meant[2])
    if verb and verb not in (*COMMANDS, "inspect", "verify", "diff", "merge-lora"):
        raise Wrong(f"the hint names no command: {error}")
    pages = _help(command) + (_help(verb) if verb else "")
    for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", hint):
        if option not in pages and "leave out" not in hint:
            raise Wrong(f"the hint names {option}, which there is not: {error}")
    return re.sub(r"'[^']*'|\d+|/\S+", "…", error["what"])[:120]


def _check_result(command: str, row: Row, out: Path, document: dict) -> None:
    said = " ".join(
        map(str, (*document.get("notes", ()), *document.get("warnings", ()), *document.get("not_checked", ())))
    )
    found = load(out)
    names_of = _names_of(command, row)
    foreign = bool(row.get("allow-foreign-names")) and row.get("names", NO) in (NO, "auto")
    if command == "gather" and (
        foreign or re.search("names are not of|the names are|not compared with an architecture", said)
    ):
        names_of += (row["content"],)  # kept, as asked or said
    wanted = [_expected(command, row, names) for names in names_of]
    for want in wanted:
        if (prefix := _prefix(found, want, row, command)) is not None:
            _check_said(command, row, prefix, said, found, want)
            break
    else:
        raise Wrong(f"wrong tensors: {difference(found, wanted[0])}; said: {said[:600]}")
    if limit := int(row.get("max-shard-size") or 0):
        sizes = [p.stat().st_size for p in out.iterdir() if p.suffix in (".safetensors", ".bin")]
        most = max(len(raw) for _, _, raw in found.values())
        if (not sizes and "max-shard-size" not in said) or (sizes and max(sizes) > max(limit, most) + 4000):
            raise Wrong(f"--max-shard-size {limit} is ignored: {sizes} bytes; said: {said[:300]}")
    if row.get("dequantize") and row["content"] != "fp8" and "quanti" not in said:
        raise Wrong(f"--dequantize changes nothing and is not said: {said[:300]}")


def _names_of(command: str, row: Row) -> tuple[str, ...]:
    """Whose names may be written, as contents; the source's own among them where options leave that open."""
    own = row["content"]
    stored = "hub" if own == "fp8" else own
    names = "map" if row.get("map") else row.get("names") or "auto"
    if command in (
        "extract",
        "average",
    ):  # what is neither DCP nor safetensors becomes safetensors, as `gather` does it
        return (stored,) if row["format"] in ("dcp", "dcp-4", "safetensors", "index") else ("hub", stored)
    if command == "rename":
        return ("map",)
    if command == "gather":
        return (stored,) if names == "live" else ("hub",)
    if names == "auto":
        return (stored,) if command == "reshard" else ("hub", stored)
    return ("hub", stored) if names == "hub" and command == "shard" else ("hub",) if names == "live" else (names,)


def _expected(command: str, row: Row, names: str) -> Flat:
    """What must be written below some prefix, computed by torch."""
    packed, plain = _content(row["content"], 1.0)
    if command == "average":
        packed = {name: (t.float() * 2).to(t.dtype) for name, t in packed.items()}
    model = plain if row.get("dequantize") else packed
    if row["content"] != "fp8":
        model = named(hub(2.0 if command == "average" else 1.0), names)
    elif names != "hub":  # what is not quantised, or decoded
        model = named(plain, names)
    units = frozenset(n for name in packed if name.endswith("_scale_inv") for n in (name, name[: -len("_scale_inv")]))
    skip = frozenset() if row.get("dequantize") else units
    taken = {name: tensor for name, tensor in model.items() if _is_taken(name, row)}
    return flat(cast(taken, row, skip=skip))


def _is_taken(name: str, row: Row) -> bool:
    def matches(glob: str) -> bool:
        return glob.strip("*").strip(".") in name.split(".") if ".1." in glob else glob.strip("*") in name

    return (not row.get("include") or matches(row["include"])) and not (row.get("exclude") and matches(row["exclude"]))


def _prefix(found: Flat, want: Flat, row: Row, command: str) -> str | None:
    """Return the prefix below which exactly what is wanted was written; other state may lie beside it."""
    for prefix in dict.fromkeys(
        (row.get("prefix", ""), row["root"], row.get("prefix", "") + row["root"], "", "model.")
    ):
        below = {name: value for name, value in found.items() if "optim." not in name}
        if row.get("quantize"):
            if _is_quantised(below, {prefix + name: value for name, value in want.items()}, row):
                return prefix
        elif below == {prefix + name: value for name, value in want.items()}:
            return prefix
    return None


def _is_quantised(found: Flat, want: Flat, row: Row) -> bool:
    """Linear layers in 8 bits that stand for about what they were, all else as it was."""
    keep = (row.get("keep-precision") or "**none**").strip("*")
    names = {name for name in want if name.endswith("_proj.weight") and keep not in name}
    if found.keys() != want.keys() | {f"{name}_scale_inv" for name in names}:
        return False
    for name, (dtype, shape, raw) in want.items():
        if name not in names:
            if found[name] != want[name]:
                return False
            continue
        packed = torch.frombuffer(bytearray(found[name][2]), dtype=torch.float8_e4m3fn).float().reshape(shape)
        scale = torch.frombuffer(bytearray(found[f"{name}_scale_inv"][2]), dtype=torch.float32)
        plain = torch.frombuffer(bytearray(raw), dtype=dtype).float().reshape(shape)
        if found[name][0] != torch.float8_e4m3fn or not torch.allclose(packed * scale, plain, rtol=0.07, atol=0.01):
            return False
    return True


def _check_said(command: str, row: Row, prefix: str, said: str, found: Flat, want: Flat) -> None:
    """What was stripped, left out or kept is said, and what an option says of the prefix is so."""
    strip, root = row.get("strip-prefix"), row["root"]
    if command == "gather":
        if strip == "none" and prefix != root:
            raise Wrong(f"--strip-prefix none, and the prefix is {prefix!r}; said: {said[:300]}")
        if strip == "ROOT" and prefix:
            raise Wrong(f"--strip-prefix {root}, and the prefix is {prefix!r}; said: {said[:300]}")
        if prefix != root and not strip and root != "module." and "strip" not in said and "took" not in said:
            raise Wrong(f"the prefix {root!r} has become {prefix!r}, which is not said: {said[:300]}")
    elif row.get("prefix") and not prefix.startswith(row["prefix"]):
        raise Wrong(f"--prefix {row['prefix']} is ignored: {[*found][:2]}")
    keeps = any("optim." in name for name in found)
    is_stored = row["state"] and row["format"] in ("dcp", "dcp-4", "hf-dcp", "pt")
    if is_stored and not keeps and not row.get("include") and not re.search("left out|non-tensor|optim", said):
        raise Wrong(f"optimizer state is gone without a word: {said[:300]}")


def rows_of(count: int | None, seed: int, only: str | None = None) -> list[tuple[str, Row]]:
    """All pairs of every command, or random rows."""
    rng = random.Random(seed)
    names = [only] if only else list(COMMANDS)
    if count is None:
        return [(name, row) for name in names for row in covering(COMMANDS[name], _BASE.get(name, {}), rng)]
    drawn = [rng.choice(names) for _ in range(count)]
    return [(name, {dim: _draw(values, rng) for dim, values in COMMANDS[name].items()}) for name in drawn]


def _draw(values: tuple[str, ...], rng: random.Random) -> str:
    """Most options are not given: many together are mostly refused for one of them."""
    return NO if NO in values and rng.random() < 0.7 else rng.choice(values)


def main() -> int:
    """Run rows, and print what came of them."""
    parser = argparse.ArgumentParser(prog="bin/pairs", description=__doc__.splitlines()[0])
    parser.add_argument("count", type=int, nargs="?", help="random rows (default: all pairs)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=list(COMMANDS))
    options = parser.parse_args()
    outcomes, wrong, began = Counter(), 0, time.monotonic()
    with memory_directory() as root:
        for command, row in rows_of(options.count, options.seed, options.only):
            try:
                outcome = run_row(command, row, Path(root))
            except Wrong as error:
                outcome, wrong = "WRONG", wrong + 1
                shown = " ".join(f"{dim}={value}" for dim, value in row.items() if value)
                print(f"WRONG {command} {shown}\n      {str(error)[-1500:]}", flush=True)
            outcomes[f"{command}: {outcome}"] += 1
    for outcome, n in sorted(outcomes.items(), key=lambda item: (item[0].partition(":")[0], -item[1])):
        print(f"{n:5d}  {outcome}")
    print(f"pairs: {outcomes.total()} rows, {wrong} wrong ({time.monotonic() - began:.0f} s)")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
