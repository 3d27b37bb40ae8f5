"""Where records go: metrics.jsonl, events.jsonl, main_log.txt and TensorBoard. The journal feeds them.

A new sink is a subclass of `Sink` that overrides what it wants to hear, and joins the list in journal.py.
"""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bloomery.base.bounded import parse_json
from bloomery.base.energy import Energy
from bloomery.base.errors import BloomeryError, Problem
from bloomery.base.storage import AppendFile, own_folder, reason
from bloomery.monitor.record import Record, StepRecord, ValidationRecord, perplexity_of, strict_json, to_json

_REPLAYED_POINTS = 1000
"""TensorBoard shows at most this many points of a curve, so a longer replay would only cost time."""

# A TensorBoard tag with such a suffix has that count as its x axis instead of steps.
VS_STEPS, VS_SAMPLES, VS_TOKENS = "", " vs samples", " vs tokens"
VS_GIGAFLOPS = " vs gigaflos (without embeddings)"

Scalar = tuple[str, str, int, float]
"""Tag, axis, x, y."""


class Sink:
    """What a sink may be given; it ignores what it does not override."""

    file: AppendFile | None = None
    """What the journal flushes, and watches for a full disk."""

    def step(self, record: StepRecord) -> None: ...

    def validation(self, record: ValidationRecord) -> None: ...

    def event(self, facts: dict[str, Any]) -> None: ...

    def notice(self, text: str) -> None: ...

    def warning(self, text: str) -> None: ...

    def close(self) -> None:
        """StorageError if something could not be written to the end."""
        if self.file is not None:
            self.file.close()


class MetricsFile(Sink):
    """metrics.jsonl: every other view is made from it."""

    def __init__(self, path: Path) -> None:
        self.file: AppendFile = AppendFile(path, is_whole=_is_json_object)

    def step(self, record: Record) -> None:
        self.file.append(to_json(record))

    validation = step


class EventFile(Sink):
    """events.jsonl: what happened to a run, and when."""

    def __init__(self, path: Path, *, job: int) -> None:
        self.file: AppendFile = AppendFile(path, is_whole=_is_json_object)
        self._job = job

    def event(self, facts: dict[str, Any]) -> None:
        """Facts stand beside kind, step, iso_time, time (unix seconds) and job, and may not use these names."""
        now = time.time()
        head = {"kind": facts.pop("kind"), "step": facts.pop("step"), "iso_time": iso_time(now), "time": now}
        head["job"] = self._job
        assert not head.keys() & facts.keys(), f"reserved fact names: {sorted(head.keys() & facts.keys())}"
        self.file.append(strict_json({**head, **facts}))


class TextLog(Sink):
    """logs/main_log.txt, for people and for parsers of Megatron-DeepSpeed logs (requirements 10.1)."""

    def __init__(self, path: Path) -> None:
        own_folder(path.parent)
        self.file: AppendFile = AppendFile(path)

    def step(self, record: StepRecord) -> None:
        self.file.append(iteration_line(record))

    def validation(self, record: ValidationRecord) -> None:
        for line in validation_box(record):
            self.file.append(line)

    def notice(self, text: str) -> None:
        for line in text.splitlines():
            self.file.append(f"[{iso_time(time.time())}] {line}")

    def warning(self, text: str) -> None:
        self.notice(f"warning: {text}")


def iteration_line(record: StepRecord) -> str:
    """One leading space; every field ends with ` |`."""
    fields = [
        f"iteration {record.step:8d}/{record.train_steps:8d}",
        f"consumed samples: {record.consumed_samples:12d}",
        f"consumed tokens: {record.consumed_tokens:12d}",
        f"elapsed time per iteration (s): {record.seconds_per_step:.2f}",
        f"learning rate: {record.lr:.3E}",
        f"global batch size: {record.global_batch:5d}",
    ]
    # The reference prints a loss only if it is > 0, so that a NaN vanishes from the log. Ours is always there.
    fields += [f"{name}: {value:.6E}" for name, value in record.losses.items()]
    if record.loss_scale is not None:
        fields.append(f"loss scale: {record.loss_scale:.1f}")
    fields.append(f"grad norm: {record.grad_norm:.3f}")
    if record.num_zeros is not None:
        fields.append(f"num zeros: {record.num_zeros:.1f}")
    fields += [
        f"number of skipped iterations: {record.skipped_steps:3d}",
        f"number of nan iterations: {record.nan_steps:3d}",
        f"samples per second: {record.samples_per_second:.3f}",
        f"TFLOPs: {record.tflops:.2f}",
    ]
    return "".join(f" {field} |" for field in fields)


