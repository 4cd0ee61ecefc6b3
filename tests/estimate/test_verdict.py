"""Whether a case fits: yes, no, and not known where the figures cannot carry a verdict."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckpt_tools.checkpoint.layout import parse_mesh
from ckpt_tools.cli import main
from ckpt_tools.estimate.case import Case, Margin
from ckpt_tools.estimate.report import Memory
from ckpt_tools.estimate.run import judge

MARGIN = Margin(context=10, workspace=0, nccl=0, fragmentation=0)
MEMORY = Memory(
    params=0, grads=0, optimizer=0, activations=80, gathered=20, peak=100, at_peak={"activations": 80, "gathered": 20}
)
PLAIN, TP = Case(), Case(mesh=parse_mesh("dp_shard=2,tp=8"))


@pytest.mark.parametrize(
    ("case", "is_tracked", "device", "fits"),
    [
        (PLAIN, True, 110, True),
        (PLAIN, True, 109, False),
        (replace(PLAIN, offload=True), True, 110, True),  # tracked: within a tenth of real runs
        (replace(PLAIN, offload=True), False, 110, None),
        (replace(PLAIN, offload=True), False, 179, None),
        (replace(PLAIN, offload=True), False, 180, True),
        (replace(PLAIN, offload=True), False, 109, False),
        (TP, True, 110, True),
        (TP, True, 109, None),  # 70 of the activations may be cut
        (TP, True, 40, None),
        (TP, True, 39, False),
        (replace(TP, sequence_parallel=True), True, 109, False),  # said to be cut, and counted so
        (replace(TP, sequence_parallel=True), False, 110, None),  # the formula alone
        (replace(TP, sequence_parallel=True), False, 160, True),
        (replace(PLAIN, compile=True), True, 109, None),
        (replace(PLAIN, compile=True), True, 69, False),
        (replace(PLAIN, offload=True, lora=8, quantize="nf4"), True, 110, None),
    ],
)
def test_verdict_is_given_only_where_the_figures_carry_it(case, is_tracked, device, fits):
    found, doubt = judge(case, MEMORY, MARGIN, device, is_tracked=is_tracked)
    assert found is fits
    assert (doubt is not None) == (fits is None)


def test_estimate_of_a_doubtful_case_is_not_green(capsys):
    model = ["--params", "70B", "--layers", "80", "--hidden", "8192", "--world-size", "2"]
    flags = ["--quantize", "nf4", "--lora", "--offload", "--activation-checkpointing", "--gpu-memory", "12GB", "-q"]
    code = main(["estimate", *model, *flags])
    shown = capsys.readouterr().out
    assert code == 3
    assert "not known whether it fits" in shown
    assert "does NOT fit" not in shown
