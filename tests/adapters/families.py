"""Every family that PEFT has here, on small real models; saved from two FSDP2 ranks as trainers do."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import toys
from safetensors.torch import save_file

LLAMA = {"target_modules": ["q_proj", "v_proj", "down_proj"]}


@dataclass(frozen=True)
class Case:
    """One adapter: how it is made and saved, and what ckpt has to be told."""

    config: dict
    model: str = "llama"
    save: str = "model"
    """"model": everything under model.; "trainable": adapters only; "optim": with optimizer state; "flat": no root;
    "accelerate": as its `save_fsdp_model` does."""
    sidecar: bool = False
    """PEFT's configuration is put beside the checkpoint."""
    options: dict = field(default_factory=dict)
    """Of `export_lora`."""
    trained: tuple[str, ...] = ()
    """Parts of names that are trained beside the factors."""
    others: tuple[str, ...] = ()
    """Adapters of the same configuration beside the one that is active."""


OFT = ("use_cayley_neumann=true", "num_cayley_neumann_terms=5", "coft=false", "peft_version=0.21.0")
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def _case(
    kind="LORA", *, model="llama", save="model", sidecar=False, trained=(), config=(), others=(), **fields
) -> Case:
    """An adapter whose alpha the user says, unless PEFT's configuration lies beside it."""
    fields = {"peft_type": kind, **({"r": 4, "lora_alpha": 8} if kind == "LORA" else {}), **LLAMA, **fields}
    alpha = None if sidecar else fields.get("lora_alpha", fields.get("alpha"))
    options = ({} if alpha is None else {"alpha": alpha}) | ({"config": config} if config else {})
    options |= {"adapter": "default"} if others else {}
    return Case(fields, model, save, sidecar, options, trained, others)


CASES = {
    "lora": _case(r=3, lora_alpha=12),
    "lora-trainable-only": _case(save="trainable"),
    "lora-optim": _case(save="optim"),
    "lora-flat": _case(save="flat"),
    "accelerate": _case(save="accelerate", modules_to_save=["lm_head"], trained=("modules_to_save",)),
    "rslora": _case(use_rslora=True, config=("use_rslora=true",)),
    "rank-pattern": _case(rank_pattern={"layers.1.self_attn.q_proj": 7}),
    "alpha-pattern": _case(alpha_pattern={r"layers\.\d\.mlp\.down_proj": 3}, sidecar=True),
    "dora": _case(use_dora=True),
    "dora-embedding": _case(use_dora=True, target_modules=["embed_tokens", "k_proj"]),
    "embedding": _case(target_modules=["embed_tokens", "lm_head"]),
    "modules-to-save": _case(modules_to_save=["lm_head", "norm"], trained=("modules_to_save",)),
    "tokens": _case(trainable_token_indices=[5, 1], sidecar=True),
    "several": _case(others=("other", "third")),
    "bias-own": _case(bias="lora_only", save="trainable", trained=("base_layer.bias",)),
    "bias-all": _case(bias="all", save="optim", trained=(".bias",)),
    "bias-of-the-config": _case(bias="all", sidecar=True, trained=(".bias",)),
    "lora-bias": _case(lora_bias=True, target_modules=["q_proj"]),
    "loha": _case("LOHA", r=4, alpha=6),
    "lokr": _case("LOKR", r=2, alpha=6),
    "lokr-both": _case("LOKR", r=1, alpha=2, decompose_both=True, decompose_factor=4),
    "lokr-full": _case("LOKR", r=32, alpha=16, config=("r=32",)),
    "oft": _case("OFT", oft_block_size=8, config=OFT),
    "oft-by-number": _case(
        "OFT", r=4, oft_block_size=0, use_cayley_neumann=False, config=("use_cayley_neumann=false", "coft=false"),
    ),
    "oft-shared": _case("OFT", oft_block_size=8, block_share=True, coft=True, eps=0.5, sidecar=True),
    "boft": _case("BOFT", boft_block_size=4),
    "boft-by-number": _case("BOFT", boft_block_size=0, boft_block_num=4),
    "conv-lora": _case(model="vit", target_modules=["projection", "query"]),
    "conv-dora": _case(model="vit", use_dora=True, target_modules=["projection", "query"]),
    "conv-loha": _case("LOHA", model="vit", r=4, alpha=8, use_effective_conv2d=True, target_modules=["projection"]),
    "conv-lokr": _case("LOKR", model="vit", r=2, alpha=8, target_modules=["projection", "value"]),
    "conv-lokr-tucker": _case(
        "LOKR", model="vit", r=2, alpha=8, use_effective_conv2d=True, target_modules=["projection"],
    ),
    "conv-oft": _case("OFT", model="vit", oft_block_size=8, target_modules=["projection", "query"], config=OFT),
    "conv-boft": _case("BOFT", model="vit", boft_block_size=4, target_modules=["projection", "query"]),
    "conv1d-transposed": _case(
        model="gpt2", target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, config=("fan_in_fan_out=true",),
    ),
    "experts": _case(model="moe", r=2, target_modules=["q_proj"], target_parameters=EXPERTS),
    "experts-trainable-only": _case(
        model="moe", save="trainable", r=2, target_modules=[], target_parameters=EXPERTS,
        config=("r=2", f"target_parameters={json.dumps(EXPERTS)}"),
    ),
}  # fmt: skip


