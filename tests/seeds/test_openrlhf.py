"""OpenRLHF's way: TP then FSDP, accumulation, clipping, decay groups, and a schedule that survives the wrapping."""

from __future__ import annotations

import pytest
import torch
import toys
from fsdp2.ranks import run_ranks
from seeds import guide

pytestmark = pytest.mark.full

STEPS, MICRO = 3, 2


def config():
    return toys.config_of("llama", tie_word_embeddings=False, attn_implementation="eager")


def batches(step, rank):
    """The micro-batches of one step for one of the two data-parallel ranks."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    tokens = [torch.randint(0, 64, (2, 8), generator=draw) for _ in range(MICRO)]
    return [{"input_ids": part, "labels": part} for part in tokens]


def make_scheduler(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def old_scheduler():
    """A schedule that has gone two steps before the model is wrapped."""
    groups = [{"params": [torch.zeros(1, requires_grad=True)]} for _ in range(2)]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    scheduler = make_scheduler(optimizer)
    for _ in range(2):
        optimizer.step()
        scheduler.step()
    return scheduler


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config()).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def reference(base):
    """The same training unsharded, in float32, written with plain PyTorch."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(base, attn_implementation="eager").train()
    plain = [p for name, p in model.named_parameters() if "norm" in name]
    decayed = [p for name, p in model.named_parameters() if "norm" not in name]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    steps = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step + 2)
        losses = [[model(**batch).loss for batch in batches(step, rank)] for rank in range(2)]
        (sum(loss for row in losses for loss in row) / (2 * MICRO)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps.append(([row[-1].item() for row in losses], norm.item(), optimizer.param_groups[0]["lr"]))
    return steps, {name: p.detach() for name, p in model.named_parameters()}


def train(rank, world_size, path):
    from ckpt_tools.fsdp2.audit import audit
    from ckpt_tools.fsdp2.internals import snapshot

    results = {}
    for dtype in (torch.float32, torch.bfloat16):
        names = {"config": config(), "path": path, "param_dtype": dtype}
        guide.run("fsdp2-cookbook", "openrlhf-wrap", names)
        model, optimizer = names["model"].train(), names["optimizer"]
        names |= {"old_scheduler": old_scheduler(), "make_scheduler": make_scheduler}
        guide.run("fsdp2-cookbook", "openrlhf-scheduler", names)
        findings = audit(model, phase="loaded", plan=names["plan"], optimizer=optimizer)
        steps = []
        for step in range(STEPS):
            rate = optimizer.param_groups[0]["lr"]
            names["batches"] = batches(step, rank // 2)
            guide.run("fsdp2-cookbook", "openrlhf-step", names)
            steps.append((names["loss"].item(), names["norm"].item(), rate))
        weights = {name: p.detach().full_tensor().clone() for name, p in model.named_parameters()}
        output = model(input_ids=torch.arange(8)[None])
        states = {group.modules[0]: group.sharding for group in snapshot(model)}
        output.logits.sum().backward()
        results[str(dtype)] = {
            "steps": steps,
            "weights": weights,
            "dtypes": {str(p.dtype) for p in model.parameters()} | {str(output.logits.dtype)},
            "gradients": {str(p.grad.dtype) for p in model.parameters()},
            "states": states,
            "groups": [(group["weight_decay"], len(group["params"])) for group in optimizer.param_groups],
            "findings": [(finding.code, finding.where) for finding in findings],
        }
    names |= {"critic_config": config()}
    names["critic_config"].num_labels = 1
    guide.run("fsdp2-cookbook", "openrlhf-critic", names)
    guide.run("fsdp2-cookbook", "openrlhf-reference", names)
    critic, reference, report = names["critic"], names["reference"], names["report"]
    prompt = torch.arange(4)[None] + rank // 2
    with torch.no_grad():
        rollout = reference.generate(input_ids=prompt, max_new_tokens=2 + rank // 2, do_sample=False, synced_gpus=True)
    critic(input_ids=prompt).logits.sum().backward()
    results["others"] = {
        "report": (report.missing, report.unexpected),
        "head": critic.score.weight.detach().full_tensor(),
        "head_gradient": critic.score.weight.grad.full_tensor().norm().item(),
        "rollout": rollout.tolist(),
        "reference": {(str(p.dtype), p.requires_grad) for p in reference.parameters()},
    }
    return results


@pytest.fixture(scope="module")
def trained(base):
    return run_ranks(4, train, base, timeout=120)


def test_openrlhf_in_float32_equals_the_unsharded_training(trained, reference):
    steps, weights = reference
    for rank, result in enumerate(trained):
        for (loss, norm, rate), (losses, other, expected) in zip(result["torch.float32"]["steps"], steps, strict=True):
            # Sums over ranks and over the halves of tp are taken in another order: some units in the last place.
            assert loss == pytest.approx(losses[rank // 2], rel=2e-6)
            assert norm == pytest.approx(other, rel=1e-5)
            assert rate == pytest.approx(expected, rel=1e-12)
    for name, weight in trained[0]["torch.float32"]["weights"].items():
        # AdamW divides by the root of the second moment: a gradient near zero carries its relative error on.
        torch.testing.assert_close(weight, weights[name], rtol=1e-3, atol=1e-4)


def test_openrlhf_in_bfloat16_stays_near_and_returns_float32(trained, reference):
    for rank, result in enumerate(trained):
        found = result["torch.bfloat16"]
        for (loss, _, _), (losses, _, _) in zip(found["steps"], reference[0], strict=True):
            # bf16 rounds to 2^-9 at every product and sum of two layers.
            assert loss == pytest.approx(losses[rank // 2], rel=2e-2)
        assert found["steps"] != result["torch.float32"]["steps"]
        assert found["dtypes"] == found["gradients"] == {"torch.float32"}


def test_openrlhf_root_stays_gathered_after_forward_and_layers_do_not(trained):
    states = trained[0]["torch.bfloat16"]["states"]
    assert states.pop("") == "UNSHARDED"
    assert len(states) == 2
    assert set(states.values()) == {"SHARDED"}


def test_openrlhf_schedule_goes_on_where_it_was_before_the_wrapping(trained):
    rates = [rate for _, _, rate in trained[0]["torch.float32"]["steps"]]
    assert rates == pytest.approx([1e-2 / 3, 1e-2 / 4, 1e-2 / 5])


def test_openrlhf_groups_and_audit_are_as_meant(trained):
    for result in trained:
        for found in (result["torch.float32"], result["torch.bfloat16"]):
            # Seven linear layers per layer, embeddings and head; two norms per layer and the last one.
            assert found["groups"] == [(0.1, 16), (0.0, 5)]
            assert found["findings"] == []


def test_openrlhf_critic_has_a_head_of_its_own_and_the_reference_generates(trained):
    torch.manual_seed(0)
    head = torch.empty(1, config().hidden_size).normal_(std=0.02)
    for rank, result in enumerate(trained):
        found = result["others"]
        assert found["report"] == (("score.weight", "score.bias"), ("lm_head.weight",))
        assert torch.equal(found["head"], head)
        assert found["head_gradient"] > 0
        assert found["reference"] == {("torch.bfloat16", False)}
        # Four tokens of the prompt; the two data-parallel parts end at different lengths.
        assert len(found["rollout"][0]) == 4 + 2 + rank // 2
        assert found["rollout"] == trained[rank ^ 1]["others"]["rollout"]
