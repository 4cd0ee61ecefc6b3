"""The types of PEFT's that are carried, one row each.

Refused by name are those whose names or tensors depend on the whole model: ADAPTION_PROMPT, FROD, SHADOW, XLORA.

Source: peft 0.21 `tuners/*/{config,layer,model}.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from ckpt_tools.adapters.adapter import Adapter, AdapterModule, F, Fields, Shape, Shapes
from ckpt_tools.adapters.families.carried import Carried, Numbers, carried, share
from ckpt_tools.adapters.families.family import PeftRefusesError, Ways
from ckpt_tools.errors import UsageError

# Shapes that formulas do not say: c configuration, o outputs, i inputs, k kernel of the weight.


def _deft(c: Numbers, o: int, i: int, _: Shape) -> Ways:
    return ({"deft_P": (o, c("r"))} | ({} if c.get("para") else {"deft_R": (c("r"), i)}),)


def _hira(c: Numbers, o: int, i: int, k: Shape) -> Ways:
    """Of weights stored as (in, out) its configuration does not speak."""
    parts = () if k else ("", "embedding_")
    return tuple({f"hira_{p}A": (c("r"), y), f"hira_{p}B": (x, c("r"))} for p in parts for x, y in ((o, i), (i, o)))


def _ia3(c: Numbers, o: int, i: int, k: Shape) -> Ways:
    is_input = bool(c.get("is_feedforward"))
    size = i if is_input else o
    return ({"ia3_l": (1, size, *(1,) * len(k)) if k or is_input else (size, 1)},)


def _miss(c: Numbers, o: int, i: int, _: Shape) -> Ways:
    r, kind = c("r"), c.get("init_weights")
    if r > i:
        raise PeftRefusesError(f"r is {r}, above the {i} inputs")
    if kind == "bat":
        share(i, r, "r")
        return ({"miss_block": (share(o, r, "r"), r, r)},)
    if kind == "mini":
        share(o, c("mini_r"), "mini_r")
    return ({"miss_block": (r, c("mini_r") if kind == "mini" else o)},)


def _gralora(c: Numbers, o: int, i: int, _: Shape) -> Ways:
    n, r, h = c("gralora_k"), c("r"), c("hybrid_r")
    way = {"gralora_A": (n, share(i, n, "gralora_k"), r), "gralora_B": (n, r, share(o, n, "gralora_k"))}
    return (way | ({"gralora_A_general.weight": (h, i), "gralora_B_general.weight": (o, h)} if h else {}),)


def _randlora(c: Numbers, o: int, i: int, _: Shape) -> Ways:
    bases = -(-min(o, i) // c("r"))
    return ({"randlora_lambda": (c("r"), bases), "randlora_gamma": (bases, min(o, i))},)


def _randlora_shared(c: Numbers, weights: Sequence[Shape]) -> Mapping[str, Shape]:
    small, large = sorted(map(max, zip(*weights, strict=True)))
    return {"randlora_A": (c("r"), 1, small), "randlora_B": (large, -(-small // c("r")), c("r"))}


def _vera_shared(c: Numbers, weights: Sequence[Shape]) -> Mapping[str, Shape]:
    out, inputs = map(max, zip(*weights, strict=True))
    return {"vera_A": (c("r"), inputs), "vera_B": (out, c("r"))}


def _pvera_shared(c: Numbers, weights: Sequence[Shape]) -> Mapping[str, Shape]:
    out, inputs = map(max, zip(*weights, strict=True))
    return {"pvera_A": (2 * c("r"), inputs), "pvera_B": (out, c("r"))}


def _road(c: Numbers, o: int, *_: object) -> Ways:
    share(o, c("group_size"), "group_size")
    size = {"road_1": o // 2, "road_2": o, "road_4": 2 * o}.get(str(c.get("variant")))
    return () if size is None else ({"road_theta": (size,), "road_alpha": (size,)},)


def _vblora(c: Numbers, o: int, i: int, _: Shape) -> Ways:
    v, r, n, top = c("vector_length"), c("r"), c("num_vectors"), c("topk")
    leads = {"A": (r, share(i, v, "vector_length")), "B": (share(o, v, "vector_length"), r)}
    ends = [{"": n}, *([{"_topk_indices": top, "_topk_weights": top - 1}] if c.get("save_only_topk_weights") else [])]
    return tuple(
        {f"vblora_logits_{x}{end}": (*lead, size) for x, lead in leads.items() for end, size in each.items()}
        for each in ends
    )


def _vblora_shared(c: Numbers, _: Sequence[Shape]) -> Mapping[str, Shape]:
    return {"vblora_vector_bank": (c("num_vectors"), c("vector_length"))}


def _waveft(c: Numbers, *_: object) -> Ways:
    return () if c.get("proportional_parameters") else ({"waveft_spectrum": (c("n_frequency"),)},)


def _osf(c: Numbers, o: int, i: int, _: Shape) -> Ways:
    kept = min(o, i) // 2 if c.get("effective_rank") is None else c("effective_rank")
    n, name = max(min(o, i) - kept, 0), "osf_svd_params"
    way = {f"{name}.S_low": (n,), f"{name}.U_low": (o, n), f"{name}.V_low": (n, i)}
    return () if c.get("target_svd_config") else (way,)


def _peanut(c: Numbers, o: int, *_: object) -> Ways:
    r = c("r")
    inner = {f"peanut_{part}coders.{n}.weight": (r, r) for part in ("en", "de") for n in range(c("depth"))}
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

    def peft_config(self, adapter: Adapter[F], modules: Sequence[AdapterModule[F]], base: Shapes) -> Fields:
        """Return the fields; what else was trained has other names in PEFT's file than that of any other type."""
        if any(module.is_saved for module in adapter.modules):
            what = "modules were trained whole beside a prompt, which ckpt does not write under PEFT's names"
            raise UsageError(what, hint="save it with PEFT itself (save_pretrained)")
        if "peft_type" not in adapter.settings:
            what = "the tensors of a prompt do not show which kind of prompt tuning they are of"
            raise UsageError(what, hint="put the adapter_config.json of the training run beside the source")
        return {"peft_type": adapter.settings["peft_type"], **super().peft_config(adapter, modules, base)}


