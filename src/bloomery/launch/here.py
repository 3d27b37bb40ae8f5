"""A job on this machine: one `bloomery train`, whose errors are kept in the log of the run too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

from bloomery.base import exit_codes, signals
from bloomery.base.storage import AppendFile
from bloomery.launch.job import ENVIRONMENT, Job


def run(job: Job) -> int:
    """The exit code of the training. Stop signals are passed on: it saves, however long that takes."""
    variables = {name: value for name, (value, _) in ENVIRONMENT.items()} | dict(os.environ) | job.section.env
    command = [*job.program, *job.words]
    if job.section.setup:
        command = ["bash", "-c", "\n".join([*job.section.setup, f"exec {job.command()}"])]
    training = subprocess.Popen(
        command,
        env=variables,
        cwd=job.directory,
        stderr=subprocess.PIPE,
        start_new_session=True,  # a Ctrl-C reaches this process, which passes it on: once
        preexec_fn=lambda: signals.end_with_parent(signal.SIGTERM),
    )
    keeper = threading.Thread(target=_keep, args=(training, job))
    keeper.start()

    def stop(number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            training.send_signal(number)

    with signals.handled(stop):
        code = training.wait()
    keeper.join()
    return exit_codes.LOST_RANK if code < 0 else code


def _keep(training: subprocess.Popen[bytes], job: Job) -> None:
    assert training.stderr is not None
    log = AppendFile(job.main_log)
    for line in training.stderr:
        with suppress(OSError):
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()
        log.append(line.decode(errors="replace").rstrip("\n"))
    log.close()
