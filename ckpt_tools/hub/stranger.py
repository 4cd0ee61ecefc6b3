"""What a stranger's libraries make of what leaves: card, config and weights, read by the libraries themselves."""

from __future__ import annotations

import importlib
import io
import os
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ckpt_tools.errors import UnreadableError
from ckpt_tools.hub.check import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PIPELINE_CONFIG, Kind
from ckpt_tools.hub.front_matter import CARD_NAME
from ckpt_tools.hub.plan import LocalFile
from ckpt_tools.models.config import CONFIG_NAME
from ckpt_tools.storage.source import LocalSource

_READERS: tuple[tuple[str, str, Kind | None], ...] = (
    (CARD_NAME, "huggingface_hub:ModelCard.load", None),
    (ADAPTER_CONFIG, "peft:PeftConfig.from_pretrained", "peft"),
    (ADAPTER_WEIGHTS[0], "peft:load_peft_weights", "peft"),
    (CONFIG_NAME, "transformers:AutoConfig.from_pretrained", "transformers"),
    (PIPELINE_CONFIG, "diffusers:DiffusionPipeline.load_config", "diffusers"),
)
"""File, what reads it, and the kind of directory in which it does; a pickled adapter is never loaded."""
_OPTIONS: Mapping[str, Mapping[str, object]] = {
    "load_peft_weights": {"device": "cpu"},
    "AutoConfig.from_pretrained": {"local_files_only": True, "trust_remote_code": False},
}
_UNKNOWN = ("does not recognize", "Unrecognized model", "trust_remote_code")
"""Words of transformers for a model that needs a newer version of it, or the repository's own code."""
_MAX_BYTES = 2 << 30  # Larger files are not loaded into memory


def check_loads(source: LocalSource, local: Mapping[str, LocalFile], kind: Kind) -> list[str]:
    """Return what was not checked; raise UnreadableError where a library cannot read what would be uploaded."""
    notes = []
    with tempfile.TemporaryDirectory(prefix="ckpt-push-") as root:
        for name, reader, of_kind in _READERS:
            if name not in local or of_kind not in (None, kind):
                continue
            path, content = Path(root, name), local[name].content
            if content is not None:
                path.write_bytes(content)
            else:
                path.symlink_to(os.path.abspath(source.path(name)))
            why = "above 2 GiB" if local[name].nbytes > _MAX_BYTES else _read(name, reader, root)
            notes += [f"not checked: {name} as {reader.partition(':')[0]} reads it: {why}"] if why else []
    return notes


def _read(name: str, reader: str, root: str) -> str | None:
    library, _, path = reader.partition(":")
    if find_spec(library) is None:
        return f"install {library}"
    try:
        said = io.StringIO()  # what libraries print when imported
        with redirect_stdout(said), redirect_stderr(said), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read: Any = importlib.import_module(library)
            for part in path.split("."):
                read = getattr(read, part)
            read(os.path.join(root, name) if name == CARD_NAME else root, **_OPTIONS.get(path, {}))
    except Exception as error:  # noqa: BLE001 - whatever a library raises at what it cannot read
        text = " ".join(str(error).replace(root, ".").split())
        if any(word in text for word in _UNKNOWN):
            return "this version does not know the model without its own code"
        what = f"{library} cannot read the file ({type(error).__name__}): {text}"
        raise UnreadableError(what, where=name, hint="save it again, or correct it") from None
    return None
