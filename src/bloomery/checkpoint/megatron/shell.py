"""A launch script as far as it can be known without running it: its commands with all variables filled in.

Reads assignments, arrays, if/elif/else, tests, here-documents and `bash -c`. Runs nothing. What it cannot know (other
programs, loops, conditions on the machine) leaves the variables that depend on it without a value, and says why.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from bloomery.checkpoint.megatron.shell_expand import Variables, assignment, is_known, shown
from bloomery.checkpoint.megatron.shell_words import ShellError, Token, tokens_of

Mode = Literal["run", "skip", "doubt"]
"""Whether a stretch of the script is executed, passed over, or nobody knows."""

_ENDS = ("\n", ";", "&", "|", "&&", "||", ";;", "(", ")")
_REDIRECTIONS = (">", ">>", "<", ">&", "<&", "&>", "&>>", "<<<")
_DECLARES = ("export", "declare", "local", "readonly", "typeset")
_CONSTANTS = {"true": True, ":": True, "false": False}
_SHELLS = ("bash", "sh", "zsh")
_DIRECTIVE = re.compile(r"^#SBATCH\s+--?([A-Za-z-]+)(?:[=\s]+(\S+))?", re.MULTILINE)
_SHORT = {"N": "nodes", "t": "time", "J": "job-name", "a": "array"}
_COMPARE = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
}


@dataclass(frozen=True)
class Command:
    words: list[str]
    line: int
    doubt: str = ""
    """Why it may not be run; empty if it is."""


@dataclass
class Script:
    commands: list[Command] = field(default_factory=list)
    files: dict[str, tuple[str, int] | None] = field(default_factory=dict)
    """Path -> (content, line) of files that here-documents write; None: another program writes it."""
    sbatch: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Directive -> (value, line)."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Why a variable has no value."""
    unread: list[tuple[int, str]] = field(default_factory=list)
    """(line, what) that could matter and was not read."""
    asked: set[str] = field(default_factory=set)
    """Variables and arguments that it looks up."""


class _EndsError(Exception):
    """`exit` was reached."""


def read_script(text: str, given: Mapping[str, str] | None = None) -> Script:
    """What the script does. `given` are variables from outside, which win. ShellError says which line is wrong."""
    script = Script()
    for match in _DIRECTIVE.finditer(text):
        name = _SHORT.get(match[1], match[1])
        script.sbatch[name] = (match[2] or "", text.count("\n", 0, match.start()) + 1)
    known = dict(given or {})
    if "nodes" in script.sbatch:
        for name in ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"):
            known.setdefault(name, script.sbatch["nodes"][0])
    if "gpus-per-node" in script.sbatch:
        known.setdefault("SLURM_GPUS_PER_NODE", script.sbatch["gpus-per-node"][0].rpartition(":")[2])
    reader = _Reader(script, Variables(known))
    try:
        reader.block(tokens_of(text), 0, (), "run", "")
    except _EndsError:
        script.unread.append((reader.line, "the script ends here with `exit`; what follows was not read"))
    except RecursionError:
        raise ShellError(reader.line, "it is nested too deeply, or calls itself") from None
    script.reasons, script.asked = reader.variables.reasons, reader.variables.asked
    return script


