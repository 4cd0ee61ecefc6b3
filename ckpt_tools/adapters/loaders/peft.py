"""What `PeftModel.from_pretrained` does with an adapter's files.

Source: peft 0.21, peft_model.py, utils/save_and_load.py, tuners/tuners_utils.py (`check_target_module_exists`).
"""

from __future__ import annotations

from collections.abc import Mapping

from ckpt_tools.adapters.keys import parse_key
from ckpt_tools.adapters.loaders.loading import AdapterFile, Loading, RejectedError
from ckpt_tools.adapters.sidecars import by_pattern
from ckpt_tools.adapters.target_modules import matched, parents_of

FILE = "adapter_model.safetensors"
ROOT = "base_model.model."
_WRAPPED = ".base_layer"
"""Ends the path of what PEFT wraps."""
_TYPES = {"LORA": "lora", "LOHA": "loha", "LOKR": "lokr", "OFT": "oft", "BOFT": "boft"}


def load(file: AdapterFile, loading: Loading) -> None:
    """Apply PEFT's rules.

    Raises:
        RejectedError: It raises.
    """
    config = file.config
    if config is None:
        raise RejectedError("there is no adapter_config.json beside it")
    if file.file != FILE:
        raise RejectedError(f"it looks for {FILE}, and this is {file.file}")
    kind = config.get("peft_type")
    family = _TYPES.get(str(kind))
    if family is None:
        raise RejectedError(f"peft_type is {kind!r}")
    alpha = "lora_alpha" if family == "lora" else "alpha"
    if family in ("lora", "loha", "lokr") and alpha not in config:
        loading.say(
            "loader-misreads",
            "error",
            "adapter_config.json",
            f"{alpha} is missing, and PEFT silently takes 8",
            "ckpt export-lora SRC DST --alpha VALUE writes it",
        )
    if family in ("lora", "loha", "lokr"):
        loading.say_scale(alpha, config.get(alpha))
    _match(file, config, family, loading)
    if file.base is None:
        loading.say(
            "loader-unchecked-base",
            "info",
            file.file,
            "without --base the modules' paths and target_modules are not held against the model",
        )


def _match(file: AdapterFile, config: Mapping[str, object], family: str, loading: Loading) -> None:
    saved = config.get("modules_to_save")
    saved_names = [name for name in saved if isinstance(name, str)] if isinstance(saved, list) else []
    modules = parents_of(file.base) if file.base is not None else None
    for name, head in file.tensors.items():
        if not name.startswith(ROOT):
            loading.ignored[name] = f"the name does not begin with {ROOT}"
            continue
        inner = name.removeprefix(ROOT)
        key = parse_key(inner)
        if key is None or key.family == "saved":
            module = inner.rpartition(".")[0]
            if any(module == each or module.endswith(f".{each}") for each in saved_names):
                loading.use(name, module)
            elif (reason := _why_not_plain(inner, head.shape, file, config)) is not None:
                loading.ignored[name] = reason
            else:
                loading.use(name, module.removesuffix(_WRAPPED))
        elif key.adapter not in (None, "default"):
            loading.ignored[name] = f"it is named for the adapter {key.adapter!r}, and PEFT loads as 'default'"
        elif key.style != "peft":
            loading.ignored[name] = "the suffix is not PEFT's"
        elif key.family != family:
            loading.ignored[name] = f"peft_type is {config.get('peft_type')}"
        elif key.role == "magnitude" and config.get("use_dora") is not True:
            loading.ignored[name] = "use_dora is not set: a DoRA becomes another adapter"
        elif modules is not None and key.path not in modules:
            loading.ignored[name] = "the base model has no such module"
        elif matched(config.get("target_modules"), key.path) is False and not config.get("target_parameters"):
            loading.ignored[name] = "target_modules does not match it, so that it is not loaded, without a warning"
        else:
            loading.use(name, key.path)
        if name in loading.used and key is not None and key.role == "A":
            _check_rank(name, key.path, head.shape, config)
    if modules is not None:
        _say_idle(modules, set(loading.modules), config, loading)


def _why_not_plain(inner: str, shape: tuple[int, ...], file: AdapterFile, config: Mapping[str, object]) -> str | None:
    """Why a tensor of the base's own does not go into the model; None when it does, as trained biases do.

    Source: peft 0.21 `utils/save_and_load.py`: what is no factor is loaded by its name in the model, in which targets
    are wrapped.
    """
    holder, _, parameter = inner.rpartition(".")
    module = holder.removesuffix(_WRAPPED)
    is_target = None if config.get("target_parameters") else matched(config.get("target_modules"), module)
    if is_target is not None and is_target != holder.endswith(_WRAPPED):
        if is_target:
            return "its module is a target, whose own tensors PEFT keeps under base_layer"
        return "its module is no target, and has no base_layer"
    if file.base is None:
        return None
    if f"{module}.{parameter}" not in file.base:
        return "the base model has no such tensor, and modules_to_save does not name it"
    if file.base[f"{module}.{parameter}"] != shape:
        raise RejectedError(f"size mismatch: {inner} is {list(shape)}, the base model's is another")
    return None


def _check_rank(name: str, path: str, shape: tuple[int, ...], config: Mapping[str, object]) -> None:
    found, rank = by_pattern(config.get("rank_pattern"), path, where="rank_pattern")
    if not found:
        rank = config.get("r")
    if isinstance(rank, int) and shape and shape[0] != rank and not config.get("target_parameters"):
        raise RejectedError(f"size mismatch: {name} has {shape[0]} rows, the configuration's rank is {rank}")


def _say_idle(modules: frozenset[str], used: set[str], config: Mapping[str, object], loading: Loading) -> None:
    target = config.get("target_modules")
    parents = {module.rpartition(".")[0] for module in modules}
    idle = sorted(
        module for module in modules if module not in used and module not in parents and matched(target, module)
    )
    if idle:
        loading.say(
            "loader-needs",
            "warning",
            "adapter_config.json",
            f"target_modules also matches {len(idle)} modules that the file has nothing for, such as {idle[0]}: PEFT "
            "gives them new adapters, which change nothing",
        )
