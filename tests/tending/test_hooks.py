"""A run manages its own folder: real trainers, a loop with torch's async_save, and what is left when they end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from seeds import guide
from steps import toy_steps
from tending.runs import flip

from ckpt_tools import api, hooks
from ckpt_tools.errors import UsageError
from ckpt_tools.runs.assess import parse_record
from ckpt_tools.storage.run_leases import RECORD_NAME

pytestmark = pytest.mark.full(but=["test_settings_that_make_no_sense_are_refused", "test_other_ranks_do_nothing"])
FAST = {"settle_s": 0.0, "patience_s": 20.0}


def verified(run):
    entries = parse_record((run / RECORD_NAME).read_bytes())  # those in quarantine too
    return sorted(name for name, entry in entries.items() if entry.is_fit and (run / name).exists())


def names(run):
    return sorted(each for each in os.listdir(run) if not each.startswith((".", "latest-good")))


def children(parent=None):
    """Return the processes that a run has started beside it."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{pid}/stat").read_text()
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if int(stat.rpartition(")")[2].split()[1]) == (parent or os.getpid()) and b"ckpt_tools.sandbox" in command:
                found.append(int(pid))
    return found


@pytest.mark.filterwarnings("ignore")
def test_loop_with_async_saves_is_tended(tmp_path):
    import torch.distributed.checkpoint as dcp

    futures = []
    with hooks.Tending(tmp_path, keep_last=2, rank=0, **FAST) as tending:
        for step in range(1, 5):
            futures.append(dcp.async_save({"model": toy_steps.state_of(step)}, checkpoint_id=tmp_path / f"step-{step}"))
            tending.saved(f"step-{step}")
            tending.check()
            futures[-1].result()
    assert verified(tmp_path) == ["step-3", "step-4"]
    assert names(tmp_path) == ["step-3", "step-4"]
    assert children() == []


def test_bad_checkpoint_warns_and_keeps_the_earlier_ones(run):
    flip(run / "step-30" / "__0_0.distcp")
    tending = hooks.Tending(run, keep_last=1, rank=0, **FAST)
    tending.saved("step-30")
    with pytest.warns(RuntimeWarning, match="bad checkpoint: .*step-30"):
        tending.close()
    assert names(run) == ["step-20", "step-30"]


