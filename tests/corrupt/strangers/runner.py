"""Builds every config of `attacks` in a copy in the sandbox, and prints as JSON what came of it.

`python -m corrupt.strangers.runner DIRECTORY` (with PYTHONPATH=tests:.). The copies are watched twice: by an audit hook
of our own, whose log is judged, and by the kernel (inotify), which sees what compiled code opens.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import pickle
import socket
import struct
import sys
import warnings
import zipfile
from pathlib import Path

from corrupt.strangers.attacks import BY_DEED, BY_NAME, NESTED, fill
from corrupt.strangers.copies import build_in_a_copy

_IS_DIRECTORY = 0x40000000
_ALL_BUT_DIRECTORIES = 0x0FFF


class Evil:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


class Canary:
    """A model's directory with everything that a loader could be sent to, watched by the kernel."""

    def __init__(self, root):
        self.place = Path(root, "model")
        self.place.mkdir()
        self.marker = Path(root, "marker")
        stream = io.BytesIO()
        pickle.dump(Evil(str(self.marker)), stream)
        self.files = {
            "evil.bin": stream.getvalue(),
            "evil_module.py": f"open({str(self.marker)!r}, 'w')".encode(),
            "hubconf.py": f"def evil(): open({str(self.marker)!r}, 'w')".encode(),
            "config.json": json.dumps({"model_type": "llama", "auto_map": {"AutoModel": "evil_module.A"}}).encode(),
            "pytorch_model.bin": stream.getvalue(),
        }
        for name, content in self.files.items():
            (self.place / name).write_bytes(content)
        with zipfile.ZipFile(self.place / "evil.zip", "w") as archive:
            archive.writestr("zipped_module.py", f"open({str(self.marker)!r}, 'w')")
        self.server = socket.create_server(("127.0.0.1", 0))
        self.server.setblocking(False)
        libc = ctypes.CDLL(None)
        self._descriptor = libc.inotify_init1(os.O_NONBLOCK)
        assert libc.inotify_add_watch(self._descriptor, str(self.place).encode(), _ALL_BUT_DIRECTORIES) > 0
        self.words = {
            "path": str(self.place / "evil.bin"),
            "place": str(self.place),
            "marker": str(self.marker),
            "port": self.server.getsockname()[1],
        }

    def close(self):
        self.server.close()
        os.close(self._descriptor)

    def seen(self):
        """Return what has happened to the files since the last call."""
        found = []
        while True:
            try:
                content = os.read(self._descriptor, 1 << 16)
            except BlockingIOError:
                return found
            while content:
                _, mask, _, length = struct.unpack_from("<iIII", content)
                if not mask & _IS_DIRECTORY:
                    found.append(f"{mask:x} {content[16 : 16 + length].rstrip(bytes(1)).decode()}")
                content = content[16 + length :]

    def harm(self):
        """Return everything that should not have happened."""
        found = self.seen()
        if self.marker.exists():
            found.append("marker")
            self.marker.unlink()
        try:
            self.server.accept()[0].close()
            found.append("connection")
        except BlockingIOError:
            pass
        return found


def _build(config):
    import torch

    from ckpt_tools.models.hf_recipe import HfRecipe

    with torch.device("meta"):
        model = HfRecipe(config, "config.json").build()
    if config.get("late"):
        model.to_empty(device="cpu")(torch.zeros(1, 1, dtype=torch.long))
    return type(model).__name__


def _without_table():
    """Switch the table of names and numbers off in this process: the walls have to hold alone."""
    from ckpt_tools.models import config_recipe

    config_recipe.check_config = lambda config, where: None


def main(root):
    """Run all attacks; with and without the table in front of the walls."""
    warnings.simplefilter("ignore")
    import torch  # noqa: F401 - imported once, for all copies
    import transformers  # noqa: F401
    from corrupt.strangers.tomorrow import register

    import ckpt_tools.models.hf_recipe  # noqa: F401

    register()
    canary = Canary(root)
    late = {f"late-{name}": dict(BY_DEED[f"deed-{name}"], late=True) for name in ("unpickle", "popen", "connect")}
    results = {}
    for group, configs in (("named", BY_NAME), ("walls", BY_DEED | NESTED | late), ("table off", BY_NAME)):
        if group == "table off":
            _without_table()
        for name, config in configs.items():
            filled = fill(config, canary.words)
            answer = build_in_a_copy(_build, filled, foreign=(str(canary.place),), log=True)
            results[f"{group}: {name}"] = answer | {"harm": canary.harm()}
    print(json.dumps({"results": results, "place": str(canary.place), "prefixes": [sys.prefix, sys.base_prefix]}))


if __name__ == "__main__":
    main(sys.argv[1])
