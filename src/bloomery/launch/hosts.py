"""Jobs on machines that ssh reaches: one `bloomery train` on each, which starts the ranks of its node."""

from __future__ import annotations

import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

from bloomery.base import exit_codes, signals
from bloomery.base.bounded import read_text
from bloomery.base.errors import Problem, RecipeError
from bloomery.base.storage import append_line
from bloomery.launch.doctor import BAD_NODES_FILE, bad_nodes
from bloomery.launch.job import Job

_SSH = ("ssh", "-tt", "-oBatchMode=yes", "-oConnectTimeout=10", "-oServerAliveInterval=5", "-oServerAliveCountMax=3")
"""With a terminal, so that what runs there ends with the connection; a dead host is noticed within 15 seconds."""
_FAILED_SSH = 255
_POLL_SECONDS = 0.2
_LOST_SECONDS = 6.0
"""Once a host has failed, the ranks of the others notice by themselves; after this time they are interrupted,"""
_LAST_SECONDS = 60.0
"""and after this their connections are closed."""


def read_hostfile(
    path: Path, *, nodes: int, ranks_per_node: int, bad: Sequence[str] = (), lost: Collection[str] = ()
) -> list[str]:
    """The first `nodes` hosts that are not bad; those that were lost before come last. RecipeError with every problem
    of the file."""
    try:
        lines = read_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(Problem(f"launch.hostfile {path} cannot be read: {error}", remedy="correct it")) from error
    found, problems = list[str](), list[Problem]()
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        match = re.fullmatch(r"([\w.@:-]+)(?: slots=(\d{1,4}))?", " ".join(words))
        if words and (match is None or match[1].startswith("-") or match[1] in found):
            what, rule = f"{line.strip()!r} is no host, or stands here twice", "a line is `NAME slots=RANKS`"
            problems.append(Problem(what, rule, "correct it", f"{path}:{number}"))
        elif words and match:
            found.append(match[1])
            if match[2] and int(match[2]) < ranks_per_node:
                rule = f"launch.gpus_per_node starts {ranks_per_node} ranks on every host"
                problems.append(
                    Problem(f"{match[0]} has too few", rule, "lower it, or use another host", f"{path}:{number}")
                )
    good = sorted((host for host in found if host not in bad), key=lambda host: host in lost)
    if len(good) < nodes:
        rule, but = f"launch.nodes is {nodes}", f" without {', '.join(bad)} of {BAD_NODES_FILE}" if bad else ""
        problems.append(Problem(f"{path} has {len(good)} hosts{but}", rule, "add hosts, or lower it", str(path)))
    if problems:
        raise RecipeError(problems)
    return good[:nodes]


def of(job: Job, lost: Collection[str] = ()) -> list[str]:
    """Those of the hostfile that the job needs."""
    section = job.section
    if section.hostfile is None:
        raise RecipeError(Problem("launch.hostfile is missing", "launch.on is hosts", "name a file of hosts there"))
    path, bad = Path(section.hostfile), bad_nodes(job.folder)
    return read_hostfile(path, nodes=section.nodes, ranks_per_node=section.gpus_per_node, bad=bad, lost=lost)


def script(job: Job, host: str, node: int, address: str, port: int) -> str:
    """What a host runs in bash: it is examined, together with the others, and then trains."""
    place = {"NODE_RANK": node, "NNODES": job.section.nodes, "MASTER_ADDR": address, "MASTER_PORT": port}
    exports = [f"export {name}={value}" for name, value in place.items()]
    return job.script("host", *exports, check=shlex.join(job.check("--host", host))).rstrip("\n")


class _Connection(threading.Thread):
    """One host: shows what it prints, and knows how it ended."""

    def __init__(self, host: str, script: str, prefix: str, log: Path) -> None:
        super().__init__(name=host, daemon=True)
        self.host, self._prefix, self._log, self.code, self.is_lost = host, prefix.encode(), log, 0, False
        self._ssh = subprocess.Popen(
            [*_SSH, host, f"bash -c {shlex.quote(script)}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C reaches this process, which passes it on: once
            preexec_fn=lambda: signals.end_with_parent(signal.SIGHUP),
        )
        self.start()

    def run(self) -> None:
        assert self._ssh.stdout is not None
        for line in self._ssh.stdout:
            with suppress(OSError):
                sys.stdout.buffer.write(self._prefix + line.rstrip(b"\r\n") + b"\n")
                sys.stdout.buffer.flush()
        code = self._ssh.wait()
        self.is_lost = code == _FAILED_SSH
        if self.is_lost:
            lost = f"{self.host} cannot be reached any more, so the job ends on every host"
            signals.say(lost)
            with suppress(OSError):
                append_line(self._log, lost)
        self.code = exit_codes.LOST_RANK if self.is_lost or code < 0 else code  # 0 until then

    def interrupt(self) -> None:
        """Type Ctrl-C there: the ranks save and end, and their last words still arrive."""
        with suppress(OSError):
            assert self._ssh.stdin is not None
            self._ssh.stdin.write(b"\x03")
            self._ssh.stdin.flush()

    def hang_up(self) -> None:
        with suppress(ProcessLookupError):
            self._ssh.send_signal(signal.SIGHUP)


def run(job: Job, hosts: list[str], lost: set[str]) -> int:
    """Start on all hosts and wait; when one fails, the others end too. The exit code of the first that failed.
    `lost` gets those that could not be reached."""
    if shutil.which("ssh") is None:
        raise RecipeError(Problem("there is no ssh here", "launch.on is hosts", "install openssh-client"))
    address, port = hosts[0].rpartition("@")[2], random.SystemRandom().randrange(16384, 32767)
    connections = [
        _Connection(host, script(job, host, node, address, port), f"{host}: " if node else "", job.main_log)
        for node, host in enumerate(hosts)
    ]
    failed = exit_codes.OK
    waiting: list[tuple[float, Callable[[_Connection], None]]] | None = None

    def interrupt(number: signal.Signals) -> None:
        for each in connections:
            each.interrupt()

    with signals.handled(interrupt):
        while running := [each for each in connections if each.is_alive()]:
            running[0].join(_POLL_SECONDS)
            failed = failed or next((each.code for each in connections if each.code), exit_codes.OK)
            now = time.monotonic()
            if failed and waiting is None:
                waiting = [(now + _LOST_SECONDS, _Connection.interrupt), (now + _LAST_SECONDS, _Connection.hang_up)]
            while waiting and waiting[0][0] < now:
                _, ask = waiting.pop(0)
                for each in running:
                    ask(each)
    lost |= {each.host for each in connections if each.is_lost}
    return failed or next((each.code for each in connections if each.code), exit_codes.OK)
