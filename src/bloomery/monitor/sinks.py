"""Where records go: metrics.jsonl, events.jsonl, main_log.txt and TensorBoard. The journal owns them."""

from __future__ import annotations

import importlib.util
import io
import os
import socket
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bloomery.base.bounded import parse_json
from bloomery.base.energy import Energy
from bloomery.base.errors import BloomeryError, Problem
from bloomery.base.storage import AppendFile, open_plain, own_folder, reason
from bloomery.monitor import names
from bloomery.monitor.record import Record, StepRecord, perplexity_of, strict_json, to_json

_REPLAYED_POINTS = 1000
"""TensorBoard shows at most this many points of a curve, so a longer replay would only cost time."""

Scalar = tuple[str, str, int, float]
"""Tag, axis, x, y."""


class JsonlSink:
    """metrics.jsonl: the truth that every other view is made from."""

    def __init__(self, path: Path) -> None:
        self.file = AppendFile(path, is_whole=_is_json_object)

    def write(self, record: Record) -> bool:
        return self.file.append(to_json(record))


class EventLog:
    """events.jsonl: the ledger of what happened to a run, and when."""

    def __init__(self, path: Path, *, job: int) -> None:
        self.file = AppendFile(path, is_whole=_is_json_object)
        self.job = job

    def event(self, kind: str, step: int, **facts: Any) -> bool:
        """Facts stand beside kind, step, iso_time, time (unix seconds) and job, and may not use these names."""
        now = time.time()
        head = {"kind": kind, "step": step, "iso_time": iso_time(now), "time": now, "job": self.job}
        assert not head.keys() & facts.keys(), f"reserved fact names: {sorted(head.keys() & facts.keys())}"
        return self.file.append(strict_json({**head, **facts}))


class TextLog:
    """logs/main_log.txt, for people and for parsers of Megatron logs."""

    def __init__(self, path: Path) -> None:
        self.file = AppendFile(path)

    def line(self, line: str) -> bool:
        return self.file.append(line)

    def remark(self, text: str) -> bool:
        """Free text, stamped with the time."""
        results = [self.file.append(f"[{iso_time(time.time())}] {line}") for line in text.splitlines()]
        return all(results)


