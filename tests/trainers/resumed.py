"""Real trainers that save a step after each, or resume from one: what `steps.resume_world` asks.

torchtitan and DeepSpeed are no dependencies: `pip install --no-deps --target SITE torchtitan torchdata spmd_types tyro
docstring_parser typeguard` and, with DS_BUILD_OPS=0, `deepspeed hjson py-cpuinfo ninja msgpack einops`; SITE in
PYTHONPATH.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import random
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import toys

HEADS = {"num_attention_heads": 1, "num_key_value_heads": 1}
SIZES = HEADS | {"hidden_size": 4, "intermediate_size": 8, "vocab_size": 16, "rms_norm_eps": 1e-5}
SAVED, LAST = 2, 4
"""The step that is resumed, and the last of training."""
BATCH = 4


def tokens() -> torch.Tensor:
    """A row per sample."""
    return torch.randint(0, 16, (BATCH * LAST, 8), generator=torch.Generator().manual_seed(7))


def batch_of(step: int) -> torch.Tensor:
    """The rows of this rank, in loops of our own."""
    return tokens()[dist.get_rank() :: 2][step * BATCH // 2 : (step + 1) * BATCH // 2]


def llama(dropout: float = 0.0):
    """With dropout where the trainer saves RNG states: they count then."""
    return toys.build("llama", seed=1, **SIZES, attention_dropout=dropout).train()


def adam(model) -> tuple:
    """An optimizer, and a schedule that changes with every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)


def mean(loss: torch.Tensor) -> float:
    """Of all ranks."""
    loss = loss.detach().double().clone()
    if dist.is_initialized():
        dist.all_reduce(loss)
    return float(loss)


def digest(*values: object) -> str:
    """Of what this rank has of tensors, and of lists."""

    def plain(value: object) -> object:
        if isinstance(value, torch.Tensor):  # ZeRO-3 leaves nothing in the parameter itself
            value = getattr(value, "ds_tensor", getattr(value, "_local_tensor", value))
        if isinstance(value, torch.Tensor | np.ndarray):
            return value.tolist()
        return [plain(each) for each in value] if isinstance(value, list | tuple) else value

    return hashlib.sha256(repr(plain(values)).encode()).hexdigest()[:12]


class Run:
    """Losses by step, what training had at the start of one, and its last weights."""

    def __init__(self, *, resumes: bool) -> None:
        self.resumes = resumes
        self.losses: dict[int, float] = {}
        self.state: dict[str, object] = {}
        self.final = ""

    def begin(self, step: int, model, optimizer, scheduler) -> None:
        """Look, before a step is taken: at the first after resuming, or when the saved step has been taken."""
        if self.state or not (self.resumes or step == SAVED):
            return
        while hasattr(optimizer, "optimizer"):  # accelerate's and DeepSpeed's wrap the one that steps
            optimizer = optimizer.optimizer
        moments = list(optimizer.state.values())
        self.state = {
            "step": step,
            "weights": digest(*model.parameters()),
            "optimizer": digest(*(each.get(key) for each in moments for key in ("exp_avg", "exp_avg_sq"))),
            "lr": [float(group["lr"]) for group in optimizer.param_groups],
            "schedule": getattr(scheduler, "last_epoch", None),
            "rng": digest(torch.get_rng_state(), random.getstate(), np.random.get_state()),
        }

    def end(self, model) -> tuple:
        self.final = digest(*model.parameters())
        return self.losses, self.state, self.final


def train_trainer(out: Path, resume: Path | None, kind: str) -> tuple:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    run = Run(resumes=resume is not None)

    class Script(TrainerCallback):
        def on_step_begin(self, args, state, control, *, model, optimizer, lr_scheduler, **_):
            run.begin(state.global_step, model, optimizer, lr_scheduler)

        def on_log(self, args, state, control, logs, **_):
            run.losses[state.global_step] = logs.get("loss", run.losses.get(state.global_step))

    settings = {"fsdp": True, "fsdp_config": {"version": 2, "state_dict_type": kind}} if kind else {}
    if kind == "deepspeed":
        settings = {"deepspeed": deepspeed_config(3), "bf16": True}
    arguments = TrainingArguments(
        output_dir=str(out),
        use_cpu=True,
        per_device_train_batch_size=BATCH // (dist.get_world_size() if dist.is_initialized() else 1),
        max_steps=LAST,
        learning_rate=1e-2,
        save_strategy="no" if resume else "steps",
        save_steps=1,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        **settings,
    )
    rows = [{"input_ids": row, "labels": row} for row in tokens()]
    trainer = Trainer(llama(dropout=0.1), arguments, train_dataset=rows, callbacks=[Script()])
    trainer.train(resume_from_checkpoint=resume and str(resume))
    return run.end(trainer.model)


