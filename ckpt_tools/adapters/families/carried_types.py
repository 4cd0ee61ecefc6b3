"""The types of PEFT's that are carried, one row each.

Letters in shapes: r rank, o outputs, i inputs, k kernel of the weight. Not here, and refused by name, are types whose
names or tensors depend on the whole model: ADAPTION_PROMPT, FROD, SHADOW, XLORA.

Source: peft 0.21 `tuners/*/{config,layer,model}.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from ckpt_tools.adapters.adapter import Adapter, AdapterModule, F, Fields, Shape, Shapes
from ckpt_tools.adapters.families.carried import Carried, Numbers, carried, share
from ckpt_tools.adapters.families.family import PEFT_COMMON, PeftRefusesError, Ways
from ckpt_tools.errors import UsageError

_INIT = "init_weights bias"


def _hira(c: Numbers, o: int, i: int, k: Shape) -> Ways:
    """Of weights stored as (in, out) its configuration does not speak."""
    parts = () if k else ("", "embedding_")
    sides = ((o, i), (i, o))
    return tuple({f"hira_{part}A": (c["r"], y), f"hira_{part}B": (x, c["r"])} for part in parts for x, y in sides)


def _deft(c: Numbers, o: int, i: int, _: Shape) -> Ways:
    return ({"deft_P": (o, c["r"])} | ({} if c.values.get("para") else {"deft_R": (c["r"], i)}),)


def _shira(c: Numbers, o: int, i: int, _: Shape) -> Ways:
    return ({"shira_weight": (c["r"] * (o + i),), "shira_indices": (2, c["r"] * (o + i))},)


def _bank(c: Numbers, _: Sequence[Shape]) -> Mapping[str, Shape]:
    return {"vblora_vector_bank": (c["num_vectors"], c["vector_length"])}


def _ia3(c: Numbers, o: int, i: int, k: Shape) -> Ways:
    is_input = bool(c.values.get("is_feedforward"))
    size = i if is_input else o
    return ({"ia3_l": (1, size, *(1,) * len(k)) if k or is_input else (size, 1)},)


def _miss(c: Numbers, o: int, i: int, _: Shape) -> Ways:
    r, kind = c["r"], c.values.get("init_weights")
    if r > i:
        raise PeftRefusesError(f"r is {r}, above the {i} inputs")
    if kind == "bat":
        share(i, r, "r")
        return ({"miss_block": (share(o, r, "r"), r, r)},)
    if kind == "mini":
        share(o, c["mini_r"], "mini_r")
    return ({"miss_block": (r, c["mini_r"] if kind == "mini" else o)},)


def _gralora(c: Numbers, o: int, i: int, _: Shape) -> Ways:
    n, r, hybrid = c["gralora_k"], c["r"], c["hybrid_r"]
    way: dict[str, Shape | None] = {
        "gralora_A": (n, share(i, n, "gralora_k"), r),
        "gralora_B": (n, r, share(o, n, "gralora_k")),
    }
    if hybrid:
        way |= {"gralora_A_general.weight": (hybrid, i), "gralora_B_general.weight": (o, hybrid)}
    return (way,)


def _randlora(c: Numbers, o: int, i: int, _: Shape) -> Ways:
    bases = -(-min(o, i) // c["r"])
    return ({"randlora_lambda": (c["r"], bases), "randlora_gamma": (bases, min(o, i))},)


def _largest(weights: Sequence[Shape]) -> tuple[int, int]:
    return max(shape[0] for shape in weights), max(shape[1] for shape in weights)


def _randlora_shared(c: Numbers, weights: Sequence[Shape]) -> Mapping[str, Shape]:
    small, large = sorted(_largest(weights))
    return {"randlora_A": (c["r"], 1, small), "randlora_B": (large, -(-small // c["r"]), c["r"])}


def _vera_shared(name: str, rows: int) -> object:
    def shapes(c: Numbers, weights: Sequence[Shape]) -> Mapping[str, Shape]:
        out, inputs = _largest(weights)
        return {f"{name}_A": (rows * c["r"], inputs), f"{name}_B": (out, c["r"])}

    return shapes


def _road(c: Numbers, o: int, *_: object) -> Ways:
    sizes = {"road_1": o // 2, "road_2": o, "road_4": 2 * o}
    share(o, c["group_size"], "group_size")
    size = sizes.get(str(c.values.get("variant")))
    return () if size is None else ({"road_theta": (size,), "road_alpha": (size,)},)


def _spectrum(role: str) -> object:
    def shapes(c: Numbers, o: int, i: int, _: Shape) -> Ways:
        if c.values.get("proportional_parameters"):
            return ()
        if c["n_frequency"] > o * i:
            raise PeftRefusesError(f"n_frequency is {c['n_frequency']}, above {o * i}")
        return ({role: (c["n_frequency"],)},)

    return shapes


def _vblora(c: Numbers, o: int, i: int, _: Shape) -> Ways:
    v, r, n = c["vector_length"], c["r"], c["num_vectors"]
    heads = {"A": (r, share(i, v, "vector_length")), "B": (share(o, v, "vector_length"), r)}
    if not c.values.get("save_only_topk_weights"):
        return ({f"vblora_logits_{each}": (*shape, n) for each, shape in heads.items()},)
    top: dict[str, Shape | None] = {}
    for each, shape in heads.items():
        top[f"vblora_logits_{each}_topk_indices"] = (*shape, c["topk"])
        top[f"vblora_logits_{each}_topk_weights"] = (*shape, c["topk"] - 1)
    return (top,)


def _osf(c: Numbers, o: int, i: int, _: Shape) -> Ways:
    if c.values.get("target_svd_config"):
        return ()
    kept = min(o, i) // 2 if c.values.get("effective_rank") is None else c["effective_rank"]
    n = min(o, i) - min(kept, o, i)
    name = "osf_svd_params"
    return ({f"{name}.S_low": (n,), f"{name}.U_low": (o, n), f"{name}.V_low": (n, i)},)


def _peanut(c: Numbers, o: int, *_: object) -> Ways:
    r = c["r"]
    inner = {f"peanut_{part}coders.{n}.weight": (r, r) for part in ("en", "de") for n in range(c["depth"])}
    return ({"peanut_A.weight": (r, o), "peanut_B.weight": (o, r), **inner},)


class Prompt(Carried):
    """Embeddings of virtual tokens, of a whole model: which kind, the configuration alone says."""

    name = "prompt"
    title = "prompt tuning"
    peft_type = "PROMPT_TUNING"
    also_types = ("PREFIX_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "CPT", "CARTRIDGE")
    marker = "prompt_e"
    root = ""
    shared: ClassVar = (("prompt_embeddings", ""), ("prefix_task_(?:cols|rows)", ""))
    required = ("prompt_embeddings",)
    also_read = (
        ("peft", r"prompt_encoder\.(?P<adapter>[^.]+)\.embedding\.weight", "prompt_embeddings"),
        ("peft", r"prompt_encoder\.(?P<adapter>[^.]+)\.prefix_task_cols", "prefix_task_cols"),
        ("peft", r"prompt_encoder\.(?P<adapter>[^.]+)\.prefix_task_rows", "prefix_task_rows"),
    )
    needs = ("peft_type", "num_virtual_tokens", "token_dim", "num_transformer_submodules", "num_layers", "task_type")
    peft_fields = frozenset(
        f"""{PEFT_COMMON} peft_type num_virtual_tokens token_dim num_transformer_submodules num_attention_heads
        num_layers prompt_tuning_init prompt_tuning_init_text tokenizer_name_or_path tokenizer_kwargs num_ranks
        num_tasks prompt_tuning_init_state_dict_path prompt_tuning_init_task encoder_hidden_size prefix_projection
        encoder_dropout encoder_num_layers encoder_reparameterization_type init_weights num_frozen_tokens cpt_mask
        cpt_token_ids cpt_tokens_type_mask opt_loss_decay_factor opt_projection_epsilon
        opt_projection_format_epsilon opt_weighted_loss_type""".split()
    )

    def peft_config(self, adapter: Adapter[F], modules: Sequence[AdapterModule[F]], base: Shapes) -> Fields:
        """Return the fields; what else was trained has other names in PEFT's file than that of any other type."""
        if any(module.is_saved for module in adapter.modules):
            raise UsageError(
                "modules were trained whole beside a prompt, which ckpt does not write under PEFT's names",
                hint="save it with PEFT itself (save_pretrained)",
            )
        return super().peft_config(adapter, modules, base)


