"""Loaders of adapters, simulated by their key rules: what they map, leave out silently, or refuse.

`simulate` says of a file whether a loader takes it and whether that changes anything, without the loader's library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from ckpt_tools.adapters.architectures.architecture import ModelFamily
from ckpt_tools.adapters.ecosystems import vllm
from ckpt_tools.adapters.ecosystems.comfyui import loader as comfyui
from ckpt_tools.adapters.ecosystems.diffusers import loader as diffusers
from ckpt_tools.adapters.ecosystems.kohya import loader as kohya
from ckpt_tools.adapters.ecosystems.peft import loader as peft
from ckpt_tools.adapters.ecosystems.simulation import AdapterFile, Loader, LoaderReport, Loading, RejectedError

LOADERS: Mapping[Loader, Callable[[AdapterFile, Loading], None]] = MappingProxyType(
    {
        "peft": peft.load,
        "diffusers": diffusers.load,
        "comfyui": comfyui.load,
        "kohya": kohya.load,
        "vllm": vllm.load,
    }
)
"""Loader → its rules: they fill in a `Loading`, and raise `RejectedError` where the loader raises."""


def simulate(file: AdapterFile, loader: Loader, families: Sequence[ModelFamily] = ()) -> LoaderReport:
    """Say what a loader would make of an adapter for one of some model families, if it does not matter which."""
    reports = [_simulate(replace(file, architecture=family), loader) for family in families or (file.architecture,)]
    first = reports[0]
    if all(
        (each.loads, each.unmatched, each.findings) == (first.loads, first.unmatched, first.findings)
        for each in reports
    ):
        return first
    return _simulate(replace(file, architecture=None), loader)


def _simulate(file: AdapterFile, loader: Loader) -> LoaderReport:
    loading = Loading()
    target = "peft" if loader == "vllm" or file.architecture == "llm" else loader
    hint = f"ckpt export-lora SRC DST --to {target}"
    if loader == "vllm":
        hint += "; what vLLM lacks can be merged into the base: ckpt merge-lora"
    loads: bool | None = True
    try:
        LOADERS[loader](file, loading)
    except RejectedError as error:
        loads = False
        loading.used.clear()
        loading.say("loader-rejects", "error", file.file, f"{loader} refuses it: {error}", hint)
    unmatched = tuple(name for name in file.tensors if name not in loading.used)
    if any(finding.code == "loader-unchecked" for finding in loading.findings):
        loads = None
    elif loads and not loading.used:
        loading.say(
            "loader-no-op",
            "error",
            file.file,
            f"{loader} loads none of the {len(file.tensors)} tensors (a warning at most): nothing changes",
            hint,
        )
    elif loads and unmatched:
        reasons = {loading.ignored.get(name, "no module has that name") for name in unmatched}
        loading.say(
            "loader-ignores",
            "error",
            unmatched[0],
            f"{loader} skips {len(unmatched)} of {len(file.tensors)} tensors: {'; '.join(sorted(reasons))}",
            hint,
        )
    return LoaderReport(
        loader=loader,
        loads=loads,
        matched=loading.modules,
        num_matched=len(loading.used),
        unmatched=unmatched if loads is not None else (),
        findings=tuple(loading.findings),
    )
