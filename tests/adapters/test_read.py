"""Adapters out of files of real writers: which modules, which factors, which alpha, and who said it."""

from __future__ import annotations

import json
import math
import re
import shlex
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from adapters import families, lycoris_worlds
from arrays import to_tensor
from formats.saved import save_ranks
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors.torch import load_file, save_file
from samples import examples, safetensors_bytes
from torch.distributed.tensor import Shard

from ckpt_tools import api
from ckpt_tools.adapters.read.opening import load, read_adapter
from ckpt_tools.checkpoint.dtypes import BY_NAME
from ckpt_tools.errors import CkptError, UnreadableError, UsageError

ROOT = "base_model.model."


def save(tensors, path, metadata=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata=metadata)
    return path


def pair(path, rank=4, width=8, height=6, a="lora_A.weight", b="lora_B.weight"):
    return {f"{path}.{a}": torch.ones(rank, width), f"{path}.{b}": torch.ones(height, rank)}


def peft_directory(path, config, tensors=None):
    """An adapter as PEFT lays it down, of one module unless told, with a configuration, which may be none."""
    rooted = {ROOT + key: tensor for key, tensor in (tensors or pair("q")).items()}
    save(rooted, path / "adapter_model.safetensors")
    config = config if isinstance(config, bytes) else json.dumps({"peft_type": "LORA", "r": 4} | config).encode()
    (path / "adapter_config.json").write_bytes(config)
    return path


def read(path, **options):
    with read_adapter(str(path), **options) as (_, adapter):
        return adapter


def only(adapter):
    (module,) = adapter.modules
    return module


@pytest.mark.parametrize("name", ["lora", "dora", "loha", "lokr-both", "oft", "boft", "embedding", "lora-bias"])
def test_read_of_a_peft_directory_has_every_tensor_and_setting(tmp_path, name):
    case = families.CASES[name]
    model = families.adapt(case)
    with warnings.catch_warnings(action="ignore"):
        model.save_pretrained(tmp_path)
    with read_adapter(str(tmp_path)) as (opened, adapter):
        loaded = load(adapter, opened)
        count = len(opened.checkpoint.tensors)
    assert adapter.convention == "peft"
    assert not adapter.unknown
    assert not adapter.is_training_state
    assert sum(len(module.factors) for module in adapter.modules) == count
    config = model.peft_config["default"]
    assert adapter.settings["peft_type"].value == config.peft_type.value
    own = [module for module in loaded.modules if not module.is_saved]
    for module in own:
        if module.alpha is not None:
            assert module.alpha.value == (config.lora_alpha if name != "loha" and "lokr" not in name else config.alpha)
            assert module.alpha.source == "adapter_config.json"
        layer = model.get_submodule(ROOT + module.path)
        delta = layer.get_delta_weight("default") if "A" in module.factors and "magnitude" not in module.factors else 0
        if torch.is_tensor(delta):
            scale = module.alpha.value / module.rank.value
            product = to_tensor(module.factors["B"]) @ to_tensor(module.factors["A"])
            torch.testing.assert_close(scale * product, delta)


def test_read_of_diffusers_own_file_takes_ranks_and_alphas_of_its_header(tmp_path):
    from diffusers import FluxTransformer2DModel
    from peft import LoraConfig

    config = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 8, "num_attention_heads": 2}
    model = FluxTransformer2DModel(**config, joint_attention_dim=8, pooled_projection_dim=8, axes_dims_rope=(4, 2, 2))
    model.add_adapter(LoraConfig(r=4, lora_alpha=12, target_modules=["to_q", "to_k"], rank_pattern={"attn.to_k": 2}))
    model.save_lora_adapter(tmp_path, weight_name="pytorch_lora_weights.safetensors")
    adapter = read(tmp_path)
    assert {module.alpha.value for module in adapter.modules} == {12}
    assert {module.alpha.source for module in adapter.modules} == {"header lora_adapter_metadata"}
    assert {module.rank.value for module in adapter.modules if module.path.endswith("to_q")} == {4}
    assert {module.rank.value for module in adapter.modules if module.path.endswith("to_k")} == {2}


