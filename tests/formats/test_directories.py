"""Directories as other tools leave them: what the real loader loads, and what ckpt does.

0 wrong models with exit 0, 0 healthy ones refused. transformers judges here; what other loaders do was tried with the
release that a row names. `python tests/formats/test_directories.py` writes the table in the docs.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ckpt_tools.checkpoint.formats.repositories import find_models
from ckpt_tools.cli import main
from ckpt_tools.hub.check import check_directory
from ckpt_tools.storage.source import LocalSource

PAGE = Path(__file__).resolve().parents[2] / "docs" / "concepts" / "layouts.md"
TEXT = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32}
State = dict[str, torch.Tensor]
Which = Literal["new", "old", "nothing"]


class Models:
    """Two models of one architecture: what a run has saved last, and what lay there before."""

    def __init__(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        self.config = LlamaConfig(**TEXT, architectures=["LlamaForCausalLM"])
        self.new, self.old = (self._state(LlamaForCausalLM, seed) for seed in range(2))

    def _state(self, kind: type, seed: int) -> State:
        torch.manual_seed(seed)
        return {name: tensor.detach().clone() for name, tensor in kind(self.config).state_dict().items()}


@dataclass(frozen=True)
class Row:
    """A directory, what its loader makes of it, and what ckpt does."""

    maker: str
    holds: str
    make: Callable[[Path, Models], object]
    loader: str
    loads: Which
    word: str = ""
    """In ckpt's refusal; "" where it takes what the loader loads."""
    picks: int = 0
    """Ways that the refusal names, each of which leads to a whole model."""


def put(path: Path, state: State, dtype: torch.dtype | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    state = state if dtype is None else {name: tensor.to(dtype) for name, tensor in state.items()}
    if path.suffix == ".safetensors":
        save_file(state, path, metadata={"format": "pt"})
    else:
        torch.save(state, path)


def put_sharded(path: Path, state: State, stem: str = "model", end: str = ".safetensors", count: int = 2) -> None:
    names = list(state)
    files = {f"{stem}-{i + 1:05d}-of-{count:05d}{end}": names[i::count] for i in range(count)}
    for name, own in files.items():
        put(path / name, {fqn: state[fqn] for fqn in own})
    weight_map = {fqn: name for name, own in files.items() for fqn in own}
    text = json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
    (path / f"{stem}{end}.index.json").write_text(text)


def put_dcp(path: Path, state: dict[str, object]) -> None:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=path)


def put_deepspeed(path: Path, state: State, step: int = 5) -> None:
    names = {"buffer_names": [], "dp_world_size": 1, "mp_world_size": 1, "global_steps": step}
    (path / f"global_step{step}").mkdir(parents=True)
    live = {name: tensor.bfloat16() for name, tensor in state.items()}
    torch.save({"module": live, **names}, path / f"global_step{step}" / "mp_rank_00_model_states.pt")
    (path / "latest").write_text(f"global_step{step}")


def put_hf_writer(path: Path, state: State) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageWriter

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(state), storage_writer=HuggingFaceStorageWriter(str(path), save_distributed=True))


def put_pipeline(path: Path) -> None:
    from diffusers import AutoencoderKL, DDIMPipeline, DDIMScheduler, UNet2DModel

    torch.manual_seed(0)
    blocks = {"block_out_channels": (8, 16), "norm_num_groups": 4}
    down, up = ("DownBlock2D", "DownBlock2D"), ("UpBlock2D", "UpBlock2D")
    unet = UNet2DModel(sample_size=8, layers_per_block=1, down_block_types=down, up_block_types=up, **blocks)
    DDIMPipeline(unet, DDIMScheduler()).save_pretrained(path)
    AutoencoderKL(
        **blocks, down_block_types=["DownEncoderBlock2D"] * 2, up_block_types=["UpDecoderBlock2D"] * 2
    ).save_pretrained(path / "vae")
    index = json.loads((path / "model_index.json").read_text())
    (path / "model_index.json").write_text(json.dumps(index | {"vae": ["diffusers", "AutoencoderKL"]}))


