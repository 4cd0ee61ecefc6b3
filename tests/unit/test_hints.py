"""A hint is a promise: options and commands exist, and what a hint names leads somewhere that is right."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import toys
from safetensors.torch import save_file

import ckpt_tools
from ckpt_tools import api
from ckpt_tools.cli import commands, main
from ckpt_tools.cli.app import _load

_PACKAGE = Path(ckpt_tools.__file__).parent
_OTHERS = {"--nproc-per-node", "--ckpt-convert-format", "--ckpt-convert-save", "--head", "--name", "--help"}
"""Options of other programs that hints name."""


def _hints() -> Iterator[tuple[str, str]]:
    for path in _PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            for keyword in node.keywords if isinstance(node, ast.Call) else ():
                if keyword.arg == "hint":
                    texts = (each.value for each in ast.walk(keyword.value) if isinstance(each, ast.Constant))
                    yield from ((f"{path.name}:{node.lineno}", text) for text in texts if isinstance(text, str))


def test_options_and_commands_that_hints_name_exist():
    known = {name: {opt for each in _load(name).params for opt in each.opts} for name in commands.COMMANDS}
    options = set().union(*known.values(), _OTHERS)
    found = 0
    for where, text in _hints():
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text):
            assert option in options, (where, text)
            found += 1
        for verb, rest in re.findall(r"`ckpt ([a-z-]+)([^`]*)`", text):
            assert verb in known, (where, text)
            assert known[verb].issuperset(re.findall(r"(?<![\w-])--[a-z][a-z-]+", rest)), (where, text)
    assert found > 150


def _state() -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in toys.build("llama").state_dict().items()}


def _bins(at: Path, *names: str) -> None:
    for name in names:
        (at / name).parent.mkdir(parents=True, exist_ok=True)
        torch.save(_state(), at / name)


def _files(at: Path, *names: str) -> None:
    for name in names:
        (at / name).parent.mkdir(parents=True, exist_ok=True)
        save_file(_state(), at / name, metadata={"format": "pt"})


LAYOUTS = {
    "Meta": lambda at: _bins(at, "consolidated.00.pth", "consolidated.01.pth"),
    "NeMo": lambda at: _bins(at, *(f"tp_rank_0{i}_pp_rank_000/model_weights.ckpt" for i in (0, 1))),
    "Megatron": lambda at: _bins(at, *(f"iter_1/mp_rank_0{i}/model_optim_rng.pt" for i in (0, 1))),
    "fairscale": lambda at: _bins(at, "model-shard0.pt", "model-shard1.pt"),
    "Composer": lambda at: _bins(at, "ep1-ba1-rank0.pt", "ep1-ba1-rank1.pt"),
    "torchtune": lambda at: _bins(at, "hf_model_0001_0.pt", "hf_model_0002_0.pt"),
    "no index": lambda at: _files(at, "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
    "no index of bins": lambda at: _bins(at, "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"),
    "one of two": lambda at: _files(at, "model-00001-of-00002.safetensors"),
    "one of two below": lambda at: _files(at, "sub/model-00001-of-00002.safetensors"),
    "two models": lambda at: _files(at, "a.safetensors", "b.safetensors"),
    "epochs": lambda at: _bins(at, "epoch_1.pt", "epoch_2.pt"),
    "folders": lambda at: _files(at, "step-1/model.safetensors", "step-20/model.safetensors"),
    "folders of parts": lambda at: _bins(at, *(f"s{i}/consolidated.0{j}.pth" for i in (1, 2) for j in (0, 1))),
    "pipeline": lambda at: _files(at, "unet/diffusion_pytorch_model.safetensors", "vae/x.safetensors"),
}


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("verb", ["gather", "verify", "inspect"])
def test_hints_about_files_end_in_a_whole_model_or_nowhere(kind, verb, tmp_path, capsys):
    LAYOUTS[kind](tmp_path / "in")
    path, seen = str(tmp_path / "in"), set()
    for _ in range(5):
        assert path not in seen, "a circle"
        seen.add(path)
        argv = [verb, path, *([str(tmp_path / "out")] if verb == "gather" else [])]
        code = main(argv)
        said = capsys.readouterr()
        if code == 0:  # verify takes a folder of checkpoints as well
            assert verb != "gather" or api.identify(path).whole != "part"
            return
        assert code in (3, 4), said.err
        assert len(seen) == 1 or "a part of a model" not in said.err + said.out, "a hint led to a part"
        hint = re.search(r"hint: (.*)", said.err + said.out)
        assert hint is not None
        named = [word.strip(",;") for word in shlex.split(hint[1].replace("'", "")) if word.startswith(str(tmp_path))]
        if not named:  # what to do lies outside of ckpt
            assert "--" not in hint[1] or "--as-part" in hint[1] or "--ckpt-convert" in hint[1]
            return
        path = named[0]
    pytest.fail("no end")
