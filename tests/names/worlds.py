"""Small models of transformers as trainers save them, and what from_pretrained makes of what gather wrote."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import transformers

from ckpt_tools.preflight.shrink_run import cut_depth, shrink_config


def tiny(name):
    """A model of a class of transformers, as narrow as it builds, with weights that differ from one another."""
    transformers.utils.logging.disable_progress_bar()
    kind = getattr(transformers, name)
    values = json.loads(kind.config_class().to_json_string(use_diff=False))
    for change in (shrink_config, cut_depth):
        try:
            torch.manual_seed(0)
            model = kind(kind.config_class.from_dict(change(values)))
            break
        except ValueError:
            continue
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    return model.eval()


def save_live(state, path):
    """Save a state dict as a trainer does."""
    shutil.rmtree(path, ignore_errors=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.save(dict(state), checkpoint_id=str(path), no_dist=True)
    return str(path)


def config_beside(model, path):
    """A directory with nothing but the model's config.json."""
    Path(path).mkdir()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(path)
    return str(path)


def loading_problems(kind, path):
    """What from_pretrained does not find, does not know, or cannot use."""
    _, report = kind.from_pretrained(path, output_loading_info=True)
    kinds = ("missing_keys", "unexpected_keys", "mismatched_keys", "conversion_errors")
    return {what: report[what] for what in kinds if report.get(what)}
