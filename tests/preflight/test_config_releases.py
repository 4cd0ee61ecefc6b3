"""What the trainers' own releases get: each class of mistake that their examples showed, in excerpts of our own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from preflight.config_examples import AXOLOTL, found, mesh, read

from ckpt_tools.preflight.configs import names
from ckpt_tools.preflight.configs.names import known, newest_release

VERL_SFT = "torchrun --nproc_per_node=8 -m verl.trainer.sft_trainer model.path=m data.max_length=2048 "
RLHF_RAY = "python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path m --ds.zero_stage 3 "
RLHF_SFT = "deepspeed --num_gpus 8 --module openrlhf.cli.train_sft --ds.zero_stage 3 "


def wrong(config: Any) -> list[tuple[str, str, str]]:
    """Errors and warnings."""
    return [item for item in found(config) if item[1] != "info"]


# OpenRLHF


def test_openrlhf_options_by_role_are_known(tmp_path: Path) -> None:
    script = RLHF_RAY + "--actor.adam.lr 5e-7 --critic.adam.lr 9e-6 --critic.adam.betas 0.9 0.95 --actor.optim muon"
    config = read(tmp_path, script, name="run.sh")
    assert wrong(config) == []
    assert config.spec.optimizer == "muon"


def test_openrlhf_option_of_another_script_is_an_error(tmp_path: Path) -> None:
    config = read(tmp_path, RLHF_SFT + "--actor.model_name_or_path m", name="run.sh")
    assert wrong(config) == [("unknown-key", "error", "--actor.model_name_or_path")]
    assert config.findings[0].hint == "write --model.model_name_or_path"


def test_openrlhf_option_without_dots_beside_dots_is_an_error(tmp_path: Path) -> None:
    config = read(tmp_path, RLHF_SFT + "--model.model_name_or_path m --zero_stage 3", name="run.sh")
    assert wrong(config) == [("mixed-options", "error", "--zero_stage")]


def test_openrlhf_option_of_every_release_goes_with_dots(tmp_path: Path) -> None:
    config = read(tmp_path, RLHF_SFT + "--model.model_name_or_path m --max_norm 1.0 --local_rank -1", name="run.sh")
    assert wrong(config) == []


def test_openrlhf_option_that_is_newer_than_the_lists_is_no_error(tmp_path: Path) -> None:
    config = read(tmp_path, RLHF_SFT + "--model.model_name_or_path m --ds.quantum_flux 3", name="run.sh")
    assert "error" not in {severity for _, severity, _ in found(config)}


@pytest.mark.parametrize("loads", [True, False])
def test_openrlhf_path_that_nothing_is_loaded_from_need_not_be_read(loads: bool, tmp_path: Path) -> None:
    script = RLHF_SFT + "--ckpt.path $CKPT" + (" --ckpt.load_enable" if loads else "")
    assert ("--ckpt.path" in read(tmp_path, script, name="run.sh").options.unread) is loads


def test_openrlhf_non_ray_ppo_is_read(tmp_path: Path) -> None:
    script = "deepspeed --num_gpus 8 --module openrlhf.cli.train_ppo --pretrain m --zero_stage 2 --init_kl_coef 0.01"
    config = read(tmp_path, script, name="run.sh")
    assert wrong(config) == []
    assert config.spec.mesh == mesh(dp_shard=8)


# verl


@pytest.mark.parametrize("strategy", ["torchtitan", "automodel", "veomni", "megatron"])
def test_verl_engine_that_is_not_read_is_no_wrong_value(strategy: str, tmp_path: Path) -> None:
    actor = {
        "strategy": strategy,
        "optim": {"lr_decay_style": "cosine", "muon_momentum": 0.9},
        "qat": {"enable": False},
    }
    config = read(tmp_path, {"actor_rollout_ref": {"actor": actor}})
    assert wrong(config) == []
    assert config.spec.engine == "other"


def test_verl_options_of_today_are_known(tmp_path: Path) -> None:
    fsdp = {"strategy": "fsdp2", "qat": {"enable": False}, "pad_to_length": False, "entropy_from_logits_chunk_size": 1}
    actor = {"strategy": "fsdp2", "fsdp_config": fsdp, "optim": {"lr": 1e-6, "zero_indexed_step": True}}
    config = read(tmp_path, {"actor_rollout_ref": {"actor": actor}, "distillation": {"enabled": False}})
    assert wrong(config) == []
    assert config.spec.engine == "fsdp2"


def test_verl_sft_with_an_engine_is_read(tmp_path: Path) -> None:
    options = "engine=fsdp optim=fsdp engine.strategy=fsdp2 engine.fsdp_size=4 engine.model_dtype=bf16 optim.lr=1e-5"
    config = read(tmp_path, VERL_SFT + options, name="run.sh")
    assert wrong(config) == []
    assert (config.spec.engine, config.spec.model, config.spec.master_dtype) == ("fsdp2", "m", "bf16")
    assert config.spec.mesh == mesh(dp_replicate=2, dp_shard=4)
    assert config.spec.seq_len == 2048


def test_verl_group_and_options_below_it_do_not_contradict_one_another(tmp_path: Path) -> None:
    options = "engine=megatron optim=megatron engine.tensor_model_parallel_size=2 optim.lr_decay_style=cosine"
    config = read(tmp_path, VERL_SFT + options, name="run.sh")
    assert wrong(config) == []
    assert config.spec.engine == "other"


@pytest.mark.parametrize(("model", "words"), [("hf_model", ()), ("mine", ("model=mine",))])
def test_verl_group_of_the_model_is_its_only_file(model: str, words: tuple[str, ...], tmp_path: Path) -> None:
    config = read(tmp_path, VERL_SFT + f"model={model} model.use_remove_padding=True", name="run.sh")
    assert config.options.words == words
    assert "error" not in {severity for _, severity, _ in found(config)}


MEGATRON = "python3 -m verl.trainer.main_ppo model_engine=megatron trainer.n_gpus_per_node=8 trainer.nnodes=2 "


@pytest.mark.parametrize(("tp", "expected"), [(2, mesh(pp=2, dp_replicate=4, tp=2)), (3, None)])
def test_verl_megatron_mesh_is_read_and_its_engine_is_not(tp: int, expected: Any, tmp_path: Path) -> None:
    at = "actor_rollout_ref.actor.megatron."
    options = f"{at}tensor_model_parallel_size={tp} {at}pipeline_model_parallel_size=2 actor_rollout_ref.model.path=m"
    spec = read(tmp_path, MEGATRON + options, name="run.sh").spec
    assert (spec.engine, spec.mesh, spec.model) == ("other", expected, "m")
    sft = VERL_SFT + f"engine=megatron engine.tensor_model_parallel_size={tp} engine.pipeline_model_parallel_size=2"
    assert read(tmp_path, sft, name="run.sh").spec.axes["tp"] == tp


def test_verl_option_of_a_part_that_is_not_looked_at_is_known_by_its_path(tmp_path: Path) -> None:
    values: Any = {"actor_rollout_ref": {"actor": {"strategy": "fsdp2"}, "rollout": {"name": "vllm"}}, "critic": {}}
    values["critic"] = {"strategy": "fsdp2", "optim": {"lr": 1e-5, "my_own": 1}, "ppo_epochs": 1}
    options = read(tmp_path, values).options
    assert (options.read, options.understood, options.passed_over) == (6, 5, 1)
    values["critic"]["ppo_epohcs"] = 2
    assert wrong(read(tmp_path, values)) == [("unknown-key", "warning", "critic.ppo_epohcs")]


def test_verl_model_engine_group_chooses_the_engine(tmp_path: Path) -> None:
    script = "python3 -m verl.trainer.main_ppo model_engine=veomni actor_rollout_ref.model.path=m"
    assert read(tmp_path, script, name="run.sh").spec.engine == "other"


@pytest.mark.parametrize(
    ("defaults", "unread"),
    [
        (["ppo_trainer", "_self_"], ()),
        ([{"actor@actor_rollout_ref.actor": "dp_actor"}, {"optim": "fsdp"}, "_self_"], ()),
        ([{"actor@actor_rollout_ref.actor": "mine"}], ("defaults: actor@actor_rollout_ref.actor:mine",)),
        (["somebodys_trainer"], ("defaults: somebodys_trainer",)),
    ],
)
def test_verl_config_over_others_is_read_where_those_are_verls(defaults: Any, unread: Any, tmp_path: Path) -> None:
    values = {"defaults": defaults, "actor_rollout_ref": {"actor": {"strategy": "fsdp2"}}}
    assert read(tmp_path, values).options.words == unread


# axolotl and accelerate


def test_axolotl_aliases_and_plugins_are_known(tmp_path: Path) -> None:
    plugin = {"use_swanlab": True, "swanlab_project": "p", "model_type": "AutoModelForCausalLM", "model_config": {}}
    assert wrong(read(tmp_path, AXOLOTL | plugin)) == []


def test_axolotl_misspelt_axis_is_an_error_beside_known_names(tmp_path: Path) -> None:
    config = read(tmp_path, AXOLOTL | {"model_type": "M", "context_parapllel_size": 2})
    assert wrong(config) == [("unknown-key", "error", "context_parapllel_size")]


@pytest.mark.parametrize(
    ("options", "engine"),
    [
        ({"fsdp_config": {"offload_params": True}}, "fsdp2"),
        ({"fsdp": ["full_shard", "auto_wrap"], "fsdp_config": {"offload_params": True}}, "fsdp1"),
        ({"fsdp_version": 1, "fsdp_config": {"offload_params": True}}, "fsdp1"),
    ],
)
def test_axolotl_without_a_version_means_fsdp2_unless_it_lists_strategies(
    options: Any, engine: str, tmp_path: Path
) -> None:
    assert read(tmp_path, {"base_model": "m"} | options).spec.engine == engine


def test_accelerate_option_of_a_fork_is_no_error(tmp_path: Path) -> None:
    config = read(tmp_path, {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}, "kt_config": {"kt_x": 1}})
    assert "error" not in {severity for _, severity, _ in found(config)}


# torchtitan's JSON


@pytest.mark.parametrize(
    ("section", "is_full"),
    [
        ({"preserve_rng_state": True, "debug": False}, True),
        ({"preserve_rng_state": True, "force_recompute_mm_shapes_by_fqns": ["moe.router.gate"]}, False),
        ({"preserve_rng_state": True, "memory_budget": 0.5}, False),
        (None, False),
        ({"mode": "full"}, True),
        ({"mode": "selective"}, False),
    ],
    ids=str,
)
def test_torchtitan_json_says_by_its_fields_what_is_recomputed(section: Any, is_full: bool, tmp_path: Path) -> None:
    groups = [{"pattern": ".*", "optimizer_name": "DistMuon", "optimizer_kwargs": {"lr": 1e-3}}]
    values = {
        "parallelism": {"data_parallel_shard_degree": 8, "pipeline_parallel_degree": 1},
        "training": {"local_batch_size": 1, "seq_len": 4096},
        "optimizer": {"param_groups": groups, "implementation": "fused"},
        "activation_checkpoint": section,
    }
    spec = read(tmp_path, values, name="config.json", world_size=8).spec
    assert (spec.activation_checkpointing, spec.optimizer) == (is_full, "DistMuon")


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (None, (False, "2")),  # of the TOML, every second block
        ({"mode": "selective", "selective_ac_option": "op"}, (False, "op")),
        ({"mode": "full"}, (True, None)),
        ({"mode": "none"}, (False, None)),
        ({"mode": "memory_budget"}, (False, "memory_budget")),
        ({"preserve_rng_state": True, "force_recompute_mm_shapes_by_fqns": []}, (False, "op")),
        ({"preserve_rng_state": True, "memory_budget": 0.5}, (False, "memory_budget")),
        ({"preserve_rng_state": True}, (True, None)),
    ],
)
def test_torchtitan_checkpoints_what_its_class_does(section: Any, expected: Any, tmp_path: Path) -> None:
    beside = {} if section is None else {"activation_checkpoint": section}
    spec = read(tmp_path, {"parallelism": {"tensor_parallel_degree": 2, "disable_loss_parallel": True}, **beside}).spec
    assert (spec.activation_checkpointing, spec.selective_checkpointing) == expected
    assert (spec.sequence_parallel, spec.loss_parallel, spec.micro_batch) == (True, False, 1)


# DeepSpeed's own file


ZERO = '{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}'
DEEPSPEED: dict[str, tuple[dict[str, Any], str]] = {
    "axolotl": ({"base_model": "m", "deepspeed": "ds.json"}, "deepspeed"),
    "trainer": ({"output_dir": "o", "per_device_train_batch_size": 1, "deepspeed": "ds.json"}, "deepspeed"),
    "accelerate": (
        {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "ds.json"}},
        "deepspeed_config.deepspeed_config_file",
    ),
}


@pytest.mark.parametrize("framework", DEEPSPEED)
def test_deepspeed_file_is_read_where_it_is(framework: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values, key = DEEPSPEED[framework]
    monkeypatch.chdir(tmp_path)
    missing = read(tmp_path, values)
    assert missing.options.unread == (key,)
    assert missing.spec.strategy is None
    (tmp_path / "ds.json").write_text(ZERO)
    config = read(tmp_path, values)
    assert config.options.unread == ()
    assert (config.spec.strategy, config.spec.offload_optimizer, config.spec.offload_params) == (
        "full_shard",
        True,
        False,
    )


@pytest.mark.parametrize("text", ["[]", "{", '{"zero_optimization": {"stage": "auto"}}'])
def test_deepspeed_file_that_says_nothing_is_unread(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text(text)
    assert read(tmp_path, DEEPSPEED["axolotl"][0]).options.unread == ("deepspeed",)


# The lists


def test_option_that_the_newest_release_does_not_have_is_a_note(tmp_path: Path) -> None:
    config = read(tmp_path, {"output_dir": "o", "evaluation_strategy": "no", "eval_strategy": "no"})
    assert found(config) == [("older-release", "info", "evaluation_strategy")]
    assert "evaluation_strategy (transformers-4.46.3)" in config.findings[0].what


@pytest.mark.parametrize(("here", "is_behind"), [("0.21.3", False), ("0.22.0", False), ("0.23.0", True), ("1.0", True)])
def test_lists_that_are_behind_what_is_installed_are_a_note(
    here: str, is_behind: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names, "version", lambda _: here)
    names.installed_and_listed.cache_clear()
    notes = [one.what for one in read(tmp_path, AXOLOTL).findings if one.code == "newer-release"]
    names.installed_and_listed.cache_clear()
    assert notes == (
        [f"axolotl {here} is installed here, and what is known of its options is from axolotl-0.21.0"]
        if is_behind
        else []
    )


LISTS = {
    "accelerate": ("config", "arguments"),
    "ai_toolkit": ("file", "config", "process", "train", "model", "network"),
    "axolotl": ("config", "fsdp_config"),
    "openrlhf": ("switches", "lists", "sft", "rm", "dpo", "ppo_ray"),
    "torchtitan": ("job", "parallelism", "training", "checkpoint"),
    "trainer": ("arguments", "trl", "fsdp_config", "parallelism_config"),
    "verl": ("actor_rollout_ref", "actor", "model", "trainer", "ppo", "sft", "optim", "fsdp", "defaults"),
}


@pytest.mark.parametrize("name", LISTS)
def test_list_of_names_says_which_release_has_them(name: str) -> None:
    for section in LISTS[name]:
        options = newest_release(name, section)
        assert options, section
        assert known(name, section) == options.keys()
        assert any(
            release.startswith((name, "transformers", "trl", "accelerate", "ai-toolkit"))
            for release in options.values()
        )
