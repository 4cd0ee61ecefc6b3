"""Files of `torch.save` with many tensors: seeds, words, and the comparison with `torch.load`."""

from __future__ import annotations

import argparse
import io
import warnings
from pathlib import Path

import torch
from formats.saved import flat, read
from samples import memory_directory

from ckpt_tools.errors import CkptError

TOKENS = (
    *(b"PK\3\4", b"PK\1\2", b"PK\5\6", b"\xff\xff\xff\xff", b"\0\0\0\0"),
    *b"archive/data/0 archive/data.pkl big".split(),
    *(b"_rebuild_tensor_v2", b"_rebuild_tensor", b"_rebuild_parameter", b"FloatStorage", b"UntypedStorage", b"torch"),
    *(b"storage", b"cpu", b"OrderedDict", b"\x88", b"\x89", b"K\x00", b"K\xff", b"J\xff\xff\xff\x7f", b"Q", b"h\x00"),
    *(b"(", b")", b"t", b"\x85", b"\x86", b"R", b"b", b"}", b"]", b"s", b"u", b"e", b".", b"0", b"U\x01w", b"\x81"),
)


def make_seeds() -> tuple[bytes, ...]:
    """Small files of each kind."""
    weight = torch.arange(6.0).reshape(2, 3)
    plain = {"w": weight, "tied": weight, "view": weight[1], "turned": weight.t(), "half": weight.to(torch.bfloat16)}
    trained = {"state_dict": plain, "epoch": 3, "args": argparse.Namespace(x=1), "list": [weight, {"y": weight[:1]}]}

    def saved(value: object, *, zipped: bool = True) -> bytes:
        stream = io.BytesIO()
        torch.save(value, stream, _use_new_zipfile_serialization=zipped)
        return stream.getvalue()

    return saved(plain), saved(plain, zipped=False), saved(trained), saved({"fp8": weight.to(torch.float8_e4m3fn)})


def check(data: bytes) -> bool:
    """Read a file; what ckpt makes of it, torch must make of it, where torch reads it at all."""
    with memory_directory() as directory:
        path = Path(directory) / "model.pt"
        path.write_bytes(data)
        try:
            found = read(path)
        except CkptError:
            return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = flat(torch.load(io.BytesIO(data), weights_only=True, map_location="cpu"))
    except Exception:
        return True  # torch does not load it, and of objects it loads nothing
    assert found.keys() <= loaded.keys()
    assert found == {name: loaded[name] for name in found}
    return True
