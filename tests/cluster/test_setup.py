"""`environments/setup.sh` makes an environment in which `bloomery` runs. It takes a minute: not for `make test`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_set_up_script_makes_an_environment(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    for name in ("src", "environments"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout / name)
    variables = {**os.environ, "VENV": str(tmp_path / "venv"), "PYTHON": sys.executable, "EXTRAS": "hf"}
    variables.pop("PYTHONPATH", None)
    done = subprocess.run(
        ["bash", "environments/setup.sh"], cwd=checkout, env=variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("bloomery ")