class _Reader:
    def __init__(self, script: Script, variables: Variables, *, line: int | None = None) -> None:
        self.script = script
        self.variables = variables
        self.fixed_line = line
        """Of a text inside another script: the line of that text."""
        self.line = line or 1

    def block(
        self, tokens: list[Token], at: int, ends: tuple[str, ...], mode: Mode, why: str
    ) -> tuple[int, bool | None]:
        """Statements up to a keyword of `ends`: (its place, whether the last one succeeded, None if unknown)."""
        status: bool | None = None
        is_test, negated, here, reason = False, False, mode, why
        while at < len(tokens):
            token = tokens[at]
            self.line = self.fixed_line or token.line
            word = token.plain
            if word in ends and word is not None:
                return at, status
            if token.kind == "operator":
                here, reason = mode, why
                if token.text in ("&&", "||") and mode != "skip":
                    success = status if is_test else True
                    if success is (token.text == "||"):
                        here = "skip"
                    elif success is None and mode == "run":
                        here, reason = "doubt", f"line {self.line} depends on a test that only a running shell knows"
                at += 1
                continue
            is_test, negated = False, False
            if word == "!" and at + 1 < len(tokens):
                negated, at = True, at + 1
                token, word = tokens[at], tokens[at].plain
            if word == "if":
                at = self.choose(tokens, at, here, reason)
            elif word in ("for", "select", "while", "until", "case"):
                at = self.doubtful(tokens, at, here, str(word))
            elif word == "{":
                at = self.closing(tokens, self.block(tokens, at + 1, ("}",), here, reason)[0], "}")
            elif word == "function" or [t.text for t in tokens[at + 1 : at + 3]] == ["(", ")"]:
                self.script.unread.append((self.line, "a function; what it sets was not read"))
                while at < len(tokens) and tokens[at].plain != "{":
                    at += 1
                at = self.closing(tokens, self.block(tokens, at + 1, ("}",), "skip", "")[0], "}")
            elif word in ("[[", "["):
                at, status = self.test(tokens, at, here)
                status = None if status is None else status is not negated
                is_test = True
            else:
                at, status = self.simple(tokens, at, here, reason)
                status = None if status is None else status is not negated
                is_test = word in _CONSTANTS
        if ends:
            raise ShellError(self.line, f"`{ends[0]}` is missing")
        return at, status

    def closing(self, tokens: list[Token], at: int, word: str) -> int:
        if at >= len(tokens):
            raise ShellError(self.line, f"`{word}` is missing")
        return at + 1

    def choose(self, tokens: list[Token], at: int, mode: Mode, why: str) -> int:
        taken: bool | None = False
        while True:
            line = self.fixed_line or tokens[at].line
            at, truth = self.block(tokens, at + 1, ("then",), "skip" if taken or mode == "skip" else mode, why)
            here: Mode = mode
            reason = why
            if mode == "skip" or taken is True or (truth is False and taken is False):
                here = "skip"
            elif taken is None or truth is None:
                here, reason = "doubt", f"it depends on the condition of line {line}, which only a running shell knows"
            at, _ = self.block(tokens, at + 1, ("elif", "else", "fi"), here, reason)
            taken = True if here == "run" else None if here == "doubt" else taken
            if tokens[at].plain == "else":
                last: Mode = "skip" if taken or mode == "skip" else "doubt" if taken is None else mode
                at, _ = self.block(tokens, at + 1, ("fi",), last, reason or why)
            if tokens[at].plain == "fi":
                return at + 1

    def doubtful(self, tokens: list[Token], at: int, mode: Mode, word: str) -> int:
        """Loops and cases: nobody counts how often they run."""
        reason = f"it is set in the `{word}` of line {self.line}, which is not read"
        here: Mode = "skip" if mode == "skip" else "doubt"
        if word in ("for", "select"):
            name = tokens[at + 1].plain if at + 1 < len(tokens) else None
            if name and here == "doubt":
                self.variables.forget(name, reason)
            while at < len(tokens) and tokens[at].plain != "do":
                at += 1
            return self.closing(tokens, self.block(tokens, at + 1, ("done",), here, reason)[0], "done")
        if word == "case":
            return self.closing(tokens, self.block(tokens, at + 1, ("esac",), here, reason)[0], "esac")
        at, truth = self.block(tokens, at + 1, ("do",), here, reason)
        if truth is (word == "until"):  # it never begins, such as a loop over arguments that are not given
            here = "skip"
        return self.closing(tokens, self.block(tokens, at + 1, ("done",), here, reason)[0], "done")

    def test(self, tokens: list[Token], at: int, mode: Mode) -> tuple[int, bool | None]:
        closing = {"[[": "]]", "[": "]"}[str(tokens[at].plain)]
        inside: list[str] = []
        at += 1
        while at < len(tokens) and tokens[at].plain != closing:
            token = tokens[at]
            inside.append(token.text if token.kind == "operator" else self.variables.text(token.parts))
            at += 1
        at = self.closing(tokens, at, closing)
        return at, None if mode == "skip" else _truth(inside)

    def simple(self, tokens: list[Token], at: int, mode: Mode, why: str) -> tuple[int, bool | None]:
        words: list[Token] = []
        target, appends, heredoc = "", False, None
        while at < len(tokens) and not (tokens[at].kind == "operator" and tokens[at].text in _ENDS):
            token = tokens[at]
            if token.kind == "operator" and token.text in _REDIRECTIONS:
                at += 1
                if at < len(tokens) and tokens[at].kind == "word" and token.text in (">", ">>", "&>"):
                    target, appends = self.variables.text(tokens[at].parts), token.text == ">>"
            elif token.kind == "heredoc":
                heredoc = token
            else:
                words.append(token)
            at += 1
        if mode == "skip" or not words:
            return at, None
        rest = self.assignments(words, mode, why)
        if rest is None:
            return at, True
        if heredoc is not None and target and mode == "run" and not appends:
            self.script.files[target] = (self.variables.text(heredoc.parts), self.fixed_line or heredoc.line)
        elif target:
            self.script.files[target] = None
        self.command(self.variables.words([token for token in rest if token.kind == "word"]), mode, why)
        return at, _CONSTANTS.get(str(words[0].plain))

    def assignments(self, words: list[Token], mode: Mode, why: str) -> list[Token] | None:
        """Take note of `A=1 B=2` or `export A=1`; the words of the command, None if there is none."""
        declares = words[0].plain in _DECLARES
        rest = list(words[1:] if declares else words)
        found = []
        while rest and (rest[0].kind == "array" or assignment(rest[0]) or (declares and rest[0].plain)):
            found.append(rest.pop(0))
        if rest and not declares:
            return rest  # `A=1 program`: only that program sees it
        for token in found:
            line = self.fixed_line or token.line
            if token.kind == "array":
                name, append = token.text.rstrip("+="), token.text.endswith("+=")
                items = self.variables.words(token.words)
            else:
                made = assignment(token)
                if made is None:
                    continue
                name, append, parts = made
                items = [self.variables.text(parts)]
            if mode == "doubt":
                self.variables.forget(name, why)
            else:
                self.variables.assign(name, items, append=append, array=token.kind == "array", line=line)
        return None

    def command(self, words: list[str], mode: Mode, why: str) -> None:
        if not words:
            return
        name = words[0].rpartition("/")[2]
        if name == "exit" and mode == "run":
            raise _EndsError
        if name == "shift" or words[:2] == ["set", "--"]:
            self.arguments(words, mode)
        if name in ("cp", "mv", "tee") or (name == "sed" and any(word.startswith(("-i", "--in-")) for word in words)):
            self.script.files.update(dict.fromkeys(words[1:]))
        if name in ("source", "."):
            self.script.unread.append((self.line, f"`{shown(' '.join(words))}`: what it sets was not read"))
        if name in ("readarray", "mapfile", "read"):
            for word in words[1:]:
                if not word.startswith("-"):
                    self.variables.forget(word, f"line {self.line} fills it from a program")
        self.run(words, mode, why)

    def arguments(self, words: list[str], mode: Mode) -> None:
        count = words[1] if len(words) > 1 else "1"
        left: list[str] | None = words[2:] if words[0] == "set" else None
        if left is None and re.fullmatch("[0-9]{1,3}", count):
            left = self.variables.arguments[int(count) :]
        self.variables.set_arguments(left if mode == "run" else None, f"line {self.line} changes the arguments")

    def run(self, words: list[str], mode: Mode, why: str) -> None:
        """A command, or those inside it."""
        inner = _inner_script(words)
        if inner is None:
            self.script.commands.append(Command(words, self.line, why if mode == "doubt" else ""))
            return
        before, text = inner
        started = len(self.script.commands)
        nested = _Reader(self.script, self.variables, line=self.line)
        nested.block(tokens_of(text), 0, (), mode, why)
        self.script.commands[started:] = [
            Command([*before, *found.words], found.line, found.doubt) for found in self.script.commands[started:]
        ]


