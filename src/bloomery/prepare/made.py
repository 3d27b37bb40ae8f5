"""What a command writes. No source may reach it, or the next run would take it for text."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from bloomery.base.errors import DataError, Problem
from bloomery.data.manifest import manifest_path, origins_path
from bloomery.data.shards import PARTIAL


class Made:
    """Asked for each folder and each file that a source reaches, by their paths without links. What is not written yet
    counts as if it were there: a first run is refused like the second."""

    def __init__(self, outputs: Iterable[str] = ()) -> None:
        """`outputs`: those of the sections of a recipe."""
        self._names: dict[str, list[str]] = {}
        self._owners: dict[str, str] = {}
        self._below: tuple[str, ...] = ()
        self._new_folders: set[str] = set()
        self._rule = "the next run would take the shard for text"
        for output in outputs:
            folder, name = os.path.split(output)
            owner, real = f"prepare.output {output}", os.path.realpath(folder)
            names = [f"{name}.bin", f"{name}.idx", manifest_path(name), origins_path(name), f"{name}.parts"]
            self._add(real, names, owner)
            for path in (f"{name}.parts/", f"{name}{PARTIAL}", f"{name}.verify-"):
                self._below += (os.path.join(real, path),)
                self._owners.setdefault(self._below[-1], owner)

    @classmethod
    def chunks(cls, folder: str, names: Sequence[str]) -> Made:
        """Those of `bloomery extract`."""
        made = cls()
        made._rule = "chunks would be made of chunks"
        made._add(os.path.realpath(folder), names, f"--output {folder}")
        return made

    def _add(self, folder: str, names: Sequence[str], owner: str) -> None:
        """Files, and the folders that are still to be made for them. None where there can be no such folder."""
        new, there = [], folder
        while not os.path.isdir(there):
            if os.path.lexists(there):
                return
            new.append(there)
            there = os.path.dirname(there)
        for path in new:
            self._names.setdefault(os.path.dirname(path), []).append(os.path.basename(path))
        self._new_folders.update(new)
        self._names.setdefault(folder, []).extend(names)
        for name in names:
            self._owners.setdefault(os.path.join(folder, name), owner)

    def names_in(self, folder: str) -> Sequence[str]:
        return self._names.get(folder, ())

    def names_at(self, path: str) -> Sequence[str]:
        """The same for a folder that may be reached by links."""
        return self.names_in(os.path.realpath(path)) if self._names else ()

    def is_new_folder(self, folder: str) -> bool:
        """Whether it is still to be made."""
        return folder in self._new_folders

    def refuse(self, path: str, real: str, source: str) -> None:
        """DataError if this file of a source is one of ours."""
        if real not in self._owners and not real.startswith(self._below):
            return
        start = real if real in self._owners else next(start for start in self._below if real.startswith(start))
        what = f"belongs to {self._owners[start]}, and the source {source!r} reaches it"
        raise DataError(Problem(what, self._rule, "choose an output outside of all sources", path))
