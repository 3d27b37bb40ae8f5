"""A tokenizer as the rest of Bloomery sees it: text to ids, ids to text, one end-of-document id; and the files it comes
in."""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Callable, Collection, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

import orjson

from bloomery.base.bounded import LARGE_BYTES, check_depth, read_text
from bloomery.base.errors import DataError, Problem

if TYPE_CHECKING:  # slow to import; `bloomery prepare` begins to load an encoder before it does
    import numpy as np
    from numpy.typing import NDArray

T = TypeVar("T")
FILES = ("tokenizer.json", "merges.txt", "vocab.txt")
"""A folder with one of them holds a tokenizer; the first counts."""
HIGHEST_ID = (1 << 24) - 1
_OWN_ID = f"each token has an id of its own, from 0 to {HIGHEST_ID:,}"
_BERT_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
"""Special tokens that end a document, the most specific first; without any of them, the folder's `eos_token` does. Not
that one first: a chat tokenizer's ends a turn, `<|im_end|>`, where `<|endoftext|>` ends documents."""
OF_IDS = "-ids"
"""What hashes end with since they cover what decides ids and nothing else."""
_NOTHING = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
_DECIDES_NO_ID = re.compile(rb'"trim_offsets":(true|false),')
LEAST_SECONDS, LEAST_CHARACTERS_PER_SECOND = 60.0, 20_000
"""How long a library may take for a text: far longer than any does, unless a pattern of the tokenizer backtracks."""


def is_other_tokenizer(remembered: str | None, now: str | None) -> bool:
    """Whether a hash that a checkpoint remembers is of another tokenizer; one of an earlier version decides nothing."""
    return remembered is not None and now is not None and remembered != now and remembered.endswith(OF_IDS)


def in_time(work: Callable[[], T], characters: int, place: str) -> T:
    """What `work`, a call of a library that encodes or decodes, returns. DataError if it fails or takes too long: a
    thread cannot be ended, so it is left to itself then."""
    done: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:  # a panic of Rust is no Exception
            errors.append(error)

    thread = threading.Thread(target=run, name="bloomery-tokenize", daemon=True)
    thread.start()
    seconds = LEAST_SECONDS + characters / LEAST_CHARACTERS_PER_SECOND
    thread.join(seconds)
    if done:
        return done[0]
    if errors and isinstance(errors[0], MemoryError):
        raise errors[0]
    why = f"fails at a text: {errors[0]}" if errors else f"has not done {characters:,} characters in {seconds:,.0f} s"
    rule = "a pattern in it may need exponential time"
    remedy = "look at its normalizer and pre_tokenizer, or use another tokenizer"
    raise DataError(Problem(why, rule, remedy, place)) from (errors[0] if errors else None)


