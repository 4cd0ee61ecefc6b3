"""Training steps in processes of their own: real ones, and what is predicted for them.

The real ones use nothing of `ckpt_tools.estimate`: the model is built, sharded and trained as a user would, and
PyTorch's tracker counts real tensors.
"""

from __future__ import annotations

import tempfile

from ckpt_tools.sandbox.audit import Sandbox, in_sandbox

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
BATCH, TOKENS = 2, 256
_ON_HOST = ("Sharded Param", "Sharded Grad", "OptState", "Buffer")


def sandbox():
    """Return walls for a process that goes on afterwards."""
    return Sandbox(subject="a model", where="config", scratch=tempfile.gettempdir())


def case_of(job):
    """Return the case that a job stands for: fields of a `Case`, the mesh as text."""
    from ckpt_tools.checkpoint.layout import parse_mesh
    from ckpt_tools.estimate import Case

    return Case(**{**job, "mesh": parse_mesh(job["mesh"])}, seq_len=TOKENS, batch_size=BATCH)


def predict(rank, world_size, jobs):
    """Return what is tracked without data for each job."""
    from ckpt_tools.estimate.track import track
    from ckpt_tools.models.hf_recipe import HfRecipe

    recipe = HfRecipe(CONFIG, "config")
    with in_sandbox(sandbox()):
        return [track(recipe, case_of(job)) for job in jobs]


def sizes(rank, world_size):
    """Return the figures of the model."""
    from ckpt_tools.estimate.model import figures_of
    from ckpt_tools.models.hf_recipe import HfRecipe

    with in_sandbox(sandbox()):
        return figures_of(HfRecipe(CONFIG, "config"))


def notes(rank, world_size, tokens):
    """Return what is said about the model when samples have so many tokens."""
    from ckpt_tools.estimate.model import notes_of
    from ckpt_tools.models.hf_recipe import HfRecipe

    with in_sandbox(sandbox()):
        return notes_of(HfRecipe(CONFIG, "config"), tokens)


def train(rank, world_size, jobs):
    """Train two steps for each job; return the second's peaks."""
    return [_peak(**job) for job in jobs]


def _peak(*, strategy, mesh, activation_checkpointing=False, lora=None, quantize=None, offload=False, **dtypes):
    import torch
    import transformers
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    from ckpt_tools.checkpoint.layout import parse_mesh
    from ckpt_tools.fsdp2 import Precision, add_lora, build_device_mesh, parse_policy, quantise_linears, shard_model

    class Tracker(FSDPMemTracker):
        most = 0

        def _update_peak_stats(self, peak_state):
            snapshot = self._curr_mem_snap.get(torch.device("cpu"), {})
            total = snapshot.get("Total", 0)
            if offload:
                total -= sum(size for kind, size in snapshot.items() if getattr(kind, "value", kind) in _ON_HOST)
            self.most = max(self.most, total)

    torch.manual_seed(0)
    device_mesh = build_device_mesh(parse_mesh(mesh))
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).train()
    if lora:
        targets = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"]
        model = model.to(torch.bfloat16)
        if quantize:
            quantise_linears(model)
        model = add_lora(model, {"peft_type": "LORA", "r": lora, "target_modules": targets})
    half = dtypes.get("param_dtype", "bf16") == "bf16"
    precision = Precision(param_dtype=torch.bfloat16 if half else None, reduce_dtype=torch.float32)
    shard_model(
        model,
        device_mesh,
        parse_policy(strategy, precision=precision, cpu_offload=offload),
        activation_checkpointing=activation_checkpointing,
        tp_plan="auto" if "tp" in mesh else None,
    )
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=False)
    tokens = torch.randint(0, CONFIG["vocab_size"], (BATCH, TOKENS))
    for _ in range(2):
        tracker = Tracker(model, optimizer)
        tracker.track_inputs((tokens,))
        with tracker:
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return tracker.most
