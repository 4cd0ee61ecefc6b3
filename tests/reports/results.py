"""Results of every command, made by hand and full of names that want to be markup, and their pages."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from ckpt_tools.checkpoint.dtypes import BY_NAME
from ckpt_tools.checkpoint.entries import BlobEntry, ByteSpan, Checkpoint, Chunk, Finding, TensorEntry
from ckpt_tools.checkpoint.layout import Box, Layout, Mesh, Shard
from ckpt_tools.checkpoint.summarise import Summary, overlay, summarise
from ckpt_tools.checks.diff import Change, Difference
from ckpt_tools.checks.stats import Stats, TensorStats
from ckpt_tools.checks.updates import Update
from ckpt_tools.checks.verify import Unchecked, Verification
from ckpt_tools.cli.diff import diff_page
from ckpt_tools.cli.estimate import estimate_page
from ckpt_tools.cli.inspection import build_page
from ckpt_tools.cli.preflight import preflight_page
from ckpt_tools.cli.runs import tending_page
from ckpt_tools.cli.smoke import smoke_page
from ckpt_tools.cli.stats import stats_page
from ckpt_tools.cli.verify import verify_page
from ckpt_tools.cli.views.page import Excerpt, Page, PageSection, findings_section
from ckpt_tools.cli.views.write import failed_page, unfinished_page
from ckpt_tools.estimate import Estimate
from ckpt_tools.estimate.case import Case, Margin
from ckpt_tools.estimate.report import CaseEstimate, Memory, Moment
from ckpt_tools.preflight.report import CHECKS, CheckResult, PreflightReport
from ckpt_tools.preflight.smoke.report import PHASES, PhaseResult, RankMemory, ReloadResult, SmokeReport
from ckpt_tools.runs.manage import PruneResult
from ckpt_tools.runs.retention import Rules, RunCheckpoint, State, plan_retention
from ckpt_tools.transfer.statistics import Moments
from ckpt_tools.transfer.value_counts import Counts

HOSTILE = (
    "</script><img src=x onerror=window.hit=1>",
    "<!--<script>window.hit=1</script>",
    "a\u202egnp.exe",
    "nul\0byte",
    "long" * 2500,
    "'\"><svg onload=window.hit=1>",
    "{{ 7*7 }}{% raw %}",
    "line\u2028\u2029end\r\n",
    "\ud800 alone",
    "javascript:window.hit=1",
    "&lt;b&gt;&amp;",
)
FINDINGS = tuple(
    Finding.error(("bad-item", "damaged-data")[i % 2], f"__{i}_0.distcp", f"tensor {name!r}: wrong", f"mend {name!r}")
    for i, name in enumerate(HOSTILE)
)


def whole(fqn: str, *shape: int, dtype: str = "F32", file: str = "model.safetensors") -> TensorEntry:
    span = ByteSpan(file=file, offset=64, nbytes=BY_NAME[dtype].num_bytes(1))
    chunk = Chunk(box=Box((0,) * len(shape), shape), span=span)
    return TensorEntry(fqn=fqn, dtype=BY_NAME[dtype], shape=shape, chunks=(chunk,))


def model(num_layers: int = 4) -> Checkpoint:
    names = (("attn.q.weight", (64, 64)), ("mlp.up.weight", (256, 64)), ("mlp.down.weight", (64, 256)), ("norm", (64,)))
    layers = [whole(f"model.layers.{i}.{name}", *shape) for i in range(num_layers) for name, shape in names]
    tensors = (whole("model.embed.weight", 100, 64), *layers, *(whole(f"hostile.{name}", 8, 8) for name in HOSTILE))
    blob = BlobEntry(fqn=HOSTILE[0], span=ByteSpan(file=HOSTILE[1], offset=0, nbytes=9))
    return Checkpoint(root="m", format="hf", tensors=tensors, blobs=(blob,), files={"model.safetensors": 9000})


def sharded(mesh: str = "dp_shard=4,tp=2", checkpoint: Checkpoint | None = None) -> Summary:
    checkpoint = checkpoint or model()
    axes = tuple((name, int(size)) for name, size in (axis.split("=") for axis in mesh.split(",")))
    placements = {
        t.fqn: {"dp_shard": Shard(0)} | ({"tp": Shard(1)} if len(t.shape) > 1 and "tp" in mesh else {})
        for t in checkpoint.tensors
    }
    cut = overlay(checkpoint, Layout(mesh=Mesh(axes), placements=placements))
    return summarise(replace(cut, blobs=checkpoint.blobs), path=HOSTILE[0], mesh_source="overlay")


def verification(**changes) -> Verification:
    found = replace(FINDINGS[0], tensor="model.layers.3.mlp.up.weight")
    found = replace(found, file="part/__37_0.distcp")
    strange = replace(FINDINGS[1], file=HOSTILE[0])
    result = Verification(
        level="data",
        tensors=7,
        chunks=9,
        nbytes=99,
        unchecked=(),
        findings=(found, strange, *FINDINGS[2:]),
        files=tuple(f"part/__{rank}_0.distcp" for rank in range(40)),
    )
    return replace(result, **changes)


def stats() -> Stats:
    moments = Moments(num_elems=4, min=-1.0, max=2.0, mean=0.5, std=1.0, histogram=())
    names = ("layers.0.up", "layers.1.up", "embed", *HOSTILE)
    rows = [
        TensorStats(
            fqn=fqn,
            dtype="F32",
            shape=(4,),
            moments=None if fqn == HOSTILE[3] else moments,
            counts=Counts(num_elems=4, num_zero=1),
            update=Update(num_elems=4, num_changed=i % 3, change=0.1, ours=1.0, theirs=float(i), product=1.0),
        )
        for i, fqn in enumerate(names)
    ]
    return Stats(tensors=tuple(rows), findings=FINDINGS, not_checked=(HOSTILE[1],), only_in_other=HOSTILE)


def difference(**changes) -> Difference:
    changed = [Change(fqn=f"l.{i}.{k}", what="differs", relative=10.0**-i) for i in range(5) for k in ("up", "down")]
    changed += [Change(fqn=HOSTILE[0], what="dtype F32, BF16"), Change(fqn="l.2.experts.7.up", what="x", relative=0.5)]
    result = Difference(
        only_in_a=HOSTILE, only_in_b=("b",), changed=tuple(changed), num_equal=3, notes=("not the step",)
    )
    return replace(result, **changes)


def case(fits: bool | None, peak: int = 60 << 30) -> CaseEstimate:
    at_peak = {"params": peak // 2, "activations": peak // 4}
    walked = [("forward", i) for i in range(6)] + [("backward", 5 - i) for i in range(6)]
    moments = [
        Moment(phase=phase, block=f"layers.{i}.{HOSTILE[0]}", held={"params": peak // 2, "activations": i * peak // 20})
        for phase, i in walked
    ]
    moments.append(Moment(phase="step", block="", held=at_peak))
    sizes = dict.fromkeys(("params", "grads", "optimizer", "activations", "gathered"), peak // 4)
    margin = Margin(context=1 << 30, workspace=0, nccl=0, fragmentation=0)
    memory = Memory(**sizes, peak=peak, at_peak=at_peak, moments=tuple(moments))
    return CaseEstimate(
        case=Case(), formula=memory, tracked=None, margin=margin, fits=fits,
        why_not_tracked="there is no config", doubt="who knows" if fits is None else None,
    )  # fmt: skip


def estimate(*fits: bool | None, gpu_memory: int | None = 80 * 10**9) -> Estimate:
    return Estimate(model=HOSTILE[0], params=7 * 10**9, cases=tuple(map(case, fits)), gpu_memory=gpu_memory)


def smoke(**changes) -> SmokeReport:
    result = SmokeReport(
        source=HOSTILE[0],
        model="Llama",
        world_size=2,
        mesh="dp_shard=2",
        strategy="full_shard",
        device="cpu",
        phases=tuple(
            PhaseResult(name=name, ok=True, seconds=0.1, what=HOSTILE[1], memory_bytes=(i + 3) << 28)
            for i, name in enumerate(PHASES)
        ),
        grad_errors={f"model.layers.{i}.{name}": 1e-7 * i for i in range(3) for name in ("up", "down", HOSTILE[0])}
        | {HOSTILE[5]: float("nan")},
        losses=(4.0, 3.5, float("nan"), 3.0),
        reference_losses=(4.0, 3.5, 3.25, 3.0),
        max_grad_error=1e-7,
        reload_same_world=ReloadResult(ok=True, mesh="dp_shard=2", loss=1.0, saved_loss=1.0, bitwise=True),
        memory=tuple(RankMemory(rank=rank, params=5, grads=5, optimizer=10, peak=1 << 30) for rank in range(2)),
    )
    return replace(result, **changes)


def preflight(**changes) -> PreflightReport:
    result = PreflightReport(
        config=HOSTILE[0],
        framework="torchtitan",
        mesh="dp_shard=8",
        spec=None,
        checks=tuple(CheckResult(name=name, ok=True, seconds=0.5, what=HOSTILE[3]) for name in CHECKS),
        findings=(),
    )
    return replace(result, **changes)


def pruned() -> PruneResult:
    """A run's folder with a checkpoint of every state."""
    states = get_args(State)
    found = [
        RunCheckpoint(
            name=f"{HOSTILE[0]}-{step}", series="s", step=step, state=state, metric=1 / step, nbytes=step, why=state
        )
        for step, state in enumerate((*states, *states), 1)
    ]
    planned = plan_retention(found, Rules(last=1, best=2))
    quarantine = {HOSTILE[1]: "2026-01-01T00:00:00+00:00"}
    return PruneResult(path=HOSTILE[2], checkpoints=planned, quarantine=quarantine, findings=FINDINGS, dry_run=True)


