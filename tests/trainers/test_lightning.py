"""Lightning's FSDP2 strategy, for real and unpatched: from a sharded hub model, over a resharded step, to the hub."""

from __future__ import annotations

import pytest
import torch
from fsdp2.ranks import run_ranks
from seeds import guide
from torch.utils.data import DataLoader, DistributedSampler
from trainers import worlds
from trainers.judges import Walked, judge

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]
pytest.importorskip("lightning", reason="needs lightning")


def script_of(model):
    """The class of a script that trains a model under FSDP2, and what it has lost by step."""
    import lightning
    from torch.distributed.fsdp import fully_shard

    class Script(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.losses = model, {}

        def configure_model(self):
            for module in (*self.model.model.layers, self.model):
                fully_shard(module, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch, _):
            loss = self.model(input_ids=batch, labels=batch).loss
            self.losses[self.global_step + 1] = worlds.mean_of_ranks(loss)
            return loss

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    return Script


def fit(script, resume, steps=worlds.NUM_STEPS, **more):
    """Let Lightning's Trainer train a script on all ranks."""
    import lightning
    import torch.distributed as dist
    from lightning.pytorch.strategies import ModelParallelStrategy

    num_ranks = dist.get_world_size()
    quiet = ("use_distributed_sampler", "logger", "enable_progress_bar", "enable_model_summary")  # the first shuffles
    strategy = ModelParallelStrategy(data_parallel_size=num_ranks, tensor_parallel_size=1)
    settings = {"accelerator": "cpu", "devices": num_ranks, "strategy": strategy, **dict.fromkeys(quiet, False)}
    trainer = lightning.Trainer(max_steps=steps, **settings, **more)
    batch = worlds.tokens()[: worlds.GLOBAL_BATCH]
    rows = batch.repeat(steps, 1)  # always the same: Lightning does not restore the place in plain data
    sampler = DistributedSampler(rows, shuffle=False)
    data = DataLoader(rows, batch_size=worlds.GLOBAL_BATCH // num_ranks, sampler=sampler)
    trainer.fit(script, data, ckpt_path=resume)
    return trainer


def train(kind, *, start=None, resume=None, save=None):
    """Train to the last step; return the losses, and the logits where the second step is saved."""

    class Script(script_of(worlds.model_of(kind))):
        logits = None

        def on_train_batch_end(self, *_):  # as ModelCheckpoint does
            if save and self.global_step == 2:
                self.trainer.save_checkpoint(save)
                self.logits = worlds.logits_of(self.model)

    if start:
        Script.on_fit_start = guide.run("trainers/lightning", "lightning", {"start": start})["on_fit_start"]
    script = Script()
    fit(script, resume, enable_checkpointing=False)
    return [*script.losses.values()], script.logits


def walk(rank, world_size, kind, directory):
    """Everything with one import of Lightning."""
    worlds.import_once("lightning", "lightning.pytorch.strategies")
    hub, expected = worlds.start_of(kind, directory)
    start, step = directory / "start", directory / "step=2.ckpt"
    worlds.run_ckpt("shard", hub, start, "--mesh", "dp_shard=2", "--for", "lightning", "--prefix", "state_dict.model.")
    straight, live = worlds.run_ranks(2, train, kind, start=start, save=step)
    worlds.run_ckpt("gather", step, directory / "out", "--assets", hub)
    back = worlds.loaded(kind, directory / "out")
    walked = Walked(expected=expected, straight=straight, live=live, back=back, steps=[step])
    for num_ranks in (1, 2, 4):
        walked.theirs[num_ranks], _ = worlds.run_ranks(num_ranks, train, kind, resume=step)
    for num_ranks in (1, 4):
        ours = directory / f"on-{num_ranks}.ckpt"
        worlds.run_ckpt("reshard", step, ours, "--mesh", f"dp_shard={num_ranks}")
        walked.ours[num_ranks], _ = worlds.run_ranks(num_ranks, train, kind, resume=ours)
        walked.steps.append(ours)
    return walked


def test_lightning_starts_resumes_and_returns_to_the_hub(tmp_path):
    judge(run_ranks(1, walk, "qwen3-moe", tmp_path, timeout=280, backend=None)[0], tmp_path)
