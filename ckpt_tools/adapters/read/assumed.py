"""What the tensors of a training checkpoint do not say, and what is then taken for true: said field by field. Pure.

A wrong one of these loads without a warning, and every output is another. Alpha is asked for; these have a value that
nearly every run has.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from ckpt_tools.adapters.adapter import Adapter, F, Sourced
from ckpt_tools.adapters.families import family_of
from ckpt_tools.adapters.read.sidecars import ASSUMED
from ckpt_tools.description.checkpoint import Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumption:
    """A field of PEFT's configuration that nothing says."""

    field: str
    value: object
    """What is taken for true."""
    otherwise: str
    """What is wrong if it is not."""

    @property
    def text(self) -> str:
        """As `--config` takes it."""
        return f"{self.field}={json.dumps(self.value)}"


_RSLORA = Assumption(
    field="use_rslora", value=False, otherwise="with rsLoRA the scale is alpha/√r, and every change √r times as large"
)
_INIT = Assumption(
    field="init_lora_weights",
    value=True,
    otherwise="PiSSA, OLoRA and the like change the base to begin with, and the factors belong to the rest",
)
_ALPHAS = Assumption(field="alpha_pattern", value={}, otherwise="modules with an alpha of their own get the common one")


def assumptions(adapter: Adapter[F], *, is_base_proven: bool = False) -> tuple[Assumption, ...]:
    """Return what is assumed of an adapter with alphas; of a base that is not proven to be the trained one, more."""
    if adapter.convention != "peft" or "peft_type" in adapter.settings:
        return assumed_before(adapter)  # a configuration is there, or its ecosystem has no such setting
    scaled = [m for m in adapter.modules if m.alpha is not None and m.alpha.source != "tensor alpha"]
    found = []
    if any(_RSLORA.field in family_of(module).peft_fields for module in scaled):
        found.append(_RSLORA)
    if not is_base_proven and any(_INIT.field in family_of(module).peft_fields for module in adapter.modules):
        found.append(_INIT)
    if len(scaled) > 1:
        found.append(_ALPHAS)
    return tuple(each for each in found if each.field not in adapter.settings)


def assumed_before(adapter: Adapter[F]) -> tuple[Assumption, ...]:
    """Return what the export that wrote the adapter assumed, and nothing has contradicted or confirmed since."""
    header = adapter.settings.get(ASSUMED)
    texts = str(header.value).split(", ") if header is not None else []

    def is_open(each: Assumption) -> bool:
        now = adapter.settings.get(each.field)
        return now is None or (now.source != "--config" and now.value == each.value)

    return tuple(each for each in (_RSLORA, _INIT, _ALPHAS) if each.text in texts and is_open(each))


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
    return {ASSUMED: ", ".join(each.text for each in assumed)} if assumed else {}
