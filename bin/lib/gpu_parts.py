"""The parts of bin/gpu: each raises where something does not hold, and returns its figures."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
SIZES = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16, "vocab_size": 32000}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 128}
"""Of a Llama: 0.27 billion parameters, and what a rehearsal takes."""
SEQ_LEN, BATCH_SIZE = 1024, 2
CASES: dict[str, tuple[str, ...]] = {
    "full": (),
    "lora": ("--lora",),
    "qlora": ("--lora", "--quantize", "nf4"),
    "checkpointing": ("--activation-checkpointing",),
    "offload": ("--offload",),
    "compile": ("--compile",),
}
"""Small configs → how `ckpt estimate` is asked for them."""

Figures = dict[str, Any]


def check(holds: bool, otherwise: str) -> None:
    """Raise unless it holds."""
    if not holds:
        raise RuntimeError(otherwise)


def ckpt(*arguments: object) -> Figures:
    """Run a command with --json and return its document, whatever its exit code."""
    command = [sys.executable, "-m", "ckpt_tools", *map(str, arguments), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        return dict(json.loads(done.stdout))
    except ValueError:
        raise RuntimeError(f"{' '.join(command[2:])}: {done.stderr.strip()[-800:]}") from None


def sizes_of(source: Path) -> dict[str, int]:
    """The sizes that a model directory was written with."""
    config = json.loads((source / "config.json").read_text())
    return {name: config[name] for name in SIZES}


@contextmanager
def one_rank(device: str) -> Iterator[Any]:
    """Be the only rank of a process group; yields the mesh."""
    import torch.distributed as dist

    from ckpt_tools.fsdp2 import build_device_mesh

    if device == "cuda":
        torch.cuda.set_device(0)
    with tempfile.TemporaryDirectory() as place:
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{place}/meet", rank=0, world_size=1)
        try:
            yield build_device_mesh("dp_shard=1", device)
        finally:
            dist.destroy_process_group()


def build(sizes: dict[str, int], device: str = "meta") -> Any:
    """A Llama of these sizes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    options: Figures = dict(sizes)
    config = LlamaConfig(**options, num_attention_heads=8, num_key_value_heads=8)
    with torch.device(device):
        return LlamaForCausalLM(config).train()


def step(model: Any, optimizer: Any, device: str, seq_len: int, batch_size: int) -> float:
    """One step of training on random tokens; the loss."""
    ids = torch.randint(0, model.config.vocab_size, (batch_size, seq_len), device=device)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def run_load(source: Path, device: str) -> Figures:
    """Load into the card, compare every byte with safetensors, train, save, and load again."""
    from safetensors.torch import load_file

    from ckpt_tools.fsdp2 import load_checkpoint, load_optimizer, save_checkpoint, shard_model

    with one_rank(device) as mesh:
        model, again = build(sizes_of(source)), build(sizes_of(source))
        shard_model(model, mesh)
        load_checkpoint(model, source)
        expected = load_file(source / "model.safetensors")
        for name, parameter in model.named_parameters():
            local = parameter.to_local()
            check(local.device.type == device, f"{name} is on {local.device}")
            check(torch.equal(local.cpu(), expected[name]), f"{name} differs from the file")
        optimizer = torch.optim.AdamW(model.parameters())
        losses = [step(model, optimizer, device, 32, 2) for _ in range(2)]
        save_checkpoint(model, optimizer, source.parent / "saved", overwrite=True)
        shard_model(again, mesh)
        load_checkpoint(again, source.parent / "saved")
        load_optimizer(again, torch.optim.AdamW(again.parameters()), source.parent / "saved")
        pairs = zip(model.parameters(), again.parameters(), strict=True)
        check(all(torch.equal(a.to_local(), b.to_local()) for a, b in pairs), "a reload differs from what was saved")
        return {"tensors": len(expected), "losses": losses}


def run_smoke(source: Path, device: str, num_ranks: int) -> Figures:
    """`ckpt smoke` on the card: NCCL, compared with one process."""
    found = ckpt("smoke", source, "--nproc", num_ranks, "--device", device, "--steps", 2)
    check(found["ok"], f"smoke found {[each['code'] for each in found['findings']]}")
    return {name: found[name] for name in ("world_size", "device", "losses", "reference_losses", "max_grad_error")}


def run_memory(source: Path, device: str, case: str) -> Figures:
    """The most that tensors took in a step, beside what `estimate` says."""
    seq_len, batch_size = (SEQ_LEN, BATCH_SIZE) if device == "cuda" else (32, 2)
    flags = ("--mesh", "dp_shard=1", "--seq-len", seq_len, "--batch-size", batch_size, *CASES[case])
    estimated = ckpt("estimate", source, *flags)["per_rank"]["peak"]
    with one_rank(device) as mesh:
        model = prepared(source, mesh, case)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        step(model, optimizer, device, seq_len, batch_size)
        if device != "cuda":
            return {"estimated": estimated, "measured": None, "ratio": None}
        torch.cuda.reset_peak_memory_stats()
        step(model, optimizer, device, seq_len, batch_size)
        measured = torch.cuda.max_memory_allocated()
    return {"estimated": estimated, "measured": measured, "ratio": round(estimated / measured, 3)}