def lines() -> Excerpt:
    """Lines of a config, with a finding on each."""
    return Excerpt(HOSTILE[0], [(10**i, name, FINDINGS[i : i + 1]) for i, name in enumerate(HOSTILE)])


def pages() -> dict[str, Page]:
    """A page of every command, with something in each of its sections."""
    return {
        "inspect": build_page(sharded("dp_replicate=2,dp_shard=64"), stored=sharded()),
        "plain": build_page(summarise(model(), path="m")),
        "verify": verify_page(verification(unchecked=(Unchecked(what=HOSTILE[3]),)), HOSTILE[0]),
        "diff": diff_page(difference(terms=("--atol 1",)), "a", HOSTILE[0]),
        "stats": stats_page(stats(), HOSTILE[0], "before"),
        "estimate": estimate_page(estimate(True, False, None)),
        "smoke": smoke_page(smoke(findings=FINDINGS, notes=("half",), stacks={0: "at\n" + HOSTILE[0]})),
        "preflight": preflight_page(
            preflight(findings=FINDINGS, not_checked=(HOSTILE[1],), estimate=estimate(True), smoke=smoke())
        ),
        "lines": Page(
            "preflight", "x", [PageSection("In the config", [lines()]), *findings_section(FINDINGS)], "bad", "no"
        ),
        "watch": tending_page(pruned(), "watch"),
        "unfinished": unfinished_page("verify", HOSTILE[0]),
        "failed": failed_page("verify", HOSTILE[0], ValueError(HOSTILE[1])),
    }