class Tokenizer:
    def __init__(self, content: str, *, path: str, lazy: bool = False) -> None:
        """`content` is a tokenizer.json; `path` the file it was read from. `lazy`: the library builds it when it is
        first needed, which takes seconds for a large vocabulary."""
        self.path = path
        self.content = content
        if not lazy:
            self.build()

    @classmethod
    def load(cls, path: str, *, lazy: bool = False) -> Tokenizer:
        """From a folder that holds a tokenizer.json, GPT-2's vocab.json and merges.txt, or BERT's vocab.txt."""
        file, content = read_tokenizer_json(path)
        return cls(content, path=file, lazy=lazy)

    def build(self) -> None:
        """What `lazy` had put off."""
        _ = self._tokenizer

    @cached_property
    def _tokenizer(self) -> Any:
        import tokenizers

        _ = self.parsed  # checked before the library sees it
        try:
            tokenizer = tokenizers.Tokenizer.from_str(self.content)
        except (KeyboardInterrupt, MemoryError):
            raise
        except BaseException as error:  # the library raises bare Exception, and its panics are not even that
            raise self._unreadable(error) from error
        # A document that merely contains the text '<|endoftext|>' must not end there.
        tokenizer.encode_special_tokens = True
        # Files saved by others may carry these; they would silently drop or invent tokens.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    @cached_property
    def parsed(self) -> dict[str, Any]:
        """The content of the tokenizer.json; not to be changed."""
        try:
            parsed = orjson.loads(self.content)
            check_ids(parsed)
        except (ValueError, KeyError, TypeError) as error:
            raise self._unreadable(error) from error
        return dict(parsed)

    def _unreadable(self, error: BaseException) -> DataError:
        import tokenizers

        what = f"is not a tokenizer that the tokenizers library {tokenizers.__version__} can read: {error}"
        remedy = "train one with `bloomery tokenizer train`, or copy the file again"
        return DataError(Problem(what, remedy=remedy, place=self.path))

    @cached_property
    def vocab_size(self) -> int:
        """Rows an embedding needs: the highest id plus one, added tokens included."""
        vocab = self.parsed["model"]["vocab"]
        highest = max(vocab.values(), default=-1) if isinstance(vocab, dict) else len(vocab) - 1
        return int(max(highest, -1, *(token["id"] for token in self.added_tokens))) + 1

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        by_id = sorted(self.added_tokens, key=lambda token: token["id"])
        return {token["content"]: token["id"] for token in by_id if token["special"]}

    @property
    def unknown_id(self) -> int | None:
        """Of what the model has no token for; None where there is always one."""
        model = self.parsed["model"]
        vocab = model["vocab"]
        found = model.get("unk_id") if isinstance(vocab, list) else vocab.get(model.get("unk_token"))
        return found if isinstance(found, int) else None

    @property
    def added_tokens(self) -> list[dict[str, Any]]:
        """Those that are looked for in a text before the model sees it: content, id, special and other flags."""
        return list(self.parsed.get("added_tokens") or [])

    def special_id(self, token: str) -> int:
        """The id of a special token such as `[MASK]`; DataError where the tokenizer has none."""
        if token not in self.special_tokens:
            have = ", ".join(self.special_tokens) or "none"
            remedy = "use a tokenizer that was made for this family of models"
            raise DataError(Problem(f"has no {token}; its special tokens are {have}", "", remedy, self.path))
        return self.special_tokens[token]

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
        raise DataError(
            Problem(
                what=f"has no end-of-document token; its special tokens are {', '.join(self.special_tokens) or 'none'}",
                rule=f"one of {', '.join(END_OF_DOCUMENT)}, or else the eos_token of tokenizer_config.json beside it, "
                "must be an added special token",
                remedy="name one of its special tokens there as eos_token, or set append_eod: false",
                place=self.path,
            )
        )

    @property
    def eod_id(self) -> int:
        return self.special_tokens[self.eod_token]

    @cached_property
    def content_hash(self) -> str:
        """sha256 of what decides the ids, as the tokenizers library saves it and with sorted keys, and `-ids`. Moving,
        reformatting, re-saving or exporting the file changes nothing, nor do decoder and post-processor."""
        saved = orjson.loads(self._tokenizer.to_str())
        facts = {name: saved[name] for name in ("added_tokens", "normalizer", "pre_tokenizer", "model")}
        model, added = facts["model"], facts["added_tokens"]
        if facts["normalizer"] is None and all(token["normalized"] for token in added):
            facts["added_tokens"] = [
                {**token, "normalized": False} for token in added
            ]  # there is nothing to look behind
        if model["type"] == "BPE":  # 0.0 and "" say the same as nothing
            model |= {name: model[name] or None for name in _NOTHING}
        if model["type"] == "Unigram":  # of 17 digits the library rounds the last one its own way
            model["vocab"] = [[token, float(f"{score:.12g}")] for token, score in model["vocab"]]
        encoded = orjson.dumps(facts, option=orjson.OPT_SORT_KEYS)
        return hashlib.sha256(_DECIDES_NO_ID.sub(b"", encoded)).hexdigest() + OF_IDS

    def encode_batch(self, texts: Sequence[str], *, special_tokens_as_ids: bool = False) -> list[NDArray[np.int64]]:
        """Ids of the texts alone: nothing is added, and special tokens in a text are read as text by default."""
        import numpy as np

        ids = self.encode_lists(texts, special_tokens_as_ids=special_tokens_as_ids)
        return [np.array(one, dtype=np.int64) for one in ids]

    def encode_lists(self, texts: Sequence[str], *, special_tokens_as_ids: bool = False) -> list[list[int]]:
        """The same as plain lists, for a process that has no other use for numpy."""
        self._tokenizer.encode_special_tokens = not special_tokens_as_ids
        try:
            encode = partial(self._tokenizer.encode_batch_fast, list(texts), add_special_tokens=False)
            encodings = in_time(encode, sum(map(len, texts)), self.path)
        finally:
            self._tokenizer.encode_special_tokens = True
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int] | NDArray[np.integer[Any]]) -> str:
        decode = partial(self._tokenizer.decode, [int(token) for token in ids], skip_special_tokens=False)
        return str(in_time(decode, len(ids), self.path))

    @property
    def pairs(self) -> dict[str, Any] | None:
        """A post-processor that makes `[CLS] A [SEP] B [SEP]` with token types 0 and 1."""
        special = self.special_tokens
        if not {"[CLS]", "[SEP]"} <= set(special):
            return None
        return {"type": "BertProcessing", "sep": ["[SEP]", special["[SEP]"]], "cls": ["[CLS]", special["[CLS]"]]}


# ---------------------------------------------------------------- files, each as the text of a tokenizer.json


def read_tokenizer_json(folder: str) -> tuple[str, str]:
    """(the file that a folder's tokenizer was read from, its tokenizer.json). DataError where it holds none."""
    if not os.path.exists(json_file := os.path.join(folder, "tokenizer.json")):
        if os.path.exists(merges := os.path.join(folder, "merges.txt")):
            return merges, _gpt2(folder)
        if os.path.exists(vocab := os.path.join(folder, "vocab.txt")):
            return vocab, _bert(folder)
    return json_file, _read(json_file)