def train_accelerate(out: Path, resume: Path | None, kind: str) -> tuple:
    from accelerate import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin
    from accelerate.utils import set_seed

    set_seed(42)  # the Trainer's own: RNG states alike are stored once
    wrap = {"auto_wrap_policy": "transformer_based_wrap", "state_dict_type": kind}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **wrap) if "STATE_DICT" in kind else None
    loading = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(fsdp_plugin=plugin, cpu=plugin is None, dataloader_config=loading)
    model, run = llama(dropout=0.1), Run(resumes=resume is not None)
    own = torch.Generator().manual_seed(0)  # else the loader draws from what load_state has restored
    size = BATCH // accelerator.num_processes
    data = torch.utils.data.DataLoader(tokens(), batch_size=size, shuffle=True, generator=own)
    model, optimizer, scheduler, data = accelerator.prepare(model, *adam(model), data)
    second = llama()
    more = [accelerator.prepare(second, torch.optim.AdamW(second.parameters()))] if kind == "two" else []
    if resume:
        accelerator.load_state(str(resume))
    first = SAVED if resume else 0  # as in accelerate's examples, from the directory's name
    for step, batch in enumerate(accelerator.skip_first_batches(data, first), first):
        run.begin(step, model, optimizer, scheduler.scheduler)
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            for another, _ in more:
                loss = loss + another(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            for each in (optimizer, *(each for _, each in more)):
                each.step()
                each.zero_grad()
            scheduler.step()
        run.losses[step + 1] = mean(loss)
        if not resume:
            accelerator.save_state(str(out / f"step_{step + 1}"))
    return run.end(model)


def train_lightning(out: Path, resume: Path | None, kind: str) -> tuple:
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    run = Run(resumes=resume is not None)

    class Script(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = llama()

        def configure_model(self):
            for module in (*self.model.model.layers, self.model) if kind else ():
                fully_shard(module, mesh=self.device_mesh["data_parallel"])

        def on_train_batch_start(self, *_):
            scheduler = self.trainer.lr_scheduler_configs[0].scheduler
            run.begin(self.global_step, self, self.trainer.optimizers[0], scheduler)

        def training_step(self, batch, _):
            loss = self.model(input_ids=batch, labels=batch).loss
            run.losses[self.global_step + 1] = mean(loss)
            return loss

        def on_train_batch_end(self, *_):  # as ModelCheckpoint does
            if not resume:
                self.trainer.save_checkpoint(out / f"step={self.global_step}.ckpt")

        def configure_optimizers(self):
            optimizer, scheduler = adam(self)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler")
    more = {"strategy": ModelParallelStrategy(2, 1), "devices": 2} if kind else {"devices": 1}
    trainer = lightning.Trainer(accelerator="cpu", max_steps=LAST, **dict.fromkeys(quiet, False), **more)
    script = Script()
    rows = tokens()[:BATCH].repeat(LAST, 1)  # always the same: Lightning does not restore the place in plain data
    trainer.fit(script, torch.utils.data.DataLoader(rows, batch_size=BATCH), ckpt_path=resume)
    return run.end(script)


def train_torchtitan(out: Path, resume: Path | None, kind: str) -> tuple:
    from trainers import test_torchtitan, worlds

    worlds.SIZES, worlds.tokens = SIZES, tokens
    if resume:  # it finds the step by itself
        (out / "checkpoint").mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):  # of the other rank
            (out / "checkpoint" / f"step-{SAVED}").symlink_to(resume)
    checkpoint = {"interval": 100 if resume else 1, "last_save_model_only": False}
    run = Run(resumes=resume is not None)
    trainer = test_torchtitan.trainer_of(out, checkpoint, steps=LAST, decay_ratio=0.9)
    (model,), take = trainer.model_parts, trainer.train_step

    def step(*arguments, **options):
        run.begin(trainer.step - 1, model, next(iter(trainer.optimizers)), trainer.lr_schedulers.schedulers[0])
        take(*arguments, **options)
        run.losses[trainer.step] = trainer.metrics_processor.losses[-1]

    trainer.train_step = step
    trainer.train()
    trainer.close()
    return run.end(model)


def deepspeed_config(stage: int) -> dict[str, object]:
    return {
        "train_micro_batch_size_per_gpu": BATCH // 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
    }


def train_deepspeed(out: Path, resume: Path | None, kind: str) -> tuple:
    import deepspeed
    from torch import nn

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    torch.manual_seed(int(resume is not None))
    model = nn.Sequential(nn.Embedding(16, 4), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 16))
    optimizer, scheduler = adam(model)
    config = deepspeed_config(int(kind))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)
    path, client = engine.load_checkpoint(str(resume)) if resume else (None, {})
    run = Run(resumes=resume is not None)
    for step in range(client["step"] if path else 0, LAST):  # None, with a warning: most scripts begin anew
        run.begin(step, engine.module, engine.optimizer, scheduler)
        batch = batch_of(step)
        loss = nn.functional.cross_entropy(engine(batch).float().flatten(0, 1), batch.flatten())
        engine.backward(loss)
        engine.step()
        run.losses[step + 1] = mean(loss)
        if not resume:
            engine.save_checkpoint(str(out / f"run-{step + 1}"), client_state={"step": step + 1})
    return run.end(engine.module)


