"""LoRA: W + s·B·A, also of convolutions (LoCon), embeddings and stacked experts.

Roles: A (r, in[, k, k]) and B (out, r[, 1, 1]); mid (r, r, k, k), a Tucker core; A_embedding (r, num_embeddings) and
B_embedding (dim, r); B_bias (out,); magnitude (see `dora`). Letters: r rank, out and in the dims of the weight, k a
kernel's, E experts, s the scale alpha/r.

Source: peft 0.21 `tuners/lora/{config,layer}.py`; lycoris-lora 4.1 `modules/locon.py`; torchtune
`modules/peft/lora.py`; Megatron-Bridge 0.3.1 `peft/`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar

from ckpt_tools.adapters.adapter import Adapter, AdapterModule, F, Fields, Shape, Shapes, Sourced
from ckpt_tools.adapters.families.family import (
    PEFT_COMMON,
    Factors,
    Matrix,
    Module,
    ScaledFamily,
    Ways,
    missing_halves,
    refuse,
    refuse_roles,
)
from ckpt_tools.errors import UsageError

if TYPE_CHECKING:
    from ckpt_tools.adapters.families.changes import WeightChange
    from ckpt_tools.adapters.families.family import Setting
    from ckpt_tools.adapters.integrity import Values
    from ckpt_tools.transfer.arrays import Array

_FACTORS = ("A", "B", "A_embedding", "B_embedding")
_MEGATRON = r"(?:(?<=\.adapter\.)|(?<=\.adapter_[qkv]\.)|(?<=\.adapter_up\.)|(?<=\.adapter_gate\.))"
"""What stands before the factors of Megatron-Bridge: other models have a linear_in as well."""


class Lora(ScaledFamily):
    """B·A."""

    name = "lora"
    title = "LoRA"
    lycoris_algorithm = "locon"
    marker = "lora_"
    peft_names: ClassVar = {
        "A": "lora_A.weight",
        "B": "lora_B.weight",
        "B_bias": "lora_B.bias",
        "A_embedding": "lora_embedding_A",
        "B_embedding": "lora_embedding_B",
        "magnitude": "lora_magnitude_vector",
    }
    lycoris_names: ClassVar = {
        "A": "lora_down.weight",
        "B": "lora_up.weight",
        "mid": "lora_mid.weight",
        "magnitude": "dora_scale",
    }
    also_read = (
        ("peft", r"lora_magnitude_vector(?:\.weight)?", "magnitude"),
        ("peft", r"lora_magnitude_vector\.(?P<adapter>[^.]+)\.weight", "magnitude"),
        ("diffusers-old", r"(?:lora|lora_linear_layer)\.down\.weight", "A"),
        ("diffusers-old", r"(?:lora|lora_linear_layer)\.up\.weight", "B"),
        ("trainer", r"lora_a(?:\.weight)?", "A"),
        ("trainer", r"lora_b(?:\.weight)?", "B"),
        ("trainer", rf"{_MEGATRON}linear_in\.weight", "A"),
        ("trainer", rf"{_MEGATRON}linear_out\.weight", "B"),
        ("trainer", r"(?<=\.adapter\.)weight_magnitude", "magnitude"),
    )
    peft_type = "LORA"
    peft_fields = frozenset(
        f"{PEFT_COMMON} r lora_alpha lora_dropout fan_in_fan_out bias use_rslora init_lora_weights rank_pattern "
        "alpha_pattern megatron_config megatron_core trainable_token_indices loftq_config eva_config corda_config "
        "lora_ga_config use_dora velora_config alora_invocation_tokens use_qalora qalora_group_size monteclora_config "
        "layer_replication lora_bias target_parameters use_bdlora arrow_config kasa_config ensure_weight_tying".split()
    )
    alpha_field = "lora_alpha"
    init_field = "init_lora_weights"
    peft_checks_bias = True
    peft_checks_layers = True
    peft_checks_rank = True
    peft_switches = (("use_dora", "magnitude", "magnitudes"), ("lora_bias", "B_bias", "biases of B"))
    how_as_lora = "Tucker core multiplied into A"
    joins = True
    core = "mid"
    row_roles = ("B", "B_bias", "magnitude")

    def kind(self, module: AdapterModule[F]) -> str:
        """Return lora, rslora or dora."""
        return "dora" if module.is_dora else "rslora" if module.use_rslora else self.name

    def shape(self, shapes: Shapes) -> Shape | None:
        """Return (out, in[, k, k]); an embedding's factors have no such weight."""
        up, down = shapes.get("B", ()), shapes.get("A", ())
        if not up or len(down) < 2:
            return None
        return (up[0], down[1], *shapes["mid"][2:]) if "mid" in shapes else (up[0], *down[1:])

    def matrix(self, shapes: Shapes) -> Matrix | None:
        """Return (out, in × kernel), or (num_embeddings, dim)."""
        one, other = shapes.get("A_embedding", ()), shapes.get("B_embedding", ())
        return (one[1], other[0]) if len(one) > 1 and other else super().matrix(shapes)

    def is_low_rank_pair(self, roles: Collection[str]) -> bool:
        """Without a core."""
        return "mid" not in roles

    def fits_parameter(self, shapes: Shapes, parameter: Shape) -> bool:
        """Source: peft 0.21, `ParamWrapper.update_layer`."""
        down, up = shapes.get("A", ()), shapes.get("B", ())
        if len(down) != 2 or len(up) != 2 or len(parameter) not in (2, 3):
            return False
        if len(parameter) == 2:
            return (up[0], down[1]) == parameter
        return {up[0], down[1]} == set(parameter[1:]) and parameter[0] > 0 and down[0] % parameter[0] == 0

    def missing(self, roles: Collection[str]) -> list[str]:
        """Half a pair, or both halves."""
        pairs = (("A", "B"), ("A_embedding", "B_embedding"))
        return missing_halves(pairs, roles) or ([] if set(_FACTORS) & set(roles) else ["A", "B"])

    def rank_dims(self, roles: Collection[str]) -> Mapping[str, int]:
        """Rows of A, columns of B."""
        return {"A": 0, "A_embedding": 0, "B": 1, "B_embedding": 1, "mid": 0}

    def is_idle(self, roles: Collection[str], seen: Mapping[str, Values]) -> bool:
        """A factor is zero, and so is the bias."""
        bias = seen.get("B_bias")
        return any(role in seen and seen[role].is_zero for role in (*_FACTORS, "mid")) and (
            bias is None or bias.is_zero
        )

    # PEFT

    def peft_config(self, adapter: Adapter[F], modules: Sequence[AdapterModule[F]], base: Shapes) -> Fields:
        """Return use_dora, lora_bias, and how the factors began."""
        refuse_roles(modules, ("mid",), "it has no Tucker decomposition")
        config: Fields = {}
        for name, role, what in self.peft_switches:
            having = [module for module in modules if role in module.factors]
            if having and len(having) != len(modules):
                without = next(module for module in modules if role not in module.factors)
                said = f"{len(having)} of {len(modules)} modules have {what}, and PEFT has one setting for all ({name})"
                hint = "export the two kinds separately, with --include and --exclude"
                raise UsageError(said, where=without.path, hint=hint)
            config[name] = Sourced(bool(having), f"{what} in every module" if having else f"no {what}")
        known = adapter.settings.get(self.init_field)
        config[self.init_field] = known or Sourced(True, "no sign that the base was changed before training (PiSSA, …)")
        return config

    def peft_shapes(self, config: Mapping[str, object], rank: int, weight: Shape) -> Ways:
        """Source: peft 0.21 `tuners/lora/layer.py`, `update_layer`."""
        return tuple(self._peft_ways(config, rank, weight))

    def _peft_ways(self, config: Mapping[str, object], r: int, weight: Shape) -> Iterator[Mapping[str, Shape | None]]:
        if config.get("use_qalora") or config.get("use_bdlora"):
            return
        extra = [role for name, role, _ in self.peft_switches if config.get(name)]
        out, inputs, *kernel = weight
        if kernel:  # of a grouped convolution the weight does not tell the number of inputs
            free: dict[str, Shape | None] = dict.fromkeys(["A", "B", *extra])
            yield free | ({"magnitude": (1, out, *(1 for _ in kernel))} if "magnitude" in extra else {})
            return
        yield {"A": (r, inputs), "B": (out, r)} | dict.fromkeys(extra, (out,))
        yield {"A": (r, out), "B": (inputs, r)} | dict.fromkeys(extra, (inputs,))
        yield {"A_embedding": (r, out), "B_embedding": (inputs, r)} | dict.fromkeys(extra)

    # Arithmetic

    def change(self, module: Module, factors: Factors, shape: Shape, setting: Setting, role: str) -> WeightChange:
        """Return the product; for the role "bias" what B_bias adds."""
        if role == "bias":
            from ckpt_tools.adapters.families.changes import WeightDifference

            return WeightDifference(factors["B_bias"].reshape(-1, 1), self.scale(module) * setting.scale)
        return super().change(module, factors, shape, setting, role)

    def product(self, factors: Factors, shape: Shape, scale: float, setting: Setting) -> WeightChange:
        """Return B·A, of experts one by one."""
        from ckpt_tools.adapters.families.changes import Experts, LowRank

        if setting.num_experts == 1:
            left, right = self.low_rank(factors, shape)
            return LowRank(right.T, left.T, scale) if setting.transposed else LowRank(left, right, scale)
        num = shape[0]
        down, up = factors["A"], factors["B"]
        right = down.reshape(num, -1, down.shape[-1])
        left = up.reshape(up.shape[0], -1, num).transpose(2, 0, 1)
        if setting.transposed:
            left, right = right.swapaxes(1, 2), left.swapaxes(1, 2)
        return Experts(left, right, scale)

    def low_rank(self, factors: Factors, shape: Shape) -> tuple[Array, Array]:
        """Return (rows, r) and (r, columns): linear, convolution, Tucker, embedding."""
        import numpy as np

        if "A_embedding" in factors:
            return factors["A_embedding"].T, factors["B_embedding"].T
        up, down = factors["B"], factors["A"]
        left = up.reshape(up.shape[0], up.shape[1])
        if "mid" in factors:
            flat = down.reshape(down.shape[0], -1)
            down = np.einsum("mn...,nj->mj...", factors["mid"], flat)
        return left, down.reshape(down.shape[0], -1)

    def roles_of_rows(self, module: AdapterModule[F]) -> tuple[str, ...]:
        """Not of an embedding, whose rows are those of its base."""
        if module.factors.keys() & {"A_embedding", "B_embedding"}:
            raise refuse(module, "its factors have no rows of the weight")
        return super().roles_of_rows(module)

    def split(self, module: Module, sizes: Sequence[int], paths: Sequence[str]) -> tuple[Module, ...]:
        """Cut B; parts that change nothing are left out, and a part keeps only the ranks that reach it.

        A fused module that was put together from several gives these back.
        """
        parts = super().split(module, sizes, paths)
        if module.is_dora or "B_bias" in module.factors:
            return parts
        slim = [self._without_idle_ranks(part) for part in parts]
        return tuple(part for part in slim if part is not None) or parts

    def _without_idle_ranks(self, part: Module) -> Module | None:
        """Leave out ranks whose column of B is zero; None when all are."""
        import numpy as np

        a, b = part.factors["A"], part.factors["B"]
        is_used = (b.reshape(b.shape[0], b.shape[1], -1) != 0).any(axis=(0, 2))
        if bool(is_used.all()):
            return part
        if not bool(is_used.any()):
            return None
        if "mid" in part.factors:
            return part
        factors = {**part.factors, "A": a[is_used], "B": np.asarray(b[:, is_used], order="C")}
        return with_scale(part, factors, self.scale(part))

    def join(self, parts: Mapping[int, Module], sizes: Sequence[int], path: str) -> Module:
        """Keep the rank where all parts share one A; otherwise stack A, and make B block-diagonal.

        Parts of one scale keep it in alpha; others have it multiplied into B.
        """
        import numpy as np

        from ckpt_tools.adapters.families.factor_rows import stack

        some = next(iter(parts.values()))
        if any("mid" in part.factors or part.factors["A"].ndim != 2 for part in parts.values()):
            raise refuse(some, "convolutions cannot be joined from parts")
        if any(part.factors["A"].shape[1] != some.factors["A"].shape[1] for part in parts.values()):
            raise refuse(some, "its parts have different inputs")
        for index, part in parts.items():
            if part.factors["B"].shape[0] != sizes[index]:
                raise refuse(part, f"B has {part.factors['B'].shape[0]} rows, {sizes[index]} are needed")
        factors: dict[str, Array] = {}
        if any(part.is_dora for part in parts.values()):
            if len(parts) != len(sizes) or not all(part.is_dora for part in parts.values()):
                raise refuse(some, "a fused weight has one magnitude per row, and not all of its parts have one")
            if any(part.factors["magnitude"].shape[0] != sizes[index] for index, part in parts.items()):
                raise refuse(some, "its parts have magnitudes per column, and each part its own")
            factors["magnitude"] = stack([parts[i].factors["magnitude"].reshape(-1) for i in range(len(sizes))])
        if any("B_bias" in part.factors for part in parts.values()):
            dtype = some.factors["B"].dtype
            biases = [
                parts[i].factors["B_bias"] if i in parts and "B_bias" in parts[i].factors else np.zeros(size, dtype)
                for i, size in enumerate(sizes)
            ]
            if len({self.scale(part) for part in parts.values()}) > 1:
                raise refuse(some, "its parts have biases and different scales")
            factors["B_bias"] = stack(biases)
        return self._joined(parts, sizes, path, factors)

    def _joined(self, parts: Mapping[int, Module], sizes: Sequence[int], path: str, others: Factors) -> Module:
        import numpy as np

        from ckpt_tools.adapters.families.factor_rows import common_dtype, stack

        order = sorted(parts)
        scales = {i: self.scale(parts[i]) for i in order}
        common = scales[order[0]] if len(set(scales.values())) == 1 else None
        up = {i: parts[i].factors["B"] if common is not None else _times(parts[i], scales[i]) for i in order}
        down = {i: parts[i].factors["A"] for i in order}
        dtype = common_dtype([*up.values(), *down.values()])
        down = {i: factor.astype(dtype) for i, factor in down.items()}
        is_shared = all(np.array_equal(down[i], down[order[0]]) for i in order)
        starts = list(accumulate(sizes, initial=0))
        rank = down[order[0]].shape[0] if is_shared else sum(down[i].shape[0] for i in order)
        b = np.zeros((sum(sizes), rank), dtype)
        column = 0
        for i in order:
            width = up[i].shape[1]
            at = 0 if is_shared else column
            b[starts[i] : starts[i + 1], at : at + width] = up[i].astype(dtype)
            column += width
        a = down[order[0]] if is_shared else stack([down[i] for i in order])
        module = replace(parts[order[0]], path=path)
        return with_scale(module, {"A": a, "B": b, **others}, 1.0 if common is None else common)


def with_scale(module: Module, factors: Factors, scale: float) -> Module:
    """Return a LoRA with new factors whose alpha says `scale`."""
    rank = factors["A"].shape[0]
    return replace(
        module,
        factors=factors,
        rank=Sourced(rank, f"A has {rank} rows"),
        alpha=Sourced(scale * rank, "converted"),
        use_rslora=False,
    )


def _times(module: Module, scale: float) -> Array:
    import numpy as np

    from ckpt_tools.transfer.arrays import is_finite

    with np.errstate(over="ignore"):
        scaled = (module.factors["B"].astype(np.float64) * scale).astype(np.float32)
    if not is_finite(scaled):
        raise refuse(module, "B times alpha/r is too large for 32 bits")
    return scaled
