"""One way to train a model, and what follows from it without the model: micro-batches, shards, tokens. No torch."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from ckpt_tools.checkpoint.layout import Mesh
from ckpt_tools.options.estimate import TrainingOptions

DEFAULT_WORLD_SIZE = 8  # Ranks when nothing says how many: one node
_DEFAULT_MESH = Mesh((("dp_shard", DEFAULT_WORLD_SIZE),))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case(TrainingOptions):
    """One way to train the model."""

    strategy: str = "full_shard"
    """One of `STRATEGIES`, or hybrid_shard_zero2: hybrid_shard whose parameters stay after forward."""
    mesh: Mesh = _DEFAULT_MESH
    activation_checkpointing: bool = False  # Blocks run again in backward instead of keeping their activations
    lora: int | None = None  # Rank of adapters on all linear layers but the output's; None trains every parameter

    @property
    def num_shards(self) -> int:
        """N: over how many ranks FSDP cuts a parameter."""
        return 1 if self.strategy == "no_shard" else self.live_mesh.size("dp_shard")

    @property
    def live_mesh(self) -> Mesh:
        """The ranks of one stage: cp and ep are ranks of FSDP."""
        axes = dict(self.mesh.axes)
        folded = axes.pop("cp", 1) * axes.pop("ep", 1)
        axes.pop("pp", None)
        name = "dp_replicate" if self.strategy == "no_shard" else "dp_shard"
        if folded > 1 or not any(axis != "tp" for axis in axes):
            axes = {name: axes.pop(name, 1) * folded} | axes
        order = ("dp_replicate", "dp_shard", "tp")
        return Mesh(tuple((axis, axes[axis]) for axis in order if axis in axes))

    @property
    def num_expert_ranks(self) -> int:
        """Over how many ranks experts are cut."""
        return self.expert_parallel * self.mesh.size("ep")

    @property
    def num_micro_batches(self) -> int:
        """Parts that a step's samples are run in."""
        return 1 if self.mesh.size("pp") == 1 else self.micro_batches or self.batch_size

    @property
    def samples(self) -> int:
        """Of one forward."""
        return math.ceil(self.batch_size / self.num_micro_batches)

    @property
    def tokens_per_sample(self) -> int:
        """That one rank has: cp cuts the sequence."""
        return math.ceil(self.seq_len / self.mesh.size("cp"))

    @property
    def is_kept(self) -> bool:
        """Do gathered parameters stay from forward to backward?"""
        return self.strategy in ("no_shard", "shard_grad_op", "hybrid_shard_zero2")

    @property
    def cost(self) -> tuple[int, int]:
        """How much is computed again, and how often, and among how many ranks, parameters are gathered: by rank."""
        gathers = ("no_shard", "shard_grad_op", "hybrid_shard_zero2", "hybrid_shard", "full_shard")
        return 2 * self.activation_checkpointing + self.selective_checkpointing, gathers.index(self.strategy)

    @property
    def label(self) -> str:
        """The strategy, and what is added to it."""
        extra = ["checkpointing"] if self.activation_checkpointing else []
        if self.selective_checkpointing:
            extra.append("selective checkpointing")
        if self.lora is not None:
            extra.append(f"{'QLoRA' if self.quantize else 'LoRA'} r{self.lora}")
        names = {
            "offload": "offload",
            "offload_optimizer": "optimizer offload",
            "offload_activations": "activation offload",
            "sequence_parallel": "SP",
            "loss_parallel": "loss parallel",
            "fused_loss": "fused loss",
        }
        extra += [words for name, words in names.items() if getattr(self, name)]
        if self.mesh.size("pp") > 1:
            extra.append(self.schedule)
        return " + ".join([self.strategy, *extra])

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What is assumed of a run that nobody has seen."""
        said = (
            (self.compile, "torch.compile is estimated as eager execution; the run keeps fewer activations"),
            (self.fp8, "float8 layers are estimated in the compute dtype"),
            (self.num_expert_ranks > 1, "assumes that tokens are spread evenly over the experts"),
            (self.mesh.size("cp") > 1, "keys and values exchanged by context parallelism are not counted"),
            (self.offload_optimizer, "the optimizer state is counted as on the device during the step"),
        )
        return tuple(text for holds, text in said if holds)

    def to_json(self) -> dict[str, object]:
        """Return it as JSON holds it."""
        return asdict(self) | {"mesh": str(self.mesh)}


# What a device needs beside what PyTorch's tensors take. Stated, not measured on your machine.

CONTEXT_BYTES = 600 << 20
"""CUDA context and the kernels of PyTorch, cuBLAS and NCCL: 0.4 to 0.6 GiB on A100 and H100 (`nvidia-smi` of a process
that has done one product)."""
WORKSPACE_BYTES = 128 << 20
"""Workspaces that cuBLAS and cuDNN take on the streams that FSDP uses: cuBLAS takes 32 MiB a stream on Hopper."""
NCCL_BYTES = 400 << 20  # Buffers of one NCCL communicator: channels of 4 MiB each way and protocol, per neighbour
FRAGMENTATION = 0.06
"""Part of the peak that the caching allocator holds in blocks that fit nothing; a few percent with
`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`, more without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Margin:
    """Bytes beside the tensors of one rank."""

    context: int
    workspace: int
    nccl: int  # Communicators: one per mesh axis with more than one rank
    fragmentation: int  # What the allocator cannot use

    @property
    def total(self) -> int:
        """All of it."""
        return self.context + self.workspace + self.nccl + self.fragmentation

    def to_json(self) -> dict[str, int]:
        """Return it as JSON holds it."""
        return asdict(self) | {"total": self.total}


def margin_of(peak: int, mesh: Mesh) -> Margin:
    """Return the margin beside tensors that take `peak` bytes."""
    communicators = sum(1 for _, size in mesh.axes if size > 1)
    return Margin(
        context=CONTEXT_BYTES,
        workspace=WORKSPACE_BYTES,
        nccl=communicators * NCCL_BYTES,
        fragmentation=round(FRAGMENTATION * peak),
    )