def save_dcp(state: dict, path) -> None:
    """Save from one process, as a trainer without a group does."""
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(state, checkpoint_id=path)


def loras(pairs: Mapping[str, Sequence[torch.Tensor]], root: str = "") -> dict[str, torch.Tensor]:
    """The factors of LoRAs: module → (A, B)."""
    return {f"{root}{path}.lora_{side}.weight": ab[i] for path, ab in pairs.items() for i, side in enumerate("AB")}


def write_peft(path: Path, tensors: Mapping[str, torch.Tensor], **config: object) -> Path:
    """Lay tensors down as PEFT does, with this in their configuration."""
    path.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"} | config))
    return path


def build(kind: str):
    """A small model with the same random weights in every process."""
    small = {"intermediate_size": 48, "vocab_size": 40}
    settings = {
        "llama": small | {"attention_bias": True},
        "vit": {"intermediate_size": 48, "image_size": 16},
        "gpt2": {"vocab_size": 40, "n_positions": 16},
        "moe": small,
    }
    return toys.build("qwen3-moe" if kind == "moe" else kind, seed=5, **settings[kind])


def inputs(kind: str) -> dict[str, torch.Tensor]:
    """What the model is asked."""
    generator = torch.Generator().manual_seed(1)
    if kind == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}
    return {"input_ids": torch.randint(0, 40, (2, 7), generator=generator)}


def outputs(model, kind: str) -> torch.Tensor:
    """What it answers."""
    with torch.no_grad():
        return model(**inputs(kind)).logits


def adapt(case: Case, adapter_name: str = "default"):
    """The model with a random adapter that changes something."""
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING, get_peft_model

    config = dict(case.config)
    kind = PEFT_TYPE_TO_CONFIG_MAPPING[config.pop("peft_type")]
    with warnings.catch_warnings(action="ignore"):
        model = get_peft_model(build(case.model), kind(**config), adapter_name=adapter_name)
        for other in case.others:
            model.add_adapter(other, kind(**config))
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad or any(f".{other}." in name for other in case.others):
                noise = torch.randn(parameter.shape, generator=generator) * 0.2
                around = parameter if any(part in name for part in ("magnitude", "boft_s", *case.trained)) else 0.0
                parameter.copy_(around + noise)
    return model.eval()


def reload(path: str | Path, case: Case):
    """The model with an adapter that PEFT loads; it only warns when keys do not match."""
    from peft import PeftModel

    with warnings.catch_warnings(action="error"):
        warnings.filterwarnings("ignore", message="fan_in_fan_out|.*is_gradient_checkpointing|.*meta parameter")
        warnings.filterwarnings("ignore", message="Failed to load the CUDA|Setting boft_n_butterfly_factor")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        return PeftModel.from_pretrained(build(case.model), path, is_trainable=True).eval()


def leave_config(case: Case, directory: str | Path, **more: str) -> None:
    """Put PEFT's configuration beside a checkpoint, as a loop does that calls `peft_config[…].to_dict()`."""
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING

    settings = PEFT_TYPE_TO_CONFIG_MAPPING[case.config["peft_type"]](**case.config, **more).to_dict()
    document = {key: sorted(v) if isinstance(v, set) else v for key, v in settings.items()}
    Path(directory, "adapter_config.json").write_text(json.dumps(document, default=str))


def save_all(rank: int, world_size: int, directory: str, names: Iterable[str]) -> None:
    """On every rank: shard the model of every case named with FSDP2, and save it."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp_shard",))
    for name in names:
        case = CASES[name]
        model = adapt(case)
        if rank == 0:
            Path(directory, name).mkdir()
            save_file({"logits": outputs(model, case.model).contiguous()}, Path(directory, name, "logits.safetensors"))
        dist.barrier()  # the directory is there
        blocks = [module for module in model.modules() if type(module).__name__ in BLOCKS]
        assert blocks
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if case.save == "accelerate":
            save_with_accelerate(model, os.path.join(directory, name, "dcp"), rank)
            continue
        options = StateDictOptions(ignore_frozen_params=case.save == "trainable")
        state = get_model_state_dict(model, options=options)
        whole = state if case.save == "flat" else {"model": state}
        if case.save == "optim":
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.0)
            model(**inputs(case.model)).logits.float().square().mean().backward()
            optimizer.step()
            whole["optim"] = get_optimizer_state_dict(model, optimizer)
        dist.barrier()
        path = os.path.join(directory, name, "dcp")
        dcp.save(whole, checkpoint_id=path)
        if rank == 0 and case.sidecar:
            leave_config(case, path)


def save_with_accelerate(model, path: str, rank: int) -> None:
    """Write a checkpoint directory with `pytorch_model_fsdp_0` in it, as Trainer does for an adapter."""
    from types import SimpleNamespace

    from accelerate import PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import save_fsdp_model

    PartialState(cpu=True)  # its logger asks for one
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    accelerator = SimpleNamespace(process_index=rank, num_processes=2)
    save_fsdp_model(plugin, accelerator, model, path, adapter_only=True)


BLOCKS = ("LlamaDecoderLayer", "ViTLayer", "GPT2Block", "Qwen3MoeDecoderLayer")
