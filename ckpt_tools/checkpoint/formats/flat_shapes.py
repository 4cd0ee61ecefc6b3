"""Names and shapes of a model, for files that hold its parameters laid flat and do not have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckpt_tools.checkpoint.entries import Checkpoint
from ckpt_tools.checkpoint.transform import plain_names


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """What another checkpoint of the same model says of its tensors."""

    title: str
    """Its path, for messages."""
    shapes: Mapping[str, tuple[int, ...]]
    """Plain name → shape; of tied ones that are known to be tied the first."""
    is_ordered: bool
    """The order is that of the model."""

    @classmethod
    def of(cls, checkpoint: Checkpoint, title: str, *, is_ordered: bool) -> Shapes:
        """Return those of an open checkpoint."""
        once: dict[object, tuple[str, tuple[int, ...]]] = {}
        for name, entry in plain_names(checkpoint).items():
            places = tuple((chunk.span, chunk.box) for chunk in entry.chunks) if is_ordered else name
            once.setdefault(places, (name, entry.shape))
        return cls(title=title, shapes=dict(once.values()), is_ordered=is_ordered)