def put_sentences(path: Path, models: Models) -> None:
    """As sentence-transformers 6.2 saves a Transformer, a Pooling and a Dense."""
    put(path / "model.safetensors", models.new)
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense", "3_Normalize": "Normalize"}
    modules = [
        {"idx": i, "name": str(i), "path": at, "type": f"sentence_transformers.models.{kind}"}
        for i, (at, kind) in enumerate(kinds.items())
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    for directory in ("1_Pooling", "2_Dense"):
        (path / directory).mkdir()
        (path / directory / "config.json").write_text(json.dumps({"in_features": 16, "out_features": 4}))
    put(path / "2_Dense/model.safetensors", {"linear.weight": torch.ones(4, 16), "linear.bias": torch.ones(4)})


def put_cache(path: Path, models: Models) -> None:
    """As huggingface_hub keeps a repository."""
    snapshot = path / "snapshots" / "0123abc"
    for directory in (snapshot, path / "blobs", path / "refs"):
        directory.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        source = path / name
        if name == "model.safetensors":
            put(source, models.new)
        source.rename(path / "blobs" / name[:2])
        (snapshot / name).symlink_to(f"../../blobs/{name[:2]}")
    (path / "refs" / "main").write_text("0123abc")


CODEC = {"encoder.conv_in.weight": torch.ones(4, 3, 3, 3), "decoder.conv_in.bias": torch.full((5,), 0.1)}
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
ST, TORCH, HF = "model.safetensors", "pytorch_model.bin", "transformers 5.23"


def both(*steps: Callable[[Path, Models], object]) -> Callable[[Path, Models], object]:
    return lambda path, models: [step(path, models) for step in steps]


def one(name: str, which: str = "new", dtype: torch.dtype | None = None) -> Callable[[Path, Models], object]:
    return lambda path, models: put(path / name, getattr(models, which), dtype)


def several(which: str = "new", **more: object) -> Callable[[Path, Models], object]:
    return lambda path, models: put_sharded(path, getattr(models, which), **more)  # type: ignore[arg-type]


def raw(name: str, content: bytes = b"x") -> Callable[[Path, Models], object]:
    def write(path: Path, _: Models) -> None:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)

    return write


def without(*names: str) -> Callable[[Path, Models], object]:
    return lambda path, _: [each.unlink() for name in names for each in path.glob(name)]


def halves(first: str, second: str) -> Callable[[Path, Models], object]:
    """Two files with half of the tensors each, and no word of the other."""
    cut = 10

    def write(path: Path, models: Models) -> None:
        items = list(models.new.items())
        put(path / first, dict(items[:cut]))
        put(path / second, dict(items[cut:]))

    return write


def step(which: str) -> Callable[[Path, Models], object]:
    return lambda path, models: put_dcp(path / "pytorch_model_fsdp_0", {"model": getattr(models, which)})


def deepspeed(which: str) -> Callable[[Path, Models], object]:
    return lambda path, models: put_deepspeed(path, getattr(models, which))


def hollow(path: Path, models: Models) -> None:
    put(path / ST, {name: torch.empty(0) for name in models.new})


def pipeline(path: Path, _: Models) -> None:
    (path / "config.json").unlink()
    put_pipeline(path)


def cache(path: Path, models: Models) -> None:
    put_cache(path, models)


def sharded_below(which: str) -> Callable[[Path, Models], object]:
    return lambda path, models: put_hf_writer(path / "sharded", getattr(models, which))


