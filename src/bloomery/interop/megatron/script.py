"""A launch script, run under bash with a stub for every program (`run_script`), or only read (`read_script`).

Running executes the bash of the user's own script: its assignments, tests, loops and redirections, in a temporary
folder with an empty environment, for a limited time. No program is started but bash itself: PATH is empty, and a DEBUG
trap puts a function in place of every program that the script names by a path. A file that a command redirects to an
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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bloomery.base.bounded import read_small, read_text
from bloomery.base.errors import Problem, RecipeError

_SECONDS = 20
_FILE_BYTES = 4 << 20
_MOST_FILES = 256
_SBATCH = re.compile(r"^#SBATCH\s+--?([A-Za-z-]+)(?:[=\s]+(\S+))?", re.MULTILINE)
_QUOTED = r"""\\.|'[^']*'|"(?:\\.|[^"\\])*\""""
_COMMENT = re.compile(rf"({_QUOTED})|(?<!\S)\#.*", re.DOTALL)
_REDIRECTION = re.compile(rf"({_QUOTED})|(?<=\s)[0-9&]?(?:>>?|<)\s*&?[^\s;&|]*", re.DOTALL)
_STATEMENT = re.compile(rf"(?:{_QUOTED}|\$\([^()]*(?:\([^()]*\)[^()]*)*\)|`[^`]*`|[^;&|'\"\\])+|[;&|]+", re.DOTALL)
_EXPANSION = re.compile(
    r"""\\.|'[^']*'|"\$\{(?P<array>\w+)\[@\]\}"|\$\{(?P<items>\w+)\[[@*]\]\}|\$\{(?P<name>\w+)(?::?-(?P<default>[^}]*))?\}|\$(?P<plain>\w+)"""
    r"""|\$\((?P<sum>\(.*?\))\)|(?P<command>\$\([^()]*(?:\([^()]*\)[^()]*)*\)|`[^`]*`)|"?\$[@*]"?""",
    re.DOTALL,
)
_ASSIGNMENT = re.compile(r"(?:(?:export|declare|local|readonly)\s+(?:-\w+\s+)*)?(\w+)(\+?)=(.*)", re.DOTALL)
_OPENS = {"if": "fi", "for": "done", "while": "done", "until": "done", "case": "esac", "{": "}", "function": "}"}
_LEADING = re.compile(r"(?:then|else|do|elif|!|time|if|while|until|\{|fi|done|esac|\}|\(|[^\s()]+\))(?:\s+|$)")
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

    @property
    def is_training(self) -> bool:
        """Whether it has a model's size."""
        return any(word.startswith(("--num-layers", "--encoder-num-layers")) for word in self.words)


@dataclass
class Script:
    """What a launch script would start."""

    commands: list[Command] = field(default_factory=list)
    files: dict[str, str | None] = field(default_factory=dict)
    """Path -> text of files that the script writes; None: a program writes it, or changes it."""
    sbatch: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    """Why a variable has no value."""
    names: set[str] = field(default_factory=set)
    """Variables and arguments that it may use."""
    unread: list[tuple[int, str]] = field(default_factory=list)
    """(line, what) that could matter and was not read or run."""


def _scan(text: str, given: Mapping[str, str]) -> tuple[Script, dict[str, str]]:
    """Its #SBATCH lines; the variables from outside, the user's and Slurm's."""
    script = Script(names={*re.findall(r"\w+", text), *map(str, range(100))})
    for match in _SBATCH.finditer(text):
        script.sbatch[_SHORT.get(match[1], match[1])] = match[2] or ""
    outside = dict(given)
    for name, directive in (
        ("SLURM_NNODES", "nodes"), ("SLURM_JOB_NUM_NODES", "nodes"), ("SLURM_GPUS_PER_NODE", "gpus-per-node")
    ):  # fmt: skip
        if directive in script.sbatch:
            outside.setdefault(name, script.sbatch[directive].rpartition(":")[2])
    return script, outside


