"""docs/reference/schemas: a JSON Schema of the `--json` document of every command, and of an error.

Shapes that a document takes over whole come from their dataclasses; the rest is stated here, and tests/library compares
both with what the commands print.
"""

from __future__ import annotations

import collections
import collections.abc
import dataclasses
import json
import types
import typing
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from api_pages import field_docs

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.checkpoint.formats._pickle_names import Verdict
from ckpt_tools.checkpoint.formats.scan import Executable, NotRead
from ckpt_tools.checkpoint.identity import Identity
from ckpt_tools.checkpoint.summarise import MeshSource
from ckpt_tools.checks.diff import Difference
from ckpt_tools.checks.stats import Spectrum
from ckpt_tools.checks.verify import Cause
from ckpt_tools.estimate.case import Case, Margin
from ckpt_tools.estimate.report import Memory, Moment
from ckpt_tools.hub.plan import PushResult
from ckpt_tools.options.common import Level
from ckpt_tools.preflight.report import CheckResult
from ckpt_tools.preflight.smoke.report import ReloadResult, SmokeReport
from ckpt_tools.preflight.spec import ParallelSpec
from ckpt_tools.results import SCHEMA_VERSION
from ckpt_tools.runs.manage import PruneResult
from ckpt_tools.runs.retention import RunCheckpoint
from ckpt_tools.transfer.split import Part

Schema = dict[str, Any]
DEFS: dict[str, Schema] = {}
"""Name of a dataclass → its schema."""
_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", types.NoneType: "null"}
_ARRAYS = (tuple, list, frozenset, collections.abc.Sequence)
_OBJECTS = (dict, collections.Counter, collections.abc.Mapping)
VERSION: Schema = {"const": SCHEMA_VERSION}


def of(kind: Any) -> Schema:
    """The schema of a type."""
    origin, inner = typing.get_origin(kind) or kind, typing.get_args(kind)
    if kind in (Any, object):
        return {}
    if origin in _PLAIN:
        return {"type": _PLAIN[origin]}
    if origin is typing.Literal:
        return {"enum": list(inner)}
    if origin in (typing.Union, types.UnionType):
        return any_of(*map(of, inner))
    if origin in _OBJECTS:
        return mapping(of(inner[-1]) if origin is not collections.Counter else of(int))
    if origin in _ARRAYS:
        return array(of(inner[0]))
    if dataclasses.is_dataclass(origin):
        return _ref(typing.cast("type", origin))
    raise TypeError(f"no schema of {kind}")


def any_of(*kinds: Schema) -> Schema:
    """One of several."""
    if all(kind.keys() == {"type"} for kind in kinds):
        return {"type": [kind["type"] for kind in kinds]}
    return {"anyOf": list(kinds)}


def maybe(kind: Schema) -> Schema:
    """Or null."""
    return any_of(kind, of(None.__class__))


def array(kind: Schema) -> Schema:
    """Several."""
    return {"type": "array", "items": kind}


def mapping(kind: Schema) -> Schema:
    """By name."""
    return {"type": "object", "additionalProperties": kind}


def record(fields: Mapping[str, Any]) -> Schema:
    """An object with these fields; a name that ends in ? need not be there."""
    shapes = {name.rstrip("?"): kind if isinstance(kind, dict) else of(kind) for name, kind in fields.items()}
    return {
        "type": "object",
        "properties": shapes,
        "required": [name for name in fields if not name.endswith("?")],
    }


def fields_of(kind: type, *, leave: tuple[str, ...] = (), **changes: Any) -> dict[str, Any]:
    """The fields of a dataclass as `asdict` gives them, with what a document changes of them."""
    # Fields that a document changes may be of types that cannot be looked up.
    here = dict.fromkeys(("SmokeSetting", "Options"), Any)
    hints, docs = typing.get_type_hints(kind, localns=here), field_docs(kind)
    found = {}
    for each in dataclasses.fields(kind):
        if each.name in leave:
            continue
        shape = changes.pop(each.name, None) or of(hints[each.name])
        found[each.name] = {**shape, "description": docs[each.name]} if each.name in docs else shape
    return found | changes


