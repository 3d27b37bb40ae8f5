"""What the sections of a recipe write. No source may reach it, or the next run would take the shard for text."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from bloomery.base.errors import DataError, Problem
from bloomery.data.manifest import manifest_path
from bloomery.data.origins import origins_path
from bloomery.data.shards import PARTIAL


class Made:
    """Asked for each folder and each file that a source reaches, by their paths without links. What is not written yet
    counts as if it were there: a first run is refused like the second."""

    def __init__(self, outputs: Iterable[str] = ()) -> None:
        self._names: dict[str, list[str]] = {}
        self._outputs: dict[str, str] = {}
        self._below: tuple[str, ...] = ()
        for output in outputs:
            folder, name = os.path.split(output)
            prefix = os.path.join(os.path.realpath(folder), name)
            written = [f"{prefix}.bin", f"{prefix}.idx", manifest_path(prefix), origins_path(prefix), f"{prefix}.parts"]
            for path in filter(None, map(_first_seen, written)):
                self._names.setdefault(os.path.dirname(path), []).append(os.path.basename(path))
                self._outputs.setdefault(path, output)
            for path in (f"{prefix}.parts/", f"{prefix}{PARTIAL}", f"{prefix}.verify-"):
                self._below += (path,)
                self._outputs.setdefault(path, output)

    def names_in(self, folder: str) -> Sequence[str]:
        return self._names.get(folder, ())

    def names_at(self, path: str) -> Sequence[str]:
        """The same for a folder that may be reached by links."""
        return self.names_in(os.path.realpath(path)) if self._names else ()

    def refuse(self, path: str, real: str, source: str) -> None:
        """DataError if this file of a source is one of ours."""
        if real not in self._outputs and not real.startswith(self._below):
            return
        start = real if real in self._outputs else next(start for start in self._below if real.startswith(start))
        what = f"belongs to prepare.output {self._outputs[start]}, and the source {source!r} reaches it"
        rule = "the next run would take the shard for text"
        raise DataError(Problem(what, rule, "choose an output outside of all sources", path))


def _first_seen(path: str) -> str:
    """Of a file in a folder that is still to be made, the first folder that will be new. Empty where none can be."""
    folder = os.path.dirname(path)
    if os.path.isdir(folder):
        return path
    return "" if os.path.lexists(folder) else _first_seen(folder)
