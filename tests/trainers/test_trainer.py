"""transformers' Trainer with `fsdp`, for real: from a sharded hub model, over a resharded step, back to the hub.

And with a LoRA of PEFT, whose steps hold the adapter alone, and TRL's SFTTrainer, which is a Trainer.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from fsdp2.ranks import run_ranks
from seeds import guide
from trainers import worlds
from trainers.judges import Walked, judge

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]
for _needed in ("accelerate", "peft"):
    pytest.importorskip(_needed, reason=f"needs {_needed}")
_IMPORTED = ("transformers.trainer", "transformers.integrations.peft", "transformers.integrations.bitsandbytes", "peft")


def adapted(hub):
    """The model of the hub with an adapter that nobody has trained."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    settings = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    return get_peft_model(transformers.LlamaForCausalLM.from_pretrained(hub), settings)


def trainer_of(way, model, script, *, kind="SHARDED_STATE_DICT", **more):
    """The Trainer, or TRL's own on the same tokens: with a toy tokenizer, and a step for every sample."""
    import torch.distributed as dist
    from transformers import Trainer, TrainingArguments

    settings = {
        "use_cpu": True,
        "fsdp": True,
        "fsdp_config": {"version": 2, "state_dict_type": kind},
        "per_device_train_batch_size": worlds.GLOBAL_BATCH // dist.get_world_size(),
        "train_sampling_strategy": "sequential",
        "max_steps": worlds.NUM_STEPS,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
    } | more
    rows = [{"input_ids": row, "labels": row} for row in worlds.tokens()]
    if way != "trl":
        return Trainer(model, TrainingArguments(**settings), None, rows, rows, callbacks=[script])
    import datasets
    import tokenizers
    import trl

    tokens = worlds.tokens().tolist()
    table = datasets.table.InMemoryTable.from_pydict({"input_ids": tokens, "labels": tokens})
    words = tokenizers.models.WordLevel({"<unk>": 0, "<eos>": 1}, "<unk>")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), eos_token="<eos>", pad_token="<eos>", unk_token="<unk>"
    )
    more = {"dataset_kwargs": {"skip_prepare_dataset": True}, "gradient_checkpointing": False, "bf16": False}
    rows = datasets.Dataset(table, fingerprint="tokens")  # else it pickles the table for one
    return trl.SFTTrainer(
        model,
        trl.SFTConfig(**settings, **more, max_length=None),
        train_dataset=rows,
        eval_dataset=rows,
        processing_class=tokenizer,
        callbacks=[script],
    )


def train(output, *, way="whole", base=None, first=0, start=None, resume=None, save=False):
    """Train from step `first` to the last; return the losses, and the logits where the second step is saved."""
    from transformers import TrainerCallback

    class Script(TrainerCallback):
        logits = None

        def on_save(self, args, state, control, *, model, **_):
            self.logits = worlds.logits_of(model)

        def on_step_end(self, args, state, control, **_):
            control.should_save = save and state.global_step == 2
            return control

    script = Script()
    model = adapted(base) if base else worlds.model_of("llama")
    trainer = trainer_of(way, model, script, output_dir=str(output))
    if start:
        guide.run("trainers/accelerate", "trainer", {"trainer": trainer, "start": str(start)})
    trainer.train(resume_from_checkpoint=resume and str(resume))
    history = trainer.state.log_history
    return [entry["loss"] for entry in history if "loss" in entry and entry["step"] > first], script.logits


def there_and_back(way, hub, directory, run):
    """Train the whole model from what `shard` writes; return what came out, and the model of what `gather` writes."""
    start, out = directory / "start", directory / "out"
    worlds.run_ckpt("shard", hub, start, "--mesh", "dp_shard=2", "--for", "trainer")
    straight, live = worlds.run_ranks(2, train, run, way=way, start=start, save=True)
    worlds.run_ckpt("gather", run / "checkpoint-2", out, "--assets", hub)
    return straight, live, worlds.loaded("llama", out)


def there_and_back_with_adapter(way, hub, directory, run):
    """Train an adapter on the hub's model; return what came out, and the model with what `export-lora` writes."""
    from peft import PeftModel

    straight, live = worlds.run_ranks(2, train, run, base=hub, save=True)
    worlds.run_ckpt("export-lora", run / "checkpoint-2", directory / "adapter", "--alpha", "8", "--base", hub)
    base = transformers.LlamaForCausalLM.from_pretrained(hub)
    return straight, live, worlds.logits_of(PeftModel.from_pretrained(base, directory / "adapter"))


def walk(rank, world_size, way, directory):
    """Everything with one import of the Trainer."""
    worlds.import_once(*_IMPORTED, *(["trl"] if way == "trl" else []))
    has_adapter = way == "adapter"
    worlds.let_accelerate_use_cpu()
    hub, expected = worlds.start_of("llama", directory)
    base = hub if has_adapter else None
    run, other = directory / "run", directory / "other"
    straight, live, back = (there_and_back_with_adapter if has_adapter else there_and_back)(way, hub, directory, run)
    step = run / "checkpoint-2"
    walked = Walked(expected=expected, straight=straight, live=live, back=back, steps=[step])
    for num_ranks in (1, 2, 4):
        again = {"way": way, "base": base, "first": 2}
        walked.theirs[num_ranks], _ = worlds.run_ranks(num_ranks, train, other, **again, resume=step)
    for num_ranks in (1, 4):
        ours = directory / f"on-{num_ranks}/checkpoint-2"
        worlds.run_ckpt("reshard", step, ours, "--mesh", f"dp_shard={num_ranks}")
        walked.ours[num_ranks], _ = worlds.run_ranks(num_ranks, train, other, **again, resume=ours)
        walked.steps.append(ours)
    return walked


@pytest.mark.parametrize("way", ["whole", "adapter", "trl"])
def test_trainer_starts_resumes_and_returns_to_the_hub(way, tmp_path):
    if way == "trl":
        pytest.importorskip("trl", reason="needs trl")
    judge(run_ranks(1, walk, way, tmp_path, timeout=280, backend=None)[0], tmp_path)
