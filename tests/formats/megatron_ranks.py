"""A model of the hub, saved by megatron-core itself: real ranks on gloo, GPTModel, `dist_checkpointing.save`.

megatron-core is no dependency: `pip install --no-deps --target DIR megatron-core==0.16.1`, and DIR on PYTHONPATH. What
it asks of CUDA is answered, and its writer, which forks, writes in the process itself; nothing else of it is changed.
The samples in `megatron/` are what `python -m formats.megatron_ranks DIR KIND [tp=2] [pp=2] [ep=2] [dp=2] [layers]`
(in `tests`) left in DIR, as `zip -9`; their names say which version and which arguments. dp=2 is for 0.15 alone.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import queue
import sys
import warnings
import zlib
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import toys
from names.keymaps import Tensors, forward, per_expert
from names.test_megatron import MAPS, local

SIZES = {"hidden_size": 16, "intermediate_size": 24, "vocab_size": 30, "num_attention_heads": 4}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
_LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
KINDS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("LlamaForCausalLM", {"num_key_value_heads": 2}),
    "qwen2": ("Qwen2ForCausalLM", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {"num_key_value_heads": 2, "head_dim": 6}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {"num_key_value_heads": 2, "head_dim": 4, "num_experts": 4} | _MOE),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {"num_key_value_heads": 4, "first_k_dense_replace": 1, "n_routed_experts": 4, "n_group": 2, "topk_group": 1}
        | _MOE
        | _LATENT,
    ),
}
DEGREES = {"tp": 1, "pp": 1, "ep": 1, "dp": 1}
PADDED = 32
"""Rows of the vocabulary that Megatron makes of 30."""


def hub_model(kind: str):
    """A model of transformers, no tensor of which is all of one value; multiples of 1/8, which can be packed."""
    import transformers

    name, sizes = KINDS[kind]
    config = getattr(transformers, name).config_class(**toys.TEXT | SIZES | sizes)
    model = getattr(transformers, name)(config).eval()
    biases = [(own, buffer) for own, buffer in model.named_buffers() if own.endswith("correction_bias")]
    for own, tensor in (*model.named_parameters(), *biases):
        seed = torch.Generator().manual_seed(zlib.crc32(own.encode()))
        tensor.data = torch.randint(-8, 9, tensor.shape, generator=seed) / 8
    return model


def whole_state(kind: str) -> Tensors:
    """What one Megatron rank would have, in local layers' names."""
    model = hub_model(kind)
    hub = {name: tensor.detach() for name, tensor in per_expert(model.state_dict()).items()}
    if model.config.tie_word_embeddings:
        del hub["lm_head.weight"]
    state = {}
    for name, tensor in forward(MAPS[kind], hub, model.config.to_dict()).items():
        is_padded = name.startswith(("embedding.", "output_layer."))
        state[local(name)] = torch.cat([tensor, torch.zeros(PADDED - 30, 16)]) if is_padded else tensor
    if model.config.tie_word_embeddings:
        del state["output_layer.weight"]
    return state


