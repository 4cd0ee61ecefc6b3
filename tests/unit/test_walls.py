"""What is refused of a config before anything is built, and what large and odd real configs may say."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest

from ckpt_tools.errors import RefusedConfigError
from ckpt_tools.sandbox.audit import Breach, Sandbox, aside, demand_sandbox, in_sandbox
from ckpt_tools.sandbox.check_config import check_config

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 16}
TABLES = tomllib.loads(Path(__file__).with_name("configs.toml").read_text(encoding="utf-8"))
ABSURD = TABLES["absurd"] | {
    "huge-digits": {"anything": 10**100},
    "long-list": {"layer_types": ["full"] * 1_000_001},
    "deep": None,
}


def deep(levels):
    return {"text_config": deep(levels - 1)} if levels else {}


@pytest.mark.parametrize("name", ABSURD)
def test_absurd_number_is_refused_with_its_field_and_limit(name):
    found = ABSURD[name] or deep(60)
    with pytest.raises(RefusedConfigError) as caught:
        check_config(LLAMA | found, "config.json")
    assert caught.value.exit_code == 2
    assert caught.value.where == "config.json"
    assert len(caught.value.what) < 400
    if name != "deep":
        key = next(iter(found))
        assert key in caught.value.what or "num_experts" in caught.value.what
        assert any(character.isdigit() for character in caught.value.what)


REAL = TABLES["real"] | {  # TOML has no word for None
    "labels": {"num_labels": 21843, "id2label": {str(i): f"LABEL_{i}" for i in range(21843)}},
    "xlnet": {"max_position_embeddings": -1, "mem_len": None, "clamp_len": -1, "bi_data": False},
    "no-layers": {"encoder_layers": 0, "num_local_experts": 0, "n_inner": None, "num_key_value_heads": None},
    "gemma3n": {
        "vision_config": {"model_type": "gemma3n_vision", "architecture": "mobilenetv5_300m_enc", "model_args": None}
    },
}


@pytest.mark.parametrize("name", REAL)
def test_numbers_and_names_of_real_models_pass(name):
    check_config(LLAMA | json.loads(json.dumps(REAL[name])), "config.json")


@pytest.mark.full
def test_default_configs_of_transformers_pass():
    """Every config class says of itself what is normal; those of timm and detectron2 are refused by name."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    passed, refused = 0, {}
    for model_type in list(CONFIG_MAPPING):
        try:
            values = json.loads(json.dumps(CONFIG_MAPPING[model_type]().to_dict(), default=str))
        except Exception:  # some have no defaults, or want a library
            continue
        try:
            check_config(values, "config.json")
            passed += 1
        except RefusedConfigError as error:
            refused[model_type] = error.what
    assert transformers.__version__
    assert passed > 400
    assert [what for what in refused.values() if "timm" not in what and "detectron2" not in what] == []


def test_name_from_a_config_is_escaped_and_short():
    with pytest.raises(RefusedConfigError) as caught:
        check_config({"a\x1b[31m" * 10_000: {"backbone": "x"}}, "config.json")
    assert "\x1b" not in caught.value.what
    assert len(caught.value.what) < 1000


def sandbox(directory):
    return Sandbox(subject="a model", where="config.json", scratch=str(directory))


def test_walls_are_demanded():
    with pytest.raises(RuntimeError, match="outside of the sandbox"):
        demand_sandbox()


def test_model_of_a_config_is_not_built_without_walls():
    pytest.importorskip("transformers")
    from ckpt_tools.models.hf_recipe import HfRecipe
    from ckpt_tools.transfer.placement.tp_plan import find_tp_plan

    with pytest.raises(RuntimeError, match="outside of the sandbox"):
        HfRecipe(LLAMA, "config.json").build()
    with pytest.raises(RuntimeError, match="outside of the sandbox"):
        find_tp_plan(LLAMA)


def test_walls_of_a_process_that_goes_on_raise_and_come_down(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    with tempfile.TemporaryDirectory() as scratch, in_sandbox(sandbox(scratch)):
        demand_sandbox()
        with open(f"{scratch}/own", "w") as file:
            file.write("own")
        with pytest.raises(Breach) as caught:
            open(secret).close()
        assert caught.value.error.what.startswith("building a model from its config tried to open ")
        assert caught.value.error.where == "config.json"
        with aside():
            assert secret.read_text() == "secret"
        with pytest.raises(Breach):
            open(secret).close()
    assert secret.read_text() == "secret"


def test_model_directory_stays_shut_where_sys_path_names_it(tmp_path, monkeypatch):
    inside = tmp_path / "model"
    inside.mkdir()
    (inside / "evil.py").write_text("")
    monkeypatch.setattr(sys, "path", [str(inside), str(tmp_path), *sys.path])
    places = {"subject": "a model", "where": "c", "scratch": str(tmp_path / "scratch")}
    with in_sandbox(Sandbox(**places, foreign=(str(inside),))), pytest.raises(Breach):
        open(inside / "evil.py").close()
    (tmp_path / "fine.py").write_text("")
    with in_sandbox(Sandbox(**places, foreign=(str(inside),))):
        open(tmp_path / "fine.py").close()


LIMITED = """
import sys, tempfile
from ckpt_tools.sandbox.audit import Sandbox
from ckpt_tools.sandbox.enclose import Limits, enter_sandbox
walls = Sandbox(subject="a model", where="config.json", scratch=tempfile.mkdtemp())
enter_sandbox(walls, Limits(memory_bytes=64 << 20, cpu_s=1))
if sys.argv[1] == "memory":
    try:
        bytearray(256 << 20)
    except MemoryError:
        print("too much")
else:
    while True:
        pass
"""


@pytest.mark.parametrize(("kind", "out", "code"), [("memory", "too much\n", 0), ("time", "", -24)])
def test_limits_hold(kind, out, code, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", LIMITED, kind], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == (out, code), done.stderr


@pytest.mark.full
def test_tensor_parallel_plan_imports_its_libraries_before_the_walls_stand():
    # PyTorch's builds for GPUs start ldconfig when they are imported.
    code = """
import sys
import ckpt_tools.transfer.placement.tp_plan as auto_plan

def walls(*args, **options):
    sys.exit(0 if {"torch", "transformers.models.llama.modeling_llama"} <= set(sys.modules) else 1)

auto_plan.build_in_sandbox = walls
config = {"architectures": ["LlamaForCausalLM"]}
auto_plan.resolve(auto_plan.Question(config=config, directory="somewhere"), auto_plan.Here(directory="", parent=0))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
