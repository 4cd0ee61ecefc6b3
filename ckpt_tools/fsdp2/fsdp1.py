"""Options that FSDP1 and its launchers have and `fully_shard` has not, each with FSDP2's way."""

from __future__ import annotations

from typing import Self

from ckpt_tools.errors import UsageError

_META = "build the model on meta: load_checkpoint reads only what a rank holds"
_BLOCKS = "name the blocks: shard_model(blocks=…)"
INSTEAD = {
    "buffer_dtype": "FSDP2 leaves buffers alone: cast them in the model, or keep their own dtype",
    "limit_all_gathers": "FSDP2 frees gathered parameters as soon as they are used, and needs no limit",
    "use_orig_params": "FSDP2 always trains the original parameters, frozen and trainable ones in one unit",
    "sync_module_states": "load_checkpoint gives every rank its part; rank0_load sends what rank 0 alone has",
    "cpu_ram_efficient_loading": _META,
    "param_init_fn": _META,
    "state_dict_type": "save_checkpoint writes every rank's part; `ckpt gather` makes one model of them",
    "min_num_params": _BLOCKS,
    "auto_wrap_policy": _BLOCKS,
    "backward_prefetch": "FSDP2 gathers the block before during backward; Policy(prefetch_backward=2) gathers more",
    "forward_prefetch": "Policy(prefetch_forward=1)",
    "ignored_modules": "Policy(ignored=('vae',))",
    "sharding_strategy": "Policy(strategy=…); parse_policy takes FSDP1's names",
    "mixed_precision": "Policy(precision=Precision(param_dtype=…, reduce_dtype=…))",
    "activation_checkpointing": "shard_model(activation_checkpointing=True)",
    "activation_checkpointing_offload": "wrap the forward pass in torch.autograd.graph.save_on_cpu",
    "device_id": "the mesh says it: build_device_mesh(mesh, 'cuda')",
    "process_group": "the mesh says it: build_device_mesh",
}
"""Option → what to do."""


class Answers:
    """Refuses FSDP1's options by name."""

    __slots__ = ()

    def __new__(cls, *_: object, **options: object) -> Self:
        """Refuse FSDP1's options with what to do instead."""
        for name in options:
            if name in INSTEAD:
                raise UsageError(f"{name} is not an option of FSDP2", where=cls.__name__, hint=INSTEAD[name])
        return super().__new__(cls)
