"""What kohya's trainers do with an adapter's names when they load network weights, with LyCORIS beside sd-scripts.

Source: github.com/kohya-ss/sd-scripts, networks/lora.py, lora_flux.py, lora_sd3.py, and musubi-tuner, networks/lora.py
(`create_network_from_weights`); lycoris-lora 4.1, kohya.py, modules/*.py (`make_module_from_state_dict`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ckpt_tools.adapters.architectures import ARCHITECTURES
from ckpt_tools.adapters.architectures.names import find_as
from ckpt_tools.adapters.ecosystems.simulation import AdapterFile, Loading, RejectedError

_SUFFIX = re.compile(
    r"(?P<module>[^.]+)\.(?P<suffix>lora_(?:up|down|mid)\.weight|alpha|dora_scale|hada_\w+|lokr_\w+|diff|diff_b"
    r"|oft_blocks|oft_diag|rescale|[ab][12]\.weight)"
)
_PLAIN = ("lora_up.weight", "lora_down.weight", "alpha")
_WITHOUT_ALPHA = {"diff", "diff_b"}


def load(file: AdapterFile, loading: Loading) -> None:
    """Apply kohya's rules."""
    if file.architecture is None:
        loading.unchecked(file.file, "ckpt does not know the model family", "--architecture names one that ckpt knows")
        return
    architecture = None if file.architecture == "llm" else ARCHITECTURES[file.architecture]
    kohya = None if architecture is None else architecture.kohya
    if architecture is None or kohya is None:
        what = "language models" if architecture is None else architecture.title
        loading.ignored |= dict.fromkeys(file.tensors, f"kohya's sd-scripts and musubi-tuner have no {what}")
        return
    needs_lycoris = False
    outside: list[str] = []
    ends: dict[str, set[str]] = {}
    for name in file.tensors:
        hit = _SUFFIX.fullmatch(name)
        if hit is None:
            continue
        for part in architecture.parts:
            prefix = f"{part.kohya[0]}_"
            if not hit["module"].startswith(prefix):
                continue
            spelling = "native" if part.is_encoder else kohya.spelling
            place = find_as(hit["module"].removeprefix(prefix), part, spelling)
            if place is not None:
                loading.use(name, f"{part.component}.{place.found}")
                needs_lycoris |= hit["suffix"] not in _PLAIN
                ends.setdefault(hit["module"], set()).add(hit["suffix"])
                native = place.native
                if not part.is_encoder and (not native.startswith(kohya.blocks) or native.startswith(kohya.outside)):
                    outside.append(native)
    _check_alphas(ends, takes_rank=kohya.takes_rank and not needs_lycoris)
    if outside and not needs_lycoris:
        loading.needs(
            outside[0],
            f"{kohya.tool}'s networks look for modules inside the blocks, and skip others unless they are configured "
            "for them: load it with --network_module lycoris.kohya",
        )
    if needs_lycoris:
        loading.say(
            "loader-needs",
            "info",
            file.file,
            f"networks.lora of {kohya.tool} supports only plain LoRA: load it with --network_module lycoris.kohya",
        )


def _check_alphas(ends: Mapping[str, set[str]], *, takes_rank: bool) -> None:
    """Of the loaders networks.lora alone takes the rank for an alpha that is missing; the others end with an error."""
    lacking = [module for module, found in ends.items() if "alpha" not in found and not found <= _WITHOUT_ALPHA]
    if lacking and not takes_rank:
        raise RejectedError(f"{len(lacking)} modules have no alpha, which it looks up for each: {lacking[0]}")
