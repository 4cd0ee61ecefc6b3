"""A loader of tomorrow: model classes of a library that do with config values whatever loaders have ever done.

`register` makes transformers know them, as a plug-in does; their deeds are real. Each takes what the config names:
"path" (a canary, or an evil file beside it), "place" (a directory of the model's), "marker" (a file to leave behind).
"""

from __future__ import annotations

import ctypes
import os
import sys


def _unpickle(o):
    import pickle

    with open(o.path, "rb") as file:
        pickle.load(file)


def _unpickle_words(o):
    import pickle

    pickle.loads(b"cos\nsystem\n(S'touch " + o.marker.encode() + b"'\ntR.")


def _torch_load(o):
    import torch

    torch.load(o.path, weights_only=False)


def _torch_load_safely(o):
    import torch

    torch.load(o.path, weights_only=True)


def _torch_load_mapped(o):
    import torch

    torch.load(o.path, weights_only=True, mmap=True)


def _torch_jit(o):
    import torch

    torch.jit.load(o.path)


def _torch_reader(o):
    import torch

    torch._C.PyTorchFileReader(o.path)


def _torch_storage(o):
    import torch

    torch.UntypedStorage.from_file(o.path, False, 4)


def _torch_hub(o):
    import torch

    torch.hub.load(o.place, "evil", source="local", trust_repo=True)


def _torch_extension(o):
    import torch

    torch.ops.load_library(o.path)


def _numpy(o):
    import numpy

    numpy.load(o.path, allow_pickle=True)


def _numpy_mapped(o):
    import numpy

    numpy.memmap(o.path, mode="r")


def _safetensors(o):
    from safetensors import safe_open

    safe_open(o.path, "pt")


def _safetensors_torch(o):
    from safetensors.torch import load_file

    load_file(o.path)


def _pretrained(o):
    from transformers import AutoModel

    AutoModel.from_pretrained(o.place)


def _pretrained_code(o):
    from transformers import AutoModel

    AutoModel.from_pretrained(o.place, trust_remote_code=True)


def _tokenizer(o):
    from tokenizers import Tokenizer

    Tokenizer.from_file(o.path)


def _hub(o):
    from huggingface_hub import hf_hub_download

    os.environ["HF_HUB_OFFLINE"] = "0"
    import huggingface_hub.constants

    huggingface_hub.constants.HF_HUB_OFFLINE = False
    hf_hub_download("org/name", "evil.bin")


def _import(o):
    sys.path.insert(0, o.place)
    __import__("evil_module")


def _import_here(o):
    os.chdir(o.place)
    sys.path.insert(0, "")
    __import__("evil_module")


def _import_file(o):
    import importlib.util

    spec = importlib.util.spec_from_file_location("evil", os.path.join(o.place, "evil_module.py"))
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _import_written(o):
    import tempfile

    directory = tempfile.mkdtemp()
    with open(os.path.join(directory, "written_module.py"), "w") as file:
        file.write(f"open({o.marker!r}, 'w')")
    sys.path.insert(0, directory)
    __import__("written_module")


def _run_file(o):
    import runpy

    runpy.run_path(os.path.join(o.place, "evil_module.py"))


def _exec_file(o):
    with open(os.path.join(o.place, "evil_module.py")) as file:
        exec(file.read())


def _link(o):
    import tempfile

    link = os.path.join(tempfile.mkdtemp(), "link")
    os.symlink(o.path, link)
    open(link).close()


def _hard_link(o):
    import tempfile

    os.link(o.path, os.path.join(tempfile.mkdtemp(), "link"))


def _write(o):
    open(o.marker, "w").close()


def _write_package(o):
    import transformers

    open(os.path.join(os.path.dirname(transformers.__file__), "evil_module.py"), "w").close()


def _replace(o):
    os.rename(o.path, o.marker)


def _remove(o):
    os.remove(o.path)


def _remove_tree(o):
    import shutil

    shutil.rmtree(o.place)


def _mode(o):
    os.chmod(o.path, 0o777)


def _system(o):
    os.system(f"touch {o.marker}")


def _popen(o):
    import subprocess

    subprocess.run(["touch", o.marker])


def _spawn(o):
    os.posix_spawn("/bin/touch", ["touch", o.marker], {})


