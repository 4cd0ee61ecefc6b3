"""Whatever names, shapes and settings a source has: an export, findings, or an error in three parts; no traceback."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings, strategies as st
from samples import examples, safetensors_bytes

from ckpt_tools import api
from ckpt_tools.checkpoint.dtypes import BY_NAME
from ckpt_tools.errors import CkptError

PARTS = st.sampled_from(
    [
        "base_model.model",
        "model",
        "layers.0",
        "q",
        "k",
        "experts",
        "base_layer",
        "original_module",
        "modules_to_save.default",
        "lora_A",
        "lora_B",
        "default",
        "other",
        "weight",
        "bias",
        "lora_embedding_A",
        "lora_embedding_B",
        "lora_magnitude_vector",
        "hada_w1_a",
        "hada_w1_b",
        "hada_w2_a",
        "hada_w2_b",
        "hada_t1",
        "lokr_w1",
        "lokr_w2",
        "lokr_w2_a",
        "lokr_w2_b",
        "lokr_t2",
        "oft_R",
        "boft_R",
        "boft_s",
        "oft_blocks",
        "rescale",
        "alpha",
        "dora_scale",
        "diff",
        "diff_b",
        "lora_down",
        "lora_up",
        "lora_mid",
        "lora_unet_q",
        "lora_a",
        "magnitude",
        "lora_E",
        "_orig_mod",
        "transformer",
        "diffusion_model",
    ]
)
NAMES = st.lists(PARTS, min_size=1, max_size=6).map(".".join)
SHAPES = st.lists(st.integers(0, 6), max_size=4).map(tuple)
DTYPES = st.sampled_from(["F32", "BF16", "F16", "F64", "I64", "U8", "BOOL", "F8_E4M3", "C64"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 40) | st.floats() | st.just(10**400) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)
FIELDS = st.sampled_from(
    [
        "peft_type",
        "r",
        "lora_alpha",
        "alpha",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "target_modules",
        "target_parameters",
        "modules_to_save",
        "bias",
        "oft_block_size",
        "block_share",
        "use_cayley_neumann",
        "coft",
        "eps",
        "num_cayley_neumann_terms",
        "decompose_factor",
        "use_effective_conv2d",
        "init_lora_weights",
        "base_model_name_or_path",
        "task_type",
        "layers_to_transform",
    ]
)
CONFIGS = st.dictionaries(FIELDS, VALUES, max_size=6) | st.fixed_dictionaries(
    {"r": st.integers(1, 4), "lora_alpha": st.integers(1, 9), "alpha": st.integers(1, 9)},
    optional={"target_parameters": st.lists(NAMES, max_size=2), "use_rslora": st.booleans()},
)
TENSORS = st.dictionaries(NAMES, st.tuples(DTYPES, SHAPES), min_size=1, max_size=6)


@st.composite
def likely(draw):
    """Factors that belong together, so that more than the reader is reached."""
    rank, width, height = (draw(st.integers(1, 5)) for _ in range(3))
    tensors = {}
    for path in draw(st.lists(st.sampled_from(["model.layers.0.q", "model.layers.1.q", "mlp.experts"]), min_size=1)):
        root = draw(st.sampled_from(["", "base_model.model.", "_orig_mod.base_model.model."]))
        name = draw(st.sampled_from(["", ".default"]))
        tensors[f"{root}{path}.lora_A{name}.weight"] = ("F32", (rank, width))
        tensors[f"{root}{path}.lora_B{name}.weight"] = ("F32", (height, rank))
    return tensors | draw(st.dictionaries(NAMES, st.tuples(DTYPES, SHAPES), max_size=2))


@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.too_slow])
@given(
    TENSORS | likely(),
    CONFIGS,
    st.none() | st.integers(0, 4),
    st.sampled_from(["adapter_model", "x"]),
    st.sampled_from(["peft", "peft", "peft", "diffusers", "kohya", "comfyui"]),
    st.dictionaries(
        st.sampled_from(["ss_network_alpha", "ss_network_args", "lora_adapter_metadata", "software"]),
        st.text(max_size=5) | VALUES.map(json.dumps),
        max_size=3,
    ),
)
def test_export_of_anything_ends_in_a_result_or_an_error_in_three_parts(tensors, config, alpha, stem, target, metadata):
    metadata = {key: value.encode("utf-8", "replace").decode() for key, value in metadata.items()}
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        (root / "a").mkdir()
        stored = {
            name: (dtype, shape, bytes(range(1, 8)) * (BY_NAME[dtype].num_bytes(math.prod(shape)) // 7 + 1))
            for name, (dtype, shape) in tensors.items()
        }
        stored = {name: (d, s, raw[: BY_NAME[d].num_bytes(math.prod(s))]) for name, (d, s, raw) in stored.items()}
        (root / "a" / f"{stem}.safetensors").write_bytes(safetensors_bytes(stored, metadata=metadata))
        (root / "a" / "adapter_config.json").write_text(json.dumps(config))
        try:
            result = api.export_lora(root / "a", root / "out", to=target, alpha=alpha)
        except CkptError:
            assert not (root / "out").exists()
            return
        assert (root / "out").exists() == result.ok
        if result.ok and target == "peft":
            json.loads((root / "out" / "adapter_config.json").read_text())
