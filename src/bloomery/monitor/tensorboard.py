"""TensorBoard event files: the tags of requirements 10.2, a public contract."""

import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bloomery.base.storage import own_folder, reason
from bloomery.base.units import Energy
from bloomery.monitor.record import Record, StepRecord, perplexity_of
from bloomery.monitor.sinks import Sink

AXES = ("", " vs samples", " vs tokens", " vs gigaflos (without embeddings)")
"""A TensorBoard tag with such a suffix has that count as its x axis instead of steps."""


class TensorBoard(Sink):
    """It is only a view: when it cannot be written it stops and keeps the reason.

    Nothing is purged: TensorBoard itself drops from each curve the points that a resumed job logs again, whatever the
    axis. `SummaryWriter(purge_step=...)` would hide nearly all of the curves over samples and tokens."""

    def __init__(self, folder: Path, *, resume_step: int = 0, recipe_text: str = "", world_size: int = 1) -> None:
        """Recipe and world size are written once, where this job begins."""
        self.folder = folder
        self._resume_step = resume_step
        self._recipe_text, self._world_size = recipe_text, world_size
        self._writer: Any = None

    def record(self, record: Record) -> None:
        if self.failure:
            return
        try:
            if self._writer is None:
                self._start()
            self._add(record)
            self._writer.flush()
        except Exception as error:  # whatever happens to a view must not happen to the training
            why = reason(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            self.failure = f"cannot write {self.folder}: {why}"

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
        self._writer = SummaryWriter(str(self.folder))
        self._writer.add_scalar("iteration-time/world_size", self._world_size, self._resume_step)
        if self._recipe_text:
            lines = "\n".join(f"    {line}" for line in self._recipe_text.splitlines())  # verbatim, in Markdown
            self._writer.add_text("recipe/text_summary", lines, self._resume_step)

    def _add(self, record: Record) -> None:
        """One event per x, not per scalar: a file of a third of the size."""
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

        by_x = defaultdict(list)
        for tag, x, y in scalars(record):
            by_x[x].append(Summary.Value(tag=tag, simple_value=y))
        for x, values in by_x.items():
            self._writer.file_writer.add_summary(Summary(value=values), x, record.time)


def scalars(record: Record) -> Iterator[tuple[str, int, float]]:
    """Tag, x and y of every point: one for each axis that a curve is drawn over, none for what was not measured."""
    x_of_axes = (record.step, record.consumed_samples, record.consumed_tokens, record.consumed_gigaflops)
    for tag, y, num_axes in _curves(record):
        if y is not None:
            yield from ((tag + axis, x, float(y)) for axis, x in zip(AXES[:num_axes], x_of_axes, strict=False))
    if isinstance(record, StepRecord):
        yield "steps-vs-samples/y=steps,x=samples", record.consumed_samples, float(record.step)
        yield "steps-vs-tokens/y=steps,x=tokens", record.consumed_tokens, float(record.step)


def _curves(record: Record) -> Iterator[tuple[str, float | None, int]]:
    """Tag, y (None: not measured) and over how many of AXES it is drawn."""
    if not isinstance(record, StepRecord):
        for name, loss in record.losses.items():
            tag = f"lm-loss-{record.part}/{record.group}/{name} {record.part}"
            yield tag, loss, 4
            yield f"{tag} ppl", perplexity_of(loss), 4
        return
    yield from ((f"lm-loss-training/{name}", loss, 4) for name, loss in record.losses.items())
    yield from ((f"lm-loss-training/source/{source}", loss, 1) for source, loss in record.source_losses.items())
    yield "learning-rate/learning-rate", record.lr, 3
    yield "batch-size/batch-size", record.global_batch, 2
    yield "grad-norm/grad-norm", record.grad_norm, 3
    yield "num-zeros/num-zeros", record.num_zeros, 3
    yield "params-norm/params-norm", record.params_norm, 3
    yield "loss-scale/loss-scale", record.loss_scale, 3
    yield "iteration-time/iteration-time", record.seconds_per_step, 3
    yield "iteration-time/samples per second", record.samples_per_second, 1
    yield "iteration-time/tokens per second", record.tokens_per_second, 1
    yield "iteration-time/samples per second per replica", record.samples_per_second / record.replicas, 1
    yield "iteration-time/tokens per second per replica", record.tokens_per_second / record.replicas, 1
    yield "iteration-time/TFLOPs per gpu (estimated)", record.megatron_tflops, 1
    yield f"iteration-time/model TFLOPs per gpu ({record.tflops_definition})", record.tflops, 1
    if definition := record.hardware_tflops_definition:
        yield f"iteration-time/hardware TFLOPs per gpu ({definition})", record.hardware_tflops, 1
    yield "iteration-time/MFU", record.mfu, 1
    yield "memory/allocated bytes", record.memory_bytes, 1
    yield "memory/peak allocated bytes", record.peak_memory_bytes, 1
    yield "memory/peak percent of the device", record.memory_share and 100 * record.memory_share, 1
    yield from ((f"time/{phase}-time", seconds, 1) for phase, seconds in record.timers.items())
    for host, values in record.resources.items():
        yield from ((f"resources/{host}/{name}", value, 1) for name, value in values.items())
    yield "energy/kg CO2e", record.emissions.get("kg_co2e"), 1
    yield "energy/joules", Energy.from_json(record.energy).measured_joules, 1
    yield "steps-vs-samples/y=samples,x=steps", record.consumed_samples, 1
    yield "steps-vs-tokens/y=tokens,x=steps", record.consumed_tokens, 1


def _silence_writer_thread() -> None:
    """SummaryWriter writes in a thread that prints a traceback on a full disk, beside the error that `flush` raises."""
    report = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        if not type(args.thread).__module__.startswith("tensorboard."):
            report(args)

    threading.excepthook = hook