@pytest.mark.parametrize("algorithm", ["lora", "loha", "lokr", "diag-oft", "boft", "full"])
def test_read_of_a_lycoris_file_takes_its_alphas(tmp_path, algorithm):
    _, network = lycoris_worlds.adapt(algorithm)
    path = save(network.state_dict(), tmp_path / "net.safetensors")
    adapter = read(path)
    assert adapter.convention == "kohya"
    family = {"diag-oft": "oft"}.get(algorithm, algorithm)
    assert {module.path: module.family for module in adapter.modules} == {"lycoris_b_q": family, "lycoris_b_c": family}
    assert not adapter.unknown
    for module in adapter.modules:
        assert "alpha" not in module.factors
        if family in ("lora", "loha"):
            expected = (4, 2.0) if module.path.endswith("q") else (3, 1.0)
            assert (module.rank.value, module.alpha.value) == expected
            assert module.alpha.source == "tensor alpha"


@pytest.mark.parametrize(
    ("metadata", "alpha", "source"),
    [
        ({"ss_network_alpha": "8.0"}, 8.0, "header ss_network_alpha"),
        ({"ss_network_alpha": "None"}, 4.0, "kohya's convention: scale 1 where no alpha is written"),
        ({}, 4.0, "kohya's convention: scale 1 where no alpha is written"),
    ],
)
def test_read_of_a_kohya_file_without_alphas_takes_the_header(tmp_path, metadata, alpha, source):
    tensors = pair("lora_unet_double_blocks_0_img_attn_qkv", a="lora_down.weight", b="lora_up.weight")
    module = only(read(save(tensors, tmp_path / "k.safetensors", metadata)))
    assert (module.alpha.value, module.alpha.source) == (alpha, source)


def test_read_of_a_kohya_convolution_takes_its_own_alpha(tmp_path):
    tensors = pair("lora_unet_q", a="lora_down.weight", b="lora_up.weight")
    tensors |= {
        "lora_unet_c.lora_down.weight": torch.ones(2, 8, 3, 3),
        "lora_unet_c.lora_up.weight": torch.ones(6, 2, 1, 1),
    }
    metadata = {"ss_network_alpha": "8", "ss_network_args": json.dumps({"conv_dim": "2", "conv_alpha": "1"})}
    adapter = read(save(tensors, tmp_path / "k.safetensors", metadata))
    assert {module.path: module.alpha.value for module in adapter.modules} == {"lora_unet_q": 8.0, "lora_unet_c": 1.0}


def test_read_of_an_ai_toolkit_file_knows_its_convention(tmp_path):
    metadata = {"software": json.dumps({"name": "ai-toolkit", "version": "0.7"}), "format": "pt"}
    path = save(pair("diffusion_model.layers.0.attn.qkv", rank=16), tmp_path / "my_lora.safetensors", metadata)
    (tmp_path / "config.yaml").write_text(
        "config:\n  process:\n  - network: {type: lora, linear: 16, linear_alpha: 8}\n"
    )
    adapter = read(path)
    assert adapter.convention == "ai-toolkit"
    # It sets alpha to the rank in this format, whatever its configuration says.
    assert only(adapter).alpha.value == 16
    assert only(adapter).alpha.source.startswith("ai-toolkit's convention")


@pytest.mark.parametrize(
    ("name", "text", "alpha"),
    [
        ("lycoris_config.json", '{"linear_alpha": 3, "conv_alpha": 1}', 3.0),
        ("config.yaml", "config: {process: [{network: {linear_alpha: 5}}]}", 5.0),
        ("config.yaml", "config: {process: []}", 4.0),
        ("config.yaml", "- 1", 4.0),
        ("config.yaml", "somebody else's: [", 4.0),
    ],
)
def test_alpha_of_a_trainer_s_own_file_is_taken(tmp_path, name, text, alpha):
    tensors = pair("lora_unet_q", a="lora_down.weight", b="lora_up.weight")
    (tmp_path / name).write_text(text)
    module = only(read(save(tensors, tmp_path / "k.safetensors")))
    assert module.alpha.value == alpha
    assert (module.alpha.source == name) == (alpha != 4.0)


