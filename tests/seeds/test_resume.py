"""The guides' three trainers stop and go on: on 2 and 4 ranks, and on one; with all that a run has.

float32 keeps 24 bits: sums over ranks are taken in another order, and AdamW carries the last place on.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import toys
from fsdp2.ranks import run_ranks
from safetensors.torch import load_file, save_file
from seeds import bagel_model, guide
from seeds.test_ai_toolkit import Flux
from torch import nn
from torch.distributed.tensor import DTensor

pytestmark = pytest.mark.full

SAMPLES, STEPS = 4, 4


class Critic(nn.Module):
    """A value of every sequence, by layers of its own."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(2))
        self.value = nn.Linear(16, 1)

    def forward(self, tokens):
        h = self.embed(tokens % 64)
        for layer in self.layers:
            h = h + layer(h)
        return self.value(h).mean(1)[:, 0]


def make_flux():
    from ckpt_tools.fsdp2.lora import add_lora

    config = {"peft_type": "LORA", "r": 4, "target_modules": ["qkv", "proj", "linear1", "linear2"]}
    return add_lora(Flux(), config, seed=42)


def make_bagel():
    model = bagel_model.Bagel()
    model.vae.requires_grad_(False)
    return model


def make_llama():
    return toys.build("llama", num_hidden_layers=2, tie_word_embeddings=False, attn_implementation="eager").train()


def bagel_loss(model, tokens, noise):
    return model(tokens % bagel_model.VOCAB, noise[..., :192].reshape(-1, 3, bagel_model.IMAGE, bagel_model.IMAGE))


def llama_loss(model, tokens, noise):
    logits = model(input_ids=tokens).logits[:, :-1]
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return (losses.unflatten(0, (len(tokens), -1)).mean(1) * (1 + 0.1 * noise[:, 0])).mean()


def flux_loss(model, tokens, noise):
    clean = tokens[:, :6, None].float().expand(-1, -1, 16) / 64
    time = noise[:, :16].sigmoid()
    return model(clean + noise[:, :96].unflatten(1, (6, 16)), clean[:, :3], time)


TRAINERS = {
    "bagel": (make_bagel, ["DecoderLayer", "VisionBlock", "layers.*"], bagel_loss),
    "openrlhf": (make_llama, ["LlamaDecoderLayer", "layers.*"], llama_loss),
    "ai-toolkit": (make_flux, ["DoubleStreamBlock", "SingleStreamBlock", "layers.*"], flux_loss),
}


