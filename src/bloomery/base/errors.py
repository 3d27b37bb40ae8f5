"""Errors that finish the conversation: what is wrong, the rule, the remedy, the place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from bloomery.base import exit_codes
from bloomery.base.credentials import mask


@dataclass(frozen=True)
class Problem:
    """One thing a user must fix."""

    what: str
    """The fact, with the offending value: `lr.peak is -0.1`."""
    rule: str = ""
    """Why it is wrong: `must be greater than 0`."""
    remedy: str = ""
    """What to do about it, as an instruction."""
    place: str = ""
    """Where it stands: `my.yaml:31`, `command line`, a file."""

    def __str__(self) -> str:
        place = f"{self.place}: " if self.place else ""
        sentences = [self.what, *(_capitalised(part) for part in (self.rule, self.remedy) if part)]
        text = " ".join(text if text.endswith((".", "?", "!")) else f"{text}." for text in sentences)
        return mask(on_one_line(place + text))


def first_few(names: Sequence[str], most: int = 3) -> str:
    """For a sentence that may be about very many: 'a, b, c and 297 more'."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def on_one_line(name: str) -> str:
    """A name as an error shows it: a newline and other characters that cannot be seen as Python writes them."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in name)


def _capitalised(sentence: str) -> str:
    """With a capital, unless it begins with a name such as `lr.min`."""
    first_word = sentence.split()[0].rstrip(".:,")
    return sentence if "." in first_word or "_" in first_word else sentence[0].upper() + sentence[1:]


class BloomeryError(Exception):
    """A mistake that the user can fix. Carries every problem found; printed without a traceback."""

    exit_code = exit_codes.USAGE
    reported_by_rank_0 = False
    """Whether all ranks raise this very error, so that this one need not print it."""

    def __init__(self, problems: Problem | Sequence[Problem]) -> None:
        self.problems = [problems] if isinstance(problems, Problem) else list(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def reported_once(self, rank: int) -> Self:
        """This error, which every rank raises: only rank 0 prints it."""
        self.reported_by_rank_0 = rank > 0
        return self

    def __reduce__(self) -> tuple[type[BloomeryError], tuple[list[Problem]]]:
        return type(self), (self.problems,)  # so that it comes whole out of a worker process


class RecipeError(BloomeryError):
    """The recipe or the command line is wrong."""


class DataError(BloomeryError):
    """Shards, tokenizer or checkpoint are missing, damaged or do not fit the recipe."""

    exit_code = exit_codes.DATA


class DivergedError(BloomeryError):
    """Training stopped itself: NaNs, numbers far above what they were, or ranks that drifted apart."""

    exit_code = exit_codes.DIVERGED


class StorageError(BloomeryError):
    """The run folder cannot be written."""

    exit_code = exit_codes.STORAGE


class LostRankError(BloomeryError):
    """Another rank of this training is gone, so this one cannot continue."""

    exit_code = exit_codes.LOST_RANK


def host_memory_problem(error: BaseException) -> Problem | None:
    """For an allocation that the host refused, by Python or by torch; None if the error is another one."""
    if not isinstance(error, MemoryError) and "DefaultCPUAllocator: " not in str(error):
        return None
    remedy = (
        "use a smaller batch.micro_batch_size or model, more ranks or a host with more memory (see also `ulimit -v`)"
    )
    return Problem("this process ran out of host memory", remedy=remedy)
