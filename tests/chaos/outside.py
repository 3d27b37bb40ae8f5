"""Faults from outside: to the launcher, its fork server, a host. The real command line, real processes."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from chaos.plant import AfterStep, Before, Both, HangPatience, Plant, Waits
from chaos.scene import Ended, Scene

PAUSE = Plant(AfterStep(3), Waits(3.0), None)
"""After step 3 every rank waits, so that what comes from outside meets a training."""

EVALUATION = Plant(Before("bloomery.train.loop:evaluate"), Waits(3.0), None)
"""The same, before the first evaluation."""

IMPATIENT = Plant(AfterStep(3), Both(HangPatience(4.0), Waits(3.0)), None)
"""The same, and from then on ranks wait four seconds for each other instead of a minute."""
HEARD_SECONDS = 2.0
"""Until every rank has noted that patience for the others: the fault, not a proof."""


def children(pid: int) -> list[int]:
    """The processes that this one has started and that are still there."""
    found = []
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            if int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(entry))
    return sorted(found)


def descendants(pid: int) -> list[int]:
    return [each for child in children(pid) for each in (child, *descendants(child))]


def fork_server(launcher: int) -> int:
    return next(pid for pid in children(launcher) if b"forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes())


def ranks_of(launcher: int, size: int) -> list[int]:
    """In the order of ranks: they are forked in it."""
    return [launcher] if size == 1 else children(fork_server(launcher))


@contextlib.contextmanager
def started(
    scene: Scene, plant: Plant | None = PAUSE, module: str = "bloomery.train.setup"
) -> Iterator[subprocess.Popen[str]]:
    process = scene.as_user(plant=plant, module=module)
    try:
        yield process
    finally:
        left = [process.pid, *descendants(process.pid)]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, f"it ended too early with {process.returncode}: {process.communicate()[0]}"
        assert time.monotonic() < deadline, "it did not come so far"
        time.sleep(0.01)


def until_struck(scene: Scene, process: subprocess.Popen[str]) -> None:
    wait_until((scene.notes / "struck").exists, process)


def ended(process: subprocess.Popen[str], began: float, family: list[int], limit_seconds: float = 60.0) -> Ended:
    """How it ended, once it and all that it started are gone."""
    said, _ = process.communicate(timeout=limit_seconds)
    while any(is_alive(pid) for pid in family):
        assert time.monotonic() - began < limit_seconds, f"processes outlive their launcher; it said:\n{said}"
        time.sleep(0.01)
    return Ended(process.returncode, said, time.monotonic() - began)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def to_launcher(*numbers: signal.Signals) -> Callable[[Scene], Ended]:
    def act(scene: Scene) -> Ended:
        with started(scene) as process:
            until_struck(scene, process)
            began, family = time.monotonic(), descendants(process.pid)
            for number in numbers:
                process.send_signal(number)
            return ended(process, began, family)

    return act


def to_everybody(number: signal.Signals) -> Callable[[Scene], Ended]:
    """As a scheduler does: to the launcher, the fork server and every rank."""

    def act(scene: Scene) -> Ended:
        with started(scene) as process:
            until_struck(scene, process)
            began, family = time.monotonic(), descendants(process.pid)
            for pid in [process.pid, *family]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            return ended(process, began, family)

    return act


def to_fork_server(number: signal.Signals) -> Callable[[Scene], Ended]:
    def act(scene: Scene) -> Ended:
        with started(scene) as process:
            until_struck(scene, process)
            began, family = time.monotonic(), descendants(process.pid)
            os.kill(fork_server(process.pid), number)
            return ended(process, began, family)

    return act


def while_importing(module: str, number: signal.Signals) -> Callable[[Scene], Ended]:
    """A signal to whichever process of the start first imports this module."""

    def act(scene: Scene) -> Ended:
        from chaos.plant import Signals

        plant = Plant(None, Signals((number,)), None)
        with started(scene, plant, module) as process:
            return ended(process, time.monotonic(), [])

    return act


def stopped_for_a_while(scene: Scene) -> Ended:
    """One rank stands still for two seconds, and continues."""
    with started(scene) as process:
        until_struck(scene, process)
        began, family = time.monotonic(), descendants(process.pid)
        victim = ranks_of(process.pid, scene.size)[-1]
        os.kill(victim, signal.SIGSTOP)
        time.sleep(2.0)  # the fault, not a proof
        os.kill(victim, signal.SIGCONT)
        return ended(process, began, family)


def zombie(scene: Scene) -> Ended:
    """A start that stands still is given up, a new one takes over and finishes, the old one comes back."""
    with started(scene) as process:
        until_struck(scene, process)
        family = [process.pid, *descendants(process.pid)]
        for pid in family:
            os.kill(pid, signal.SIGSTOP)
        shutil.move(scene.notes, scene.notes.with_name("notes-of-the-zombie"))
        new = scene.start()
        assert new.code == 0, f"the new start ended with {new.code}: {new.said}"
        scene.require_equal()
        began = time.monotonic()
        for pid in family:
            os.kill(pid, signal.SIGCONT)
        return ended(process, began, family[1:])


def second_start(scene: Scene) -> Ended:
    """While one start trains, another is refused; the first does not notice."""
    with started(scene) as process:
        until_struck(scene, process)
        shutil.move(scene.notes, scene.notes.with_name("notes-of-the-first"))
        second = scene.start()
        said, _ = process.communicate(timeout=60)
        assert process.returncode == 0, said
        return second


def stopped_for_good(scene: Scene) -> Ended:
    """One rank stands still and does not come back."""
    with started(scene, IMPATIENT) as process:
        until_struck(scene, process)
        time.sleep(HEARD_SECONDS)
        began, family = time.monotonic(), descendants(process.pid)
        os.kill(ranks_of(process.pid, scene.size)[-1], signal.SIGSTOP)
        return ended(process, began, family)


def signal_in_a_hang(*, to_rank: bool, plant: Plant = PAUSE) -> Callable[[Scene], Ended]:
    """One rank stands still, and SIGTERM reaches the launcher, or the rank that waits for it."""

    def act(scene: Scene) -> Ended:
        with started(scene, plant) as process:
            until_struck(scene, process)
            family, ranks = descendants(process.pid), ranks_of(process.pid, scene.size)
            os.kill(ranks[-1], signal.SIGSTOP)
            time.sleep(4.0)  # until the other one waits: the fault, not a proof
            began = time.monotonic()
            os.kill(ranks[0] if to_rank else process.pid, signal.SIGTERM)
            return ended(process, began, family)

    return act


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces joined by a cable, 10.78.0.1 and 10.78.0.2."""
    names = [f"bloomery-{os.getpid()}-{end}" for end in "ab"]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    for name in names:
        ip("netns", "add", name)
    try:
        ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for number, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"10.78.0.{number}/24", "dev", "cable")
            for device in ("lo", "cable"):
                ip("-n", name, "link", "set", device, "up")
        yield names[0], names[1]
    finally:
        for name in names:
            ip("netns", "del", name)


def cable_cut(*, node_lost: bool) -> Callable[[Scene], Ended]:
    """Two ranks on two hosts, as torchrun or srun would start them; the cable goes, and perhaps the second host."""

    def act(scene: Scene) -> Ended:
        with two_hosts() as hosts, contextlib.ExitStack() as closing:
            ranks = []
            for rank, host in enumerate(hosts):
                variables = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
                variables |= {"MASTER_ADDR": "10.78.0.1", "MASTER_PORT": "29555", "GLOO_SOCKET_IFNAME": "cable"}
                ranks.append(scene.as_user(plant=IMPATIENT, before=["ip", "netns", "exec", host], **variables))
                closing.callback(ranks[-1].kill)
            until_struck(scene, ranks[0])
            time.sleep(HEARD_SECONDS)
            began = time.monotonic()
            subprocess.run(["ip", "-n", hosts[1], "link", "set", "cable", "down"], check=True)
            if node_lost:
                ranks[1].kill()
            first = ended(ranks[0], began, [])
            if not node_lost:
                assert ended(ranks[1], began, []).code == first.code
            return first

    return act
