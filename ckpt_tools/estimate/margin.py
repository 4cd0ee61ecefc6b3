"""What a device needs beside what PyTorch's tensors take. Stated, not measured on your machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ckpt_tools.description.layout import Mesh

CONTEXT_BYTES = 600 << 20
"""CUDA context and the kernels of PyTorch, cuBLAS and NCCL: 0.4 to 0.6 GiB on A100 and H100 (`nvidia-smi` of a process
that has done one product)."""
WORKSPACE_BYTES = 128 << 20
"""Workspaces that cuBLAS and cuDNN take on the streams that FSDP uses: cuBLAS takes 32 MiB a stream on Hopper."""
NCCL_BYTES = 400 << 20
"""Buffers of one NCCL communicator: channels of 4 MiB each way and protocol, per neighbour."""
FRAGMENTATION = 0.06
"""Part of the peak that the caching allocator holds in blocks that fit nothing; a few percent with
`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`, more without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Margin:
    """Bytes beside the tensors of one rank."""

    context: int
    workspace: int
    nccl: int
    """Communicators: one per mesh axis with more than one rank."""
    fragmentation: int
    """What the allocator cannot use."""

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
