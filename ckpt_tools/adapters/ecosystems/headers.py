"""Headers of adapter files: what diffusers, kohya and ModelSpec readers look for."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence

from ckpt_tools.adapters.architectures.architecture import Architecture
from ckpt_tools.adapters.ecosystems.placing import Placed
from ckpt_tools.adapters.families.family import Module
from ckpt_tools.adapters.read.sidecars import DIFFUSERS_KEY


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


def diffusers_metadata(placed: Sequence[Placed]) -> dict[str, str]:
    """Return the header of a diffusers file of loras whose scale is 1: alpha is the rank, for every module.

    diffusers takes PEFT's LoraConfig from `lora_adapter_metadata`, all of it: a component that is not in there would
    get PEFT's defaults (rank 8).

    Source: diffusers 0.42, loaders/lora_base.py (`_load_sft_state_dict_metadata`), utils/peft_utils.py.
    """
    document: dict[str, object] = {}
    for component in dict.fromkeys(each.part.component for each in placed):
        those = [each for each in placed if each.part.component == component]
        config = _lora_config([each.module for each in those], short=those[0].part.is_encoder)
        document |= {f"{component}.{key}": value for key, value in config.items()}
    return {"format": "pt", DIFFUSERS_KEY: json.dumps(document, indent=2, sort_keys=True)}


def _lora_config(modules: Sequence[Module], *, short: bool) -> Mapping[str, object]:
    """LoraConfig of one component; `short` paths fit CLIP with and without `text_model.`."""
    ranks = {
        module.path.removeprefix("text_model.") if short else module.path: module.factors["A"].shape[0]
        for module in modules
    }
    rank = Counter(ranks.values()).most_common(1)[0][0]
    others = {path: each for path, each in ranks.items() if each != rank}
    anchored = others if short else {f"^{path}": each for path, each in others.items()}
    return {
        "r": rank,
        "lora_alpha": rank,
        "rank_pattern": anchored,
        "alpha_pattern": anchored,
        "target_modules": sorted(ranks),
        "use_dora": any(module.is_dora for module in modules),
        "lora_bias": any("B_bias" in module.factors for module in modules),
        "peft_type": "LORA",
    }


def kohya_metadata(placed: Sequence[Placed], architecture: Architecture | None, *, title: str) -> dict[str, str]:
    """Return the header that kohya's tools, LyCORIS and model managers read. Tensors have the last word in all of them.

    Source: kohya-ss/sd-scripts, library/train_util.py and library/sai_model_spec.py (ModelSpec 1.0.1).
    """
    modules = [each.module for each in placed]
    families = {module.family for module in modules}
    is_plain = families == {"lora"} and not any(module.is_dora for module in modules)
    metadata = {"format": "pt", "ss_network_module": "networks.lora" if is_plain else "lycoris.kohya"}
    if not is_plain:
        common = Counter(module.family for module in modules).most_common(1)[0][0]
        args = {"algo": {"lora": "locon", "oft": "diag-oft"}.get(common, common)}
        if any(module.is_dora for module in modules):
            args["dora_wd"] = "True"
        metadata["ss_network_args"] = json.dumps(args)
    ranks = Counter(module.rank.value for module in modules if module.rank is not None)
    if ranks:
        rank = ranks.most_common(1)[0][0]
        alphas = Counter(
            module.alpha.value for module in modules if module.alpha and module.rank and module.rank.value == rank
        )
        metadata["ss_network_dim"] = str(rank)
        if alphas:
            metadata["ss_network_alpha"] = _number(alphas.most_common(1)[0][0])
    if architecture is not None:
        metadata |= {
            "ss_base_model_version": architecture.base_version,
            "modelspec.sai_model_spec": "1.0.1",
            "modelspec.architecture": architecture.model_spec,
            "modelspec.implementation": architecture.implementation,
            "modelspec.title": title,
            "modelspec.resolution": "1024x1024",
        }
    return metadata
