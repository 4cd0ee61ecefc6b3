"""A loader of tomorrow: model classes of a library that do with config values whatever loaders have ever done.

`register` makes transformers know them, as a plug-in does; their deeds are real. Each takes what the config names:
"path" (a canary, or an evil file beside it), "place" (a directory of the model's), "marker" (a file to leave behind).
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from pathlib import Path

libc = ctypes.CDLL(None, use_errno=True)
use = importlib.import_module
"""Import when the deed is done, not before."""


def _hub(o):
    os.environ["HF_HUB_OFFLINE"] = "0"
    use("huggingface_hub.constants").HF_HUB_OFFLINE = False
    use("huggingface_hub").hf_hub_download("org/name", "evil.bin")


def _import(o, place=None):
    sys.path.insert(0, o.place if place is None else place)
    __import__("evil_module")


def _import_here(o):
    os.chdir(o.place)
    _import(o, "")


def _import_file(o):
    util = use("importlib.util")
    spec = util.spec_from_file_location("evil", os.path.join(o.place, "evil_module.py"))
    spec.loader.exec_module(util.module_from_spec(spec))


def _import_written(o):
    directory = use("tempfile").mkdtemp()
    with open(os.path.join(directory, "written_module.py"), "w") as file:
        file.write(f"open({o.marker!r}, 'w')")
    sys.path.insert(0, directory)
    __import__("written_module")


def _archive(o):
    sys.path.insert(0, os.path.join(o.place, "evil.zip"))
    __import__("zipped_module")


def _link(o):
    link = os.path.join(use("tempfile").mkdtemp(), "link")
    os.symlink(o.path, link)
    open(link).close()


def _write_package(o):
    open(os.path.join(os.path.dirname(use("transformers").__file__), "evil_module.py"), "w").close()


def _fork(o):
    if os.fork() == 0:
        open(o.marker, "w").close()


def _send(o):
    socket = use("socket")
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"secret", ("127.0.0.1", o.port))


def _c(function, *args):
    if getattr(libc, function)(*args) < 0:
        raise PermissionError(ctypes.get_errno(), f"libc {function}")


DEEDS = {
    "unpickle": lambda o: use("pickle").loads(Path(o.path).read_bytes()),
    "unpickle_words": lambda o: use("pickle").loads(b"cos\nsystem\n(S'touch " + o.marker.encode() + b"'\ntR."),
    "torch_load": lambda o: use("torch").load(o.path, weights_only=False),
    "torch_load_safely": lambda o: use("torch").load(o.path, weights_only=True),
    "torch_load_mapped": lambda o: use("torch").load(o.path, weights_only=True, mmap=True),
    "torch_jit": lambda o: use("torch").jit.load(o.path),
    "torch_reader": lambda o: use("torch")._C.PyTorchFileReader(o.path),
    "torch_storage": lambda o: use("torch").UntypedStorage.from_file(o.path, False, 4),
    "torch_hub": lambda o: use("torch").hub.load(o.place, "evil", source="local", trust_repo=True),
    "torch_extension": lambda o: use("torch").ops.load_library(o.path),
    "numpy": lambda o: use("numpy").load(o.path, allow_pickle=True),
    "numpy_mapped": lambda o: use("numpy").memmap(o.path, mode="r"),
    "safetensors": lambda o: use("safetensors").safe_open(o.path, "pt"),
    "safetensors_torch": lambda o: use("safetensors.torch").load_file(o.path),
    "pretrained": lambda o: use("transformers").AutoModel.from_pretrained(o.place),
    "pretrained_code": lambda o: use("transformers").AutoModel.from_pretrained(o.place, trust_remote_code=True),
    "tokenizer": lambda o: use("tokenizers").Tokenizer.from_file(o.path),
    "hub": _hub,
    "import": _import,
    "import_here": _import_here,
    "import_file": _import_file,
    "import_written": _import_written,
    "run_file": lambda o: use("runpy").run_path(os.path.join(o.place, "evil_module.py")),
    "exec_file": lambda o: exec(Path(o.place, "evil_module.py").read_text()),
    "link": _link,
    "hard_link": lambda o: os.link(o.path, os.path.join(use("tempfile").mkdtemp(), "link")),
    "write": lambda o: open(o.marker, "w").close(),
    "write_package": _write_package,
    "replace": lambda o: os.rename(o.path, o.marker),
    "remove": lambda o: os.remove(o.path),
    "remove_tree": lambda o: use("shutil").rmtree(o.place),
    "mode": lambda o: os.chmod(o.path, 0o777),
    "system": lambda o: os.system(f"touch {o.marker}"),
    "popen": lambda o: use("subprocess").run(["touch", o.marker]),
    "spawn": lambda o: os.posix_spawn("/bin/touch", ["touch", o.marker], {}),
    "exec": lambda o: os.execv("/bin/touch", ["touch", o.marker]),
    "fork": _fork,
    "processes": lambda o: (
        use("multiprocessing").get_context("spawn").Process(target=open, args=(o.marker, "w")).start()
    ),
    "connect": lambda o: use("socket").create_connection(("127.0.0.1", o.port), timeout=2),
    "bind": lambda o: use("socket").socket().bind(("127.0.0.1", 0)),
    "send": _send,
    "look_up": lambda o: use("socket").getaddrinfo("secret.example.com", 80),
    "fetch": lambda o: use("urllib.request").urlopen(f"http://127.0.0.1:{o.port}/evil", timeout=2),
    "library": lambda o: ctypes.CDLL(o.path),
    "database": lambda o: use("sqlite3").connect(o.path).execute("select 1 from x"),
    "shelf": lambda o: use("shelve").open(o.marker).close(),
    "archive": _archive,
    "environment": lambda o: open("/proc/self/environ").close(),
    "secret": lambda o: open(os.path.expanduser("~/.netrc")).close(),
    "parent": lambda o: open(f"/proc/{os.getppid()}/environ").close(),
    "c_open": lambda o: _c("open", o.path.encode(), os.O_RDONLY),
    "c_write": lambda o: _c("open", o.marker.encode(), os.O_WRONLY | os.O_CREAT, 0o600),
    "c_system": lambda o: libc.system(f"touch {o.marker}".encode()),
    "c_socket": lambda o: _c("socket", 2, 1, 0),
    "c_remove": lambda o: _c("unlink", o.path.encode()),
}
COMPILED = frozenset(
    {"torch_jit", "torch_reader", "torch_storage", "safetensors", "safetensors_torch", "tokenizer", "c_open", "c_write"}
    | {"c_system", "c_socket", "c_remove", "database"}
)
"""Deeds of compiled code, which Python's audit hooks do not see."""


def register():
    """Teach transformers the family "tomorrow": one deed when it is built, or, with "late", when it is run."""
    import torch
    import transformers
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
    transformers.TomorrowModel = TomorrowModel
    return TomorrowModel
