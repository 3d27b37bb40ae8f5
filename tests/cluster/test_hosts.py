"""`bloomery launch --on hosts` over real ssh, between two network namespaces."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from conftest import Workshop, wait_for_steps

NEEDED = [
    name
    for name in ("ip", "nsenter", "unshare", "sshd", "ssh-keygen")
    if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None
]
pytestmark = pytest.mark.skipif(os.geteuid() != 0 or bool(NEEDED), reason=f"needs root, and {NEEDED or 'nothing else'}")
ADDRESSES = ("10.79.0.1", "10.79.0.2")
LONG = ("train.for=100000 steps", "lr.decay=null")


class Cage:
    """Two hosts, and a user at the first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names = [f"bh{os.getpid()}-{i}" for i in range(2)]
        self.daemons: list[subprocess.Popen[bytes]] = []

    def up(self) -> None:
        a, b = self.names
        for name in self.names:
            run("ip", "netns", "add", name)
        run("ip", "link", "add", "eth0", "netns", a, "type", "veth", "peer", "name", "eth0", "netns", b)
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / "key"))
        (self.folder / "authorized").write_text((self.folder / "key.pub").read_text())
        Path("/run/sshd").mkdir(exist_ok=True)
        for i, name in enumerate(self.names):
            run("ip", "-n", name, "addr", "add", f"{ADDRESSES[i]}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                run("ip", "-n", name, "link", "set", device, "up")
            options = ["-o", f"HostKey={self.folder}/key", "-o", f"AuthorizedKeysFile={self.folder}/authorized",
                       "-o", "StrictModes=no", "-o", "PidFile=none", "-o", "UsePAM=no", "-o", "PermitRootLogin=yes",
                       "-o", "UseDNS=no"]  # fmt: skip
            self.daemons.append(
                subprocess.Popen([*self.inside(i), "/usr/sbin/sshd", "-D", "-f", "/dev/null", *options])
            )
        (self.folder / "config").write_text(
            f"IdentityFile {self.folder}/key\nUserKnownHostsFile /dev/null\nStrictHostKeyChecking no\nLogLevel ERROR\n"
        )
        deadline = time.monotonic() + 20
        while any(
            subprocess.run(
                [*self.inside(0), "ssh", "-F", str(self.folder / "config"), address, "true"], capture_output=True
            ).returncode
            for address in ADDRESSES
        ):
            assert time.monotonic() < deadline, "sshd does not answer"

    def down(self) -> None:
        for daemon in self.daemons:
            daemon.kill()
        for name in self.names:
            for process in subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split():
                with suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], check=False)

    def inside(self, host: int) -> list[str]:
        return ["nsenter", f"--net=/run/netns/{self.names[host]}"]

    def cut(self) -> None:
        run("ip", "-n", self.names[1], "link", "set", "eth0", "down")


def run(*words: str) -> None:
    subprocess.run(words, check=True)


@pytest.fixture
def cage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cage]:
    cage = Cage(tmp_path_factory.mktemp("cage"))
    try:
        cage.up()
        yield cage
    finally:
        cage.down()


@pytest.fixture
def launch(workshop: Workshop, cage: Cage) -> Callable[..., subprocess.Popen[str]]:
    """`bloomery launch` at the first host, on both, with two ranks on each."""
    (workshop.folder / "hostfile").write_text("".join(f"{address} slots=2\n" for address in ADDRESSES))
    shim = workshop.folder / "bin" / "ssh"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {cage.folder}/config "$@"\n')
    shim.chmod(0o755)
    variables = {"GLOO_SOCKET_IFNAME": "eth0", "PYTHONPATH": os.environ.get("PYTHONPATH") or "."}
    section = {
        "hostfile": "hostfile",
        "nodes": 2,
        "gpus_per_node": 2,
        "env": variables,
    }

    def start(*overrides: str, **more: Any) -> subprocess.Popen[str]:
        words = ["launch", str(workshop.recipe), f"launch={json.dumps({**section, **more})}", *overrides]
        words += ["batch.micro_batch_size=2", "--on", "hosts"]
        environment = {**os.environ, "PATH": f"{shim.parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        return subprocess.Popen([*cage.inside(0), sys.executable, "-m", "bloomery", *words], env=environment,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # fmt: skip

    return start


def test_two_hosts_train_as_one(workshop: Workshop, launch: Callable[..., subprocess.Popen[str]]) -> None:
    said, errors = launch().communicate(timeout=300)
    assert "stopped at step 20: reached 20 steps" in said, errors
    run = workshop.folder / "runs" / "small"
    whole = workshop.train("launch={gpus_per_node: 4}", "batch.micro_batch_size=2", run="whole")
    assert workshop.losses(run) == workshop.losses(whole)
    (start,) = workshop.events(run, "start")
    assert start["ranks"] == 4


def test_an_interrupt_saves_on_all_hosts(workshop: Workshop, launch: Callable[..., subprocess.Popen[str]]) -> None:
    process, run = launch(*LONG), workshop.folder / "runs" / "small"
    wait_for_steps(run, 3, process)
    process.send_signal(signal.SIGINT)
    said, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    (stop,) = workshop.events(run, "stop")
    assert stop["reason"] == "signal"
    assert "stopped at step" in said
    assert (run / "checkpoints" / "latest").exists()


def test_a_cut_link_ends_both_sides(
    workshop: Workshop, cage: Cage, launch: Callable[..., subprocess.Popen[str]]
) -> None:
    """Within the 15 seconds in which ssh notices, and those that ranks have to end."""
    process, run = launch(*LONG, "checkpoint.phases=[{every: 5 steps}]", restarts=0), workshop.folder / "runs" / "small"
    wait_for_steps(run, 6, process)
    cage.cut()
    began = time.monotonic()
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 6
    assert time.monotonic() - began < 60
    assert f"{ADDRESSES[1]} cannot be reached any more, so the job ends on every host" in errors
    assert "for rank 2, 3, which last reported step" in (run / "logs" / "main_log.txt").read_text()
    deadline = time.monotonic() + 120
    while any(b"bloomery\0train" in Path(f"/proc/{process}/cmdline").read_bytes() for process in processes(cage)):
        assert time.monotonic() < deadline, "ranks live on at the host that is cut off"
        time.sleep(0.5)


def processes(cage: Cage) -> list[str]:
    found: list[str] = []
    for name in cage.names:
        listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
        found += [process for process in listed if Path(f"/proc/{process}/cmdline").exists()]
    return found
