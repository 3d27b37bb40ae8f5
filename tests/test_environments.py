"""The Dockerfile, the conda environment and the set-up script say the same as pyproject.toml and constraints.txt."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "environments"
INSTRUCTIONS = {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "ENV", "ENTRYPOINT", "CMD"}


def test_versions_and_extras_have_one_owner() -> None:
    (torch,) = re.findall(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    docker, setup = ((FOLDER / name).read_text() for name in ("Dockerfile", "setup.sh"))
    pip = yaml.safe_load((FOLDER / "conda.yaml").read_text())["dependencies"][-1]["pip"]
    asked = [
        re.findall(r"^ARG EXTRAS=(\S+)", docker, re.M)[0],
        re.findall(r"EXTRAS:=([^}]+)", setup)[0],
        re.findall(r"\[(.+)\]", pip[-1])[0],
    ]
    assert all(set(each.split(",")) == set(extras) - {"dev", "azureml"} for each in asked)
    assert re.findall(r"^ARG TORCH=(\S+)", docker, re.M) == re.findall(r"TORCH:=([\d.]+)", setup) == [torch]
    assert f"torch=={torch}" in pip


def test_the_dockerfile_copies_what_there_is() -> None:
    text = re.sub(r"\\\n", " ", (FOLDER / "Dockerfile").read_text())
    lines = [line.split() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    assert {line[0] for line in lines} <= INSTRUCTIONS
    copied = [source for line in lines if line[0] == "COPY" for source in line[1:-1]]
    assert copied
    assert all((ROOT / source).exists() for source in copied)
    declared = {line[1].partition("=")[0] for line in lines if line[0] == "ARG"} | {"PATH"}
    assert set(re.findall(r"\$\{(\w+)", text)) <= declared


def test_the_script_is_bash() -> None:
    assert subprocess.run(["bash", "-n", str(FOLDER / "setup.sh")]).returncode == 0
