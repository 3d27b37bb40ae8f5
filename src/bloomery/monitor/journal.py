"""Everything that a run reports goes through its journal, which feeds all sinks and keeps their trouble from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bloomery.base.errors import DataError, Problem, StorageError
from bloomery.base.storage import AppendFile, reason
from bloomery.monitor import names
from bloomery.monitor.console import Console
from bloomery.monitor.history import scan_metrics
from bloomery.monitor.record import Record, StepRecord, ValidationRecord
from bloomery.monitor.sinks import EventFile, MetricsFile, Sink, TensorBoard, TextLog

_REPLAYED_WHOLE = 2**23
"""Of metrics beyond so many bytes only some records are drawn again in TensorBoard, which shows few of them."""


class Journal:
    """Rank 0 of a run has one; the others have a SilentJournal. The run folder must exist."""

    def __init__(
        self,
        run_folder: Path,
        *,
        job: int,
        train_steps: int,
        tensorboard: bool,
        resume_step: int,
        console: Console | None = None,
        recipe_text: str = "",
        world_size: int = 1,
    ) -> None:
        """`resume_step`: the step this job continues from; what an older job logged beyond it no longer counts."""
        self._step = resume_step
        self._in_trouble = False
        self._sinks: list[Sink] = [
            MetricsFile(run_folder / names.METRICS_FILE),
            EventFile(run_folder / names.EVENTS_FILE, job=job),
            TextLog(run_folder / names.TEXT_LOG_FILE),
            console or Console(train_steps),
        ]
        if tensorboard:
            view = TensorBoard(
                run_folder / names.TENSORBOARD_FOLDER,
                resume_step=resume_step,
                history=self._history(run_folder / names.METRICS_FILE) if resume_step > 0 else (),
                recipe_text=recipe_text,
                world_size=world_size,
            )
            self._sinks.insert(0, view)
        for file in self._files:
            if file.repaired:
                self.notice(file.repaired)
                self.event(names.Event.REPAIRED, resume_step, what=file.repaired)

    def step(self, record: StepRecord) -> None:
        self._step = record.step
        for sink in self._sinks:
            sink.step(record)
        self._watch_sinks()

    def validation(self, record: ValidationRecord) -> None:
        self._step = record.step
        for sink in self._sinks:
            sink.validation(record)
        self._watch_sinks()

    def event(self, kind: names.Event, step: int, **facts: Any) -> None:
        """For events.jsonl only; people read a notice or a warning."""
        for sink in self._sinks:
            sink.event({"kind": kind, "step": step, **facts})
        self._watch_sinks()

    def notice(self, text: str) -> None:
        for sink in self._sinks:
            sink.notice(text)
        self._watch_sinks()

    def warning(self, text: str) -> None:
        for sink in self._sinks:
            sink.warning(text)
        self._watch_sinks()

    def silent_when(self, taken_over: Callable[[], bool]) -> None:
        """Nothing more goes into the files when a newer start has taken the run over: they are its own."""
        for file in self._files:
            file.belongs_to_another = taken_over

    def flush(self) -> None:
        """Bring everything to the disk if that is possible now; call it before promising a checkpoint."""
        for file in self._files:
            file.flush()
        self._watch_sinks()

    def close(self) -> None:
        """StorageError, after everything was closed, if lines could still not be written."""
        problems: list[Problem] = []
        while self._sinks:
            try:
                self._sinks.pop(0).close()
            except StorageError as error:
                problems += error.problems
        if problems:
            raise StorageError(problems)

    @property
    def _files(self) -> Sequence[AppendFile]:
        return [sink.file for sink in self._sinks if sink.file is not None]

    def _history(self, metrics: Path) -> list[Record]:
        """Of the steps that still count, for the curves of TensorBoard over samples and tokens."""
        history: list[Record] = []
        try:
            beyond = max(0, metrics.stat().st_size - _REPLAYED_WHOLE)
            scan_metrics(metrics, history.append, skipped_bytes=beyond // 1000)
        except DataError as error:
            self.warning(f"TensorBoard curves over samples and tokens begin at this job: {error}")
        return history

    def _watch_sinks(self) -> None:
        """One warning when writing starts to fail, one notice when it works again."""
        view = self._sinks[0] if self._sinks else None
        if isinstance(view, TensorBoard) and view.failure:
            del self._sinks[0]
            self.event(names.Event.TENSORBOARD_OFF, self._step, reason=view.failure)
            self.warning(
                f"TensorBoard is off for the rest of this job: cannot write {view.folder}: {view.failure}. "
                f"Training continues; {names.METRICS_FILE} has every number."
            )
        files = self._files
        if self._in_trouble:
            for file in files:
                file.flush()
        failing = [file for file in files if file.pending_lines]
        if bool(failing) == self._in_trouble:
            return
        self._in_trouble = bool(failing)
        if failing:
            first = failing[0]
            why = reason(first.last_error)
            self.event(names.Event.STORAGE_TROUBLE, self._step, file=str(first.path), reason=why)
            kept = sum(file.pending_lines for file in files)
            self.warning(
                f"cannot write {first.path}: {why}. Training continues; {kept} records are kept in memory "
                f"and will be written when there is room."
            )
        else:
            self.event(names.Event.STORAGE_RECOVERED, self._step)
            self.notice("the run folder can be written again; every kept record is in its file")


class SilentJournal(Journal):
    """Of a rank that leaves reporting to rank 0."""

    def __init__(self) -> None:
        self._sinks = []
        self._step, self._in_trouble = 0, False
