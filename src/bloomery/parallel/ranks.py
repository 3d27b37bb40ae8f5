"""All the ranks of a run: joining them, agreeing with them, the watchdog for hangs, and naming a lost rank."""

import contextlib
import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from bloomery.base import exit_codes, signals
from bloomery.base.errors import LostRankError, Problem
from bloomery.base.ranks import Ranks, Started
from bloomery.base.signals import PULSE
from bloomery.base.stacks import call, stacks

_TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for another in a collective. A rank that dies is noticed at once, by its closed connection."""
_ROLL_CALL_SECONDS = 2.0
_COMMUNICATION_ERRORS = (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)
_COMMUNICATION_WORDS = ("connection", "gloo", "timed out", "socket", "nccl")
_NOTE_SECONDS = 1.0
_QUIET_SECONDS = 3.0
"""A rank whose note has not changed for so long is stopped, or its machine is gone."""
_LAST_WORDS_SECONDS = 4.0
_STACKS, _STACKS_SECONDS = "bloomery/stacks", 2.0


class _Note(NamedTuple):
    """How far a rank is."""

    time: float
    step: int
    beats: int
    waiting: bool
    limit: float
    place: str
    """The call it is in, and its host."""


class DistributedRanks(Ranks):
    """The real `Ranks` (base/ranks.py), over the host network: nothing here touches a device.

    It has a watchdog for hangs: each rank notes once a second how far it is, and a rank that waits too long reads the
    notes. They go through the rendezvous store, from threads: the main thread may be in a collective that never ends.
    One thread speaks with the store, which may not answer either; the other one judges.
    """

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._store = cast(Any, _get_default_store())
        self._board = self._store.clone()  # a connection of its own: a wait on the other one would hold it up
        self._hangs = False
        self._report: Callable[[str, Mapping[int, str]], None] = lambda text, found: None
        self._answered = b""
        """The newest request for stacks."""
        self._keys = [f"bloomery/watch/{number}" for number in range(self.size)]
        self._notes: dict[int, _Note] = {}
        self._changed: dict[int, float] = {}
        self._ended = threading.Event()
        PULSE.since = time.monotonic()  # a forked rank has that of its server, which may serve many starts
        self._write_note()  # whoever reads all notes waits for each rank's first one
        for work in (self._write_notes, self._judge):
            threading.Thread(target=work, name=f"bloomery{work.__name__}", daemon=True).start()

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        with _agreeing():
            dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: Any, source: int = 0) -> Any:
        values = [value]
        with _agreeing():
            dist.broadcast_object_list(values, src=source)
        return values[0]

    def sum(self, values: Sequence[float]) -> list[float]:
        total = torch.tensor(values, dtype=torch.float64)
        with _agreeing():
            dist.all_reduce(total)
        return total.tolist()

    def store_set(self, key: str, word: Any) -> None:
        with contextlib.suppress(*_COMMUNICATION_ERRORS):
            self._board.set(f"bloomery/{key}", json.dumps(word))

    def store_take(self, key: str) -> Any:
        word = None
        with contextlib.suppress(*_COMMUNICATION_ERRORS):
            if self._board.check([f"bloomery/{key}"]):
                word = json.loads(self._board.get(f"bloomery/{key}"))
                self._board.delete_key(f"bloomery/{key}")
        return word

    def report_hang(self, report: Callable[[str, Mapping[int, str]], None]) -> None:
        self._report = report

    def stacks(self) -> dict[int, str]:
        request, deadline = secrets.token_hex(4), time.monotonic() + _STACKS_SECONDS
        keys = {rank: f"{_STACKS}/{request}/{rank}" for rank in range(self.size) if rank != self.rank}
        found = {self.rank: stacks()}
        if 0 in self.silent_ranks():  # it keeps the store: without it nobody is heard
            return found
        with contextlib.suppress(*_COMMUNICATION_ERRORS):
            self._board.set(_STACKS, request)
            while len(found) < self.size and time.monotonic() < deadline:
                time.sleep(_NOTE_SECONDS / 10)
                come = [rank for rank, key in keys.items() if rank not in found and self._board.check([key])]
                found |= {rank: self._board.get(keys[rank]).decode() for rank in come}
        return found

    def _report_with_stacks(self, text: str) -> None:
        self._report(text, self.stacks())

    def _answer_for_stacks(self) -> None:
        if self._board.check([_STACKS]) and (request := self._board.get(_STACKS)) != self._answered:
            self._answered = request
            self._board.set(f"{_STACKS}/{request.decode()}/{self.rank}", stacks())

    def lost(self, error: Exception) -> LostRankError | None:
        """If the error is a broken collective: which ranks are missing. All remaining ranks answer a roll call."""
        if not _is_communication(error):
            return None
        if self._hangs:  # the others leave for that, and one of them says so
            hung = LostRankError(Problem(self.waits()))
            hung.reported_by_rank_0 = True
            return hung
        answers = self._roll_call()
        missing = [str(rank) for rank, answer in enumerate(answers) if not answer]
        what = f"rank {', '.join(missing) or '?'} of {self.size} is lost"
        if answers and not missing:
            what = f"all {self.size} ranks are alive, but they waited for different things or one was too slow"
        if not answers:
            what = f"rank 0 of {self.size} is gone: it was lost, or it left because another rank was"
        rule = f"rank {self.rank} cannot continue alone ({_short(error)})"
        remedy = "read the last lines of that rank's log; start again to resume from the newest checkpoint"
        lost = LostRankError(Problem(what, rule, remedy))
        lost.reported_by_rank_0 = True in answers and self.rank != answers.index(True)
        return lost

    def _roll_call(self) -> list[bool]:
        """Who answers, by rank; nothing when the store that answers go to is gone."""
        keys = [f"bloomery/here/{rank}" for rank in range(self.size)]
        try:
            self._store.set(keys[self.rank], "1")
            with contextlib.suppress(Exception):
                dist.destroy_process_group()  # its closed connections wake those who still wait for us
            # The store may live in rank 0, which therefore stays a little longer.
            deadline = time.monotonic() + _ROLL_CALL_SECONDS + (self.rank == 0)
            while time.monotonic() < deadline and not self._store.check(keys):
                time.sleep(0.05)
            return [self._store.check([key]) for key in keys]
        except Exception:
            return []

    def waits(self) -> str:
        behind, seconds = self._behind(), f"{PULSE.silent_seconds:.0f} s"
        if not behind:
            places = {rank: note.place for rank, note in self._notes.items()} | {self.rank: _place()}
            where = "; ".join(f"rank {rank} is in {places[rank]}" for rank in sorted({min(places), max(places)}))
            return f"All {self.size} ranks have waited {seconds} for each other, since step {PULSE.step}: {where}"
        step = self._notes[behind[0]].step if behind[0] in self._notes else PULSE.step
        whom = f"rank {', '.join(map(str, behind[:8]))}{' and more' if len(behind) > 8 else ''}"
        them = self._notes[behind[0]].place if behind[0] in self._notes else "an unknown place"
        answers = f"rank {behind[0]}{' does not answer and' * (behind[0] in self.silent_ranks())} was last in {them}"
        waits = f"rank {self.rank} has waited {seconds} for {whom}, which last reported step {step}"
        return f"{waits}. Rank {self.rank} is in {_place()}; {answers}"

    def silent_ranks(self) -> list[int]:
        """Those whose notes no longer change, or that are not heard soon after this rank has begun to read notes."""
        now, begun = time.monotonic(), PULSE.since + 2 * _NOTE_SECONDS
        heard = {rank: self._changed.get(rank, begun) for rank in range(self.size) if rank != self.rank}
        return [rank for rank, last in heard.items() if now - last > _QUIET_SECONDS]

    def _behind(self) -> list[int]:
        """Whom all wait for: ranks that are silent, or else those that have not come to what the others wait in."""
        if silent := self.silent_ranks():
            return [0] if 0 in silent else silent  # rank 0 keeps the store: without it nobody is heard
        unheard = dict.fromkeys(range(self.size), _Note(0.0, PULSE.step, -1, False, 0.0, ""))
        notes = {**unheard, **self._notes, self.rank: self._mine()}
        least = min((note.beats, note.waiting) for note in notes.values())
        slow = [rank for rank, note in notes.items() if (note.beats, note.waiting) == least]
        return slow if len(slow) < self.size else []

    def _mine(self) -> _Note:
        return _Note(time.monotonic(), PULSE.step, PULSE.beats, PULSE.waiting, PULSE.limit, _place())

    def _write_note(self) -> None:
        self._board.set(self._keys[self.rank], json.dumps(self._mine()))

    def _write_notes(self) -> None:
        while not self._ended.wait(_NOTE_SECONDS):
            try:
                self._write_note()
                self._answer_for_stacks()
                if PULSE.silent_seconds < _NOTE_SECONDS:
                    continue
                found = {rank: _Note(*json.loads(text)) for rank, text in enumerate(self._board.multi_get(self._keys))}
            except Exception:
                continue  # no store any more: the ranks are leaving
            for rank, note in found.items():
                if self._notes.get(rank) != note:
                    self._changed[rank] = time.monotonic()
            self._notes = found

    def _judge(self) -> None:
        while not self._ended.wait(_NOTE_SECONDS / 2):
            # What a silent rank has noted is the limit of something past; so is what this one read of itself last.
            heard = self._notes.keys() - {self.rank, *self.silent_ranks()}
            if PULSE.silent_seconds <= max([PULSE.limit, *(self._notes[rank].limit for rank in heard)]):
                continue
            self._hangs, behind, text = True, self._behind(), f"{self.waits()}. Start again to resume"
            if self.rank == min(set(range(self.size)) - set(behind)):  # the first of those that wait speaks for all
                signals.say(text)
                reporting = threading.Thread(target=self._report_with_stacks, args=(text,), daemon=True)
                reporting.start()
                reporting.join(_LAST_WORDS_SECONDS)  # storage may hang as well
            else:
                time.sleep(_LAST_WORDS_SECONDS)
            if not self._ended.is_set():
                os._exit(exit_codes.LOST_RANK)


def _place() -> str:
    return f"{call()} on {socket.gethostname()}"


@contextmanager
def _agreeing() -> Iterator[None]:
    PULSE.mark(waiting=True)
    yield
    PULSE.mark(waiting=False)


@contextmanager
def joined(started: Started, device: torch.device) -> Iterator[DistributedRanks]:
    """Be one of the ranks until the end of the block. A collective that breaks becomes a LostRankError."""
    backend = (
        "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    )
    os.environ |= {
        "RANK": str(started.rank),
        "WORLD_SIZE": str(started.size),
        "MASTER_ADDR": started.address,
        "MASTER_PORT": str(started.port),
    }
    try:
        dist.init_process_group(backend, timeout=_TIMEOUT)
    except RuntimeError as error:
        if not _is_communication(error):
            raise
        raise _not_joined(started, error) from error
    ranks = DistributedRanks()
    try:
        yield ranks
    except Exception as error:
        lost = ranks.lost(error)
        if lost is None:
            raise
        raise lost from error
    finally:
        ranks._ended.set()
    if dist.is_initialized():
        dist.destroy_process_group()


def _not_joined(started: Started, error: Exception) -> LostRankError:
    """Without a common store there is no roll call: rank 0 keeps it, so most likely that one is gone."""
    what = f"the {started.size} ranks could not join at {started.address}:{started.port} ({_short(error)})"
    rule = "rank 0 is gone or cannot be reached there, or another rank died before it had joined"
    lost = LostRankError(Problem(what, rule, "read the last lines of the ranks' logs, and start again"))
    lost.reported_by_rank_0 = started.rank > 1  # nobody knows which of the first two is left
    return lost


def _is_communication(error: Exception) -> bool:
    """Gloo reports a closed connection as a bare RuntimeError."""
    if isinstance(error, LostRankError) or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, _COMMUNICATION_ERRORS) or any(word in str(error).lower() for word in _COMMUNICATION_WORDS)


def _short(error: Exception) -> str:
    """`Connection closed by peer`, out of a line that begins with a C++ file and ends with advice."""
    line = re.sub(r"^\[[^\]]*\]\s*", "", str(error).strip().splitlines()[0])
    return line.split(". ")[0][:160]
