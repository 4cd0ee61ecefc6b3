"""The pages of docs/guides/trainers, walked from the top: every command of ckpt runs as it stands, on a toy model.

Where a page trains, the test leaves a step in that trainer's layout instead, written by what the trainer calls
(`dcp.save`, `torch.save` of DTensors, DeepSpeed's own files): the trainers themselves run in the other files here.
Preflight stops at the rules and smoke runs are left out (other tests have them); what is pushed goes to a local hub.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import toys
from formats.saved import fake_rank, save_ranks
from hub.conftest import environment, hub, run  # noqa: F401
from hub.local_hub import Hub
from safetensors.torch import load_file, save_file
from seeds.guide import GUIDES
from steps import toy_steps

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]
_BLOCK = re.compile(r"^```(\S+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ELSEWHERE = ("ckpt smoke ", "ckpt estimate ")
"""Commands that other tests walk, on their own guides."""


def weights() -> dict[str, torch.Tensor]:
    """What was trained: other numbers than the hub's."""
    return {name: tensor.detach() for name, tensor in toys.build("llama", seed=5).state_dict().items()}


def moments(names: list[str], tensors: dict[str, torch.Tensor]) -> dict[str, object]:
    """AdamW's state by name."""
    state = {
        name: {"step": torch.tensor(5e2), "exp_avg": tensors[name], "exp_avg_sq": tensors[name] ** 2} for name in names
    }
    return {"state": state, "param_groups": [{"lr": 0.1, "params": names}]}


def leave_trainer_step(step: Path) -> dict[str, torch.Tensor]:
    """As the Trainer with SHARDED_STATE_DICT."""
    state = weights()
    toy_steps.save({"model": state}, step / "pytorch_model_fsdp_0")
    toy_steps.save({"optimizer": moments(list(state), state)}, step / "optimizer_0")
    torch.save({"last_epoch": 500}, step / "scheduler.pt")
    for rank in range(8):
        torch.save({"cpu": torch.get_rng_state()}, step / f"rng_state_{rank}.pth")
    (step / "trainer_state.json").write_text(json.dumps({"global_step": 500}))
    return state


def leave_lightning_step(step: Path) -> dict[str, torch.Tensor]:
    """As `ModelParallelStrategy.save_checkpoint`."""
    state = weights()
    named = {f"model.{name}": tensor for name, tensor in state.items()}
    toy_steps.save({"state_dict": named, "optimizer_0": moments(list(named), named)}, step)
    torch.save({"epoch": 1, "global_step": 500}, step / "meta.pt")
    return state


def leave_titan_step(step: Path) -> dict[str, torch.Tensor]:
    """As torchtitan's checkpointer, of the weights that it started from: the names are the start's."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

    state = _load_state_dict_from_keys(checkpoint_id="start")
    more = {"train_state": {"step": 500}, "lr_scheduler": {"last_epoch": 500}, "dataloader": {"world_size": 8}}
    dcp.save(
        state | {"optimizer": {f"state.{name}.exp_avg": t for name, t in state.items()}} | more, checkpoint_id=step
    )
    return load_file("llama-8b/model.safetensors")


def leave_verl_step(step: Path) -> dict[str, torch.Tensor]:
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


PAGES: dict[str, tuple[str, str, Callable[[Path], dict[str, torch.Tensor] | None]]] = {
    "accelerate": ("accelerate launch", "run/checkpoint-500", leave_trainer_step),
    "torchtitan": ("torchrun", "outputs/checkpoint/step-500", leave_titan_step),
    "lightning": ("torchrun", "run/step=500.ckpt", leave_lightning_step),
    "verl": ("bash", "checkpoints/global_step_100", leave_verl_step),
    "openrlhf": ("bash", "ckpt", leave_deepspeed_step),
    "axolotl": ("axolotl train", "run/checkpoint-500", leave_trainer_step),
    "llama-factory": ("accelerate launch", "saves/sft/checkpoint-500", leave_trainer_step),
    "ai-toolkit": ("torchrun", "output/my_style/my_style_000000500.safetensors", leave_adapter),
}
"""Page → the command that trains, what it leaves, and how the test leaves it."""


def test_every_page_is_walked():
    assert {path.stem for path in (GUIDES / "trainers").glob("*.md")} == set(PAGES)


def _argv(command: str) -> list[str]:
    argv = shlex.split(command)[1:]
    if argv[0] != "preflight":
        return argv
    if "--model" in argv:  # building it takes most of the time
        del argv[argv.index("--model") : argv.index("--model") + 2]
    return [*argv, "--only", "rules"]


@pytest.mark.parametrize("page", PAGES)
def test_page_goes_from_the_hub_and_back(page, tmp_path, monkeypatch, run, hub: Hub):  # noqa: F811
    trains, step, leave = PAGES[page]
    monkeypatch.chdir(tmp_path)
    toys.build("llama").save_pretrained("llama-8b")
    trained = None
    walked = []
    for language, name, text in _BLOCK.findall((GUIDES / "trainers" / f"{page}.md").read_text(encoding="utf-8")):
        if language in ("yaml", "toml", "sh"):
            Path(name).write_text(text)
        for line in text.splitlines() if language == "console" else ():
            command = line.removeprefix("$ ")
            if command.startswith(_ELSEWHERE):
                continue
            if command.startswith("ckpt "):
                code, out, err = run(*_argv(command))
                assert code == 0, (command, out, err)
                walked.append(command.split()[1])
            else:
                assert command.startswith(trains), f"a command that nobody walks: {command}"
                Path(step).parent.mkdir(parents=True, exist_ok=True)
                trained = leave(Path(step))
    assert walked[-1] == "push" or page == "openrlhf"
    if trained is not None:
        back = load_file("out/model.safetensors")
        assert back.keys() == trained.keys()
        assert [name for name, tensor in trained.items() if not torch.equal(back[name], tensor)] == []
