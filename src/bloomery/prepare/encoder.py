"""Text to ids by the fastest library that gives the same ids as Hugging Face's tokenizers, which is asked to judge."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress, zip_longest
from textwrap import shorten
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bloomery.base.errors import DataError, Problem
from bloomery.data.tokenizer import Tokenizer
from bloomery.prepare.early import EarlyStart
from bloomery.prepare.fast import Fastokens, Gigatoken
from bloomery.prepare.judge import Judge, difference
from bloomery.prepare.pool import Pool

SAMPLE_DOCUMENTS = 2000
"""What is compared before anything is encoded: at most so many of the first documents."""
ADDED_TOKENS = 200
"""And texts around so many of the tokenizer's added tokens."""
_PATIENCE_SECONDS = 60.0
"""For an encoder to encode the sample, which takes a fraction of one."""
RECHECK_EVERY = 1000
"""Of the documents encoded, one in so many is compared."""
RECHECK_BYTES = 1 << 20
"""Longer documents are not: the judge needs a second for each megabyte."""


def sample_bytes(input_bytes: int) -> int:
    """How much text of them: 64 to 256 KiB, so that checking takes a small part of the time also where all is quick."""
    return min(max(input_bytes // 512, 1 << 16), 1 << 18)


# fmt: off
NASTY = (
    "", " ", "  ", "\n", "\r\n", "\t", "\n\n\n \n", "\x00", "\x00\x01\x02\x7f\x80\x9f", "\u200b\u200d\u2060\ufeff",
    "a" * 1000, " " * 1000, "\n" * 1000, "7" * 1000, "x " * 500, "1234567890" * 20, "  x   y\n\n  z \t ", "ab" * 700,
    "it's I'll WE'RE they'd'nt 's 'S ''t \u2019s", "x\u2019s y\u02bcs", "'s" * 200, "9's \ud7a3's 漢's",
    "<|endoftext|>", "a <|endoftext|>b<|endoftext|><|endoftext|>", "<|endoftext|", "[CLS] [SEP][MASK] [PAD]##s [UNK]",
    "<s></s><unk><pad><|im_start|>", "<eos><bos>", "👍🏽👩‍👩‍👧‍👦🇫🇷🏴󠁧󠁢󠁥󠁮󠁧󠁿", "e\u0301 é ﬁ ½ ² ① Ⅷ",
    "\U0003134a\U00031350\U000323af's", "\U000323b0\U00033479's \U00033479", "\U00010940\u0897\u1c89\ua7cb",
    "\U00011db0's\U00016ea0x", "\ufffd\ufffe\uffff", "\U0010ffff\U000e0001", "\ue000\uf8ff", "\u0378\u0379 \u2fff",
    "สวัสดีครับ", "हिन्दी में", "مرحبا بالعالم", "שלום עולם", "日本語のテキスト。中文", "한국어 텍스트", "Ελληνικά Ǆ ǅ ß ẞ İ",
    "\u2028\u2029\x85\xa0\u3000\u1680\u180e", "a\u00a0b\u2003c\u3000d", "\u202eabc\u202c", "x\u0308\u0308\u0308" * 50,
    "def f(x):\n\treturn x**2  # ok\n\n\n", "<a href='x'>&amp;</a>", "http://x.y/z?a=b&c=%20", "1,234.56e-7 0x1F $9.99",
    "CamelCaseHTTPServer_snake-case", "!!!???...,,,;;;", "--------====____", "\\n\\t\\u0041", '{"a": [1]}', "A" * 31,
)
# fmt: on
"""Strings on which libraries have been seen to differ, or may."""


class Encoder(Protocol):
    def encode(self, texts: list[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """(the ids of all texts in a row, how many each has)."""


class HuggingFace:
    def __init__(self, tokenizer: Tokenizer, as_ids: bool) -> None:
        self._tokenizer, self._as_ids = tokenizer, as_ids
        tokenizer.build()  # now, before processes fork

    def encode(self, texts: list[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        ids = self._tokenizer.encode_batch(texts, special_tokens_as_ids=self._as_ids)
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        return np.concatenate(ids or [np.empty(0, np.int64)]).astype(np.uint32), lengths


FAST: dict[str, Callable[[Tokenizer, bool], Encoder]] = {"fastokens": Fastokens, "gigatoken": Gigatoken}
"""In order of preference. They need not be installed."""
REFERENCE = "tokenizers"


@dataclass(frozen=True)
class Chosen:
    name: str
    """With the version of the library."""
    encoder: Encoder
    refused: dict[str, str]
    """The faster ones, and why not."""
    forgeable: frozenset[int]
    """Ids of special tokens that the model might also give for a text (Unigram, or words), where that must not be."""

    @property
    def is_reference(self) -> bool:
        return self.name.split()[0] == REFERENCE


def refuse_chance(tokenizer: Tokenizer) -> None:
    """DataError for a tokenizer that throws dice."""
    if dropout := tokenizer.parsed["model"].get("dropout"):
        rule = "the same text would get other ids each time"
        what, remedy = f"has a model with dropout {dropout}", 'set "dropout" to null in a copy of it'
        raise DataError(Problem(what, rule, remedy, tokenizer.path))


def choose_encoder(
    tokenizer: Tokenizer,
    judge: Judge,
    sample: Sequence[str],
    *,
    as_ids: bool,
    refused: dict[str, str],
    crew: Callable[[Chosen], Pool],
    early: EarlyStart | None = None,
) -> tuple[Chosen, Pool]:
    """The first that loads and agrees with the judge, and processes that have it. `refused`: those that are out
    already, and why. `crew`: makes the processes, which encode a list of texts. `early`: the first encoder, if it is
    being loaded already.

    An encoder is never tried in this process: fastokens would start threads for large vocabularies, which a fork does
    not copy, and every worker would wait for them for ever."""
    probes = [text for token in tokenizer.special_tokens for text in (token, f"a {token} b", f"a{token}b")]
    forgeable = frozenset() if as_ids else _forgeable(tokenizer)
    texts = [*probes, *NASTY, *_around_added_tokens(tokenizer), *sample]
    judge.child.ask(texts)
    expected: list[list[int]] | None = None
    refused = dict(refused)
    for name, make in FAST.items() if early is None else {**FAST, "fastokens": early.fastokens}.items():
        if name in refused:
            continue
        try:
            chosen = Chosen(f"{name} {_version(name)}", make(tokenizer, as_ids), refused, forgeable)
        except ImportError:
            refused[name] = "it is not installed"
            continue
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # each library has its own kinds, and a panic of Rust is no Exception
            refused[name] = f"it cannot read this tokenizer: {in_short(error, 0)}"
            continue
        pool = crew(chosen)
        try:
            try:  # each process a part of the texts: the first one that it encodes takes 30 ms
                shares = [texts[number :: len(pool)] for number in range(len(pool))]
                answers = pool.ask_each(shares, patience_seconds=_PATIENCE_SECONDS)
            except Exception as error:
                refused[name] = f"it fails: {in_short(error, -1)}"
            else:
                expected = expected or judge.child.answer()
                wrongs = [
                    difference(expected[number :: len(pool)], share, np.split(flat, np.cumsum(lengths))[:-1])
                    for number, (share, (flat, lengths)) in enumerate(zip(shares, answers, strict=True))
                ]
                if not any(wrongs):
                    return chosen, pool
                refused[name] = next(filter(None, wrongs))
        except BaseException:
            pool.close()
            raise
        pool.close()
    if expected is None:
        judge.child.answer()
    chosen = Chosen(f"{REFERENCE} {_version(REFERENCE)}", HuggingFace(tokenizer, as_ids), refused, forgeable)
    return chosen, crew(chosen)


def in_short(error: BaseException, line: int) -> str:
    """One line of its text, cut at a word where it is long."""
    lines = str(error).splitlines() or [type(error).__name__]
    return shorten(lines[line], 120, placeholder=" ...")


def _forgeable(tokenizer: Tokenizer) -> frozenset[int]:
    """All special tokens, unless the model can give none of them. That for the unknown may be given, unless it ends
    documents."""
    special = dict(tokenizer.special_tokens)
    end = special.get(tokenizer.end_of_document or "")
    ids = frozenset(special.values()) - ({tokenizer.unknown_id} - {end})
    return ids if ids and _can_give(tokenizer.parsed["model"], ids) else frozenset()


def _can_give(model: dict[str, Any], ids: frozenset[int]) -> bool:
    """Whether some text might give one of these ids. Of BPE it is known: it begins with single characters, whatever
    came before it, and joins them by its merges, so that it gives no token that is neither a character nor the result
    of a merge. GPT-2's <|endoftext|> is neither."""
    # Every other model may know a whole word, and so may BPE with these.
    others = ("ignore_merges", "byte_fallback", "continuing_subword_prefix", "end_of_word_suffix")
    if model.get("type", "BPE") != "BPE" or "merges" not in model or any(map(model.get, others)):
        return True
    tokens = set(compress(model["vocab"], map(ids.__contains__, model["vocab"].values())))
    if model.get("unk_token") in tokens or any(len(token) < 2 for token in tokens):
        return True
    pairs = {(token[:cut], token[cut:]) for token in tokens for cut in range(1, len(token))}
    merges = model["merges"]
    if merges and isinstance(merges[0], str):
        return not set(map(" ".join, pairs)).isdisjoint(merges)
    return not pairs.isdisjoint(map(tuple, merges))


def _around_added_tokens(tokenizer: Tokenizer) -> list[str]:
    """Each added token alone, inside words and in sentences, where libraries find it or not by its flags. Where there
    are too many tokens, some of every kind."""
    kinds: dict[tuple[object, ...], list[str]] = {}
    for token in tokenizer.added_tokens:
        kind = tuple(token.get(flag) for flag in ("special", "single_word", "lstrip", "rstrip", "normalized"))
        kinds.setdefault(kind, []).append(token["content"])
    in_turn = [text for row in zip_longest(*kinds.values()) for text in row if text is not None]
    return [
        form
        for text in in_turn[:ADDED_TOKENS]
        for form in (text, f"x{text}", f"{text}y", f"  {text}  ", f"a{text}b {text}c d{text} 1{text}_ {text}{text}",
                     f"One {text}, \u00e9{text}\u00e9\n{text}\n {text.upper()} {text.lower()}.")
    ]  # fmt: skip


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "?"