CARRIED: tuple[Carried, ...] = (
    carried(
        "ADALORA", "AdaLoRA", "?lora_A ?lora_B lora_E",
        "r lora_alpha lora_dropout fan_in_fan_out bias init_lora_weights rank_pattern init_r target_r tinit tfinal "
        "deltaT beta1 beta2 orth_reg_weight total_step",
        needs="init_r lora_alpha total_step", idle="lora_E lora_A lora_B",
        peft_patterns=(("init_r", "rank_pattern", ".lora_E"),), ranks={"lora_A": 0, "lora_B": 1, "lora_E": 0},
        may_prune=True, init_field="init_lora_weights", merges=True,
        shapes="lora_A=init_r,i*k lora_B=o,init_r lora_E=init_r,1",
    ),
    carried(
        "ADAMSS", "AdaMSS", r"adamss_A@\d+ adamss_B@\d+ adamss_newB",
        "init_weights r num_subspaces subspace_rank random_seed svd_threshold use_dynamic_rank use_asa init_warmup "
        "final_warmup mask_interval asa_importance_beta asa_uncertainty_beta asa_schedule_exponent "
        "asa_target_subspaces",
        needs="r num_subspaces random_seed",
    ),
    carried("BEFT", "BEFT", "beft_bias", "init_weights", idle="beft_bias",
            shapes="beft_bias=1,o"),
    carried("C3A", "C³A", "c3a_kernel", f"{_INIT} block_size block_size_pattern", needs="block_size",
            idle="c3a_kernel", peft_patterns=(("block_size", "block_size_pattern", ""),),
            shapes="c3a_kernel=o/block_size,i/block_size,block_size", merges=True),
    carried(
        "DEFT", "DEFT", "deft_P ~deft_R",
        f"{_INIT} r alpha deft_dropout fan_in_fan_out decomposition_method para init_scale",
        needs="r alpha decomposition_method para",
        shapes_of=_deft,
    ),
    carried(
        "DELORA", "DeLoRA", "delora_A delora_B delora_lambda delora_w_norm",
        f"{_INIT} r delora_lambda module_dropout rank_pattern lambda_pattern",
        needs="r", idle="delora_A delora_B delora_lambda", ranks={"delora_A": 0, "delora_B": 1}, merges=True,
        peft_patterns=(("r", "rank_pattern", ""),),
        shapes="delora_A=r,i delora_B=o,r delora_lambda=1 delora_w_norm=i",
    ),
    carried(
        "FOURIERFT", "FourierFT", "fourierft_spectrum",
        f"{_INIT} n_frequency scaling random_loc_seed n_frequency_pattern fan_in_fan_out",
        needs="n_frequency scaling random_loc_seed", idle="fourierft_spectrum", merges=True,
        peft_patterns=(("n_frequency", "n_frequency_pattern", ""),), shapes_of=_spectrum("fourierft_spectrum"),
    ),
    carried("GLORA", "GLoRA of PEFT", r"glora_[A-E]@\w+", f"{_INIT} r config_A_B config_C config_D_E",
            needs="r config_A_B config_C config_D_E"),
    carried(
        "GRALORA", "GraLoRA", "gralora_A gralora_B ~gralora_A_general@weight ~gralora_B_general@weight",
        f"{_INIT} r alpha gralora_k hybrid_r gralora_dropout fan_in_fan_out",
        needs="r alpha gralora_k hybrid_r", idle="gralora_B+gralora_B_general.weight", shapes_of=_gralora,
        merges=True,
    ),
    carried("HIRA", "HiRA", "hira_[AB] hira_embedding_[AB]",
            "init_weights r hira_dropout fan_in_fan_out rank_pattern", needs="r", idle="hira_A hira_B",
            ranks={"hira_A": 0, "hira_B": 1}, peft_patterns=(("r", "rank_pattern", ""),), shapes_of=_hira),
    carried("HRA", "HRA", "hra_u", f"{_INIT} r apply_GS", needs="r apply_GS", merges=True,
            shapes="hra_u=i*k,r"),
    carried("IA3", "IA³", "ia3_l", "init_ia3_weights fan_in_fan_out feedforward_modules",
            needs="feedforward_modules", ones="ia3_l", peft_patterns=(("is_feedforward", "feedforward_modules", ""),),
            shapes_of=_ia3, init_field="init_ia3_weights", merges=True, turns_outputs=True),
    carried(
        "LILY", "Lily", "lily_A@weight lily_B@weight lily_router@weight",
        "init_weights r num_B scaling stride_A", needs="r num_B scaling stride_A", idle="lily_A.weight lily_B.weight",
        shapes="lily_A.weight=r,i lily_B.weight=num_B*r,o lily_router.weight=num_B,r",
    ),
    carried("LN_TUNING", "LN tuning", "ln_tuning_layers@weight ~ln_tuning_layers@bias", "", is_copy=True,
            merges=True),
    carried("MISS", "MiSS", "miss_block", f"{_INIT} r mini_r miss_dropout", needs="r mini_r init_weights",
            idle="miss_block", shapes_of=_miss, merges=True),
    carried("OSF", "OSF", "osf_svd_params@[SUV]_low",
            "init_weights effective_rank target_svd_config rank_pattern", needs="effective_rank",
            peft_patterns=(("effective_rank", "rank_pattern", ""),), shapes_of=_osf),
    carried("PEANUT", "PEANuT", r"peanut_A@weight peanut_B@weight peanut_(?:en|de)coders@\d+\.weight",
            "init_weights r depth act_fn scaling", needs="r depth act_fn scaling", idle="peanut_B.weight",
            shapes_of=_peanut),
    carried("POLY", "Poly", "poly_lora_A poly_lora_B poly_router@module_logits",
            "init_weights r poly_type n_tasks n_skills n_splits", needs="r poly_type n_tasks n_skills n_splits",
            idle="poly_lora_A poly_lora_B", shapes="poly_lora_A=n_splits,n_skills,i/n_splits,r "
            "poly_lora_B=n_splits,n_skills,r,o/n_splits poly_router.module_logits=n_tasks,n_splits*n_skills"),
    carried(
        "PSOFT", "PSOFT", "psoft_R@(?:weight|vector_[ab])",
        "init_weights r psoft_alpha psoft_dropout psoft_orth psoft_mag_a psoft_mag_b psoft_svd ab_svd_init "
        "psoft_svd_lowrank_niter use_cayley_neumann num_cayley_neumann_terms cayley_neumann_eps fan_in_fan_out "
        "random_seed",
        needs="r psoft_alpha psoft_orth psoft_svd ab_svd_init use_cayley_neumann num_cayley_neumann_terms",
    ),
    carried(
        "PVERA", "PVeRA", "pvera_lambda_b pvera_lambda_d",
        f"{_INIT} r projection_prng_key save_projection pvera_dropout d_initial fan_in_fan_out sample_at_inference "
        "generator_seed",
        shared="pvera_A pvera_B", needs="r projection_prng_key save_projection", idle="pvera_lambda_b",
        shapes="pvera_lambda_b=o pvera_lambda_d=2*r",
        shared_of=_vera_shared("pvera", 2),
    ),
    carried(
        "RANDLORA", "RandLoRA", "randlora_lambda randlora_gamma",
        f"{_INIT} r randlora_alpha projection_prng_key save_projection sparse very_sparse randlora_dropout "
        "fan_in_fan_out",
        shared="randlora_A randlora_B", needs="r randlora_alpha projection_prng_key save_projection",
        idle="randlora_lambda randlora_gamma", shapes_of=_randlora, shared_of=_randlora_shared, merges=True,
    ),
    carried("ROAD", "RoAd", "road_theta road_alpha", "init_weights variant group_size", needs="variant group_size",
            shapes_of=_road, merges=True, turns_outputs=True),
    carried(
        "SHIRA", "SHiRA", "shira_weight shira_indices", "init_weights r mask_type random_seed fan_in_fan_out",
        needs="r", idle="shira_weight", merges=True,
        shapes_of=_shira,
    ),
    carried(
        "SUPERTUNING", "SuperTuning",
        "supertuning_values ~supertuning_indices supertuning_lora_[AB]@weight",
        "init_weights r lora_alpha lora_dropout sparsity select_top save_precomputed_indices",
        needs="sparsity select_top save_precomputed_indices",
    ),
    carried(
        "TINYLORA", "TinyLoRA", "~tinylora_A ~tinylora_B ~tinylora_P",
        f"{_INIT} r u projection_seed save_projection weight_tying init_v_bound tinylora_dropout fan_in_fan_out",
        shared=r"tinylora_v@\d+", needs="r u projection_seed save_projection weight_tying",
    ),
    carried(
        "UNILORA", "Uni-LoRA", r"~unilora_(?:indices|scales)\w*",
        f"{_INIT} r theta_d_length proj_seed save_indices init_theta_d_bound unilora_dropout fan_in_fan_out",
        shared="unilora_theta_d", needs="r theta_d_length proj_seed save_indices",
    ),
    carried(
        "VBLORA", "VB-LoRA", "vblora_logits_[AB](?:_topk_(?:indices|weights))?",
        f"{_INIT} r num_vectors vector_length topk save_only_topk_weights vblora_dropout init_logits_std "
        "init_vector_bank_bound fan_in_fan_out",
        shared="vblora_vector_bank", needs="r num_vectors vector_length topk", shapes_of=_vblora,
        shared_of=_bank,
    ),
    carried(
        "VERA", "VeRA", "vera_lambda_b vera_lambda_d",
        f"{_INIT} r projection_prng_key save_projection vera_dropout d_initial fan_in_fan_out",
        shared="vera_A vera_B", needs="r projection_prng_key save_projection", idle="vera_lambda_b vera_lambda_d",
        shapes="vera_lambda_b=o vera_lambda_d=r",
        shared_of=_vera_shared("vera", 1), merges=True,
    ),
    carried(
        "WAVEFT", "WaveFT", "waveft_spectrum",
        f"{_INIT} n_frequency scaling random_loc_seed wavelet_family use_idwt n_frequency_pattern "
        "proportional_parameters fan_in_fan_out",
        needs="n_frequency scaling random_loc_seed wavelet_family use_idwt", idle="waveft_spectrum",
        peft_patterns=(("n_frequency", "n_frequency_pattern", ""),), shapes_of=_spectrum("waveft_spectrum"),
    ),
    Prompt(),
)  # fmt: skip
