"""What a smoke run shall do, as the user said it."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ckpt_tools.checkpoint.layout import parse_mesh
from ckpt_tools.errors import UsageError
from ckpt_tools.models.config import ModelConfig, read_config
from ckpt_tools.options import AnyPath, refuse_other
from ckpt_tools.options.smoke import ADAPTERS, SmokeFields
from ckpt_tools.units import parse_size

DEVICES = ("auto", "cpu", "cuda")
BUILDS = ("auto", "meta", "cpu")
AXES = ("dp_replicate", "dp_shard", "tp")
DTYPES = ("keep", "bf16", "f16", "f32")  # Names of dtypes; "keep" is that of the parameters
QUANTIZATIONS = ("nf4",)
DEFAULT_RANKS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SmokeOptions(SmokeFields):
    """The options of `ckpt smoke`, and what follows from them."""

    def __post_init__(self) -> None:
        refuse_other(self.device, DEVICES, "a device", "--device")
        refuse_other(self.build, BUILDS, "a place to build", "--build")
        refuse_other(self.param_dtype, DTYPES, "a dtype", "--param-dtype")
        refuse_other(self.reduce_dtype, DTYPES, "a dtype", "--reduce-dtype")
        if self.nproc is not None and self.nproc < 1:
            raise UsageError(f"--nproc must be at least 1, got {self.nproc}", hint="for example --nproc 2")
        if self.compare is not None and (self.compare, self.strategy == self.compare) != ("no_shard", False):
            raise UsageError(
                f"--compare {self.compare} cannot be used with {self.strategy or 'the strategy of the mesh'}",
                hint="use --compare no_shard, with a strategy that shards",
            )
        if self.compare is not None and "tp" in str(self.mesh or ""):
            raise UsageError("--compare supports data parallelism only", hint="drop tp from the mesh")
        if self.steps < 1:
            raise UsageError(f"--steps must be at least 1, got {self.steps}", hint="for example --steps 3")
        if self.timeout is not None and self.timeout <= 0:
            raise UsageError("--timeout must be positive")
        self._check_adapters()
        if self.model is not None and self.factory is not None:
            raise UsageError("--model and --factory exclude each other", hint="drop one of them")
        if self.mesh is not None:
            self._check_mesh(str(self.mesh))
        if self.factory is not None and not all(self.factory.partition(":")):
            raise UsageError(f"{self.factory!r} is not a callable", hint="use --factory pkg.mod:callable")

    def _check_adapters(self) -> None:
        if self.quantize is not None:
            refuse_other(self.quantize, QUANTIZATIONS, "a quantisation", "--quantize")
        refuse_other(self.adapter, ADAPTERS, "an adapter", "--adapter")
        if not self.lora and (self.adapter != "lora" or self.target):
            raise UsageError("--adapter and --target need --lora", hint="add --lora to train an adapter")
        if self.quantize is not None and self.adapter not in ("lora", "dora"):
            raise UsageError(f"{self.adapter} does not support quantised weights", hint="drop --quantize or --adapter")
        if self.quantize is not None and not self.lora:
            raise UsageError("quantised weights cannot be trained", hint="add --lora, which trains adapters instead")

    def _check_mesh(self, text: str) -> None:
        """Refuse what no number of ranks can make right, before anything is started."""
        axes = parse_mesh(text.replace("-1", "1")).axes
        for name, _ in axes:
            if name not in AXES:
                raise UsageError(
                    f"the axis {name} is not supported", where=f"--mesh {text}", hint=f"use {', '.join(AXES)}"
                )
        mesh = None if "-1" in text else parse_mesh(text)
        if mesh is not None and self.nproc not in (None, mesh.world_size):
            raise UsageError(
                f"the mesh {mesh} has {mesh.world_size} ranks, but --nproc is {self.nproc}",
                hint="drop --nproc, or set one axis to -1",
            )

    @property
    def timeout(self) -> float | None:
        """Seconds; None where nothing is said."""
        if not isinstance(self.timeout_s, str):
            return self.timeout_s
        try:
            return float(self.timeout_s.removesuffix("s"))
        except ValueError as error:
            raise UsageError(
                f"--timeout must be a number of seconds, got {self.timeout_s!r}", hint="for example --timeout 300"
            ) from error

    @property
    def memory_bytes(self) -> int | None:
        """Memory that all ranks together may take (each one, on GPUs)."""
        return parse_size(self.memory) if isinstance(self.memory, str) else self.memory

    def read_model(self) -> ModelConfig | None:
        """Read the config that `model` names."""
        hint = "use --model with a config.json, or a directory that contains one"
        return None if self.model is None else read_config(os.fspath(self.model), hint=hint)

    @property
    def label(self) -> str:
        """What is tried, for headings."""
        return os.fspath(self.source or self.model or self.factory or "the built-in model")


def absolute(path: AnyPath | None) -> str | None:
    """Return `path` as seen from any directory."""
    return None if path is None else os.path.abspath(path)
