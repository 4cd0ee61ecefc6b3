"""ai-toolkit's way: FLUX-shaped blocks by class, a frozen base, and every kind of adapter, trained and resumed."""

from __future__ import annotations

import pytest
import torch
from fsdp2.ranks import run_ranks
from safetensors.torch import load_file, save_file
from seeds import guide
from torch import nn

from ckpt_tools.checkpoint.formats.opening import open_path
from ckpt_tools.fsdp2 import build_device_mesh, find_blocks, shard_model
from ckpt_tools.fsdp2.audit import audit
from ckpt_tools.fsdp2.compare_ranks import compare_ranks
from ckpt_tools.fsdp2.lora import adapter_state, add_lora

pytestmark = pytest.mark.full

WIDTH = 16
_TARGETS = ["qkv", "proj", "linear1", "linear2"]
# Start values that do something: with the default ones the first output is the base model's.
CONFIGS = {
    "lora": {"peft_type": "LORA", "r": 4, "target_modules": _TARGETS, "init_lora_weights": False},
    "dora": {"peft_type": "LORA", "use_dora": True, "r": 4, "target_modules": _TARGETS, "init_lora_weights": False},
    "loha": {"peft_type": "LOHA", "r": 4, "target_modules": _TARGETS, "init_weights": False},
    "lokr": {"peft_type": "LOKR", "r": 4, "target_modules": _TARGETS, "init_weights": False},
    "boft": {"peft_type": "BOFT", "boft_block_size": 4, "target_modules": _TARGETS, "init_weights": False},
    "oft": {"peft_type": "OFT", "r": 0, "oft_block_size": 4, "target_modules": _TARGETS, "init_weights": False},
}
PARTS = {
    "lora": ["lora_A.default.weight", "lora_B.default.weight"],
    "dora": ["lora_A.default.weight", "lora_B.default.weight", "lora_magnitude_vector.default.weight"],
    "loha": ["hada_w1_a.default", "hada_w1_b.default", "hada_w2_a.default", "hada_w2_b.default"],
    "lokr": ["lokr_w1.default", "lokr_w2.default"],
    "boft": ["boft_R.default", "boft_s.default"],
    "oft": ["oft_R.default.weight"],
}
MODULES = [f"double_blocks.{i}.{name}" for i in range(2) for name in ("img_attn.qkv", "img_attn.proj")]
MODULES += [f"double_blocks.{i}.{name}" for i in range(2) for name in ("txt_attn.qkv", "txt_attn.proj")]
MODULES += [f"single_blocks.{i}.{name}" for i in range(2) for name in ("linear1", "linear2")]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)


class DoubleStreamBlock(nn.Module):
    """Image and text keep weights of their own, and attend to each other."""

    def __init__(self):
        super().__init__()
        self.img_attn, self.txt_attn = Attention(), Attention()
        self.img_mod, self.txt_mod = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, img, txt, vec):
        count = txt.shape[1]
        parts = [a.qkv(x * (1 + m(vec))) for a, x, m in self.streams(img, txt)]
        q, k, v = torch.cat(parts, 1).chunk(3, -1)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return img + self.img_attn.proj(mixed[:, count:]), txt + self.txt_attn.proj(mixed[:, :count])

    def streams(self, img, txt):
        return (self.txt_attn, txt, self.txt_mod), (self.img_attn, img, self.img_mod)


class SingleStreamBlock(nn.Module):
    """One sequence; attention and MLP side by side in two linear layers."""

    def __init__(self):
        super().__init__()
        self.linear1 = nn.Linear(WIDTH, 4 * WIDTH)
        self.linear2 = nn.Linear(2 * WIDTH, WIDTH)
        self.modulation = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, vec):
        q, k, v, mlp = self.linear1(x * (1 + self.modulation(vec))).chunk(4, -1)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.linear2(torch.cat([mixed, nn.functional.gelu(mlp)], -1))


