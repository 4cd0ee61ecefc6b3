"""What the walks with real trainers share: a toy model, its tokens, ranks as a launcher makes them, ckpt's commands."""

from __future__ import annotations

import importlib
import os
import pickle
import shutil
import sys
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import toys
import transformers
from safetensors.torch import load_file

from ckpt_tools.checkpoint.formats.opening import open_path
from ckpt_tools.cli import main
from ckpt_tools.sandbox.child import die_with_parent

SIZES = {"hidden_size": 64, "intermediate_size": 128, "rms_norm_eps": 1e-5}
GLOBAL_BATCH = 4
NUM_STEPS = 4
"""In all; a step is saved after the second."""
_EVERY_RANK = (
    "torch._dynamo",  # FSDP's hooks
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "transformers.loss.loss_utils",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
)
_TIMEOUT = timedelta(seconds=120)


def import_once(*more: str) -> None:
    """Import what every rank would, before they are forked: seconds each."""
    for name in (*_EVERY_RANK, *more):
        importlib.import_module(name)


def let_accelerate_use_cpu() -> None:
    """accelerate 1.15 passes the FSDP plugin over on CPUs without a word: let ranks on CPUs pass for ranks on GPUs."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)


def model_of(kind: str):
    """A model that nothing has loaded yet: other weights than those of the start."""
    return toys.build(kind, seed=1, **SIZES).train()


def tokens() -> torch.Tensor:
    """A row per sample, in the order of training."""
    return torch.randint(0, 64, (GLOBAL_BATCH * NUM_STEPS, 16), generator=torch.Generator().manual_seed(7))


def logits_of(model) -> dict[str, torch.Tensor]:
    """Of the first batch, on every rank alike."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=tokens()[:GLOBAL_BATCH]).logits
    model.train(was_training)
    return {"logits": logits}


def mean_of_ranks(value: torch.Tensor) -> float:
    """The loss of the global batch: every rank has as many tokens."""
    value = value.detach().double()
    dist.all_reduce(value)
    return float(value / dist.get_world_size())


def run_ckpt(*arguments: object) -> None:
    """A command that must succeed."""
    status = main([*map(str, arguments), "--quiet"])
    assert status == 0, (arguments, status)


def start_of(kind: str, directory: Path) -> tuple[Path, float]:
    """Save a model for the hub; return where, and the loss of the first batches with what `from_pretrained` loads."""
    hub = directory / "hub"
    transformers.utils.logging.disable_progress_bar()
    toys.build(kind, **SIZES).save_pretrained(hub)
    model = getattr(transformers, toys.KINDS[kind][0]).from_pretrained(hub).train()
    with torch.no_grad():
        batch = tokens()[:GLOBAL_BATCH]
        return hub, float(model(input_ids=batch, labels=batch).loss)


def loaded(kind: str, directory: Path) -> dict[str, torch.Tensor]:
    """The logits of what `from_pretrained` makes of a directory, which must have every weight and no other."""
    model, said = getattr(transformers, toys.KINDS[kind][0]).from_pretrained(directory, output_loading_info=True)
    assert not any(said.values()), said
    return logits_of(model)


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    """The tensors of a model's directory."""
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def run_ranks(world_size: int, function, *arguments, **options):
    """Fork ranks of this process, as torchrun starts them; return what `function(*arguments)` returns on rank 0.

    Call it from a process of its own that has imported the trainer: it is imported once for all worlds.
    """
    return start_ranks(world_size, function, *arguments, **options)()


def start_ranks(world_size: int, function, *arguments, **options):
    """The same without waiting: return what waits."""
    parent, pids = os.getpid(), []
    meeting = tempfile.TemporaryDirectory(prefix="world-")
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            die_with_parent(parent)
            _be_rank(rank, world_size, meeting.name, lambda: function(*arguments, **options))
        pids.append(pid)

    def wait():
        with meeting:
            codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
            assert not any(codes), f"ranks ended with {codes}"
            return pickle.loads(Path(meeting.name, "result").read_bytes())

    return wait


def _be_rank(rank, world_size, meeting, work):
    code = 1
    try:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        os.environ |= {"TORCHELASTIC_RUN_ID": "test"}
        torch.manual_seed(0)
        rendezvous = f"file://{meeting}/ranks"
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size, timeout=_TIMEOUT)
        result = work()
        if rank == 0:
            Path(meeting, "result").write_bytes(pickle.dumps(result))
        dist.barrier()
        dist.destroy_process_group()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def flipped(step: Path, copy: Path, part: Path) -> Path:
    """A copy of a step with one bit of the last tensor of one part changed."""
    shutil.copytree(step, copy)
    with open_path(str(copy / part)) as opened:
        span = opened.resolve(opened.checkpoint.tensors[-1]).chunks[-1].span
    with (copy / part / span.file).open("r+b") as file:
        file.seek(span.offset + span.nbytes - 1)
        (last,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([last ^ 1]))
    return copy