def _exec(o):
    os.execv("/bin/touch", ["touch", o.marker])


def _fork(o):
    if os.fork() == 0:
        open(o.marker, "w").close()


def _processes(o):
    import multiprocessing

    multiprocessing.get_context("spawn").Process(target=open, args=(o.marker, "w")).start()


def _connect(o):
    import socket

    socket.create_connection(("127.0.0.1", o.port), timeout=2)


def _bind(o):
    import socket

    socket.socket().bind(("127.0.0.1", 0))


def _send(o):
    import socket

    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"secret", ("127.0.0.1", o.port))


def _look_up(o):
    import socket

    socket.getaddrinfo("secret.example.com", 80)


def _fetch(o):
    import urllib.request

    urllib.request.urlopen(f"http://127.0.0.1:{o.port}/evil", timeout=2)


def _library(o):
    ctypes.CDLL(o.path)


def _database(o):
    import sqlite3

    sqlite3.connect(o.path).execute("select 1 from x")


def _shelf(o):
    import shelve

    shelve.open(o.marker).close()


def _archive(o):
    sys.path.insert(0, os.path.join(o.place, "evil.zip"))
    __import__("zipped_module")


def _environment(o):
    open("/proc/self/environ").close()


def _secret(o):
    open(os.path.expanduser("~/.netrc")).close()


def _parent(o):
    open(f"/proc/{os.getppid()}/environ").close()


libc = ctypes.CDLL(None, use_errno=True)


def _c_open(o):
    if libc.open(o.path.encode(), os.O_RDONLY) < 0:
        raise PermissionError(ctypes.get_errno(), "libc open")


def _c_write(o):
    if libc.open(o.marker.encode(), os.O_WRONLY | os.O_CREAT, 0o600) < 0:
        raise PermissionError(ctypes.get_errno(), "libc open")


def _c_system(o):
    libc.system(f"touch {o.marker}".encode())


def _c_socket(o):
    if libc.socket(2, 1, 0) < 0:
        raise PermissionError(ctypes.get_errno(), "libc socket")


def _c_remove(o):
    if libc.unlink(o.path.encode()) < 0:
        raise PermissionError(ctypes.get_errno(), "libc unlink")


COMPILED = frozenset(
    {"torch_jit", "torch_reader", "torch_storage", "safetensors", "safetensors_torch", "tokenizer", "c_open", "c_write"}
    | {"c_system", "c_socket", "c_remove", "database"}
)
"""Deeds of compiled code, which Python's audit hooks do not see."""
DEEDS = {name[1:]: deed for name, deed in list(globals().items()) if name.startswith("_") and not name.startswith("__")}


def register():
    """Teach transformers the family "tomorrow": one deed when it is built, or, with "late", when it is run."""
    import torch
    from transformers import (
        AutoBackbone,
        AutoConfig,
        AutoModel,
        AutoModelForCausalLM,
        PreTrainedConfig,
        PreTrainedModel,
    )

    class TomorrowConfig(PreTrainedConfig):
        model_type = "tomorrow"
        hidden_size = 16

        def __init__(self, deed=None, path="", place="", marker="", port=0, late=False, **more):
            self.deed, self.path, self.place, self.marker, self.port, self.late = deed, path, place, marker, port, late
            self.tie_word_embeddings, self.pad_token_id, self.use_bidirectional_attention = False, 0, False
            super().__init__(**more)

    class TomorrowModel(PreTrainedModel):
        config_class = TomorrowConfig
        main_input_name = "input_ids"

        def __init__(self, config):
            super().__init__(config)
            self.embed = torch.nn.Embedding(32, 16)
            if config.deed and not config.late:
                DEEDS[config.deed](config)
            self.post_init()

        def forward(self, input_ids=None, labels=None):
            if self.config.late:
                DEEDS[self.config.deed](self.config)
            return {"loss": self.embed(input_ids).float().square().mean()}

    AutoConfig.register("tomorrow", TomorrowConfig)
    for auto in (AutoModel, AutoModelForCausalLM, AutoBackbone):
        auto.register(TomorrowConfig, TomorrowModel)
    import transformers

    transformers.TomorrowModel = TomorrowModel
    return TomorrowModel
