"""The one place a run speaks through: it keeps every sink in step, and keeps quiet trouble from becoming loss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bloomery.base.errors import DataError, Problem, StorageError
from bloomery.base.storage import AppendFile, own_folder, reason
from bloomery.monitor import names
from bloomery.monitor.console import Console
from bloomery.monitor.history import scan_metrics
from bloomery.monitor.megatron_line import iteration_line, validation_box
from bloomery.monitor.record import Record, StepRecord, ValidationRecord
from bloomery.monitor.sinks import EventLog, JsonlSink, TensorBoardSink, TextLog

_REPLAYED_WHOLE = 2**23
"""Of metrics beyond so many bytes only some records are drawn again in TensorBoard, which shows few of them."""


class Journal:
    """One process of a run has one. The run folder must exist; see base.storage.make_run_folder."""

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
    ) -> None:
        """`resume_step`: the step this job continues from; what an older job logged beyond it no longer counts."""
        self.run_folder = run_folder
        self._recipe_text = recipe_text
        self.console = console or Console(train_steps)
        self._step = resume_step
        self._in_trouble = False
        self._closed = False
        text_log_path = run_folder / names.TEXT_LOG_FILE
        own_folder(text_log_path.parent)
        self._metrics = JsonlSink(run_folder / names.METRICS_FILE)
        self._events = EventLog(run_folder / names.EVENTS_FILE, job=job)
        self._text = TextLog(text_log_path)
        self._files: tuple[AppendFile, ...] = (self._metrics.file, self._events.file, self._text.file)
        self._tensorboard = self._start_tensorboard(resume_step) if tensorboard else None
        for file in self._files:
            if file.repaired:
                self.notice(file.repaired)
                self.event(names.EVENT_REPAIRED, resume_step, what=file.repaired)

    def step(self, record: StepRecord) -> None:
        self._record(record, [iteration_line(record)])
        self.console.step(record)
        self._watch_storage()

    def validation(self, record: ValidationRecord) -> None:
        self._record(record, validation_box(record))
        self.console.validation(record)
        self._watch_storage()

    def event(self, kind: str, step: int, **facts: Any) -> None:
        """For the ledger only; people are told by notice or warning."""
        self._events.event(kind, step, **facts)
        self._watch_storage()

    def notice(self, text: str) -> None:
        self._text.remark(text)
        self.console.notice(text)
        self._watch_storage()

    def warning(self, text: str) -> None:
        self._text.remark(f"warning: {text}")
        self.console.warning(text)
        self._watch_storage()

    def silent_when(self, taken_over: Callable[[], bool]) -> None:
        """Nothing more goes into the files when a newer start has taken the run over: they are its own."""
        for file in self._files:
            file.belongs_to_another = taken_over

    def flush(self) -> None:
        """Bring everything to the disk if that is possible now; call it before promising a checkpoint."""
        for file in self._files:
            file.flush()
        self._watch_storage()

    def close(self) -> None:
        """StorageError, after everything was closed, if lines could still not be written."""
        if self._closed:
            return
        self._closed = True
        if self._tensorboard is not None:
            self._tensorboard.close()
        problems: list[Problem] = []
        for file in self._files:
            try:
                file.close()
            except StorageError as error:
                problems += error.problems
        self.console.close()
        if problems:
            raise StorageError(problems)

    def _record(self, record: Record, text_lines: list[str]) -> None:
        self._step = record.step
        self._metrics.write(record)
        for line in text_lines:
            self._text.line(line)
        if self._tensorboard is not None and not self._tensorboard.write(record):
            folder, why = self._tensorboard.folder, self._tensorboard.failure
            self._tensorboard = None
            self.event(names.EVENT_TENSORBOARD_OFF, record.step, reason=why)
            self.warning(
                f"TensorBoard is off for the rest of this job: cannot write {folder}: {why}. "
                f"Training goes on; {names.METRICS_FILE} has every number."
            )

    def _start_tensorboard(self, resume_step: int) -> TensorBoardSink:
        history: list[Record] = []
        if resume_step > 0:
            try:
                path = self._metrics.file.path
                scan_metrics(path, history.append, skipped_bytes=max(0, path.stat().st_size - _REPLAYED_WHOLE) // 1000)
            except DataError as error:
                self.warning(f"the past of TensorBoard curves over samples and tokens is not drawn again: {error}")
        folder = self.run_folder / names.TENSORBOARD_FOLDER
        return TensorBoardSink(folder, resume_step=resume_step, history=history, recipe_text=self._recipe_text)

    def _watch_storage(self) -> None:
        """One warning when writing starts to fail, one notice when it works again."""
        if self._in_trouble:
            for file in self._files:
                file.flush()
        failing = [file for file in self._files if file.pending_lines]
        if bool(failing) == self._in_trouble:
            return
        self._in_trouble = bool(failing)
        if failing:
            first = failing[0]
            why = reason(first.last_error)
            self.event(names.EVENT_STORAGE_TROUBLE, self._step, file=str(first.path), reason=why)
            kept = sum(file.pending_lines for file in self._files)
            self.warning(
                f"cannot write {first.path}: {why}. Training goes on; {kept} records are kept in memory "
                f"and will be written when there is room."
            )
        else:
            self.event(names.EVENT_STORAGE_RECOVERED, self._step)
            self.notice("the run folder can be written again; every kept record is in its file")


class SilentJournal(Journal):
    """Of a rank that leaves the telling to rank 0."""

    def __init__(self, run_folder: Path) -> None:
        self.run_folder = run_folder

    def step(self, record: StepRecord) -> None: ...

    def validation(self, record: ValidationRecord) -> None: ...

    def event(self, kind: str, step: int, **facts: Any) -> None: ...

    def notice(self, text: str) -> None: ...

    def warning(self, text: str) -> None: ...

    def silent_when(self, taken_over: Callable[[], bool]) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...