SHARDS = "model-*-of-*.safetensors"
# fmt: off
ROWS = {
    "single": Row("save_pretrained", f"`{ST}`", one(ST), HF, "new"),
    "sharded": Row("save_pretrained", "shards and index", several(), HF, "new"),
    "single-over-shards": Row("save_pretrained in 4.x over shards", f"`{ST}`; older shards, index",
        both(several("old"), one(ST)), HF, "new", "model.safetensors.index.json", 2),
    "single-and-shards": Row("converters", f"`{ST}`, the same in shards", both(several(), one(ST)), HF, "new"),
    "stale-index": Row("save_pretrained in 5.x over shards", f"`{ST}`; an index without its files",
        both(several("old"), without(SHARDS), one(ST)), HF, "new"),
    "missing-shard": Row("a download that was cut", "index, first shard", both(several(), without("model-00002*")), HF,
        "nothing", "missing"),
    "incomplete": Row("a download that goes on", "index, first shard, `.incomplete`",
        both(several(), without("model-00002*"), raw("model-00002-of-00002.safetensors.incomplete")), HF, "nothing",
        "missing"),
    "no-index": Row("a copy by hand", "all shards, no index", both(several(), without("*.index.json")), HF, "nothing",
        "index"),
    "one-shard": Row("a copy by hand", "second shard alone", both(several(), without("*.index.json", "model-00001*")),
        HF, "nothing", "1 of 2 files"),
    "two-saves": Row("save_pretrained in 4.x over shards", "2 shards, index; an older save's 3 shards",
        both(several("old", count=3), several()), HF, "new"),
    "two-saves-no-index": Row("a copy by hand", "2 shards and 3 older ones, no index",
        both(several("old", count=3), several(), without("*.index.json")), HF, "nothing", "index"),
    "bin": Row("save_pretrained in 4.x", f"`{TORCH}`", one(TORCH), HF, "new"),
    "bin-sharded": Row("save_pretrained in 4.x", "`.bin` shards and index", several(stem="pytorch_model", end=".bin"),
        HF, "new"),
    "bin-over-bin": Row("save_pretrained in 4.x over shards", f"`{TORCH}`; older `.bin` shards",
        both(several("old", stem="pytorch_model", end=".bin"), one(TORCH)), HF, "new", "pytorch_model.bin.index.json",
        2),
    "both-formats": Row("the Hub's converter", f"`{ST}`, the same as `{TORCH}`", both(one(ST), one(TORCH)), HF, "new"),
    "both-dtypes": Row("converters", f"`{ST}` in bf16, `{TORCH}` in f32",
        both(one(ST, dtype=torch.bfloat16), one(TORCH)), HF, "new"),
    "older-bin": Row("save_pretrained over 4.x", f"`{ST}`; an older `{TORCH}`", both(one(ST), one(TORCH, "old")), HF,
        "new", TORCH, 2),
    "variant": Row("save_pretrained(variant=)", f"`{ST}`, `model.fp16.safetensors`",
        both(one(ST), one("model.fp16.safetensors", dtype=torch.float16)), HF, "new"),
    "mistral": Row("Mistral AI", "shards, index, `consolidated.safetensors`",
        both(several(), one("consolidated.safetensors", "old")), HF, "new"),
    "meta-beside": Row("Meta", f"`{ST}`, `original/consolidated.00.pth`",
        both(one(ST), one("original/consolidated.00.pth", "old")), HF, "new"),
    "gguf-beside": Row("llama.cpp", f"`{ST}`, `model-q4.gguf`", both(one(ST), raw("model-q4.gguf", b"GGUF")), HF,
        "new"),
    "gguf": Row("llama.cpp", "`model-q4.gguf`", raw("model-q4.gguf", b"GGUF"), HF, "nothing", "GGUF"),
    "lfs": Row("git clone without LFS", f"`{ST}`, a pointer", raw(ST, POINTER), HF, "nothing", "LFS"),
    "lfs-beside": Row("git lfs pull -I", f"`{ST}`; `{TORCH}`, a pointer", both(one(ST), raw(TORCH, POINTER)), HF,
        "new"),
    "deepspeed-bin": Row("zero_to_fp32", f"a live DeepSpeed save, `{TORCH}` of it", both(deepspeed("new"), one(TORCH)),
        HF, "new"),
    "deepspeed-stale-bin": Row("zero_to_fp32, earlier", f"a live DeepSpeed save, an older `{TORCH}`",
        both(deepspeed("new"), one(TORCH, "old")), HF, "old", "deepspeed", 2),
    "deepspeed-stale": Row("zero_to_fp32, earlier", f"a live DeepSpeed save, an older `{ST}`",
        both(deepspeed("new"), one(ST, "old")), HF, "old", "deepspeed", 2),
    "deepspeed-trainer": Row("Trainer with DeepSpeed", f"`{ST}` in bf16, `global_step5/`",
        both(deepspeed("new"), one(ST, dtype=torch.bfloat16)), HF, "new"),
    "deepspeed-hollow": Row("Trainer with ZeRO-3, not gathered", f"`{ST}` of shapes [0], `global_step5/`",
        both(deepspeed("new"), hollow), HF, "nothing", "deepspeed", 1),
    "fsdp-step": Row("accelerate merge-weights", f"`pytorch_model_fsdp_0/`, `{ST}` of it", both(step("new"), one(ST)),
        HF, "new"),
    "fsdp-step-stale": Row("accelerate merge-weights, earlier", f"`pytorch_model_fsdp_0/`, an older `{ST}`",
        both(step("new"), one(ST, "old")), HF, "old", ST, 2),
    "fsdp-full": Row("Trainer with FULL_STATE_DICT", f"`{ST}`, `pytorch_model_fsdp.bin`",
        both(one(ST), one("pytorch_model_fsdp.bin")), HF, "new"),
    "dcp-stale": Row("a run into the directory of a model", f"`.metadata`, `*.distcp`, an older `{ST}`",
        both(lambda p, m: put_dcp(p, m.new), one(ST, "old")), HF, "old", ST, 2),
    "consolidated": Row("torch HuggingFaceStorageWriter", f"`sharded/`, `{ST}` of it",
        both(sharded_below("new"), one(ST)), HF, "new"),
    "consolidated-stale": Row("torch HuggingFaceStorageWriter, cut", f"`sharded/`, an older `{ST}`",
        both(sharded_below("new"), one(ST, "old")), HF, "old", "sharded", 2),
    "run": Row("Trainer", f"`{ST}`, steps in `checkpoint-N/`",
        both(one(ST), one("checkpoint-5/model.safetensors", "old")), HF, "new"),
    "cache": Row("huggingface_hub", "`refs/main`, `snapshots/`, `blobs/`", cache, HF, "new"),
    "timm": Row("timm", f"`{ST}`, `{TORCH}`, its own config.json",
        both(one(ST), one(TORCH), raw('config.json', b'{"architecture": "resnet18"}')), "timm 1.0.31", "new"),
    "open_clip": Row("open_clip", "`open_clip_model.safetensors`, `open_clip_pytorch_model.bin`",
        both(one("open_clip_model.safetensors"), one("open_clip_pytorch_model.bin"), raw("open_clip_config.json")),
        "open_clip 3.3", "new"),
    "meta": Row("Meta", "`consolidated.00.pth`, `consolidated.01.pth`",
        halves("consolidated.00.pth", "consolidated.01.pth"), "Meta's llama", "new", "tensor-parallel part"),
    "megatron": Row("Megatron-LM before torch_dist", "`mp_rank_00/`, `mp_rank_01/`",
        halves("mp_rank_00/model_optim_rng.pt", "mp_rank_01/model_optim_rng.pt"), "Megatron-LM", "new", "Megatron"),
    "nemo": Row("NeMo 1", "`tp_rank_00_pp_rank_000/`, …",
        halves("tp_rank_00_pp_rank_000/model_weights.ckpt", "tp_rank_00_pp_rank_001/model_weights.ckpt"), "NeMo 1",
        "new", "NeMo"),
    "torchtune": Row("torchtune", "`hf_model_0001_0.pt`, `hf_model_0002_0.pt`",
        halves("hf_model_0001_0.pt", "hf_model_0002_0.pt"), "torchtune", "new", "torchtune"),
    "composer": Row("Composer", "`ep0-ba9-rank0.pt`, `ep0-ba9-rank1.pt`",
        halves("ep0-ba9-rank0.pt", "ep0-ba9-rank1.pt"), "Composer", "new", "rank's part"),
    "fairscale": Row("fairscale", "`checkpoint-shard0.pt`, `checkpoint-shard1.pt`",
        halves("checkpoint-shard0.pt", "checkpoint-shard1.pt"), "fairscale", "new", "fairscale"),
    "bagel": Row("BAGEL", "`ema.safetensors`, `model.bf16.safetensors` of the same names",
        both(one("ema.safetensors"), one("model.bf16.safetensors", "old")), "BAGEL", "new", "2 safetensors files"),
    "ltx": Row("Lightricks", "`ltx-video-2b.safetensors`, `ltx-video-2b-distilled.safetensors`",
        both(one("ltx-video-2b.safetensors"), one("ltx-video-2b-distilled.safetensors", "old")), "ComfyUI", "new",
        "2 safetensors files"),
}
REPOSITORIES = {
    "bagel": Row("BAGEL", "`ema.safetensors`, `ae.safetensors`, `config.json`, `llm_config.json`",
        both(one("ema.safetensors"), lambda p, _: put(p / "ae.safetensors", CODEC), raw("llm_config.json", b"{}")),
        "BAGEL", "new"),
    "diffusers": Row("diffusers", "`model_index.json`, `unet/`, `vae/`, `scheduler/`", pipeline, "diffusers 0.42",
        "new"),
    "diffusers-cut": Row("a download that was cut", "a pipeline without `vae/*.safetensors`",
        both(pipeline, without("vae/*.safetensors")), "diffusers 0.42", "nothing", "vae"),
    "sentences": Row("sentence-transformers", f"`modules.json`, `{ST}`, `2_Dense/`", put_sentences,
        "sentence-transformers 6.2", "new"),
    "sentences-cut": Row("a download that was cut", "`2_Dense/` without its weights",
        both(put_sentences, without("2_Dense/*.safetensors"), one("4_Dense/model.safetensors")),
        "sentence-transformers 6.2", "nothing", ""),
}
# fmt: on


