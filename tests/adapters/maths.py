"""Our arithmetic with torch's tensors before and after, as the oracles have them."""

from __future__ import annotations

from arrays import to_array, to_tensor

from ckpt_tools.adapters.families import change as ours
from ckpt_tools.adapters.families import rotation
from ckpt_tools.adapters.families.change import PLAIN


def in_arrays(module):
    return module.with_factors({role: to_array(factor) for role, factor in module.factors.items()})


def change_of(module, shape, setting=PLAIN, role="weight"):
    return ours.change_of(in_arrays(module), tuple(shape), setting, role)


def apply(change, rows, start=0):
    return to_tensor(change.apply(to_array(rows).copy(), start))


def new_weight(module, weight, setting=PLAIN):
    return to_tensor(ours.new_weight(in_arrays(module), to_array(weight), setting))


def delta(module, shape, setting=PLAIN):
    return to_tensor(ours.delta(in_arrays(module), tuple(shape), setting))


def cayley(skew):
    return to_tensor(rotation.cayley(to_array(skew)))


def rotate_inputs_by_butterfly(weight, stored):
    return to_tensor(rotation.rotate_inputs_by_butterfly(to_array(weight), to_array(stored)))
