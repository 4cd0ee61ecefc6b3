"""What a smoke run shall do, as the user said it."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ckpt_tools.description.layout import parse_mesh
from ckpt_tools.errors import UsageError

DEVICES = ("auto", "cpu", "cuda")
"""Where the ranks compute."""
AXES = ("dp_replicate", "dp_shard", "tp")
"""Axes that a mesh may have."""
DTYPES = ("keep", "bf16", "f16", "f32")
"""Names of dtypes; "keep" is that of the parameters."""
QUANTIZATIONS = ("nf4",)
"""Ways to quantise the frozen weights."""
DEFAULT_RANKS = 2
"""Ranks when neither the mesh nor torchrun says how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmokeOptions:
    """The options of `ckpt smoke`.

    Raises:
        UsageError: A value that no run could have.
    """

    source: str | None = None
    """Checkpoint of any format; without one the model gets random weights."""
    model: str | None = None
    """Directory with a config.json, or the file itself; beside the weights by default."""
    factory: str | None = None
    """"pkg.mod:callable" that builds the model, instead of a config."""
    mesh: str | None = None
    """For example "dp_shard=2,tp=2"; one axis over all ranks by default."""
    nproc: int | None = None
    """Number of ranks."""
    device: str = "auto"
    """One of `DEVICES`; "auto" takes GPUs when there is one for every rank."""
    strategy: str | None = None
    """full_shard, shard_grad_op, hybrid_shard or no_shard; what suits the mesh by default."""
    steps: int = 3
    """Training steps."""
    param_dtype: str = "keep"
    """Dtype of computation."""
    reduce_dtype: str = "keep"
    """Dtype in which gradients are averaged; that of computation by default."""
    lora: bool = False
    """Freeze the model and train LoRA adapters on its linear layers."""
    quantize: str | None = None
    """Quantise the frozen weights: "nf4"."""
    memory_bytes: int | None = None
    """Memory that all ranks together may take (each one, on GPUs); what is free by default."""
    timeout_s: float | None = None
    """Seconds that a phase may take before its ranks count as hanging; by default two minutes, and more for large
    models."""

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise UsageError(f"{self.device!r} is not a device", hint=f"--device takes {', '.join(DEVICES)}")
        for option, value in (("--param-dtype", self.param_dtype), ("--reduce-dtype", self.reduce_dtype)):
            if value not in DTYPES:
                raise UsageError(f"{value!r} is not a dtype", hint=f"{option} takes {', '.join(DTYPES)}")
        if self.nproc is not None and self.nproc < 1:
            raise UsageError(f"{self.nproc} ranks cannot train", hint="--nproc takes 1 or more")
        if self.steps < 1:
            raise UsageError(f"{self.steps} steps prove nothing", hint="--steps takes 1 or more")
        if self.timeout_s is not None and self.timeout_s <= 0:
            raise UsageError(f"a timeout of {self.timeout_s} s is over at once", hint="--timeout takes seconds")
        if self.quantize is not None and self.quantize not in QUANTIZATIONS:
            raise UsageError(
                f"{self.quantize!r} is not a quantisation", hint=f"--quantize takes {', '.join(QUANTIZATIONS)}"
            )
        if self.quantize is not None and not self.lora:
            raise UsageError("quantised weights cannot be trained", hint="add --lora, which trains adapters instead")
        if self.model is not None and self.factory is not None:
            raise UsageError("--model and --factory both say how to build the model", hint="drop one of them")
        if self.mesh is not None:
            self._check_mesh(self.mesh)
        if self.factory is not None and not all(self.factory.partition(":")):
            raise UsageError(f"{self.factory!r} names no callable", hint="write --factory pkg.mod:callable")

    def _check_mesh(self, text: str) -> None:
        """Refuse what no number of ranks can make right, before anything is started."""
        axes = parse_mesh(text.replace("-1", "1")).axes
        for name, _ in axes:
            if name not in AXES:
                raise UsageError(
                    f"the axis {name} cannot be tried", where=f"--mesh {text}", hint=f"smoke runs {', '.join(AXES)}"
                )
        mesh = None if "-1" in text else parse_mesh(text)
        if mesh is not None and self.nproc not in (None, mesh.world_size):
            raise UsageError(
                f"the mesh {mesh} has {mesh.world_size} ranks, --nproc says {self.nproc}",
                hint="drop --nproc, or write -1 for one axis",
            )

    @property
    def label(self) -> str:
        """What is tried, for headings."""
        return self.source or self.model or self.factory or "the built-in model"


def absolute(path: str | None) -> str | None:
    """Return `path` as seen from any directory."""
    return None if path is None else os.path.abspath(path)
