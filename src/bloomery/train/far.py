"""What a start has to do with the place far away where checkpoints are copied to: fetch, leave a branch, copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from bloomery.base.errors import DataError, Problem
from bloomery.base.ranks import ALONE, Ranks
from bloomery.checkpoint.fence import FencedError, Writer
from bloomery.checkpoint.fetch import Fetched, fetch_newest
from bloomery.checkpoint.folder import complete_checkpoints, is_step_name, name_of, step_of
from bloomery.checkpoint.remote import There, is_ours, retire_later_there
from bloomery.checkpoint.upload import Uploader
from bloomery.config.recipe import Recipe
from bloomery.monitor import names
from bloomery.monitor.history import Start, read_ledger
from bloomery.monitor.journal import Journal
from bloomery.monitor.names import Event


class Far:
    """Of one start. All ranks have one, and fetch together; rank 0 does the rest."""

    def __init__(self, recipe: Recipe, folder: Path, root: Path, ranks: Ranks = ALONE) -> None:
        """`folder`: of the run. `root`: where its checkpoints lie that are copied."""
        assert recipe.checkpoint.upload is not None
        self._upload = recipe.checkpoint.upload
        self._name = recipe.name
        self._folder = folder
        self._root = root
        self._ranks = ranks
        self._fetched = Fetched(None)
        self._replaced: Sequence[str] = ()
        """What was wrong with the one here whose place the fetched one took."""

    def fetch_newer(self, newer_than: int, damaged: Mapping[Path, list[str]]) -> Path | None:
        """Collective. DataError if neither here nor there is a good one, but damaged ones are."""
        self._fetched = found = fetch_newest(
            self._upload.to, self._root, newer_than=newer_than, refused=self._is_refused, ranks=self._ranks
        )
        if found.folder is None and found.damaged and newer_than < 0:
            here = [Problem(text, place=str(path)) for path, texts in damaged.items() for text in texts]
            there = [Problem(text, place=self._there(name)) for name, texts in found.damaged.items() for text in texts]
            remedy = "bring one back from a backup, or move them away to start from the beginning"
            what = "all checkpoints of this run are damaged, also the copies"
            raise DataError([*here, *there, Problem(what, remedy=remedy)])
        if found.folder is not None:
            self._replaced = damaged.get(found.folder, ())
        return found.folder

    def fetch_named(self, name: str, roots: Sequence[Path]) -> None:
        """The one that a user names, if it is there and not here. Collective."""
        wanted = name_of(name)
        is_here = any(path.name == wanted for root in roots for path in complete_checkpoints(root))
        if is_step_name(wanted) and not self._ranks.broadcast(is_here):
            step = step_of(Path(wanted))
            self._fetched = fetch_newest(self._upload.to, self._root, newer_than=-1, only=step, ranks=self._ranks)

    def tell(self, step: int, journal: Journal) -> None:
        """What came of fetching."""
        found = self._fetched
        for name, reasons in found.damaged.items():
            journal.event(Event.DAMAGED, step, folder=name, reasons=reasons, place=self._upload.to)
            journal.warning(f"the copy {self._there(name)} is damaged ({'; '.join(reasons)}). It is not used")
        if found.folder is None:
            return
        journal.event(Event.FETCHED, step, folder=found.folder.name, source=self._upload.to)
        if found.put_aside:
            reasons = list(self._replaced)
            journal.event(Event.DAMAGED, step, folder=found.folder.name, reasons=reasons, place=str(self._root))
            journal.warning(
                f"{found.folder} was damaged ({'; '.join(reasons)}). It is called {found.put_aside} now; "
                f"its copy from {self._upload.to} is used"
            )

    def leave_branch(self, step: int, writer: Writer, journal: Journal) -> None:
        """What lies there beyond the step that this job begins at belongs to a branch that is left."""
        try:
            retired = retire_later_there(self._upload.to, step, self._name, writer, is_left=self._is_left)
        except FencedError:
            raise
        except Exception as error:  # whatever a store may raise
            text = f"{type(error).__name__}: {error}"
            journal.warning(
                f"later checkpoints in {self._upload.to} could not be put aside: {text}. A later start may fetch them"
            )
            return
        if retired:
            journal.event(Event.RETIRED, step, folders=retired, place=self._upload.to)

    def uploader(self, writer: Writer, train_steps: int) -> Uploader:
        """Begins with the newest checkpoint here, if it is not there: an earlier job may have failed to copy it, or had
        no place to copy to. For it nothing is deleted there."""
        every_steps = self._upload.every.count if self._upload.every else None
        uploader = Uploader(
            self._upload.to, run=self._name, every_steps=every_steps, keep=self._upload.keep, writer=writer
        )
        for folder in reversed(complete_checkpoints(self._root)):
            is_final = step_of(folder) >= train_steps
            if is_final or uploader.wants(folder):
                uploader.offer(folder, keep_all=True, final=is_final)
                break
        return uploader

    def _is_refused(self, there: There) -> bool:
        """Whether it is of a branch that was left. DataError if it is of another run."""
        if not is_ours(there):
            return False  # damaged, which is told
        if self._is_left(there):
            return True
        name = there.manifest.get("run", self._name)
        if name != self._name:
            what = f"{self._there(there.name)} is of the run {name!r}, and this is {self._name!r}"
            rule = "every run has a place of its own for its copies"
            remedy = f"use another checkpoint.upload.to, or name={name} to go on with that run"
            raise DataError(Problem(what, rule, remedy))
        return False

    def _is_left(self, there: There) -> bool:
        """Whether a start after the one that made it began before its step: it left that branch, perhaps while this
        place was not in the recipe. One that was made elsewhere is not known here, and not left."""
        made_by = [n for n, start in enumerate(self._starts) if start.token == there.manifest.get("start")]
        return bool(made_by) and any(start.step < there.step for start in self._starts[made_by[-1] + 1 :])

    @cached_property
    def _starts(self) -> list[Start]:
        """The starts so far of this run folder."""
        return read_ledger(self._folder / names.EVENTS_FILE).starts

    def _there(self, name: str) -> str:
        return f"{self._upload.to.rstrip('/')}/{name}"
