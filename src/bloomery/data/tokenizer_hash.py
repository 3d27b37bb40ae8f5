"""What hashes of tokenizers tell: whether ids that somebody wrote down still mean the same."""

from __future__ import annotations

OF_IDS = "-ids"
"""What hashes end with since they cover what decides ids and nothing else."""


def is_comparable(content_hash: str) -> bool:
    """False for a hash of an earlier version."""
    return content_hash.endswith(OF_IDS)


def is_other_tokenizer(one: str | None, other: str | None) -> bool:
    """Whether these are of two tokenizers. One that is not known tells nothing, nor one of before beside one of now."""
    if one is None or other is None:
        return False
    return one != other and is_comparable(one) == is_comparable(other)
