"""What a checkpoint could run: carriers in every kind of file, files of trainers without an alarm, inert output."""

from __future__ import annotations

import argparse
import bz2
import datetime
import enum
import functools
import gzip
import io
import json
import os
import pathlib
import pickle
import random
import shutil
import struct
import tarfile
import uuid
import warnings
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from samples import write_model
from steps import toy_steps

import ckpt_tools
from ckpt_tools.checkpoint.formats._pickle_names import judge, walk
from ckpt_tools.checkpoint.formats.scan import scan_files
from ckpt_tools.cli import main
from ckpt_tools.hub.plan import list_directory
from ckpt_tools.storage.source import LocalSource

MARK = "/dev/null/executed"


class Evil:
    """Asks for a program when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {MARK}",)


EVIL = pickle.dumps(Evil(), 4)
EVIL_2 = pickle.dumps(Evil(), 2)


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def by_global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n(V1\ntR.".encode()


def by_inst(module: str, name: str) -> bytes:
    return f"(V1\ni{module}\n{name}\n.".encode()


def by_stack(module: str, name: str) -> bytes:
    return b"\x80\4" + text(module) + text(name) + b"\x93)R."


def by_memo(module: str, name: str) -> bytes:
    harmless = f"Vtorch\np0\n0VLongStorage\np1\n0V{module}\np2\n0V{name}\np3\n0"
    return harmless.encode() + b"g2\ng3\n\x93(tR."


def by_object(module: str, name: str) -> bytes:
    return b"\x80\2(" + f"c{module}\n{name}\n".encode() + b"o."


# Of the payloads in the tests of picklescan 1.0.5 and modelscan 0.8.8, and of their tables: each is dangerous to one.
NAMES = """
os.system posix.system nt.system subprocess.run subprocess.Popen builtins.eval builtins.exec builtins.compile
builtins.open builtins.breakpoint builtins.getattr builtins.__import__ __builtin__.eval __builtin__.apply
__builtin__.exec __builtin__.getattr builtins.eval.__call__ requests.api.get aiohttp.client.ClientSession
asyncio.unix_events._UnixSubprocessTransport._start bdb.Bdb bdb.Bdb.run cloudpickle.cloudpickle._make_function
cloudpickle.cloudpickle.subimport types.CodeType commands.getoutput ctypes.CDLL functools.partial
httplib.HTTPSConnection logging.FileHandler _io.FileIO numpy.f2py.crackfortran.getlincoef
numpy.testing._private.utils.runstring _operator.attrgetter operator.itemgetter operator.methodcaller
runpy._run_code shutil.rmtree socket.create_connection ssl.get_server_certificate sys.exit
code.InteractiveInterpreter.runcode cProfile.run cProfile.runctx distutils.file_util.write_file doctest.debug_script
ensurepip._run_pip idlelib.autocomplete.AutoComplete.get_entity idlelib.calltip.Calltip.fetch_tip
idlelib.debugobj.ObjectTreeItem.SetText idlelib.pyshell.ModifiedInterpreter.runcode idlelib.run.Executive.runcode
imaplib.IMAP4_stream lib2to3.pgen2.grammar.Grammar.loads lib2to3.pgen2.pgen.ParserGenerator.make_label pdb.run
pickle.loads _pickle.loads pip.main pkgutil.resolve_name pty.spawn profile.Profile.run pydoc.pipepager pydoc.locate
test.support.script_helper.assert_python_ok timeit.timeit torch._dynamo.guards.GuardBuilder.get
torch._inductor.codecache.compile_file torch.fx.experimental.symbolic_shapes.ShapeEnv.evaluate_guards_expression
torch.jit.unsupported_tensor_ops.execWrapper torch.serialization.load
torch.utils._config_module.ConfigModule.load_config torch.utils.bottleneck.__main__.run_cprofile
torch.utils.collect_env.run torch.utils.data.datapipes.utils.decoder.basichandlers trace.Trace.run
trace.Trace.runctx urllib.request.urlopen uuid._get_command_stdout venv.create webbrowser.open
_osx_support._read_output _aix_support._read_cmd_output _pyrepl.pager.pipe_pager torch.serialization.os.system
collections.OrderedDict.__init__.__globals__ numpy.sys.modules
"""


def scan_bytes(tmp_path: Path, content: bytes, name: str = "file.pkl") -> ckpt_tools.Scan:
    (tmp_path / name).write_bytes(content)
    return ckpt_tools.scan(tmp_path / name)


@pytest.mark.parametrize("make", [by_global, by_inst, by_stack, by_memo, by_object])
def test_scan_names_that_other_scanners_call_dangerous_in_every_spelling(tmp_path, make: Callable[[str, str], bytes]):
    for name in NAMES.split():
        for dot in range(name.count(".") if make in (by_stack, by_memo) else 1):
            module, attribute = name.rsplit(".", dot + 1)[0], ".".join(name.rsplit(".", dot + 1)[1:])
            found = scan_bytes(tmp_path, make(module, attribute))
            assert (found.verdict, found.ok) == ("dangerous", False), name
            assert (name, "dangerous") in found.executables[0].names


def zipped(name: str = "archive/data.pkl", content: bytes = EVIL, *, method: int = 0) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression=method) as archive:
        archive.writestr(name, content)
    return out.getvalue()


def patched(content: bytes, *changes: tuple[bytes, int, bytes]) -> bytes:
    """Return a zip with bytes changed in the records that begin with a signature."""
    made = bytearray(content)
    for signature, offset, value in changes:
        at = made.find(signature) + offset
        made[at : at + len(value)] = value
    return bytes(made)


def tarred(name: str = "a/model_weights.ckpt", mode: str = "w") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:  # type: ignore[call-overload]
        info = tarfile.TarInfo(name)
        info.size = len(EVIL)
        archive.addfile(info, io.BytesIO(EVIL))
    return out.getvalue()


def array(*values: object, save: Callable[..., None] = np.save) -> bytes:
    out = io.BytesIO()
    save(out, np.array([*values, None], dtype=object))
    return out.getvalue()


def legacy(value: object) -> bytes:
    out = io.BytesIO()
    torch.save(value, out, _use_new_zipfile_serialization=False)
    return out.getvalue()


def saved(value: object) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


INNER = b"\x80\4" + b"C" + bytes([len(EVIL)]) + EVIL
CARRIERS = {
    "protocol 0": ("x.pkl", pickle.dumps(Evil(), 0)),
    "a name that says nothing": ("weights", EVIL),
    "the name of something else": ("model.txt", EVIL),
    "protocol 0 under another name": ("README.md", pickle.dumps(Evil(), 0)),
    "called safetensors": ("model.safetensors", EVIL),
    "truncated after the call": ("x.pkl", EVIL[:-2]),
    "an unknown opcode after the call": ("x.pkl", EVIL[:-1] + b"\xff garbage"),
    "invalid text after the call": ("x.pkl", EVIL[:-1] + b"\x8c\4\xff\xff\xff\xff."),
    "the second of two pickles": ("x.pkl", pickle.dumps(["a"]) + EVIL),
    "far behind": ("x.pkl", pickle.dumps(["a" * 5_000_000]) + EVIL),
    "torch's zip": ("x.pt", saved({"w": torch.ones(2), "x": Evil()})),
    "torch's stream": ("x.bin", legacy({"w": torch.ones(2), "x": Evil()})),
    "another pickle of a zip": ("x.pt", zipped("a/other")),
    "flagged as encrypted": ("x.zip", patched(zipped(), (b"PK\3\4", 6, b"\1\0"), (b"PK\1\2", 8, b"\1\0"))),
    "flagged as patched": ("x.zip", patched(zipped(), (b"PK\3\4", 6, b"\x20\0"), (b"PK\1\2", 8, b"\x20\0"))),
    "a wrong CRC": ("x.zip", patched(zipped(), (b"PK\3\4", 14, b"1234"), (b"PK\1\2", 16, b"1234"))),
    "another name in the local header": ("x.zip", patched(zipped(), (b"PK\3\4", 30, b"B"))),
    "bytes before a zip": ("x.pt", b"#!/bin/sh\n" + zipped()),
    "deflated": ("x.npz", zipped("a.pkl", method=zipfile.ZIP_DEFLATED)),
    "bz2 in a zip": ("x.zip", zipped("a.pkl", method=zipfile.ZIP_BZIP2)),
    "an archive in an archive": ("x.zip", zipped("inner.zip", zipped())),
    ".npy": ("x.npy", array(Evil())),
    ".npz": ("x.npz", array(Evil(), save=np.savez)),
    ".npz, compressed": ("x.npz", array(Evil(), save=np.savez_compressed)),
    "tar": ("x.nemo", tarred()),
    "tar.gz": ("x.nemo", tarred(mode="w:gz")),
    "gzip": ("x.pkl.gz", gzip.compress(EVIL)),
    "the second of two gzips": ("x.gz", gzip.compress(pickle.dumps([1])) + gzip.compress(EVIL)),
    "bzip2": ("x.bz2", bz2.compress(EVIL)),
    "joblib's zlib": ("x.joblib", zlib.compress(EVIL)),
    "bytes for pickle.loads": ("x.pkl", b"\x80\4cmine\nloads\n" + INNER[2:] + b"\x85R."),
    "bytes as protocol 2 has them": ("x.pkl", pickle.dumps(EVIL, 2)),
    "long bytes as protocol 2 has them": ("x.pkl", pickle.dumps(pickle.dumps([Evil(), "a" * 9000]), 2)),
    "a saved file in bytes": ("x.pt", saved({"extra": io.BytesIO(saved(Evil()))})),
    "getattr of a module": ("x.pkl", b"\x80\4cbuiltins\ngetattr\n(cmine\nmodule\nVsystem\ntR(V1\ntR."),
    "getattr of what a call makes": ("x.pkl", b"\x80\4cbuiltins\ngetattr\n(cmine\nmodule\n)RVrun\ntR)R."),
    "getattr of a special name": ("x.pkl", b"\x80\4cbuiltins\ngetattr\n(ccollections\nOrderedDict\nV__init__\ntR."),
    "getattr given away": ("x.pkl", b"\x80\4cmine\ncall\n(cbuiltins\ngetattr\ntR."),
    "partial": ("x.pkl", pickle.dumps(functools.partial(os.system, "true"))),
    "names that are no text": ("x.pkl", b"\x80\4K\1K\2\x93)R."),
    "names that a call makes": ("x.pkl", b"\x80\4cmine\nname\n)R\x8c\4exec\x93)R."),
    "names with escapes": ("x.pkl", b"V\\u006fs\nS'sys\\x74em'\n\x93)R."),
    "a memo index that ends early": ("x.pkl", b"Vtorch\np0\n0Vshutil\np0\0\n0Vrmtree\np1\n0g0\ng1\n\x93(tR."),
    "memo of nothing": ("x.pkl", b"\x80\4h\x09\x8c\6system\x93)R."),
}


@pytest.mark.parametrize("kind", CARRIERS)
def test_scan_carriers_are_dangerous_alone_and_below_a_directory(tmp_path, kind: str):
    name, content = CARRIERS[kind]
    assert not scan_bytes(tmp_path, content, name).ok
    below = tmp_path / "below" / "further"
    below.mkdir(parents=True)
    shutil.move(tmp_path / name, below / name)
    found = ckpt_tools.scan(tmp_path)
    assert not found.ok
    assert found.executables[0].file.partition("!")[0] == f"below/further/{name}"


class Colour(enum.Enum):
    RED = 1


def state() -> dict[str, object]:
    """What trainers keep."""
    model = torch.nn.Linear(3, 2)
    optimizers = [kind(model.parameters()) for kind in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)]
    model(torch.ones(1, 3)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    schedules = [
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizers[0], 10),
        torch.optim.lr_scheduler.LambdaLR(optimizers[0], lambda step: 1.0),
        torch.optim.lr_scheduler.OneCycleLR(optimizers[1], 0.1, 10),
    ]
    return {
        "model": model.state_dict(),
        "optimizers": [each.state_dict() for each in optimizers],
        "schedules": [each.state_dict() for each in schedules],
        "rng": (torch.get_rng_state(), np.random.get_state(), random.getstate(), np.random.default_rng(1)),
        "args": argparse.Namespace(lr=0.1, out=pathlib.PurePosixPath("/x")),
        "odd": [uuid.UUID(int=1), datetime.datetime.now(datetime.UTC), OrderedDict(a={1}), 1j, np.float32(1), b"bytes"],
        "arrays": [np.arange(3), np.array(["a"]), np.array([None, 1], dtype=object), torch.Size([1]), torch.bfloat16],
        "scaler": torch.amp.GradScaler("cpu").state_dict(),
        "parameter": torch.nn.Parameter(torch.ones(1)),
        "sparse": torch.eye(3).to_sparse(),
        "nested": io.BytesIO(saved({"extra": torch.ones(1)})),
    }


@pytest.mark.filterwarnings("ignore:`torch.*")
@pytest.mark.filterwarnings("ignore:Detected call")
def test_scan_files_of_trainers_are_no_alarm(tmp_path):
    value = state()
    files = {f"protocol{each}.pkl": pickle.dumps(value["args"], each) for each in range(6)}
    files |= {f"state{each}.pkl": pickle.dumps(value, each) for each in (2, 3, 4, 5)}
    files |= {"new.pt": saved(value), "old.pt": legacy({k: v for k, v in value.items() if k != "sparse"})}
    files |= {"whole.pt": saved(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))}
    files |= {"a.npy": array(1), "a.npz": array(1, save=np.savez_compressed), "storage.bin": b"\x80\2" * 99}
    for name, content in files.items():
        found = scan_bytes(tmp_path, content, name)
        assert found.verdict == "torch", (name, found.executables)
    enums = scan_bytes(tmp_path, b"\x80\2cbuiltins\ngetattr\n(cmine.kinds\nColour\nX\3\0\0\0REDtR.")
    assert enums.executables[0].names == (("mine.kinds.Colour", "unknown"), ("mine.kinds.Colour.RED", "unknown"))
    part = pickle.dumps(functools.partial(torch.optim.AdamW, lr=0.1))
    assert scan_bytes(tmp_path, part).verdict == "torch"
    assert scan_bytes(tmp_path, pickle.dumps(Colour.RED)).verdict == "unknown"


def test_scan_code_and_what_configs_name_is_unknown(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2)), tmp_path / "script.pt")
    (tmp_path / "modeling_x.py").write_text("import os")
    (tmp_path / "lib").write_bytes(b"\x7fELF...")
    (tmp_path / "config.json").write_text('{"auto_map": {"AutoModel": "modeling_x.X", "all": ["a--b.C", null]}}')
    (tmp_path / "custom.pkl").write_bytes(by_stack("mine", "Thing"))
    (tmp_path / "extension.pkl").write_bytes(b"\x80\2\x82\1)R.")
    found = ckpt_tools.scan(tmp_path)
    kinds = {each.file: (each.kind, each.verdict) for each in found.executables if each.verdict != "torch"}
    assert kinds == {
        "modeling_x.py": ("code", "unknown"),
        "lib": ("code", "unknown"),
        "config.json": ("auto_map", "unknown"),
        "custom.pkl": ("pickle", "unknown"),
        "extension.pkl": ("pickle", "unknown"),
        "script.pt": ("TorchScript", "unknown"),
    }
    assert found.ok
    (config,) = (each for each in found.executables if each.kind == "auto_map")
    assert [name for name, _ in config.names] == ["a--b.C", "modeling_x.X"]


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("x.7z", b"7z\xbc\xaf\x27\x1c" + bytes(30), "7z"),
        ("x.pt", b"PK\3\4" + bytes(60), "directory"),
        ("x.gz", b"\x1f\x8b\x08garbage", "decompressed"),
        ("x.bin", b"\1\2\3\4", "an unknown kind of file"),
        ("x.npy", b"\x93NUMPY\1\0\xff\xff", "truncated"),
        ("x.pkl", b"\x80\4\x8c\5ab", "truncated"),
        ("x.zip", patched(zipped(), (b"PK\1\2", 10, b"\x63\0")), "method 99"),
        ("config.json", b"{", "JSON"),
        ("x.h5", b'\x89HDF\r\n\x1a\n....{"class_name": "Lambda", "config"', "Keras"),
        ("x.keras", zipped("config.json", b'{"config": {"layers": [{"class_name": "Lambda"}]}}'), "Keras"),
        ("saved_model.pb", b"\n\x08ReadFile\x12", "TensorFlow"),
        ("x.tar", b"x" * 257 + b"ustar" + bytes(300), "tar"),
    ],
)
def test_scan_what_cannot_be_read_is_named_and_no_alarm(tmp_path, name: str, content: bytes, why: str):
    found = scan_bytes(tmp_path, content, name)
    assert found.ok
    assert {each.file.partition("!")[0] for each in found.not_read} == {name}
    assert any(why in each.why for each in found.not_read)


def test_scan_bombs_end_early(tmp_path):
    bomb = gzip.compress(bytes(1 << 20) * 300, 1)
    found = scan_bytes(tmp_path, zipped("a.gz", bomb, method=zipfile.ZIP_DEFLATED), "x.zip")
    assert any("256 MiB" in each.why for each in found.not_read)
    deep = EVIL
    for _ in range(9):
        deep = zipped("a.zip", deep)
    assert any("deep" in each.why for each in scan_bytes(tmp_path, deep, "x.zip").not_read)
    for content in (
        b"\x80\4\x8e" + b"\xff" * 8,
        b"(" * 100_000,
        b"\x80\4" + b"h\1" * 100_000,
        b"cx" * 10,
        b"c\n\n" * 9,
    ):
        assert not walk(io.BytesIO(content), len(content)).is_whole


def test_judge_harmless_patterns_are_for_classes():
    assert judge("torch.distributed.tensor.DTensor") == judge("transformers.training_args.TrainingArguments") == "torch"
    assert judge("torch.distributed.checkpoint.load") == judge("megatron.core.dist_checkpointing.load") == "unknown"
    assert judge("transformers.models.llama.modeling_llama.LlamaModel") == "unknown"


# The command line


def test_cli_scan_exit_codes_and_documents(tmp_path, capsys):
    (tmp_path / "a\x1b[31m.pkl").write_bytes(EVIL)
    (tmp_path / "b.pkl").write_bytes(by_stack("mine", "Thing"))
    (tmp_path / "c.7z").write_bytes(b"7z\xbc\xaf\x27\x1c" + bytes(30))
    assert main(["scan", str(tmp_path)]) == 3
    out, err = capsys.readouterr()
    assert "dangerous: a\\x1b[31m.pkl (pickle): posix.system\nunknown: b.pkl (pickle): mine.Thing\n" in out
    assert "not read: c.7z" in err
    assert "\x1b" not in out + err
    assert main(["scan", str(tmp_path), "--json"]) == 3
    document = json.loads(capsys.readouterr().out)
    assert (document["ok"], document["verdict"], len(document["not_read"])) == (False, "dangerous", 1)
    assert main(["scan", str(tmp_path), "--format", "sarif"]) == 3
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert [each["ruleId"] for each in run["results"]] == ["dangerous-pickle", "unknown-pickle"]
    assert run["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "a%1B%5B31m.pkl"
    assert len(run["invocations"][0]["toolExecutionNotifications"]) == 1
    assert main(["scan", str(tmp_path / "b.pkl"), "-q"]) == 0
    assert main(["scan", str(tmp_path / "nothing")]) == 4


# What carries the verdict


def write_hub(directory: Path) -> Path:
    write_model(directory)
    (directory / "config.json").write_text('{"auto_map": {"AutoModel": "modeling_x.X"}}')
    (directory / "modeling_x.py").write_text("X = 1")
    (directory / "tokenizer.pkl").write_bytes(EVIL)
    return directory


def test_inspect_and_verify_carry_the_verdict(tmp_path, capsys):
    model = write_hub(tmp_path / "model")
    assert main(["inspect", str(model)]) == 0
    assert "dangerous: tokenizer.pkl: posix.system" in capsys.readouterr().out
    assert main(["verify", str(model), "--json", "--level", "structure"]) == 3
    document = json.loads(capsys.readouterr().out)
    (finding,) = document["findings"]
    assert (finding["code"], finding["where"]) == ("dangerous-pickle", "tokenizer.pkl")
    assert "posix.system" in finding["what"]
    (model / "tokenizer.pkl").unlink()
    assert main(["verify", str(model)]) == 0


COMPANIONS = (
    "random_states_0.pkl", "custom_checkpoint_0.pkl", "scheduler.bin", "optimizer.bin", "sampler.bin", "scaler.pt",
)  # fmt: skip


@pytest.mark.parametrize("write", [saved, legacy])
def test_step_beside_files_are_judged_by_verify_inspect_and_reshard(tmp_path, write: Callable[[object], bytes]):
    step = toy_steps.save_accelerate(tmp_path / "step")
    healthy = ckpt_tools.reshard(step, tmp_path / "healthy", mesh="dp_shard=2")
    assert {each.name for each in (tmp_path / "healthy").iterdir()} >= {"random_states_0.pkl", "scheduler.bin"}
    assert not any("left out pickles" in note for note in healthy.notes)
    assert ckpt_tools.verify(step).ok
    for name in COMPANIONS:
        (step / name).write_bytes(write(Evil()))
    codes = [each for each in ckpt_tools.verify(step).findings if each.code == "dangerous-pickle"]
    assert {each.where.partition("!")[0] for each in codes} == set(COMPANIONS)
    assert len(ckpt_tools.inspect(step).identity.executables) == len(COMPANIONS)
    with pytest.raises(ckpt_tools.errors.UnreadableError, match="the trainer does not resume without it"):
        ckpt_tools.reshard(step, tmp_path / "out", mesh="dp_shard=2")
    kept = ckpt_tools.reshard(step, tmp_path / "kept", mesh="dp_shard=2", keep_pickles=True)
    assert {each.name for each in (tmp_path / "kept").iterdir()} >= set(COMPANIONS)
    assert any("copied pickles and code" in note for note in kept.notes)


def test_pickle_that_no_trainer_needs_stays_behind(tmp_path):
    step = toy_steps.save_accelerate(tmp_path / "step")
    (step / "mine.pkl").write_bytes(saved(Evil()))
    done = ckpt_tools.reshard(step, tmp_path / "out", mesh="dp_shard=2")
    assert not (tmp_path / "out" / "mine.pkl").exists()
    (note,) = (note for note in done.notes if "left out pickles" in note)
    assert "posix.system" in note
    assert "--keep-pickles" in note


@pytest.mark.parametrize("name", ["meta.pt", "common.pt", "train_state.pt", "custom.pkl", "x.ckpt"])
def test_dcp_directory_leaves_out_what_lies_beside(tmp_path, name: str):
    toy_steps.save({"model": toy_steps.state_of(0), "lr": 0.1}, tmp_path / "step")
    (tmp_path / "step" / name).write_bytes(saved({"a": 1}))
    ckpt_tools.reshard(tmp_path / "step", tmp_path / "healthy", mesh="dp_shard=2")
    has_it = (tmp_path / "healthy" / name).exists()
    (tmp_path / "step" / name).write_bytes(saved(Evil()))
    assert not ckpt_tools.verify(tmp_path / "step").ok
    ckpt_tools.reshard(tmp_path / "step", tmp_path / "out", mesh="dp_shard=2")
    assert not (tmp_path / "out" / name).exists()
    ckpt_tools.reshard(tmp_path / "step", tmp_path / "kept", mesh="dp_shard=2", keep_pickles=True)
    assert (tmp_path / "kept" / name).exists() is has_it


def test_dcp_items_that_are_dangerous_are_refused_and_excluded(tmp_path, capsys):
    toy_steps.save({"model": toy_steps.state_of(0), "evil": Evil(), "lr": 0.1}, tmp_path / "step")
    found = ckpt_tools.scan(tmp_path / "step")
    assert [each.file.split("!")[1] for each in found.executables if each.verdict == "dangerous"] == ["evil"]
    assert not ckpt_tools.verify(tmp_path / "step").ok
    command = ["reshard", str(tmp_path / "step"), str(tmp_path / "out"), "--mesh", "dp_shard=2"]
    assert main(command) == 4
    assert "--exclude 'evil'" in capsys.readouterr().err
    assert main([*command, "--exclude", "evil"]) == 0
    assert ckpt_tools.scan(tmp_path / "out").ok
    command[2] = str(tmp_path / "kept")
    assert main([*command, "--keep-pickles"]) == 0
    assert not ckpt_tools.scan(tmp_path / "kept").ok
    ckpt_tools.gather(tmp_path / "step", tmp_path / "gathered")
    assert ckpt_tools.scan(tmp_path / "gathered").executables == ()


def test_scan_items_of_a_checkpoint_without_metadata_are_not_read(tmp_path):
    toy_steps.save({"model": toy_steps.state_of(0), "evil": Evil()}, tmp_path / "step")
    (tmp_path / "step" / ".metadata").unlink()
    found = ckpt_tools.scan(tmp_path / "step")
    assert [each.file for each in found.not_read] == ["__0_0.distcp"]


def test_shard_gather_rename_extract_and_push_are_inert(tmp_path):
    model = write_hub(tmp_path / "model")
    dcp, kept, back = tmp_path / "dcp", tmp_path / "kept", tmp_path / "back"
    done = ckpt_tools.shard(model, dcp, mesh="dp_shard=2")
    (note,) = (note for note in done.notes if "left out" in note)
    assert "modeling_x.py (code)" in note
    assert "tokenizer.pkl (posix.system)" in note
    assert not {"modeling_x.py", "tokenizer.pkl"} & set(os.listdir(dcp))
    ckpt_tools.shard(model, kept, mesh="dp_shard=2", keep_pickles=True)
    ckpt_tools.gather(kept, back, keep_pickles=True)
    assert {p.name: p.read_bytes() for p in model.iterdir()}.items() <= {
        p.name: p.read_bytes() for p in back.iterdir()
    }.items()
    ckpt_tools.gather(kept, tmp_path / "inert")
    ckpt_tools.extract(model, tmp_path / "extracted", include=["**"])
    for each in (tmp_path / "inert", tmp_path / "extracted"):
        assert not {"modeling_x.py", "tokenizer.pkl"} & set(os.listdir(each))
    with LocalSource(str(model)) as source:
        chosen, left_out = list_directory(source, keep_pickles=False)
        assert not {"modeling_x.py", "tokenizer.pkl"} & chosen.keys()
        assert "--keep-pickles" in dict(left_out)["tokenizer.pkl"]
        assert list_directory(source, keep_pickles=True)[0].keys() >= {"modeling_x.py", "tokenizer.pkl"}
    assert not os.path.exists(MARK)


def test_scan_of_a_zip64_with_a_false_directory(tmp_path):
    """Bytes before the archive, and both end records: the directory is found where Python's zipfile finds it."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("a.pkl", EVIL)
    content = out.getvalue()
    end = content.rfind(b"PK\5\6")
    count, nbytes, start = struct.unpack_from("<HII", content, end + 10)
    end64 = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, count, count, nbytes, start)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, end, 1)
    short = content[end : end + 12] + struct.pack("<II", 0xFFFFFFFF, 0xFFFFFFFF) + b"\0\0"
    assert not scan_bytes(tmp_path, b"before" + content[:end] + end64 + locator + short, "x.pt").ok
    source = LocalSource(str(tmp_path))
    assert scan_files(source, {"x.pt": (tmp_path / "x.pt").stat().st_size}).executables[0].file == "x.pt!a.pkl"


@pytest.mark.parametrize("length", [640, 896, 1152, 1408])
def test_safetensors_header_whose_length_looks_like_a_pickle_is_none(tmp_path, length: int) -> None:
    header = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'.ljust(length)
    (tmp_path / "model.safetensors").write_bytes(length.to_bytes(8, "little") + header + b"x")
    found = ckpt_tools.scan(tmp_path)
    assert (found.executables, found.not_read) == ((), ())
