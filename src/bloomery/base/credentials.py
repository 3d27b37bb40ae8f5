"""Passwords, keys and signatures that URLs carry: masked in all that is written or printed, refused in recipes."""

from __future__ import annotations

import re
import sys
from typing import Any, TextIO

_MASK = "***"
_VALUE = r"(?!\*\*\*)[^\s&;#'\"<>\\]{1,4096}"
_USER = r"[^\s/@:'\"<>\[]*:"
_TO_AT = r"(?:(?!://)[^\s'\"<>]){0,1024}@"
_PORT = r"\d{1,5}(?:[^\w@%!$*+=~.-]|[.,]?$|[.,]\s)|[\s'\"<>),;\]]|$"
_CHAIN = r":(?:[\w+.-]+::)*[\w+.-]+://"
_NAMED = (
    r"(?<![a-z])(?:sig|sas|pass|pw|code|session|hmac|hdnea)(?![a-z])|signature|token(?!iz)|secret|passw|pwd|jwt"
    r"|key(?!word)|cred|auth(?!or)"
)
_WORDS = r"\w*secret\w*|passw\w*|sharedaccess\w*|(?:access|account|api)_?key|(?:access|api|auth|hf|sas|session)_?token"
_RULES = (
    # scheme://user:PASSWORD@host, also where a message cut it short, and as a path, which has one `/`. Stores have no
    # ports; fsspec chains with `::`.
    (re.compile(rf"(\b(?:s3a?|gc?s|abfss?|az|hf):/{{1,2}}){_USER}{_TO_AT}", re.I), "@"),
    (re.compile(rf"(://|\b(?:https?|ftps?):/){_USER}(?!{_PORT})(?!{_CHAIN})(?:{_TO_AT}|[^\s'\"<>/]{{1,1024}})"), "@"),
    (re.compile(r"(\b(?:https?|ftps?):/{1,2})[^\s/@:'\"<>]+@", re.I), "@"),
    # Signed queries, the pairs of a connection string, what libraries print of their options and headers.
    (re.compile(rf"([?&;#][\w.%-]{{0,64}}?(?:{_NAMED})[\w.%-]{{0,64}}=){_VALUE}", re.I), ""),
    (re.compile(rf"(\b(?:{_WORDS})(?:=|['\"]: ?)['\"]?){_VALUE}", re.I), ""),
    (re.compile(r"(authorization['\"]?\s*[:=]\s*+['\"]?+)(?!\*)[^'\"\n,}]+", re.I), ""),
    (re.compile(rf"(\b(?:x-[\w-]*(?:key|token|secret)['\"]?\s*[:=]\s*['\"]?|Bearer ))(?!\*){_VALUE}", re.I), ""),
)
_INSTEAD = {
    "s3 s3a": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or write ~/.aws/credentials",
    "gs gcs": "set GOOGLE_APPLICATION_CREDENTIALS to the file of the key",
    "abfs abfss az": "set AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN or AZURE_STORAGE_CONNECTION_STRING",
    "hf": "set HF_TOKEN",
    "http https": "write ~/.netrc; bring a file with a signed URL here by `bloomery download`",
}


def mask(text: str) -> str:
    """The text with `***` for every secret in it: of a URL, a query, a connection string or a header."""
    if "=" in text or ":" in text:  # the others hold none
        for pattern, end in _RULES:
            text = pattern.sub(rf"\g<1>{_MASK}{end}", text)
    return text


def where_instead(url: str) -> str:
    """What to do with the credentials of a URL: the environment variable or the file that its library reads."""
    scheme = url.partition("://")[0].rpartition(":")[2].lower()
    known = (way for schemes, way in _INSTEAD.items() if scheme in schemes.split())
    return next(known, "use the environment variable or the file that the library of its store reads")


class _Masked:
    """A stream through which no secret passes, whoever prints: also libraries, and Python's own tracebacks."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(mask(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def mask_streams(*, output: bool = True) -> None:
    """For the rest of the process: all of standard error, and standard output if `output`."""
    for name in ("stdout", "stderr") if output else ("stderr",):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _Masked):
            setattr(sys, name, _Masked(stream))
