"""Which names in PEFT's configuration match exactly the adapted modules. Pure.

Source: peft 0.21 `tuners/tuners_utils.py`, `check_target_module_exists`: a name matches the module of that path and
every module whose path ends with a dot and the name; `utils/other.py`, `_set_trainable`: modules_to_save match the
end of a path, dot or not.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from ckpt_tools.adapters.read.sidecars import matches


def minimal_suffixes(adapted: Collection[str], modules: Collection[str]) -> tuple[str, ...] | None:
    """Return the shortest names that match the adapted modules of a model and no other one.

    Args:
        adapted: Paths to match.
        modules: Paths of all modules of the model.

    Returns:
        Sorted names; None when no list can do it, because an adapted path is the end of another module's path.
    """
    ends: dict[str, set[str]] = {}
    leaves = {path.rpartition(".")[2] for path in adapted}
    for module in modules:
        parts = module.split(".")
        if parts[-1] not in leaves:
            continue
        for start in range(len(parts)):
            ends.setdefault(".".join(parts[start:]), set()).add(module)
    wanted = set(adapted)
    chosen: set[str] = set()
    for path in sorted(wanted):
        parts = path.split(".")
        suffixes = (".".join(parts[start:]) for start in reversed(range(len(parts))))
        found = next((suffix for suffix in suffixes if ends.get(suffix, set()) <= wanted), None)
        if found is None:
            return None
        chosen.add(found)
    return tuple(sorted(chosen))


def exact_pattern(adapted: Collection[str]) -> str:
    """Return a regular expression for the adapted modules alone: PEFT matches one against whole paths."""
    return "|".join(re.escape(path).replace(r"\-", "-") for path in sorted(adapted))


def matched(target: object, module: str) -> bool | None:
    """Does PEFT's `target_modules` match a module? None where it cannot be told without the model ("all-linear").

    Raises:
        UsageError: A pattern that cannot be evaluated.
    """
    if isinstance(target, str):
        if target.lower() == "all-linear":
            return None
        return matches(target, module, shown=target, where="target_modules", full=True)
    if isinstance(target, list):
        return any(isinstance(name, str) and (module == name or module.endswith("." + name)) for name in target)
    return None


def minimal_saved(saved: Collection[str], modules: Collection[str]) -> tuple[str, ...] | None:
    """Return names for modules_to_save: whole paths, or a last component that matches exactly the same modules.

    Args:
        saved: Paths to match.
        modules: Paths of all modules of the model; empty when they are not known, and whole paths have to do.

    Returns:
        Sorted names; None when a whole path is the end of another module's.
    """
    wanted = set(saved)
    chosen = set()
    for path in sorted(wanted):
        names = (path.rpartition(".")[2], path) if modules else (path,)
        found = next((name for name in names if all(m in wanted for m in modules if m.endswith(name))), None)
        if found is None:
            return None
        chosen.add(found)
    return tuple(sorted(chosen))
