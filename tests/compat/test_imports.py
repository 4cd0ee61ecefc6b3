"""Torch is a guest: what does not need it does not import it, in a process of its own."""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckpt_tools
from ckpt_tools import api

HEAVY = ("torch", "transformers", "accelerate", "safetensors.torch", "pandas", "scipy")
PROBE = """
import json, sys
from ckpt_tools.cli import main
code = main(sys.argv[1:])
print(json.dumps([code, sorted(sys.modules)]), file=sys.stderr)
"""


def modules_after(*argv, code=0):
    """Names of everything that is imported once a command has run."""
    command = [sys.executable, "-c", PROBE, *map(str, argv)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    found, modules = json.loads(done.stderr.splitlines()[-1])
    assert found == code, done.stderr[:2000]
    return set(modules)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model, and its checkpoints for eight ranks and for FSDP×TP."""
    directory = tmp_path_factory.mktemp("made")
    (directory / "hf").mkdir()
    state = {"a.weight": torch.randn(16, 8), "b.weight": torch.randn(8, 16).bfloat16(), "c": torch.tensor(1.0)}
    save_file(state, directory / "hf" / "model.safetensors", metadata={"format": "pt"})
    (directory / "hf" / "config.json").write_text("{}")
    (directory / "adapter").mkdir()
    factors = {"lora_A": torch.ones(2, 8), "lora_B": torch.ones(16, 2)}
    factors = {f"base_model.model.a.{name}.weight": factor for name, factor in factors.items()}
    save_file(factors, directory / "adapter" / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["a"]}
    (directory / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    api.shard(directory / "hf", directory / "dp", mesh="dp_shard=8")
    api.shard(directory / "hf", directory / "tp", mesh="dp_shard=2,tp=2", set=["*.weight=tp:S(1)"])
    api.shard(directory / "hf", directory / "run" / "step-1", mesh="dp_shard=2")
    return directory


COMMANDS = {
    "help": ["--help"],
    "version": ["--version"],
    "inspect-file": ["inspect", "{made}/hf/model.safetensors"],
    "inspect-hf": ["inspect", "{made}/hf", "--json"],
    "inspect-dcp": ["inspect", "{made}/dp", "--tensors"],
    "inspect-tensor": ["inspect", "{made}/tp", "--tensor", "a.weight"],
    "inspect-overlay": ["inspect", "{made}/hf", "--mesh", "dp_shard=64"],
    "verify-hf": ["verify", "{made}/hf"],
    "verify-dcp": ["verify", "{made}/tp", "--level", "data"],
    "verify-against": ["verify", "{made}/tp", "--against", "{made}/hf"],
    "diff": ["diff", "{made}/hf", "{made}/tp"],
    "shard": ["shard", "{made}/hf", "{out}/out", "--mesh", "dp_shard=4"],
    "shard-bar": ["shard", "{made}/hf", "{out}/out", "--mesh", "dp_shard=4", "--progress", "bar"],
    "shard-dry": ["shard", "{made}/hf", "{out}/out", "--mesh", "dp_shard=4", "--dry-run"],
    "shard-rules": ["shard", "{made}/hf", "{out}/out", "--mesh", "dp_shard=2,tp=2", "--set", "a.*=tp:S(0)"],
    "gather": ["gather", "{made}/dp", "{out}/out"],
    "gather-split": ["gather", "{made}/dp", "{out}/out", "--max-shard-size", "1KB"],
    "gather-bf16": ["gather", "{made}/dp", "{out}/out", "--dtype", "bf16"],
    "shard-f16": ["shard", "{made}/hf", "{out}/out", "--mesh", "dp_shard=2", "--dtype", "f16"],
    "merge": ["merge-lora", "{made}/hf", "{made}/adapter", "{out}/out"],
    "merge-dcp": ["merge-lora", "{made}/dp", "{made}/adapter", "{out}/out", "--dtype", "f32"],
    "gather-like": ["gather", "{made}/dp", "{out}/out", "--like", "{made}/hf"],
    "reshard": ["reshard", "{made}/dp", "{out}/out", "--mesh", "dp_shard=3"],
    "watch": ["watch", "{made}/run", "--once", "--settle", "0"],
    "reshard-columns": ["reshard", "{made}/tp", "{out}/out", "--mesh", "dp_shard=2", "--set", "a.*=dp_shard:S(1)"],
}
# What cuts along dim 0 alone moves whole rows: no array library is needed.
WITH_NUMPY = {"watch", "verify-dcp", "verify-against", "diff", "reshard-columns", "gather-bf16", "shard-f16", "merge"}
WITH_NUMPY.add("merge-dcp")


def fill(command, made, tmp_path):
    return [part.format(made=made, out=tmp_path) for part in command]


@pytest.mark.full(but=["help", "inspect-dcp", "shard"])
@pytest.mark.parametrize("name", COMMANDS)
def test_command_imports_no_torch(made, tmp_path, name):
    modules = modules_after(*fill(COMMANDS[name], made, tmp_path))
    assert "ckpt_tools.cli.app" in modules
    assert modules.isdisjoint(HEAVY)
    assert name in WITH_NUMPY or "numpy" not in modules


HELPS = """
import json, sys
from ckpt_tools.cli import commands, main
found, before = {}, set()
for name in ("", *commands.COMMANDS):
    code = main([*filter(None, [name]), "--help"])
    found[name], before = [code, *sorted(sys.modules.keys() - before)], set(sys.modules)
print(json.dumps(found), file=sys.stderr)
"""
LIGHT = re.compile(
    r"ckpt_tools(\.(_version|errors|text|units|cli(\.(app|build|commands|help_text|output|streams))?|options(\.\w+)?|results|signals"
    r"|checkpoint|checkpoint\.(dtypes|identity|layout)))?"
)
"""What --help may import of ckpt: neither an engine, nor what opens, reads or reaches anything."""


def test_help_of_every_command_imports_nothing_but_options():
    done = subprocess.run([sys.executable, "-c", HELPS], capture_output=True, text=True, timeout=60)
    found = json.loads(done.stderr.splitlines()[-1])
    assert len(found) > 20
    for name, (code, *modules) in found.items():
        assert code == 0
        own = [each for each in modules if each.split(".")[0] == "ckpt_tools" and not LIGHT.fullmatch(each)]
        assert not own, name
        assert {"numpy", "pydantic", "rich", "tqdm", "huggingface_hub", "yaml", *HEAVY}.isdisjoint(modules), name


@pytest.mark.full
def test_command_whose_point_is_torch_imports_it(made, tmp_path):
    # The control: the probe sees what it looks for.
    modules = modules_after("shard", made / "hf", tmp_path / "out", "--mesh", "dp_shard=1", "--engine", "dtensor")
    assert "torch" in modules
    assert "transformers" not in modules


def test_diff_of_numbers_imports_no_torch(tmp_path):
    for name, value in (("a", 1.0), ("b", 2.0)):
        save_file({"w": torch.full((8,), value)}, tmp_path / f"{name}.safetensors")
    files = (tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert modules_after("diff", *files, "--atol", "0.5", code=3).isdisjoint(HEAVY)


def test_refusal_imports_no_torch(tmp_path):
    torch.save(torch.nn.Linear(2, 2), tmp_path / "pytorch_model.bin")
    modules = modules_after("inspect", tmp_path, code=4)
    assert modules.isdisjoint(HEAVY)


def test_import_of_the_package_is_light():
    script = "import sys, ckpt_tools; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    modules = set(done.stdout.split())
    assert {name for name in modules if name.startswith("ckpt_tools")} == {"ckpt_tools"}
    assert modules.isdisjoint((*HEAVY, "numpy", "typer", "click", "rich", "huggingface_hub"))


@pytest.mark.parametrize("package", [ckpt_tools, api], ids=["ckpt_tools", "api"])
def test_names_that_type_checkers_see_are_those_that_are_there(package):
    tree = ast.parse(inspect.getsource(package))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    named = {alias.asname or alias.name for node in block.body for alias in node.names}
    assert sorted(named) == package.__all__
    assert all(hasattr(package, name) for name in package.__all__)
    assert set(package.__all__) <= set(dir(package))


def test_packages_do_not_hide_the_functions_of_their_names():
    script = (
        "import ckpt_tools.preflight.smoke.report, ckpt_tools.estimate.report, ckpt_tools.preflight.report, inspect\n"
        "from ckpt_tools import estimate, preflight, smoke\n"
        "assert all(map(inspect.isfunction, (estimate, preflight, smoke, ckpt_tools.smoke)))\n"
        "import ckpt_tools.preflight.smoke.options\n"
        "assert ckpt_tools.smoke is smoke"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_numpy_is_imported_before_what_reaches_into_it() -> None:
    """Beside a thread that is importing numpy, `import ml_dtypes` fails, and numpy with it: 1 in 40 of such pairs."""
    wrong = []
    for path in Path(ckpt_tools.__file__).parent.rglob("*.py"):
        found = [
            (node.lineno, each.name)
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Import)
            for each in node.names
            if each.name in ("numpy", "ml_dtypes")
        ]
        names = [name for _, name in sorted(found)]
        if "ml_dtypes" in names and names[0] != "numpy":
            wrong.append(path.name)
    assert wrong == []
