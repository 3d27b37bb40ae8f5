"""One file from one URL: tried again where that may help, resumed where safe, proven before it gets its name."""

from __future__ import annotations

import hashlib
import json
import os
import random
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bloomery.base.bounded import read_json
from bloomery.base.storage import open_plain, publish, writing
from bloomery.prepare.output import file_hashes
from bloomery.prepare.remote import FetchError, Remote, TryAgainError, open_remote, split_url, url_fingerprint


@dataclass(frozen=True)
class RemoteFile:
    url: str
    path: str
    """Where it goes, relative to the output folder."""
    size: int | None = None
    hashes: Mapping[str, str] = field(default_factory=dict)
    """Hexadecimal, by their names in output.HASHES; empty where the manifest has none."""


@dataclass(frozen=True)
class Patience:
    retries: int = 8
    """Attempts after the first, counted anew whenever one has brought the file further."""
    timeout_seconds: float = 60.0
    """Silence after which a connection counts as lost."""
    first_wait_seconds: float = 0.5
    """Doubled with every failure in a row."""
    longest_wait_seconds: float = 60.0


class Stopped(Exception):  # noqa: N818 - not a mistake
    """The whole download is being ended."""


class Traffic:
    """Shared by all threads: hosts that asked for a pause get it from everyone, and a stop ends every wait."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self._not_before: dict[str, float] = {}

    def pause(self, url: str, seconds: float) -> None:
        host, until = split_url(url).netloc, time.monotonic() + seconds
        self._not_before[host] = max(until, self._not_before.get(host, 0.0))

    def wait(self, url: str, seconds: float = 0.0) -> None:
        """At least this long, and until the host of the URL may be asked again."""
        until = max(time.monotonic() + seconds, self._not_before.get(split_url(url).netloc, 0.0))
        if self.stop.wait(max(0.0, until - time.monotonic())):
            raise Stopped


def fetch(wanted: RemoteFile, folder: Path, *, patience: Patience, traffic: Traffic) -> dict[str, str]:
    """The file under its name in `folder`; returns its hashes. FetchError once patience has ended."""
    part = _Part(folder / wanted.path)
    failures, furthest, wait_seconds = 0, part.size, 0.0
    while True:
        traffic.wait(wanted.url, wait_seconds)
        try:
            if not part.is_complete(wanted):
                offset, validator = part.resume_from(wanted)
                with open_remote(
                    wanted.url, offset=offset, validator=validator, timeout_seconds=patience.timeout_seconds
                ) as remote:
                    _copy(remote, part, wanted, traffic)
            return _prove_and_publish(wanted, part)
        except TryAgainError as error:
            failures = 1 if part.size > furthest else failures + 1
            furthest = max(furthest, part.size)
            if error.start_over:
                part.discard()
            if failures > patience.retries:
                raise FetchError(f"{error} (given up after {failures} attempts)") from error
            if error.wait_seconds is not None:
                traffic.pause(wanted.url, error.wait_seconds)
            longest = min(patience.longest_wait_seconds, patience.first_wait_seconds * 2 ** (failures - 1))
            wait_seconds = (error.wait_seconds or 0.0) + random.uniform(0.5, 1.0) * longest


def tidy(wanted: RemoteFile, folder: Path) -> None:
    """Remove what a download leaves beside a finished file if it is killed just after naming it."""
    _Part(folder / wanted.path).discard()


_LONGEST_NAME_BYTES = 255 - len("..part.json")
"""Of a file whose parts may be called after it: file systems end at 255."""


class _Part:
    """What has arrived so far: `.<name>.part`, hidden so that no glob takes it for data, and beside it what the server
    said about the file. Where that would be too long, a hash stands for the name."""

    def __init__(self, final: Path) -> None:
        self.final = final
        name = os.fsencode(final.name)
        stem = final.name if len(name) <= _LONGEST_NAME_BYTES else hashlib.sha256(name).hexdigest()
        self.path = final.with_name(f".{stem}.part")
        self._facts_path = final.with_name(f".{stem}.part.json")

    @property
    def size(self) -> int:
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    def begin(self, **facts: Any) -> None:
        self.final.parent.mkdir(parents=True, exist_ok=True)
        with open(self._facts_path, "w", opener=open_plain) as file:
            file.write(json.dumps(facts))

    def discard(self) -> None:
        for path in (self.path, self._facts_path):
            path.unlink(missing_ok=True)

    def publish(self) -> None:
        publish(self.path, self.final)
        self._facts_path.unlink(missing_ok=True)

    def is_complete(self, wanted: RemoteFile) -> bool:
        """All bytes are here; their checksum is still to be proven."""
        facts = self._facts()
        whole = wanted.size if wanted.size is not None else facts.get("total")
        return self.size > 0 and self.size == whole and self._can_be_trusted(wanted, facts)

    def resume_from(self, wanted: RemoteFile) -> tuple[int, str | None]:
        """(bytes to keep, validator that tells the server which file they belong to); 0 where they prove nothing."""
        facts = self._facts()
        whole = wanted.size if wanted.size is not None else facts.get("total")
        if (whole is not None and self.size >= whole) or not self._can_be_trusted(wanted, facts):
            return 0, None
        return self.size, facts.get("validator") if facts.get("url") == url_fingerprint(wanted.url) else None

    def _facts(self) -> dict[str, Any]:
        try:
            facts = read_json(self._facts_path)
        except (OSError, ValueError):  # absent, or torn by a power cut
            return {}
        return facts if isinstance(facts, dict) else {}

    @staticmethod
    def _can_be_trusted(wanted: RemoteFile, facts: Mapping[str, Any]) -> bool:
        """A checksum will prove what has arrived, or it is known to be of the file that the server still has. A size
        proves nothing."""
        same_remote = facts.get("url") == url_fingerprint(wanted.url) and facts.get("validator") is not None
        return bool(wanted.hashes) or same_remote


def _copy(remote: Remote, part: _Part, wanted: RemoteFile, traffic: Traffic) -> None:
    """Append what comes. Read errors are worth another try; write errors are the user's."""
    if remote.total is None and wanted.size is None and not wanted.hashes:
        raise FetchError("the server does not say how long it is: give its size or checksum in the manifest")
    if remote.packing and not wanted.hashes:
        text = f"the server packs it on the way (Content-Encoding: {remote.packing}), though it was asked not to"
        raise FetchError(f"{text}: give the checksum of the packed bytes in the manifest if they are what you want")
    if remote.total is not None and wanted.size is not None and remote.total != wanted.size:
        text = f"the server has {remote.total} bytes, the manifest says {wanted.size}"
        raise TryAgainError(text, start_over=True)
    whole = wanted.size if wanted.size is not None else remote.total
    with writing(part.final):
        part.begin(url=url_fingerprint(wanted.url), validator=remote.validator, total=remote.total)
        file = open(part.path, "ab", buffering=0, opener=open_plain)  # noqa: SIM115 - closed below
    with file:
        with writing(part.final):
            file.truncate(remote.offset)
        have = remote.offset
        while piece := remote.read():
            with writing(part.final):
                view = memoryview(piece)
                while view:
                    view = view[file.write(view) :]
            have += len(piece)
            if traffic.stop.is_set():
                raise Stopped
            if whole is not None and have > whole:
                raise TryAgainError(f"the server sent more than the {whole} bytes it should have", start_over=True)
    if whole is not None and have < whole:
        raise TryAgainError(f"only {have} of {whole} bytes arrived")


def _prove_and_publish(wanted: RemoteFile, part: _Part) -> dict[str, str]:
    """Reads the file back from the disk: what is proven is what will be used."""
    with writing(part.final):
        hashes = file_hashes(part.path, {"sha256", *wanted.hashes})
        for name, expected in wanted.hashes.items():
            if hashes[name] != expected:
                text = f"its {name} is {hashes[name]}, the manifest says {expected}"
                raise TryAgainError(text, start_over=True)
        part.publish()
    return hashes