class Run:
    """One trainer, by the guide's code."""

    def __init__(self, name, world_size):
        make, _, self.loss = TRAINERS[name]
        self.names = {"mesh_text": f"dp_shard={world_size}", "tp_plan": None, "make_actor": make, "make_critic": Critic}
        self.names["blocks"] = "auto"
        guide.run("trainers/own-loop", "build", self.names)

    def start(self, weights):
        from ckpt_tools.fsdp2 import load_checkpoint

        for name, tensors in (("actor", "actor"), ("average", "actor"), ("critic", "critic")):
            load_checkpoint(self.names[name], weights / f"{tensors}.safetensors")
        return self.arm()

    def resume(self, path):
        self.arm()
        self.names["path"] = path
        guide.run("trainers/own-loop", "resume", self.names)
        report = self.names["report"]
        assert (report.missing, report.unexpected, report.unread) == ((), (), ())
        return self

    def arm(self):
        guide.run("trainers/own-loop", "optimizers", self.names)
        guide.run("trainers/own-loop", "state", self.names)
        return self

    def save(self, path, block="save"):
        self.names["path"] = path
        guide.run("trainers/own-loop", block, self.names)

    def train(self, num_steps, rank=0, world_size=1):
        return [self.step(rank, world_size) for _ in range(num_steps)]

    def step(self, rank, world_size):
        own = slice(rank * SAMPLES // world_size, (rank + 1) * SAMPLES // world_size)
        names, progress = self.names, self.names["progress"]
        draw = torch.Generator().manual_seed(progress["samples"])
        tokens = torch.randint(0, 64, (SAMPLES, 8), generator=draw)[own]
        noise = torch.randn(SAMPLES, 192, generator=names["noise"])[own]
        losses = []
        advantage = None
        for model, optimizer in (("critic", "critic_optimizer"), ("actor", "optimizer")):
            if model == "critic":
                value = names["critic"](tokens)
                advantage, loss = value.detach(), (value - tokens.float().mean(1) / 64).square().mean()
            else:
                loss = self.loss(names["actor"], tokens, noise + 0.01 * advantage[:, None])
            loss.backward()
            names[optimizer].step()
            names[optimizer].zero_grad()
            loss = loss.detach().clone()
            if world_size > 1:
                dist.all_reduce(loss)
            losses.append(loss.item() / world_size)
        names["scheduler"].step()
        with torch.no_grad():
            for one, other in zip(names["average"].parameters(), names["actor"].parameters(), strict=True):
                one.lerp_(other, 0.1)
        progress["step"] += 1
        progress["samples"] += SAMPLES
        progress["best"] = losses[-1] if progress["best"] is None else min(progress["best"], losses[-1])
        return [*losses, names["optimizer"].param_groups[0]["lr"]]

    def averages(self):
        full = (p.full_tensor() if isinstance(p, DTensor) else p for p in self.names["average"].parameters())
        return [float(p.detach().double().norm()) for p in full]


def train_and_resume(rank, world_size, directory, others=()):
    """Train and save halfway; resume from it; resume what other worlds have saved."""
    found = {}
    for name in TRAINERS:
        run = Run(name, world_size).start(directory / name)
        torch.manual_seed(rank)
        losses = run.train(2, rank, world_size)
        run.save(directory / name / f"on-{world_size}")
        saved = [f"on-{world_size}"]
        if name == "openrlhf":
            saved.append(f"background-{world_size}")
            run.save(directory / name / saved[-1], "background")
        draws = torch.rand(3).tolist()
        losses += run.train(STEPS - 2, rank, world_size)
        ended = run.averages()
        if name == "openrlhf":
            run.names["saving"].result(timeout=60)
        for file in saved:
            run = Run(name, world_size).resume(directory / name / file)
            drawn = torch.rand(3).tolist()
            again = run.train(STEPS - 2, rank, world_size), run.averages(), drawn
            assert again == (losses[2:], ended, draws), (name, file)
        elsewhere = {}
        for other in others:
            run = Run(name, world_size).resume(directory / name / f"on-{other}")
            elsewhere[other] = run.train(STEPS - 2, rank, world_size), run.averages(), run.names["report"].notes
        found[name] = losses, ended, elsewhere
    return found


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs")
    for name, (make, _, _) in TRAINERS.items():
        (path / name).mkdir()
        torch.manual_seed(0)
        save_file(make().state_dict(), path / name / "actor.safetensors")
        save_file(Critic().state_dict(), path / name / "critic.safetensors")
    return path


@pytest.fixture(scope="module")
def unsharded(directory):
    """Plain PyTorch, in this process: the guide's code without a mesh."""
    found = {}
    for name, (make, _, _) in TRAINERS.items():
        run = object.__new__(Run)
        run.loss = TRAINERS[name][2]
        run.names = {"torch": torch, "actor": make(), "average": make().requires_grad_(False), "critic": Critic()}
        for model, file in (("actor", "actor"), ("average", "actor"), ("critic", "critic")):
            run.names[model].load_state_dict(load_file(directory / name / f"{file}.safetensors"))
        found[name] = run.arm().train(STEPS), run.averages()
    return found


@pytest.fixture(scope="module")
def ran(directory):
    """Two ranks, four that go on with what two have saved, and one that goes on with both."""
    two = run_ranks(2, train_and_resume, directory, timeout=150)
    four = run_ranks(4, train_and_resume, directory, (2,), timeout=200)
    one = run_ranks(1, train_and_resume, directory, (2, 4), timeout=150)
    return {1: one, 2: two, 4: four}


def close(found, expected):
    """The largest difference of losses and rates, relative."""
    pairs = zip(torch.tensor(found).flatten().tolist(), torch.tensor(expected).flatten().tolist(), strict=True)
    return max(abs(one - other) / max(abs(other), 1e-3) for one, other in pairs)


@pytest.mark.parametrize("name", TRAINERS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_losses_are_those_of_one_process(ran, unsharded, name, world_size):
    losses, averages = unsharded[name]
    for result in ran[world_size]:
        assert close(result[name][0], losses) < 1e-6
        assert close(result[name][1], averages) < 1e-6
    assert len({loss for loss, *_ in losses}) == STEPS


@pytest.mark.parametrize("name", TRAINERS)
def test_resumed_elsewhere_losses_are_those_of_the_run_that_went_on(ran, unsharded, name):
    # Resuming on the same number of ranks is bitwise: `train_and_resume` asserts it on every rank.
    for world_size, others in ((4, (2,)), (1, (2, 4))):
        for result in ran[world_size]:
            for other in others:
                losses, averages, notes = result[name][2][other]
                assert close(losses, unsharded[name][0][2:]) < 1e-6
                assert close(averages, unsharded[name][1]) < 1e-6
                assert notes[0].startswith(f"rng: saved on {other} ranks, loaded on {world_size}")
