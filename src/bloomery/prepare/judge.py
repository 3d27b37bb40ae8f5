"""Hugging Face's tokenizer, whose ids are the right ones, in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bloomery.data.tokenizer import Tokenizer
from bloomery.prepare.pool import Child

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Judge:
    """Loading it costs no time here."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        def encode(texts: list[str], _report: object) -> list[list[int]]:
            return tokenizer.encode_lists(texts, special_tokens_as_ids=as_ids)

        self.child = Child(encode, first=tokenizer.build)

    def encode(self, texts: list[str]) -> list[list[int]]:
        self.child.ask(texts)
        answer: list[list[int]] = self.child.answer()
        return answer

    def first_difference(self, texts: list[str], ids: list[NDArray[np.uint32]]) -> str:
        """Empty where these are the ids of these texts."""
        return difference(self.encode(texts), texts, ids)

    def close(self) -> None:
        self.child.leave()


def difference(expected: list[list[int]], texts: Sequence[str], ids: Sequence[NDArray[np.uint32]]) -> str:
    """Empty where there is none."""
    import numpy as np

    for text, right, found in zip(texts, expected, ids, strict=True):
        if not np.array_equal(right, found):
            return f"it gives other ids for {text!r:.60}"
    return ""
