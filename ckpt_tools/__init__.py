"""Checkpoints for PyTorch FSDP2: convert, inspect, verify, compare, try out before a run; adapters; the hub.

    import ckpt_tools

    ckpt_tools.shard("model", "model-dp8", mesh="dp_shard=8")
    ckpt_tools.verify("model-dp8").ok

Importing the package loads nothing: every name is loaded when it is asked for.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType

TYPE_CHECKING = False  # not from typing, which with `python -m` may be the current directory's
if TYPE_CHECKING:
    from ckpt_tools._version import __version__ as __version__  # noqa: I001 - the functions, one a line, are a page
    from ckpt_tools.adapters.check import LoraCheck as LoraCheck
    from ckpt_tools.adapters.export import Export as Export
    from ckpt_tools.adapters.low_rank import LoraResult as LoraResult
    from ckpt_tools.api import (
        average as average, check_lora as check_lora, commit as commit, diff as diff, estimate as estimate,
        export_lora as export_lora, extract as extract, extract_lora as extract_lora, gather as gather, identify as
        identify, inspect as inspect, merge_lora as merge_lora, open_checkpoint as open_checkpoint, preflight as
        preflight, prune as prune, push as push, rename as rename, reshard as reshard, resize_lora as resize_lora, scan
        as scan, shard as shard, smoke as smoke, stats as stats, verify as verify, watch as watch,
    )  # fmt: skip
    from ckpt_tools.checkpoint.dtypes import DType as DType
    from ckpt_tools.checkpoint.entries import (
        BlobEntry as BlobEntry,
        ByteSpan as ByteSpan,
        Checkpoint as Checkpoint,
        Chunk as Chunk,
        Finding as Finding,
        TensorEntry as TensorEntry,
    )
    from ckpt_tools.checkpoint.formats.scan import Executable as Executable, Scan as Scan
    from ckpt_tools.checkpoint.identity import Candidate as Candidate, Identity as Identity, StepCount as StepCount
    from ckpt_tools.checkpoint.layout import (
        Box as Box,
        Mesh as Mesh,
        Placement as Placement,
        Replicate as Replicate,
        Shard as Shard,
        parse_mesh as parse_mesh,
    )
    from ckpt_tools.checkpoint.summarise import Summary as Summary
    from ckpt_tools.checks.diff import Difference as Difference
    from ckpt_tools.checks.stats import Stats as Stats
    from ckpt_tools.checks.verify import Verification as Verification
    from ckpt_tools.convert.job import Conversion as Conversion
    from ckpt_tools.errors import (
        CkptError as CkptError,
        DestinationExistsError as DestinationExistsError,
        HubError as HubError,
        LimitError as LimitError,
        MissingError as MissingError,
        PartError as PartError,
        UnreadableError as UnreadableError,
        UsageError as UsageError,
    )
    from ckpt_tools.estimate.report import Estimate as Estimate
    from ckpt_tools.hub.plan import PushResult as PushResult
    from ckpt_tools.preflight.report import PreflightReport as PreflightReport
    from ckpt_tools.preflight.smoke.report import SmokeReport as SmokeReport
    from ckpt_tools.runs.manage import PruneResult as PruneResult
    from ckpt_tools.transfer.value_counts import Counts as Counts

_ROOMS = {
    "_version": "__version__",
    "api": "average check_lora commit diff estimate export_lora extract extract_lora gather identify inspect "
    "merge_lora open_checkpoint preflight prune push rename reshard resize_lora scan shard smoke stats verify watch",
    "adapters.check": "LoraCheck",
    "adapters.export": "Export",
    "adapters.low_rank": "LoraResult",
    "estimate.report": "Estimate",
    "hub.plan": "PushResult",
    "preflight.report": "PreflightReport",
    "checks.diff": "Difference",
    "checks.stats": "Stats",
    "checks.verify": "Verification",
    "convert.job": "Conversion",
    "checkpoint.entries": "BlobEntry ByteSpan Checkpoint Chunk Finding TensorEntry",
    "checkpoint.dtypes": "DType",
    "checkpoint.identity": "Candidate Identity StepCount",
    "checkpoint.layout": "Box Mesh Placement Replicate Shard parse_mesh",
    "checkpoint.summarise": "Summary",
    "errors": "CkptError DestinationExistsError HubError LimitError MissingError PartError UnreadableError UsageError",
    "checkpoint.formats.scan": "Executable Scan",
    "transfer.value_counts": "Counts",
    "preflight.smoke.report": "SmokeReport",
    "runs.manage": "PruneResult",
}
"""Module → names that are public here."""
_HOMES = {name: f"{__name__}.{room}" for room, names in _ROOMS.items() for name in names.split()}
__all__ = [*sorted(_HOMES)]  # noqa: PLE0604 - the names above


_WAS = {"Tended": "PruneResult"}  # Earlier names, which go on working


def __getattr__(name: str) -> object:
    if name in _WAS:
        return __getattr__(_WAS[name])
    if name in _HOMES:
        found: object = getattr(import_module(_HOMES[name]), name)
    elif name in _ROOMS:
        found = import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__


class _Package(ModuleType):
    """The functions estimate, preflight and smoke have the names of packages: loading these must not hide them."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


class _Moved:
    """Finds the modules that pages once named otherwise."""

    _ROOMS = (
        ("ckpt_tools.description", "ckpt_tools.checkpoint"),
        ("ckpt_tools.formats", "ckpt_tools.checkpoint.formats"),
    )
    create_module = staticmethod(lambda _: None)

    def find_spec(self, name: str, *_: object) -> object:
        is_moved = any(name == old or name.startswith(f"{old}.") for old, _ in self._ROOMS)
        return type(__spec__)(name, self) if is_moved else None  # type: ignore[arg-type]

    def exec_module(self, module: ModuleType) -> None:
        old, new = next(row for row in self._ROOMS if module.__name__.startswith(row[0]))
        sys.modules[module.__name__] = import_module(module.__name__.replace(old, new, 1))


sys.meta_path.insert(0, _Moved())  # type: ignore[arg-type]
