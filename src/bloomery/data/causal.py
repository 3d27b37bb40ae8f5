"""Samples for next-token prediction: a shard's tokens, cut into windows that overlap by one, in timeless order; and how
a run that resumes continues in them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bloomery.config.recipe import Recipe
from bloomery.data.batch import ShardSource
from bloomery.data.blend import BlendState, TimelessBlend, same_shares
from bloomery.sizing.schedule import TrainingPlan


class CausalSource(ShardSource):
    """Sample i of the part is tokens [start + i * S, start + i * S + S + 1); documents run on behind each other."""

    def _index_samples(self) -> None:
        if self.split and self.split_by == "tokens":
            first, last = self.part_of(self.shard.num_tokens)
        else:
            first, last = map(self.shard.document_start, self.part_of(self.shard.num_documents))
        self._start_token, self._num_tokens = first, last - first
        self.num_samples = self.num_samples_at(self.seq_length)

    @property
    def documents(self) -> tuple[int, int]:
        last = self._start_token + self._num_tokens - 1
        return self.shard.document_at(self._start_token)[0], self.shard.document_at(last)[0] + 1

    def num_samples_at(self, seq_length: int) -> int:
        """Samples of one epoch, if they had this length."""
        return (self._num_tokens - 1) // seq_length

    def stretches(self, sample: int) -> list[tuple[int, int]]:
        start = self._start_token + sample * self.seq_length
        return [(start, start + self.seq_length + 1)]


@dataclass(frozen=True)
class DataCursor:
    """How far a checkpoint has come in its data."""

    recipe: Recipe
    plan: TrainingPlan
    consumed_samples: int
    blend: BlendState | None
    """None for orders without state, and for a run that has taken nothing."""


def blend_after(
    cursor: DataCursor, weights: Mapping[str, float], sources: Sequence[CausalSource], *, seq_length: int
) -> tuple[TimelessBlend, list[str]]:
    """The blend of the run that resumes, and notices about it. Changed weights hold from there on; every source
    continues where it stood.

    Samples of another length are other samples, and no cursor knows which of them have been seen. So a source whose
    cursor counts another length begins its next epoch, in which again every sample comes once.
    """
    assert cursor.blend is not None
    state, notices, length_before = cursor.blend, list[str](), cursor.recipe.model.seq_length
    lengths = dict.fromkeys({**state.cursors, **state.weights}, length_before) | state.lengths
    resized = [source for source in sources if lengths.get(source.key, seq_length) != seq_length]
    if not resized and length_before == seq_length and same_shares(weights, state.weights):
        return TimelessBlend(state), notices
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
