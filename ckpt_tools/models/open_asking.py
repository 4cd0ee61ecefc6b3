"""Opening a model whose config asks for more than it has, as far as the table of names knows: transformers is asked."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from ckpt_tools.checkpoint.formats.identify import read_config
from ckpt_tools.checkpoint.formats.opening import Opened, open_path
from ckpt_tools.checkpoint.names import match_names
from ckpt_tools.checkpoint.transform import find_model, strip_wrappers
from ckpt_tools.errors import PartError


def open_asking(path: str, *, as_part: bool, **given: Any) -> Opened:  # noqa: ANN401 - as `open_path` has it
    """Open as `open_path` does, but ask transformers before what lacks weights by the table of names is refused."""
    try:
        return open_path(path, as_part=as_part, **given)
    except PartError as error:
        if not error.by_names:
            raise
        with ExitStack() as stack:
            found = reconsider(stack.enter_context(open_path(path, as_part=True, **given)))
            if found.identity.whole == "part":
                raise
            stack.pop_all()
            return found


def reconsider(opened: Opened) -> Opened:
    """Return what is open, whole where the installed transformers wants no weight that the table of names misses."""
    identity, (config, _) = opened.identity, read_config(opened)
    if not identity.by_names or not identity.architecture:
        return opened
    from ckpt_tools.models.ask_transformers import expected_for  # which knows how to start a process

    model, prefix = find_model(opened.checkpoint)
    names = [strip_wrappers(entry.fqn)[len(prefix) :] for entry in model.tensors]
    found = expected_for(identity.architecture, config, lambda one: match_names(names, one, config).is_whole)
    if found is None or not found.is_proven or not match_names(names, found, config).is_whole:
        return opened
    why = f"every weight of this {identity.architecture} is here, according to {found.by}"
    return replace(opened, identity=replace(identity, whole="yes", evidence=(why,), by_names=False))