def _inner_script(words: list[str]) -> tuple[list[str], str] | None:
    """(the words before it, the text) of `srun ... bash -c 'text'`, or of `eval text`."""
    if words[0] == "eval":
        return [], " ".join(words[1:])
    for at in range(len(words) - 2):
        if words[at].rpartition("/")[2] in _SHELLS and words[at + 1] == "-c":
            return words[:at], words[at + 2]
    return None


def _truth(words: list[str]) -> bool | None:
    """The value of a test; None where it depends on the machine or on a variable without a value."""
    for separators, absorbing in ((("||", "-o"), True), (("&&", "-a"), False)):
        if any(word in separators for word in words):
            at = next(i for i, word in enumerate(words) if word in separators)
            sides = (_truth(words[:at]), _truth(words[at + 1 :]))
            if absorbing in sides:
                return absorbing
            return None if None in sides else not absorbing
    if words[:1] == ["!"]:
        inside = _truth(words[1:])
        return None if inside is None else not inside
    if any(not is_known(word) for word in words):
        return None
    match words:
        case ["-z", text]:
            return text == ""
        case ["-n", text] | [text]:
            return text != ""
        case [left, "=" | "==", right]:
            return fnmatch.fnmatchcase(left, right)
        case [left, "!=", right]:
            return not fnmatch.fnmatchcase(left, right)
        case [left, comparison, right] if comparison in _COMPARE:
            try:
                return bool(_COMPARE[comparison](int(left), int(right)))
            except ValueError:
                return None
    return None
