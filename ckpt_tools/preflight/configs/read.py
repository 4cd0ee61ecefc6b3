"""A path → the config in it, whoever's it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ckpt_tools.errors import UsageError
from ckpt_tools.preflight.configs import accelerate, torchtitan
from ckpt_tools.preflight.configs.config import Config, Reading
from ckpt_tools.preflight.configs.document import Document, read_document
from ckpt_tools.preflight.spec import Framework
from ckpt_tools.text import escape_name

Reader = Callable[[Document, int | None], Reading]


def _of_values(read: Callable[..., Reading]) -> Reader:
    def of_document(document: Document, world_size: int | None) -> Reading:
        return read(document.values or {}, world_size=world_size)

    return of_document


_MAPPINGS: Mapping[Framework, tuple[Callable[[Mapping[str, object]], bool], Reader]] = {
    "accelerate": (accelerate.looks_like, _of_values(accelerate.read)),
    "torchtitan": (torchtitan.looks_like, _of_values(torchtitan.read)),
}


def read_config(path: str, *, framework: Framework | None = None, world_size: int | None = None) -> Config:
    """Read a trainer's config.

    Args:
        path: The file.
        framework: Whose it is; None to find out from what is in it.
        world_size: Ranks; None for what the config says.

    Raises:
        UsageError: It looks like no framework's config, or like several.
        UnreadableError: It is not there, or not a config at all.
        LimitError: It is longer than a config is.
        StorageError: The system could not read it.
    """
    document = read_document(path)
    found = framework or detect(document)
    reading = _MAPPINGS[found][1](document, world_size)
    return Config(
        framework=found,
        path=path,
        raw=reading.raw,
        values=reading.values,
        spec=reading.spec,
        findings=reading.findings,
    )


def detect(document: Document) -> Framework:
    """Return whose config a document is.

    Raises:
        UsageError: Nobody's, or more than one framework's.
    """
    found = [name for name, (looks_like, _) in _MAPPINGS.items() if looks_like(document.values or {})]
    if len(found) == 1:
        return found[0]
    raise UsageError(
        f"this looks like a config of {' and of '.join(found)}" if found else "this looks like no trainer's config",
        where=escape_name(document.path),
        hint=f"say whose it is: --framework {'|'.join(found or _MAPPINGS)}",
    )
