"""Trained tokens: rows that replace those of an embedding, for chosen tokens.

Roles: tokens (n, dim) of an adapter of this type, beside (n, dim) of tokens that were trained beside factors of another
type. Which rows of the embedding they are, only the configuration says: `token_indices`, or `trainable_token_indices`,
a list for the input embedding, or {end of a path: list}.

Source: peft 0.21 `tuners/trainable_tokens/{config,layer}.py`, `utils/other.py` (`TrainableTokensWrapper`,
`set_additional_trainable_modules`): the rows of a tied head are those of its embedding, and only a live model has them
twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from ckpt_tools.adapters.adapter import TOKENS, Adapter, AdapterModule, F, Fields, Shape, Shapes, Sourced
from ckpt_tools.adapters.families.family import PEFT_COMMON, Factors, Family, Matrix, Module, Setting
from ckpt_tools.errors import UsageError

if TYPE_CHECKING:
    from ckpt_tools.adapters.families.changes import WeightChange

_FIELDS = {"tokens": "token_indices", "beside": "trainable_token_indices"}
"""Role → field of PEFT's configuration that says which tokens they are."""


class Tokens(Family):
    """Other rows for some tokens."""

    name = TOKENS
    title = "trained tokens"
    marker = "trainable_tokens_"
    peft_names: ClassVar = {"tokens": "trainable_tokens_delta", "beside": "token_adapter.trainable_tokens_delta"}
    also_read = (("peft", r"token_adapter\.trainable_tokens_delta(?:\.(?P<adapter>[^.]+))?", "beside"),)
    peft_type = "TRAINABLE_TOKENS"
    peft_fields = frozenset(PEFT_COMMON.partition(" exclude")[0].split()) | {"token_indices", "init_weights"}
    why_not_a_sum = "it replaces rows: its change depends on the base's weights"

    def matrix(self, shapes: Shapes) -> Matrix | None:
        """Return (any, dim)."""
        found = next((shapes[role] for role in _FIELDS if len(shapes.get(role, ())) == 2), None)
        return None if found is None else (None, found[1])

    def is_matrix_sure(self, shapes: Shapes) -> bool:
        """Its columns are the embedding's."""
        return True

    def why_no_lora(self, shapes: Shapes) -> str | None:
        """Of no LoRA."""
        return "it replaces rows of an embedding, which a LoRA cannot do"

    def change(self, module: Module, factors: Factors, shape: Shape, setting: Setting, role: str) -> WeightChange:
        """Return the rows in their places."""
        from ckpt_tools.adapters.families.changes import RowReplacement

        indices = indices_of(module, setting.settings)
        if indices is None:
            raise not_known(module)
        if problem := why_wrong(module, indices.value) or beyond(module, indices.value, shape):
            raise UsageError(problem, where=module.path, hint="is it the base that the adapter was trained on?")
        (rows,) = factors.values()
        return RowReplacement(rows, indices.value, shape)


def indices_of(module: AdapterModule[F], settings: Mapping[str, Sourced[object]]) -> Sourced[Sequence[object]] | None:
    """Return the tokens of which a module has the rows; None where nothing says them."""
    found = settings.get(_field_of(module), Sourced(None, ""))
    value = found.value
    if isinstance(value, dict):
        value = next((own for name, own in value.items() if name and module.path.endswith(name)), None)
    return Sourced(value, found.source) if isinstance(value, list) else None


def _field_of(module: AdapterModule[F]) -> str:
    return _FIELDS[next(iter(module.factors))]


def why_wrong(module: AdapterModule[F], indices: Sequence[object]) -> str | None:
    """Return why the tokens cannot be those of the rows."""
    rows = next(iter(module.shapes.values()))[0]
    if any(type(index) is not int or index < 0 for index in indices) or len(set(indices)) < len(indices):
        return f"the indices of tokens must be different whole numbers from 0 on, got {list(indices)[:8]}"
    if len(indices) != rows:
        return f"there are {rows} rows, and indices of {len(indices)} tokens"
    return None


def beyond(module: AdapterModule[F], indices: Sequence[object], weight: Shape) -> str | None:
    """Return what is wrong where the base has too few tokens."""
    largest = max((index for index in indices if isinstance(index, int)), default=-1)
    if largest < weight[0]:
        return None
    return (
        f"token {largest} is trained, and the base's {module.path} has {weight[0]} rows: the model was resized before "
        "training (resize_token_embeddings)"
    )


def not_known(module: AdapterModule[F]) -> UsageError:
    """Return the error that nothing says which tokens were trained."""
    field = _field_of(module)
    what = f"which tokens the {next(iter(module.shapes.values()))[0]} rows are is not recorded ({field})"
    hint = f"put the adapter_config.json of the training run beside the source, or give them: --config '{field}=[…]'"
    return UsageError(what, where=module.path, hint=hint)


def fields_of(adapter: Adapter[F], known: frozenset[str]) -> Fields:
    """Return the field that says which tokens were trained; {} where none were."""
    fields: Fields = {}
    for module in (module for module in adapter.modules if module.family == TOKENS):
        field, indices = _field_of(module), indices_of(module, adapter.settings)
        if indices is None:
            raise not_known(module)
        problem = why_wrong(module, indices.value)
        if field not in known:
            problem = f"trained tokens of {module.path} cannot be written: {field} is of another type of adapter"
        if problem:
            hint = f"correct them in {indices.source}, or leave them out: --exclude '**trainable_tokens_**'"
            raise UsageError(problem, where=module.path, hint=hint)
        fields[field] = adapter.settings[field]
    for field in known & adapter.settings.keys() & set(_FIELDS.values()) - fields.keys():
        if adapter.settings[field].value and not adapter.omitted:
            what = f"{field} names trained tokens, but their rows are missing: PEFT would not load the adapter"
            hint = f"was the adapter saved completely? To continue without them: --config {field}=null"
            raise UsageError(what, where=adapter.settings[field].source, hint=hint)
    return fields


def without_copies(adapter: Adapter[F], content: Callable[[F], bytes | memoryview]) -> Adapter[F]:
    """Leave out rows that a live model has twice: those of heads and embeddings that are tied to another embedding.

    What is tied holds the same values; PEFT's files for other types than this one have them once.
    """
    modules = [module for module in adapter.modules if module.family == TOKENS]
    order = sorted(modules, key=lambda module: _PREFERRED.get(module.path.rpartition(".")[2], 1))
    kept: dict[bytes, AdapterModule[F]] = {}
    for module in order if len(modules) > 1 else ():
        (rows,) = module.factors.values()
        kept.setdefault(bytes(content(rows)), module)
    copies = [module for module in modules if kept and module not in kept.values()]
    return adapter.with_modules(module for module in adapter.modules if module not in copies)


_PREFERRED = {"shared": 0, "lm_head": 2, "embed_out": 2, "output_layer": 2, "proj_out": 2}
"""Ends of paths: what others are tied to comes first, heads last."""
