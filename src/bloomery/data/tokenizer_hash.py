"""Whether the hash of a tokenizer that a checkpoint remembers is still that of another one."""

from __future__ import annotations

OF_IDS = "-ids"
"""What hashes end with since they cover what decides ids and nothing else."""


def is_other_tokenizer(remembered: str | None, now: str | None) -> bool:
    """A hash of an earlier version, or none, tells nothing."""
    return remembered is not None and now is not None and remembered != now and remembered.endswith(OF_IDS)
