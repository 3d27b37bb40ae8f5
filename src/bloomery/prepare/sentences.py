"""Sentences of a text, by rules: no model, no download, no dependency.

A sentence ends at `.`, `!`, `?` or `…` (with closing quotes and brackets) before white space and anything but a
lower-case letter; at a full stop of another script, such as `。` or `।`; and at a line break, unless the next line
continues in lower case or the line ended in a comma or hyphen. A `.` ends nothing after an abbreviation, an initial or
the number of a list item.

Limits, known and accepted: abbreviations and months are those of English and a few of German, French and Spanish; an
ordinal such as `3. Platz` is split; a sentence that begins with a lower-case letter (`iPhone`) joins the one before;
text without punctuation, Thai for one, is one sentence a line; prose wrapped by hand is also cut where a wrapped line
happens to begin with a capital.
"""

# ruff: noqa: RUF001, SIM905  (signs of many scripts; lists of words that read as words)

import re

_CLOSERS = "\"'”’»)\\]}」』】》〉）］"
_OPENERS = "\"'“‘«(\\[{「『【《〈（［¿¡—–-"
_NEED_SPACE_AND_CAPITAL = ".!?…"
_NEED_SPACE = "।॥؟۔።։។။"
_NEED_NOTHING = "。！？｡．"
_STOPS = _NEED_SPACE_AND_CAPITAL + _NEED_SPACE + _NEED_NOTHING
# It begins with one set of characters, which `re` finds fast; possessive quantifiers keep the time linear in the text.
_BOUNDARY = re.compile(
    rf"[{_STOPS}\n](?:(?<!\n)(?P<more>[{_STOPS}]*+)[{_CLOSERS}]*+|\s*+)"
    rf"(?=(?P<space>\s*+)[{_OPENERS}]*+(?P<next>\w*+))"
)
_LIST_ITEM = re.compile(r"(\d{1,3}|[A-Za-z]|[ivxIVX]{1,5})([.\-]\d{1,3})*")
_BULLETS = " \t\n*#([>-•"
_INITIALS = re.compile(r"([^\W\d_]\.)*[^\W\d_]")
_LONGEST_WORD = 40

_NEVER_LAST = frozenset(
    "mr mrs ms mx dr drs prof st ste sr sra srta mme mlle messrs hon rev fr gen col maj capt cmdr lt sgt cpl pvt adm "
    "gov sen rep pres supt insp hrn hr fig figs eq eqs no nos nr núm vol vols pp cf vs viz e.g i.e z.b d.h u.a p.ex "
    "art sec ch ed eds trans approx ca bzw vgl ggf inkl dept univ assn mt ft pt ave blvd rd al op cit ibid".split()
)
"""Abbreviations that stand before the word they belong to."""
_MONTHS = frozenset(
    "jan feb mar apr jun jul aug sep sept oct nov dec okt dez januar februar märz april mai juni juli august september "
    "oktober november dezember".split()
)
_BEGINNERS = frozenset(
    "a after all also although an and another as at because before but by each even every few first for from he her "
    "here his how however i if in instead it its later many meanwhile more most my no not now of on once one only our "
    "since so some still such that the their then there these they this those though thus to today together two under "
    "until we what when where whether which while who why with yet you your".split()
)
"""Words that begin a sentence far more often than they follow an initial."""


def split_sentences(text: str) -> list[str]:
    """The sentences in their order, without white space around them; joined they are the text, up to white space."""
    sentences = []
    start = 0
    for match in _BOUNDARY.finditer(text):
        if _ends_here(text, start, match):
            if sentence := text[start : match.end()].strip():
                sentences.append(sentence)
            start = match.end()
    if sentence := text[start:].strip():
        sentences.append(sentence)
    return sentences


def _ends_here(text: str, start: int, match: re.Match[str]) -> bool:
    place = match.start()
    mark, more, following = text[place], match["more"], match["next"]
    if mark == "\n":
        line = text[max(start, place - _LONGEST_WORD) : place].rstrip()
        continues = line.endswith((",", ";", "-", "–", "—")) or following[:1].islower()
        return not continues or match[0].count("\n") > 1
    if more:
        mark = more[-1]
    if mark in _NEED_NOTHING:
        return True
    if mark in _NEED_SPACE:
        return bool(match["space"])
    if not match["space"] or following[:1].islower():
        return False
    return mark != "." or bool(more) or not _is_abbreviated(text, start, place, following)


def _is_abbreviated(text: str, start: int, place: int, following: str) -> bool:
    """Whether the `.` at `place` belongs to the word before it, and the sentence continues."""
    before = text[max(start, place - _LONGEST_WORD) : place]
    words = before.rsplit(None, 1)
    if not words:
        return False
    word = words[-1].lstrip(_OPENERS).lower()
    following = following.lower()
    if word.isdigit() and len(word) <= 2 and following in _MONTHS:
        return True
    if place - start < _LONGEST_WORD and _LIST_ITEM.fullmatch(word) and not before[: -len(word)].strip(_BULLETS):
        return True
    if word in _MONTHS:
        return following.isdigit()
    return word in _NEVER_LAST or (
        bool(_INITIALS.fullmatch(word)) and following not in _BEGINNERS and word not in ("a.m", "p.m")
    )
