"""Select, rename, find the model in what a trainer saved."""

import pytest

from ckpt_tools.checkpoint.dtypes import BY_NAME
from ckpt_tools.checkpoint.entries import BlobEntry, ByteSpan, Checkpoint, TensorEntry
from ckpt_tools.checkpoint.transform import (
    find_model,
    is_optimizer,
    plain_names,
    rename,
    select,
    strip_prefix,
    strip_wrappers,
)
from ckpt_tools.errors import UsageError

SPAN = ByteSpan(file="f", offset=0, nbytes=1)


def _entry(fqn: str, *path: str) -> TensorEntry:
    return TensorEntry(fqn=fqn, dtype=BY_NAME["F32"], shape=(2,), chunks=(), path=path)


def _checkpoint(*fqns: str, blobs: tuple[str, ...] = ()) -> Checkpoint:
    """Names alone, without the nesting that DCP records."""
    return Checkpoint(
        root="r",
        format="dcp",
        tensors=tuple(map(_entry, fqns)),
        blobs=tuple(BlobEntry(fqn=fqn, span=SPAN) for fqn in blobs),
    )


def _nested(*paths: tuple[str, ...], blobs: tuple[tuple[str, ...], ...] = ()) -> Checkpoint:
    """As DCP flattens nested dicts: the FQN is the path joined by dots."""
    return Checkpoint(
        root="r",
        format="dcp",
        tensors=tuple(_entry(".".join(path), *path) for path in paths),
        blobs=tuple(BlobEntry(fqn=".".join(path), span=SPAN, path=path) for path in blobs),
    )


def _names(checkpoint: Checkpoint) -> list[str]:
    return [entry.fqn for entry in checkpoint.tensors]


def test_select_takes_blobs_too_and_any_name_that_is_shown() -> None:
    chosen = select(_checkpoint("a", blobs=("x.lr", "y")), include=["a", "x.*"])
    assert [blob.fqn for blob in chosen.blobs] == ["x.lr"]
    one = _checkpoint("a", "b")
    assert select(one) is one
    assert _names(select(one, include=["hub.a"], also={"a": ["hub.a"]})) == ["a"]
    assert _names(select(one, exclude=["hub.a"], also={"a": ["hub.a"]})) == ["b"]


def test_rename_changes_names_alone_and_never_two_into_one() -> None:
    assert _names(rename(_checkpoint("a", "b"), lambda fqn: "x." + fqn)) == ["x.a", "x.b"]
    with pytest.raises(UsageError, match="would both be named 'w'"):
        rename(_checkpoint("_orig_mod.w", "w"), strip_wrappers)


@pytest.mark.parametrize(
    ("fqn", "plain"),
    [
        ("_orig_mod.a.w", "a.w"),
        ("a._orig_mod.b._orig_mod.w", "a.b.w"),
        ("layers.0._checkpoint_wrapped_module.up.weight", "layers.0.up.weight"),
        ("_fsdp_wrapped_module._checkpoint_wrapped_module.w", "w"),
        ("a._fsdp_wrapped_module._orig_mod.w", "a.w"),
        ("my_orig_mod.w", "my_orig_mod.w"),
        ("a._orig_mod", "a._orig_mod"),
        ("module.w", "module.w"),
    ],
)
def test_strip_wrappers_removes_them_at_any_depth(fqn: str, plain: str) -> None:
    assert strip_wrappers(fqn) == plain


@pytest.mark.parametrize(
    ("fqn", "expected"),
    [
        ("optimizer.state.w.exp_avg", True),
        ("optim.param_groups.lr", True),
        ("app.optimizer.state.w.step", True),
        ("optimizer_states.0.exp_avg", True),
        ("state.layers.0.w.exp_avg_sq", True),
        ("state.w.step", True),
        ("model.optimizer_head.weight", False),
        ("model.layers.0.step", False),
        ("model.layers.optimizer.weight", False),
        ("layers.0.exp_avg", False),
    ],
)
def test_is_optimizer_by_name(fqn: str, expected: bool) -> None:
    assert is_optimizer(_entry(fqn)) == expected


@pytest.mark.parametrize(
    ("checkpoint", "names", "prefix"),
    [
        # Nested, as DCP records it.
        (_nested(("model", "a.w"), ("model", "b.w"), ("optimizer", "state", "a.w", "exp_avg")), 2, "model."),
        (_nested(("app", "model", "a.w"), ("app", "optimizer", "state", "a.w", "exp_avg")), 1, "app.model."),
        (_nested(("model", "model.layers.w"), ("model", "lm_head.w")), 2, "model."),
        (_nested(("model", "w"), ("model", "v"), blobs=(("lr_scheduler",),)), 2, "model."),
        # Flat: the model's own names.
        (_nested(("model.layers.w",), ("model.norm.w",)), 2, ""),
        (_nested(("layers.w",), ("norm.w",)), 2, ""),
        # Names alone.
        (_checkpoint("model.model.a", "model.lm_head"), 2, "model."),
        (_checkpoint("model.a", "model.b"), 2, ""),
        (_checkpoint("model.a", "model.b", "optimizer.state.a.exp_avg"), 2, "model."),
        (_checkpoint("model.a", "model.b", blobs=("dataloader",)), 2, "model."),
        (_checkpoint("module.a", "module.b"), 2, "module."),
        (_checkpoint("a", "b"), 2, ""),
        (_checkpoint("optimizer.state.a.exp_avg"), 0, ""),
    ],
)
def test_find_model_finds_the_root(checkpoint: Checkpoint, names: int, prefix: str) -> None:
    model, found = find_model(checkpoint)
    assert (len(model.tensors), found) == (names, prefix)
    assert model.blobs == ()
    assert set(_names(model)) <= set(_names(checkpoint))


def test_strip_prefix_removes_it_from_all_or_is_a_usage_error() -> None:
    strip = strip_prefix(["m.a", "m.m.b"], "m.")
    assert (strip("m.a"), strip("m.m.b")) == ("a", "m.b")
    with pytest.raises(UsageError, match=r"'b' does not begin with 'm\.'"):
        strip_prefix(["m.a", "b"], "m.")


def test_plain_names_are_those_of_the_model() -> None:
    checkpoint = _nested(("model", "_orig_mod.a.w"), ("model", "b.w"), ("optimizer", "state", "b.w", "exp_avg"))
    assert plain_names(checkpoint).keys() == {"a.w", "b.w"}


@pytest.mark.parametrize(
    "fqns", [("_orig_mod.w", "w"), ("w", "_orig_mod.w"), ("module.w", "module._orig_mod.w", "module.module.w")]
)
def test_plain_names_that_coincide_lose_no_tensor(fqns) -> None:
    checkpoint = _checkpoint(*fqns)
    named = plain_names(checkpoint)
    assert sorted(entry.fqn for entry in named.values()) == sorted(fqns)
