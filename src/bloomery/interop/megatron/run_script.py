"""A launch script run under bash, with a stub for every program: what would have been started is recorded instead.

This executes the bash of the user's own script: its assignments, tests, loops and redirections, in a temporary folder
with an empty environment, for a limited time. No program is started but bash itself: PATH is empty, and a DEBUG trap
puts a function in place of every program that the script names by a path. A file that a command redirects to an
absolute path is written inside the temporary folder. It is a precaution against accidents, not a jail.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import select
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
_SHORT = {"N": "nodes", "t": "time", "J": "job-name", "a": "array"}

_STUBS = r"""
set -T
__guard() {  # before every simple command; with extdebug, `return 1` skips it
  shopt -s extdebug; set +eu
  __GIVEN__
  PATH=$__root/none
  [[ $__stub ]] && return 0
  local __stub=1 __head=$BASH_COMMAND __word=$BASH_COMMAND __found __to __assign
  __assign='^[A-Za-z_][A-Za-z0-9_]*=([^[:space:]"'"'"']*|"[^"]*")[[:space:]]+(.+)$'
  while [[ $__word =~ $__assign ]]; do __word=${BASH_REMATCH[2]}; done
  __word=${__word%%[[:space:]]*}
  if [[ $__word == *[/\$]* && ! $__word =~ ^[A-Za-z_][A-Za-z0-9_]*[[+=] ]]; then
    eval "__word=($__word)" 2>/dev/null  # a program that is named by its path becomes a function
    [[ $__word == */* && $__word =~ ^[A-Za-z0-9_./+-]+$ ]] && ! declare -F "$__word" >/dev/null &&
      eval "function $__word { __program $__word \"\$@\"; }"
  fi
  [[ $__head == *'<<'* ]] && __head=${__head%%$'\n'*}
  [[ $__head =~ (\&?\>\>?)[[:space:]]*([^][:space:]\;\&\|\<\>\(\)[]+) ]] || return 0
  __found=("${BASH_REMATCH[@]}")
  eval "__to=${__found[2]}" 2>/dev/null
  [[ ! $__to || $__to == /dev/* || $__to == "$__root"/calls/* ]] && return 0
  case $__to in "$__root"/*) ;; /*) __to=$__root/abs$__to ;; *) __to=$PWD/$__to ;; esac
  builtin command "$__mkdir" -p "${__to%/*}" 2>/dev/null
  eval "${BASH_COMMAND/"${__found[0]}"/"${__found[1]} \"\$__to\""}"
  return 1
}
__program() {  # record it; run the shell script that it would run
  local __stub=1 at line=${__line:-${BASH_LINENO[${#BASH_LINENO[@]} - 2]}}
  printf '%s\0' "$line" "$@" > "$__root/calls/${EPOCHREALTIME:-$SECONDS}.$BASHPID.$RANDOM"
  for ((at = 1; at <= $#; at++)); do
    case ${!at##*/} in
      *.py) break ;;
      bash | sh | zsh | dash | ksh) __line=$line builtin command "$__bash" "${@:at + 1}"; return ;;
      *.sh | *.slurm | *.sbatch) [[ -f ${!at} ]] && { __line=$line builtin command "$__bash" "${@:at}"; return; } ;;
      --wrap=*) __line=$line builtin command "$__bash" -c "${!at#--wrap=}"; return ;;
    esac
  done
  case $1 in sbatch | qsub | bsub) __line=$line builtin command "$__bash" -s; return ;; esac
  ((BASH_SUBSHELL)) && printf '$(%s)\n' "${1##*/}"  # stands for the output that nobody knows
  return 0
}
command_not_found_handle() { __program "$@"; }
exec() { (($#)) || return 0; "$@"; exit; }
command() { case $1 in -v | -V) printf '%s\n' "$2" ;; -p) "${@:2}" ;; *) "$@" ;; esac; }
source() { [[ $1 == /* || ! -f $1 ]] || builtin source "$@"; }
.() { source "$@"; }
cd() { [[ $1 == /* || ! -d $1 ]] || builtin cd "$@"; }
pushd() { :; }; popd() { :; }; trap() { :; }; kill() { :; }; ulimit() { :; }; mkdir() { :; }; clear() { :; }
cat() {
  local file line
  for file in "${@:-/dev/stdin}"; do
    [[ $file == - ]] && file=/dev/stdin
    [[ -r $file ]] && while IFS= read -r line || [[ $line ]]; do printf '%s\n' "$line"; done < "$file"
  done
}
tee() { cat; }
dirname() { case $1 in */*) printf '%s\n' "${1%/*}" ;; *) echo . ;; esac; }
basename() { local name=${1##*/}; printf '%s\n' "${name%"$2"}"; }
builtin trap '__guard' DEBUG
"""


@dataclass(frozen=True)
class Command:
    words: list[str]
    line: int
    doubt: str = ""
    """Why it may not be run; empty if it is."""


@dataclass
class Script:
    """What a launch script would start."""

    commands: list[Command] = field(default_factory=list)
    files: dict[str, str | None] = field(default_factory=dict)
    """Path -> text of files that the script writes; None: a program writes it, or changes it."""
    sbatch: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Directive -> (value, line)."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Why a variable has no value."""
    asked: set[str] = field(default_factory=set)
    """Variables and arguments that it names."""
    unread: list[tuple[int, str]] = field(default_factory=list)
    """(line, what) that could matter and was not read or run."""


def scan(text: str, given: Mapping[str, str]) -> tuple[Script, dict[str, str]]:
    """Its #SBATCH lines and the variables that it names; the variables from outside, the user's and Slurm's."""
    script = Script()
    for match in _SBATCH.finditer(text):
        name = _SHORT.get(match[1], match[1])
        script.sbatch[name] = (match[2] or "", text.count("\n", 0, match.start()) + 1)
    script.asked = set(re.findall(r"\$\{?#?(\w+)", text)) | set(re.findall(r"[A-Za-z_]\w*", _arithmetic(text)))
    if re.search(r"\$[@*#]|\bshift\b", text):
        script.asked |= {name for name in given if name.isdecimal()}
    outside = dict(given)
    for name, directive in (
        ("SLURM_NNODES", "nodes"), ("SLURM_JOB_NUM_NODES", "nodes"), ("SLURM_GPUS_PER_NODE", "gpus-per-node")
    ):  # fmt: skip
        if directive in script.sbatch:
            outside.setdefault(name, script.sbatch[directive][0].rpartition(":")[2])
    return script, outside


def run_script(path: Path, text: str, given: Mapping[str, str]) -> Script:
    """Run it under bash with stubs. RecipeError where bash refuses it, or there is no bash."""
    bash, mkdir = shutil.which("bash"), shutil.which("mkdir")
    if bash is None or mkdir is None:
        remedy = "install bash, or read the script without running it: --no-execute"
        raise RecipeError(Problem("there is no bash here", "a script is run under bash", remedy, str(path)))
    script, outside = scan(text, given)
    with tempfile.TemporaryDirectory(prefix="bloomery-import-") as folder:
        root = Path(folder).resolve()
        for name in ("work", "calls", "abs", "none"):
            (root / name).mkdir()
        before = _copy_neighbours(path, root / "work")
        copy = root / "work" / path.name
        copy.write_text(text, encoding="utf-8")
        named = {name: value for name, value in outside.items() if not name.isdecimal()}
        forced = "; ".join(f"{name}={shlex.quote(value)}" for name, value in named.items())
        (root / "stubs.sh").write_text(_STUBS.replace("__GIVEN__", forced or ":"), encoding="utf-8")
        environment = {
            **_unset_markers(text, script), **named, "BASH_ENV": str(root / "stubs.sh"), "PATH": str(root / "none"),
            "HOME": str(root / "work"), "LC_ALL": "C", "__root": str(root), "__bash": bash, "__mkdir": mkdir,
        }  # fmt: skip
        if _execute([bash, "--norc", f"./{path.name}", *_arguments(text, given, script)], root, environment):
            script.unread.append((1, f"the script was ended after {_SECONDS} s; what follows was not run"))
        _collect(script, root, before)
        if not any(map(is_training, script.commands)):
            _require_bash(bash, copy, path)
    return script


def _require_bash(bash: str, copy: Path, path: Path) -> None:
    """RecipeError where a script that starts no training is not bash at all."""
    checked = subprocess.run([bash, "-n", str(copy)], capture_output=True, text=True, errors="replace", check=False)
    if checked.returncode:
        what = checked.stderr.strip().partition("\n")[0].removeprefix(f"{copy}: ")[:200]
        remedy = "correct the script, or give the flags themselves: bloomery import megatron -- --num-layers ..."
        raise RecipeError(Problem(f"bash cannot read this script: {what}", "", remedy, str(path)))


def _execute(command: list[str], root: Path, environment: dict[str, str]) -> bool:
    """Run it and all that it starts in the background; whether it had to be ended."""

    def limit() -> None:
        for kind, most in ((resource.RLIMIT_FSIZE, _FILE_BYTES), (resource.RLIMIT_CPU, _SECONDS)):
            resource.setrlimit(kind, (most, most))

    alive, held = os.pipe()  # every process of the script holds one end: it closes with the last of them
    try:
        process = subprocess.Popen(
            command, cwd=root / "work", env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, pass_fds=[held], start_new_session=True, preexec_fn=limit,
        )  # fmt: skip
        os.close(held)
        ended, *_ = select.select([alive], [], [], _SECONDS)
        if not ended:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return not ended
    finally:
        os.close(alive)


def _copy_neighbours(path: Path, folder: Path) -> dict[str, bytes]:
    """Small files beside the script, which it may source or read; their bytes by name."""
    found: dict[str, bytes] = {}
    with contextlib.suppress(OSError):  # a folder that cannot be listed
        for entry in sorted(os.scandir(path.parent), key=lambda entry: entry.name)[: 4 * _MOST_FILES]:
            with contextlib.suppress(OSError):
                if entry.is_file() and len(found) < _MOST_FILES:
                    found[entry.name] = read_small(entry.path, _FILE_BYTES // 16)
                    (folder / entry.name).write_bytes(found[entry.name])
    return found


def _unset_markers(text: str, script: Script) -> dict[str, str]:
    """Variables that the script uses but never sets, tests or gives a default: they stay as they are written."""
    tested = [line for line in text.splitlines() if re.search(r"\[|\(\(|\bcase\b|\btest\b|\bexpr\b|\blet\b", line)]
    assigned = set(re.findall(r"\b([A-Za-z_]\w*)\+?=", text)) | set(re.findall(r"\bfor\s+(\w+)", text))
    assigned |= set(
        re.findall(r"[\w]+", " ".join(re.findall(r"\b(?:read|readarray|mapfile|getopts|declare)\b.*", text)))
    )
    plain = set(re.findall(r"\$\{?([A-Za-z_]\w*)", text)) - set(re.findall(r"\$\{([A-Za-z_]\w*)[^}\w]", text))
    plain -= assigned | set(re.findall(r"[A-Za-z_]\w*", " ".join(tested)))
    plain = {name for name in plain if not re.match(r"BASH|PATH$|HOME$|PWD$|OLDPWD$|RANDOM$|SECONDS$|LINENO$|_", name)}
    script.reasons |= dict.fromkeys(plain, "the script does not set it")
    return {name: f"${name}" for name in plain}


def _arguments(text: str, given: Mapping[str, str], script: Script) -> list[str]:
    """`$1`, `$2` and so on; one that is used and not given stays as it is written, unless the script counts them."""
    used = set(re.findall(r"\$\{?([1-9])(?!\w|[:\w]*[-+=?])", text)) - set(re.findall(r"\$\{([1-9])[^}]", text))
    used = set() if re.search(r"\$\{?[@*#]|\bshift\b|\[\[? .*\$\{?[1-9]", text) else used
    script.reasons |= dict.fromkeys(used, "it is an argument of the script")
    last = max([0, *(int(name) for name in {*given, *used} if name.isdecimal())])
    return [given.get(str(i), f"${i}" if str(i) in used else "") for i in range(1, last + 1)]


def _arithmetic(text: str) -> str:
    return " ".join(re.findall(r"\(\((.*?)\)\)", text))


def _collect(script: Script, root: Path, before: Mapping[str, bytes]) -> None:
    work = f"{root / 'work'}/"
    for call in sorted((root / "calls").iterdir(), key=lambda path: path.name)[: 64 * _MOST_FILES]:
        line, *words = call.read_bytes().decode("utf-8", "replace").removesuffix("\0").split("\0")
        script.commands.append(Command([word.replace(work, "") for word in words], int(line)))
    touched = {os.path.normpath(word) for each in script.commands if not is_training(each) for word in each.words[1:]}
    for top, is_absolute in ((root / "work", False), (root / "abs", True)):
        for file in sorted(path for path in top.rglob("*") if path.is_file())[:_MOST_FILES]:
            name = f"{'/' if is_absolute else ''}{file.relative_to(top)}"
            try:
                text = read_text(file, _FILE_BYTES)
            except (OSError, ValueError):
                text = ""
            is_changed = before.get(name) != file.read_bytes()
            if name in touched or (is_changed and (not text.strip() or "$(" in text)):
                script.files[name] = None  # not what the script would have there
            elif is_changed:
                script.files[name] = text


def is_training(command: Command) -> bool:
    """Whether it has a model's size."""
    return any(word.startswith(("--num-layers", "--encoder-num-layers")) for word in command.words)