def prepared(source: Path, mesh: Any, case: str) -> Any:
    """The model of a case, sharded and loaded, in bf16 with f32 weights where they are trained."""
    from ckpt_tools import fsdp2

    model = build(sizes_of(source))
    if "--lora" in CASES[case]:
        model = model.bfloat16()
        if case == "qlora":
            fsdp2.quantise_linears(model)
        model = fsdp2.add_lora(model, {"peft_type": "LORA", "r": 16, "target_modules": "all-linear"})
    precision = fsdp2.Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = fsdp2.Policy(precision=precision, cpu_offload=case == "offload")
    plan = fsdp2.shard_model(model, mesh, policy, activation_checkpointing=case == "checkpointing")
    load = fsdp2.load_quantised if case == "qlora" else fsdp2.load_base if case == "lora" else fsdp2.load_checkpoint
    load(model, source)
    for name in plan.blocks if case == "compile" else ():
        model.get_submodule(name).compile()
    return model


def run_bandwidth(source: Path, device: str) -> Figures:
    """Bytes per second from a file that the page cache has into the card: best of three, each in turn."""
    from safetensors.torch import load_file

    from ckpt_tools.fsdp2 import load_checkpoint, shard_model

    path = source / "model.safetensors"
    path.read_bytes()

    def by_ckpt() -> object:
        model = build(sizes_of(source))
        shard_model(model, mesh)
        started = time.perf_counter()
        load_checkpoint(model, source)
        return started

    def by_safetensors() -> object:
        started = time.perf_counter()
        kept.append(load_file(path, device=device))
        return started

    def by_fastsafetensors() -> object:
        from fastsafetensors import SafeTensorsFileLoader, SingleGroup  # type: ignore[import-not-found]

        started = time.perf_counter()
        loader = SafeTensorsFileLoader(SingleGroup(), f"{device}:0" if device == "cuda" else device, nogds=True)
        loader.add_filenames({0: [str(path)]})
        files = loader.copy_files_to_device()
        kept.append({name: files.get_tensor(name) for name in files.key_to_rank_lidx})
        return started

    ways: dict[str, Callable[[], Any]] = {"ckpt": by_ckpt, "safetensors": by_safetensors}
    if importlib.util.find_spec("fastsafetensors"):
        ways["fastsafetensors"] = by_fastsafetensors
    kept: list[object] = []
    best = dict.fromkeys(ways, float("inf"))
    with one_rank(device) as mesh:
        for _ in range(3):
            for name, way in ways.items():
                started = way()
                if device == "cuda":
                    torch.cuda.synchronize()
                best[name] = min(best[name], time.perf_counter() - started)
                kept.clear()
    size = path.stat().st_size
    rates = {name: round(size / seconds / 1e9, 3) for name, seconds in best.items()}
    return {"bytes": size, "GB/s": rates, "absent": [] if "fastsafetensors" in ways else ["fastsafetensors"]}


def run_audit(source: Path, device: str) -> Figures:
    """A healthy model is silent through watch and audits; two broken ones are named."""
    from ckpt_tools.fsdp2 import audit, load_checkpoint, shard_model, watch

    with one_rank(device) as mesh:
        model = build(sizes_of(source))
        stale = torch.optim.AdamW(model.parameters())
        plan = shard_model(model, mesh)
        unloaded = {each.code for each in audit(model, phase="loaded", plan=plan)}
        load_checkpoint(model, source)
        optimizer = torch.optim.AdamW(model.parameters())
        with watch(model) as seen:
            step(model, optimizer, device, 32, 2)
            said = [
                each.code for each in (*audit(model, phase="stepped", plan=plan, optimizer=optimizer), *seen.findings)
            ]
        check(said == [], f"a healthy model: {said}")
        check("meta-param" in unloaded, f"a model that was not loaded: {sorted(unloaded)}")
        late = {each.code for each in audit(model, phase="stepped", plan=plan, optimizer=stale)}
        check("stale-optimizer" in late, f"an optimizer from before: {sorted(late)}")
    return {"events": len(seen.events)}


def run_tests(_source: Path, _device: str) -> Figures:
    """The tests that need a GPU."""
    files = [str(path) for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text()]
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-m", "gpu", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    last = (done.stdout.splitlines() or [done.stderr[-500:]])[-1]
    check(done.returncode == 0 and "passed" in last, last)
    return {"said": last}
