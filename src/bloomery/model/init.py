"""Initial values as a function of (seed, parameter name, global position of the element): no layout can change them.

Counter-based: the splitmix64 hash of a key and a counter gives two uniform numbers, Box-Muller two normal ones. So any
block of any parameter is made without the rest of it. Computed in float64 and rounded to float32: the last bit of a
machine's logarithm almost never shows, and where a device's could, the CPU's is taken.
"""

import hashlib
import math
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bloomery.base.ranks import Piece
from bloomery.base.splitmix import GOLDEN, MIX_1, MIX_2, mix_in_place
from bloomery.config.recipe import ModelSection
from bloomery.families.registry import FAMILIES

Rule = Literal["normal", "residual", "zeros", "ones"]
_Numbers = TypeVar("_Numbers", np.ndarray, Tensor)

RULES: tuple[tuple[str, Rule], ...] = (
    (r"embed\.(tokens|positions|token_types)\.weight", "normal"),
    (r"layers\.\d+\.(attention\.qkv|mlp\.up|mlp\.gate)\.weight", "normal"),
    (r"layers\.\d+\.(attention\.out|mlp\.down)\.weight", "residual"),
    (r"(head|head\.dense|pooler\.dense|order_head)\.weight", "normal"),
    (r"(layers\.\d+\.(attention_norm|mlp_norm)|embed\.norm|final_norm|head\.norm)\.weight", "ones"),
    (r"layers\.\d+\.attention\.(q_norm|k_norm)\.weight", "ones"),
    (r".+\.bias", "zeros"),
)
"""Every parameter name matches exactly one; a test holds that."""
_OWN_RULES: tuple[tuple[str, Rule], ...] = (*RULES, (r"(.+\.)?[^.]*norm[^.]*\.weight", "ones"), (r".+", "normal"))
"""Of a model of the user's own: the first that matches."""

# Values do not depend on these. Alone, temporaries of 256 KiB stay in the core's cache; together, threads need long
# operations or they queue for the interpreter lock. Million elements a second on the H200's host: one thread 85 with
# chunks of 2^15 pairs and 29 with 2^18, 16 threads 78 and 336.
_PAIRS_PER_THREAD, _MOST_PAIRS = 1 << 15, 1 << 18
_ELEMENTS_PER_COPY = 1 << 24
_DEVICE_ERROR = 2.0**-48
"""What the logarithms of two machines may come to, relative: some last bits of float64."""
# cos(pi x) and sin(pi x) / x as polynomials of x * x, good to 1e-10 for |x| <= 1/2. Four times as fast as numpy's sine
# and cosine on ARM, and the same on every machine.
_COSINE = [(-1) ** k * math.pi ** (2 * k) / math.factorial(2 * k) for k in range(8)]
_SINE = [(-1) ** k * math.pi ** (2 * k + 1) / math.factorial(2 * k + 1) for k in range(7)]


def rule_of(name: str, config: ModelSection) -> Rule:
    """How the parameter called `name` starts."""
    for pattern, rule in RULES if FAMILIES[config.family].build is None else _OWN_RULES:
        if re.fullmatch(pattern, name):
            return rule
    raise AssertionError(f"no initialisation rule for parameter {name}: add one to RULES")


def initial_slice(
    config: ModelSection, seed: int, name: str, shape: Sequence[int], offset: Sequence[int], size: Sequence[int]
) -> np.ndarray:
    """The block [offset, offset + size) of the initial parameter `name`, whose whole has `shape`. float32, exactly that
    slice of the whole. A tied `head.weight` (alone on a pipeline stage) has the values of the embedding."""
    rule = rule_of(name, config)
    if rule == "zeros" or rule == "ones":
        return np.full(size, 0.0 if rule == "zeros" else 1.0, dtype=np.float32)
    return _normal_block(*_key_and_std(config, seed, name), shape, offset, size)


def _key_and_std(config: ModelSection, seed: int, name: str) -> tuple[np.uint64, float]:
    std = config.init_std
    if rule_of(name, config) == "residual" and FAMILIES[config.family].scaled_residual_init:
        std /= math.sqrt(2 * config.num_layers)
    if name == "head.weight" and config.tie_embeddings:
        name = "embed.tokens.weight"
    return _key(seed, name), std