@pytest.mark.parametrize(
    ("names", "path"),
    [
        (("unet.down.attn1.to_q.lora.down.weight", "unet.down.attn1.to_q.lora.up.weight"), "unet.down.attn1.to_q"),
        (
            ("unet.down.attn1.processor.to_out_lora.down.weight", "unet.down.attn1.processor.to_out_lora.up.weight"),
            "unet.down.attn1.to_out.0",
        ),
        (
            (
                "text_encoder.text_model.encoder.layers.0.mlp.fc1.lora_linear_layer.down.weight",
                "text_encoder.text_model.encoder.layers.0.mlp.fc1.lora_linear_layer.up.weight",
            ),
            "text_encoder.text_model.encoder.layers.0.mlp.fc1",
        ),
    ],
)
def test_read_of_old_diffusers_names_finds_the_module(tmp_path, names, path):
    tensors = {names[0]: torch.ones(4, 8), names[1]: torch.ones(6, 4)}
    adapter = read(save(tensors, tmp_path / "old.safetensors"))
    assert adapter.convention == "diffusers"
    assert only(adapter).path == path
    assert set(only(adapter).factors) == {"A", "B"}


LIVE = {f"{ROOT}model.q.{name}": tensor for name, tensor in {
    "base_layer.weight": torch.ones(6, 8), "lora_A.default.weight": torch.ones(4, 8),
    "lora_B.default.weight": torch.ones(6, 4),
}.items()}  # fmt: skip


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name,
        lambda name: "module." + name,
        lambda name: "_orig_mod." + name,
        lambda name: name.replace("model.q", "model._fsdp_wrapped_module.q._checkpoint_wrapped_module"),
    ],
    ids=["plain", "ddp", "compiled", "wrapped"],
)
@pytest.mark.parametrize("root", [("model",), ("app", "model"), ("state", "model_state", "model"), ()])
def test_read_of_training_state_strips_roots_and_wrappers(tmp_path, root, rename):
    state = {rename(name): tensor for name, tensor in LIVE.items()}
    for key in reversed(root):
        state = {key: state}
    families.save_dcp(state, tmp_path / "dcp")
    adapter = read(tmp_path / "dcp")
    assert adapter.is_training_state
    assert only(adapter).path == "model.q"
    assert only(adapter).rank.value == 4
    assert dict(adapter.base_shapes) == {"model.q.weight": (6, 8)}
    assert adapter.left_out == ("1 tensors of the base model",)


def test_read_of_accelerate_s_directory_takes_peft_s_configuration_from_above(tmp_path):
    saved = {name.replace(".default", ""): tensor for name, tensor in LIVE.items() if "lora" in name}
    families.save_dcp({"model": saved}, tmp_path / "checkpoint-7" / "pytorch_model_fsdp_0")
    (tmp_path / "checkpoint-7" / "optimizer_0").mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 32, "base_model_name_or_path": "org/base"}
    (tmp_path / "checkpoint-7" / "adapter_config.json").write_text(json.dumps(config))
    for path in (tmp_path / "checkpoint-7", tmp_path / "checkpoint-7" / "pytorch_model_fsdp_0"):
        adapter = read(path)
        assert (only(adapter).alpha.value, only(adapter).alpha.source) == (32, "adapter_config.json")
        assert adapter.settings["base_model_name_or_path"].value == "org/base"


def test_read_of_several_models_hints_in_words_that_a_shell_takes(tmp_path):
    names = [name for name in LIVE if name.startswith("base_model.model.")]
    assert names
    state = {f"{root}.{name}": LIVE[name] for root in ("a's actor", "critic") for name in names}
    families.save_dcp(state, tmp_path / "dcp")
    with pytest.raises(UsageError, match="adapters of 2 models") as caught:
        read(tmp_path / "dcp")
    *_, option, glob = shlex.split(caught.value.hint)
    assert (option, glob) == ("--include", "a's actor.**")


