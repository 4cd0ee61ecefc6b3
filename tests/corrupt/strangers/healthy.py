"""Every architecture of transformers, from its own default config cut small: does it build in the sandbox as without?

`PYTHONPATH=tests:. python -m corrupt.strangers.healthy [N]` prints the totals, and where walls make a difference.
"""

from __future__ import annotations

import json
import sys
import time
import warnings


def configs(count=None):
    """Yield architecture → its default config, cut in depth."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    from ckpt_tools.preflight.shrink_run import cut_depth

    names = {}
    for table in (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_MAPPING_NAMES,
    ):
        for model_type, name in table.items():
            names.setdefault(model_type, name if isinstance(name, str) else name[0])
    for model_type, name in list(names.items())[:count]:
        try:
            config = getattr(transformers, name).config_class().to_dict()
        except Exception as error:
            print(f"{name}: no default config: {type(error).__name__}", file=sys.stderr)
            continue
        config = cut_depth(json.loads(json.dumps(config, default=str)))
        yield name, config | {"architectures": [name], "model_type": model_type}


def build(config):
    """Build on meta, as ckpt does; return the number of parameters."""
    import torch

    from ckpt_tools.models.hf_recipe import HfRecipe

    with torch.device("meta"):
        model = HfRecipe(config, "config.json").build()
    return sum(parameter.numel() for parameter in model.parameters())


def build_without(config):
    """Build on meta as transformers does, without any walls: what the walls are compared with."""
    import torch
    import transformers

    model_class = getattr(transformers, config["architectures"][0])
    with torch.device("meta"):
        model = model_class(model_class.config_class.from_dict(dict(config)))
    return sum(parameter.numel() for parameter in model.parameters())


def _without(config):
    """Build in a copy without walls; return the number of parameters or None."""
    import os

    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, str(build_without(config)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        text = stream.read()
    os.waitpid(pid, 0)
    return int(text) if text else None


def main(count):
    from corrupt.strangers.copies import build_in_a_copy

    warnings.simplefilter("ignore")
    import torch  # noqa: F401 - imported once, for all copies
    import transformers  # noqa: F401

    import ckpt_tools.models.hf_recipe  # noqa: F401

    built, neither, differ = [], [], []
    start = time.monotonic()
    for name, config in configs(count):
        behind = build_in_a_copy(build, config, foreign=("/nowhere",))
        if "result" in behind:
            built.append(name)
            continue
        without = _without(config)
        why = behind.get("error", behind).get("what", behind)
        (neither if without is None else differ).append((name, why))
    print(f"built in the sandbox {len(built)}, neither way {len(neither)}, only without walls {len(differ)}")
    print(f"{time.monotonic() - start:.0f} s")
    for name, why in differ:
        print("ONLY WITHOUT", name, why)
    for name, why in neither:
        print("NEITHER", name, why)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else None)
