"""Run a function on real gloo ranks: forked after the imports, so that a world costs a second and not ten."""

import os
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

TIMEOUT = timedelta(seconds=90)


def run_ranks(num_ranks, function, *arguments):
    """Call `function(rank, *arguments)` on every rank; raise when one of them fails."""
    with tempfile.TemporaryDirectory() as meeting:
        children = []
        for rank in range(num_ranks):
            child = os.fork()
            if child == 0:
                _be_rank(rank, num_ranks, f"file://{meeting}/ranks", function, arguments)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if any(codes):
            raise RuntimeError(f"ranks ended with {codes}")
        assert Path(meeting).is_dir()


def _be_rank(rank, num_ranks, rendezvous, function, arguments):
    code = 1
    try:
        torch.set_num_threads(1)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # never dialled; accelerate wants them set
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=num_ranks, timeout=TIMEOUT)
        function(rank, *arguments)
        dist.barrier()
        dist.destroy_process_group()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