def _build(kind: str, degrees: dict[str, int]):
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    if kind == "deepseek_v3":  # it asks whether layers are of a class that is None without TransformerEngine
        from megatron.core.transformer import multi_latent_attention

        multi_latent_attention.TELinear = type("TELinear", (), {})
    theirs = hub_model(kind).config
    settings = dict.fromkeys(
        ("bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion", "apply_rope_fusion"), False
    )
    settings |= {"num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4}
    settings |= {"num_query_groups": theirs.num_key_value_heads, "add_qkv_bias": kind == "qwen2"}
    settings |= {"qk_layernorm": kind.startswith(("qwen3", "deepseek"))}
    if kind in ("qwen3_moe", "deepseek_v3"):
        settings |= {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 8, "moe_grouped_gemm": False}
        settings |= {"moe_token_dispatcher_type": "allgather", "moe_router_load_balancing_type": "none"}
        settings |= {"expert_model_parallel_size": degrees["ep"], "expert_tensor_parallel_size": 1}
    if kind == "deepseek_v3":
        settings |= {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_head_dim": 4, "qk_pos_emb_head_dim": 4, "v_head_dim": 4}
        settings |= {"moe_layer_freq": [0, 1], "moe_shared_expert_intermediate_size": 8, "rope_type": "rope"}
        settings |= {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    else:
        settings["kv_channels"] = getattr(theirs, "head_dim", None) or 4
    config = (MLATransformerConfig if kind == "deepseek_v3" else TransformerConfig)(
        **settings,
        tensor_model_parallel_size=degrees["tp"],
        pipeline_model_parallel_size=degrees["pp"],
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        normalization="RMSNorm",
        gated_linear_unit=True,
        add_bias_linear=False,
        activation_func=torch.nn.functional.silu,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    for layer in spec.layer_specs:  # it has no weights, and local layers have none for latent attention
        layer.submodules.self_attention.submodules.core_attention = IdentityOp
    return GPTModel(
        config,
        spec,
        vocab_size=PADDED,
        max_sequence_length=64,
        position_embedding_type="none" if kind == "deepseek_v3" else "rope",
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=theirs.tie_word_embeddings,
    )


def _fill(model, state: Tensors, degrees: dict[str, int]) -> None:
    """Give a rank its part of every tensor."""
    from megatron.core import parallel_state

    tp, rank = degrees["tp"], parallel_state.get_tensor_model_parallel_rank()
    first = parallel_state.get_expert_model_parallel_rank() * (4 // degrees["ep"])
    named = [*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if n.endswith("expert_bias"))]
    for own, tensor in named:
        parts = own.split(".")
        if parts[:2] == ["decoder", "layers"]:
            parts[2] = str(model.decoder.layers[int(parts[2])].layer_number - 1)
        if "local_experts" in parts:
            parts[parts.index("local_experts") + 1] = str(int(parts[parts.index("local_experts") + 1]) + first)
        whole = state[".".join(parts)]
        if whole.shape != tensor.shape:
            dim = tensor.partition_dim
            halves = whole.chunk(2) if "linear_fc1" in own else (whole,)
            whole = torch.cat([half.chunk(tp, dim)[rank] for half in halves], dim)
        tensor.data.copy_(whole)


def _start(rank: int, degrees: dict[str, int], store: str) -> None:
    """Be a rank of Megatron's, on a processor."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    world = math.prod(degrees.values())
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    np.product = np.prod  # 0.15 is older than numpy 2
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.tensor_parallel import random as states

    states.CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    writer, found = filesystem_async.FileSystemWriterAsync, queue.Queue()
    filesystem_async._get_write_results_queue = lambda *_: found

    def write(transforms, _msc, _rank, buckets, results) -> None:
        inner, count = queue.Queue(), queue.Queue()
        for at, bucket in enumerate(buckets):
            count.put(at)
            writer.write_preloaded_data(transforms, at, bucket, inner, count, True)
        results.put(dict(inner.get() for _ in buckets))

    writer.write_preloaded_data_multiproc = staticmethod(write)
    parallel_state.initialize_model_parallel(
        degrees["tp"], degrees["pp"], expert_model_parallel_size=degrees["ep"], expert_tensor_parallel_size=1
    )


def _sharded(model, stacked: bool):
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {"singleton_local_shards": not stacked, "non_homogeneous_layers": not stacked, "dp_cp_group": group}
    return model.sharded_state_dict(metadata=metadata)


def _rank(rank: int, kind: str, directory: str, degrees: dict[str, int], stacked: bool) -> None:
    os.makedirs(directory, exist_ok=True)
    _start(rank, degrees, f"{directory}.store")
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    model = _build(kind, degrees)
    _fill(model, whole_state(kind), degrees)
    state = _sharded(model, stacked)
    if kind == "llama":
        state["optimizer"] = _optimizer_state(model, state, degrees)
    args = argparse.Namespace(num_layers=2, hidden_size=16, num_attention_heads=4, padded_vocab_size=PADDED)
    state |= {"args": args, "iteration": 100, "checkpoint_version": 3.0}
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1)
    dist_checkpointing.save(state, directory, strategy)
    dist.barrier()
    dist.destroy_process_group()


def _optimizer_state(model, state, degrees: dict[str, int]):
    """Moments of Adam as Megatron's optimizers save them in the model's space: value + 1."""
    from megatron.core.dist_checkpointing import mapping
    from megatron.core.dist_checkpointing.optimizer import (
        get_param_id_to_sharded_param_map,
        optim_state_to_sharding_state,
    )

    model_state = {key: value for key, value in state.items() if not key.endswith("_extra_state")}
    if degrees["dp"] == 1:
        of_params = get_param_id_to_sharded_param_map(model_state, model.parameters())
        own = dict(enumerate(model.parameters()))
        optimizer = {
            "state": {at: {name: own[at].detach() + 1 for name in ("exp_avg", "exp_avg_sq")} for at in of_params},
            "param_groups": [{"lr": 0.1, "params": list(of_params)}],
        }
        optim_state_to_sharding_state(optimizer, of_params)
        return optimizer
    states = {}  # as sharded_param_state_fs_model_space of distrib_optimizer.py until 0.15: every rank has a flat range
    for key, value in model_state.items():
        flat = value.data.detach().flatten() + 1
        half = len(flat) // degrees["dp"]
        part = slice(dist.get_rank() * half, (dist.get_rank() + 1) * half)
        new = {"key": f"optimizer.state.exp_avg.{value.key}", "data": flat[part], "flattened_range": part}
        new |= {} if isinstance(value, mapping.ShardedTensorFactory) else {"dtype": flat.dtype}
        states[key] = dataclasses.replace(value, **new, replica_id=(*value.replica_id[:2], 0))
    return {"param_state": states}


def save(kind: str, directory: Path, *, stacked: bool = True, **degrees: int) -> None:
    """Start as many ranks as that needs, and have them save the model of `hub_model`."""
    import torch.multiprocessing as mp

    degrees = DEGREES | degrees
    mp.spawn(_rank, (kind, str(directory), degrees, stacked), nprocs=math.prod(degrees.values()))
    Path(f"{directory}.store").unlink(missing_ok=True)


def load(kind: str, directory: str, stacked: bool) -> list[str]:
    """Have one rank load a step; return the tensors that are not those of `hub_model`."""
    _start(0, DEGREES, f"{directory}.store")
    from megatron.core import dist_checkpointing

    found = dist_checkpointing.load(_sharded(_build(kind, DEGREES), stacked), directory)
    return [name for name, tensor in whole_state(kind).items() if not torch.equal(tensor, found[name])]


if __name__ == "__main__":
    words = sys.argv[3:]
    if "load" in words:
        sys.exit(", ".join(load(sys.argv[2], sys.argv[1], "layers" not in words)) or 0)
    numbers = {name: int(value) for name, value in (word.split("=") for word in words if "=" in word)}
    save(sys.argv[2], Path(sys.argv[1]), stacked="layers" not in words, **numbers)
