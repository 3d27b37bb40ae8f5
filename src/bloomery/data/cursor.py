"""What a run that resumes has taken from its data, and how its order continues at another sequence length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bloomery.config.recipe import Recipe
from bloomery.data.blend import BlendState, TimelessBlend
from bloomery.data.causal import CausalSource
from bloomery.sizing.schedule import TrainingPlan


@dataclass(frozen=True)
class DataCursor:
    """How far a checkpoint has come in its data."""

    recipe: Recipe
    plan: TrainingPlan
    step: int
    consumed_samples: int
    blend: BlendState | None
    """None for orders without state, and for a run that has taken nothing."""


def blend_after(
    cursor: DataCursor, weights: Mapping[str, float], sources: Sequence[CausalSource], *, seq_length: int
) -> tuple[TimelessBlend, list[str]]:
    """The blend of the run that resumes, and notices about it.

    Samples of another length are other samples, and no cursor knows which of them have been seen. So a source whose
    cursor counts another length begins its next epoch, in which again every sample comes once.
    """
    assert cursor.blend is not None
    state, notices = cursor.blend, list[str]()
    lengths = dict.fromkeys({**state.cursors, **state.weights}, cursor.recipe.model.seq_length) | state.lengths
    resized = [source for source in sources if lengths.get(source.key, seq_length) != seq_length]
    if not resized and cursor.recipe.model.seq_length == seq_length:
        return TimelessBlend.resume(state, weights, consumed_samples=cursor.consumed_samples), notices
    cursors = TimelessBlend(state).taken(cursor.consumed_samples)
    for source in resized:
        length = lengths.pop(source.key)
        epoch_samples = source.num_samples_at(length)
        unread = -cursors[source.key] % epoch_samples
        epochs = (cursors[source.key] + unread) // epoch_samples
        cursors[source.key] = epochs * source.num_samples
        rest = f"{unread * length:,} tokens of epoch {epochs - 1} stay" if unread else "nothing stays"
        notices.append(f"{source.key}: samples of {seq_length:,} tokens begin with epoch {epochs}; {rest} unread")
    lengths = {key: length for key, length in lengths.items() if length != seq_length}
    start = TimelessBlend.start(weights).state
    first = cursor.consumed_samples
    return TimelessBlend(replace(start, first_sample=first, cursors=cursors, lengths=lengths)), notices
