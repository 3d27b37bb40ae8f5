"""A launch script that is only read, without running any of it: continuations, plain assignments and arrays, `$VAR`,
`${VAR:-x}`, `bash -c`. Conditions, loops, functions, here-documents and programs are not: what they set has no value.
"""

import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

from bloomery.base.errors import Problem, RecipeError
from bloomery.interop.megatron.flags import SWITCHES
from bloomery.interop.megatron.script import Command, Script

_COMMENT = r"(?<![^\s;(])\#[^\n]*"
_QUOTED = r"""\\.|'[^']*'|"(?:\\.|[^"\\])*+\""""
_PROGRAM = r"\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|`[^`]*`|[<>]\([^()]*\)"
_VARIABLE = r"\$\{(?P<name>\w+)(?P<rest>[^}]*)\}|\$(?P<plain>\w+|[@*#])"
_ARRAY = rf"(?<==)\((?:{_COMMENT}|{_QUOTED}|{_PROGRAM}|[^()'\"\\])*+\)"
_WORD = rf"(?:{_QUOTED}|{_PROGRAM}|\$\{{[^}}]*\}}|{_ARRAY}|\(\([^()]*\)\)|\(\)|[^\s;&|<>()'\"\\`])+"
_REDIRECTION = rf"[0-9&]?(?:>>?|<)(?!\()&?[ \t]*(?:{_WORD})?"
_END = r"&&|\|\||[;&|\n)]|(?<!=)\("
_TOKEN = re.compile(rf"(?:[ \t]|\\\n|{_COMMENT})+|{_REDIRECTION}|(?P<word>{_WORD})|(?P<end>{_END})|(?P<wrong>.)", re.S)
_PIECE = re.compile(rf"{_QUOTED}|{_PROGRAM}|{_VARIABLE}", re.S)
_INSIDE = re.compile(rf'\\[$`"\\\n]|{_PROGRAM}|{_VARIABLE}', re.S)
_HEREDOC = re.compile(r"(?<!<)<<-?[ \t]*(['\"]?)(\w+)\1([^\n]*)\n.*?^\t*\2$", re.S | re.M)
_MOST_CHARACTERS = 1 << 24
_ASSIGNMENT = re.compile(r"(\w+)(\+?)=(.*)", re.S)


def read_script(path: Path, text: str, given: Mapping[str, str]) -> Script:
    """RecipeError with a line that cannot be read."""
    reader = _Reader(path, Script(text), given)
    reader.read(text.replace("\0", ""))
    return reader.script