class Flux(nn.Module):
    def __init__(self):
        super().__init__()
        self.img_in, self.txt_in, self.time_in = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.double_blocks = nn.ModuleList(DoubleStreamBlock() for _ in range(2))
        self.single_blocks = nn.ModuleList(SingleStreamBlock() for _ in range(2))
        self.final_layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, img, txt, time):
        target = img
        img, txt, vec = self.img_in(img), self.txt_in(txt), self.time_in(time)[:, None]
        for block in self.double_blocks:
            img, txt = block(img, txt, vec)
        x = torch.cat([txt, img], 1)
        for block in self.single_blocks:
            x = block(x, vec)
        return (self.final_layer(x[:, txt.shape[1] :]) - target).square().mean()


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_in, self.conv_out = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.SiLU(), nn.Conv2d(8, 8, 3, padding=1)) for _ in range(2))

    def forward(self, x):
        h = self.conv_in(x)
        for block in self.blocks:
            h = h + block(h)
        return (self.conv_out(h) - x).square().mean()


LOCON = {"peft_type": "LORA", "r": 2, "target_modules": ["conv_in", "blocks.0.1", "blocks.1.1"]}


def batch(step, rank=0):
    draw = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(*shape, generator=draw) for shape in ((2, 6, WIDTH), (2, 3, WIDTH), (2, WIDTH))]


def whole(path):
    """The model on the CPU, with the weights of the base."""
    model = Flux()
    model.load_state_dict(load_file(path))
    return model


def train_and_resume(rank, world_size, directory):
    convolutions = train_convolutions(rank, world_size)
    return train(rank, world_size, directory), resume(rank, world_size, directory), convolutions


def by_the_guide(kind, directory, world_size):
    """The names of the guide's block that builds the model."""
    names = {"Flux": Flux, "DoubleStreamBlock": DoubleStreamBlock, "SingleStreamBlock": SingleStreamBlock}
    names |= {"config": CONFIGS[kind], "path": directory / "flux.safetensors", "checkpoint": directory / kind}
    return guide.run("fsdp2-cookbook", "toolkit-build", names | {"world_size": world_size})


def train(rank, world_size, directory):
    """Every kind: gradients of the first step beside the unsharded model's; two steps; saved after the first."""
    results = {}
    for kind, config in CONFIGS.items():
        names = by_the_guide(kind, directory, world_size)
        model, optimizer = names["model"], names["optimizer"]
        findings = audit(model, phase="loaded", plan=names["plan"], optimizer=optimizer) + compare_ranks(model)
        reference = add_lora(whole(directory / "flux.safetensors"), config, seed=42)
        expected = [reference(*batch(0, each)) for each in range(world_size)]
        (sum(expected) / world_size).backward()
        losses = []
        for step in range(2):
            if step:
                guide.run("fsdp2-cookbook", "toolkit-save", names)
            loss = model(*batch(step, rank))
            loss.backward()
            if not step:
                errors = [
                    ((p.grad.full_tensor() - other.grad).norm() / other.grad.norm()).item()
                    for p, other in zip(model.parameters(), reference.parameters(), strict=True)
                    if p.requires_grad
                ]
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        guide.run("fsdp2-cookbook", "toolkit-export", names)
        own = adapter_state(reference)
        results[kind] = {
            "losses": losses,
            "expected": expected[rank].item(),
            "error": max(errors),
            "num_trained": len(errors),
            "shapes": {name: tuple(tensor.shape) for name, tensor in names["state"].items()},
            "own": {name: tuple(tensor.shape) for name, tensor in own.items()},
            "frozen": all(p.grad is None for p in model.parameters() if not p.requires_grad),
            "findings": [(finding.code, finding.where) for finding in findings],
        }
    return results


def train_convolutions(rank, world_size):
    """The worst relative error of a gradient beside the unsharded model's, with adapters on convolutions."""
    torch.manual_seed(0)
    models = [UNet(), UNet()]
    models[1].load_state_dict(models[0].state_dict())
    sharded, reference = (add_lora(model, LOCON | {"init_lora_weights": False}, seed=1) for model in models)
    shard_model(sharded, build_device_mesh("dp_shard=-1"))
    images = [torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(each)) for each in range(world_size)]
    sharded(images[rank]).backward()
    (sum(map(reference, images)) / world_size).backward()
    pairs = zip(sharded.parameters(), reference.parameters(), strict=True)
    return [((p.grad.full_tensor() - q.grad).norm() / q.grad.norm()).item() for p, q in pairs if p.requires_grad]


