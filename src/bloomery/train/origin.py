"""Where a job was started, for the ledger: machine, command line, git commit, scheduler."""

import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from bloomery.base.errors import mask
from bloomery.base.signals import job_seconds
from bloomery.monitor import names

_SCHEDULERS = {"SLURM_JOB_ID": "slurm", "AZUREML_RUN_ID": "azureml", "PBS_JOBID": "pbs", "LSB_JOBID": "lsf"}


def origin() -> dict[str, Any]:
    program = Path(sys.argv[0])
    words = ["bloomery" if program.name == "__main__.py" else program.name, *sys.argv[1:]]
    return {
        "host": socket.gethostname(),
        "command": mask(shlex.join(words)),
        "commit": _commit(),
        names.FACT_SCHEDULER: next((name for key, name in _SCHEDULERS.items() if key in os.environ), None),
        names.FACT_SETUP_SECONDS: job_seconds(),
    }


def _commit() -> str | None:
    """Of the folder that the recipe on the command line lies in, or of this one; None outside git."""
    recipes = (Path(word) for word in sys.argv[1:] if word.endswith((".yaml", ".yml")))
    folder = next((path.parent for path in recipes if path.is_file()), Path())
    describe = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(describe, capture_output=True, text=True, timeout=5, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