def run_script(path: Path, text: str, given: Mapping[str, str]) -> Script:
    """Run it under bash with stubs. RecipeError where there is no bash."""
    bash, mkdir = shutil.which("bash"), shutil.which("mkdir")
    if bash is None or mkdir is None:
        remedy = "install bash, or read the script without running it: --no-execute"
        raise RecipeError(Problem("there is no bash here", "a script is run under bash", remedy, str(path)))
    script, outside = _scan(text, given)
    with tempfile.TemporaryDirectory(prefix="bloomery-import-") as folder:
        root = Path(folder).resolve()
        for name in ("work", "calls", "abs", "none"):
            (root / name).mkdir()
        before = _copy_neighbours(path, root / "work")
        (root / "work" / path.name).write_text(text, encoding="utf-8")
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
    return script


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


def _collect(script: Script, root: Path, before: Mapping[str, bytes]) -> None:
    work = f"{root / 'work'}/"
    for call in sorted((root / "calls").iterdir(), key=lambda path: path.name)[: 64 * _MOST_FILES]:
        line, *words = call.read_bytes().decode("utf-8", "replace").removesuffix("\0").split("\0")
        script.commands.append(Command([word.replace(work, "") for word in words], int(line)))
    touched = {os.path.normpath(word) for each in script.commands if not each.is_training for word in each.words[1:]}
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


def read_script(path: Path, text: str, given: Mapping[str, str]) -> Script:
    """Without running it: continuations, plain assignments and arrays, `$VAR`, `${VAR:-x}`, `bash -c`, `#SBATCH`.

    Conditions, loops, functions, here-documents, arithmetic and programs are not read: what depends on them has no
    value, and the place is reported. RecipeError with a line that cannot be read.
    """
    script, outside = _scan(text, given)
    _Reader(script, path, outside).read(text, 0, [], 0)
    return script


