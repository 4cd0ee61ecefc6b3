"""transformers' Trainer with `fsdp`, for real: from a sharded hub model, over a resharded step, back to the hub."""

from __future__ import annotations

import pytest
from fsdp2.ranks import run_ranks
from seeds import guide
from trainers import worlds
from trainers.judges import *  # noqa: F403 - the tests
from trainers.judges import Walked

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]
pytest.importorskip("accelerate", reason="needs accelerate")
_IMPORTED = ("transformers.trainer", "transformers.integrations.peft", "transformers.integrations.bitsandbytes", "peft")


def train(kind, output, *, first=0, start=None, resume=None, save=False):
    """Train from step `first` to the last; return the losses, and the logits where the second step is saved."""
    import torch.distributed as dist
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Script(TrainerCallback):
        logits = None

        def on_save(self, args, state, control, *, model, **_):
            self.logits = worlds.logits_of(model)

        def on_step_end(self, args, state, control, **_):
            control.should_save = save and state.global_step == 2
            return control

    arguments = TrainingArguments(
        output_dir=str(output),
        use_cpu=True,
        fsdp=True,
        fsdp_config={"version": 2, "state_dict_type": "SHARDED_STATE_DICT"},
        per_device_train_batch_size=worlds.GLOBAL_BATCH // dist.get_world_size(),
        train_sampling_strategy="sequential",
        max_steps=worlds.NUM_STEPS,
        learning_rate=1e-2,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
    )
    rows = [{"input_ids": row, "labels": row} for row in worlds.tokens()]
    script = Script()
    trainer = Trainer(worlds.model_of(kind), arguments, train_dataset=rows, callbacks=[script])
    if start:
        guide.run("trainers", "trainer", {"trainer": trainer, "start": str(start)})
    trainer.train(resume_from_checkpoint=resume and str(resume))
    history = trainer.state.log_history
    return [entry["loss"] for entry in history if "loss" in entry and entry["step"] > first], script.logits


def walk(rank, world_size, kind, directory):
    """Everything with one import of the Trainer."""
    worlds.import_once(*_IMPORTED)
    worlds.let_accelerate_use_cpu()
    hub, expected = worlds.start_of(kind, directory)
    start, run, other = directory / "start", directory / "run", directory / "other"
    worlds.run_ckpt("shard", hub, start, "--mesh", "dp_shard=2", "--for", "trainer")
    straight, live = worlds.run_ranks(2, train, kind, run, start=start, save=True)
    step = run / "checkpoint-2"
    worlds.run_ckpt("gather", step, directory / "out", "--assets", hub)
    back = worlds.loaded(kind, directory / "out")
    walked = Walked(expected=expected, straight=straight, live=live, back=back, steps=[step])
    for num_ranks in (1, 2, 4):
        walked.theirs[num_ranks], _ = worlds.run_ranks(num_ranks, train, kind, other, first=2, resume=step)
    for num_ranks in (1, 4):
        ours = directory / f"on-{num_ranks}"
        worlds.run_ckpt("reshard", step, ours, "--mesh", f"dp_shard={num_ranks}")
        walked.ours[num_ranks], _ = worlds.run_ranks(num_ranks, train, kind, other, first=2, resume=ours)
        walked.steps.append(ours)
    return walked


@pytest.fixture(scope="module")
def walked(tmp_path_factory):
    directory = tmp_path_factory.mktemp("trainer")
    return run_ranks(1, walk, "llama", directory, timeout=250, backend=None)[0]
