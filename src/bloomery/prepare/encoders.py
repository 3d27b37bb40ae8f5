"""Text to ids: Hugging Face's tokenizers are the reference, and fastokens is used where it equals them."""

import importlib.metadata
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import orjson
from numpy.typing import NDArray

from bloomery.base.errors import DataError, Problem, first_line
from bloomery.data.tokenizer import Tokenizer, in_time
from bloomery.prepare.pool import worker_pool

Ids = tuple[NDArray[np.uint32], NDArray[np.int64]]
"""(the ids of all texts in a row, how many each has)."""
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


class Encoder:
    def __init__(self, library: str, encode: Callable[[list[str]], Ids]) -> None:
        self.name = f"{library} {importlib.metadata.version(library)}"
        """For the manifest."""
        self._encode = encode
        self.otherwise: Encoder | None = None
        """For texts at which the library fails, or takes too long."""

    def encode(self, texts: list[str]) -> Ids:
        """DataError if that happens and there is no other."""
        try:
            return in_time(lambda: self._encode(texts), sum(map(len, texts)), self.name)
        except DataError:
            if self.otherwise is None:
                raise
            return self.otherwise.encode(texts)


def reference(tokenizer: Tokenizer, as_ids: bool) -> Encoder:
    """Hugging Face's tokenizers, whose ids are right by definition."""

    def encode(texts: list[str]) -> Ids:
        ids = tokenizer.encode_batch(texts, special_tokens_as_ids=as_ids)
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        return np.concatenate(ids or [np.empty(0, np.int64)]).astype(np.uint32), lengths

    return Encoder("tokenizers", encode)


def fastokens(tokenizer: Tokenizer, as_ids: bool) -> Encoder:
    """It need not be installed."""
    import fastokens  # type: ignore[import-untyped]

    content = orjson.dumps(tokenizer.parsed | {"truncation": None, "padding": None}).decode()
    fast = fastokens.Tokenizer.from_json_str(content)

    def encode(texts: list[str]) -> Ids:
        ids, offsets = fast.encode_batch_flat(texts, split_special_tokens=not as_ids)
        return np.frombuffer(ids, "<u4"), np.diff(np.frombuffer(offsets, "<u8")).astype(np.int64)

    return Encoder("fastokens", encode)


def choose_encoder(tokenizer: Tokenizer, texts: Sequence[str], *, as_ids: bool) -> tuple[Encoder, list[str]]:
    """fastokens if it equals the reference on a sample, else the reference; and what a user should know. They are
    compared in a process of its own: a library may crash or never end, and the threads that it starts would be missing
    in the workers that are forked later, which would wait for them for ever."""
    right = reference(tokenizer, as_ids)
    try:
        fast = fastokens(tokenizer, as_ids)
        with worker_pool(partial(first_difference, sample_around(tokenizer, texts), right, fast), 1) as submit:
            difference = submit().result()
        if not difference:
            fast.otherwise = right
            return fast, [f"encoder: {fast.name}"]
    except ImportError:
        difference = "it is not installed"
    except DataError as error:
        difference = error.problems[0].what
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # each library has its own kinds, and a panic of Rust is no Exception
        difference = f"it cannot read this tokenizer: {first_line(error):.120}"
    return right, [f"encoder: {right.name}", f"not fastokens: {difference}"]


def sample_around(tokenizer: Tokenizer, texts: Sequence[str]) -> list[str]:
    """What a fast encoder must get right: texts of the user, strings that are known to be difficult, and the first and
    last added tokens, which libraries find or not by their flags."""
    added = [token["content"] for token in tokenizer.parsed.get("added_tokens") or []]
    forms = ("{0}", "x{0}", "{0}y", "a{0}b {0}c  {0}  d{0} 1{0}_ {0}{0}", "One {0}, \u00e9{0}\u00e9\n{0}\n {0}.")
    around = [form.format(text) for text in added[:100] + added[100:][-100:] for form in forms]
    return [*NASTY, *around, *texts]


def first_difference(texts: list[str], right: Encoder, other: Encoder) -> str:
    """The first text for which an encoder gives other ids than the reference; empty where all are equal."""
    rows, others = (
        np.split(ids, np.cumsum(lengths)[:-1]) for ids, lengths in (right.encode(texts), other.encode(texts))
    )
    for text, row, found in zip(texts, rows, others, strict=True):
        if not np.array_equal(row, found):
            return f"gives other ids for {text!r:.60}"
    return ""


def reject_dropout(tokenizer: Tokenizer) -> None:
    """DataError for a tokenizer whose ids are random."""
    if dropout := tokenizer.parsed["model"].get("dropout"):
        rule = "the same text would get other ids each time"
        what, remedy = f"has a model with dropout {dropout}", 'set "dropout" to null in a copy of it'
        raise DataError(Problem(what, rule, remedy, tokenizer.path))


def forbidden_ids(tokenizer: Tokenizer) -> list[int]:
    """Special tokens that no text may give. The one for the unknown may be given, unless it ends documents."""
    special, model = tokenizer.special_tokens, tokenizer.parsed["model"]
    vocab = model["vocab"]
    unknown = model.get("unk_id") if isinstance(vocab, list) else vocab.get(model.get("unk_token"))
    return sorted(set(special.values()) - ({unknown} - {special.get(tokenizer.end_of_document or "")}))
