"""accelerate's FSDP2 plugin, for real: from a sharded hub model, over a resharded step, back to the hub."""

from __future__ import annotations

import pytest
import torch
from fsdp2.ranks import run_ranks
from seeds import guide
from torch.utils.data import DataLoader
from trainers import worlds
from trainers.judges import Walked, judge

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]
pytest.importorskip("accelerate", reason="needs accelerate")


def train(kind, *, first=0, start=None, resume=None, save=None):
    """Train from batch `first` to the last; return the losses, and the logits where the second step is saved."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", state_dict_type="SHARDED_STATE_DICT"
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    model = worlds.model_of(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    data = DataLoader(worlds.tokens(), batch_size=worlds.GLOBAL_BATCH // accelerator.num_processes)
    model, optimizer, scheduler, data = accelerator.prepare(model, optimizer, scheduler, data)
    if start:
        guide.run(
            "trainers/accelerate", "accelerate", {"accelerator": accelerator, "model": model, "start": str(start)}
        )
    if resume:
        accelerator.load_state(str(resume))
    losses, logits = [], None
    for step, batch in enumerate(accelerator.skip_first_batches(data, first), first + 1):
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(worlds.mean_of_ranks(loss))
        if save and step == 2:
            accelerator.save_state(str(save))
            logits = worlds.logits_of(model)
    return losses, logits


def walk(rank, world_size, kind, directory):
    """Everything with one import of accelerate."""
    worlds.import_once("accelerate")
    worlds.let_accelerate_use_cpu()
    hub, expected = worlds.start_of(kind, directory)
    start, step = directory / "start", directory / "step"
    worlds.run_ckpt("shard", hub, start, "--mesh", "dp_shard=2", "--for", "accelerate")
    straight, live = worlds.run_ranks(2, train, kind, start=start, save=step)
    worlds.run_ckpt("gather", step, directory / "out", "--assets", hub)
    back = worlds.loaded(kind, directory / "out")
    walked = Walked(expected=expected, straight=straight, live=live, back=back, steps=[step])
    for num_ranks in (1, 2, 4):
        walked.theirs[num_ranks], _ = worlds.run_ranks(num_ranks, train, kind, first=2, resume=step)
    for num_ranks in (1, 4):
        ours = directory / f"on-{num_ranks}"
        worlds.run_ckpt("reshard", step, ours, "--mesh", f"dp_shard={num_ranks}")
        walked.ours[num_ranks], _ = worlds.run_ranks(num_ranks, train, kind, first=2, resume=ours)
        walked.steps.append(ours)
    return walked


@pytest.mark.parametrize("kind", ["llama", "qwen3-moe"])
def test_accelerate_starts_resumes_and_returns_to_the_hub(kind, tmp_path):
    judge(run_ranks(1, walk, kind, tmp_path, timeout=280, backend=None)[0], tmp_path)
