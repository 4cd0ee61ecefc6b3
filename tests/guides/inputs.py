"""What the guides' pages begin with: models, adapters, and steps in the layouts of trainers, each a toy.

Steps are written by what the trainer calls (`dcp.save`, `torch.save` of DTensors, DeepSpeed's own files); the trainers
themselves run in tests/trainers.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import torch
import toys
from adapters import families
from formats.saved import fake_rank, save_ranks
from safetensors.torch import load_file, save_file
from seeds.guide import GUIDES
from steps import toy_steps
from tending import runs

from ckpt_tools import api

Tensors = dict[str, torch.Tensor]


@functools.cache
def weights() -> Tensors:
    """What was trained: other numbers than the hub's."""
    return {name: tensor.detach() for name, tensor in toys.build("llama", seed=5).state_dict().items()}


def moments(names: list[str], tensors: Tensors) -> dict[str, object]:
    """AdamW's state by name."""
    state = {
        name: {"step": torch.tensor(5e2), "exp_avg": tensors[name], "exp_avg_sq": tensors[name] ** 2} for name in names
    }
    return {"state": state, "param_groups": [{"lr": 0.1, "params": names}]}


def leave_trainer_step(step: Path) -> Tensors:
    """As the Trainer with SHARDED_STATE_DICT."""
    state = weights()
    toy_steps.save({"model": state}, step / "pytorch_model_fsdp_0")
    toy_steps.save({"optimizer": moments(list(state), state)}, step / "optimizer_0")
    torch.save({"last_epoch": 500}, step / "scheduler.pt")
    for rank in range(8):
        torch.save({"cpu": torch.get_rng_state()}, step / f"rng_state_{rank}.pth")
    (step / "trainer_state.json").write_text(json.dumps({"global_step": 500}))
    return state


def leave_whole_step(step: Path) -> Tensors:
    """The same with the config of its model, as trainers that know it write it."""
    toys.config_of("llama", architectures=["LlamaForCausalLM"], dtype="float32").save_pretrained(step)
    return leave_trainer_step(step)


def leave_lightning_step(step: Path) -> Tensors:
    """As `ModelParallelStrategy.save_checkpoint`."""
    state = weights()
    named = {f"model.{name}": tensor for name, tensor in state.items()}
    toy_steps.save({"state_dict": named, "optimizer_0": moments(list(named), named)}, step)
    torch.save({"epoch": 1, "global_step": 500}, step / "meta.pt")
    return state


def leave_titan_step(step: Path) -> Tensors:
    """As torchtitan's checkpointer, of the weights that it started from: the names are the start's."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

    state = _load_state_dict_from_keys(checkpoint_id="start")
    more = {"train_state": {"step": 500}, "lr_scheduler": {"last_epoch": 500}, "dataloader": {"world_size": 8}}
    dcp.save(
        state | {"optimizer": {f"state.{name}.exp_avg": t for name, t in state.items()}} | more, checkpoint_id=step
    )
    return load_file("llama-8b/model.safetensors")


def leave_verl_step(step: Path) -> Tensors:
    """As verl's FSDP checkpoint manager on eight ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    state, world = weights(), 8
    save_ranks(step / "actor", state, {"fsdp": world}, lambda _: [Shard(0)])
    for rank in range(world):
        with fake_rank(rank, world):
            mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
            first, second = (
                [distribute_tensor(tensor * factor, mesh, [Shard(0)], src_data_rank=None) for tensor in state.values()]
                for factor in (2, 3)
            )
            found = {
                i: {"step": torch.tensor(3.0), "exp_avg": one, "exp_avg_sq": other}
                for i, (one, other) in enumerate(zip(first, second, strict=True))
            }
            optimizer = {"state": found, "param_groups": [{"lr": 0.1, "params": list(found)}]}
            torch.save(optimizer, step / f"actor/optim_world_size_{world}_rank_{rank}.pt")
        extra = {"lr_scheduler": {"last_epoch": 3}, "rng": {"cpu": torch.get_rng_state()}}
        torch.save(extra, step / f"actor/extra_state_world_size_{world}_rank_{rank}.pt")
    (step / "actor/huggingface").mkdir()
    shutil.copy("llama-8b/config.json", step / "actor/huggingface")
    torch.save({"sampler": 1}, step / "data.pt")
    return state


