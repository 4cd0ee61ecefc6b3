"""What the tensors of a training checkpoint do not say, and what is then taken for true: said field by field. Pure.

A wrong one of these loads without a warning, and every output is another. Alpha is asked for; these have a value that
nearly every run has.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from ckpt_tools.adapters.adapter import Adapter, Sourced
from ckpt_tools.checkpoint import Finding

F = TypeVar("F")
HEADER = "ckpt_assumed"
"""Key of the header of an exported file: "use_rslora=false, …"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumption:
    """A field of PEFT's configuration that nothing says."""

    field: str
    """Its name."""
    value: object
    """What is taken for true."""
    otherwise: str
    """What is wrong if it is not."""

    @property
    def text(self) -> str:
        """As `--config` takes it."""
        return f"{self.field}={json.dumps(self.value)}"


def assumptions(adapter: Adapter[F], *, is_base_proven: bool = False) -> tuple[Assumption, ...]:
    """Return what is assumed of an adapter.

    Args:
        adapter: With alphas.
        is_base_proven: Are the weights that it was trained on known to be the base's?
    """
    if adapter.convention != "peft" or "peft_type" in adapter.settings:
        return ()  # a configuration is there, or its ecosystem has no such setting
    scaled = [m for m in adapter.modules if m.alpha is not None and m.alpha.source != "tensor alpha"]
    loras = [module for module in adapter.modules if module.family == "lora"]
    found = []
    if any(module.family == "lora" for module in scaled):
        found.append(
            Assumption(
                field="use_rslora",
                value=False,
                otherwise="with rsLoRA the scale is alpha/√r, and every change √r times as large",
            )
        )
    if loras and not is_base_proven:
        found.append(
            Assumption(
                field="init_lora_weights",
                value=True,
                otherwise="PiSSA, OLoRA and the like change the base to begin with, and the factors belong to the rest",
            )
        )
    if len(scaled) > 1:
        found.append(
            Assumption(
                field="alpha_pattern", value={}, otherwise="modules with an alpha of their own get the common one"
            )
        )
    return tuple(each for each in found if each.field not in adapter.settings)


def findings_of(assumed: Sequence[Assumption], *, strict: bool) -> tuple[Finding, ...]:
    """Return one finding for each; an error when nothing may be assumed."""
    return tuple(
        Finding(
            code="assumed",
            severity="error" if strict else "warning",
            where=each.field,
            what=f"{each.field} is assumed to be {json.dumps(each.value)}: nothing in the source says it. "
            f"Otherwise: {each.otherwise}",
            hint=_hint(each),
        )
        for each in assumed
    )


def _hint(assumed: Assumption) -> str:
    beside = "put the adapter_config.json of the training run beside the source"
    if assumed.field == "alpha_pattern":
        return beside
    return f"say it: --config {assumed.text}; or {beside}"


def sourced(assumed: Sequence[Assumption]) -> dict[str, Sourced[object]]:
    """Return field → value and source, for the configuration."""
    return {each.field: Sourced(each.value, "assumed: nothing in the source says it") for each in assumed}


def header_of(assumed: Sequence[Assumption]) -> dict[str, str]:
    """Return what the header of an exported file says of it."""
    return {HEADER: ", ".join(each.text for each in assumed)} if assumed else {}