def resume(rank, world_size, directory, data_rank=None):
    """Build anew, load base and adapters, and take the second step."""
    losses = {}
    for kind in CONFIGS:
        names = by_the_guide(kind, directory, world_size)
        guide.run("fsdp2-cookbook", "toolkit-resume", names)
        steps = names["optimizer"].state_dict()["state"].values()
        loss = names["model"](*batch(1, rank if data_rank is None else data_rank))
        losses[kind] = (loss.item(), {int(state["step"]) for state in steps})
    return losses


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("flux")
    torch.manual_seed(0)
    save_file(Flux().state_dict(), path / "flux.safetensors")
    return path


@pytest.fixture(scope="module")
def ran(directory):
    return run_ranks(2, train_and_resume, directory, timeout=150)


@pytest.fixture(scope="module")
def trained(ran):
    return [result for result, _, _ in ran]


@pytest.fixture(scope="module")
def resumed(directory, ran):
    return [losses for _, losses, _ in ran], run_ranks(1, resume, directory, 1, timeout=120)


@pytest.mark.parametrize("kind", CONFIGS)
def test_adapter_trains_sharded_as_it_does_unsharded(trained, kind):
    for result in trained:
        found = result[kind]
        assert found["losses"][0] == pytest.approx(found["expected"], rel=1e-6)
        assert found["error"] < 1e-5
        assert found["num_trained"] == len(PARTS[kind]) * len(MODULES)
        assert found["frozen"]
        assert found["findings"] == []


def test_adapter_of_convolutions_trains_sharded_as_it_does_unsharded(ran):
    for _, _, errors in ran:
        assert len(errors) == 6
        assert max(errors) < 1e-5


def test_adapter_on_flux2_of_diffusers_is_built_as_the_guide_says(tmp_path):
    diffusers = pytest.importorskip("diffusers", reason="FLUX.2 as diffusers has it")
    sizes = {"num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2}
    with torch.device("meta"):
        model = diffusers.Flux2Transformer2DModel(**sizes, joint_attention_dim=24, axes_dims_rope=(4, 4, 4, 4))
    model.save_config(tmp_path)
    names = guide.run("fsdp2-cookbook", "toolkit-flux2", {"torch": torch, "path": tmp_path})
    model = add_lora(names["model"], names["config"])
    trained = [name.split(".")[-3] for name, p in model.named_parameters() if p.requires_grad]
    assert set(trained) == {"to_q", "to_k", "to_v", "to_qkv_mlp_proj"}
    blocks = [type(model.get_submodule(name)).__name__ for name in find_blocks(model)]
    assert blocks == ["Flux2TransformerBlock"] * 2 + ["Flux2SingleTransformerBlock"] * 2


@pytest.mark.parametrize("kind", CONFIGS)
def test_adapter_resumes_in_shards_with_the_same_loss(trained, resumed, kind):
    same, single = resumed
    for rank in range(2):
        assert same[rank][kind] == (trained[rank][kind]["losses"][1], {1})
    # On one rank, with the data of the second: bitwise too, for forward sums nothing over ranks.
    assert single[0][kind] == (trained[1][kind]["losses"][1], {1})


@pytest.mark.parametrize("kind", CONFIGS)
def test_adapter_checkpoint_holds_what_an_export_needs_and_nothing_else(trained, directory, kind):
    with open_path(str(directory / kind)) as opened:
        tensors = {entry.fqn: entry.shape for entry in opened.checkpoint.tensors if entry.fqn.startswith("model.")}
    expected = {f"model.base_model.model.{module}.{part}" for module in MODULES for part in PARTS[kind]}
    assert set(tensors) == expected
    exported = trained[0][kind]["shapes"]
    assert exported == trained[0][kind]["own"]
    # peft's own names lack the adapter's; DoRA's magnitude loses its `.weight` too.
    short = {fqn.removeprefix("model.").replace(".default", ""): shape for fqn, shape in tensors.items()}
    short = {fqn.replace("magnitude_vector.weight", "magnitude_vector"): shape for fqn, shape in short.items()}
    assert short == exported
