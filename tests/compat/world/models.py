"""Small real models, and how a trainer spreads them over a mesh."""

import torch
import toys
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

# Odd numbers on purpose: 33 rows over 4 ranks are uneven, 6 rows over 4 leave one short.
LLAMA = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA |= {"num_key_value_heads": 2, "head_dim": 6, "vocab_size": 33, "tie_word_embeddings": False}
BERT = {"hidden_size": 20, "intermediate_size": 12, "vocab_size": 30, "tie_word_embeddings": True}
COLWISE = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
LLAMA_TP = dict.fromkeys(COLWISE, ColwiseParallel)
LLAMA_TP |= {"self_attn.o_proj": RowwiseParallel, "mlp.down_proj": RowwiseParallel}


def llama(seed=0):
    """A Llama with random weights and an untied head."""
    return toys.build("llama", seed=seed, **LLAMA)


def logits(model):
    """The model's answer to fixed tokens."""
    with torch.no_grad():
        return model(input_ids=torch.arange(24).reshape(2, 12)).logits


def spread(model, **axes):
    """Spread a Llama over the ranks: `dp_shard=4`, `dp_replicate=2, dp_shard=2` or `dp_shard=2, tp=2`."""
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    for layer in model.model.layers:
        if "tp" in axes:
            parallelize_module(layer, mesh["tp"], {name: style() for name, style in LLAMA_TP.items()})
    dp_names = tuple(name for name in axes if name != "tp")
    dp = mesh[dp_names] if len(dp_names) > 1 else mesh[dp_names[0]]
    for layer in model.model.layers:
        fully_shard(layer, mesh=dp)
    fully_shard(model, mesh=dp)
    return model