def test_read_of_several_adapters_asks_which(tmp_path):
    state = dict(LIVE)
    state |= {name.replace(".default", ".other"): tensor * 2 for name, tensor in LIVE.items() if "default" in name}
    families.save_dcp({"model": state}, tmp_path / "dcp")
    with pytest.raises(UsageError, match="2 adapters here: default, other") as caught:
        read(tmp_path / "dcp")
    assert caught.value.hint == "choose one: --adapter default"
    with read_adapter(str(tmp_path / "dcp"), adapter_name="other") as (opened, adapter):
        assert adapter.name == "other"
        assert to_tensor(load(adapter, opened).modules[0].factors["A"]).unique().tolist() == [2.0]
    with pytest.raises(UsageError, match="no adapter 'third' here: it holds default, other"):
        read(tmp_path / "dcp", adapter_name="third")


def test_read_of_a_directory_of_adapters_asks_which(tmp_path):
    for name in ("one", "two"):
        peft_directory(tmp_path / name, {"lora_alpha": 8})
    with pytest.raises(UsageError, match="a directory of adapters: one, two"):
        read(tmp_path)
    assert only(read(tmp_path, adapter_name="two")).alpha.value == 8


@pytest.mark.parametrize("value", [{}, {"lora_alpha": 0}], ids=["missing", "zero"])
def test_alpha_that_a_configuration_does_not_say_is_not_known(tmp_path, value):
    peft_directory(tmp_path / "a", value)
    assert only(read(tmp_path / "a")).alpha is None
    (tmp_path / "lora_train_meta.json").write_text('{"r": 4, "lora_alpha": 32, "task_type": "CAUSAL_LM"}')
    adapter = read(tmp_path / "a")
    assert (only(adapter).alpha.value, only(adapter).alpha.source) == (32, "lora_train_meta.json")
    assert adapter.settings["task_type"].value == "CAUSAL_LM"


def test_alpha_patterns_are_those_that_peft_would_match(tmp_path):
    tensors = {}
    for path in ("model.layers.0.q", "model.layers.1.q", "model.layers.11.q", "model.xq"):
        tensors |= pair(path)
    pattern = {r"layers\.1\.q": 2, "^model.layers.0.q": 3, "q": 5}
    peft_directory(tmp_path, {"lora_alpha": 8, "alpha_pattern": pattern}, tensors)
    found = {module.path: module.alpha.value for module in read(tmp_path).modules}
    assert found == {"model.layers.0.q": 3, "model.layers.1.q": 2, "model.layers.11.q": 5, "model.xq": 8}


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["q.lora_A", "q.lora_B"], "LoRA in the names of loralib"),
        (["prompt_encoder.default.embedding.weight", "prompt_encoder.default.mlp_head.0.bias"], "prompt tuning whose"),
        (["q.oft_r"], "OFT of PEFT before 0.16"),
        (["base_model.frod_V.q"], "FRoD"),
        (["q.a1.weight", "q.b1.weight", "q.alpha"], "GLoRA"),
        (["lycoris_q.q_layer.weight", "lycoris_q.lambda_layer"], "T-LoRA"),
        (["emb_params"], "textual inversion"),
        (["internal_xlora_classifier.layers.0.weight"], "X-LoRA"),
    ],
)
def test_read_of_a_kind_that_is_not_supported_is_refused_by_name(tmp_path, names, kind):
    path = save({name: torch.ones(4, 8) for name in names}, tmp_path / "x.safetensors")
    with pytest.raises(UnreadableError) as caught:
        read(path)
    assert f"of the type {kind}" in caught.value.what


def test_every_other_type_of_peft_is_refused_by_its_configuration(tmp_path):
    from peft import PeftType

    from ckpt_tools.adapters.families import PEFT_TYPES

    assert set(PEFT_TYPES) <= {kind.value for kind in PeftType}
    for kind in PeftType:
        peft_directory(tmp_path, {"peft_type": kind.value, "lora_alpha": 8})
        if kind.value in PEFT_TYPES:
            read(tmp_path)
            continue
        with pytest.raises(UnreadableError, match=f"of the type {kind.value},"):
            read(tmp_path)