def _ref(kind: type) -> Schema:
    if kind.__name__ not in DEFS:
        DEFS[kind.__name__] = {}  # a type may hold itself
        summary = (kind.__doc__ or "").splitlines()[0]
        DEFS[kind.__name__] = {"description": summary} | record(fields_of(kind))
    return {"$ref": f"#/$defs/{kind.__name__}"}


STRINGS = of(tuple[str, ...])
FINDINGS = of(tuple[Finding, ...])
IDENTITIES = of(tuple[Identity, ...])
IDENTITY = maybe(of(Identity))
COUNTS = record(dict.fromkeys(("tensors", "elements", "nan", "inf", "zero"), int))
BYTES = {"file": str, "bytes": int}
MEMORY = record(fields_of(Memory, leave=("moments",)))
UPDATE = record({"changed": int, "relative": float | None, "cosine": float | None})
NUMBERS = of(tuple[float | None, ...])
FLOATS = of(Mapping[str, float | None])

INSPECT = {
    "path": str, "format": str, "identity": IDENTITY, "names": str | None, "num_tensors": int, "num_elements": int,
    "total_bytes": int, "num_chunks": int, "num_files": int, "dtypes": of(Mapping[str, int]),
    "ranks": array(record({"rank": int, "files": STRINGS, "num_chunks": int, "bytes": int})),
    "imbalance": float | None,
    "files": array(record({"file": str, "nbytes": int | None, "num_chunks": int, "bytes": int})),
    "blobs": array(record({
        "fqn": str, "file": str, "offset": int, "nbytes": int, "census": maybe(of(Mapping[str, int])),
        "holds": str | None,
    })),
    "objects": of(Mapping[str, int]), "assets": array(record({"file": str, "nbytes": int})),
    "prefixes": array(record({"prefix": str, "num_tensors": int, "num_elements": int, "bytes": int})),
    "mesh": maybe(of(Mapping[str, int])), "mesh_source": maybe(of(MeshSource)), "virtual": bool,
    "contents": array(record({"name": str, "nbytes": int, "what": str})),
    "tensors?": array(record({
        "fqn": str, "dtype": str, "shape": of(tuple[int, ...]), "placements": maybe(of(Mapping[str, str])),
        "chunks": array(record({
            "rank": int | None, "offsets": of(tuple[int, ...]), "sizes": of(tuple[int, ...]), "file": str,
            "offset": int | None, "nbytes": int,
        })),
    })),
}  # fmt: skip
VERIFY = {
    "ok": bool, "identities": IDENTITIES, "level": of(Level), "part?": of(Part),
    "checked": record({"tensors": int, "chunks": int, "bytes": int, "values": maybe(COUNTS)}),
    "objects": of(Mapping[str, int]), "not_checked": STRINGS, "read": array(record(BYTES)),
    "not_read": array(record({**BYTES, "why": str})),
    "causes": array(record(fields_of(Cause, count=of(int)))), "findings": FINDINGS,
}  # fmt: skip
ERROR = {
    "error": record({"code": str, "what": str, "where": str | None, "hint": str | None}), "exit_code": int,
}  # fmt: skip
DIFF = {"equal": bool, **fields_of(Difference, leave=("same",))}
STATS = {
    "ok": bool, "identities": IDENTITIES, "bytes": int,
    "tensors": array(record({
        "fqn": str, "dtype": str, "shape": of(tuple[int, ...]), "nan": int, "inf": int, "zeros": int, "finite?": int,
        **{f"{name}?": float | None for name in ("min", "max", "mean", "std", "rms", "absmax")},
        "histogram?": of(tuple[tuple[int, ...], ...]), "update?": UPDATE, "rank?": of(Spectrum),
    })),
    "only_in_source": STRINGS, "only_in_other": STRINGS, "updates": mapping(mapping(UPDATE)), "findings": FINDINGS,
    "not_checked": STRINGS, "notes": STRINGS,
}  # fmt: skip
SCAN = {
    "ok": bool, "verdict": of(Verdict), "files": int,
    "executables": array(record(fields_of(Executable, names=array(record({"name": str, "verdict": of(Verdict)}))))),
    "not_read": array(record({name: of(kind) for name, kind in typing.get_type_hints(NotRead).items()})),
}  # fmt: skip
SMOKE = {
    "ok": bool,
    **fields_of(
        SmokeReport, leave=("reload_same_world", "reload_other_world", "is_primary"), losses=NUMBERS,
        reference_losses=NUMBERS, grad_errors=FLOATS, tolerances=FLOATS,
    ),
    "reload": record({"same_world": maybe(of(ReloadResult)), "other_world": maybe(of(ReloadResult))}),
    "memory_measured": str, "phase_memory_measured": str,
}  # fmt: skip
CASE = {
    "strategy": str, "mesh": str, "label": str, "case": record(fields_of(Case, mesh=of(str))),
    "method": {"enum": ["formula", "tracked"]}, "per_rank": MEMORY, "formula": MEMORY, "tracked": maybe(MEMORY),
    "timeline": of(tuple[Moment, ...]), "difference": float | None, "why_not_tracked": str | None,
    "margin": record(fields_of(Margin, total=of(int))), "needed": int, "fits": bool | None, "doubt": str | None,
}  # fmt: skip
PROPOSAL = record({"what": str, **CASE})
ESTIMATE = {
    "model": str, "params": int, "per_rank": MEMORY, "strategies": array(record(CASE)), "gpu_memory": int | None,
    "fits": bool | None, "advice": maybe(PROPOSAL), "proposals": array(PROPOSAL), "notes": STRINGS, "seconds": float,
    "peak_rss_bytes": int,
}  # fmt: skip
PLACED = array(record(fields_of(Finding, line=of(int | None))))
PREFLIGHT = {
    "ok": bool, "config": str, "framework": str, "mesh": str | None,
    "options": maybe(record({
        "read": int, "understood": int, "passed_over": int, "unknown": STRINGS, "unread": STRINGS,
    })),
    "spec": maybe(record(fields_of(ParallelSpec, mesh=maybe(of(Mapping[str, int]))))),
    "checks": of(tuple[CheckResult, ...]), "findings": PLACED, "ignored": PLACED, "estimate": maybe(record(ESTIMATE)),
    "verify": maybe(record(VERIFY)),
    "checkpoint": maybe(record({
        "path": str, "ok": bool, "mesh": str | None, "num_matched": int | None,
        "reads": maybe(record(dict.fromkeys(("max_files", "max_read_bytes", "max_needed_bytes"), int))),
    })),
    "smoke": maybe(record(SMOKE)), "not_checked": STRINGS, "notes": STRINGS,
}  # fmt: skip
CONVERSION = {
    "source": str, "destination": str, "num_tensors": int,
    "plan?": record({"files": array(record({"file": str, "nbytes": int})), "bytes": int, "peak_bytes": int}),
    "bytes_read?": int, "bytes_written?": int, "seconds?": float, "throughput_bytes_per_s?": int,
    "peak_rss_bytes?": int, "files?": STRINGS, "verified?": bool, "checked?": of(Mapping[str, int]), "values?": COUNTS,
    "part?": of(Part), "published?": bool, "waiting_for?": of(tuple[int, ...]), "architecture": str | None,
    "identity": IDENTITY, "notes": STRINGS, "warnings": STRINGS, "not_checked": STRINGS,
}  # fmt: skip
PUSH = {
    "ok": bool,
    **fields_of(
        PushResult, leave=("num_checked", "checked_bytes"), left_out=array(record({"path": str, "why": str}))
    ),
    "sent_bytes": int, "checked": record({"files": int, "bytes": int}),
}  # fmt: skip
EXPORT = {
    **CONVERSION, "ok": bool, "config": mapping(record({"value": object, "source": str})), "assumed": STRINGS,
    "findings": FINDINGS, "push?": record(PUSH),
}  # fmt: skip
LORA_LOSS = {
    **CONVERSION, "ok": bool, "loss": float, "config": mapping(record({"value": object, "source": str})),
    "modules": array(record({
        "path": str, "rank": int, "rank_before": int | None, "norm": float, "error": float, "loss": float,
        "method": str,
    })),
    "left_out": array(record({"fqn": str, "norm": float | None, "why": str})), "findings": FINDINGS,
}  # fmt: skip
LOADER = {
    "loader": str, "loads": bool | None, "changes": bool, "whole": bool, "proven": bool, "factor": float | None,
    "matched_modules": int, "matched_tensors": int, "unmatched_tensors": int, "unmatched": STRINGS,
    "findings": FINDINGS,
}  # fmt: skip
CHECK_LORA = {
    "ok": bool, "verdict": {"enum": ["loads", "fails", "unknown"]}, "identity": IDENTITY, "judges": STRINGS,
    "path": str, "type": str, "rank": int | None, "ranks": of(Mapping[str, int]),
    "alpha": record({"value": float | None, "source": str | None}), "alphas": of(Mapping[str, int]),
    "num_modules": int, "targets": STRINGS, "convention": str | None, "architecture": str | None,
    "loaders": array(record(LOADER)), "not_checked": STRINGS, "findings": FINDINGS,
}  # fmt: skip
PRUNE = {
    **fields_of(PruneResult, checkpoints=array(record(fields_of(RunCheckpoint, fit=of(bool))))), "ok": bool,
}  # fmt: skip
ENV = {"env": of(Mapping[str, str | None]), "too_old": of(Mapping[str, str]), "tested_torch": STRINGS}

