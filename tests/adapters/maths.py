"""What ckpt makes of whole weights; with torch's tensors before and after, as the oracles have them, or numpy's."""

from __future__ import annotations

import numpy as np
from arrays import to_array, to_tensor

from ckpt_tools.adapters.families import changes as ours, family_of
from ckpt_tools.adapters.families.family import PLAIN


def in_arrays(module):
    return module.with_factors({role: to_array(factor) for role, factor in module.factors.items()})


def change_of(module, shape, setting=PLAIN, role="weight"):
    return ours.change_of(in_arrays(module), tuple(shape), setting, role)


def apply(change, rows, start=0):
    return to_tensor(change.apply(to_array(rows).copy(), start))


def new_weight(module, weight, setting=PLAIN):
    return to_tensor(weight_of_arrays(in_arrays(module), to_array(weight), setting))


def delta(module, shape, setting=PLAIN):
    return to_tensor(delta_of_arrays(in_arrays(module), tuple(shape), setting))


def weight_of_arrays(module, weight, setting=PLAIN):
    change = ours.change_of(module, weight.shape, setting)
    copy = weight.astype(np.float32).reshape(change.rows, change.columns)
    return change.apply(copy, 0).reshape(weight.shape)


def delta_of_arrays(module, shape, setting=PLAIN):
    change = ours.change_of(module, shape, setting)
    assert change.is_additive
    return change.delta(0, change.rows).reshape(shape)


def scale_of(module):
    return family_of(module).scale(module)


def cayley(skew):
    return to_tensor(ours.cayley(to_array(skew)))


def rotate_inputs_by_butterfly(weight, stored):
    return to_tensor(ours.rotate_inputs_by_butterfly(to_array(weight), to_array(stored)))