def make(path, *names, content=b""):
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)


@pytest.mark.parametrize(
    ("files", "what", "hint"),
    [
        (["adapter_model.bin", "adapter_config.json"], "a pickled adapter", "save it again"),
        (["adapter_config.json"], "the adapter's tensors were not saved", "sharded checkpoint"),
        (["notes.txt"], "no tensors here", "pass a safetensors"),
    ],
)
def test_directory_without_an_adapter_that_can_be_read_is_refused_with_the_way_out(tmp_path, files, what, hint):
    make(tmp_path, *files)
    with pytest.raises(UnreadableError) as caught:
        read(tmp_path)
    assert what in caught.value.what
    assert hint in caught.value.hint


@pytest.mark.parametrize("where", ["step/actor", "step"])
def test_adapter_in_the_files_of_verl_s_ranks_is_exported(tmp_path, where):
    made = torch.Generator().manual_seed(2)
    names = {f"q_proj.lora_{part}.default.weight": shape for part, shape in (("A", (4, 8)), ("B", (6, 4)))}
    factors = {
        f"base_model.model.model.layers.0.self_attn.{n}": torch.randn(s, generator=made) for n, s in names.items()
    }
    base = {"base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight": torch.randn(6, 8, generator=made)}
    save_ranks(tmp_path / "step" / "actor", factors | base, {"fsdp": 2}, lambda _: [Shard(0)])
    api.export_lora(tmp_path / where, tmp_path / "out", alpha=8)
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert found.keys() == {name.replace(".default", "") for name in factors}
    assert all(torch.equal(found[name.replace(".default", "")], tensor) for name, tensor in factors.items())


def test_adapter_that_verl_wrote_beside_its_ranks_goes_first(tmp_path):
    make(tmp_path, "model_world_size_2_rank_0.pt", "lora_adapter/adapter_model.safetensors")
    with pytest.raises(UsageError) as caught:
        read(tmp_path)
    assert "lora_adapter" in caught.value.hint


@pytest.mark.parametrize(
    ("tensors", "what"),
    [
        (pair("q") | {"q.hada_w1_a": torch.ones(4, 4)}, "'q' has factors of loha and lora"),
        (
            {f"_orig_mod.{ROOT}q.lora_A.weight": torch.ones(2, 2), f"{ROOT}q.lora_A.weight": torch.ones(2, 2)},
            "two tensors would be the factor A of 'q'",
        ),
        ({"lycoris_q.alpha": torch.tensor(1.0)}, "only names that a base model may have"),
        (
            pair("lora_unet_q", a="lora_down.weight", b="lora_up.weight") | {"lora_unet_q.alpha": torch.ones(3)},
            "not one number",
        ),
        ({"model.layers.0.q.weight": torch.ones(4, 4)}, "no adapter here: none of 1 tensors"),
    ],
)
def test_what_is_no_adapter_or_contradicts_itself_is_refused(tmp_path, tensors, what):
    path = save(tensors, tmp_path / "x.safetensors")
    with pytest.raises(UnreadableError) as caught:
        read(path)
    assert what in caught.value.what


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (b"[]", "adapter_config.json is not a JSON object"),
        (b"{", "adapter_config.json is not valid JSON"),
        (b'{"lora_alpha": "16"}', "lora_alpha must be a number, got '16'"),
        (b'{"lora_alpha": true}', "lora_alpha must be a number, got True"),
        (b'{"use_rslora": 1, "lora_alpha": 4}', "use_rslora must be true or false, got 1"),
        (b'{"alpha_pattern": [], "lora_alpha": 4, "r": -1}', None),
        (b'{"alpha_pattern": ["x"], "lora_alpha": 4}', "alpha_pattern is not a JSON object"),
    ],
)
def test_configuration_that_is_none_is_refused(tmp_path, config, what):
    peft_directory(tmp_path, config)
    if what is None:
        assert only(read(tmp_path)).alpha.value == 4
        return
    with pytest.raises(UnreadableError) as caught:
        read(tmp_path)
    assert what in caught.value.what


