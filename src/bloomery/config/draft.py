"""A recipe as far as it could be read: its values, where each was written, and everything wrong with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bloomery.base.errors import Problem

if TYPE_CHECKING:  # slow to import; see read_recipe
    from bloomery.config.recipe import Recipe

COMMAND_LINE = "command line"


@dataclass
class Draft:
    """`recipe` is None if there are problems."""

    source: str
    recipe: Recipe | None = None
    places: dict[str, str] = field(default_factory=dict)
    """Dotted path -> where the user wrote it; a path that is missing here was left to its default."""
    by_family: set[str] = field(default_factory=set)
    """Paths whose value is the model family's default."""
    problems: list[Problem] = field(default_factory=list)
    is_saved: bool = False
    """It is that of a checkpoint: a secret in it is masked, not refused."""

    def is_set(self, path: str) -> bool:
        """Whether the user wrote this field, or one inside it."""
        return any(is_inside(written, path) for written in self.places)

    def place(self, *paths: str) -> str:
        """Where to look: what the command line changed, else the first path that was written, else its section."""
        written = [self.places[path] for path in paths if path in self.places]
        inside = [place for path in paths for inner, place in self.places.items() if is_inside(inner, path)]
        around = [self.places[outer] for path in paths for outer in _sections_around(path) if outer in self.places]
        on_command_line = [place for place in (*written, *inside) if place.startswith(COMMAND_LINE)]
        return next(iter([*on_command_line, *written, *inside, *around]), self.source)

    def replace_places(self, path: str, places: dict[str, str]) -> None:
        """Forget where `path` and everything inside it was written; it now comes from `places`."""
        for old in [old for old in self.places if is_inside(old, path)]:
            del self.places[old]
        self.places.update({new: place for new, place in places.items() if is_inside(new, path)})


def is_inside(path: str, outer: str) -> bool:
    """Whether `path` is `outer` or lies within it."""
    return path == outer or path.startswith(f"{outer}.")


def by_place(problem: Problem) -> tuple[str, int]:
    """Sort key: the order in which a reader of the files meets the problems."""
    file, _, line = problem.place.rpartition(":")
    return (file, int(line)) if file and line.isdigit() else (problem.place, 0)


def _sections_around(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:i]) for i in range(len(parts) - 1, 0, -1)]