SEVERAL = {
    "ok": bool,
    "checkpoints": array(any_of(record({"source": str, **VERIFY}), record({"source": str, "ok": bool, **ERROR}))),
}
DOCUMENTS: dict[str, tuple[dict[str, Any], ...]] = {
    "inspect": (INSPECT,), "verify": (VERIFY, SEVERAL), "diff": (DIFF,), "stats": (STATS,), "scan": (SCAN,),
    "smoke": (SMOKE,), "estimate": (ESTIMATE,), "preflight": (PREFLIGHT,), "export-lora": (EXPORT,),
    "extract-lora": (LORA_LOSS,), "resize-lora": (LORA_LOSS,),
    "check-lora": (CHECK_LORA,), "push": (PUSH,), "watch": (PRUNE,), "prune": (PRUNE,), "env": (ENV,),
    "error": (ERROR,),
    **dict.fromkeys(
        ("shard", "gather", "reshard", "commit", "average", "extract", "rename", "merge-lora"), (CONVERSION,)
    ),
}  # fmt: skip
"""Command → the documents that it prints: `verify` another one of several checkpoints."""


def schema(command: str) -> Schema:
    """The schema of a command's document, or of an error's."""
    shown = "an error, on stderr, of any command" if command == "error" else f"ckpt {command}"
    kinds = [record({"schema_version": VERSION, **fields}) for fields in DOCUMENTS[command]]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"{shown} with --json",
        "description": f"Within schema_version {SCHEMA_VERSION} fields may be added; none is renamed or removed.",
        **(kinds[0] if len(kinds) == 1 else {"anyOf": kinds}),
        "$defs": {name: DEFS[name] for name in sorted(_named_in(kinds))},
    }


def _named_in(kind: object) -> set[str]:
    """The definitions that a schema uses, and those that they use."""
    if isinstance(kind, list):
        return set().union(*map(_named_in, kind))
    if not isinstance(kind, dict):
        return set()
    if "$ref" in kind:
        name = str(kind["$ref"]).rpartition("/")[2]
        return {name} | _named_in(DEFS[name])
    return _named_in(list(kind.values()))


def render(command: str) -> str:
    """The file of a command."""
    return json.dumps(schema(command), indent=1, ensure_ascii=False) + "\n"


PAGES: dict[str, Callable[[], str]] = {
    f"schemas/{command}.schema.json": partial(render, command) for command in DOCUMENTS
}
