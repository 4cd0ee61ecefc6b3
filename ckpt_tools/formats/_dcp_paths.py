"""`planner_data` of a DCP `.metadata`: the keys that lead to every entry, and with them a second record of its name.

torch flattens nested dicts and lists, and names an entry by its keys, joined by dots. So each name must be what its
keys say: one that is not was changed after it was saved, and nothing tells which of the two is right.

Source: torch `distributed/checkpoint/{_nested_dict,_traverse,default_planner}.py` (2.0 to 2.13).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ckpt_tools.description.checkpoint import KeyPath
from ckpt_tools.errors import UnreadableError
from ckpt_tools.formats.inert_pickle import DEFAULT_LIMITS, Record

MAX_KEYS = DEFAULT_LIMITS.max_depth
"""Keys of a path: a state dict cannot nest deeper than the pickle that would hold it."""
_HASHABLE = frozenset({"torch.distributed.checkpoint.metadata.MetadataIndex", "torch.Size"})
"""Classes that a `.metadata` may name and whose objects can be keys of a dict."""


def parse_paths(planner_data: object, names: Collection[object]) -> Mapping[str, KeyPath]:
    """Return FQN → keys for all `names`, or nothing when this is not what torch's planner keeps.

    A planner of somebody else may keep anything here. It is torch's when it has the keys of any of these names.
    torch before 2.6 also kept the keys of objects that it did not save, so there may be more of them than names.
    """
    if type(planner_data) is not dict:
        return {}
    if any(type(key) is Record and key.name not in _HASHABLE for key in planner_data):
        raise UnreadableError("planner_data has a key that torch cannot make one of")
    paths = {fqn: path for fqn, path in planner_data.items() if type(fqn) is str and _is_path(path)}
    if paths.keys().isdisjoint(names):
        return {}
    for fqn, path in paths.items():
        if (joined := ".".join(map(str, path))) != fqn:
            raise _changed_name(fqn, f"the keys of '{joined}'")
    for name in names:
        if name not in paths:
            raise _changed_name(name, "no keys")
    return paths


def _is_path(path: object) -> bool:
    return type(path) is tuple and 0 < len(path) <= MAX_KEYS and all(type(key) in (str, int) for key in path)


def _changed_name(fqn: object, found: str) -> UnreadableError:
    name = fqn if isinstance(fqn, str) else type(fqn).__name__
    return UnreadableError(
        f"'{name}' has {found} in planner_data: a name has changed since it was saved",
        hint="the file is damaged: restore it, or save the checkpoint again",
    )
