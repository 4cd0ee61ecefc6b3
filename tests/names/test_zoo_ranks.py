"""Architectures on two ranks: sharded by ckpt, loaded by stock PyTorch into `fully_shard`, trained, back on the hub."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from fsdp2.ranks import run_ranks
from names import zoo
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict
from torch.distributed.fsdp import fully_shard

from ckpt_tools.cli import main

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]
_SLICES = 8
_FEWEST = 24
"""Architectures of a slice that train and return; 243 of all in transformers 5.23 (`bin/test --zoo` walks them)."""
_OF = 9
"""Without --zoo, one architecture of so many."""
_TOLERANCE = 1e-4
_NOT_OURS = {
    "FunnelForMaskedLM": "lists of blocks in lists, which fully_shard does not take",
    "MobileBertForMaskedLM": "a parameter that FSDP2 cannot reduce",
    "ReformerForMaskedLM": "trains in train mode alone",
    "SqueezeBertForMaskedLM": "convolutions that mix DTensors and tensors",
}
"""What PyTorch or the test does not do with them."""


def inputs_of(model) -> dict[str, torch.Tensor]:
    """What most models take: tokens, tokens of a decoder, or an image."""
    if model.main_input_name == "pixel_values":
        size = getattr(model.config, "image_size", 32)
        return {"pixel_values": torch.linspace(-1, 1, 3 * size * size).reshape(1, 3, size, size)}
    tokens = torch.arange(3, 19).reshape(2, 8)
    decoder = {"decoder_input_ids": tokens} if getattr(model.config, "is_encoder_decoder", False) else {}
    return {"input_ids": tokens, **decoder}


def logits_of(model) -> torch.Tensor:
    return model(**inputs_of(model)).logits.float()


def units_of(model) -> list[torch.nn.Module]:
    """The outermost elements of module lists: the blocks."""
    lists = [path for path, module in model.named_modules() if isinstance(module, torch.nn.ModuleList)]
    outer = [path for path in lists if not any(path.startswith(f"{other}.") for other in lists)]
    return [child for path in outer for child in model.get_submodule(path)]


def from_hub(name: str, config: dict, directory: Path):
    """The model that transformers loads, and what it had to say of the names."""
    model, info = getattr(transformers, name).from_pretrained(directory, output_loading_info=True)
    return model.eval(), sorted(what for what, found in info.items() if found)


def walk(name: str, config: dict, directory: Path, rank: int) -> str:
    hub, sharded = directory / "hub", directory / "dcp"
    if rank == 0:
        torch.manual_seed(0)
        zoo.build(name, config, "cpu").save_pretrained(hub)
        assert main(["shard", str(hub), str(sharded), "--mesh", "dp_shard=2", "-q"]) == 0
    dist.barrier()
    reference, _ = from_hub(name, config, hub)
    torch.manual_seed(1)
    live = zoo.build(name, config, "cpu").eval()
    for unit in units_of(live):
        fully_shard(unit)
    fully_shard(live)
    state = live.state_dict()
    dcp.load(state, checkpoint_id=sharded)
    live.load_state_dict(state)
    with torch.no_grad():
        if not torch.allclose(logits_of(live), logits_of(reference), atol=_TOLERANCE, rtol=_TOLERANCE):
            return "other logits"
    live.reshard()
    optimizer = torch.optim.AdamW(live.parameters(), lr=1e-2)
    for _ in range(2):
        logits_of(live).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        trained = logits_of(live)
    live.reshard()  # the root stays gathered after forward, and its parameters are not the optimizer's then
    dcp.save(get_model_state_dict(live), checkpoint_id=directory / "flat")
    model_state, optimizer_state = get_state_dict(live, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=directory / "step")
    what = ""
    for saved in ("flat", "step") if rank == 0 else ():
        out = directory / f"{saved}-hf"
        assert main(["gather", str(directory / saved), str(out), "--assets", str(hub), "-q"]) == 0
        again, wrong = from_hub(name, config, out)
        with torch.no_grad():
            if wrong or not torch.allclose(logits_of(again), trained, atol=_TOLERANCE, rtol=_TOLERANCE):
                what = f"trained: {wrong or 'other logits'}"
    return what


def walk_all(rank: int, world_size: int, names: list[str], directory: Path) -> dict[str, str]:
    transformers.utils.logging.set_verbosity(logging.CRITICAL)
    found = {}
    for name in names:
        if name in _NOT_OURS:
            continue
        config = zoo.small_config(name)
        if config is None:
            continue
        try:
            with torch.no_grad():
                logits_of(zoo.build(name, config, "cpu").eval())
        except Exception:  # it takes something else
            found[name] = "not fed"
            continue
        own = directory / name
        own.mkdir(exist_ok=True)
        dist.barrier()
        try:
            found[name] = walk(name, config, own, rank)
        except dcp.api.CheckpointException:  # no Exception; `test_zoo` holds that the names were said to be the file's
            found[name] = "not loaded"
        except Exception as error:  # said beside the name
            found[name] = f"{type(error).__name__}: {str(error)[-160:]}"
        dist.barrier()
        if rank == 0:
            shutil.rmtree(own)
        dist.barrier()
    return found


@pytest.mark.parametrize("at", range(_SLICES))
def test_architectures_train_on_two_ranks_and_return_to_the_hub(
    at: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    is_whole = request.config.getoption("--zoo")
    found, _ = run_ranks(2, walk_all, zoo.part(at, _SLICES, whole=is_whole, of=_OF), tmp_path, timeout=900)
    assert {name: what for name, what in found.items() if what not in ("", "not fed", "not loaded")} == {}
    assert sum(not what for what in found.values()) >= (_FEWEST if is_whole else _FEWEST // _OF - 1)
