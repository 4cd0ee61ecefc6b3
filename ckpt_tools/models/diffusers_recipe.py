"""Models that a config.json of diffusers describes (`_class_name`). No code from a checkpoint is run. Imports torch."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ckpt_tools.errors import UsageError
from ckpt_tools.models.computed import parameters_on_meta
from ckpt_tools.models.config_recipe import FEEDS_ITSELF, ConfigRecipe
from ckpt_tools.models.diffusers_inputs import Wanted, draw
from ckpt_tools.models.parameters import replace_parameters
from ckpt_tools.models.recipe import BATCH_SIZE, Batch

_SMALL = Wanted(samples=BATCH_SIZE, latents=16, text=8)
_MAX_TEXT = 512
"""Tokens of text: what FLUX's and most pipelines cut at, beside 4096 for a picture of 1024 × 1024 pixels."""
_ZERO_STD = 0.02
"""Of what a class sets to zero: the output of a fresh model would be zero, and so would nearly every gradient."""
_TARGET_SEED = 20


class DiffusersRecipe(ConfigRecipe):
    """A diffusers model with the config of a checkpoint; its forward returns the loss of a training step.

    Parameters are made on the default device. What a class computes of nothing is made on the CPU even if that is
    meta: tables of frequencies are plain attributes in many models (Qwen-Image), and no load brings them back.
    """

    depth_keys = re.compile(r"(num_(\w+_)?layers|depth|n_layers|num_(text|visual)_blocks)")

    def _find_class(self, otherwise: str) -> str:
        self._class = _find_class(self._values["_class_name"], self.where, otherwise)
        name: str = self._class.__name__
        return name

    def _construct(self) -> nn.Module:
        if torch.get_default_device().type == "meta":
            with torch.device("cpu"), parameters_on_meta():
                model: nn.Module = self._class.from_config(self.settled())
            # What a class puts in the place of a parameter later than it registers one.
            replace_parameters(model, lambda one: None if one.is_meta else one.detach().to("meta"))
        else:
            model = self._class.from_config(self.settled())
            for parameter in model.parameters():
                if parameter.is_floating_point() and not bool(parameter.any()):
                    nn.init.normal_(parameter, std=_ZERO_STD)
        model.register_forward_hook(_to_loss)
        return model

    def make_batch(self, model: nn.Module) -> Batch:
        """Draw what forward takes, for a small picture."""
        return self.draw(model, _SMALL)

    def sized_batch(self, model: nn.Module, *, samples: int, tokens: int) -> Batch:
        """Draw what forward takes: of a sample's tokens a ninth, 512 at most, are text, the others latents."""
        text = min(_MAX_TEXT, tokens // 9)
        return self.draw(model, Wanted(samples=samples, latents=tokens - text, text=text))

    def draw(self, model: nn.Module, wanted: Wanted) -> Batch:
        """Draw what forward takes, on the default device."""
        found = draw(self._class, model, wanted)
        if isinstance(found, str):
            raise UsageError(
                f"no batch is known for a {self.title}: its forward needs {found}",
                where=self.where,
                hint=self._otherwise or FEEDS_ITSELF,
            )
        return found

    def notes_on(self, batch: Batch) -> tuple[str, ...]:  # noqa: ARG002 - the same for all
        """Say what the loss is."""
        return ("the loss is the mean squared distance of what the model returns from drawn noise",)


def _find_class(name: object, where: str, otherwise: str) -> Any:  # noqa: ANN401 - a class of diffusers
    if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
        raise UsageError("the config names no class", where=where, hint=otherwise)
    try:
        import diffusers
    except ModuleNotFoundError as error:
        raise UsageError(
            f"building a {name} needs diffusers",
            where=where,
            hint=f"pip install 'ckpt-tools[diffusers]', or {otherwise}",
        ) from error
    diffusers.utils.logging.set_verbosity_error()
    found = getattr(diffusers, name, None)
    # The name comes from a file: only a model class may be called.
    kinds = (diffusers.ModelMixin, diffusers.configuration_utils.ConfigMixin)
    if not (isinstance(found, type) and all(issubclass(found, kind) for kind in kinds)):
        raise UsageError(
            f"diffusers {diffusers.__version__} has no model class {name}",
            where=where,
            hint=otherwise,
        )
    return found


def _to_loss(model: nn.Module, args: object, output: object) -> dict[str, torch.Tensor]:  # noqa: ARG001 - a hook
    """Return the loss in place of what forward returns: its mean squared distance from noise that is always the same.

    The velocity of flow matching, and the noise that a UNet predicts, are such noise.
    """
    losses = []
    generator = torch.Generator().manual_seed(_TARGET_SEED)
    for tensor in tree_leaves(output):
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            continue
        if tensor.requires_grad or not torch.is_grad_enabled():
            target = torch.randn(tensor.shape, generator=generator, device="cpu").to(tensor.device)
            losses.append((tensor.float() - target).square().mean())
    return {"loss": torch.stack(losses).sum()} if losses else {}