def _read(path: str) -> str:
    try:
        return read_text(path, LARGE_BYTES, encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            Problem(
                what=f"cannot be read: {getattr(error, 'strerror', None) or error}",
                rule="a tokenizer is a folder with a Hugging Face tokenizer.json, GPT-2's vocab.json and merges.txt, "
                "or BERT's vocab.txt",
                remedy="correct tokenizer.path, or make one with `bloomery tokenizer train`",
                place=path,
            )
        ) from error


def _gpt2(folder: str) -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    vocab_path, path = os.path.join(folder, "vocab.json"), os.path.join(folder, "merges.txt")
    vocab = _json(vocab_path)
    if not _are_ids(vocab.values()):
        raise _broken(vocab_path, "gives a token no id, or two tokens the same", _OWN_ID)
    lines = [line.split() for line in _read(path).split("\n") if line.strip() and not line.startswith("#version")]
    if wrong := next((line for line in lines if len(line) != 2), None):
        raise _broken(path, f"has the line {' '.join(wrong)!r}", "each line is a pair of tokens")
    try:
        tokenizer = Tokenizer(models.BPE(vocab, [(first, second) for first, second in lines]))
    except Exception as error:  # the library raises nothing more specific
        raise _broken(path, f"does not fit {vocab_path}: {error}", "both come from one training") from error
    prefix_space = bool(read_beside(folder, "tokenizer_config.json").get("add_prefix_space", False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    if END_OF_DOCUMENT[0] in vocab:
        tokenizer.add_special_tokens([END_OF_DOCUMENT[0]])
    return str(tokenizer.to_str())


def _are_ids(numbers: Collection[Any]) -> bool:
    """Whether each token has one of its own, and none is so high that tables by id would not fit into memory."""
    is_number = {*map(type, numbers)} <= {int} and 0 <= min(numbers, default=0) <= max(numbers, default=0) <= HIGHEST_ID
    return is_number and len({*numbers}) == len(numbers)


def check_ids(parsed: Any) -> None:
    """Of what is read here before the library has looked at it: KeyError, TypeError or ValueError where it makes no
    sense."""
    check_depth(parsed)
    vocab = parsed["model"]["vocab"]
    if not isinstance(vocab, dict | list):
        raise TypeError("its vocabulary is no mapping")
    if isinstance(vocab, dict) and not _are_ids(vocab.values()):
        raise TypeError(f"its vocabulary has a token whose id is no number of its own: {_OWN_ID}")
    if isinstance(prefix := parsed["model"].get("continuing_subword_prefix"), str) and prefix:
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in parsed["model"].get("merges") or []]
        if any(len(pair) != 2 or not str(pair[1]).startswith(prefix) for pair in pairs):  # the library would abort
            raise ValueError(f"its merges have a token that does not begin with its prefix {prefix!r:.60}")
    kinds = {"id": int, "content": str, "special": bool}
    for token in parsed.get("added_tokens") or []:
        if not isinstance(token, dict) or any(type(token.get(name)) is not kind for name, kind in kinds.items()):
            raise TypeError(f"its added token {token!r:.60} lacks an id, its content or whether it is special")
        if not _are_ids([token["id"]]):
            raise TypeError(f"its added token {token!r:.60} has no id: {_OWN_ID}")


def _bert(folder: str) -> str:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    path = os.path.join(folder, "vocab.txt")
    tokens = _read(path).removesuffix("\n").split("\n")
    vocab = {token.rstrip("\r"): number for number, token in enumerate(tokens)}
    missing = [token for token in _BERT_SPECIAL if token not in vocab]
    if missing:
        raise _broken(path, f"lacks {', '.join(missing)}", "BERT's vocabulary has one token a line, these among them")
    config = read_beside(folder, "tokenizer_config.json")
    lower = bool(config.get("do_lower_case", True))
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=bool(config.get("tokenize_chinese_chars", True)),
        strip_accents=accents if type(accents := config.get("strip_accents")) is bool else None,
        lowercase=lower,
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    tokenizer.add_special_tokens(list(_BERT_SPECIAL))
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
    return _json(path) if os.path.exists(path) else {}


def _json(path: str) -> dict[str, Any]:
    try:
        content = orjson.loads(_read(path))
        check_depth(content)
    except ValueError as error:
        raise _broken(path, f"is not JSON: {error}", "it is a JSON object") from error
    if not isinstance(content, dict):
        raise _broken(path, "holds no object", "it is a JSON object")
    return content


def _broken(path: str, what: str, rule: str) -> DataError:
    return DataError(Problem(what, rule, "copy the file again from where the tokenizer came from", path))