@pytest.fixture(scope="module")
def models() -> Models:
    return Models()


def made(row: Row, path: Path, models: Models) -> Path:
    path.mkdir()
    (path / "config.json").write_text(models.config.to_json_string())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        row.make(path, models)
    return path


def loaded(path: Path, models: Models) -> Which:
    """What transformers makes of a directory."""
    from transformers import LlamaForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model, info = LlamaForCausalLM.from_pretrained(path, output_loading_info=True)
        except (OSError, RuntimeError, ValueError, SafetensorError):
            return "nothing"
    if info["missing_keys"]:
        return "nothing"
    return next((which for which in ("new", "old") if is_state(model.state_dict(), getattr(models, which))), "nothing")


def is_state(found: State, wanted: State) -> bool:
    """Are these the weights, as they are or rounded?"""
    if found.keys() != wanted.keys():
        return False
    return all(
        any(torch.equal(tensor.float(), wanted[name].to(dtype).float()) for dtype in (tensor.dtype, torch.bfloat16))
        for name, tensor in found.items()
    )


def gathered(source: str, out: Path, *more: str) -> tuple[int, State]:
    code = main(["gather", source, str(out), *more])
    if code:
        return code, {}
    return 0, {name: tensor for file in sorted(out.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.mark.full(but=["single-over-shards", "stale-index", "older-bin", "deepspeed-stale", "fsdp-step-stale", "cache"])
@pytest.mark.parametrize("name", ROWS)
def test_directory_is_taken_as_its_loader_takes_it_or_refused(
    name: str, models: Models, tmp_path: Path, capsys
) -> None:
    row = ROWS[name]
    source = made(row, tmp_path / "source", models)
    if row.loader == HF and name != "cache":
        assert loaded(source, models) == row.loads
    shown = main(["inspect", str(source)])
    checked = main(["verify", str(source), "--for", "weights"])
    capsys.readouterr()
    code, state = gathered(str(source), tmp_path / "out")
    told = capsys.readouterr().err
    if not row.word:
        assert (shown, checked, code) == (0, 0, 0), told
        assert is_state(state, getattr(models, row.loads))
        assert "remove it" not in told
        return
    assert code == 4
    assert row.word in told
    assert checked in (3, 4)
    if row.picks:  # a looking command shows both, and each way leads to a whole model
        assert (shown, checked) == (0, 3)
        hint = re.sub(r"\s*\n\s*", " ", told[told.index("hint:") :]).partition(": choose one: ")[2]
        ways = [shlex.split(way) for way in hint.strip().split(" or ")]
        found = []
        for number, way in enumerate(ways):
            command = [str(source), *way] if way[0].startswith("--") else way
            code, state = gathered(command[0], tmp_path / f"picked-{number}", *command[1:])
            found += [which for which in ("new", "old") if code == 0 and is_state(state, getattr(models, which))]
        assert len(set(found)) == row.picks, (ways, found)


@pytest.mark.full(but=["sentences", "diffusers-cut"])
@pytest.mark.parametrize("name", REPOSITORIES)
def test_repository_goes_there_and_back_whole_or_is_refused(name: str, models: Models, tmp_path: Path, capsys) -> None:
    row = REPOSITORIES[name]
    source, cut, back = made(row, tmp_path / "source", models), tmp_path / "cut", tmp_path / "back"
    code = main(["shard", str(source), str(cut), "--mesh", "dp_shard=2"])
    if row.loads == "nothing":
        assert code == 4
        assert row.word in capsys.readouterr().err
        assert main(["verify", str(source)]) == 3
        return
    assert code == 0
    assert main(["verify", str(cut), "--against", str(source)]) == 0
    assert main(["diff", str(source), str(cut)]) == 0
    assert main(["stats", str(source), "--against", str(cut)]) == 0
    assert main(["reshard", str(cut), str(tmp_path / "four"), "--mesh", "dp_shard=4"]) == 0
    assert main(["gather", str(tmp_path / "four"), str(back)]) == 0
    files = {file.relative_to(source) for file in source.rglob("*") if file.is_file()}
    assert {
        file.relative_to(back) for file in back.rglob("*") if file.name != "ckpt_manifest.json" and file.is_file()
    } == files
    assert all((back / file).read_bytes() == (source / file).read_bytes() for file in files)
    one = {"diffusers": "vae", "sentences": "2_Dense", "bagel": "ae"}[name]
    assert main(["gather", str(cut), str(tmp_path / "one"), "--component", one]) == 0
    assert main(["diff", str(tmp_path / "one"), f"{source / one}{'.safetensors' * (name == 'bagel')}"]) == 0
    weights = next((cut / one).glob("__0_*.distcp"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    assert main(["verify", str(cut)]) == 3
    assert main(["diff", str(source), str(cut)]) != 0
    capsys.readouterr()
    shutil.rmtree(cut / one)
    assert main(["gather", str(cut), str(tmp_path / "less")]) == 4
    assert one in capsys.readouterr().err


WEIGHTS = {f"model.layers.{i}.{part}_proj.weight": torch.ones(8, 8 * i) for i in (1, 2) for part in "qkv"}
KIN = {
    "variant": WEIGHTS | CODEC,
    "average": {f"ema_model.{name}": tensor for name, tensor in WEIGHTS.items()},
    "other half": {name.replace("layers.", "layers.1"): tensor for name, tensor in WEIGHTS.items()},
    "one name in both": {"encoder.conv_in.weight": torch.ones(3), "head.bias": torch.ones(2)},
    "nothing": {},
}


@pytest.mark.parametrize("kin", KIN)
def test_files_of_one_model_are_no_components(kin: str, tmp_path: Path) -> None:
    put(tmp_path / "a.safetensors", WEIGHTS)
    put(tmp_path / "b.safetensors", CODEC)
    with LocalSource(str(tmp_path)) as source:
        assert find_models(source, source.list_files()) == ["a.safetensors", "b.safetensors"]
        assert find_models(source, {**source.list_files(), ".gitattributes": 1, "vae/ae.safetensors": 9}) != []
        for name in ("optimizer.safetensors", "b-00001-of-00002.safetensors", "a", "b.safetensors.index.json", TORCH):
            assert find_models(source, {**source.list_files(), name: 1}) == []
    put(tmp_path / "c.safetensors", KIN[kin])
    with LocalSource(str(tmp_path)) as source:
        assert find_models(source, source.list_files()) == []
    assert main(["shard", str(tmp_path), str(tmp_path / "out"), "--mesh", "dp_shard=2"]) == 4


@pytest.mark.parametrize(
    "cut", [lambda name: "lm_head" in name or name == "model.norm.weight", lambda name: "mlp" in name]
)
def test_pieces_without_an_index_are_no_models_and_no_hint_ends_in_one(
    cut, models: Models, tmp_path: Path, capsys
) -> None:
    """As MLX once wrote them; or one piece with tensors of other kinds than the rest."""
    source = made(ROWS["single"], tmp_path / "source", models)
    (source / ST).unlink()
    for number in (0, 1):
        put(source / f"weights.0{number}.safetensors", {n: t for n, t in models.new.items() if cut(n) == number})
    assert main(["shard", str(source), str(tmp_path / "out"), "--mesh", "dp_shard=2"]) == 4
    assert "pass one file" not in capsys.readouterr().err
    for file in source.glob("*.safetensors"):
        assert main(["verify", str(file)]) == 3
        assert main(["gather", str(file), str(tmp_path / "out")]) == 4
        assert "a part of a model" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_models_in_one_directory_are_listed_cast_and_checked(models: Models, tmp_path: Path, capsys) -> None:
    source, out = made(REPOSITORIES["bagel"], tmp_path / "source", models), tmp_path / "out"
    assert main(["inspect", str(source), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["identity"]["components"] == ["ema", "ae"]
    assert main(["gather", str(source), str(out), "--max-shard-size", "1GB"]) == 2
    _, state = gathered(str(source), out, "--dtype", "bf16")
    assert state.keys() == models.new.keys() | CODEC.keys()
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}
    assert main(["verify", str(out)]) == 0
    content = (out / "ae.safetensors").read_bytes()
    (out / "ae.safetensors").write_bytes(content[:-1] + b"!")
    assert main(["verify", str(out)]) == 3
    assert main(["shard", str(out), str(tmp_path / "cut"), "--mesh", "dp_shard=2"]) == 4


def test_component_of_what_has_none_is_a_usage_error(models: Models, tmp_path: Path, capsys) -> None:
    plain = made(ROWS["single"], tmp_path / "plain", models)
    assert main(["verify", str(plain), "--component", "unet"]) == 2
    source = made(REPOSITORIES["diffusers"], tmp_path / "source", models)
    assert main(["verify", str(source), "--component", "nope"]) == 2
    assert "--component unet" in capsys.readouterr().err
    assert main(["extract", str(source), str(tmp_path / "out"), "--include", "**"]) == 4
    assert f"pass one model: {source}/unet" in re.sub(r"\s*\n\s*", " ", capsys.readouterr().err)


def test_pipeline_with_its_single_file_can_be_pushed(models: Models, tmp_path: Path) -> None:
    source = made(REPOSITORIES["diffusers"], tmp_path / "source", models)
    put(source / "all_in_one.safetensors", models.new)
    with LocalSource(str(source)) as files:
        kind, _, _ = check_directory(files, files.list_files(), num_workers=1)
    assert kind == "diffusers"


def test_single_step_of_training_is_seen_in_rounded_weights(models: Models, tmp_path: Path, capsys) -> None:
    """Weights one small step apart, the older ones in bf16: most of them round to the same."""
    newer = {name: tensor * (1 + 1e-4) for name, tensor in models.new.items()}
    source = made(ROWS["single"], tmp_path / "source", models)
    put(source / ST, models.new, torch.bfloat16)
    put(source / TORCH, newer)
    assert gathered(str(source), tmp_path / "out")[0] == 4
    capsys.readouterr()


def page() -> str:
    """The table in the docs."""
    head = PAGE.read_text().partition("| Made by |")[0] if PAGE.exists() else ""
    lines = [head + "| Made by | Directory | Loader | It loads | ckpt |", "|---|---|---|---|---|"]
    for row in (*ROWS.values(), *REPOSITORIES.values()):
        does = (
            "refuses, and names both"
            if row.picks > 1
            else "refuses"
            if row.word or row.loads == "nothing"
            else "takes that"
        )
        loads = {"new": "the model", "old": "the older one", "nothing": "nothing"}[row.loads]
        lines.append(f"| {row.maker} | {row.holds} | {row.loader} | {loads} | {does} |")
    return "\n".join(lines) + "\n"


def test_page_has_the_table() -> None:
    assert PAGE.read_text() == page()


if __name__ == "__main__":
    PAGE.write_text(page())
    sys.exit()