@torch.no_grad()
def initialise(pieces: Iterable[tuple[str, Piece]], config: ModelSection, seed: int) -> None:
    """Fill pieces of parameters in place, each rank its own; the same values on any device, rounded to the dtype."""
    for name, piece in pieces:
        size = tuple(piece.tensor.shape)
        rows = max(1, _ELEMENTS_PER_COPY // max(1, math.prod(size[1:])))
        for row in range(0, size[0], rows):
            block = (min(rows, size[0] - row), *size[1:])
            offset = (piece.offset[0] + row, *piece.offset[1:])
            into = piece.tensor[row : row + rows]
            if into.device.type == "cpu" or rule_of(name, config) in ("zeros", "ones"):
                values = torch.from_numpy(initial_slice(config, seed, name, piece.shape, offset, block))
            else:
                values = _device_block(into.device, *_key_and_std(config, seed, name), piece.shape, offset, block)
            into.copy_(values)


def _key(seed: int, name: str) -> np.uint64:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


def _normal_block(
    key: np.uint64, std: float, shape: Sequence[int], offset: Sequence[int], size: Sequence[int]
) -> np.ndarray:
    row_numbers, pairs_per_row, first_pair, last_pair = _pairs_of(shape, offset, size)
    block = np.empty((row_numbers.size, size[-1]), dtype=np.float32)
    threads = torch.get_num_threads()
    pairs_per_chunk = min(threads * _PAIRS_PER_THREAD, _MOST_PAIRS)
    rows_per_chunk = max(1, pairs_per_chunk // max(1, last_pair - first_pair))

    def fill(row: int) -> None:
        rows = slice(row, row + rows_per_chunk)
        for start in range(first_pair, last_pair, pairs_per_chunk):
            stop = min(start + pairs_per_chunk, last_pair)
            counters = row_numbers[rows, None] * np.uint64(pairs_per_row) + np.arange(start, stop, dtype=np.uint64)
            values = _normal_pairs(key, counters, std)
            left, right = max(2 * start, offset[-1]), min(2 * stop, offset[-1] + size[-1])
            block[rows, left - offset[-1] : right - offset[-1]] = values[:, left - 2 * start : right - 2 * start]

    with ThreadPoolExecutor(threads) as pool:  # numpy lets go of the interpreter lock
        list(pool.map(fill, range(0, row_numbers.size, rows_per_chunk)))
    return block.reshape(size)


def _pairs_of(
    shape: Sequence[int], offset: Sequence[int], size: Sequence[int]
) -> tuple[NDArray[np.uint64], int, int, int]:
    """Elements 2j and 2j + 1 of a row (the last dimension) are one Box-Muller pair, numbered over the whole. Of a
    block: the numbers of its rows, the pairs that a whole row has, and which of them the block needs."""
    row_numbers = np.zeros(1, dtype=np.uint64)
    for length, first, count in zip(shape[:-1], offset[:-1], size[:-1], strict=True):
        places = np.arange(first, first + count, dtype=np.uint64)
        row_numbers = (row_numbers[:, None] * np.uint64(length) + places).ravel()
    return row_numbers, -(-shape[-1] // 2), offset[-1] // 2, -(-(offset[-1] + size[-1]) // 2)


def _normal_pairs(key: np.uint64, counters: np.ndarray, std: float) -> np.ndarray:
    """Two normal numbers, side by side in the last dimension, for each counter. Overwrites `counters`."""
    z = counters
    z += np.uint64(1)
    z *= np.uint64(GOLDEN)
    z += key
    mix_in_place(z)
    # One hash makes both: bits 32-63 the radius (never log 0), bit 31 its sign, bits 0-30 half a turn of angle.
    radius = (z >> np.uint64(32)).astype(np.float64)
    radius += 1.0
    radius *= 2.0**-32
    np.log(radius, out=radius)
    radius *= -2.0 * std * std
    np.sqrt(radius, out=radius)
    radius *= 1.0 - 2.0 * ((z >> np.uint64(31)) & np.uint64(1)).astype(np.float64)
    x = (z & np.uint64(0x7FFFFFFF)).astype(np.float64)
    x *= 2.0**-31
    x -= 0.5
    square = x * x
    pairs = np.empty((*counters.shape, 2), dtype=np.float32)
    np.multiply(_polynomial(_COSINE, square), radius, out=pairs[..., 0], casting="same_kind")
    radius *= x
    np.multiply(_polynomial(_SINE, square), radius, out=pairs[..., 1], casting="same_kind")
    return pairs.reshape(*counters.shape[:-1], -1)


def _device_block(
    device: torch.device, key: np.uint64, std: float, shape: Sequence[int], offset: Sequence[int], size: Sequence[int]
) -> Tensor:
    """What _normal_block makes, to the bit, computed on a device: 1.3 billion values in less than a second."""
    row_numbers, pairs_per_row, first_pair, last_pair = _pairs_of(shape, offset, size)
    rows = torch.from_numpy(row_numbers.view(np.int64)).to(device)[:, None] * pairs_per_row
    counters = (rows + torch.arange(first_pair, last_pair, device=device)).flatten()
    pairs = _device_pairs(int(key), counters, std)
    values = pairs.float()
    doubtful = (pairs * (1 + _DEVICE_ERROR)).float() != (pairs * (1 - _DEVICE_ERROR)).float()
    where = doubtful.any(-1).nonzero()[:, 0]  # one in 10^8
    exact = _normal_pairs(key, counters[where].cpu().numpy().view(np.uint64), std)
    values[where] = torch.from_numpy(exact).view(-1, 2).to(device)
    skipped = offset[-1] - 2 * first_pair
    return values.view(row_numbers.size, -1)[:, skipped : skipped + size[-1]].reshape(tuple(size))


def _device_pairs(key: int, counters: Tensor, std: float) -> Tensor:
    """The steps of _normal_pairs, each a kernel of its own, so that no two are fused and rounded once; in float64."""

    def signed(value: int) -> int:  # torch knows no products of unsigned numbers
        return (value + 2**63) % 2**64 - 2**63

    def shifted(bits: int) -> Tensor:
        return (z >> bits) & ((1 << (64 - bits)) - 1)

    z = (counters + 1) * signed(GOLDEN) + signed(key)
    z = (z ^ shifted(30)) * signed(MIX_1)
    z = (z ^ shifted(27)) * signed(MIX_2)
    z = z ^ shifted(31)
    radius = ((shifted(32).double() + 1.0) * 2.0**-32).log().mul(-2.0 * std * std).sqrt()
    radius *= 1.0 - 2.0 * ((z >> 31) & 1).double()
    x = (z & 0x7FFFFFFF).double() * 2.0**-31 - 0.5
    square = x * x
    return torch.stack([_polynomial(_COSINE, square) * radius, _polynomial(_SINE, square) * (radius * x)], -1)


def _polynomial(coefficients: Sequence[float], x: _Numbers) -> _Numbers:
    total = x * coefficients[-1]
    for coefficient in coefficients[-2:0:-1]:
        total += coefficient
        total *= x
    total += coefficients[0]
    return total