def validation_box(record: ValidationRecord) -> list[str]:
    """The result between two rules of dashes, one longer than it, as in the reference."""
    line = f" {record.group} loss at iteration {record.step} | "
    for name, loss in record.losses.items():
        line += f"{name} value: {loss:.6E} | {name} PPL: {perplexity_of(loss):.6E} | "
    rule = "-" * (len(line) + 1)
    return [rule, line, rule]


class TensorBoard(Sink):
    """The tags of requirements 10.2. It is only a view: when it cannot be written it stops and keeps the reason."""

    def __init__(
        self,
        folder: Path,
        *,
        resume_step: int = 0,
        history: Sequence[Record] = (),
        recipe_text: str = "",
        world_size: int = 1,
    ) -> None:
        """`history`: the records up to `resume_step`, from which purged curves are drawn again. Recipe and world size
        are written once, where this job begins."""
        if importlib.util.find_spec("tensorboard") is None:
            raise BloomeryError(
                Problem(
                    "monitor.tensorboard is true but the package tensorboard is not installed",
                    remedy="run `pip install tensorboard`, or set monitor.tensorboard=false",
                )
            )
        self.folder = folder
        self.failure = ""
        """Why it has stopped; empty while it works."""
        self._resume_step = resume_step
        self._recipe_text, self._world_size = recipe_text, world_size
        before = [record for record in history if record.step <= resume_step]
        stride = -(-len(before) // _REPLAYED_POINTS) or 1
        self._history = before[::-1][::stride][::-1]  # counted from the end, so that the last point stays
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
            self.failure = reason(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"

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
        _date_back_later_files(self.folder)
        _silence_writer_thread()
        first_step = self._resume_step + 1
        self._writer = SummaryWriter(str(self.folder), purge_step=first_step)
        self._writer.add_scalar("iteration-time/world_size", self._world_size, self._resume_step)
        if self._recipe_text:
            lines = "\n".join(f"    {line}" for line in self._recipe_text.splitlines())  # verbatim, in Markdown
            self._writer.add_text("recipe/text_summary", lines, self._resume_step)
        # The purge hides every point with x >= first_step in every curve. That is right where x counts steps, but
        # curves over samples or tokens lose nearly all of their past: draw that past again.
        for record in self._history:
            lost = (scalar for scalar in _scalars(record) if scalar[1] != VS_STEPS and scalar[2] >= first_step)
            self._add(record.time, lost)
        self._history = []

    def _add(self, wall_time: float, scalars: Iterator[Scalar]) -> None:
        """One event per axis, not per scalar: a file of a third of the size."""
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

        by_axis: dict[tuple[str, int], list[Any]] = {}
        for tag, axis, x, y in scalars:
            by_axis.setdefault((axis, x), []).append(Summary.Value(tag=tag, simple_value=y))
        for (_, x), values in by_axis.items():
            self._writer.file_writer.add_summary(Summary(value=values), x, wall_time)


def iso_time(unix_seconds: float) -> str:
    """UTC, to the second: `2025-01-31T12:00:00Z`."""
    return datetime.fromtimestamp(unix_seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


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


def _date_back_later_files(folder: Path) -> None:
    """Readers apply event files by the second in their names, so a purge must come last, whatever this node's clock."""
    now = int(time.time())
    for path in sorted(folder.glob("events.out.tfevents.*")):
        second, _, rest = path.name.removeprefix("events.out.tfevents.").partition(".")
        if second.isdigit() and int(second) >= now:
            path.rename(folder / f"events.out.tfevents.{now - 1:010d}.{second}.{rest}")


def _silence_writer_thread() -> None:
    """SummaryWriter writes in a thread that prints a traceback on a full disk, beside the error that `flush` raises."""
    report = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        if not type(args.thread).__module__.startswith("tensorboard."):
            report(args)

    threading.excepthook = hook


def _is_json_object(line: bytes) -> bool:
    try:
        return isinstance(parse_json(line), dict)
    except ValueError:
        return False
