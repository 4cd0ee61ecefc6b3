"""torchtitan's own Trainer, for real: from a sharded hub model, over a resharded step, back to the hub."""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
import torch._utils
import toys
from fsdp2.ranks import run_ranks
from trainers import worlds
from trainers.judges import Walked, judge

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]
for _needed in ("torchtitan", "torchdata", "spmd_types", "tyro"):
    pytest.importorskip(_needed, reason=f"needs {_needed}")


class Absent(ModuleType):
    """A module whose names can be imported and do nothing."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


def let_torchtitan_use_cpu() -> None:
    """Do without what torchtitan 0.3.0 takes for granted: CUDA, three packages, a newer torch."""
    torch._utils._get_available_device_type = lambda: "cpu"  # else it takes "cuda"
    for name in (
        "torchtitan.distributed.minimal_async_ep.kernels",  # imports triton
        "torchtitan.hf_datasets.text_datasets",  # imports datasets
        "torch.utils.tensorboard",
    ):
        sys.modules[name] = Absent(name)
    from torchtitan import trainer
    from torchtitan.distributed import utils

    utils.set_pg_timeouts = lambda **_: None  # calls torch.distributed.set_timeout, which torch 2.13 does not have
    trainer.time = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda _: None)  # two seconds at the end


def llama():
    """The entry of a model registry: the toy Llama as torchtitan builds it."""
    from torchtitan.models import llama3
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention

    config = toys.config_of("llama", **worlds.SIZES)
    dim, heads, vocab_size = config.hidden_size, config.num_attention_heads, config.vocab_size
    llama3.get_attention_config = lambda _: ScaledDotProductAttention.Config()  # the others are compiled for GPUs
    theta = config.rope_parameters["rope_theta"]
    rope = ComplexRoPE.Config(dim=dim // heads, max_seq_len=64, theta=theta, scaling="none")
    entry = llama3.model_registry("debugmodel")
    entry.parallelize_fn = parallelize
    entry.model = llama3.Llama3Model.Config(
        dim=dim,
        vocab_size=vocab_size,
        tok_embeddings=Embedding.Config(
            num_embeddings=vocab_size, embedding_dim=dim, param_init=llama3._EMBEDDING_INIT
        ),
        norm=RMSNorm.Config(normalized_shape=dim, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(in_features=dim, out_features=vocab_size, param_init=llama3._output_linear_init(dim)),
        layers=llama3._build_llama3_layers(
            n_layers=config.num_hidden_layers,
            dim=dim,
            n_heads=heads,
            n_kv_heads=config.num_key_value_heads,
            hidden_dim=config.intermediate_size,
            rope=rope,
            attn_backend="sdpa",
        ),
    )
    return entry


def parallelize(model, **settings):
    """What torchtitan does, and no factor in sums: gloo has no PREMUL_SUM."""
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.models.llama3 import parallelize_llama

    model = parallelize_llama(model, **settings)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


def components(skip):
    """What a recipe swaps: where losses go, data in order from batch `skip` on, no tokenizer."""
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.tokenizer import BaseTokenizer

    class Metrics(MetricsProcessor):
        @dataclass(kw_only=True, slots=True)
        class Config(MetricsProcessor.Config):
            pass

        def __init__(self, config, **_):
            memory = SimpleNamespace(max_reserved_gib=0, max_reserved_pct=0)
            self.device_memory_monitor = SimpleNamespace(get_peak_stats=lambda: memory, device_name="cpu")
            self.config, self.color = config, MagicMock()
            self.ntokens_since_last_log, self.data_loading_times = 0, []
            self.losses = []

        def log(self, step, global_avg_loss, *_, **__):
            self.losses.append(global_avg_loss)

        def close(self):
            pass

    class Data(ParallelAwareDataloader):
        @dataclass(kw_only=True, slots=True)
        class Config(ParallelAwareDataloader.Config):
            pass

        def __init__(self, config, *, dp_world_size, dp_rank, local_batch_size, **_):
            rows = worlds.tokens()[skip * worlds.GLOBAL_BATCH :][dp_rank::dp_world_size]
            pairs = [({"input": row[:-1]}, row[1:]) for row in rows]
            super().__init__(pairs, dp_rank, dp_world_size, batch_size=local_batch_size)

    class Tokenizer(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config, **_):
            pass

        encode = decode = get_vocab_size = None

    return {"metrics": Metrics.Config(log_freq=1), "dataloader": Data.Config(), "tokenizer": Tokenizer.Config()}


def trainer_of(folder, checkpoint, *, skip=0, steps=worlds.NUM_STEPS, **schedule):
    """torchtitan's Trainer on this rank, with these settings of its checkpoints and its schedule."""
    import torch.distributed as dist
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.trainer import Trainer

    config = Trainer.Config(
        model_spec=llama(),
        dump_folder=str(folder),
        loss=CrossEntropyLoss.Config(),
        optimizer=default_adamw(lr=1e-2),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0, **schedule),
        training=TrainingConfig(
            local_batch_size=worlds.GLOBAL_BATCH // dist.get_world_size(),
            seq_len=worlds.tokens().shape[1] - 1,
            steps=steps,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        checkpoint=CheckpointManager.Config(enable=True, **checkpoint),
        **components(skip),
    )
    return Trainer(config)


def train(folder, *, start=None, with_data=True):
    """Go on in `folder`, or start from `start`, up to the last step; return the losses, and the weights by the hub."""
    from torch.distributed.tensor import DTensor

    excluded = [] if with_data else ["dataloader"]
    checkpoint = {"interval": 2, "initial_load_path": start and str(start), "exclude_from_loading": excluded}
    trainer = trainer_of(folder, checkpoint, skip=0 if with_data else 2)
    trainer.train()
    state = {
        name: t.full_tensor() if isinstance(t, DTensor) else t
        for name, t in trainer.model_parts[0].state_dict().items()
    }
    entry = trainer.config.model_spec
    adapter = entry.state_dict_adapter(entry.model, None)
    trainer.close()
    return trainer.metrics_processor.losses, adapter.to_hf(state)


def walk(rank, world_size, kind, directory):
    """Everything with one import of torchtitan."""
    worlds.import_once()
    let_torchtitan_use_cpu()
    hub, expected = worlds.start_of(kind, directory)
    start, run = directory / "start", directory / "run"
    worlds.run_ckpt("shard", hub, start, "--mesh", "dp_shard=2", "--for", "torchtitan")
    straight, trained = worlds.run_ranks(2, train, run, start=start)
    step, last = run / "checkpoint/step-2", run / "checkpoint/step-4"
    worlds.run_ckpt("gather", last, directory / "out", "--assets", hub)
    back = worlds.weights_of(directory / "out")
    walked = Walked(expected=expected, straight=straight, live=trained, back=back, steps=[step])
    for num_ranks in (1, 2, 4):
        other = directory / f"theirs-{num_ranks}"
        shutil.copytree(step, other / "checkpoint/step-2")
        walked.theirs[num_ranks], _ = worlds.run_ranks(num_ranks, train, other, with_data=num_ranks == 2)
    for num_ranks in (1, 4):
        other = directory / f"ours-{num_ranks}"
        worlds.run_ckpt("reshard", step, other / "checkpoint/step-2", "--mesh", f"dp_shard={num_ranks}")
        walked.ours[num_ranks], _ = worlds.run_ranks(num_ranks, train, other, with_data=False)
        walked.steps.append(other / "checkpoint/step-2")
    return walked


def test_torchtitan_starts_resumes_and_returns_to_the_hub(tmp_path):
    judge(run_ranks(1, walk, "llama", tmp_path, timeout=280, backend=None)[0], tmp_path)
