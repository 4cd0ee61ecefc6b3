"""What PEFT does with tensors that stand once for all modules: projections, banks of vectors, prompts.

Source: peft 0.21 `tuners/{vera,pvera,randlora,vblora,prompt_tuning,prefix_tuning}/model.py`, `tuners/tuners_utils.py`
(`BasePromptEncoder`), peft_model.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckpt_tools.adapters.adapter import Shape
from ckpt_tools.adapters.base.tied import EMBEDDINGS
from ckpt_tools.adapters.ecosystems.peft.config_rules import Config, is_target
from ckpt_tools.adapters.ecosystems.simulation import AdapterFile, Loading, RejectedError
from ckpt_tools.adapters.families.carried import Carried, Numbers
from ckpt_tools.adapters.read.sidecars import ADAPTER_CONFIG


def check_shared(family: Carried, seen: Mapping[str, Shape], config: Config, base: Mapping[str, Shape]) -> str | None:
    """Compare what all modules share (role → shape) with PEFT's; return what is not known, or raise RejectedError."""
    if not family.shared:
        return None
    targets = [name.rpartition(".")[0] for name in base if name.endswith(".weight")]
    weights = [base[f"{path}.weight"] for path in targets if is_target(config, path) is not False]
    weights = [shape[::-1] if config.get("fan_in_fan_out") else shape for shape in weights if len(shape) == 2]
    if family.shared_of is None or not weights:
        return f"which tensors the modules of {family.title} share"
    try:
        wanted = family.shared_of(Numbers(config), weights)
    except KeyError as error:
        return f"{error.args[0]} of its configuration"
    if config.get("save_projection") is False:
        return "which projections PEFT makes anew (save_projection is false)"
    for role, shape in wanted.items():
        if role not in seen:
            raise RejectedError(f"{family.root}{role} is missing")
        if seen[role] != shape:
            raise RejectedError(f"size mismatch: {family.root}{role} is {list(seen[role])}, PEFT makes {list(shape)}")
    return None


def load_prompt(file: AdapterFile, config: Config, family: Carried, loading: Loading) -> None:
    """Apply the rules for embeddings of virtual tokens; raise RejectedError where PEFT refuses them."""
    kind, name = config.get("peft_type"), "prompt_embeddings"
    own = {role: head.shape for role, head in file.tensors.items() if family.shared_name(role) is not None}
    if name not in own:
        raise RejectedError(f"it has no {name}")
    for each in own:
        loading.use(each, "prompt_encoder")
    if len(own) < len(file.tensors):
        loading.unchecked(file.file, "what PEFT does with tensors beside a prompt is not simulated")
    if config.get("task_type") is None:
        loading.unchecked(ADAPTER_CONFIG, "task_type is not set: without one PEFT adds prompts to no model of its own")
    numbers = Numbers(config)
    try:
        tokens, width = numbers["num_virtual_tokens"], numbers["token_dim"]
        if kind in ("PREFIX_TUNING", "CARTRIDGE"):
            wanted: Shape = (tokens, numbers["num_layers"] * 2 * width)
        else:
            wanted = (tokens * numbers["num_transformer_submodules"], width)
    except KeyError as error:
        loading.unchecked(ADAPTER_CONFIG, f"{error.args[0]} is not set, which PEFT takes from the model")
        return
    if own[name] != wanted:
        raise RejectedError(f"size mismatch: {name} is {list(own[name])}, PEFT makes {list(wanted)}")
    if kind in ("MULTITASK_PROMPT_TUNING", "PREFIX_TUNING", "CARTRIDGE"):
        loading.unchecked(file.file, f"whether the tensors of {kind} fit the base's attention and tasks")
    elif file.base is None:
        loading.needs_base(file.file, "without --base the width of its embeddings is not known")
    else:
        named = ((parameter.split(".")[-2:-1], shape) for parameter, shape in file.base.items())
        found = sorted({shape[1] for module, shape in named if len(shape) == 2 and {*module} & {*EMBEDDINGS}})
        if not found:
            loading.unchecked(ADAPTER_CONFIG, "which of the base's tensors are its embeddings")
        elif width not in found:
            raise RejectedError(f"token_dim is {width}, the base's embeddings have {', '.join(map(str, found))}")
