"""Types of PEFT's that ckpt carries: names, bytes and configuration stay PEFT's own, and PEFT itself judges them.

A role is the end of the tensor's name, without the adapter's own name. Refused by name are the types whose names or
tensors depend on the whole model: ADAPTION_PROMPT, FROD, SHADOW, XLORA.

Source: peft 0.21 `tuners/*/{config,layer,model}.py`, `utils/save_and_load.py`.
"""

from __future__ import annotations

import os.path
import re
import tomllib
from typing import ClassVar

from ckpt_tools.adapters.architectures.architecture import frozen
from ckpt_tools.adapters.families.family import PEFT_COMMON, Family

_LITERAL = re.compile(r"[\w.]+")


class Carried(Family):
    """Factors that PEFT alone computes with."""

    is_carried = True
    names: ClassVar[tuple[tuple[str, str], ...]] = ()
    """(pattern before the adapter's own name, pattern behind it) of every tensor in a module."""
    weak: ClassVar[frozenset[str]] = frozenset()
    """Of these patterns those that prove no such type: others have them as well."""
    root: ClassVar[str] = "base_model."  # What stands in front of tensors that all modules share
    shared: ClassVar[tuple[tuple[str, str], ...]] = ()
    """As `names`, of these tensors; a live model has them in its modules as well."""
    peft_fields = frozenset(PEFT_COMMON.split())

    def peft_suffix(self, role: str) -> str | None:
        """Return the role, which is PEFT's own name."""
        return role

    def shared_name(self, role: str) -> str | None:
        """Return the whole name of a tensor that all modules share; None for one of a module."""
        is_shared = any(re.fullmatch(head + (rf"\.{rest}" if rest else ""), role) for head, rest in self.shared)
        return self.root + role if is_shared else None

    def may_be_flat(self, role: str) -> bool:
        """Many are vectors."""
        return True

    def may_be_whole(self, role: str) -> bool:
        """Places in a weight."""
        return "indices" in role


def _carried(peft_type: str, title: str, names: str, shared: str = "", **others: object) -> Carried:
    """Return the type that a table of carried.toml describes; in small letters `peft_type` is the family's name."""
    heads = [_parts(name)[0] for name in f"{names} {shared}".split()]
    must = [name.lstrip("?").replace("@", ".") for name in names.split() if name[0] != "~"]
    attributes: dict[str, object] = {
        "name": peft_type.lower(),
        "title": title,
        "peft_type": peft_type,
        "marker": os.path.commonprefix(heads).partition("[")[0],  # noqa: RUF071 - letters, not parts of paths
        "names": tuple(map(_parts, names.split())),
        "weak": frozenset(_parts(name)[0] for name in names.split() if name[0] == "?"),
        "required": tuple(filter(_LITERAL.fullmatch, must)),
        "shared": tuple(map(_parts, shared.split())),
    }
    attributes |= {key: frozen(value) for key, value in others.items()}
    return type(title, (Carried,), attributes)()  # type: ignore[no-any-return]  # of a class that is made here


def _parts(name: str) -> tuple[str, str]:
    head, _, rest = name.lstrip("?~").partition("@")
    return head, rest


with open(os.path.join(os.path.dirname(__file__), "carried.toml"), "rb") as _file:
    CARRIED: tuple[Carried, ...] = tuple(_carried(kind, **table) for kind, table in tomllib.load(_file).items())
