"""Units of work: ranges of lines of a large .jsonl, or files. They follow from the files alone, never from workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import IO

from bloomery.prepare.sources import InputFile, open_input, unreadable

_LARGEST_UNIT_BYTES = 64 << 20
_SMALLEST_UNIT_BYTES = 4 << 20
_UNITS = 64
"""As many as this where the sizes allow, so that a small corpus keeps every worker busy too."""
_MOST_FILES = 4096
_EXPANSION = 4
"""Of compressed text, roughly."""


@dataclass(frozen=True)
class Piece:
    """The bytes [start, end) of a file: the whole file, or whole lines of it."""

    file: InputFile
    start: int
    end: int


@dataclass(frozen=True)
class Unit:
    number: int
    pieces: tuple[Piece, ...]
    """All of one source."""

    @property
    def source(self) -> int:
        return self.pieces[0].file.source

    @property
    def input_bytes(self) -> int:
        return sum(piece.end - piece.start for piece in self.pieces)


def plan_units(files: Sequence[InputFile]) -> list[Unit]:
    """All documents of all files, in their order. Files between two large ones share a unit while they fit."""
    target = min(max(sum(map(_work, files)) // _UNITS, _SMALLEST_UNIT_BYTES), _LARGEST_UNIT_BYTES)
    groups: list[list[Piece]] = []
    work = 0
    for file in files:
        pieces = _lines(file, target) if file.kind == "jsonl" and not file.compression else []
        if len(pieces) > 1:
            groups += [[piece] for piece in pieces]
            work = target
            continue
        last = groups[-1] if groups else []
        if not last or last[0].file.source != file.source or work + _work(file) > target or len(last) == _MOST_FILES:
            groups.append([])
            work = 0
        groups[-1].append(Piece(file, 0, file.size))
        work += _work(file)
    return [Unit(number, tuple(group)) for number, group in enumerate(groups)]


def _work(file: InputFile) -> int:
    return file.size * (_EXPANSION if file.compression or file.kind == "parquet" else 1)


def _lines(file: InputFile, target: int) -> list[Piece]:
    """Cut at the first newline after each multiple of an equal share."""
    count = -(-file.size // target)
    cuts = [0]
    if count > 1:
        try:
            with open_input(file) as raw:
                for index in range(1, count):
                    share = file.size * index // count
                    cuts.append(cuts[-1] if share < cuts[-1] else _after_newline(raw, share))
        except Exception as error:  # an OSError, or what the library of a URL raises
            raise unreadable(file.name, error) from error
    cuts.append(file.size)
    return [Piece(file, start, end) for start, end in pairwise(cuts) if end > start]


def _after_newline(raw: IO[bytes], offset: int) -> int:
    raw.seek(offset)
    while chunk := raw.read(1 << 16):
        newline = chunk.find(b"\n")
        if newline >= 0:
            return offset + int(newline) + 1
        offset += len(chunk)
    return offset
