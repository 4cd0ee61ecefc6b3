"""A successor must earn it: hollow ones of every kind cost nothing, and healthy lives are pruned as asked."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import save_file
from steps import toy_steps

from ckpt_tools import api
from ckpt_tools.cli import main

QUICK = [
    "test_healthy_life_is_pruned",
    "test_each_reason_is_named_and_accepting_once_is_enough",
]
pytestmark = pytest.mark.full(but=QUICK)
SHAPES = {"model.embed_tokens.weight": (12, 4), "lm_head.weight": (12, 4)} | {
    f"model.layers.{layer}.{name}.weight": shape
    for layer in range(2)
    for name, shape in {"self_attn.q_proj": (8, 4), "mlp.up_proj": (16, 4), "input_layernorm": (16,)}.items()
}


def weights(step, *, lr=0.01):
    """Return a model that training has moved a little."""
    base = torch.Generator().manual_seed(0)
    moved = torch.Generator().manual_seed(step)
    found = {}
    for name, shape in SHAPES.items():
        found[name] = torch.randn(shape, generator=base) + lr * torch.randn(shape, generator=moved)
    return found


def moments(state, step):
    rows = {
        name: {"step": torch.tensor(float(step)), "exp_avg": 0.01 * each, "exp_avg_sq": each**2}
        for name, each in state.items()
    }
    return {"state": rows, "param_groups": [{"lr": 0.1, "params": [*rows]}]}


def save_hf(path, state, step):
    """As the Trainer does without FSDP."""
    path.mkdir(parents=True)
    if state:
        save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text("{}")
    by_number = dict(enumerate(moments(weights(step), step)["state"].values()))
    torch.save({"state": by_number, "param_groups": [{"lr": 0.1, "params": [*by_number]}]}, path / "optimizer.pt")
    torch.save({"last_epoch": step}, path / "scheduler.pt")
    torch.save({"python": (1, 2)}, path / "rng_state.pth")
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))


def save_dcp(path, state, step):
    toy_steps.save({"model": state, "optimizer": moments(weights(step), step)}, path)


def save_accelerate(path, state, step):
    toy_steps.save({"model": state}, path / "pytorch_model_fsdp_0")
    toy_steps.save({"optimizer": moments(weights(step), step)}, path / "optimizer_0")
    torch.save({"last_epoch": step}, path / "scheduler.bin")
    for rank in range(2):
        torch.save({"step": step, "torch_manual_seed": torch.arange(rank + 1)}, path / f"random_states_{rank}.pkl")


def save_verl(path, state, step):
    path /= "actor"
    path.mkdir(parents=True)
    for rank in range(1):
        torch.save(state, path / f"model_world_size_1_rank_{rank}.pt")
        torch.save(moments(weights(step), step), path / f"optim_world_size_1_rank_{rank}.pt")
        extra = {"lr_scheduler": {"last_epoch": step}, "rng": {"cpu": torch.arange(4)}}
        torch.save(extra, path / f"extra_state_world_size_1_rank_{rank}.pt")


def save_deepspeed(path, state, step):
    """As ZeRO-1 does on one rank, of which the bf16 weights are in the model's file."""
    inside = path / f"global_step{step}"
    inside.mkdir(parents=True)
    (path / "latest").write_text(inside.name)
    flat = torch.cat([each.flatten() for each in weights(step).values()])
    shapes = [{name: torch.Size(shape) for name, shape in SHAPES.items()}]
    torch.save(
        {"module": state, "param_shapes": shapes, "dp_world_size": 1, "mp_world_size": 1, "global_steps": step,
         "ds_version": "0.19.8", "optimizer": None, "lr_scheduler": {"last_batch_iteration": step},
         "buffer_names": [], "shared_params": {}, "frozen_param_shapes": None, "frozen_param_fragments": None},
        inside / "mp_rank_00_model_states.pt",
    )  # fmt: skip
    optimizer = {"zero_stage": 1, "partition_count": [1], "ds_version": "0.19.8"}
    optimizer |= {"single_partition_of_fp32_groups": [flat], "base_optimizer_state": {"state": {}, "param_groups": []}}
    torch.save({"optimizer_state_dict": optimizer}, inside / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")


LAYOUTS = {
    "hf": (save_hf, "checkpoint-"),
    "dcp": (save_dcp, "step-"),
    "accelerate": (save_accelerate, "checkpoint_"),
    "verl": (save_verl, "global_step_"),
    "deepspeed": (save_deepspeed, "checkpoint-"),
}


def some(state, number):
    return dict([*state.items()][:number])


def halved(each, value):
    each = each.clone()
    each[len(each) // 2 :] = value
    return each


HOLLOW = {
    "empty shapes": lambda state: {name: torch.empty(0) for name in state},
    "half the tensors": lambda state: some(state, len(state) // 2),
    "one missing": lambda state: some(state, len(state) - 1),
    "one of many": lambda state: some(state, 1),
    "none": lambda _: {},
    "zeros": lambda state: {name: torch.zeros_like(each) for name, each in state.items()},
    "one all zero": lambda state: state | {"lm_head.weight": torch.zeros(12, 4)},
    "constant": lambda state: {name: torch.full_like(each, 0.5) for name, each in state.items()},
    "huge": lambda state: {name: each * 1e30 for name, each in state.items()},
    "wrapped": lambda state: {name.replace("layers.", "layers._fsdp_wrapped_module."): e for name, e in state.items()},
    "flat halves": lambda state: {name: halved(each, 0.0) for name, each in state.items()},
    "half one tensor": lambda state: state | {"lm_head.weight": halved(state["lm_head.weight"], 0.25)},
    "other dtype": lambda state: {name: each.half() for name, each in state.items()},
    "one reset": lambda state: state | {"lm_head.weight": 5 * torch.randn(12, 4)},
    "nan": lambda state: state | {"lm_head.weight": torch.full((12, 4), float("nan"))},
    "vanished": lambda state: {name: each * 1e-6 for name, each in state.items()},
}


def make_run(root, layout, *steps):
    save, prefix = LAYOUTS[layout]
    for step in steps:
        save(root / f"{prefix}{step}", weights(step), step)
    return [f"{prefix}{step}" for step in steps]


def there(run):
    return sorted(each for each in os.listdir(run) if not each.startswith(".") and each != "latest-good")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_healthy_life_is_pruned(tmp_path, layout, capsys):
    run = tmp_path / "run"
    names = make_run(run, layout, 10, 20, 30)
    pruned = api.watch(run, once=True, settle=0, keep_last=1)
    assert pruned.removed == tuple(names[:2]), (pruned.findings, pruned.failed, pruned.checkpoints)
    assert pruned.exit_code == 0
    names = make_run(run, layout, 40)
    assert api.watch(run, once=True, settle=0, keep_last=1).removed == ((*there(run), *names)[0].replace("40", "30"),)


@pytest.mark.parametrize(
    ("layout", "kind"),
    [(layout, kind) for at, layout in enumerate(LAYOUTS) for kind in list(HOLLOW)[0 if layout == "dcp" else at :: 4]],
)
def test_hollow_successor_costs_nothing(tmp_path, layout, kind, capsys):
    run = tmp_path / "run"
    names = make_run(run, layout, 10, 20)
    save, prefix = LAYOUTS[layout]
    last = run / f"{prefix}30"
    save(last, HOLLOW[kind](weights(30)), 30)
    assert main(["watch", str(run), "--once", "--settle", "0", "--keep-last", "1", "--json"]) == 3
    document = json.loads(capsys.readouterr().out)
    assert names[1] in there(run)
    row = {each["name"]: each for each in document["checkpoints"]}[last.name]
    assert not row["fit"]
    assert row["unfit"]
    assert any(each["where"].startswith(last.name) and each["severity"] == "error" for each in document["findings"])


def test_each_reason_is_named_and_accepting_once_is_enough(tmp_path, capsys):
    run = tmp_path / "run"
    make_run(run, "dcp", 10, 20)
    for step in (30, 40):
        state = {name.replace("layers", "blocks"): each for name, each in weights(step).items()}
        save_dcp(run / f"step-{step}", state, step)
    pruned = api.watch(run, once=True, settle=0, keep_last=1)
    assert pruned.removed == ("step-10",)
    found = [each for each in pruned.findings if each.where == "step-30"]
    assert {each.code for each in found} == {"unfit-checkpoint"}
    assert "6 of the 8 model tensors of step-20 are missing" in found[0].what
    assert "6 of the 8 model tensors are not in step-20" in found[1].what
    assert found[0].hint == "if the change is intended, add --accept step-30"
    pruned = api.watch(run, once=True, settle=0, keep_last=1, accept=["step-30"])
    assert pruned.verified == ("step-40",)  # judged again, by what was accepted
    assert pruned.removed == ("step-20", "step-30")
    assert pruned.ok


@pytest.mark.parametrize("lacks", ["optimizer", "one state", "rank", "tokenizer", "schedule inside"])
def test_successor_must_hold_what_its_predecessors_hold(tmp_path, lacks):
    """By keys inside of containers, and rank by rank: each of these steps is readable and verifies."""
    run = tmp_path / "run"
    for step in (10, 20):
        state, is_last = weights(step), step == 20
        rows = moments(state, step)
        if lacks == "one state" and is_last:
            del rows["state"]["lm_head.weight"]["exp_avg"]
        content = {"model": state, "lr_scheduler": {"last_epoch": step}, "train_state": {"step": torch.tensor(step)}}
        content |= {"dataloader": {f"dp_rank_{rank}": str(step) for rank in range(2)}, "optimizer": rows}
        if lacks == "optimizer" and is_last:  # as torchtitan's last save does by default
            content = {"model": state}
        if lacks == "rank" and is_last:
            del content["dataloader"]["dp_rank_1"]
        if lacks == "schedule inside" and is_last:
            del content["lr_scheduler"]
        toy_steps.save(content, run / f"step-{step}")
        if lacks != "tokenizer" or not is_last:
            (run / f"step-{step}" / "tokenizer.json").write_text("{}")
    pruned = api.watch(run, once=True, settle=0, keep_last=1)
    assert there(run) == ["step-10", "step-20"]
    assert pruned.exit_code == 3
    assert "does not have" in next(each for each in pruned.findings if each.where == "step-20").what


def test_metrics_that_are_no_numbers_remove_nothing(tmp_path, template):
    from tending.runs import save_step, write_state

    run = tmp_path / "run"
    for step, loss in {1: "nan", 2: "0.5", 3: "inf", 4: "0.3", 5: "0.3", 6: None, 7: "0.9", 8: "0.8"}.items():
        path = save_step(run, step, template=template, prefix="checkpoint-")
        write_state(path, step, **({} if loss is None else {"eval_loss": float(loss)}))
    pruned = api.watch(run, once=True, settle=0, keep_best=1)
    assert pruned.removed == ("checkpoint-2", "checkpoint-7")
    reasons = {each.name: each.reason for each in pruned.checkpoints}
    assert reasons["checkpoint-1"] == reasons["checkpoint-6"] == "it has no finite eval_loss"
    assert reasons["checkpoint-4"] == reasons["checkpoint-5"] == "--keep-best 1: eval_loss 0.3"  # of equals both


def test_what_was_removed_comes_back_and_stays(tmp_path, capsys):
    run = tmp_path / "run"
    make_run(run, "dcp", 10, 20, 30)
    api.watch(run, once=True, settle=0, keep_last=1)
    assert there(run) == ["step-30"]
    assert main(["prune", str(run), "--undo", "step-10"]) == 0
    assert there(run) == ["step-10", "step-30"]
    assert api.watch(run, once=True, settle=0, keep_last=1).removed == ()
    assert main(["prune", str(run), "--undo", "step-11"]) == 1
    assert api.prune(run, undo=["all"]).notes == ("step-20 was restored and is kept until you remove it",)
    assert there(run) == ["step-10", "step-20", "step-30"]
    make_run(run, "dcp", 40)
    assert api.watch(run, once=True, settle=0, keep_last=1, quarantine="0s").removed == ("step-30",)
    api.prune(run, keep_last=1, quarantine="0s")
    assert not [each for each in os.listdir(run) if "trash" in each]


@pytest.mark.parametrize("how", ["export link", "link elsewhere", "hard link", "lease", "stale lease", "cwd", "bind"])
def test_use_is_seen(tmp_path, how, capsys):
    import subprocess
    import sys

    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    make_run(run, "dcp", 10, 20)
    elsewhere.mkdir()
    api.watch(run, once=True, settle=0)
    child = None
    if how == "export link":
        (run / "export" / "deep").mkdir(parents=True)
        (run / "export" / "deep" / "model").symlink_to("../../step-10/.metadata")
    elif how == "link elsewhere":
        (elsewhere / "model").symlink_to(run / "step-10")
    elif how == "hard link":
        os.link(run / "step-10" / ".metadata", elsewhere / "copy")
        api.watch(run, once=True, settle=0)
    elif how.endswith("lease"):
        until = 4e9 if how == "lease" else 1e9
        lease = {"host": "far", "pid": 7, "since": 1e9, "until": until}
        (run / "step-10" / ".ckpt-lease-1").write_text(json.dumps(lease))
    elif how == "cwd":
        child = subprocess.Popen([sys.executable, "-c", "input()"], cwd=run / "step-10", stdin=subprocess.PIPE)
    else:
        if subprocess.run(["mount", "--bind", run / "step-10", elsewhere], check=False, capture_output=True).returncode:
            pytest.skip("the kernel forbids bind mounts here")
        child = subprocess.Popen(
            [sys.executable, "-c", "import sys; f = open(sys.argv[1]); input()", elsewhere / ".metadata"],
            stdin=subprocess.PIPE,
        )
        import time

        time.sleep(1)
    try:
        pruned = api.prune(run, keep_last=1, also_used_by=[elsewhere])
        assert pruned.removed == (), pruned
        if how == "stale lease":
            assert "ends it" in pruned.notes[0]
    finally:
        if child is not None:
            child.communicate(b"\n")
        if how == "bind":
            subprocess.run(["umount", elsewhere], check=False)