CARRIED: tuple[Carried, ...] = (
    carried("ADALORA", "AdaLoRA", "?lora_A ?lora_B lora_E", "init_r lora_alpha total_step", "lora_E lora_A lora_B",
            shapes="lora_A=init_r,i*k lora_B=o,init_r lora_E=init_r,1", init_field="init_lora_weights",
            patterns="init_r:rank_pattern:.lora_E", may_prune=True, merges=True),
    carried("ADAMSS", "AdaMSS", r"adamss_A@\d+ adamss_B@\d+ adamss_newB", "r num_subspaces random_seed"),
    carried("BEFT", "BEFT", "beft_bias", idle="beft_bias", shapes="beft_bias=1,o"),
    carried("C3A", "C³A", "c3a_kernel", "block_size", "c3a_kernel", merges=True,
            shapes="c3a_kernel=o/block_size,i/block_size,block_size", patterns="block_size:block_size_pattern"),
    carried("DEFT", "DEFT", "deft_P ~deft_R", "r alpha decomposition_method para", shapes_of=_deft),
    carried("DELORA", "DeLoRA", "delora_A delora_B delora_lambda delora_w_norm", "r", "delora_A delora_B delora_lambda",
            shapes="delora_A=r,i delora_B=o,r delora_lambda=1 delora_w_norm=i", merges=True, patterns="r:rank_pattern"),
    carried("FOURIERFT", "FourierFT", "fourierft_spectrum", "n_frequency scaling random_loc_seed", "fourierft_spectrum",
            shapes="fourierft_spectrum=n_frequency", merges=True, patterns="n_frequency:n_frequency_pattern"),
    carried("GLORA", "PEFT's GLoRA", r"glora_[A-E]@\w+", "r config_A_B config_C config_D_E", name="peft_glora"),
    carried("GRALORA", "GraLoRA", "gralora_A gralora_B ~gralora_A_general@weight ~gralora_B_general@weight",
            "r alpha gralora_k hybrid_r", "gralora_B+gralora_B_general.weight", shapes_of=_gralora, merges=True),
    carried("HIRA", "HiRA", "hira_[AB] hira_embedding_[AB]", "r", "hira_A hira_B", shapes_of=_hira,
            patterns="r:rank_pattern"),
    carried("HRA", "HRA", "hra_u", "r apply_GS", shapes="hra_u=i*k,r", merges=True),
    carried("IA3", "IA³", "ia3_l", "feedforward_modules", ones="ia3_l", shapes_of=_ia3, init_field="init_ia3_weights",
            patterns="is_feedforward:feedforward_modules", turns_outputs=True, merges=True),
    carried("LILY", "Lily", "lily_A@weight lily_B@weight lily_router@weight", "r num_B scaling stride_A",
            "lily_A.weight lily_B.weight",
            shapes="lily_A.weight=r,i lily_B.weight=num_B*r,o lily_router.weight=num_B,r"),
    carried("LN_TUNING", "LN tuning", "ln_tuning_layers@weight ~ln_tuning_layers@bias", is_copy=True, merges=True),
    carried("MISS", "MiSS", "miss_block", "r mini_r init_weights", "miss_block", shapes_of=_miss, merges=True),
    carried("OSF", "OSF", "osf_svd_params@[SUV]_low", "effective_rank target_svd_config", shapes_of=_osf,
            patterns="effective_rank:rank_pattern"),
    carried("PEANUT", "PEANuT", r"peanut_A@weight peanut_B@weight peanut_(?:en|de)coders@\d+\.weight",
            "r depth act_fn scaling", "peanut_B.weight", shapes_of=_peanut),
    carried("POLY", "Poly", "poly_lora_A poly_lora_B poly_router@module_logits",
            "r poly_type n_tasks n_skills n_splits", "poly_lora_A poly_lora_B",
            shapes="poly_lora_A=n_splits,n_skills,i/n_splits,r "
            "poly_lora_B=n_splits,n_skills,r,o/n_splits poly_router.module_logits=n_tasks,n_splits*n_skills"),
    carried("PSOFT", "PSOFT", "psoft_R@(?:weight|vector_[ab])",
            "r psoft_alpha psoft_orth psoft_svd ab_svd_init use_cayley_neumann num_cayley_neumann_terms"),
    carried("PVERA", "PVeRA", "pvera_lambda_b pvera_lambda_d",
            "r projection_prng_key save_projection sample_at_inference", "pvera_lambda_b", shared="pvera_A pvera_B",
            shared_of=_pvera_shared, shapes="pvera_lambda_b=o pvera_lambda_d=2*r"),
    carried("RANDLORA", "RandLoRA", "randlora_lambda randlora_gamma",
            "r randlora_alpha projection_prng_key save_projection", "randlora_lambda randlora_gamma",
            shared="randlora_A randlora_B", shared_of=_randlora_shared, shapes_of=_randlora, merges=True),
    carried("ROAD", "RoAd", "road_theta road_alpha", "variant group_size", shapes_of=_road, turns_outputs=True,
            merges=True),
    carried("SHIRA", "SHiRA", "shira_weight shira_indices", "r", "shira_weight",
            shapes="shira_weight=r*s shira_indices=2,r*s", merges=True),
    carried("SUPERTUNING", "SuperTuning", "supertuning_values ~supertuning_indices supertuning_lora_[AB]@weight",
            "sparsity select_top save_precomputed_indices"),
    carried("TINYLORA", "TinyLoRA", "~tinylora_A ~tinylora_B ~tinylora_P",
            "r u projection_seed save_projection weight_tying", shared=r"tinylora_v@\d+"),
    carried("UNILORA", "Uni-LoRA", r"~unilora_(?:indices|scales)\w*", "r theta_d_length proj_seed save_indices",
            shared="unilora_theta_d"),
    carried("VBLORA", "VB-LoRA", "vblora_logits_[AB](?:_topk_(?:indices|weights))?",
            "r num_vectors vector_length topk", shared="vblora_vector_bank", shared_of=_vblora_shared,
            shapes_of=_vblora),
    carried("VERA", "VeRA", "vera_lambda_b vera_lambda_d", "r projection_prng_key save_projection",
            "vera_lambda_b vera_lambda_d", shared="vera_A vera_B", shared_of=_vera_shared,
            shapes="vera_lambda_b=o vera_lambda_d=r", merges=True),
    carried("WAVEFT", "WaveFT", "waveft_spectrum", "n_frequency scaling random_loc_seed wavelet_family use_idwt "
            "proportional_parameters", "waveft_spectrum", shapes_of=_waveft,
            patterns="n_frequency:n_frequency_pattern"),
    Prompt(),
)  # fmt: skip
