"""The libraries that encode fast. They need not be installed, and may differ from Hugging Face's: see encoder.py.

Nothing slow is imported with this file: loading a vocabulary begins while the rest of the command is being imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson

from bloomery.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Fastokens:
    def __init__(self, tokenizer: Tokenizer, as_ids: bool) -> None:
        import fastokens  # type: ignore[import-untyped]

        self._tokenizer = fastokens.Tokenizer.from_json_str(_quick_to_read(tokenizer))
        self._as_text = not as_ids

    def encode(self, texts: list[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        import numpy as np

        ids, offsets = self._tokenizer.encode_batch_flat(texts, split_special_tokens=self._as_text)
        return np.frombuffer(ids, "<u4"), np.diff(np.frombuffer(offsets, "<u8")).astype(np.int64)


class Gigatoken:
    def __init__(self, tokenizer: Tokenizer, as_ids: bool) -> None:
        import gigatoken

        self._tokenizer = gigatoken.Tokenizer.from_json(_without_limits(tokenizer, special=as_ids))

    def encode(self, texts: list[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        import numpy as np

        layout = self._tokenizer.encode_batch(texts, parallel=False).layout
        offsets = np.asarray(layout.offsets.data)
        return np.asarray(layout.content.data)[offsets[0] : offsets[-1]], np.diff(offsets)


def _quick_to_read(tokenizer: Tokenizer) -> str:
    """The tokenizer.json without truncation and padding, each merge as one string: fastokens reads that faster than
    pairs. A token with a space in it needs the pairs."""
    model = tokenizer.parsed["model"]
    merges = model.get("merges") or []
    if not merges or isinstance(merges[0], str) or " " in "".join(model["vocab"]):
        return _without_limits(tokenizer)
    content = {**tokenizer.parsed, "truncation": None, "padding": None}
    return orjson.dumps(content | {"model": {**model, "merges": list(map(" ".join, merges))}}).decode()


def _without_limits(tokenizer: Tokenizer, *, special: bool = True) -> str:
    """The tokenizer.json without truncation and padding and, if asked, without its special tokens."""
    content = dict(tokenizer.parsed)
    added = content.get("added_tokens") or []
    if special and not content.get("truncation") and not content.get("padding"):
        return tokenizer.content
    content |= {"truncation": None, "padding": None}
    content["added_tokens"] = added if special else [token for token in added if not token["special"]]
    return orjson.dumps(content).decode()
