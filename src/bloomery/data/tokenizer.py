"""A Hugging Face `tokenizer.json` as the rest of Bloomery sees it: text to ids, ids to text, one end-of-document id."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from bloomery.base.errors import DataError, Problem
from bloomery.base.storage import make_run_folder, write_atomically

END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
"""Special tokens that end a document, the most specific first."""
_BEGIN = ("<s>", "<|begin_of_text|>", "<bos>", "[CLS]")
_UNKNOWN = ("<unk>", "[UNK]")


class Tokenizer:
    def __init__(self, content: str, *, path: str) -> None:
        """`content` is a tokenizer.json; `path` is only named in errors."""
        self.path = path
        self._content = content
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_str(content)
        except Exception as error:  # the library raises bare Exception
            raise DataError(
                Problem(
                    what=f"is not a tokenizer that the tokenizers library {tokenizers.__version__} can read: {error}",
                    remedy="train one with `bloomery tokenizer train`, or copy the file again",
                    place=path,
                )
            ) from error
        # A document that merely contains the text '<|endoftext|>' must not end there.
        self._tokenizer.encode_special_tokens = True
        # Files saved by others may carry these; they would silently drop or invent tokens.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    @classmethod
    def load(cls, path: str) -> Tokenizer:
        """From a folder that holds a tokenizer.json."""
        file_path = os.path.join(path, "tokenizer.json")
        try:
            with open(file_path, encoding="utf-8") as file:
                content = file.read()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                Problem(
                    what=f"cannot be read: {getattr(error, 'strerror', None) or error}",
                    rule="a tokenizer is a folder with a Hugging Face tokenizer.json",
                    remedy="correct tokenizer.path, or make one with `bloomery tokenizer train`",
                    place=file_path,
                )
            ) from error
        return cls(content, path=file_path)

    @cached_property
    def vocab_size(self) -> int:
        """Rows an embedding needs: the highest id plus one, added tokens included."""
        return int(max(self._tokenizer.get_vocab(with_added_tokens=True).values())) + 1

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in sorted(added.items()) if token.special}

    @property
    def eod_token(self) -> str:
        for token in END_OF_DOCUMENT:
            if token in self.special_tokens:
                return token
        raise DataError(
            Problem(
                what=f"has no end-of-document token; its special tokens are {', '.join(self.special_tokens) or 'none'}",
                rule=f"one of {', '.join(END_OF_DOCUMENT)} must be an added special token",
                remedy="add one to the tokenizer, or set append_eod: false",
                place=self.path,
            )
        )

    @property
    def eod_id(self) -> int:
        return self.special_tokens[self.eod_token]

    @cached_property
    def content_hash(self) -> str:
        """sha256 of what decides the ids: moving, reformatting or re-saving the file changes nothing."""
        content = {
            key: value for key, value in json.loads(self._content).items() if key not in ("truncation", "padding")
        }
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """Ids of the texts alone: nothing is added, and special tokens in a text are read as text."""
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

    def decode(self, ids: Sequence[int] | NDArray[np.integer[Any]]) -> str:
        return str(self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=False))

    def save_hf_files(self, folder: str, *, model_max_length: int) -> None:
        """What `transformers.AutoTokenizer.from_pretrained(folder)` needs."""
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": self._first(_BEGIN),
            "eos_token": self.eod_token,
            "unk_token": self._first(_UNKNOWN),
            "model_max_length": model_max_length,
            "clean_up_tokenization_spaces": False,
        }
        make_run_folder(folder)
        write_atomically(os.path.join(folder, "tokenizer.json"), self._content)
        write_atomically(os.path.join(folder, "tokenizer_config.json"), json.dumps(config, indent=2) + "\n")

    def _first(self, candidates: tuple[str, ...]) -> str:
        """As in GPT-2, the end-of-document token also plays the parts for which there is no token."""
        return next((token for token in candidates if token in self.special_tokens), self.eod_token)
