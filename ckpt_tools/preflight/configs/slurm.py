"""What a Slurm job knows of itself: the variables that its `#SBATCH` lines make.

Source: sbatch(1), "Options" and "Output environment variables".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise

_SBATCH = re.compile(r"^#SBATCH[ \t]+(?P<words>[^\n]*)", re.MULTILINE)
_SLURM: Mapping[str, tuple[str, ...]] = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "N": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "n": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
    "gres": ("SLURM_GPUS_ON_NODE",),
    "cpus-per-task": ("SLURM_CPUS_PER_TASK",),
}
"""Option of sbatch → the variables that a job has of it."""


def slurm_variables(text: str) -> dict[str, str]:
    """Return what `#SBATCH` lines make Slurm set, as far as they say a plain number."""
    found: dict[str, str] = {}
    for line in _SBATCH.finditer(text):
        words = line["words"].partition(" #")[0].replace("=", " ").split()
        for name, value in pairwise(words):
            if name.startswith("-") and name.lstrip("-") in _SLURM:
                number = value.rpartition(":")[2]  # gpu:8, gpu:h100:8
                if number.isdecimal():
                    found |= dict.fromkeys(_SLURM[name.lstrip("-")], number)
    tasks, nodes = found.get("SLURM_NTASKS_PER_NODE"), found.get("SLURM_NNODES")
    if tasks and nodes and "SLURM_NTASKS" not in found:
        found["SLURM_NTASKS"] = found["SLURM_NPROCS"] = str(int(tasks[:6]) * int(nodes[:6]))
    return found
