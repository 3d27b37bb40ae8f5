"""Errors that finish the conversation: what is wrong, the rule, the remedy, the place; no secret in them. Passwords,
keys and signatures that URLs carry are masked in all that is written or printed, and refused in recipes."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, TextIO

from bloomery.base import exit_codes


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


def first_line(error: BaseException) -> str:
    """Of its text: some libraries write pages. With the kind of an error that is a library's own mistake."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    is_plain = line and isinstance(error, OSError | ValueError | ImportError)
    return line if is_plain else f"{type(error).__name__}: {line}"


def unreadable(place: str, error: Exception) -> DataError:
    """A file, or a URL, that the system or the library of its store does not read."""
    why = (error.strerror if isinstance(error, OSError) else None) or first_line(error)
    remedy = (
        "check the address and what it needs to log in" if "://" in place else "check its path, permissions and storage"
    )
    return DataError(Problem(f"cannot be read: {why}", "", remedy, place))


def host_memory_problem(error: BaseException) -> Problem | None:
    """For an allocation that the host refused, by Python or by torch; None if the error is another one."""
    if not isinstance(error, MemoryError) and "DefaultCPUAllocator: " not in str(error):
        return None
    remedy = (
        "use a smaller batch.micro_batch_size or model, more ranks or a host with more memory (see also `ulimit -v`)"
    )
    return Problem("this process ran out of host memory", remedy=remedy)


# ---------------------------------------------------------------- secrets

_MASK = "***"
_VALUE = r"(?!\*\*\*)[^\s&;#'\"<>\\]{1,4096}"
_USER = r"[^\s/@:'\"<>\[]*:"
_TO_AT = r"(?:(?!://)[^\s'\"<>]){0,1024}@"
_PORT = r"\d{1,5}(?:[^\w@%!$*+=~.-]|[.,]?$|[.,]\s)|[\s'\"<>),;\]]|$"
_CHAIN = r":(?:[\w+.-]+::)*[\w+.-]+://"
_NAMED = (
    r"(?<![a-z])(?:sig|sas|pass|pw|code|hmac|hdnea|sid)(?![a-z])|signature|token(?!iz)|secret|passw|pwd|jwt|session"
    r"|ticket|bearer|key(?!word)|cred|auth(?!or)"
)
_SOME = r"\w{0,64}"  # not \w*: a long word of many secrets would take minutes
_WORDS = (
    rf"{_SOME}(?:secret|passw){_SOME}|sharedaccess{_SOME}|{_SOME}(?:access|account|api)_?key"
    rf"|{_SOME}(?:access|api|auth|git\w{{0,3}}|hf|hub|sas|session)_?token"
)
_RULES = (
    # scheme://user:PASSWORD@host, also where a message cut it short, and as a path, which has one `/`. Stores have no
    # ports; fsspec chains with `::`.
    (re.compile(rf"(\b(?:s3a?|gc?s|abfss?|az|hf):/{{1,2}}){_USER}{_TO_AT}", re.I), "@"),
    (
        re.compile(
            rf"(:(?:///?|\\+/\\+/)|\b(?:https?|ftps?):/){_USER}(?!{_PORT})(?!{_CHAIN})(?:{_TO_AT}|[^\s'\"<>/]{{1,1024}})"
        ),
        "@",
    ),
    (re.compile(r"(\b(?:https?|ftps?):/{1,2})[^\s/@:'\"<>]+@", re.I), "@"),
    # Signed queries, the pairs of a connection string, what libraries print of their options and headers.
    (
        re.compile(
            rf"((?:[?&;#]|%3F|%26|\\+u0026)[\w.%-]{{0,64}}?(?:{_NAMED})[\w.%-]{{0,64}}?(?:=|%3D)){_VALUE}", re.I
        ),
        "",
    ),
    (re.compile(rf"(\b(?:{_WORDS})(?:\s?=\s?|['\"]: ?)['\"]?){_VALUE}", re.I), ""),
    (re.compile(r"((?:authorization|cookie)['\"]?\s*[:=]\s*+['\"]?+)(?!\*)[^'\"\n,}]+", re.I), ""),
    (re.compile(rf"(\b(?:x-[\w-]{{0,64}}(?:key|token|secret)['\"]?\s*[:=]\s*['\"]?|Bearer ))(?!\*){_VALUE}", re.I), ""),
    (re.compile(r"\b(hf_)[A-Za-z0-9]{30,100}\b"), ""),  # of the Hub, wherever it stands
)
_INSTEAD = {
    "s3 s3a": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or write ~/.aws/credentials",
    "gs gcs": "set GOOGLE_APPLICATION_CREDENTIALS to the file of the key",
    "abfs abfss az": "set AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN or AZURE_STORAGE_CONNECTION_STRING",
    "hf": "set HF_TOKEN",
    "http https": "write ~/.netrc; bring a file with a signed URL here by `bloomery download`",
}


def mask(text: str) -> str:
    """The text with `***` for every secret in it: of a URL, a query, a connection string or a header."""
    if "=" in text or ":" in text or "hf_" in text:  # the others hold none
        for pattern, end in _RULES:
            text = pattern.sub(rf"\g<1>{_MASK}{end}", text)
    return text


def where_instead(url: str) -> str:
    """What to do with the credentials of a URL: the environment variable or the file that its library reads."""
    scheme = url.partition("://")[0].rpartition(":")[2].lower()
    known = (way for schemes, way in _INSTEAD.items() if scheme in schemes.split())
    return next(known, "use the environment variable or the file that the library of its store reads")


class _Masked:
    """A stream through which no secret passes, whoever prints: also libraries, and Python's own tracebacks."""

    def __init__(self, stream: TextIO, *, must_arrive: bool) -> None:
        """`must_arrive`: what cannot be written is an OSError. Otherwise it is lost, and the exit code has to do."""
        self._stream = stream
        self._lost = () if must_arrive else (OSError,)

    def write(self, text: str) -> int:
        with contextlib.suppress(*self._lost):
            self._stream.write(mask(text))
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(*self._lost):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def mask_streams(*, output: bool = True) -> None:
    """For the rest of the process: all of standard error, and standard output if `output`."""
    for name in ("stdout", "stderr") if output else ("stderr",):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _Masked):
            setattr(sys, name, _Masked(stream, must_arrive=name == "stdout"))
