"""What comes from elsewhere and may be anything: regular files of a bounded size, JSON of a bounded depth, an answer in
time."""

from __future__ import annotations

import errno
import io
import json
import os
import stat
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

from bloomery.base.units import format_bytes

if TYPE_CHECKING:
    from pydantic import ValidationError

T = TypeVar("T")
SMALL_BYTES = 16 << 20
LARGE_BYTES = 128 << 20
"""For lists of tensors or files, and vocabularies."""
_DEEPEST = 64
_MOST_IN_A_LEVEL = 4_000_000
_MOST_DIGITS = 40
"""Of a whole number: `float` takes all of these. Tokenizers have a `model_max_length` of 31 digits."""


def read_small(path: str | os.PathLike[str], most_bytes: int = SMALL_BYTES) -> bytes:
    """OSError also where it is a pipe, a device or larger. Never waits, and never reads more than that."""
    with open(path, "rb", opener=open_regular) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {format_bytes(most_bytes)}", str(path))
    return content


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """An opener for `open` that never waits. OSError for a folder, a pipe, a socket or a device."""
    descriptor = os.open(path, flags | os.O_NONBLOCK, mode)
    found = os.fstat(descriptor).st_mode
    if stat.S_ISREG(found):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(found):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.ENXIO, "it is no regular file", str(path))


def read_text(path: str | os.PathLike[str], most_bytes: int = SMALL_BYTES, *, encoding: str = "utf-8-sig") -> str:
    """With `\\n` for every kind of line end. ValueError where it is not of that encoding."""
    return io.TextIOWrapper(io.BytesIO(read_small(path, most_bytes)), encoding).read()


def read_json(path: str | os.PathLike[str], most_bytes: int = SMALL_BYTES) -> Any:
    """OSError where it cannot be read, ValueError where it is no JSON."""
    return parse_json(read_small(path, most_bytes))


def parse_json(content: bytes | str) -> Any:
    """ValueError also where it is nested too deeply or has a number that is too long. Takes NaN, as Python does."""
    text = content.decode("utf-8-sig") if isinstance(content, bytes) else content
    try:
        value = _DECODER.decode(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if text.count("[") + text.count("{") > _DEEPEST:
        check_depth(value)
    return value


def parse_yaml(text: str) -> Any:
    """ValueError also for what could take all memory or crash the library: aliases, and lists deep in each other."""
    import yaml

    loader, depth = getattr(yaml, "CSafeLoader", yaml.SafeLoader), 0
    try:
        for event in yaml.parse(text, Loader=loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST or isinstance(event, yaml.AliasEvent):
                raise ValueError(f"it has aliases, or is nested more than {_DEEPEST} levels deep")
        return yaml.load(text, Loader=loader)
    except (yaml.YAMLError, LookupError, AttributeError) as error:  # the others: PyYAML of `!!int ""` and `!!bool x`
        raise ValueError(str(error)) from error


def in_background(function: Callable[[], T]) -> Future[T]:
    """What a thread makes of it, which a process that ends does not wait for, as it would for those of a pool."""
    answer: Future[T] = Future()

    def call() -> None:
        try:
            answer.set_result(function())
        except BaseException as error:
            answer.set_exception(error)

    Thread(target=call, daemon=True).start()
    return answer


def in_time(seconds: float, function: Callable[[], T]) -> T:
    """What a function returns. TimeoutError if it does not: its thread is left behind."""
    return in_background(function).result(seconds)


def wrong_fields(error: ValidationError) -> str:
    """What a pydantic model found wrong, each with its place and value: `size -1 (should be greater than ...)`."""
    found = []
    for each in error.errors(include_url=False):
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in each["loc"]).lstrip(".")
        rule = each["msg"].removeprefix("Value error, ").removeprefix("Input ")
        is_absent = each["type"] in ("missing", "missing_argument")
        found.append(
            f"no {where}" if is_absent else f"{where} {json.dumps(each['input'], default=str):.80} ({rule})".lstrip()
        )
    return "; ".join(found[:20]) + (f"; and {len(found) - 20} more" if len(found) > 20 else "")


def check_depth(value: Any) -> None:
    """ValueError where lists and objects lie too deep in each other for the code that walks them, or are too many."""
    level = [value] if type(value) in (dict, list) else []
    for _ in range(_DEEPEST):
        inner = [each.values() if type(each) is dict else each for each in level]
        if not (level := [each for values in inner for each in values if type(each) in (dict, list)]):
            return
        if len(level) > _MOST_IN_A_LEVEL:
            raise ValueError("it has too many lists and objects")
    raise ValueError(_TOO_DEEP)


def _integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"it has a number of {len(digits)} digits")
    return int(digits)


_TOO_DEEP = f"it is nested more than {_DEEPEST} levels deep"
_DECODER = json.JSONDecoder(parse_int=_integer)
