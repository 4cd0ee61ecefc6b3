"""GPTQ, AWQ and ModelOpt without their libraries: where settings are, and what is refused by name."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt_tools.cli import main

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "packing_format": "auto_round:gptqmodel"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


def ints(*shape, seed=1):
    made = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << 31), 1 << 31, shape, generator=made, dtype=torch.int64).int()


def gptq(num_inputs=64, num_outputs=32, bits=4, group=32, **others):
    groups = -(-num_inputs // group)
    parts = {
        "qweight": ints(num_inputs * bits // 32, num_outputs),
        "qzeros": torch.full((groups, num_outputs * bits // 32), 0x77777777, dtype=torch.int32),
        "scales": torch.ones(groups, num_outputs).half(),
        "g_idx": (torch.arange(num_inputs) // group).int(),
    }
    return {f"a.{name}": part for name, part in (parts | others).items() if part is not None}


def awq(**others):
    parts = {"qweight": ints(64, 4), "qzeros": ints(2, 4), "scales": torch.ones(2, 32).half()}
    return {f"a.{name}": part for name, part in (parts | others).items() if part is not None}


def fp4(**others):
    parts = {
        "weight": torch.zeros(4, 16, dtype=torch.uint8),
        "weight_scale": torch.ones(4, 2).to(torch.float8_e4m3fn),
        "weight_scale_2": torch.ones(()),
    }
    return {f"a.{name}": part for name, part in (parts | others).items() if part is not None}


def write(directory, tensors, settings, **config):
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return str(directory)


def gathered(hub, out):
    assert main(["gather", hub, str(out), "--dequantize", "--dtype", "f32", "-q"]) == 0
    return load_file(out / "model.safetensors")["a.weight"]


@pytest.mark.parametrize(
    ("stored", "settings", "what"),
    [
        (gptq(qzeros=None), GPTQ, "'a.qzeros' is missing"),
        (gptq(scales=None), GPTQ, "'a.scales' is missing"),
        (gptq(qweight=None), GPTQ, "is not part of a weight"),
        (gptq(g_idx=None), GPTQ | {"desc_act": True}, "'a.g_idx' is missing"),
        (gptq(g_idx=None), GPTQ | {"group_size": 64}, "'a.scales' is [2, 32], 'a.qweight' of [8, 32] needs [1, 32]"),
        (gptq(g_idx=None), GPTQ | {"group_size": 0}, "group_size 0"),
        (gptq(g_idx=torch.full((64,), 2, dtype=torch.int32)), GPTQ, "'a.g_idx' names group 2, of 2"),
        (gptq(g_idx=torch.full((64,), -1, dtype=torch.int32)), GPTQ, "'a.g_idx' names group -1, of 2"),
        (gptq(g_idx=torch.zeros(64, dtype=torch.int32)), GPTQ, "'a.g_idx' orders inputs, but config.json has"),
        (gptq(), GPTQ | {"group_size": 64}, "'a.scales' is [2, 32], 'a.qweight' of [8, 32] needs [1, 32]"),
        (gptq(g_idx=torch.zeros(63, dtype=torch.int32)), GPTQ | {"bits": 8}, "not a weight in 8 bits"),
        (gptq(g_idx=torch.zeros(64)), GPTQ, "'a.g_idx' is F32 [64]"),
        (gptq(qweight=ints(8, 32).float()), GPTQ, "'a.qweight' is F32 [8, 32], not a matrix of I32"),
        (gptq(qweight=ints(2, 8, 32)), GPTQ, "'a.qweight' is I32 [2, 8, 32], not a matrix"),
        (
            gptq(qzeros=ints(0, 4), scales=torch.ones(0, 32).half()),
            GPTQ,
            "'a.qzeros' is I32 [0, 4], not a matrix of I32",
        ),
        (gptq(qweight=ints(7, 32)), GPTQ, "not a weight in 4 bits"),
        (gptq(qzeros=ints(2, 3)), GPTQ, "not a weight in 4 bits"),
        ({f"embed_tokens{key[1:]}": each for key, each in gptq().items()}, GPTQ, "a quantised embedding"),
        (gptq(bits=8), GPTQ, "not a weight in 4 bits"),
        (gptq(num_inputs=48, bits=2, num_outputs=16), GPTQ | {"bits": 3}, "not a weight in 3 bits"),
        (gptq(), GPTQ | {"bits": 5}, "bits 5, which ckpt does not decode"),
        (gptq(), {"quant_method": "gptq"}, "bits None, which ckpt does not decode"),
        (gptq(), GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin', which ckpt does not decode"),
        (gptq(), GPTQ | {"format": "gptq_p"}, "checkpoint_format 'gptq_p'"),
        (gptq(), GPTQ | {"is_marlin_format": True}, "is_marlin_format True"),
        (gptq(), GPTQ | {"rotation": "hadamard"}, "rotation 'hadamard'"),
        (gptq(qzeros=torch.full((2, 4), 0x7F777777, dtype=torch.int32)), GPTQ, "readers of this format"),
        (gptq(), ROUND | {"packing_format": "auto_round:fp8_static"}, "packing_format 'fp8_static'"),
        (gptq(), ROUND | {"data_type": "mx_fp"}, "data_type 'mx_fp'"),
        (gptq(), ROUND | {"extra_config": {"a": {"bits": 8}}}, "not a weight in 8 bits"),
        (gptq(act_scales=torch.ones(1)), ROUND, "'a.act_scales' is not part"),
        (awq(), AWQ | {"version": "gemv"}, "version 'gemv', but ckpt only decodes AWQ's 'gemm'"),
        (awq(), AWQ | {"bits": 8}, "bits 8, but ckpt only decodes AWQ of 4"),
        (awq(), AWQ | {"group_size": 128}, "'a.scales' is [2, 32], 'a.qweight' of [64, 4] needs [1, 32]"),
        (awq(scales=torch.ones(2, 33).half()), AWQ, "'a.scales' is [2, 33]"),
        (awq(qzeros=ints(2, 5)), AWQ, "'a.qzeros' is [2, 5]"),
        (awq(g_idx=torch.zeros(64).int()), AWQ, "'a.g_idx' is present"),
        (awq() | {"act.scales": torch.ones(4)}, AWQ, "'act.scales' is not part of a weight"),
        (fp4(weight_scale_2=None), MODELOPT, "'a.weight_scale_2' is missing"),
        (fp4(weight_scale=None), MODELOPT, "belongs to no weight"),
        (fp4(weight=None), MODELOPT, "'a.weight' is missing"),
        (fp4(weight_scale=torch.ones(4, 2)), MODELOPT, "'a.weight_scale' is F32, but must be F8_E4M3"),
        (fp4(weight_scale=torch.ones(4, 1).to(torch.float8_e4m3fn)), MODELOPT, "'a.weight_scale' is [4, 1]"),
        (fp4(weight_scale_2=torch.ones(4)), MODELOPT, "not one F32 for each matrix"),
        (fp4(pre_quant_scale=torch.ones(32)), MODELOPT, "'a.pre_quant_scale' changes the inputs of a layer"),
        (fp4(), MODELOPT | {"quant_algo": "W4A16_AWQ"}, "quant_algo 'W4A16_AWQ', which ckpt does not decode"),
        (
            fp4(),
            MODELOPT | {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "W4A8_AWQ"}}},
            "quant_algo 'W4A8_AWQ'",
        ),
    ],
)
def test_what_cannot_be_decoded_is_refused(tmp_path, capsys, stored, settings, what):
    hub = write(tmp_path / "hub", stored, settings)
    assert main(["gather", hub, str(tmp_path / "out"), "--dequantize"]) in (2, 4)
    assert what in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "settings", "stored"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": False, "sym": True}, gptq()),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 32, "version": "GEMM", "zero_point": True}, awq()),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}, fp4()),
    ],
)
def test_settings_may_be_in_a_file_of_their_own(tmp_path, name, settings, stored):
    own = {"quantize_config.json": GPTQ, "quant_config.json": AWQ, "hf_quant_config.json": MODELOPT}[name]
    wanted = gathered(write(tmp_path / "hub", stored, own), tmp_path / "wanted")
    hub = tmp_path / "beside"
    write(hub, stored, None)
    (hub / "config.json").write_text("{}")
    (hub / name).write_text(json.dumps(settings))
    assert torch.equal(gathered(str(hub), tmp_path / "out"), wanted)
    assert not (tmp_path / "out" / name).exists()  # its readers would believe it


def test_groups_follow_each_other_where_no_order_is(tmp_path):
    stored = gptq(scales=torch.arange(1, 65).reshape(2, 32).half())
    wanted = gathered(write(tmp_path / "hub", stored, GPTQ), tmp_path / "wanted")
    del stored["a.g_idx"]
    assert torch.equal(gathered(write(tmp_path / "other", stored, GPTQ), tmp_path / "out"), wanted)


def test_layers_of_gpt2_are_the_other_way_around(tmp_path):
    stored = gptq(64, 64)  # a square: the shape would not show it
    wanted = gathered(write(tmp_path / "hub", stored, GPTQ, model_type="llama"), tmp_path / "wanted")
    found = gathered(write(tmp_path / "other", stored, GPTQ, model_type="gpt2"), tmp_path / "out")
    assert torch.equal(found, wanted.T)
    assert not torch.equal(found, wanted)


def test_bits_may_differ_by_layer(tmp_path):
    own = GPTQ | {"group_size": 64, "dynamic": {"+:.*a": {"bits": 8, "group_size": 32}}}
    found = gathered(write(tmp_path / "hub", gptq(bits=8), own), tmp_path / "out")
    assert found.abs().max() > 16
