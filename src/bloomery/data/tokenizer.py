"""A tokenizer as the rest of Bloomery sees it: text to ids, ids to text, one end-of-document id; and the files it comes
in."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import orjson
from numpy.typing import NDArray

from bloomery.base.bounded import LARGE_BYTES, in_background, open_regular, read_json
from bloomery.base.doing import doing
from bloomery.base.errors import DataError, Problem, StorageError
from bloomery.base.hub import local_folder
from bloomery.base.storage import write_atomically
from bloomery.data.tokenizer_files import as_tokenizer_json, read_settings, token_of, tokenizer_file, vocab_size_of

T = TypeVar("T")
END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
"""Special tokens that end a document, the most specific first; without any of them, the folder's `eos_token` does. Not
that one first: a chat tokenizer's ends a turn, `<|im_end|>`, where `<|endoftext|>` ends documents."""
_OF_IDS = "-ids"
"""What hashes end with since they cover what decides ids and nothing else."""
_NOTHING = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
_DECIDES_NO_ID = re.compile(rb'"trim_offsets":(true|false),')
LEAST_SECONDS, LEAST_CHARACTERS_PER_SECOND = 60.0, 20_000
"""How long a library may take for a text: far longer than any does, unless a pattern of the tokenizer backtracks."""


_REMEMBERED = ("vocab_size", "special_tokens", "content_hash")
_LARGE_BYTES = 1 << 20
"""A file of one is read in a second or more; those of 200,000 entries take four."""


def _memory_of(file: str) -> Path | None:
    """Where the facts of a large tokenizer are, by the content of its one file; None for others."""
    if not file.endswith((".tiktoken", "tokenizer.json")):
        return None
    import tokenizers

    with suppress(OSError), open(file, "rb", opener=open_regular) as content:
        if not _LARGE_BYTES <= os.path.getsize(file) <= LARGE_BYTES:
            return None
        found = hashlib.file_digest(content, "sha256").hexdigest()
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return cache / "bloomery" / f"tokenizer-{found}-{tokenizers.__version__}-{os.path.basename(file)[:5]}.json"
    return None


def _remembered(memory: Path) -> dict[str, Any] | None:
    with suppress(OSError, ValueError, TypeError, KeyError):
        facts = dict(read_json(memory, LARGE_BYTES))
        if [type(facts[name]) for name in _REMEMBERED] == [int, dict, str]:
            return {name: facts[name] for name in _REMEMBERED}
    return None


def is_other_tokenizer(remembered: str, now: str) -> bool:
    """Whether a hash that a checkpoint remembers is of another tokenizer; one of an earlier version tells nothing."""
    return remembered != now and remembered.endswith(_OF_IDS)


def in_time(work: Callable[[], T], characters: int, place: str) -> T:
    """What `work`, a call of a library that encodes, returns. DataError if it fails or takes too long: a
    thread cannot be ended, so it is left to itself then."""

    def run() -> T:
        try:
            return work()
        except MemoryError:
            raise
        except BaseException as error:  # a panic of Rust is no Exception
            raise RuntimeError(str(error)) from error

    seconds = LEAST_SECONDS + characters / LEAST_CHARACTERS_PER_SECOND
    try:
        return in_background(run).result(seconds)
    except (RuntimeError, TimeoutError) as error:
        late = f"has not done {characters:,} characters in {seconds:,.0f} s"
        what = late if isinstance(error, TimeoutError) else f"fails at a text: {error}"
        remedy = "look at its normalizer and pre_tokenizer, or use another tokenizer"
        raise DataError(Problem(what, "a pattern in it may need exponential time", remedy, place)) from error


class Tokenizer:
    vocab_size: int
    """Rows an embedding needs: the highest id plus one, added tokens included."""

    def __init__(self, content: str, *, path: str) -> None:
        """`content` is a tokenizer.json; `path` the file it was read from. DataError where it is none."""
        self.path, self.content = path, content
        _ = self._tokenizer  # read now, so that its errors come now

    @classmethod
    def load(cls, path: str) -> Tokenizer:
        """From its folder, its file, or the Hub (`hf://org/name`). Of a large one that this machine has read before,
        what a training asks is remembered; the vocabulary is read when a text is."""
        path = local_folder(path)
        file = tokenizer_file(path) or os.path.join(path, "tokenizer.json")
        memory = _memory_of(file)
        if memory is not None and (known := _remembered(memory)) is not None:
            tokenizer = cls.__new__(cls)
            vars(tokenizer).update(known, path=file)
            return tokenizer
        with doing(f"reading {file}"):
            tokenizer = cls(as_tokenizer_json(file), path=file)
            if memory is not None:
                facts = {name: getattr(tokenizer, name) for name in _REMEMBERED}
                with suppress(OSError, StorageError):  # a home that cannot be written
                    memory.parent.mkdir(parents=True, exist_ok=True)
                    write_atomically(memory, orjson.dumps(facts).decode())
        return tokenizer

    @cached_property
    def content(self) -> str:
        """That of a tokenizer.json."""
        return as_tokenizer_json(self.path)

    @cached_property
    def parsed(self) -> dict[str, Any]:
        """The content of the tokenizer.json; not to be changed."""
        parsed: dict[str, Any] = orjson.loads(self.content)
        return parsed

    @cached_property
    def _tokenizer(self) -> Any:
        import tokenizers

        with doing(f"reading {self.path}"):
            try:
                tokenizer = tokenizers.Tokenizer.from_str(self.content)
                self.vocab_size = vocab_size_of(tokenizer)
            except (KeyboardInterrupt, MemoryError):
                raise
            except BaseException as error:  # the library raises bare Exception, and its panics are not even that
                what = f"is not a tokenizer that the tokenizers library {tokenizers.__version__} can read: {error}"
                remedy = "train one with `bloomery tokenizer train`, or copy the file again"
                raise DataError(Problem(what, remedy=remedy, place=self.path)) from error
        # Files saved by others may carry these; they would silently drop or invent tokens.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

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