class _Reader:
    def __init__(self, path: Path, script: Script, given: Mapping[str, str]) -> None:
        self.path, self.script, self.given = path, script, given
        self.values = {name: [value] for name, value in script.variables(given).items()} | {"@": [], "*": [], "#": []}
        """A name that is set where nothing is read stands for itself: `$NAME`."""
        self.left = _MOST_CHARACTERS

    def read(self, text: str, inside: int = 0, doubt: str = "", depth: int = 0) -> None:
        """`inside`, `doubt`: the line of a text that `bash -c` or `eval` runs, and why it may not."""
        line, at, words, before, blocks = 1, 1, list[str](), "", list[int]()
        text = _HEREDOC.sub(lambda match: f"here-document{match[3]}" + "\n" * match[0].count("\n"), text)
        for token in _TOKEN.finditer(f"{text}\n"):
            if token["wrong"] or depth > 20:
                remedy = "correct that line, or run the script: bloomery import megatron --script FILE"
                what = "this script cannot be read: a quote or an array has no end, or it calls itself"
                raise RecipeError(Problem(what, "", remedy, f"{self.path}:{inside or line}"))
            if token["word"] and (words or token["word"] not in ("then", "else", "elif", "do", "!", "time")):
                at = at if words else inside or line
                words.append(token["word"])
            elif token["end"] and words:
                if words[0] in ("fi", "done", "esac", "}"):
                    del blocks[-1:]
                elif words[0] in ("if", "for", "while", "until", "select", "case") or "{" in words[:3]:
                    self.script.unread += [] if blocks else [(at, f"the `{words[0]}` of this line is not read")]
                    blocks.append(at)
                on = f"it depends on line {blocks[0] if blocks else at}, which is not read"
                self.statement(words, at, doubt or (on if blocks or before in ("&&", "||") else ""), depth)
                words, before = [], token["end"]
            line += token[0].count("\n")

    def statement(self, words: list[str], at: int, doubt: str, depth: int) -> None:
        assignments = [match for word in words if (match := _ASSIGNMENT.fullmatch(word))]
        if doubt:
            names = {*re.findall(r"\b([A-Za-z_]\w*)\+?=", " ".join(words))}
            names |= {*words} if {"for", "read", "select"} & {*words} else set()
            self.values |= {name: [f"${name}"] for name in names - self.given.keys()}
        elif words[0] in ("export", "declare", "local", "readonly") or len(assignments) == len(words):
            for name, plus, value in (match.groups() for match in assignments):
                old = self.values.get(name, []) if plus else []
                if value.startswith("("):
                    made = old + self.expand(*(token["word"] or "" for token in _TOKEN.finditer(value[1:-1])))
                else:
                    made = ["".join(old) + " ".join(self.expand(value))]
                self.values[name] = [self.given[name]] if name in self.given else made
            return
        words = self.expand(*words)
        shell = next((i for i, word in enumerate(words) if re.search(r"(^|/)(ba|z)?sh$", word)), len(words))
        if words[:1] in (["source"], ["."], ["cat"], ["exit"]):
            self.script.unread += [] if doubt else [(at, f"`{' '.join(words)}` is not read")]
        elif words[:1] == ["eval"] or words[shell + 1 : shell + 2] in (["-c"], ["-lc"]):
            inner = words[1:] if words[0] == "eval" else words[shell + 2 : shell + 3]
            self.read(" ".join(inner), at, doubt, depth + 1)
        elif words and words[0] != "echo":
            for before, word in pairwise(words):
                if re.fullmatch(r"\$\w+", word) and (not before.startswith("--") or before[2:] in SWITCHES.split()):
                    doubt = doubt or f"{word} has no value, and may hold flags"
            self.script.commands.append(Command(words, at, doubt))

    def expand(self, *words: str) -> list[str]:
        """The words that these become: \\0 stands between them, and \\1 in what was quoted, which may be empty."""
        made = "\0".join(_PIECE.sub(self.piece, word) for word in words)
        return [word.replace("\1", "") for word in made.split("\0") if word]

    def value(self, name: str, *otherwise: str) -> list[str]:
        found = self.values.get(name, [*otherwise])
        self.left -= sum(map(len, found))
        if self.left < 0:
            rule = f"the values that a script uses have at most {_MOST_CHARACTERS:,} characters in all"
            raise RecipeError(Problem(f"${name} is too long", rule, "correct the script", str(self.path)))
        return found

    def piece(self, match: re.Match[str]) -> str:
        text, name, rest = match[0], match["name"] or match["plain"], (match["rest"] or "").lstrip(":")
        if text[0] == "\\":
            return text[1:].strip("\n")
        if text[0] == "'":
            return f"\1{text[1:-1]}"
        if array := re.fullmatch(r'"\$(?:\{(\w+)\[@\]\}|(@))"', text):
            name = array[1] or array[2]
            return "\0".join(f"\1{item}" for item in self.value(name, f"${name}"))
        if text[0] == '"':
            return "\1" + _INSIDE.sub(self.piece, text[1:-1])
        if name is None:  # a program stays, as one word: nobody knows what it prints
            return "$({})".format(re.sub(r"[\s'\"`]|^\$\(|\)$", "", text))
        made = " ".join(self.value(name))
        if rest.startswith("-"):
            made = made or " ".join(self.expand(rest[1:]))
        elif name not in self.values or rest not in ("", "[@]", "[*]"):
            made = f"${name}"
        return made if match.re is _INSIDE else re.sub(r"\s+", "\0", made)
