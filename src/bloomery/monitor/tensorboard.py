"""TensorBoard event files: the tags of requirements 10.2, a public contract."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bloomery.base.storage import own_folder, reason
from bloomery.base.units import Energy
from bloomery.monitor import names
from bloomery.monitor.history import scan_metrics
from bloomery.monitor.record import Record, StepRecord, perplexity_of
from bloomery.monitor.sinks import Sink

_REPLAYED_BYTES = 2**20
"""Of metrics: about as many records as TensorBoard shows of a curve. Of a longer file every n-th line is read."""

# A TensorBoard tag with such a suffix has that count as its x axis instead of steps.
VS_STEPS, VS_SAMPLES, VS_TOKENS = "", " vs samples", " vs tokens"
VS_GIGAFLOPS = " vs gigaflos (without embeddings)"

Scalar = tuple[str, str, int, float]
"""Tag, axis, x, y."""


class TensorBoard(Sink):
    """The tags of requirements 10.2. It is only a view: when it cannot be written it stops and keeps the reason."""

    def __init__(self, folder: Path, *, resume_step: int = 0, recipe_text: str = "", world_size: int = 1) -> None:
        """Recipe and world size are written once, where this job begins. Curves that a purge hides are drawn again from
        the metrics.jsonl beside the folder."""
        self.folder = folder
        self._resume_step = resume_step
        self._recipe_text, self._world_size = recipe_text, world_size
        self._writer: Any = None

    def step(self, record: Record) -> None:
        if self.failure:
            return
        try:
            if self._writer is None:
                self._start()
            self._add(record.time, _scalars(record))
            self._writer.flush()
        except Exception as error:  # whatever happens to a view must not happen to the training
            why = reason(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            self.failure = f"cannot write {self.folder}: {why}"

    validation = step

    def close(self) -> None:
        if self._writer is not None and not self.failure:
            try:
                self._writer.close()
            except OSError as error:
                self.failure = reason(error)

    def _start(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        own_folder(self.folder, parents=True)
        _silence_writer_thread()
        first_step = self._resume_step + 1
        self._writer = SummaryWriter(str(self.folder), purge_step=first_step)
        self._writer.add_scalar("iteration-time/world_size", self._world_size, self._resume_step)
        if self._recipe_text:
            lines = "\n".join(f"    {line}" for line in self._recipe_text.splitlines())  # verbatim, in Markdown
            self._writer.add_text("recipe/text_summary", lines, self._resume_step)
        # The purge hides every point with x >= first_step in every curve. That is right where x counts steps, but
        # curves over samples or tokens lose nearly all of their past: draw that past again.
        for record in self._past() if self._resume_step > 0 else ():
            lost = (scalar for scalar in _scalars(record) if scalar[1] != VS_STEPS and scalar[2] >= first_step)
            self._add(record.time, lost)

    def _past(self) -> list[Record]:
        """Of the steps that still count, as many as TensorBoard shows; of a long file only some are read."""
        past: list[Record] = []
        metrics = self.folder.with_name(names.METRICS_FILE)
        if metrics.exists():
            scan_metrics(metrics, past.append, every=1 + metrics.stat().st_size // _REPLAYED_BYTES)
        return [record for record in past if record.step <= self._resume_step]

    def _add(self, wall_time: float, scalars: Iterator[Scalar]) -> None:
        """One event per axis, not per scalar: a file of a third of the size."""
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

        by_axis: dict[tuple[str, int], list[Any]] = {}
        for tag, axis, x, y in scalars:
            by_axis.setdefault((axis, x), []).append(Summary.Value(tag=tag, simple_value=y))
        for (_, x), values in by_axis.items():
            self._writer.file_writer.add_summary(Summary(value=values), x, wall_time)


def _scalars(record: Record) -> Iterator[Scalar]:
    """Every point of a record: one for each axis that its curve is drawn over, none for what was not measured."""
    x_of = {
        VS_STEPS: record.step,
        VS_SAMPLES: record.consumed_samples,
        VS_TOKENS: record.consumed_tokens,
        VS_GIGAFLOPS: record.consumed_gigaflops,
    }
    for tag, y, axes in _curves(record):
        if y is not None:
            yield from ((tag + axis, axis, x_of[axis], float(y)) for axis in axes)
    if isinstance(record, StepRecord):
        yield "steps-vs-samples/y=steps,x=samples", VS_SAMPLES, record.consumed_samples, float(record.step)
        yield "steps-vs-tokens/y=steps,x=tokens", VS_TOKENS, record.consumed_tokens, float(record.step)


def _curves(record: Record) -> Iterator[tuple[str, float | None, tuple[str, ...]]]:
    """Tag, y (None: not measured) and the axes it is drawn over: the tags of requirements 10.2, a public contract."""
    by_step, three = (VS_STEPS,), (VS_STEPS, VS_SAMPLES, VS_TOKENS)
    four = (*three, VS_GIGAFLOPS)
    if not isinstance(record, StepRecord):
        for name, loss in record.losses.items():
            tag = f"lm-loss-validation/{record.group}/{name} validation"
            yield tag, loss, four
            yield f"{tag} ppl", perplexity_of(loss), four
        return
    yield from ((f"lm-loss-training/{name}", loss, four) for name, loss in record.losses.items())
    yield from ((f"lm-loss-training/source/{source}", loss, by_step) for source, loss in record.source_losses.items())
    yield "learning-rate/learning-rate", record.lr, three
    yield "batch-size/batch-size", record.global_batch, (VS_STEPS, VS_SAMPLES)
    yield "grad-norm/grad-norm", record.grad_norm, three
    yield "num-zeros/num-zeros", record.num_zeros, three
    yield "loss-scale/loss-scale", record.loss_scale, three
    yield "iteration-time/iteration-time", record.seconds_per_step, three
    yield "iteration-time/samples per second", record.samples_per_second, by_step
    yield "iteration-time/tokens per second", record.tokens_per_second, by_step
    yield "iteration-time/samples per second per replica", record.samples_per_second / record.replicas, by_step
    yield "iteration-time/tokens per second per replica", record.tokens_per_second / record.replicas, by_step
    yield "iteration-time/TFLOPs per gpu (estimated)", record.tflops, by_step
    yield "iteration-time/MFU", record.mfu, by_step
    yield "memory/allocated bytes", record.memory_bytes, by_step
    yield "memory/peak allocated bytes", record.peak_memory_bytes, by_step
    yield "energy/joules", Energy.from_json(record.energy).measured_joules, by_step
    yield "steps-vs-samples/y=samples,x=steps", record.consumed_samples, by_step
    yield "steps-vs-tokens/y=tokens,x=steps", record.consumed_tokens, by_step


def _silence_writer_thread() -> None:
    """SummaryWriter writes in a thread that prints a traceback on a full disk, beside the error that `flush` raises."""
    report = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        if not type(args.thread).__module__.startswith("tensorboard."):
            report(args)

    threading.excepthook = hook
