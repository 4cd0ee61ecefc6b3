"""Makes the samples of this directory with the libraries, which test_samples decodes without them.

In `tests`: python -m quantised.recipes [NAME …]. What a recipe needs comes with pip install --no-deps --target DIR, and
DIR in PYTHONPATH. `gptq`, `awq`: GPTQModel's source and `logbar pypcre device-smi tokenicer threadpoolctl defuser`.
`modelopt`: nvidia-modelopt omegaconf antlr4-python3-runtime==4.9.3 pulp. `compressed`: compressed-tensors loguru.
`auto_round`: auto-round py-cpuinfo threadpoolctl, and `datasets` with what it needs.
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
IN, OUT = 96, 32


def save(name: str, library: str, tensors: dict, wanted: dict, settings: dict, header: dict | None = None) -> None:
    """Write a sample: a checkpoint, what its tensors stand for (`wanted.…`), and its `quantization_config`."""
    about = {"quantization_config": json.dumps(settings), "library": library} | (header or {})
    own = {f"wanted.{fqn}": tensor.contiguous() for fqn, tensor in wanted.items()}
    save_file({k: v.contiguous() for k, v in tensors.items()} | own, SAMPLES / f"{name}.safetensors", metadata=about)


def numbers(seed: int, bits: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, 1 << bits, shape, generator=torch.Generator().manual_seed(seed))


def gptq() -> None:
    """Every width, groups of any size, the last one of which may be short, zeros anywhere; inputs that are ordered."""
    order = (torch.randperm(IN, generator=torch.Generator().manual_seed(3)) // 32).int()
    widths = [(bits, 32, None) for bits in (2, 3, 4, 8)]
    cases = [*widths, (3, -1, None), (4, -1, None), (4, 64, None), (8, 64, None), (3, 32, order), (4, 32, order)]
    _gptq("gptq", cases, "gptq", torch.float16)
    _gptq("gptq_v2", [*widths, (4, 64, None), (4, 32, order)], "gptq_v2", torch.float16)
    _gptq("gptq_bf16", [(4, 32, None)], "gptq", torch.bfloat16)


def _gptq(name: str, cases: list, form: str, dtype: torch.dtype) -> None:
    linear = import_module("gptqmodel.nn_modules.qlinear.torch").TorchLinear
    model = import_module("gptqmodel.utils.model")
    tensors, wanted, dynamic = {}, {}, {}
    torch.manual_seed(1)
    for stem, (bits, group, order) in zip("abcdefghij", cases, strict=False):
        width = IN if group == -1 else group
        zeros = numbers(bits, bits, OUT, -(-IN // width)).float()
        zeros = zeros if group > 0 else torch.full_like(zeros, 2.0 ** (bits - 1))
        module = linear(
            bits=bits, group_size=group, sym=False, desc_act=False, in_features=IN, out_features=OUT, bias=False,
            pack_dtype=torch.int32, register_buffers=True,
        )  # fmt: skip
        index = torch.arange(IN, dtype=torch.int32) // width if order is None else order
        module.pack_original(torch.nn.Linear(IN, OUT, bias=False), torch.rand(zeros.shape) * 0.01 + 0.001, zeros, index)
        module.scales = module.scales.to(dtype)
        if form == "gptq":
            config = type("Config", (), {"bits": bits, "pack_dtype": torch.int32})
            model.convert_gptq_v2_to_v1_format_module(module, config)
        names = ("qweight", "qzeros", "scales", "g_idx")
        tensors |= {f"{stem}.{name}": getattr(module, name).clone() for name in names}
        if form == "gptq":
            model.convert_gptq_v1_to_v2_format_module(module, bits, torch.int32)
        module.post_init()
        wanted[f"{stem}.weight"] = module.dequantize_weight().T
        dynamic[f"+:{stem}"] = {"bits": bits, "group_size": group}
    own = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "checkpoint_format": form}
    own |= {"meta": {"quantizer": ["gptqmodel:7.7.0"]}, "dynamic": dynamic}
    save(name, "gptqmodel 7.7.0", tensors, wanted, own)


def awq() -> None:
    """One layer in groups, and one of a single group."""
    library = import_module("gptqmodel.quantization.awq.utils.packing_utils")
    for name, group in (("awq", 32), ("awq_whole", -1)):
        width = 64 if group == -1 else group
        scales = (torch.rand(64 // width, 32, generator=torch.Generator().manual_seed(5)) * 0.01).half()
        qweight, qzeros = library.pack_awq(numbers(5, 4, 64, 32), numbers(6, 4, 64 // width, 32), 4)
        wanted = {"a.weight": library.dequantize_gemm(qweight, qzeros, scales, 4, width).T}
        stored = {"a.qweight": qweight, "a.qzeros": qzeros, "a.scales": scales}
        own = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "GEMM", "zero_point": True}
        save(name, "autoawq 0.2.9's packing in gptqmodel 7.7.0", stored, wanted, own)


def auto_round() -> None:
    """Every width, with zeros in the middle and anywhere."""
    less_one = import_module("auto_round_extension.torch.qlinear_torch_zp")
    as_they_are = import_module("auto_round_extension.torch.qlinear_torch")
    for packing, kind in (("auto_gptq", less_one), ("gptq", less_one), ("", as_they_are)):
        tensors, wanted, extra = {}, {}, {}
        torch.manual_seed(1)
        for stem, bits, sym in zip("abcdef", (2, 3, 4, 8, 3, 4), (False,) * 4 + (True,) * 2, strict=True):
            scales = torch.rand(OUT, IN // 32) * 0.01 + 0.001
            zeros = 1 << (bits - 1) if sym else numbers(bits, bits, *scales.shape).float()
            layer = kind.QuantLinear(bits, 32, IN, OUT, bias=False)
            layer.device = "cpu"
            layer.pack(torch.nn.Linear(IN, OUT, bias=False), scales, zeros, None, device="cpu")
            wanted[f"{stem}.weight"] = layer(torch.eye(IN, dtype=torch.float16)).T
            tensors |= {f"{stem}.{name}": tensor for name, tensor in layer.state_dict().items()}
            extra[stem] = {"bits": bits}
        own = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False, "data_type": "int"}
        own |= {"packing_format": f"auto_round:{packing}".rstrip(":"), "extra_config": extra}
        name = f"auto_round_{packing}".rstrip("_")
        save(name, f"auto-round {version('auto-round')}", tensors, wanted, own)


def modelopt() -> None:
    """4 bits, of a matrix and of experts; 8 bits with one scale, one for each row, and one for 32 elements."""
    made = import_module("modelopt.torch.quantization.qtensor")
    utils = import_module("modelopt.torch.export.quant_utils")

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(3))

    def four_bits(given: torch.Tensor) -> tuple[dict, torch.Tensor]:
        each, of_all = made.NVFP4QTensor.get_weights_scaling_factor(given, 16)
        packed = utils.to_quantized_weight(given, each, "nvfp4", of_all, 16)
        wrapped = made.NVFP4QTensor(given.shape, torch.bfloat16, packed)
        found = wrapped.dequantize(torch.bfloat16, scale=each, double_scale=of_all, block_sizes={-1: 16})
        return {"weight": packed, "weight_scale": each, "weight_scale_2": of_all}, found

    plain, experts = weight(8, 64), [four_bits(part) for part in weight(3, 8, 32)]
    one, rows, mx = plain.abs().amax() / 448, plain.abs().amax(1) / 448, made.MXFP8QTensor
    exponents = mx.get_weights_scaling_factor(plain)
    eight, of_rows, of_groups = (
        {"weight": utils.to_quantized_weight(plain, scale, kind), "weight_scale": scale}
        for scale, kind in ((one, "fp8"), (rows, "fp8_pc_pt"), (exponents, "mxfp8"))
    )
    groups = mx(plain.shape, torch.float32, of_groups["weight"]).dequantize(torch.float32, scale=exponents)
    layers = {
        "a": four_bits(plain),
        "b": (eight, utils.from_quantized_weight(eight["weight"], one, "fp8", torch.float32).bfloat16()),
        "c": (of_rows, (of_rows["weight"].float() * rows[:, None]).bfloat16()),
        "d": (of_groups, groups.bfloat16()),
        "e": ({part: torch.stack([s[part] for s, _ in experts]) for part in experts[0][0]},
              torch.stack([found for _, found in experts])),
    }  # fmt: skip
    tensors = {f"{stem}.{part}": tensor for stem, (parts, _) in layers.items() for part, tensor in parts.items()}
    tensors |= {"a.input_scale": torch.ones(()), "k_proj.k_scale": torch.ones(1)}  # of activations: left out
    kinds = {"a": "nvfp4", "b": "fp8", "c": "fp8_pc_pt", "d": "mxfp8", "e": "nvfp4"}
    sizes = {f"{stem}.awq_block_size": 16 for stem in "ae"}
    own = utils.process_layer_quant_config({f"{stem}.quantization": kind for stem, kind in kinds.items()} | sizes)
    convert = import_module("modelopt.torch.export.convert_hf_config").convert_hf_quant_config_format
    settings = convert({"quantization": own, "producer": {"name": "modelopt"}})
    wanted = {f"{stem}.weight": found for stem, (_, found) in layers.items()}
    save("modelopt", f"nvidia-modelopt {version('nvidia-modelopt')}", tensors, wanted, settings)


COMPRESSED = {  # name: (format, strategy, bits, what else); the strategies' floats have "fp" or "float" in their format
    "tensor": ("float-quantized", "tensor", 8, {}),
    "channel": ("float-quantized", "channel", 8, {}),
    "block": ("float-quantized", "block", 8, {"block_structure": [8, 20]}),
    "int8": ("int-quantized", "channel", 8, {}),
    "int8_zero": ("int-quantized", "channel", 8, {"symmetric": False}),
    "w2": ("pack-quantized", "group", 2, {"group_size": 20}),
    "w4": ("pack-quantized", "group", 4, {"group_size": 8}),
    "w4_channel": ("pack-quantized", "channel", 4, {}),
    "w4_zero": ("pack-quantized", "group", 4, {"group_size": 8, "symmetric": False}),
    "w8": ("pack-quantized", "group", 8, {"group_size": 20}),
    "nvfp4": ("nvfp4-pack-quantized", "tensor_group", 4, {"group_size": 16}),
    "mxfp4": ("mxfp4-pack-quantized", "group", 4, {"group_size": 32}),
    "mxfp8": ("mxfp8-quantized", "group", 8, {"group_size": 32}),
}


def compressed() -> None:
    """Every format and strategy; scales in bfloat16, and of three in float32."""
    library = import_module("compressed_tensors.quantization")
    utils = import_module("compressed_tensors.quantization.utils")
    compressors = import_module("compressed_tensors.compressors").BaseCompressor
    for name, (form, strategy, bits, others) in COMPRESSED.items():
        kind = "float" if "fp" in form or "float" in form else "int"
        own = library.QuantizationArgs(num_bits=bits, type=kind, strategy=strategy, **others)
        scheme = library.QuantizationScheme(targets=["Linear"], weights=own)
        rows, columns = 24, 64 if "fp" in form else 40
        dtype = torch.float32 if name in ("tensor", "int8_zero", "w4") else torch.bfloat16
        weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(3)).to(dtype)
        of_all = utils.generate_gparam(weight.min(), weight.max()) if name == "nvfp4" else None
        grid = {"tensor": (rows, columns), "channel": (1, columns), "block": others.get("block_structure")}
        high, wide = grid.get(strategy, (1, others.get("group_size")))
        parts = weight.reshape(rows // high, high, columns // wide, wide)
        ends = [end.reshape(1) if end.numel() == 1 else end for end in (parts.amin((1, 3)), parts.amax((1, 3)))]
        scale, zero = utils.calculate_qparams(*ends, own, global_scale=of_all)
        given = {"weight": weight, "weight_scale": scale.to(dtype), "weight_zero_point": zero}
        given |= {} if of_all is None else {"weight_global_scale": of_all}
        compressor = compressors.get_value_from_registry(form)
        stored = compressor.compress(given, scheme)
        wanted = {"a.weight": compressor.decompress(stored, scheme)["weight"]}
        settings = {"quant_method": "compressed-tensors", "format": form}
        settings["config_groups"] = {"group_0": json.loads(scheme.model_dump_json())}
        tensors = {f"a.{part}": tensor for part, tensor in stored.items()}
        save(name, f"compressed-tensors {version('compressed-tensors')}", tensors, wanted, settings)


def torchao() -> None:
    """Rows, groups with zero points, 8-bit floats; the last layer in 4 bits."""
    made = import_module("torchao.quantization")
    flat = import_module("torchao.prototype.safetensors.safetensors_support")
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
    for chosen in sys.argv[1:] or ("gptq", "awq", "auto_round", "modelopt", "compressed"):
        globals()[chosen]()
