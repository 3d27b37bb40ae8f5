"""Everything that a run reports goes through its journal, which feeds all sinks and keeps their failures from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bloomery.base.errors import Problem, StorageError, on_one_line
from bloomery.base.storage import AppendFile, reason
from bloomery.monitor import names
from bloomery.monitor.record import Record
from bloomery.monitor.sinks import Console, EventFile, MetricsFile, Sink, TextLog


def open_journal(
    run_folder: Path,
    *,
    console: Console,
    job: int,
    tensorboard: bool,
    resume_step: int,
    recipe_text: str = "",
    world_size: int = 1,
) -> Journal:
    """That of rank 0, with all sinks of a job. The run folder must exist. `resume_step`: the step this job continues
    from; what an older job logged beyond it no longer counts."""
    sinks: list[Sink] = [
        MetricsFile(run_folder / names.METRICS_FILE),
        EventFile(run_folder / names.EVENTS_FILE, job=job),
        TextLog(run_folder / names.TEXT_LOG_FILE),
        console,
    ]
    if tensorboard:
        from bloomery.monitor.tensorboard import TensorBoard

        folder = run_folder / names.TENSORBOARD_FOLDER
        sinks.append(TensorBoard(folder, resume_step=resume_step, recipe_text=recipe_text, world_size=world_size))
    return Journal(sinks, step=resume_step)


class Journal:
    """Rank 0 of a run has one with sinks; those of the other ranks have none."""

    def __init__(self, sinks: Sequence[Sink] = (), *, step: int = 0) -> None:
        self._step, self._is_failing = step, False
        self.is_taken_over: Callable[[], bool] = lambda: False
        self._sinks = list(sinks)
        for file in self._files:
            if file.repaired:
                self.notice(file.repaired)
                self.event(names.Event.REPAIRED, step, what=file.repaired)

    def record(self, record: Record) -> None:
        self._step = record.step
        self._feed(lambda sink: sink.record(record))

    def event(self, kind: names.Event, step: int, **facts: Any) -> None:
        """For events.jsonl only; people read a notice or a warning."""
        self._feed(lambda sink: sink.event({"kind": kind, "step": step, **facts}))

    def notice(self, text: str) -> None:
        self._feed(lambda sink: sink.notice(_printable(text)))

    def warning(self, text: str) -> None:
        self._feed(lambda sink: sink.warning(_printable(text)))

    def silent_when(self, taken_over: Callable[[], bool]) -> None:
        """Nothing more goes into the files when a newer start has taken the run over: they are its own."""
        self.is_taken_over = taken_over
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

    def _feed(self, give: Callable[[Sink], None]) -> None:
        for sink in self._sinks:
            give(sink)
        self._watch_sinks()

    def _watch_sinks(self) -> None:
        """One warning when writing starts to fail, one notice when it works again."""
        for sink in list(self._sinks):
            if sink.failure:
                self._sinks.remove(sink)
                self.event(names.Event.TENSORBOARD_OFF, self._step, reason=sink.failure)
                rest = f"Training continues; {names.METRICS_FILE} has every number."
                self.warning(f"{type(sink).__name__} is off for the rest of this job: {sink.failure}. {rest}")
        files = self._files
        if self._is_failing:
            for file in files:
                file.flush()
        failing = [file for file in files if file.pending_lines]
        if bool(failing) == self._is_failing:
            return
        self._is_failing = bool(failing)
        if failing:
            first, why = failing[0], reason(failing[0].last_error)
            self.event(names.Event.STORAGE_TROUBLE, self._step, file=str(first.path), reason=why)
            kept = sum(file.pending_lines for file in files)
            self.warning(
                f"cannot write {first.path}: {why}. Training continues; {kept} records are kept in memory "
                f"and will be written when there is room."
            )
        else:
            self.event(names.Event.STORAGE_RECOVERED, self._step)
            self.notice("the run folder is writable again; every kept record is in its file")


def _printable(text: str) -> str:
    """Names from a foreign checkpoint may hold escapes of the terminal."""
    return "\n".join(map(on_one_line, text.splitlines()))
