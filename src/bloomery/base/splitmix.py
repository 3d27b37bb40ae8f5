"""splitmix64: the hash behind data order, masking, document shuffles and initial values. Sole owner of its constants:
changing one changes the data of every existing run."""

import numpy as np
from numpy.typing import NDArray

GOLDEN = 0x9E3779B97F4A7C15
MIX_1, MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = 2**64 - 1

U64 = NDArray[np.uint64]


def splitmix64(values: U64) -> U64:
    """A well mixed 64-bit hash of each value."""
    return mix_in_place(values + np.uint64(GOLDEN))


def splitmix64_one(value: int) -> int:
    """The same for one Python integer: a tenth of what numpy takes for it."""
    mixed = (value + GOLDEN) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * MIX_1) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * MIX_2) & _MASK
    return mixed ^ (mixed >> 31)


def mix_in_place(z: U64) -> U64:
    """The same of values to which GOLDEN has been added; overwrites them, and returns them."""
    z = np.asarray(z)
    z ^= z >> np.uint64(30)
    z *= np.uint64(MIX_1)
    z ^= z >> np.uint64(27)
    z *= np.uint64(MIX_2)
    z ^= z >> np.uint64(31)
    return z
