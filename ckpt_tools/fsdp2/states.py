"""What FSDP2 holds at one moment, as values: which group manages which parameters, and in which state.

The words are PyTorch's own. A *group* is what one `fully_shard` or `replicate` call made: parameters that are gathered
and reduced together. Nothing in here refers to a live model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Sharding = Literal["SHARDED", "SHARDED_POST_FORWARD", "UNSHARDED"]
Training = Literal["IDLE", "FORWARD", "PRE_BACKWARD", "POST_BACKWARD"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupState:
    """One parameter group."""

    modules: tuple[str, ...]
    """FQNs of the modules that it was made for; "" is the model itself."""
    parameters: tuple[str, ...]
    """FQNs of its parameters."""
    sharding: Sharding
    """Which form of the parameters is registered on the modules."""
    training: Training
    """Where the group is in its forward or backward pass."""
    expected_after_forward: Sharding
    """Where a forward pass leaves it, by its strategy and by whether it is the root."""
    is_root: bool | None
    """Does a forward pass start here? None before the first one."""
    mesh: tuple[tuple[str, int], ...]
    """Axes and sizes that its parameters are sharded or replicated over."""
    replicated: bool
    """Is it replicated only (`replicate()`), not sharded?"""


def shown(fqn: str) -> str:
    """Return a module's FQN for people: the model itself has an empty one."""
    return fqn or "(root)"
