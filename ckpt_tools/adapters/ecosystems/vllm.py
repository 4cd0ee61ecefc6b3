"""What vLLM does with a PEFT adapter (`--enable-lora`).

Source: github.com/vllm-project/vllm 0.33, vllm/lora/peft_helper.py, lora_model.py, utils.py, worker_manager.py; issues
#9280 (modules_to_save), #2847 (rank), #21500 (lm_head).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ckpt_tools.adapters.base.model import parents_of
from ckpt_tools.adapters.ecosystems.peft.config_rules import variants_in
from ckpt_tools.adapters.ecosystems.peft.files import ROOT
from ckpt_tools.adapters.ecosystems.simulation import AdapterFile, Loading, RejectedError
from ckpt_tools.adapters.read.sidecars import ADAPTER_CONFIG, PEFT_FILE

_NAME = re.compile(r"(?P<module>.+)\.(?:lora_[AB]\.weight|lora_embedding_[AB])")
_DEFAULT_RANK = 16
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that --max-lora-rank takes."""
_FROZEN = (".embed_tokens.base_layer.weight", ".lm_head.base_layer.weight")
_EMBEDDINGS = ("embed_tokens", "lm_head", "wte", "word_embeddings")
_INNER = ".base_layer"
_EXPERTS = (".experts", f".experts{_INNER}")
_HEADS = ("classifier", "score")
"""What modules_to_save may name: the head of a classification model."""
_HARMLESS_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
"""Initialisations that it does not refuse; lora_ga changes the base all the same."""
_REFUSED = {
    "use_dora": "DoRA",
    "lora_bias": "biases of LoRA (lora_bias)",
    "alora_invocation_tokens": "aLoRA",
    "layer_replication": "layer_replication",
    "use_bdlora": "BD-LoRA",
    "use_qalora": "QALoRA",
}
"""Setting → what it says that it does not support."""


def load(file: AdapterFile, loading: Loading) -> None:
    """Apply vLLM's rules; raise RejectedError where it raises."""
    if file.architecture not in (None, "llm"):
        loading.ignored |= dict.fromkeys(file.tensors, "vLLM serves language models")
        return
    config = _checked_config(file)
    _check_rank(file, config, loading)
    loading.say_scale("lora_alpha", config.get("lora_alpha"))
    modules = parents_of(file.base) if file.base is not None else None
    if modules is None:
        loading.needs_base(file.file, "vLLM skips modules that the model does not have: give --base")
    embeddings = set()
    saved = _saved(config)
    for name, head in file.tensors.items():
        hit = _NAME.fullmatch(name)
        if name.endswith(_FROZEN):
            own = None if file.base is None else file.base.get(name.removeprefix(ROOT).replace(".base_layer.", "."))
            if own is None or own == tuple(head.shape):
                loading.use(name, name.removeprefix(ROOT).rpartition(".base_layer.")[0])
                loading.needs(
                    name, "vLLM uses the base's own embedding, not the one that PEFT saved: they must be equal"
                )
            else:
                loading.ignored[name] = "vLLM uses the base's own embedding, and this one has another size"
            continue
        if hit is None and name.rpartition(".")[0].rpartition(".")[2] in saved:
            loading.use(name, name.rpartition(".")[0])
            continue
        if hit is None:
            raise RejectedError(f"{name} is an unsupported LoRA weight")
        if len(head.shape) < 2 or 0 in head.shape:
            raise RejectedError(f"{name} has the shape {list(head.shape)}, and is copied into a matrix")
        module = hit["module"].removeprefix(ROOT)
        if modules is not None and module.removesuffix(_INNER) not in modules:
            loading.ignored[name] = "the base model has no such module"
            continue
        if module.rpartition(".")[2] in _EMBEDDINGS:
            embeddings.add(module)
        loading.use(name, module)
    _check_experts(loading)
    for name, reason in variants_in(config):
        loading.misreads(
            ADAPTER_CONFIG,
            f"vLLM ignores {name} and loads the factors as plain ones: {reason}",
            "ckpt export-lora or merge-lora show whether it can be served in another way",
        )
    if saved:
        loading.needs(
            file.file, "vLLM takes the head of a classification model, with --max-lora-cls-labels, and no other"
        )
    if embeddings:
        loading.needs(
            min(embeddings),
            "vLLM accepts adapters of embeddings and of lm_head for some models only, and refuses them for others",
        )


def _checked_config(file: AdapterFile) -> Mapping[str, object]:
    config = file.config
    if config is None:
        raise RejectedError("there is no adapter_config.json beside it")
    if file.file != PEFT_FILE:
        raise RejectedError(f"it looks for {PEFT_FILE}, but this is {file.file}")
    missing = [name for name in ("r", "lora_alpha", "target_modules") if name not in config]
    if missing:
        raise RejectedError(f"adapter_config.json lacks {', '.join(missing)}")
    if config.get("peft_type") != "LORA":
        raise RejectedError(f"peft_type is {config.get('peft_type')!r}, but it supports only LORA")
    if other := [name for name in _saved(config) if name not in _HEADS]:
        raise RejectedError(f"modules_to_save may name {' or '.join(_HEADS)} only, not {other[0]!r}")
    for name, what in _REFUSED.items():
        if config.get(name):
            raise RejectedError(f"it does not support {what}")
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower() not in _HARMLESS_INITS:
        raise RejectedError(f"init_lora_weights is {init!r}: PEFT changes the base for it")
    if config.get("bias", "none") != "none":
        raise RejectedError(f"bias is {config['bias']!r}, but it supports none")
    alpha = config["lora_alpha"]
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise RejectedError(f"lora_alpha is {alpha!r}, not a number")
    return config


def _saved(config: Mapping[str, object]) -> Sequence[object]:
    value = config.get("modules_to_save") or ()
    return value if isinstance(value, list) else (value,) if value else ()


def _check_experts(loading: Loading) -> None:
    """Of fused experts (PEFT's target_parameters) it takes both parameters, one wrapped in the other."""
    fused = [module for module in loading.modules if module.endswith(_EXPERTS)]
    for module in fused:
        if f"{module.removesuffix(_INNER)}{_INNER}" not in fused or module.removesuffix(_INNER) not in fused:
            raise RejectedError(f"{module} has factors for one parameter of the experts, and it asserts that both have")
    if fused:
        loading.needs(
            fused[0],
            "vLLM takes factors of fused experts for models whose experts it keeps fused; for the others start it with "
            "--enable-mixed-moe-lora-format, and say is_3d_lora_weight in the request",
        )


def _check_rank(file: AdapterFile, config: Mapping[str, object], loading: Loading) -> None:
    pattern = config.get("rank_pattern")
    ranks = [config.get("r"), *(pattern.values() if isinstance(pattern, dict) else ())]
    for each in ranks:
        if not isinstance(each, int) or isinstance(each, bool) or each < 1:
            raise RejectedError(f"a rank is {each!r}, not a positive integer")
    rank = max(each for each in ranks if isinstance(each, int))
    largest = max(
        (head.shape[0] for name, head in file.tensors.items() if name.endswith("lora_A.weight") and head.shape),
        default=rank,
    )
    rank = max(rank, largest)
    if rank > _RANKS[-1]:
        raise RejectedError(f"its rank is {rank}, the maximum is {_RANKS[-1]}")
    if rank > _DEFAULT_RANK:
        needed = next(each for each in _RANKS if each >= rank)
        loading.say(
            "loader-needs",
            "info",
            file.file,
            f"rank {rank} is above vLLM's default of {_DEFAULT_RANK}: start it with --max-lora-rank {needed}",
        )
