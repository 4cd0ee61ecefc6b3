"""torchtitan's own models on CPU, as small as those of `toys`, and parallelised by its own functions."""

from __future__ import annotations

import importlib
import re

import torch

AXES = re.compile(r"(mlp[12]_(?:weight|bias))_E[GDF]+$")
"""Which the adapter of gpt-oss forgets: it names other tensors than its model has."""


def moe(num_experts: int = 4, sizes=(("dim", 32), ("n_heads", 4), ("n_kv_heads", 2), ("head_dim", 8))):
    """Its configuration of a Qwen3 with experts: that of `toys.build("qwen3-moe")`."""
    from torchtitan.models import qwen3
    from torchtitan.models.common import CosSinRoPE, Embedding, Linear
    from torchtitan.models.common.attention import ScaledDotProductAttention

    qwen3.get_attention_config = lambda _: ScaledDotProductAttention.Config()  # the others are compiled for GPUs
    embedding, linear = qwen3._EMBEDDING_INIT, qwen3._LINEAR_INIT
    return qwen3.Qwen3Model.Config(
        vocab_size=64,
        dim=32,
        norm=qwen3._qwen3_norm(32),
        tok_embeddings=Embedding.Config(num_embeddings=64, embedding_dim=32, param_init=embedding),
        lm_head=Linear.Config(in_features=32, out_features=64, param_init=linear),
        layers=qwen3._build_qwen3_moe_layers(
            **dict(sizes),
            n_layers=2,
            moe_hidden_dim=16,
            num_experts=num_experts,
            top_k=2,
            attn_backend="sdpa",
            rope=CosSinRoPE.Config(dim=8, max_seq_len=64, theta=1e4),
            moe_comm_backend="standard",
        ),
    )


def parallel_moe(num_experts: int, *, seed: int, **degrees: int):
    """The live model on the ranks of this process group."""
    import torch.distributed as dist
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed.parallel_dims import ParallelDims
    from torchtitan.models.qwen3 import parallelize_qwen3
    from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

    sizes = dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep"), 1) | degrees
    dims = ParallelDims(**sizes, world_size=dist.get_world_size(), spmd_backend="partial_dtensor")
    dims.build_mesh()
    config = moe(num_experts)
    set_qwen3_sharding_config(config, enable_sp=False, enable_ep=sizes["ep"] > 1)
    with torch.device("meta"):
        model = config.build()
    model = parallelize_qwen3(
        model,
        parallel_dims=dims,
        training=TrainingConfig(),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        compile_config=CompileConfig(enable=False),
        ac_config=None,
        dump_folder="",
    )
    model.to_empty(device="cpu")
    torch.manual_seed(seed)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model


def debug_model(module: str, flavor: str):
    """(its entry of the registry, one of its models without memory)"""
    entry = importlib.import_module(f"torchtitan.models.{module}").model_registry(flavor)
    with torch.device("meta"):
        return entry, entry.model.build()


def gpt_oss():
    """Its configuration of a small gpt-oss, whose heads have one size."""
    from torchtitan.models import gpt_oss as module
    from torchtitan.models.common import CosSinRoPE, Embedding, Linear, RMSNorm

    return module.GptOssModel.Config(
        vocab_size=64,
        dim=32,
        tok_embeddings=Embedding.Config(num_embeddings=64, embedding_dim=32, param_init=module._EMBEDDING_INIT),
        norm=RMSNorm.Config(normalized_shape=32, param_init=module._NORM_INIT),
        lm_head=Linear.Config(in_features=32, out_features=64, param_init=module._output_linear_init(32)),
        layers=module._build_gptoss_layers(
            dim=32,
            n_layers=2,
            hidden_dim=16,
            num_experts=4,
            top_k=2,
            load_balance_coeff=1e-3,
            moe_comm_backend="standard",
            rope=CosSinRoPE.Config(dim=64, max_seq_len=64, theta=1e4),
        ),
    )


def of_transformers(hub, kind):
    """The hub's tensors as transformers has them, of what torchtitan's adapters take for them."""
    if kind in ("gpt_oss", "gpt-oss"):  # the published form, dequantised: rows for columns
        return {n.removesuffix("_blocks"): t.transpose(1, 2) if n.endswith("_blocks") else t for n, t in hub.items()}
    turned = ("experts.gate_up_proj", "experts.down_proj") if kind == "qwen3_5_moe" else ()
    return {n: t.transpose(1, 2).contiguous() if n.endswith(turned) else t for n, t in hub.items()}
