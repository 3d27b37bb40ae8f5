"""How one of our parameters becomes Hugging Face tensors, and back: the moves that all families share.

A family is a list of entries. Nothing here computes: values are renamed, cut, joined and transposed, so a round trip is
exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bloomery.base.errors import DataError, Problem
from bloomery.config.recipe import ModelSection
from bloomery.sizing.vocabulary import padded_vocab_size


@dataclass(frozen=True)
class Entry:
    """One parameter of ours and the tensors that hold it there."""

    ours: str
    theirs: tuple[str, ...]
    export: Callable[[Tensor], Sequence[Tensor]]
    load: Callable[[Sequence[Tensor]], Tensor]


def same(ours: str, theirs: str) -> Entry:
    return Entry(ours, (theirs,), lambda t: [t], lambda ts: ts[0])


def linear(ours: str, theirs: str, *, bias: bool = True) -> list[Entry]:
    """Weight and bias, as they are."""
    return [same(f"{ours}.{part}", f"{theirs}.{part}") for part in (("weight", "bias") if bias else ("weight",))]


def transposed(ours: str, theirs: str) -> list[Entry]:
    """A GPT-2 Conv1D: the weight is stored input by output."""
    weight = Entry(f"{ours}.weight", (f"{theirs}.weight",), lambda t: [t.T], lambda ts: ts[0].T)
    return [weight, same(f"{ours}.bias", f"{theirs}.bias")]


def vocabulary(ours: str, theirs: str | tuple[str, ...], config: ModelSection) -> Entry:
    """Rows of the vocabulary: the padding is dropped on the way out and zero on the way in. Several names there get the
    same values; the last is read."""
    padding = padded_vocab_size(config) - config.vocab_size
    names = (theirs,) if isinstance(theirs, str) else theirs

    def pad(tensors: Sequence[Tensor]) -> Tensor:
        if not padding:
            return tensors[-1]
        return torch.cat((tensors[-1], tensors[-1].new_zeros(padding, *tensors[-1].shape[1:])))

    return Entry(ours, names, lambda t: [t[: config.vocab_size]] * len(names), pad)


def separate_qkv(ours: str, theirs: Sequence[str], part: str, config: ModelSection) -> Entry:
    """Our grouped rows against separate query, key and value tensors (`theirs`, without `.weight`)."""
    names = tuple(f"{name}.{part}" for name in theirs)
    return Entry(f"{ours}.{part}", names, lambda t: split_qkv(t, config), lambda ts: join_qkv(ts, config))


def split_qkv(fused: Tensor, config: ModelSection) -> list[Tensor]:
    """Query, key and value rows, each by head, of [num_kv_heads, q_per_kv + 2, head_dim] rows (weight or bias)."""
    head_dim = config.hidden_size // config.num_heads
    groups = fused.reshape(config.num_kv_heads, -1, head_dim, *fused.shape[1:])
    return [part.flatten(0, 2) for part in (groups[:, :-2], groups[:, -2:-1], groups[:, -1:])]


def join_qkv(parts: Sequence[Tensor], config: ModelSection) -> Tensor:
    """The inverse of `split_qkv`."""
    head_dim = config.hidden_size // config.num_heads
    groups = [part.reshape(config.num_kv_heads, -1, head_dim, *part.shape[1:]) for part in parts]
    return torch.cat(groups, dim=1).flatten(0, 2)


def export_state(state: Mapping[str, Tensor], entries: Iterable[Entry]) -> dict[str, Tensor]:
    """Their names and tensors; contiguous, and where nothing had to move they share memory with `state`."""
    exported: dict[str, Tensor] = {}
    for entry in entries:
        for name, tensor in zip(entry.theirs, entry.export(state[entry.ours]), strict=True):
            exported[name] = tensor.contiguous()
    return exported


def spellings(name: str, prefix: str) -> list[str]:
    """Keys under which folders have this tensor, the best last: also that of the bare model, without `prefix`, and the
    names of norms that came from TensorFlow (bert-base-uncased has them)."""
    old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
    return [key for each in (old, name) for key in (each.removeprefix(prefix), each)]


def match_names(
    shapes: Mapping[str, tuple[int, ...]],
    *,
    prefix: str,
    expected: Mapping[str, tuple[int, ...]],
    twins: Mapping[str, Sequence[str]],
) -> dict[str, str]:
    """Their names, and under which key a state of these shapes has each. `twins`: names for the same values, the best
    last. DataError with every tensor that is missing or of another shape than `expected`."""
    keys = {
        name: key
        for name in expected
        for twin in twins.get(name, (name,))
        for key in spellings(twin, prefix)
        if key in shapes
    }
    missing = [name for name in expected if name not in keys]
    wrong = [
        f"{key} is {shapes[key]} instead of {expected[name]}"
        for name, key in keys.items()
        if shapes[key] != expected[name]
    ]
    remedy = "config.json and weights must be of one model: copy them together"
    problems = []
    if missing:
        what = f"the Hugging Face state lacks {len(missing)} of {len(expected)} tensors: {', '.join(missing[:8])}"
        problems.append(Problem(what, "every parameter of the recipe's model must be there", remedy))
    if wrong:
        what = f"{len(wrong)} tensors of the Hugging Face state have another shape: {'; '.join(wrong[:8])}"
        problems.append(Problem(what, "shapes follow from the recipe's model", remedy))
    if problems:
        raise DataError(problems)
    return keys
