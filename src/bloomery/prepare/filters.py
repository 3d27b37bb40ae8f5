"""What is known of a text before it is encoded: its language, and what it shares with texts that are nearly the same.

Near duplicates are found by MinHash and locality-sensitive hashing: the 112 smallest hashes of a text's runs of five
words are cut into bands. Two texts of Jaccard similarity s agree in one of b bands of r hashes with probability
1 - (1 - s^r)^b, a curve that is steepest around (1/b)^(1/r).
"""

import re
from collections.abc import Collection, Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from bloomery.base.errors import DataError, Problem

_HASHES = 112
_LANGUAGE_CHARACTERS = 2000
_CJK = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_CJK}]|[^\W{_CJK}]+")
"""Where words have no space between them, a character counts as one."""


def require(*, languages: Collection[str], similarity: float | None) -> None:
    """Load what these filters need, before workers are forked. DataError where it is not installed or unknown."""
    try:
        if similarity is not None:
            import rensa  # type: ignore[import-untyped]  # noqa: F401
        if languages:
            import py3langid  # type: ignore[import-untyped]

            known = {language for language, _ in py3langid.rank("")}
            if unknown := sorted(set(languages) - known):
                rule = f"languages are {', '.join(sorted(known))}"
                raise DataError(Problem(f"languages has {', '.join(unknown)}", rule, "correct prepare.languages"))
    except ImportError as error:
        remedy = "run `pip install 'bloomery[filters]'`"
        raise DataError(Problem(f"a filter of prepare needs a package: {error}", remedy=remedy)) from error


def language_of(text: str) -> str:
    """By its first 2,000 characters."""
    import py3langid

    return str(py3langid.classify(text[:_LANGUAGE_CHARACTERS])[0])


def band_shape(similarity: float) -> tuple[int, int]:
    """(bands, hashes in each), whose curve is steepest nearest to this similarity."""
    rows = min(range(1, _HASHES // 2 + 1), key=lambda rows: abs((_HASHES // rows) ** (-1 / rows) - similarity))
    return _HASHES // rows, rows


def bands_of(texts: Sequence[str], similarity: float) -> NDArray[np.uint64]:
    """A hash of each band of each text."""
    import rensa

    count, rows = band_shape(similarity)
    found = np.empty((len(texts), count), np.uint64)
    for number, text in enumerate(texts):
        words, sketch = _WORD.findall(text.lower()), rensa.RMinHash(num_perm=_HASHES, seed=1)
        runs = map(" ".join, zip(*(words[first:] for first in range(5)), strict=False))
        sketch.update(runs if len(words) > 4 else [" ".join(words) or text])
        hashes = np.array(sketch.digest(), "<u4").tobytes()
        found[number] = [
            xxhash.xxh3_64_intdigest(hashes[band * 4 * rows : (band + 1) * 4 * rows]) for band in range(count)
        ]
    return found