def leave_deepspeed_step(step: Path) -> None:
    """A save that DeepSpeed itself left, of another toy (tests/formats/deepspeed_ranks.py), which the config tells."""
    with tarfile.open(Path(__file__).parents[1] / "formats" / "deepspeed.tar.xz") as archive:
        archive.extractall("made", filter="data")
    shutil.move("made/zero3-bf16", step)


def leave_openrlhf_step(step: Path) -> None:
    """The same, with the config of the model that it is."""
    leave_deepspeed_step(step)
    Path("llama-8b/config.json").write_text(json.dumps({"model_type": "toy"}))


def leave_adapter(file: Path) -> None:
    """A LoRA of FLUX.2's attention under the names that ai-toolkit writes."""
    from adapters.image_models import flux2

    torch.manual_seed(0)
    model = flux2()
    model.save_pretrained("FLUX.2/transformer")
    Path("FLUX.2/model_index.json").write_text(json.dumps({"_class_name": "Flux2Pipeline"}))
    tensors = {}
    for name, module in model.named_modules():
        if name.endswith((".to_q", ".to_k")):
            tensors[f"transformer.{name}.lora_A.weight"] = torch.randn(4, module.in_features)
            tensors[f"transformer.{name}.lora_B.weight"] = torch.randn(module.out_features, 4)
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, file, metadata={"format": "pt"})


@functools.cache
def _llama() -> Tensors:
    return {name: tensor.detach() for name, tensor in toys.build("llama").state_dict().items()}


def leave_llama(directory: Path) -> None:
    """A model of transformers."""
    directory.mkdir(parents=True)
    save_file(_llama(), directory / "model.safetensors", metadata={"format": "pt"})
    config = toys.config_of("llama", architectures=["LlamaForCausalLM"], dtype="float32")
    config.save_pretrained(directory)


def leave_7b(directory: Path) -> None:
    """The config.json of a Llama 2 7B, without weights."""
    sizes = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config | sizes))


def leave_dcp_step(step: Path) -> None:
    """A step of a loop of one's own: the number in its name says how far training has come."""
    far = int(step.name.rpartition("-")[2])
    draw = torch.Generator().manual_seed(far)
    toy_steps.save({n: t + far * 1e-6 * torch.randn(t.shape, generator=draw) for n, t in _llama().items()}, step)


def leave_experts_step(step: Path) -> None:
    """Four experts by torchtitan's names, and a norm."""
    toy_steps.save({"layers.0.moe.inner_experts.w1": torch.randn(4, 16, 8), "norm.weight": torch.randn(16)}, step)


def leave_torch_file(file: Path) -> None:
    """As Lightning without FSDP: `torch.save` of everything."""
    torch.save({"epoch": 1, "state_dict": weights(), "optimizer_states": [{"state": {}, "param_groups": []}]}, file)


def leave_bin_directory(directory: Path) -> None:
    """As transformers 4 wrote them."""
    leave_llama(directory)
    (directory / "model.safetensors").unlink()
    torch.save(weights(), directory / "pytorch_model.bin")


def _factors(seed: int, suffix: str) -> Tensors:
    draw = torch.Generator().manual_seed(seed)
    found = {}
    for name, weight in _llama().items():
        if name.endswith(("q_proj.weight", "v_proj.weight")):
            at = f"base_model.model.{name.removesuffix('.weight')}"
            found[f"{at}.lora_A.{suffix}"] = torch.randn(4, weight.shape[1], generator=draw)
            found[f"{at}.lora_B.{suffix}"] = torch.randn(weight.shape[0], 4, generator=draw)
    return found


def leave_lora_step(step: Path) -> None:
    """As an FSDP2 loop with PEFT's model in it, trainable tensors alone."""
    toy_steps.save({"model": _factors(0, "default.weight")}, step)


