"""Compare a merge with W + (alpha/r)·B·A in torch, one rounding, for every tensor. usage: BASE ADAPTER MERGED"""

import sys
from pathlib import Path

import torch
from lora import ALPHA, RANK, is_adapted
from safetensors import safe_open

base, adapter, merged = map(Path, sys.argv[1:])
num = 0
with safe_open(adapter / "adapter_model.safetensors", framework="pt") as factors:
    for file in sorted(base.glob("*.safetensors")):
        with safe_open(file, framework="pt") as before, safe_open(merged / file.name, framework="pt") as after:
            for name in before.keys():  # noqa: SIM118
                expected = before.get_tensor(name)
                if is_adapted(name):
                    path = f"base_model.model.{name.removesuffix('.weight')}"
                    a, b = (factors.get_tensor(f"{path}.lora_{letter}.weight") for letter in "AB")
                    exact = expected.float() + (b @ a) * (ALPHA / RANK)
                    # A step of bfloat16; where W and its change cancel, float32's own rounding of the sum is more.
                    products = (b.abs() @ a.abs()) * (ALPHA / RANK)
                    step = exact.abs() * 2**-7 + (expected.float().abs() + RANK * products) * 2**-24
                    expected = exact.to(expected.dtype)
                    if not bool(((after.get_tensor(name).float() - exact).abs() <= step).all()):
                        sys.exit(f"{name} is not the merge")
                    num_other = int((after.get_tensor(name) != expected).sum())
                    if num_other > expected.numel() // 1000:  # sums in another order, on the edge of a step
                        sys.exit(f"{name}: {num_other} of {expected.numel()} elements are rounded otherwise")
                elif not torch.equal(after.get_tensor(name), expected):
                    sys.exit(f"{name} is not the base's")
                num += 1
print(f"{num} tensors compared")
