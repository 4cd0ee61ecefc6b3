"""torchtitan's Python registry: what a function certainly returns, and that nothing of it is run."""

from __future__ import annotations

from pathlib import Path

import pytest
from preflight.config_examples import mesh, read

from ckpt_tools.preflight.configs.torchtitan import NotCertainError, read_function
from ckpt_tools.preflight.spec import AdapterSpec

REGISTRY = '''
raise SystemExit("a registry must not be run")

def base() -> Trainer.Config:
    """A docstring."""
    spec = model_registry("8B", converters=[LoRAConverter.Config(rank=8, alpha=16.0, target_modules=["wq"])])
    return Trainer.Config(
        loss=CrossEntropyLoss.Config(vocab=vocab_size(spec)),
        hf_assets_path="assets",
        model_spec=spec,
        optimizer=default_adamw(lr=3e-4),
        training=TrainingConfig(local_batch_size=2, seq_len=8192),
        parallelism=ParallelismConfig(tensor_parallel_degree=2),
        activation_checkpoint=FullAC.Config(),
    )

def large() -> Trainer.Config:
    config = base()
    assert config.model_spec is not None
    config.parallelism.pipeline_parallel_degree = 2
    config.activation_checkpoint = SelectiveAC.Config()
    return config

def computed() -> Trainer.Config:
    config = base()
    config.training.seq_len = 1024 * FACTOR
    return config

def branches() -> Trainer.Config:
    config = base()
    if DEBUG:
        config.training.seq_len = 1
    return config

def calls() -> Trainer.Config:
    config = base()
    fuse(config)
    return config

def hands_on() -> Trainer.Config:
    config = base()
    other = fuse(config)
    return config

def recursive() -> Trainer.Config:
    return recursive()

@decorated
def wrapped() -> Trainer.Config:
    return Trainer.Config()
'''


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    path = tmp_path / "torchtitan" / "models" / "llama3" / "config_registry.py"
    path.parent.mkdir(parents=True)
    path.write_text(REGISTRY)
    return path


def launch(name: str, *options: str) -> str:
    return f"torchrun --nproc_per_node 8 -m torchtitan.train --module llama3 --config {name} {' '.join(options)}\n"


def test_registry_function_is_read_where_it_is_certain(registry: Path, tmp_path: Path) -> None:
    spec = read(tmp_path, launch("base"), name="run.sh").spec
    assert (spec.engine, spec.mesh, spec.world_size) == ("fsdp2", mesh(dp_shard=4, tp=2), 8)
    assert (spec.seq_len, spec.batch_size, spec.optimizer, spec.model) == (8192, 2, "AdamW", "assets")
    assert spec.activation_checkpointing
    assert spec.adapter == AdapterSpec(rank=8, alpha=16.0, targets=("wq",))


def test_registry_function_may_change_what_another_returns(registry: Path, tmp_path: Path) -> None:
    config = read(tmp_path, launch("large", "--training.seq-len=4096", "--checkpoint.no-enable"), name="run.sh")
    assert config.spec.mesh == mesh(pp=2, dp_shard=2, tp=2)
    assert (config.spec.activation_checkpointing, config.spec.seq_len) == (False, 4096)
    assert config.values["checkpoint"] == {"enable": False}
    assert config.spec.keys["seq_len"] == "--training.seq_len"


def test_registry_expression_that_is_not_certain_is_unread(registry: Path, tmp_path: Path) -> None:
    config = read(tmp_path, launch("computed"), name="run.sh")
    assert config.options.unread == ("--training.seq_len",)


@pytest.mark.parametrize("name", ["branches", "calls", "hands_on", "recursive", "wrapped", "missing", "SystemExit"])
def test_registry_function_that_is_not_certain_is_not_read_and_named(name: str, registry: Path, tmp_path: Path) -> None:
    with pytest.raises(NotCertainError):
        read_function(str(registry), name)
    config = read(tmp_path, launch(name), name="run.sh")
    assert config.options.words == (f"--module llama3 --config {name}",)
    assert "unread-options" in {finding.code for finding in config.findings}


def test_registry_that_is_not_here_is_not_green(tmp_path: Path) -> None:
    assert read(tmp_path, "torchrun -m torchtitan.train --module a.b --config c", name="run.sh").options.words != ()


@pytest.mark.parametrize("text", ["def f(:", "\0", "(" * 100_000, "def f():\n    return " + "-" * 100_000 + "1"])
def test_registry_that_is_not_python_is_not_certain(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config_registry.py"
    path.write_text(text)
    with pytest.raises(NotCertainError):
        read_function(str(path), "f")