def leave_lora(directory: Path) -> None:
    """As PEFT writes it."""
    directory.mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "org/base"}))
    save_file(_factors(len(directory.name), "weight"), directory / "adapter_model.safetensors")


def leave_samples(directory: Path) -> None:
    """A picture with its prompt."""
    from PIL import Image

    directory.mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(directory / "one.png")
    (directory / "one.txt").write_text("p3r5on at the sea")


def lora_outputs() -> torch.Tensor:
    """What the model computes with the LoRA of `leave_lora_step`, whose alpha the page says."""
    model, factors = toys.build("llama"), _factors(0, "weight")
    with torch.no_grad():
        for name in [name for name in factors if ".lora_A." in name]:
            path = name.removeprefix("base_model.model.").partition(".lora_A")[0]
            model.get_submodule(path).weight += 32 / 4 * factors[name.replace("_A", "_B")] @ factors[name]
    return families.outputs(model, "llama")


def image_outputs(file: Path) -> torch.Tensor:
    """What the toy of `leave_adapter` computes with it."""
    from adapters.image_models import flux2, flux2_inputs

    torch.manual_seed(0)
    model, factors = flux2(), load_file(file)
    with torch.no_grad():
        for name in [name for name in factors if ".lora_A." in name]:
            path = name.removeprefix("transformer.").partition(".lora_A")[0]
            model.get_submodule(path).weight += factors[name.replace("_A", "_B")] @ factors[name]
        torch.manual_seed(1)
        return model(**flux2_inputs(), return_dict=False)[0]


def leave_run(directory: Path) -> None:
    """Three steps of a run that nobody has looked at."""
    template = runs.make_template(directory.parent)
    for step in (100, 200, 300):
        runs.save_step(directory, step, template=template)
    shutil.rmtree(template)


def leave_shard(model: str, directory: Path, mesh: str) -> None:
    """A model for a mesh."""
    api.shard(model, directory, mesh=mesh)


def leave_file(page: str, name: str) -> None:
    """A file that another page shows."""
    text = (GUIDES / f"{page}.md").read_text(encoding="utf-8")
    Path(name).write_text(re.findall(rf"^```\w+ {re.escape(name)}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[0])


def leave_deepspeed_config(file: Path) -> None:
    """ZeRO-3 with what the Trainer fills in."""
    auto = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    file.write_text(json.dumps(dict.fromkeys(auto, "auto") | {"zero_optimization": {"stage": 3}}))


def leave_script(file: Path) -> None:
    """A launch script that passes its arguments on."""
    file.write_text('accelerate launch --config_file accelerate.yaml -m trl sft --config sft.yaml "$@"\n')


KINDS: dict[str, Callable[[Path], Tensors | None]] = {
    "llama": leave_llama,
    "wide": lambda path: toys.save("llama", path, hidden_size=128, intermediate_size=256) and None,
    "llama3": lambda path: toys.save("llama", path, num_hidden_layers=3) and None,
    "7b": leave_7b,
    "dcp": leave_dcp_step,
    "experts": leave_experts_step,
    "torch-file": leave_torch_file,
    "bin": leave_bin_directory,
    "trainer": leave_trainer_step,
    "whole-trainer": leave_whole_step,
    "lightning": leave_lightning_step,
    "torchtitan": leave_titan_step,
    "verl": leave_verl_step,
    "deepspeed": leave_deepspeed_step,
    "openrlhf": leave_openrlhf_step,
    "flux2-lora": leave_adapter,
    "lora-step": leave_lora_step,
    "lora": leave_lora,
    "samples": leave_samples,
    "run": leave_run,
    "deepspeed-config": leave_deepspeed_config,
    "script": leave_script,
}
"""What a page may ask for → how it is made; returns what was trained, if a page has to give it back."""

OF_OTHERS: dict[str, Callable[..., None]] = {"shard": leave_shard, "file": leave_file}
"""The same, made of what is there already: words between colons."""
