"""Whose config, tokenizer and templates go with a model: the step's own, else those of --assets, else the reference's.

Files that mean something together are of one owner. Where another has others of the same name, that is said.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

from ckpt_tools.checkpoint.entries import Asset
from ckpt_tools.checkpoint.formats.file_names import is_hf_asset, is_weights
from ckpt_tools.checkpoint.formats.manifest import MANIFEST_NAME
from ckpt_tools.checkpoint.formats.opening import Opened, open_path
from ckpt_tools.errors import UnreadableError
from ckpt_tools.models.output_names import AssetList
from ckpt_tools.storage.journal import JOURNAL_NAME
from ckpt_tools.storage.locations import is_directory, open_source
from ckpt_tools.storage.source import Source
from ckpt_tools.text import first_few

_SETS = {
    "tokenizer": re.compile(
        r"tokenizer[^/]*|special_tokens_map\.json|added_tokens\.json|vocab[^/]*|merges\.txt|[^/]*\.model|"
        r"chat_template[^/]*|[^/]*\.jinja"
    ),
    "processor": re.compile(r"[^/]*processor[^/]*\.json"),
}
"""Files that are one owner's; every other is by itself."""
_WORDS = re.compile(r"tokenizer\.json|vocab[^/]*|[^/]*\.model")  # One of them, at least, is in every tokenizer
_Files = dict[str, tuple[Source, Asset]]


def choose_assets(owners: Sequence[tuple[str, AssetList]]) -> tuple[AssetList, list[str]]:
    """Return the files to carry along, and for people where another owner's are others.

    Args:
        owners: Whose they are ("that of X"), and what there is; the first one counts.
    """
    chosen: dict[str, _Files] = {}
    whose: dict[str, str] = {}
    notes = []
    for owner, assets in owners:
        found: dict[str, _Files] = {}
        for source, asset in assets:
            found.setdefault(_set_of(asset.file), {})[asset.file] = source, asset
        for kind, files in found.items():
            own = chosen.get(kind)
            if own is None:
                chosen[kind], whose[kind] = files, owner
                continue
            differ = [name for name in files if name in own and not _is_same(own[name], files[name])]
            more = [name for name in files if name not in own]
            if differ:
                notes.append(f"{first_few(differ, 6)}: {whose[kind]}; {owner} differs")
            is_part = kind == "tokenizer" and not any(map(_WORDS.fullmatch, own))
            if is_part and more:
                notes.append(f"{first_few(sorted(own), 6)}: {whose[kind]}; the rest of the {kind} is {owner}")
            if is_part or (not differ and own.keys() & files.keys()):  # the same one, with more files
                chosen[kind] = {**files, **own}
            elif more:
                notes.append(f"{first_few(more, 6)}: left out, {owner}; the {kind} is {whose[kind]}")
    files = {name: each for kind in chosen.values() for name, each in kind.items()}
    return [files[name] for name in sorted(files)], notes


def own_assets(opened: Opened, path: str, stack: ExitStack) -> AssetList:
    """Return what lies in a checkpoint, or beside the parts of a step at `path`, and belongs to its model."""
    own = opened.own_assets
    if opened.step is None:
        return own
    root, names = stack.enter_context(open_source(path)), {asset.file for _, asset in own}
    companions = (asset for asset in opened.step.companions if is_hf_asset(asset.file) and asset.file not in names)
    return [*own, *((root, asset) for asset in companions)]


def tokens_in(path: str, stack: ExitStack) -> AssetList:
    """Return the files of a tokenizer or processor in a directory: what an adapter may bring along for its base."""
    if not is_directory(path):
        return []
    return _files(stack.enter_context(open_source(path)), lambda name: _set_of(name) in _SETS)


def _files(source: Source, is_wanted: Callable[[str], bool]) -> AssetList:
    files = source.list_files().items()
    return [(source, Asset(file=name, nbytes=size)) for name, size in files if is_wanted(name)]


def model_beside(path: str, stack: ExitStack) -> tuple[AssetList, Opened | None]:
    """Return the files of a directory that hold no weights, and the model that lies there with them, if any."""
    opened = None
    with suppress(UnreadableError):
        opened = stack.enter_context(open_path(path))
    source = stack.enter_context(open_source(path)) if opened is None else opened.source
    ours = (MANIFEST_NAME, JOURNAL_NAME)
    return _files(source, lambda name: not is_weights(name) and name not in ours), opened


def _set_of(name: str) -> str:
    return next((kind for kind, pattern in _SETS.items() if pattern.fullmatch(name)), name)


def _is_same(one: tuple[Source, Asset], other: tuple[Source, Asset]) -> bool:
    nbytes = one[1].nbytes
    texts = (source.read(asset.source_file, 0, nbytes) for source, asset in (one, other))
    return nbytes == other[1].nbytes and len(set(texts)) == 1
