"""A launch script, run under bash with a stub for every program.

That executes the bash of the user's own script: its assignments, tests, loops and redirections, in a temporary
folder with an empty environment, for a limited time. No program is started but bash itself: PATH is empty, and a DEBUG
trap puts a function in place of every program that the script names by a path. A file that a command redirects to an
absolute path is written inside the temporary folder. It is a precaution against accidents, not a jail.
"""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bloomery.base.bounded import read_small, read_text
from bloomery.base.errors import Problem, RecipeError

_SECONDS = 20
_FILE_BYTES = 4 << 20
_MOST_FILES = 256
_SBATCH = re.compile(r"^#SBATCH\s+--?([A-Za-z-]+)(?:[=\s]+(\S+))?", re.MULTILINE)
_SHORT = {"N": "nodes", "J": "job-name"}
_OWN_TO_BASH = re.compile(r"BASH|PATH$|HOME$|PWD$|OLDPWD$|RANDOM$|SECONDS$|LINENO$|_")
_STUBS = Path(__file__).with_name("stubs.sh")


@dataclass(frozen=True)
class Command:
    words: list[str]
    line: int

    @property
    def is_training(self) -> bool:
        """Whether it has a model's size."""
        return any(word.startswith(("--num-layers", "--encoder-num-layers")) for word in self.words)


@dataclass
class Script:
    """What a launch script would start."""

    text: str
    commands: list[Command] = field(default_factory=list)
    files: dict[str, str | None] = field(default_factory=dict)
    """Path -> text of files that the script writes; None: a program writes it, or changes it."""
    unread: list[tuple[int, str]] = field(default_factory=list)
    """(line, what) that could matter and was not run."""

    @property
    def sbatch(self) -> dict[str, str]:
        """Its #SBATCH lines, by long name."""
        return {_SHORT.get(match[1], match[1]): match[2] or "" for match in _SBATCH.finditer(self.text)}

    def variables(self, given: Mapping[str, str]) -> dict[str, str]:
        """Those from outside: the user's, and Slurm's."""
        slurm = {"SLURM_NNODES": "nodes", "SLURM_JOB_NUM_NODES": "nodes", "SLURM_GPUS_PER_NODE": "gpus-per-node"}
        sbatch = self.sbatch
        return {name: sbatch[key].rpartition(":")[2] for name, key in slurm.items() if key in sbatch} | dict(given)


def run_script(path: Path, text: str, given: Mapping[str, str]) -> Script:
    """Run it under bash with stubs. RecipeError where there is no bash."""
    bash, mkdir = shutil.which("bash"), shutil.which("mkdir")
    if bash is None or mkdir is None:
        remedy = "install bash, or give the flags themselves: bloomery import megatron -- FLAGS"
        raise RecipeError(Problem("there is no bash here", "a script is run under bash", remedy, str(path)))
    script = Script(text)
    with tempfile.TemporaryDirectory(prefix="bloomery-import-") as folder:
        root = Path(folder).resolve()
        for name in ("work", "calls", "abs", "none"):
            (root / name).mkdir()
        _copy_neighbours(path, root / "work")
        (root / "work" / path.name).write_text(text, encoding="utf-8")
        named = {name: value for name, value in script.variables(given).items() if not name.isdecimal()}
        environment = {
            **{name: f"${name}" for name in _unset_names(text)}, **named, "BASH_ENV": str(_STUBS),
            "PATH": str(root / "none"), "HOME": str(root / "work"), "LC_ALL": "C",
            "__given": "; ".join(f"{name}={shlex.quote(value)}" for name, value in named.items()),
            "__root": str(root), "__bash": bash, "__mkdir": mkdir,
        }  # fmt: skip
        before = _files(root)
        if not _execute([bash, "--norc", f"./{path.name}", *_arguments(text, given)], root / "work", environment):
            script.unread.append((1, f"the script was ended after {_SECONDS} s; what follows was not run"))
        _collect(script, root, before)
    return script


def _execute(command: list[str], folder: Path, environment: dict[str, str]) -> bool:
    """Run it; whether it came to its end in time. Nothing that it started survives."""
    null = subprocess.DEVNULL
    process = subprocess.Popen(
        command, cwd=folder, env=environment, start_new_session=True, stdin=null, stdout=null, stderr=null
    )
    try:
        process.wait(_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return True


def _copy_neighbours(path: Path, folder: Path) -> None:
    """Small files beside the script, which it may source or read."""
    with contextlib.suppress(OSError):  # a folder that cannot be listed
        for entry in sorted(os.scandir(path.parent), key=lambda entry: entry.name)[:_MOST_FILES]:
            with contextlib.suppress(OSError):
                (folder / entry.name).write_bytes(read_small(entry.path, _FILE_BYTES // 16))


def _files(root: Path) -> dict[str, str]:
    """The texts of the script's folder, by name, and of files with absolute paths; empty if it is no text."""
    found = {}
    for top, prefix in ((root / "work", ""), (root / "abs", "/")):
        for file in sorted(path for path in top.rglob("*") if path.is_file())[: 2 * _MOST_FILES]:
            name = f"{prefix}{file.relative_to(top)}"
            try:
                found[name] = read_text(file, _FILE_BYTES)
            except (OSError, ValueError):
                found[name] = ""
    return found


def _unset_names(text: str) -> set[str]:
    """Variables that the script uses but never sets, tests or gives a default: they stay as they are written."""
    words = r"\[|\(\(|\b(?:case|test|expr|let|read|readarray|mapfile|getopts|declare)\b"
    tested = " ".join(line for line in text.splitlines() if re.search(words, line))
    own = {*re.findall(r"\b([A-Za-z_]\w*)\+?=", text), *re.findall(r"\bfor\s+(\w+)", text), *re.findall(r"\w+", tested)}
    own |= set(re.findall(r"\$\{([A-Za-z_]\w*)[^}\w]", text))
    return {name for name in re.findall(r"\$\{?([A-Za-z_]\w*)", text) if not _OWN_TO_BASH.match(name)} - own


def _arguments(text: str, given: Mapping[str, str]) -> list[str]:
    """`$1`, `$2` and so on; one that is used and not given stays as it is written, unless the script counts them."""
    used = set(re.findall(r"\$\{?([1-9])(?!\w|[:\w]*[-+=?])", text)) - set(re.findall(r"\$\{([1-9])[^}]", text))
    used = set() if re.search(r"\$\{?[@*#]|\bshift\b|\[\[? .*\$\{?[1-9]", text) else used
    last = max([0, *(int(name) for name in {*given, *used} if name.isdecimal())])
    return [given.get(str(i), f"${i}" if str(i) in used else "") for i in range(1, last + 1)]


def _collect(script: Script, root: Path, before: Mapping[str, str]) -> None:
    work = f"{root / 'work'}/"
    for call in sorted((root / "calls").iterdir(), key=lambda path: path.name)[: 64 * _MOST_FILES]:
        line, *words = call.read_bytes().decode("utf-8", "replace").removesuffix("\0").split("\0")
        if line:  # else it was ended while it wrote this
            script.commands.append(Command([word.replace(work, "") for word in words], int(line)))
    touched = {os.path.normpath(word) for each in script.commands if not each.is_training for word in each.words[1:]}
    for name, text in _files(root).items():
        is_changed = before.get(name) != text
        if name in touched or (is_changed and (not text.strip() or "$(" in text)):
            script.files[name] = None  # not what the script would have there
        elif is_changed:
            script.files[name] = text
