"""A tokenizer as the rest of Bloomery sees it: text to ids, ids to text, one end-of-document id; and the files it comes
in."""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np
import orjson
from numpy.typing import NDArray

from bloomery.base.bounded import LARGE_BYTES, parse_json, read_text
from bloomery.base.errors import DataError, Problem

T = TypeVar("T")
FILES = ("tokenizer.json", "merges.txt", "vocab.txt")
"""A folder with one of them holds a tokenizer; the first counts."""
HIGHEST_ID = (1 << 24) - 1
END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
"""Special tokens that end a document, the most specific first; without any of them, the folder's `eos_token` does. Not
that one first: a chat tokenizer's ends a turn, `<|im_end|>`, where `<|endoftext|>` ends documents."""
_BERT_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_OF_IDS = "-ids"
"""What hashes end with since they cover what decides ids and nothing else."""
_NOTHING = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
_DECIDES_NO_ID = re.compile(rb'"trim_offsets":(true|false),')
LEAST_SECONDS, LEAST_CHARACTERS_PER_SECOND = 60.0, 20_000
"""How long a library may take for a text: far longer than any does, unless a pattern of the tokenizer backtracks."""


def is_other_tokenizer(remembered: str, now: str) -> bool:
    """Whether a hash that a checkpoint remembers is of another tokenizer; one of an earlier version tells nothing."""
    return remembered != now and remembered.endswith(_OF_IDS)


def in_time(work: Callable[[], T], characters: int, place: str) -> T:
    """What `work`, a call of a library that encodes, returns. DataError if it fails or takes too long: a
    thread cannot be ended, so it is left to itself then."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # a panic of Rust is no Exception
            outcome.set_exception(error if isinstance(error, MemoryError) else RuntimeError(str(error)))

    threading.Thread(target=run, name="bloomery-tokenize", daemon=True).start()
    seconds = LEAST_SECONDS + characters / LEAST_CHARACTERS_PER_SECOND
    try:
        return outcome.result(seconds)
    except (RuntimeError, TimeoutError) as error:
        late = f"has not done {characters:,} characters in {seconds:,.0f} s"
        what = late if isinstance(error, TimeoutError) else f"fails at a text: {error}"
        remedy = "look at its normalizer and pre_tokenizer, or use another tokenizer"
        raise DataError(Problem(what, "a pattern in it may need exponential time", remedy, place)) from error


class Tokenizer:
    def __init__(self, content: str, *, path: str) -> None:
        """`content` is a tokenizer.json; `path` the file it was read from. DataError where it is none."""
        import tokenizers

        self.path, self.content = path, content
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content)
            self.parsed: dict[str, Any] = orjson.loads(content)
            """The content of the tokenizer.json; not to be changed."""
            self.vocab_size = _vocab_size(self._tokenizer)
            """Rows an embedding needs: the highest id plus one, added tokens included."""
        except (KeyboardInterrupt, MemoryError):
            raise
        except BaseException as error:  # the library raises bare Exception, and its panics are not even that
            what = f"is not a tokenizer that the tokenizers library {tokenizers.__version__} can read: {error}"
            remedy = "train one with `bloomery tokenizer train`, or copy the file again"
            raise DataError(Problem(what, remedy=remedy, place=path)) from error
        # Files saved by others may carry these; they would silently drop or invent tokens.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    @classmethod
    def load(cls, path: str) -> Tokenizer:
        """From a folder that holds a tokenizer.json, GPT-2's vocab.json and merges.txt, or BERT's vocab.txt."""
        files = [os.path.join(path, name) for name in FILES]
        file = next(filter(os.path.exists, files), files[0])
        as_json = dict(zip(files, (_read, _gpt2, _bert), strict=True))[file]
        return cls(as_json(file), path=file)

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        added = self._tokenizer.get_added_tokens_decoder()
        return {added[number].content: number for number in sorted(added) if added[number].special}

    def id_of(self, token: str) -> int | None:
        """The id of any token of the vocabulary."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    @cached_property
    def end_of_document(self) -> str | None:
        """The special token that ends documents. No part of the hash: a shard's manifest has it on its own."""
        if named := next((token for token in END_OF_DOCUMENT if token in self.special_tokens), None):
            return named
        named = token_of(read_settings(os.path.dirname(self.path)).get("eos_token"))
        return named if named in self.special_tokens else None

    @property
    def eod_token(self) -> str:
        if self.end_of_document is not None:
            return self.end_of_document
        what = f"has no end-of-document token; its special tokens are {', '.join(self.special_tokens) or 'none'}"
        rule = f"one of {', '.join(END_OF_DOCUMENT)}, or else the eos_token of tokenizer_config.json beside it, "
        rule += "must be an added special token"
        remedy = "name one of its special tokens there as eos_token, or set append_eod: false"
        raise DataError(Problem(what, rule, remedy, self.path))

    @property
    def eod_id(self) -> int:
        return self.special_tokens[self.eod_token]

    def check_fits(self, vocab_size: int, remedy: str) -> None:
        """DataError where a model with this vocabulary lacks a row for some token."""
        if self.vocab_size > vocab_size:
            what = f"the tokenizer has {self.vocab_size} entries but model.vocab_size is {vocab_size}"
            raise DataError(Problem(what, "every token needs a row of the embedding", remedy, self.path))

    @cached_property
    def content_hash(self) -> str:
        """sha256 of what decides the ids, as the tokenizers library saves it and with sorted keys, and `-ids`. Moving,
        reformatting, re-saving or exporting the file changes nothing, nor do decoder and post-processor."""
        saved = orjson.loads(self._tokenizer.to_str())
        facts = {name: saved[name] for name in ("added_tokens", "normalizer", "pre_tokenizer", "model")}
        model, added = facts["model"], facts["added_tokens"]
        if facts["normalizer"] is None and all(token["normalized"] for token in added):
            facts["added_tokens"] = [{**token, "normalized": False} for token in added]  # nothing normalizes
        if model["type"] == "BPE":  # 0.0 and "" say the same as nothing
            model |= {name: model[name] or None for name in _NOTHING}
        if model["type"] == "Unigram":  # of 17 digits the library rounds the last one its own way
            model["vocab"] = [[token, float(f"{score:.12g}")] for token, score in model["vocab"]]
        encoded = orjson.dumps(facts, option=orjson.OPT_SORT_KEYS)
        return hashlib.sha256(_DECIDES_NO_ID.sub(b"", encoded)).hexdigest() + _OF_IDS

    def encode_batch(self, texts: Sequence[str], *, special_tokens_as_ids: bool = False) -> list[NDArray[np.int64]]:
        """Ids of the texts alone: nothing is added, and special tokens in a text are read as text by default. A text
        that merely contains '<|endoftext|>' must not end there."""
        self._tokenizer.encode_special_tokens = not special_tokens_as_ids
        encode = partial(self._tokenizer.encode_batch_fast, list(texts), add_special_tokens=False)
        encodings = in_time(encode, sum(map(len, texts)), self.path)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

    def decode(self, ids: Sequence[int] | NDArray[np.integer[Any]]) -> str:
        return str(self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=False))