def check_for_a_minute(tending):
    """Take steps until one raises."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        tending.check()
        time.sleep(0.01)


def test_bad_checkpoint_raises_at_the_next_step_where_that_is_wanted(run):
    flip(run / "step-30" / "__0_0.distcp")
    tending = hooks.Tending(run, on_finding="raise", rank=0, **FAST)
    tending.saved("step-30")
    with pytest.raises(hooks.BadCheckpointError, match="step-30"):
        check_for_a_minute(tending)
    tending.close()  # told once


def test_save_that_never_ends_is_a_finding(run):
    (run / "step-30" / ".metadata").unlink()
    tending = hooks.Tending(run, rank=0, settle_s=0.0, patience_s=0.5)
    tending.saved("step-30")
    with pytest.warns(RuntimeWarning, match="unfinished-checkpoint: its save did not finish"):
        tending.close()


def test_other_ranks_do_nothing(run, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with hooks.Tending(run, keep_last=1) as tending:
        tending.saved("step-30")
        tending.check()
    assert sorted(os.listdir(run)) == ["step-10", "step-20", "step-30"]


def train_and_fail(run):
    with hooks.Tending(run, rank=0, patience_s=600) as tending:
        tending.saved("step-30")
        deadline = time.monotonic() + 60
        while not children() and time.monotonic() < deadline:
            time.sleep(0.01)
        _ = 1 / 0


def test_error_in_training_ends_what_is_under_way(run):
    (run / "step-30" / ".metadata").unlink()
    began = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        train_and_fail(run)
    assert time.monotonic() - began < 60
    assert children() == []


def test_killed_run_takes_its_process_along(run):
    (run / "step-30" / ".metadata").unlink()
    code = (
        "import sys, time\nfrom ckpt_tools import hooks\n"
        "t = hooks.Tending(sys.argv[1], rank=0, patience_s=600)\nt.saved('step-30')\n"
        "while t._worker is None: pass\nprint(flush=True)\ntime.sleep(600)\n"
    )
    training = subprocess.Popen([sys.executable, "-c", code, run], stdout=subprocess.PIPE)
    training.stdout.readline()
    deadline = time.monotonic() + 60
    while not (pids := children(training.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    training.send_signal(signal.SIGKILL)
    training.wait()
    training.stdout.close()
    while os.path.exists(f"/proc/{pids[0]}") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{pids[0]}")


def test_adapter_of_the_last_good_checkpoint_is_exported_at_the_end(tmp_path):
    import torch
    from safetensors.torch import save_file

    config = '{"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["a"]}'
    for step in (1, 2):
        path = tmp_path / "run" / f"checkpoint-{step}"
        path.mkdir(parents=True)
        factors = {"lora_A": torch.full((2, 4), float(step)), "lora_B": torch.ones(4, 2)}
        factors = {f"base_model.model.a.{name}.weight": factor for name, factor in factors.items()}
        save_file(factors, path / "adapter_model.safetensors")
        (path / "adapter_config.json").write_text(config)
    cut = tmp_path / "run" / "checkpoint-2" / "adapter_model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-4])
    out = tmp_path / "adapter"
    with (
        pytest.warns(RuntimeWarning, match="unfinished-checkpoint"),
        hooks.Tending(tmp_path / "run", rank=0, export_adapter=out, settle_s=0.0, patience_s=0.2) as tending,
    ):
        tending.saved("checkpoint-2")
    from safetensors.torch import load_file

    assert load_file(out / "adapter_model.safetensors")["base_model.model.a.lora_A.weight"].unique().tolist() == [1.0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("given", ["dict", "trainer"])
def test_exported_adapter_has_the_live_settings(tmp_path, given):
    """The checkpoint has no adapter_config.json, as TRL's sharded ones."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    peft = pytest.importorskip("peft", reason="needs peft")
    import torch
    import torch.distributed.checkpoint as dcp

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, **sizes))
    config = {"r": 4, "lora_alpha": 12, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]}
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **config))
    run, out, tokens = tmp_path / "run", tmp_path / "adapter", torch.arange(8)
    if given == "trainer":

        class Sharded(transformers.TrainerCallback):
            def on_save(self, args, state, control, **_):
                (run / "checkpoint-1" / "adapter_config.json").unlink()

        options = {"output_dir": str(run), "use_cpu": True, "max_steps": 1, "save_steps": 1, "report_to": []}
        callbacks = [Sharded(), hooks.TrainerTending(export_adapter=out, **FAST)]
        rows = [{"input_ids": tokens, "labels": tokens}] * 8
        arguments = transformers.TrainingArguments(**options)
        transformers.Trainer(model, arguments, train_dataset=rows, callbacks=callbacks).train()
    else:
        alone = model.peft_config["default"].to_dict()
        with hooks.Tending(run, export_adapter=out, model=alone, rank=0, **FAST) as tending:
            dcp.save({"model": model.state_dict()}, checkpoint_id=run / "step-1")
            tending.saved("step-1")
    written = json.loads((out / "adapter_config.json").read_text())
    assert {name: written[name] for name in config} == config
    live = model.eval()(tokens[None]).logits
    loaded = peft.PeftModel.from_pretrained(model.unload(), out).eval()
    torch.testing.assert_close(loaded(tokens[None]).logits, live)


def test_what_the_run_was_resumed_from_is_held(run):
    api.watch(run, once=True, settle=0)
    with hooks.Tending(run, keep_last=1, rank=0, resumed_from=run / "step-20", **FAST):
        assert api.prune(run, keep_last=1).removed == ("step-10",)
    assert api.prune(run, keep_last=1).removed == ("step-20",)


def test_what_the_trainer_points_at_stays(run):
    with hooks.Tending(run, keep_last=1, rank=0, **FAST) as tending:
        tending.saved(keep=[str(run / "step-10")])
    assert names(run) == ["step-10", "step-30"]


RAISING = """
import sys, time
import torch.distributed as dist
from ckpt_tools import hooks
dist.init_process_group("gloo")
tending = hooks.Tending(sys.argv[1], on_finding="raise", settle_s=0.0, patience_s=20.0)
tending.saved("step-30")
try:
    for _ in range(6000):
        tending.check()
        time.sleep(0.01)
except hooks.BadCheckpointError as error:
    print(f"rank {dist.get_rank()}: {error.what}", flush=True)
"""


def test_every_rank_raises(run):
    flip(run / "step-30" / "__0_0.distcp")
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29731"]
    (run.parent / "loop.py").write_text(RAISING)
    command += [str(run.parent / "loop.py"), str(run)]
    done = subprocess.run([sys.executable, *command], check=False, capture_output=True, text=True, timeout=120)
    assert done.stdout.count("damaged-data") == 2, done.stderr
    assert "rank 1: " in done.stdout


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(UsageError, match="keep_last must be at least 1"):
        hooks.Tending("run", keep_last=0)
    with pytest.raises(UsageError, match="on_finding"):
        hooks.Tending("run", on_finding="ignore")
    with pytest.raises(AttributeError):
        _ = hooks.Nothing


def test_folder_that_is_not_there_is_a_warning(tmp_path):
    tending = hooks.Tending(tmp_path / "none", rank=0, **FAST)
    with pytest.warns(RuntimeWarning, match="not managed: no such directory"):
        tending.close()


