"""What is alive at each block of a training step: forward, backward, the optimizer's step. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves


class Timeline:
    """Collects, for each block that runs, what is held when it is the most.

    Args:
        now: Returns the bytes of every group.
    """

    def __init__(self, now: Callable[[], dict[str, int]]) -> None:
        self._now = now
        self._highest = -1
        self.phase = "forward"
        """What runs: set it before it begins."""
        self.moments: list[tuple[str, str, dict[str, int]]] = []
        """(phase, block, bytes of every group) in order; "" is what runs outside of blocks."""

    def enter(self, block: str) -> None:
        """Begin a moment; one in which nothing happened is forgotten."""
        if self.moments and self.moments[-1][:2] == (self.phase, block):
            return
        if self.moments and self._highest < 0:
            self.moments.pop()
        self.moments.append((self.phase, block, self._now()))
        self._highest = -1

    def see(self, found: dict[str, int], total: int) -> None:
        """Take what is held now, `total` of it on the device."""
        if total > self._highest and self.moments:
            self._highest = total
            self.moments[-1] = (*self.moments[-1][:2], dict(found))

    @contextmanager
    def following(self, model: nn.Module, blocks: tuple[str, ...]) -> Iterator[None]:
        """Follow `blocks` of `model` while they run."""
        with ExitStack() as stack:
            for name in blocks:
                block = model.get_submodule(name)
                stack.callback(block.register_forward_pre_hook(self._before(name), prepend=True).remove)
                stack.callback(block.register_forward_hook(self._after(name)).remove)
            self.enter("")
            yield

    def _before(self, name: str) -> Callable[..., None]:
        return lambda *_: self.enter(name)

    def _after(self, name: str) -> Callable[..., None]:
        def leave(_: nn.Module, __: object, output: object) -> None:
            if self.phase != "forward":  # recomputed: backward of the same block goes on
                return
            self.enter("")
            for leaf in tree_leaves(output):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    # Its gradient is there: the block's own backward is next.
                    leaf.register_hook(begin)  # type: ignore[no-untyped-call]

        def begin(_: Any) -> None:  # noqa: ANN401 - torch's signature
            self.enter(name)

        return leave
