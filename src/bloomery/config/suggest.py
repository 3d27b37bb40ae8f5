"""Did you mean ...? For fields, words and recipe names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from bloomery.config.schema import all_paths, fields_at

_MOST_SUGGESTIONS = 3


def closest(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known word that looks most like this one; capitals and dashes do not count."""
    plain = {option.lower().replace("-", "_"): option for option in known}
    found = difflib.get_close_matches(word.lower().replace("-", "_"), plain, n=1, cutoff=cutoff)
    return plain[found[0]] if found else None


def meant_paths(path: Sequence[str]) -> list[str]:
    """Dotted paths that the writer of this unknown field may have meant; the likeliest first, at most three."""
    around, name = list(path[:-1]), path[-1]
    known = all_paths()
    if name in known:  # `batch.micro_batch_size: 4` as one key
        return [name]
    elsewhere = [other for other in known if other.rpartition(".")[2] == name]
    if elsewhere:
        in_same_section = [other for other in elsewhere if around and other.split(".")[0] == around[0]]
        return (in_same_section or elsewhere)[:_MOST_SUGGESTIONS]
    if sibling := closest(name, fields_at(around)):
        return [".".join([*around, sibling])]
    similar = closest(name, {other.rpartition(".")[2] for other in known}, cutoff=0.8)
    return [other for other in known if other.rpartition(".")[2] == similar][:_MOST_SUGGESTIONS]