class _Reader:
    def __init__(self, script: Script, path: Path, given: Mapping[str, str]) -> None:
        self.script, self.path, self.given = script, path, given
        self.values = dict(given)

    def read(self, text: str, inner: int, before: list[str], depth: int) -> None:
        """`inner`: the line of a text inside another script, else 0. `before`: the launcher's words."""
        if depth > 20:
            raise self.error(inner, "it is nested too deeply, or calls itself")
        blocks: list[tuple[str, str]] = []
        for number, line in self.lines(text):
            at, condition = inner or number, ""
            for statement in (found.strip() for found in _STATEMENT.findall(line)):
                first = statement.split(maxsplit=1)[0] if statement else ""
                if first[:1] in ("&", "|", ";"):
                    condition = f"it depends on a condition of line {at}, which is not read" if len(first) > 1 else ""
                    continue
                if blocks and first == blocks[-1][1]:
                    blocks.pop()
                elif first in _OPENS or statement.endswith("() {") or re.fullmatch(r"\w+\s*\(\)", statement):
                    if not blocks:
                        self.script.unread.append((at, f"the `{first}` of this line is not read"))
                    reason = f"it depends on the `{first}` of line {at}, which is not read"
                    blocks.append((reason, _OPENS.get(first, "}")))
                while match := _LEADING.match(statement):
                    statement = statement[match.end() :]
                reason = blocks[-1][0] if blocks else ""
                match = _ASSIGNMENT.fullmatch(statement)
                plain = re.sub(r"\$\(.*\)|`[^`]*`", "", match[3], flags=re.DOTALL) if match else ""
                if match and (plain.startswith("(") or len(self.split(plain, at)) < 2):
                    self.assign(match[1], match[2], match[3], at, reason or condition)
                elif statement == "exit" or statement.startswith("exit "):
                    self.script.unread += [] if reason else [(at, "the script ends here with `exit`")]
                    if not reason:
                        return
                elif statement:
                    self.command(self.split(self.expand(statement), at), at, reason, before, depth)

    def lines(self, text: str) -> Iterator[tuple[int, str]]:
        """Logical lines: continuations, quotes and arrays joined; here-documents, comments and redirections removed."""
        rows = iter(enumerate(text.splitlines(), 1))
        for number, row in rows:
            whole = _COMMENT.sub(lambda match: match[1] or "", row)
            while True:
                rest = re.sub(_QUOTED, "", whole, flags=re.DOTALL)
                if not (whole.endswith("\\") or re.search("['\"]", rest) or re.search(r"=\([^)]*$", rest)):
                    break
                _, more = next(rows, (0, None))
                if more is None:
                    raise self.error(number, "a quote or an array has no end")
                is_quoted = re.search("['\"]", rest) is not None
                more = more if is_quoted else _COMMENT.sub(lambda match: match[1] or "", more)
                whole = whole.removesuffix("\\") + (" " if whole.endswith("\\") else "\n") + more
            if heredoc := re.search(r"<<-?\s*['\"]?(\w+)['\"]?", whole):
                self.script.unread.append((number, "a here-document, which is not read"))
                while next(rows, (0, heredoc[1]))[1].strip("\t") != heredoc[1]:
                    continue
                whole = whole.replace(heredoc[0], "")
            yield number, _REDIRECTION.sub(lambda match: match[1] or "", whole)

    def assign(self, name: str, appends: str, value: str, line: int, reason: str) -> None:
        if name in self.given:
            return
        expanded = self.expand(value)
        if value.startswith("("):
            items = self.split(expanded.strip()[1:-1], line)
            expanded = " ".join(f'"{item}"' if re.search(r"\s|^$", item) else item for item in items)
        else:
            expanded = " ".join(self.split(expanded, line))
        self.values[name] = (
            self.values.get(name, "") + (" " if value[:1] == "(" else "") if appends else ""
        ) + expanded
        if reason:
            del self.values[name]
            self.script.reasons[name] = reason

    def command(self, words: list[str], line: int, reason: str, before: list[str], depth: int) -> None:
        if words[:1] in (["source"], ["."]):
            self.script.unread.append((line, f"`{' '.join(words)}`: what it sets is not read"))
        if all(_ASSIGNMENT.fullmatch(word) for word in words if word != "export"):
            for match in filter(None, map(_ASSIGNMENT.fullmatch, words)):
                self.assign(match[1], match[2], shlex.quote(match[3]), line, reason)
            return
        shell = next((i for i, word in enumerate(words) if re.search(r"(^|/)(ba|z)?sh$", word)), None)
        if words[:1] == ["eval"]:
            self.read(" ".join(words[1:]), line, before, depth + 1)
        elif shell is not None and words[shell + 1 : shell + 2] == ["-c"] and len(words) > shell + 2:
            self.read(words[shell + 2], line, [*before, *words[:shell]], depth + 1)
        elif words:
            self.script.commands.append(Command([*before, *words], line, reason))

    def expand(self, text: str) -> str:
        return _EXPANSION.sub(self.value, text)

    def value(self, match: re.Match[str]) -> str:
        if match["sum"] or match["command"]:  # stays, as one word: nobody knows it
            return (
                "$(" + ("".join(match["sum"].split()) if match["sum"] else re.findall(r"[\w./-]+|$", match[0])[0]) + ")"
            )
        name = match["array"] or match["items"] or match["name"] or match["plain"]
        if name is None:
            return match[0] if match[0][0] in "\\'" else ""  # `$@`
        known = self.values.get(name, "")
        if name in self.values and (known or match["default"] is None):
            return known
        if match["default"] is not None and name not in self.script.reasons:
            return self.expand(match["default"])
        why = "it is an argument of the script" if name.isdecimal() else "the script does not set it"
        self.script.reasons.setdefault(name, why)
        return f"${name}"

    def split(self, text: str, line: int) -> list[str]:
        try:
            return shlex.split(text)
        except ValueError as error:
            raise self.error(line, str(error)) from error

    def error(self, line: int, what: str) -> RecipeError:
        remedy = "correct that line, or run the script: bloomery import megatron --script FILE"
        return RecipeError(Problem(f"this script cannot be read: {what}", "", remedy, f"{self.path}:{line}"))
