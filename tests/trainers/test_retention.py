"""Real trainers whose checkpoints are pruned beside them resume from what is left as if nothing had been pruned.

What this needs of torchtitan is in `resumed.py`; TRL is `pip install --no-deps --target SITE trl datasets dill xxhash
multiprocess pyarrow pandas python-dateutil six pytz`, with SITE on PYTHONPATH.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch
import toys
from fsdp2.ranks import run_ranks
from torch.utils.data import DataLoader
from trainers import worlds
from trainers.resumed import digest

from ckpt_tools import hooks
from ckpt_tools.cli import main

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]
SAVED, LAST = 6, 8
"""The last step of the runs that are pruned, each of which saves every step; and of training."""
TENDING = {"settle_s": 0.2, "patience_s": 0.5}
CASES = [(by, keep) for keep in (2, 1) for by in ("hook", "watch")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """What a trainer is to run: all of training, the steps that are pruned, or what follows them."""

    folder: Path
    """That the trainer saves its steps to."""
    name: str
    """Of a step, with {} for its number."""
    by: str
    """Who prunes: a hook, a watch, or nobody."""
    keep: int
    """Number of steps that stay; with 1, the last save of what is pruned has weights alone."""
    resume: Path | bool = False
    """From where, or True for what the trainer finds by itself."""

    last = property(lambda self: SAVED if self.by else LAST)
    interval = property(lambda self: 1 if self.by else LAST + 1)

    def step(self, number: int) -> Path:
        return self.folder / self.name.format(number)

    def is_alone(self, number: int) -> bool:
        return bool(self.by) and self.keep == 1 and number == SAVED

    def hold(self, done: int) -> None:
        """Let training wait, after so many steps, until the second step is gone."""
        deadline = time.monotonic() + 60
        while self.by and done == self.keep + 3 and self.step(2).exists():
            assert time.monotonic() < deadline, (self.by, self.keep, sorted(os.listdir(self.folder)))
            time.sleep(0.02)

    @contextlib.contextmanager
    def loop(self):
        """Yield what a loop calls when a step is over."""
        pruned = self.by == "hook" and hooks.Tending(self.folder, keep_last=self.keep, **TENDING)
        with pruned or contextlib.nullcontext() as tending:

            def over(done: int) -> None:
                if tending:
                    tending.saved(self.name.format(done))
                    tending.check()
                if torch.distributed.get_rank() == 0:
                    self.hold(done)

            yield over


def weights_of(model) -> str:
    """The same on every rank."""
    return digest(*(each.full_tensor() if hasattr(each, "full_tensor") else each for each in model.parameters()))


def llama(dropout: float = 0.0):
    """With dropout where the trainer saves RNG states: they count then."""
    return toys.build("llama", seed=1, **worlds.SIZES, attention_dropout=dropout).train()


def train_trainer(leg: Leg, way: str = "whole") -> tuple:
    """The first step is the best one by what the Trainer is told, which loads it at the end."""
    from trainers.test_trainer import trainer_of
    from transformers import TrainerCallback

    losses = {}

    class Script(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            leg.hold(state.global_step)
            args.save_only_model = leg.is_alone(state.global_step + 1)

        def on_log(self, args, state, control, logs, **_):
            losses[state.global_step] = logs.get("loss", losses.get(state.global_step))

    kind = "FULL_STATE_DICT" if leg.keep == 1 else "SHARDED_STATE_DICT"  # which cannot save weights alone
    steps = {"max_steps": leg.last, "lr_scheduler_type": "constant", "learning_rate": 1e-3, "eval_steps": 1}
    saves = {
        "output_dir": str(leg.folder),
        "save_steps": leg.interval,
        **dict.fromkeys(("save_strategy", "eval_strategy"), "steps"),
    }
    best = {"metric_for_best_model": "loss", "greater_is_better": True, "load_best_model_at_end": bool(leg.by)}
    model = llama(dropout=0.1)
    trainer = trainer_of(way, model, Script(), kind=kind, **steps, **saves, **best)
    if leg.by == "hook":
        trainer.add_callback(hooks.TrainerTending(keep_last=leg.keep, **TENDING))
    trainer.train(resume_from_checkpoint=leg.resume if isinstance(leg.resume, bool) else str(leg.resume))
    if leg.by:
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
        trainer.save_model()
        assert Path(trainer.state.best_model_checkpoint).name == leg.name.format(1)
    return losses, weights_of(model)


def train_accelerate(leg: Leg) -> tuple:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import ProjectConfiguration, set_seed

    set_seed(42)
    project = ProjectConfiguration(str(leg.folder.parent), automatic_checkpoint_naming=True, iteration=1)
    wrap = {"auto_wrap_policy": "transformer_based_wrap", "state_dict_type": "SHARDED_STATE_DICT"}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **wrap)
    accelerator = Accelerator(fsdp_plugin=plugin, project_config=project)
    model, losses = llama(dropout=0.1), {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    rows, size = worlds.tokens()[: leg.last * worlds.GLOBAL_BATCH], worlds.GLOBAL_BATCH // 2
    data = DataLoader(rows, size, generator=torch.Generator())  # of its own, not what load_state has restored
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    accelerator.register_for_checkpointing(schedule)
    if leg.resume:
        accelerator.load_state(None if leg.resume is True else str(leg.resume))
    first = schedule.last_epoch
    with leg.loop() as over:
        for done, batch in enumerate(accelerator.skip_first_batches(data, first), first + 1):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses[done] = float(loss)
            if leg.is_alone(done):
                accelerator.save_model(model, leg.step(done))
            elif leg.by:
                accelerator.save_state()
            over(done)
    if leg.by:
        accelerator.save_model(model, leg.folder.parent / "final")
    return losses, weights_of(model)


def train_loop(leg: Leg) -> tuple:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    model, done, losses, saving = llama(), 0, {}, None
    for module in (*model.model.layers, model):
        fully_shard(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def state() -> dict[str, object]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights} | ({} if leg.is_alone(done) else {"optimizer": moments, "step": done})

    if leg.resume:
        dcp.load(loaded := state(), checkpoint_id=leg.resume)
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        done = loaded["step"]
    rows = worlds.tokens()[torch.distributed.get_rank() :: 2].chunk(LAST)
    group = torch.distributed.new_group(backend="gloo")  # of the saves: training goes on
    with leg.loop() as over:
        while done < leg.last:
            loss = model(input_ids=rows[done], labels=rows[done]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[done := done + 1] = float(loss)
            if leg.by:
                _ = saving and saving.result()
                saving = dcp.async_save(state(), checkpoint_id=leg.step(done), process_group=group)
            over(done)
        _ = saving and saving.result()
    return losses, weights_of(model)


def train_lightning(leg: Leg) -> tuple:
    """The first step is the best one by what ModelCheckpoint monitors; `last.ckpt` is a link."""
    from lightning.pytorch.callbacks import ModelCheckpoint
    from trainers.test_lightning import fit, script_of

    class Script(script_of(llama())):
        def on_train_batch_start(self, *_):
            leg.hold(self.global_step)
            saves.save_weights_only = leg.is_alone(self.global_step + 1)
            self.log("steps", float(self.global_step))

    settings = {"monitor": "steps", "save_top_k": -1, "save_last": "link", "every_n_train_steps": leg.interval}
    saves = ModelCheckpoint(leg.folder, **settings)
    tending = [hooks.LightningTending(keep_last=leg.keep, **TENDING)] if leg.by == "hook" else []
    script, resume = Script(), "last" if leg.resume is True else leg.resume or None
    trainer = fit(script, resume, leg.last, callbacks=[saves, *tending])
    if leg.by:
        trainer.save_checkpoint(leg.folder / "final.ckpt", weights_only=True)
        assert Path(saves.best_model_path).name == leg.name.format(1)
    return script.losses, weights_of(script)


def train_torchtitan(leg: Leg) -> tuple:
    from trainers.test_torchtitan import trainer_of

    found = {"load_step": number_of(leg.resume)} if isinstance(leg.resume, Path) else {}
    saves = {"interval": leg.interval, "last_save_model_only": leg.keep == 1, **found}
    trainer = trainer_of(leg.folder.parent, saves, steps=leg.last, total_steps=LAST)
    take = trainer.train_step
    with leg.loop() as over:

        def step(*arguments, **options):
            if leg.by and trainer.step > 1:
                over(trainer.step - 1)
            take(*arguments, **options)

        trainer.train_step = step
        trainer.train()
        over(leg.last)
    trainer.close()
    losses = dict(zip(range(leg.last, 0, -1), reversed(trainer.metrics_processor.losses), strict=False))
    return losses, weights_of(trainer.model_parts[0])


def number_of(link: Path) -> int:
    """Of the step that it leads to."""
    return int(re.findall(r"\d+", link.resolve().name)[-1])


@dataclass(frozen=True, slots=True)
class Way:
    train: Callable[[Leg], tuple]
    """Return the losses by step, and a digest of the weights at the end."""
    step: str
    """Where it saves a step, with {} for its number."""
    needs: tuple[str, ...]
    best_for: tuple[str, ...] = ()
    """Who knows that the first step is the best one."""


_HF = ("accelerate", "peft", "transformers.trainer", "transformers.integrations.peft")
WAYS = {
    "trainer": Way(train_trainer, "run/checkpoint-{}", _HF, ("hook", "watch")),
    "trl": Way(partial(train_trainer, way="trl"), "run/checkpoint-{}", ("trl", "datasets", *_HF), ("hook", "watch")),
    "accelerate": Way(train_accelerate, "checkpoints/checkpoint_{}", ("accelerate",)),
    "lightning": Way(
        train_lightning, "run/epoch=0-step={}.ckpt", ("lightning", "lightning.pytorch.strategies"), ("hook",)
    ),
    "torchtitan": Way(train_torchtitan, "checkpoint/step-{}", ("torchtitan", "torchdata", "spmd_types", "tyro")),
    "loop": Way(train_loop, "run/step-{}", ("torch.distributed.checkpoint.state_dict",)),
}


def walk(_rank, _world_size, name, directory):
    """With one import of the trainer: what a straight run gave; what is left of a pruned one, is good, and gave."""
    way = WAYS[name]
    worlds.NUM_STEPS = LAST
    if "accelerate" in way.needs:
        worlds.let_accelerate_use_cpu()
    if name == "torchtitan":
        import_module("trainers.test_torchtitan").let_torchtitan_use_cpu()
    worlds.import_once(*way.needs)

    def leg_of(by="", keep=0):
        leg = directory / f"{by}-{keep}" / way.step
        leg.parent.mkdir(parents=True)
        return Leg(folder=leg.parent, name=leg.name, by=by, keep=keep)

    straight, legs = leg_of(), [leg_of(*case) for case in CASES]
    with watched(legs[1]), watched(legs[3]):
        gave = run(way.train, [straight, *legs[::2]], legs[1::2])[straight]
    left = [[number for number in range(1, SAVED + 1) if leg.step(number).exists()] for leg in legs]
    links = [next(leg.folder.parent.rglob("*latest-good")) for leg in legs]
    finds = [leg.keep > 1 and name != "loop" for leg in legs]
    legs = [replace(leg, by="", resume=finds[n] or links[n]) for n, leg in enumerate(legs)]
    after = run(way.train, legs[::2], legs[1::2])
    return gave, {CASES[n]: (left[n], number_of(links[n]), after[leg]) for n, leg in enumerate(legs)}


def run(train, *worlds_of_legs):
    """Run legs one after the other in worlds beside each other: leg → what it gave."""
    waits = [worlds.start_ranks(2, lambda legs: {leg: train(leg) for leg in legs}, legs) for legs in worlds_of_legs]
    return {leg: gave for wait in waits for leg, gave in wait().items()}


@contextlib.contextmanager
def watched(leg: Leg):
    """Let `ckpt watch` prune the folder, and look a last time when the run is over."""
    options = ["watch", str(leg.folder), "--keep-last", str(leg.keep), "--settle", "0.2", "--quiet"]
    with subprocess.Popen([sys.executable, "-m", "ckpt_tools", *options, "--interval", "0.4"]) as process:
        yield
        process.terminate()
    assert main([*options, "--once"]) in (0, 3)  # weights alone are not whole


@pytest.mark.parametrize("name", WAYS)
def test_pruned_run_resumes_as_if_nothing_had_been_pruned(name, tmp_path):
    for needed in WAYS[name].needs:
        pytest.importorskip(needed.partition(".")[0], reason=f"needs {needed}")
    (losses, weights), found = run_ranks(1, walk, name, tmp_path, timeout=250, backend=None)[0]
    assert sorted(losses) == list(range(1, LAST + 1))
    expected = {}
    for by, keep in CASES:
        good = SAVED - 1 if keep == 1 else SAVED
        best = {1} if by in WAYS[name].best_for else set()
        after = {step: losses[step] for step in range(good + 1, LAST + 1)}
        expected[by, keep] = sorted(best | {*range(good - keep + 1, SAVED + 1)}), good, (after, weights)
    assert found == expected
