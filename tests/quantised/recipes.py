"""Makes the samples of this directory with the libraries, which test_samples decodes without them.

In `tests`, with the libraries as the tests named below say: python -m quantised.recipes [NAME …]
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save_file

SAMPLES = Path(__file__).parent / "samples"


def save(name: str, library: str, tensors: dict, wanted: dict, settings: dict, header: dict | None = None) -> None:
    """Write a sample: a checkpoint, what its tensors stand for (`wanted.…`), and its `quantization_config`."""
    about = {"quantization_config": json.dumps(settings), "library": library} | (header or {})
    own = {f"wanted.{fqn}": tensor.contiguous() for fqn, tensor in wanted.items()}
    save_file(tensors | own, SAMPLES / f"{name}.safetensors", metadata=about)


def gptq() -> None:
    """Every width, zeros anywhere; the last layer's inputs are ordered."""
    made, from_library = import_module("quantised.test_gptq"), "gptqmodel 7.7.0"
    torch.manual_seed(1)
    order = (torch.randperm(64, generator=torch.Generator().manual_seed(3)) // 32).int()
    for form in ("gptq", "gptq_v2"):
        tensors, wanted = {}, {}
        for stem, bits, index in (("a", 2, None), ("b", 3, None), ("c", 4, None), ("d", 8, None), ("e", 4, order)):
            layer = torch.nn.Linear(64, 32, bias=False)
            stored, decoded = made.packed(bits, 32, zeros=made.any_zeros, order=index, form=form, layer=layer)
            tensors |= {f"{stem}{fqn[1:]}": tensor for fqn, tensor in stored.items()}
            wanted[f"{stem}.weight"] = decoded
        own = made.settings(4, 32, checkpoint_format=form, desc_act=True, dynamic={"+:[abd]": {"bits": [2, 3, 8]}})
        save(form, from_library, tensors, wanted, own)


def awq() -> None:
    """One layer."""
    made = import_module("quantised.test_gptq")
    stored, wanted = made.awq(64, 32, 32)
    save("awq", "autoawq 0.2.9's packing in gptqmodel 7.7.0", stored, {"a.weight": wanted}, made.AWQ)


def modelopt() -> None:
    """A layer in 4 bits and one in 8."""
    made = import_module("quantised.test_modelopt")
    tensors, wanted = {}, {}
    for stem, make in (("a", made.four_bits), ("b", made.eight_bits)):
        stored, decoded = make(made.weight(8, 64))
        tensors |= {f"{stem}.{part}": tensor for part, tensor in stored.items()}
        wanted[f"{stem}.weight"] = decoded.bfloat16()
    layers = {"a": {"quant_algo": "NVFP4", "group_size": 16}, "b": {"quant_algo": "FP8"}}
    own = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    save("modelopt", f"nvidia-modelopt {version('nvidia-modelopt')}", tensors, wanted, own)


def compressed() -> None:
    """A layer in 4 bits and one in 8."""
    made = import_module("quantised.test_compressed")
    for case in ("nvfp4", "w4 zero"):
        stored, wanted, own = made.compressed(case, torch.bfloat16)
        name = case.replace(" ", "_")
        about = f"compressed-tensors {version('compressed-tensors')}"
        save(name, about, {f"a.{part}": tensor for part, tensor in stored.items()}, {"a.weight": wanted}, own)


def torchao() -> None:
    """Rows, groups with zero points, 8-bit floats; the last layer in 4 bits."""
    made, flat = (
        import_module("torchao.quantization"),
        import_module("torchao.prototype.safetensors.safetensors_support"),
    )
    torch.manual_seed(1)
    layers = {
        "a": made.Int8WeightOnlyConfig(),
        "b": made.Int8WeightOnlyConfig(granularity=made.PerGroup(32)),
        "c": made.Float8WeightOnlyConfig(),
        "d": made.IntxWeightOnlyConfig(
            weight_dtype=torch.int4,
            granularity=made.PerGroup(16),
            mapping_type=made.quant_primitives.MappingType.ASYMMETRIC,
        ),
    }
    model = torch.nn.ModuleDict({name: torch.nn.Linear(64, 32, bias=name == "a") for name in layers}).bfloat16()
    for name, config in layers.items():
        made.quantize_(model[name], config)
    tensors, header = flat.flatten_tensor_state_dict({n: t.detach() for n, t in model.state_dict().items()})
    wanted = {fqn: model.get_parameter(fqn) for fqn in model.state_dict()}
    wanted = {fqn: t.detach().clone() if fqn.endswith("bias") else t.dequantize() for fqn, t in wanted.items()}
    save("torchao", f"torchao {version('torchao')}", tensors, wanted, {"quant_method": "torchao"}, header)


if __name__ == "__main__":
    for chosen in sys.argv[1:] or ("gptq", "awq", "modelopt", "compressed"):
        globals()[chosen]()
