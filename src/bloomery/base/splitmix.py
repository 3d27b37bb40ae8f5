"""splitmix64: the hash behind data order, masking, document shuffles and initial values. Sole owner of its constants:
changing one changes the data of every existing run."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

GOLDEN = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

U64 = NDArray[np.uint64]


def splitmix64(values: U64) -> U64:
    """A well mixed 64-bit hash of each value."""
    return mix_in_place(values + np.uint64(GOLDEN))


def mix_in_place(z: U64) -> U64:
    """The same of values to which GOLDEN has been added; overwrites them, and returns them."""
    z = np.asarray(z)
    z ^= z >> np.uint64(30)
    z *= np.uint64(_MIX_1)
    z ^= z >> np.uint64(27)
    z *= np.uint64(_MIX_2)
    z ^= z >> np.uint64(31)
    return z
