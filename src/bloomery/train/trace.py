"""A trace of the first steps: every gradient and the samples it came from, to compare runs that ought to be equal.

trace/step-00000001/    the gradients of a step, as a checkpoint of `grad.<name>`: fp32, unscaled, before clipping
trace/samples.jsonl     {"step": 1, "samples": {"0": "<hash>", ...}}: every sample by its position in the run
"""

import hashlib
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bloomery.base.ranks import ALONE, Ranks, first_rank_does
from bloomery.base.storage import make_folder, open_plain, writing
from bloomery.checkpoint.save import save_checkpoint
from bloomery.data.batch import GlobalBatch
from bloomery.parallel.gradients import Gradients

SAMPLES = "samples.jsonl"
DIFFERENT = "differs between ranks"
"""Stands instead of a hash where two ranks saw different samples at one position."""


@dataclass
class Tracer:
    """Steps are counted from the start of this job, also when it resumes."""

    folder: Path
    gradient_steps: int
    sample_steps: int
    first_step: int = 1
    recipe_yaml: str = ""
    ranks: Ranks = ALONE
    _seen: int = 0

    def step(self, step: int, batch: GlobalBatch, gradients: Gradients, *, loss_scale: float) -> None:
        """Write down a step whose gradients are complete. All ranks call it."""
        if step < self.first_step:
            return
        self._seen += 1
        if self._seen <= self.sample_steps:
            everybody = self.ranks.gather(sample_hashes(batch))
            first_rank_does(self.ranks, partial(self._write_samples, step, everybody))
        if self._seen <= self.gradient_steps:
            pieces = {f"grad.{name}": piece for name, piece in gradients.pieces(scale=1.0 / loss_scale).items()}
            save_checkpoint(
                self.folder, step=step, pieces=pieces, state={}, recipe_yaml=self.recipe_yaml, ranks=self.ranks
            )

    def _write_samples(self, step: int, everybody: list[dict[int, str]]) -> None:
        samples: dict[int, str] = {}
        for found in everybody:
            for position, hashed in found.items():
                if samples.setdefault(position, hashed) != hashed:
                    samples[position] = DIFFERENT
        record: dict[str, Any] = {"step": step, "samples": {str(place): samples[place] for place in sorted(samples)}}
        make_folder(self.folder)
        path = self.folder / SAMPLES
        with writing(path), open(path, "a", opener=open_plain) as file:
            file.write(json.dumps(record) + "\n")


def sample_hashes(batch: GlobalBatch) -> dict[int, str]:
    """A hash of everything that is known of each sample of this replica, by its position in the run."""
    found = {}
    for start, micro_batch in zip(batch.starts, batch.micro_batches, strict=True):
        tensors = [*sorted(micro_batch.inputs.items()), *sorted(micro_batch.targets.items())]
        for row in range(len(tensors[0][1])):
            hasher = hashlib.blake2b(digest_size=8)
            for name, tensor in tensors:
                hasher.update(name.encode())
                hasher.update(tensor[row].contiguous().numpy().tobytes())
            found[start + row] = hasher.hexdigest()
    return found