def train_loop(out: Path, resume: Path | None, kind: str) -> tuple:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    model, run, first = llama(), Run(resumes=resume is not None), 0
    for module in (*model.model.layers, model):
        fully_shard(module)
    optimizer, scheduler = adam(model)

    def state(step: int) -> dict[str, object]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments, "scheduler": scheduler.state_dict(), "step": step}

    if resume:
        dcp.load(loaded := state(0), checkpoint_id=resume)
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        scheduler.load_state_dict(loaded["scheduler"])
        first = loaded["step"]
    for step in range(first, LAST):
        run.begin(step, model, optimizer, scheduler)
        loss = model(input_ids=batch_of(step), labels=batch_of(step)).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        run.losses[step + 1] = mean(loss)
        if not resume:
            dcp.save(state(step + 1), checkpoint_id=out / f"step_{step + 1}")
    return run.end(model)


@dataclass(frozen=True, slots=True)
class Way:
    """A trainer, and how it saves."""

    train: Callable[[Path, Path | None, str], tuple]
    """Takes where to save, what to resume from, the kind; returns losses, state at the step, digest of the weights."""
    step: str
    """Where it saves a step, with {} for its number."""
    needs: tuple[str, ...]
    """What every rank imports; those without a dot are the packages whose versions count."""
    kind: str = ""
    ranks: int = 2


_HF = (
    "transformers",
    "accelerate",
    "transformers.trainer",
    "transformers.integrations.fsdp",
    "transformers.integrations.peft",
)
_PL = ("lightning", "lightning.pytorch.strategies")
WAYS = {
    "trainer": Way(train_trainer, "checkpoint-{}", _HF, ranks=1),
    "trainer-ddp": Way(train_trainer, "checkpoint-{}", _HF),
    "trainer-sharded": Way(train_trainer, "checkpoint-{}", _HF, "SHARDED_STATE_DICT"),
    "trainer-full": Way(train_trainer, "checkpoint-{}", _HF, "FULL_STATE_DICT"),
    "trainer-deepspeed": Way(train_trainer, "checkpoint-{}", ("deepspeed", *_HF), "deepspeed"),
    "accelerate": Way(train_accelerate, "step_{}", ("accelerate",), ranks=1),
    "accelerate-two": Way(train_accelerate, "step_{}", ("accelerate",), "two", ranks=1),
    "accelerate-sharded": Way(train_accelerate, "step_{}", ("accelerate",), "SHARDED_STATE_DICT"),
    "lightning": Way(train_lightning, "step={}.ckpt", _PL, ranks=1),
    "lightning-fsdp2": Way(train_lightning, "step={}.ckpt", _PL, "fsdp2"),
    "torchtitan": Way(train_torchtitan, "checkpoint/step-{}", ("torchtitan",)),
    "deepspeed-1": Way(train_deepspeed, "run-{}", ("deepspeed",), "1"),
    "deepspeed-3": Way(train_deepspeed, "run-{}", ("deepspeed",), "3"),
    "loop": Way(train_loop, "step_{}", ("torch.distributed.checkpoint.state_dict",)),
}


def prepare(way: Way) -> None:
    """Import in this process, once, what every rank would; let it do without GPUs."""
    from trainers import worlds

    os.environ |= {"ACCELERATE_TORCH_DEVICE": "cpu", "DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}
    worlds.import_once(*way.needs)
    if way.kind.endswith("STATE_DICT"):
        worlds.let_accelerate_use_cpu()
    if way.train is train_torchtitan:
        from trainers import test_torchtitan

        test_torchtitan.let_torchtitan_use_cpu()
        importlib.import_module("torchtitan.trainer")
    if "deepspeed" in way.needs:
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # it would compile C++


def be_rank(rank: int, world_size: int, name: str, out: Path, resume: Path | None) -> tuple:
    """As a launcher starts it; a new process has other RNG states."""
    if world_size > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        os.environ |= {"TORCHELASTIC_RUN_ID": "test"}
    seed = 10 * rank + (resume is not None)
    for start in (torch.manual_seed, random.seed, np.random.seed):
        start(seed)
    way = WAYS[name]
    try:
        return way.train(out, resume, way.kind)
    except BaseException as error:  # torch's CheckpointException is no Exception
        raise RuntimeError(said(error)) from None


def said(error: BaseException) -> str:
    """The class and first line of an exception, or of the first that it is about."""
    if isinstance(failures := getattr(error, "failures", None), dict) and failures:
        inner = next(iter(failures.values()))
        return f"{type(error).__name__} of {said(inner[0] if isinstance(inner, tuple) else inner)}"
    line = next((line for line in str(error).splitlines() if line.strip()), "")
    line = re.sub(r"metadata is None; global metadata read failed: ([^;]*);.*", r"\1", line)
    line = re.sub(r"/[\w/.=-]*/", "", line)[:90]
    return f"{type(error).__name__}: {line}".rstrip(": ")
