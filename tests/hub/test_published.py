"""From a training step to what a stranger loads: published from the hub, the adapter computes what was trained.

The stranger is a process that knows the repository's name alone (`stranger.py`): it runs the card's code, and lets PEFT
find base and class by the adapter's own config.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch
from adapters import families
from fsdp2.ranks import run_ranks
from hub.conftest import strangers
from hub.local_hub import Hub
from hub.test_card_facts import card_of
from safetensors.torch import load_file

pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),
]
SAVED = ["lora", "dora", "rslora", "rank-pattern", "alpha-pattern", "modules-to-save", "tokens", "several"]
SAVED += ["lora-optim", "accelerate"]
NO_TASK = "lora-optim"
"""Its configuration has no task: the card asks for the base, and AutoPeft, which cannot choose a class, refuses."""


def publish_base(hub: Hub, directory: Path) -> Path:
    families.build("llama").save_pretrained(directory)
    hub.make("org/base", {path.name: path.read_bytes() for path in directory.iterdir()})
    return directory


def loaded(hub: Hub, environment, directory: Path, repos: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return by which way of loading which repository computes something else than was trained."""
    jobs = {}
    for repo, trained in repos.items():
        block = re.findall(r"```python\n(from peft .*?)```", card_of(hub, repo), re.DOTALL)[0]
        jobs |= {f"card:llama:{block}": trained}
        jobs |= {} if repo.endswith(NO_TASK) else {f"auto:llama:{repo}": trained}
    seen = strangers(environment, directory, *jobs)
    return {
        job: float((seen[job] - trained).abs().max())
        for job, trained in jobs.items()
        if not torch.equal(seen[job], trained)
    }


def test_steps_of_two_fsdp2_ranks(hub: Hub, run, environment, tmp_path: Path):
    run_ranks(2, families.save_all, str(tmp_path), SAVED, timeout=300)
    base, repos = publish_base(hub, tmp_path / "base"), {}
    for name in SAVED:
        case, step = families.CASES[name], tmp_path / name / "dcp"
        families.leave_config(case, step, **{} if name == NO_TASK else {"task_type": "CAUSAL_LM"})
        argv = ("--adapter", case.options["adapter"]) if "adapter" in case.options else ()
        push = ("--base", base, "--base-model", "org/base", "--push", f"me/{name}")
        code, _, err = run("export-lora", step, tmp_path / "out" / name, *argv, *push)
        assert code == 0, (name, err)
        repos[f"me/{name}"] = load_file(tmp_path / name / "logits.safetensors")["logits"]
    assert len({tensor.sum().item() for tensor in repos.values()}) > 5
    assert loaded(hub, environment, tmp_path, repos) == {}


def test_step_of_the_trainer(hub: Hub, run, environment, tmp_path: Path):
    import peft
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    base = publish_base(hub, tmp_path / "base")
    config = peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", use_rslora=True, **families.LLAMA)
    given = families.inputs("llama")["input_ids"]
    rows = [{"input_ids": row, "labels": row} for row in given]
    with warnings.catch_warnings(action="ignore"):
        model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
        options = {"max_steps": 2, "save_steps": 2, "learning_rate": 0.1, "report_to": [], "use_cpu": True}
        Trainer(model, TrainingArguments(str(tmp_path / "run"), **options), train_dataset=rows).train()
    trained = families.outputs(model.eval(), "llama")
    assert (trained - families.outputs(families.build("llama"), "llama")).abs().max() > 0.01
    step = tmp_path / "run" / "checkpoint-2"
    code, _, err = run("export-lora", step, tmp_path / "out", "--base-model", "org/base", "--push", "me/exported")
    assert code == 0, err
    assert loaded(hub, environment, tmp_path, {"me/exported": trained}) == {}
    assert "| steps | 2 |" in card_of(hub, "me/exported")