def test_names_load_nothing_else():
    code = "import sys\nfrom ckpt_tools import hooks\nhooks.Tending\nassert not {'torch', 'lightning'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)


def tiny_trainer(run, callback, **options):
    import torch
    import transformers

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 1)

        def forward(self, x, labels):
            return {"loss": ((self.linear(x) - labels) ** 2).mean()}

    rows = [{"x": torch.ones(4), "labels": torch.ones(1)} for _ in range(8)]
    arguments = transformers.TrainingArguments(
        output_dir=str(run),
        use_cpu=True,
        per_device_train_batch_size=2,
        max_steps=options.pop("max_steps", 4),
        save_steps=1,
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    return transformers.Trainer(Model(), arguments, train_dataset=rows, eval_dataset=rows, callbacks=[callback])


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_is_tended(tmp_path):
    pytest.importorskip("transformers", reason="needs transformers")
    pytest.importorskip("accelerate", reason="needs accelerate")
    callback = hooks.TrainerTending(keep_last=1, keep_best=1, **FAST)
    tiny_trainer(tmp_path, callback, eval_strategy="steps", eval_steps=1).train()
    taken = []
    guide.run("retention", "trainer", {"trainer": SimpleNamespace(add_callback=taken.append)})
    assert isinstance(taken[0], hooks.TrainerTending)
    assert names(tmp_path) == ["checkpoint-4"]
    assert verified(tmp_path) == ["checkpoint-4"]
    assert children() == []


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_stops_at_a_bad_checkpoint_where_that_is_wanted(tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    pytest.importorskip("accelerate", reason="needs accelerate")

    class Bitrot(transformers.TrainerCallback):
        def on_save(self, args, state, control, **_):
            if state.global_step == 2:
                file = tmp_path / "checkpoint-2" / "model.safetensors"
                file.write_bytes(file.read_bytes()[:-8])

        def on_step_end(self, args, state, control, **_):
            time.sleep(0.05)

    trainer = tiny_trainer(tmp_path, Bitrot(), max_steps=2000, save_strategy="no")
    trainer.args.save_strategy = "steps"
    trainer.add_callback(hooks.TrainerTending(on_finding="raise", settle_s=0.0, patience_s=0.5))
    trainer.args.save_steps = 2
    trainer.add_callback(Once(trainer))
    with pytest.raises(hooks.BadCheckpointError, match="checkpoint-2"):
        trainer.train()


def Once(trainer):  # noqa: N802 - a class, made where its library is there
    import transformers

    class Callback(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_save = state.global_step == 2
            return control

    return Callback()


@pytest.mark.filterwarnings("ignore")
def test_lightning_is_tended(tmp_path):
    lightning = pytest.importorskip("lightning", reason="needs lightning")
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 1)

        def training_step(self, batch, _):
            return self.linear(batch).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    saves = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=1, save_top_k=-1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=4,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=guide.run("retention", "lightning", {"checkpointing": saves})["callbacks"],
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2))
    assert names(tmp_path) == ["epoch=0-step=3.ckpt", "epoch=0-step=4.ckpt"]
    assert verified(tmp_path) == names(tmp_path)
    assert children() == []


def train_sharded(output):
    """Train with the real Trainer under FSDP2 on this rank; return what the folder holds."""
    import torch.distributed as dist
    from trainers import worlds
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(output),
        use_cpu=True,
        fsdp=True,
        fsdp_config={"version": 2, "state_dict_type": "SHARDED_STATE_DICT"},
        per_device_train_batch_size=worlds.GLOBAL_BATCH // dist.get_world_size(),
        max_steps=3,
        save_steps=1,
        report_to=[],
        disable_tqdm=True,
    )
    rows = [{"input_ids": row, "labels": row} for row in worlds.tokens()]
    callback = hooks.TrainerTending(keep_last=2, settle_s=0.5, patience_s=60.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Trainer(worlds.model_of("llama"), arguments, train_dataset=rows, callbacks=[callback]).train()
    return sorted(each for each in os.listdir(output) if not each.startswith((".", "latest-good")))


def train_on_two_ranks(rank, world_size, output):
    """Be the launcher of two ranks."""
    from trainers import worlds

    worlds.import_once("transformers.trainer", "transformers.integrations.peft", "peft")
    worlds.let_accelerate_use_cpu()
    return worlds.run_ranks(2, train_sharded, output)


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_is_tended_on_two_ranks_under_fsdp2(tmp_path):
    for needed in ("transformers", "accelerate", "peft"):
        pytest.importorskip(needed, reason=f"needs {needed}")
    from fsdp2.ranks import run_ranks

    run_ranks(1, train_on_two_ranks, tmp_path, timeout=240, backend=None)
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-3"]
    assert verified(tmp_path) == names(tmp_path)
    assert (tmp_path / "checkpoint-3" / "optimizer_0" / ".metadata").exists()
