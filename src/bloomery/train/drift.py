"""The drift sentinel: every so many steps, hashes of everything that several ranks should hold alike.

Copies that drift apart do not crash: BLOOM's LayerNorms did so for weeks, unseen.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bloomery.base.ranks import Piece, Ranks
from bloomery.monitor.names import Event
from bloomery.train.run import Run
from bloomery.train.state import TrainState
from bloomery.train.stop import StopReason

_ELEMENTS_AT_ONCE = 1 << 24
_PRIME = (1 << 61) - 1


def watch_drift(run: Run, state: TrainState) -> None:
    """Compare, if it is time, and act as monitor.drift says: stop before the next step, or warn."""
    watch = run.recipe.monitor.drift
    if watch is None or run.ranks.size == 1 or state.step % watch.every.count:
        return
    facts = {
        "the step": state.step,
        "the position in the data": state.consumed_samples,
        "the learning rate's position": state.lr_samples,
        "the loss scale": state.loss_scale.scale if state.loss_scale else None,
        "the watch for spikes": state.spikes,
        "the seed": run.recipe.seed,
    }
    drifts = find_drift(run.ranks, run.optimizer.shared_pieces(), facts)
    if not drifts:
        return
    more = f", and {len(drifts) - 3} more" if len(drifts) > 3 else ""
    text = "ranks have drifted apart: " + "; ".join(map(str, drifts[:3])) + more
    names = [{"name": drift.name, "ranks": drift.ranks, "others": drift.others} for drift in drifts]
    run.journal.event(Event.DRIFT, state.step, action=watch.action, drifts=names)
    if watch.action == "stop":
        run.stop.request(StopReason("drift", text))
    else:
        run.journal.warning(f"at step {state.step:,} {text}. Training continues, because monitor.drift.action is warn.")


@dataclass(frozen=True)
class Drift:
    """One thing that is not the same everywhere."""

    name: str
    ranks: tuple[int, ...]
    """Those that differ from most; of two equal camps, the one without the lowest rank."""
    others: tuple[int, ...]
    """Those that agree."""

    def __str__(self) -> str:
        mine, most = (", ".join(map(str, each)) for each in (self.ranks, self.others))
        return f"{self.name} on rank {mine} differs from rank {most}"


def find_drift(ranks: Ranks, pieces: Mapping[str, Piece], facts: Mapping[str, object]) -> list[Drift]:
    """Collective. Compare this rank's pieces with all who hold the same boxes, and `facts` with everybody."""
    mine: dict[str, int] = {name: hash_of(piece.tensor) for name, piece in pieces.items() if piece.tensor.numel()}
    boxes = {name: (piece.offset, tuple(piece.tensor.shape)) for name, piece in pieces.items()}
    gathered = ranks.gather(({(name, *boxes[name]): value for name, value in mine.items()}, dict(facts)))
    seen: dict[tuple[object, ...], dict[int, object]] = defaultdict(dict)
    for rank, (hashes, their_facts) in enumerate(gathered):
        for key, value in [*hashes.items(), *(((name,), value) for name, value in their_facts.items())]:
            seen[key][rank] = value
    found = [_odd_ones(str(key[0]), values) for key, values in seen.items()]
    return [drift for drift in found if drift is not None]


def hash_of(tensor: Tensor) -> int:
    """A number that changes with any bit and with the order of elements. Computed where the tensor lies."""
    total = 0
    flat = tensor.detach().contiguous().view(torch.int32).flatten()
    for start in range(0, flat.numel(), _ELEMENTS_AT_ONCE):
        part = flat[start : start + _ELEMENTS_AT_ONCE].to(torch.int64)
        places = torch.arange(start, start + part.numel(), device=part.device)
        # Odd multipliers lose no bit; wrapping around is what int64 does.
        total += int(((part ^ (places * 0x9E3779B1)) * (places * 2 + 1)).sum())
    return total % _PRIME


def _odd_ones(name: str, values: Mapping[int, object]) -> Drift | None:
    if len(set(map(repr, values.values()))) < 2:
        return None
    counts = Counter(map(repr, values.values()))
    right = max(counts, key=lambda value: (counts[value], -min(r for r, v in values.items() if repr(v) == value)))
    odd = tuple(rank for rank, value in values.items() if repr(value) != right)
    return Drift(name, odd, tuple(rank for rank in values if rank not in odd))