@pytest.mark.parametrize("pattern", ["(a+)+b", "(", "x" * 5000, "(.*)*(.*)*q"])
def test_pattern_that_is_none_or_takes_for_ever_is_refused(tmp_path, pattern):
    peft_directory(tmp_path, {"lora_alpha": 8, "alpha_pattern": {pattern: 2}}, pair("q" * 64))
    with pytest.raises(UsageError):
        read(tmp_path)


def test_strided_and_cut_chunks_are_put_together(tmp_path):
    whole = torch.arange(32.0).reshape(4, 8)
    state = dict(LIVE)
    state[f"{ROOT}model.q.lora_A.default.weight"] = whole.T.contiguous().T
    families.save_dcp({"model": state}, tmp_path / "dcp")
    with read_adapter(str(tmp_path / "dcp")) as (opened, adapter):
        entry = only(adapter).factors["A"]
        assert opened.resolve(entry).chunks[0].strides == (1, 4)
        assert torch.equal(to_tensor(load(adapter, opened).modules[0].factors["A"]), whole)


TRAINERS = {
    "torchtitan": ("layers.0.attention.wq.lora_A.default.weight", "layers.0.attention.wq.lora_B.default.weight"),
    "Megatron": ("decoder.layers.0.mlp.linear_fc1.lora_A.weight", "decoder.layers.0.mlp.linear_fc1.lora_B.weight"),
    "torchtune": ("layers.0.attn.q_proj.lora_a.weight", "layers.0.attn.q_proj.lora_b.weight"),
    "(torchtitan, torchtune, Megatron)": (
        "decoder.layers.0.self_attention.linear_qkv.adapter.linear_in.weight",
        "decoder.layers.0.self_attention.linear_qkv.adapter.linear_out.weight",
    ),
    "litgpt": ("transformer.h.0.attn.qkv.lora_A", "transformer.h.0.attn.qkv.lora_B"),
}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_trainer_s_own_module_names_are_refused_by_name(tmp_path, trainer):
    down, up = TRAINERS[trainer]
    families.save_dcp({"model": {down: torch.randn(4, 8), up: torch.randn(8, 4)}}, tmp_path / "dcp")
    with pytest.raises(CkptError, match=re.escape(trainer)):
        api.export_lora(tmp_path / "dcp", tmp_path / "out", alpha=8)
    assert not (tmp_path / "out").exists()


# Whatever names, shapes and settings a source has: an export, findings, or an error in three parts; no traceback

PARTS = st.sampled_from(
    [
        "base_model.model", "model", "layers.0", "q", "k", "experts", "base_layer", "original_module",
        "modules_to_save.default", "lora_A", "lora_B", "default", "other", "weight", "bias", "lora_embedding_A",
        "lora_embedding_B", "lora_magnitude_vector", "hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1",
        "lokr_w1", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2", "oft_R", "boft_R", "boft_s", "oft_blocks", "rescale",
        "alpha", "dora_scale", "diff", "diff_b", "lora_down", "lora_up", "lora_mid", "lora_unet_q", "lora_a",
        "magnitude", "lora_E", "_orig_mod", "transformer", "diffusion_model",
    ],
)  # fmt: skip
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
        "peft_type", "r", "lora_alpha", "alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules",
        "target_parameters", "modules_to_save", "bias", "oft_block_size", "block_share", "use_cayley_neumann", "coft",
        "eps", "num_cayley_neumann_terms", "decompose_factor", "use_effective_conv2d", "init_lora_weights",
        "base_model_name_or_path", "task_type", "layers_to_transform",
    ],
)  # fmt: skip
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
    TENSORS | likely(), CONFIGS, st.none() | st.integers(0, 4), st.sampled_from(["adapter_model", "x"]),
    st.sampled_from(["peft", "peft", "peft", "diffusers", "kohya", "comfyui"]),
    st.dictionaries(
        st.sampled_from(["ss_network_alpha", "ss_network_args", "lora_adapter_metadata", "software"]),
        st.text(max_size=5) | VALUES.map(json.dumps), max_size=3,
    ),
)  # fmt: skip
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