class TensorBoardSink:
    """The tags of requirements 10.2. It is a view: when it cannot be written it turns itself off and says why."""

    # Event files are written here rather than by torch's SummaryWriter: its thread prints a traceback when the disk
    # is full, and it needs one event per scalar where one per axis will do. The format and bytes are the same.

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
        """Why the sink is off; empty while it works."""
        self._purge_step = resume_step + 1
        self._recipe_text, self._world_size = recipe_text, world_size
        self._history = _thin([record for record in history if record.step <= resume_step])
        self._descriptor: int | None = None

    def write(self, record: Record) -> bool:
        """False when the sink is, or just went, off."""
        if self.failure:
            return False
        try:
            if self._descriptor is None:
                self._start()
            self._add(record.time, list(_scalars(record)))
        except Exception as error:  # whatever happens to a view must not happen to the training
            self.failure = reason(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            self.close()
            return False
        return True

    def close(self) -> None:
        if self._descriptor is not None:
            try:
                os.close(self._descriptor)
            except OSError as error:
                self.failure = self.failure or reason(error)
            self._descriptor = None

    def _start(self) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]

        own_folder(self.folder, parents=True)
        earlier = sorted(self.folder.glob("events.out.tfevents.*"))
        path = self.folder / _event_file_name(earlier)
        self._descriptor = open_plain(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        now = time.time()
        self._write_events([Event(wall_time=now, file_version="brain.Event:2")])
        if not earlier:
            self._introduce(now)
            return
        start = SessionLog(status=SessionLog.START)
        self._write_events([Event(wall_time=now, step=self._purge_step, session_log=start)])
        # The purge hides every point with x >= purge_step in every curve. That is right where x counts steps, but
        # curves over samples or tokens lose nearly all of their past: draw that past again.
        for record in self._history:
            lost = [scalar for scalar in _scalars(record) if scalar[1] != names.VS_STEPS]
            self._add(record.time, [scalar for scalar in lost if scalar[2] >= self._purge_step])
        self._history = []
        self._introduce(now)

    def _introduce(self, now: float) -> None:
        """What this job is: its recipe and its world size."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata  # type: ignore[import-untyped]
        from tensorboard.compat.proto.tensor_pb2 import TensorProto  # type: ignore[import-untyped]
        from tensorboard.compat.proto.types_pb2 import DT_STRING  # type: ignore[import-untyped]

        values = [Summary.Value(tag=names.TAG_WORLD_SIZE, simple_value=float(self._world_size))]
        if self._recipe_text:
            lines = "\n".join(f"    {line}" for line in self._recipe_text.splitlines())  # Markdown's way to say: as is
            metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
            text = TensorProto(dtype=DT_STRING, string_val=[lines.encode()])
            values.append(Summary.Value(tag=names.TAG_RECIPE, metadata=metadata, tensor=text))
        self._write_events([Event(wall_time=now, step=self._purge_step - 1, summary=Summary(value=values))])

    def _add(self, wall_time: float, scalars: list[Scalar]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        events = []
        for axis, x in dict.fromkeys((axis, x) for _, axis, x, _ in scalars):
            values = [Summary.Value(tag=tag, simple_value=y) for tag, its_axis, _, y in scalars if its_axis == axis]
            events.append(Event(wall_time=wall_time, step=x, summary=Summary(value=values)))
        self._write_events(events)

    def _write_events(self, events: list[Any]) -> None:
        """All or nothing: a torn event would hide what a later job appends to the folder."""
        from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

        assert self._descriptor is not None
        buffer = io.BytesIO()
        for event in events:
            RecordWriter(buffer).write(event.SerializeToString())
        size = os.fstat(self._descriptor).st_size
        data = buffer.getvalue()
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError:
            os.ftruncate(self._descriptor, size)
            raise


def iso_time(unix_seconds: float) -> str:
    """UTC, to the second: `2025-01-31T12:00:00Z`."""
    return datetime.fromtimestamp(unix_seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _scalars(record: Record) -> Iterator[Scalar]:
    every = {
        names.VS_STEPS: record.step,
        names.VS_SAMPLES: record.consumed_samples,
        names.VS_TOKENS: record.consumed_tokens,
    }
    by_step = {names.VS_STEPS: record.step}
    losses = {**every, names.VS_GIGAFLOPS: record.consumed_gigaflops}
    for tag, y, axes in _curves(record, every, by_step, losses):
        if y is not None:
            yield from ((tag + axis, axis, x, float(y)) for axis, x in axes.items())
    if isinstance(record, StepRecord):
        yield names.TAG_STEPS_BY_SAMPLES, names.VS_SAMPLES, record.consumed_samples, float(record.step)
        yield names.TAG_STEPS_BY_TOKENS, names.VS_TOKENS, record.consumed_tokens, float(record.step)


def _curves(
    record: Record, every: dict[str, int], by_step: dict[str, int], losses: dict[str, int]
) -> list[tuple[str, float | None, dict[str, int]]]:
    """Tag, y (None: not measured) and the axes it is drawn over."""
    if not isinstance(record, StepRecord):
        curves: list[tuple[str, float | None, dict[str, int]]] = []
        for name, loss in record.losses.items():
            tag = names.validation_loss_tag(record.group, name)
            curves += [(tag, loss, losses), (f"{tag} ppl", perplexity_of(loss), losses)]
        return curves
    by_step_and_samples = {axis: x for axis, x in every.items() if axis != names.VS_TOKENS}
    return [
        *((names.training_loss_tag(name), loss, losses) for name, loss in record.losses.items()),
        *((names.source_loss_tag(source), loss, by_step) for source, loss in record.source_losses.items()),
        (names.TAG_LEARNING_RATE, record.lr, every),
        (names.TAG_BATCH_SIZE, record.global_batch, by_step_and_samples),
        (names.TAG_GRAD_NORM, record.grad_norm, every),
        (names.TAG_NUM_ZEROS, record.num_zeros, every),
        (names.TAG_LOSS_SCALE, record.loss_scale, every),
        (names.TAG_ITERATION_TIME, record.seconds_per_step, every),
        (names.TAG_SAMPLES_PER_SECOND, record.samples_per_second, by_step),
        (names.TAG_TOKENS_PER_SECOND, record.tokens_per_second, by_step),
        (names.TAG_SAMPLES_PER_REPLICA, record.samples_per_second / record.replicas, by_step),
        (names.TAG_TOKENS_PER_REPLICA, record.tokens_per_second / record.replicas, by_step),
        (names.TAG_TFLOPS, record.tflops, by_step),
        (names.TAG_MFU, record.mfu, by_step),
        (names.TAG_MEMORY, record.memory_bytes, by_step),
        (names.TAG_PEAK_MEMORY, record.peak_memory_bytes, by_step),
        (names.TAG_ENERGY, Energy.from_json(record.energy).measured_joules, by_step),
        (names.TAG_SAMPLES_BY_STEPS, record.consumed_samples, by_step),
        (names.TAG_TOKENS_BY_STEPS, record.consumed_tokens, by_step),
    ]


def _event_file_name(earlier: list[Path]) -> str:
    """Sorts after every earlier file, also when this node's clock is behind: readers apply files in this order."""
    newest = earlier[-1].name.split(".")[3] if earlier else "0"
    second = max(int(time.time()), int(newest) + 1 if newest.isdigit() else 0)
    return f"events.out.tfevents.{second:010d}.{socket.gethostname()}.{os.getpid()}.0"


def _thin(records: list[Record]) -> list[Record]:
    stride = -(-len(records) // _REPLAYED_POINTS) or 1
    return records[::-1][::stride][::-1]  # counted from the end, so that the last point stays


def _is_json_object(line: bytes) -> bool:
    try:
        return isinstance(parse_json(line), dict)
    except ValueError:
        return False