def _vocab_size(tokenizer: Any) -> int:
    """Of one of the library. ValueError where ids are not unique, or so high that tables by id would fill memory."""
    ids = tokenizer.get_vocab().values()
    if len({*ids}) != len(ids) or (highest := max(ids, default=-1)) > HIGHEST_ID:
        raise ValueError(f"each token has an id of its own, from 0 to {HIGHEST_ID:,}")
    return int(highest) + 1


# ---------------------------------------------------------------- files, each as the text of a tokenizer.json


def _gpt2(path: str) -> str:
    from tokenizers import ByteLevelBPETokenizer

    folder = os.path.dirname(path)
    vocab = read_beside(folder, "vocab.json")
    lines = [line for line in _read(path).split("\n") if line.strip() and not line.startswith("#version")]
    prefix_space = bool(read_beside(folder, "tokenizer_config.json").get("add_prefix_space", False))
    try:
        pairs = [(first, second) for first, second in map(str.split, lines)]
        tokenizer = ByteLevelBPETokenizer(vocab, pairs, add_prefix_space=prefix_space)
        _vocab_size(tokenizer)  # the library takes all memory when it saves a vocabulary with a hole of billions of ids
    except (KeyboardInterrupt, MemoryError):
        raise
    except BaseException as error:  # the library raises bare Exception, and its panics are not even that
        rule = "a line is a pair of tokens of vocab.json"
        raise _broken(path, f"does not fit the vocab.json beside it: {error}", rule) from error
    if END_OF_DOCUMENT[0] in vocab:
        tokenizer.add_special_tokens([END_OF_DOCUMENT[0]])
    return str(tokenizer.to_str())


def _bert(path: str) -> str:
    from tokenizers import BertWordPieceTokenizer, decoders

    tokens = _read(path).removesuffix("\n").split("\n")
    vocab = {token.rstrip("\r"): number for number, token in enumerate(tokens)}
    if missing := [token for token in _BERT_SPECIAL if token not in vocab]:
        raise _broken(path, f"lacks {', '.join(missing)}", "BERT's vocabulary has one token a line, these among them")
    config = read_beside(os.path.dirname(path), "tokenizer_config.json")
    tokenizer = BertWordPieceTokenizer(
        vocab,
        handle_chinese_chars=bool(config.get("tokenize_chinese_chars", True)),
        strip_accents=accents if type(accents := config.get("strip_accents")) is bool else None,
        lowercase=bool(config.get("do_lower_case", True)),
    )
    tokenizer.decoder, tokenizer.post_processor = decoders.WordPiece(cleanup=False), None
    return str(tokenizer.to_str())


def read_settings(folder: str) -> dict[str, Any]:
    """What a folder says of its tokenizer beside tokenizer.json, as transformers reads it: the older
    special_tokens_map.json counts where the config lists no tokens. DataError for a file that is no JSON object."""
    config, older = read_beside(folder, "tokenizer_config.json"), read_beside(folder, "special_tokens_map.json")
    return config if "added_tokens_decoder" in config else {**config, **older}


def token_of(setting: Any) -> str | None:
    """The token of a setting such as `eos_token`, which may come with its flags; None where it names none."""
    text = setting.get("content") if isinstance(setting, dict) else setting
    return text if isinstance(text, str) else None


def read_beside(folder: str, name: str) -> dict[str, Any]:
    """The object in a JSON file of a tokenizer's folder; empty if there is no such file."""
    path = os.path.join(folder, name)
    if not os.path.exists(path):
        return {}
    try:
        return {**parse_json(_read(path))}
    except (ValueError, TypeError) as error:
        raise _broken(path, f"holds no JSON object: {error}", "") from error


def _read(path: str) -> str:
    try:
        return read_text(path, LARGE_BYTES, encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        rule = "a tokenizer is a folder with a Hugging Face tokenizer.json, GPT-2's vocab.json and merges.txt, or "
        rule += "BERT's vocab.txt"
        remedy = "correct tokenizer.path, or make one with `bloomery tokenizer train`"
        if os.path.isfile(given := os.path.dirname(path)):
            remedy = f"name its folder: {os.path.dirname(given) or '.'}"
        raise DataError(Problem(what, rule, remedy, path)) from error


def _broken(path: str, what: str, rule: str) -> DataError:
    return DataError(Problem(what, rule, "copy the file again from where the tokenizer came from", path))
