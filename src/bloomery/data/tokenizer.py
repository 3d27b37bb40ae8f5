"""A tokenizer as the rest of Bloomery sees it: text to ids, ids to text, one end-of-document id."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import orjson

from bloomery.base.errors import DataError, Problem
from bloomery.base.storage import make_run_folder, write_atomically
from bloomery.data.tokenizer_files import check_ids, misfit, read_tokenizer_json

if TYPE_CHECKING:  # slow to import; `bloomery prepare` begins to load an encoder before it does
    import numpy as np
    from numpy.typing import NDArray

END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
"""Special tokens that end a document, the most specific first."""
_BEGIN = ("<s>", "<|begin_of_text|>", "<bos>", "[CLS]")
_UNKNOWN = ("<unk>", "[UNK]")
_BERT = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]", "pad_token": "[PAD]"}


class Tokenizer:
    def __init__(self, content: str, *, path: str, lazy: bool = False, parsed: dict[str, Any] | None = None) -> None:
        """`content` is a tokenizer.json; `path` is only named in errors. `lazy`: the library builds it when it is
        first needed, which takes seconds for a large vocabulary. `parsed`: the content, if the caller has it."""
        self.path = path
        self.content = content
        if parsed is not None:
            self.parsed = parsed
        if not lazy:
            self.build()

    @classmethod
    def load(cls, path: str, *, lazy: bool = False) -> Tokenizer:
        """From a folder that holds a tokenizer.json, GPT-2's vocab.json and merges.txt, or BERT's vocab.txt."""
        file = read_tokenizer_json(path)
        return cls(file.content, path=file.path, lazy=lazy, parsed=file.parsed)

    def build(self) -> None:
        """What `lazy` had put off."""
        _ = self._tokenizer

    @cached_property
    def _tokenizer(self) -> Any:
        import tokenizers

        try:
            tokenizer = tokenizers.Tokenizer.from_str(self.content)
        except Exception as error:  # the library raises bare Exception
            raise misfit(self.path, self.parsed) or self._unreadable(error) from error
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

    def _unreadable(self, error: Exception) -> DataError:
        import tokenizers

        what = f"is not a tokenizer that the tokenizers library {tokenizers.__version__} can read: {error}"
        remedy = "train one with `bloomery tokenizer train`, or copy the file again"
        return DataError(Problem(what, remedy=remedy, place=self.path))

    @cached_property
    def vocab_size(self) -> int:
        """Rows an embedding needs: the highest id plus one, added tokens included."""
        vocab = self.parsed["model"]["vocab"]
        highest = max(vocab.values(), default=-1) if isinstance(vocab, dict) else len(vocab) - 1
        return int(max(highest, -1, *(token["id"] for token in self._added_tokens))) + 1

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        by_id = sorted(self._added_tokens, key=lambda token: token["id"])
        return {token["content"]: token["id"] for token in by_id if token["special"]}

    @property
    def unknown_id(self) -> int | None:
        """Of what the model has no token for; None where there is always one."""
        model = self.parsed["model"]
        vocab = model["vocab"]
        found = model.get("unk_id") if isinstance(vocab, list) else vocab.get(model.get("unk_token"))
        return found if isinstance(found, int) else None

    @property
    def _added_tokens(self) -> list[dict[str, Any]]:
        return list(self.parsed.get("added_tokens") or [])

    def special_id(self, token: str) -> int:
        """The id of a special token such as `[MASK]`; DataError where the tokenizer has none."""
        if token not in self.special_tokens:
            have = ", ".join(self.special_tokens) or "none"
            remedy = "use a tokenizer that was made for this family of models"
            raise DataError(Problem(f"has no {token}; its special tokens are {have}", "", remedy, self.path))
        return self.special_tokens[token]

    @property
    def cls_id(self) -> int:
        return self.special_id("[CLS]")

    @property
    def sep_id(self) -> int:
        return self.special_id("[SEP]")

    @property
    def mask_id(self) -> int:
        return self.special_id("[MASK]")

    @property
    def pad_id(self) -> int:
        return self.special_id("[PAD]")

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
        """sha256 of what decides the ids: moving, reformatting, re-saving or exporting the file changes nothing."""
        content = {key: value for key, value in self.parsed.items() if key not in ("truncation", "padding")}
        if content.get("post_processor") == self._pairs:  # our export's: only transformers applies it
            content["post_processor"] = None
        return hashlib.sha256(orjson.dumps(content, option=orjson.OPT_SORT_KEYS)).hexdigest()

    def encode_batch(self, texts: Sequence[str], *, special_tokens_as_ids: bool = False) -> list[NDArray[np.int64]]:
        """Ids of the texts alone: nothing is added, and special tokens in a text are read as text unless asked for."""
        import numpy as np

        ids = self.encode_lists(texts, special_tokens_as_ids=special_tokens_as_ids)
        return [np.array(one, dtype=np.int64) for one in ids]

    def encode_lists(self, texts: Sequence[str], *, special_tokens_as_ids: bool = False) -> list[list[int]]:
        """The same as plain lists, for a process that has no other use for numpy."""
        self._tokenizer.encode_special_tokens = not special_tokens_as_ids
        try:
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        finally:
            self._tokenizer.encode_special_tokens = True
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int] | NDArray[np.integer[Any]]) -> str:
        return str(self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=False))

    @property
    def _pairs(self) -> dict[str, Any] | None:
        """A post-processor that makes `[CLS] A [SEP] B [SEP]` with token types 0 and 1. Not the TemplateProcessing that
        BERT's own files have: the hash must tell the export's from a file of others."""
        special = self.special_tokens
        if not {"[CLS]", "[SEP]"} <= set(special):
            return None
        return {"type": "BertProcessing", "sep": ["[SEP]", special["[SEP]"]], "cls": ["[CLS]", special["[CLS]"]]}

    def save_hf_files(self, folder: str, *, model_max_length: int, pairs: bool = False) -> None:
        """What `transformers.AutoTokenizer.from_pretrained(folder)` needs. `pairs`: there it puts texts together as the
        samples of BERT are; a file that says how is left as it is."""
        content, inputs = self.content, {}
        if pairs:
            inputs = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
        if pairs and self.parsed.get("post_processor") is None and self._pairs is not None:
            content = json.dumps({**json.loads(content), "post_processor": self._pairs}, ensure_ascii=False, indent=2)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": self._first(_BEGIN),
            "eos_token": self.eod_token,
            "unk_token": self._first(_UNKNOWN),
            **{name: token for name, token in _BERT.items() if token in self.special_tokens},
            "model_max_length": model_max_length,
            "clean_up_tokenization_spaces": False,
            **inputs,
        }
        make_run_folder(folder)
        write_atomically(os.path.join(folder, "tokenizer.json"), content)
        write_atomically(os.path.join(folder, "tokenizer_config.json"), json.dumps(config, indent=2) + "\n")

    def _first(self, candidates: tuple[str, ...]) -> str:
        """As in GPT-2, the end-of-document token also plays the parts for which there is no token."""
        return next((token for token in candidates if token in self.special_tokens), self.eod_token)
