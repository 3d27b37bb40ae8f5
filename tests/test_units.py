"""Amounts and durations as people write them, and the messages for those they should not."""

from __future__ import annotations

import pytest

from bloomery.base.errors import Problem
from bloomery.base.units import (
    Amount,
    Duration,
    format_bytes,
    format_count,
    format_seconds,
    parse_amount,
    parse_duration,
)


@pytest.mark.parametrize(
    ("text", "count", "unit"),
    [
        ("216_320 samples", 216_320, "samples"),
        ("2000 steps", 2000, "steps"),
        ("300B tokens", 300_000_000_000, "tokens"),
        ("1 step", 1, "steps"),
        ("1 sample", 1, "samples"),
        ("1token", 1, "tokens"),
        ("1.5k steps", 1500, "steps"),
        ("1.5M samples", 1_500_000, "samples"),
        ("2.5T tokens", 2_500_000_000_000, "tokens"),
        ("3G tokens", 3_000_000_000, "tokens"),
        ("126,953,125 samples", 126_953_125, "samples"),
        ("0.1M samples", 100_000, "samples"),
        ("0 steps", 0, "steps"),
        ("1e6 tokens", 1_000_000, "tokens"),
        ("2.5E3 steps", 2500, "steps"),
        ("  10   steps  ", 10, "steps"),
    ],
)
def test_amounts_are_read_as_people_say_them(text: str, count: int, unit: str) -> None:
    assert parse_amount(text) == Amount(count, unit)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    ["", " ", "steps", "10", "-5 steps", "+5 steps", "1e999 steps", "10 epochs", "10 stps", "1,5M tokens", "1,00 steps",
     "1__0 steps", "1_ steps", "_1 steps", ".5k steps", "1.k steps", "5 b tokens", "٣ steps", "10 steps x", "10\tx"],
)  # fmt: skip
def test_anything_else_is_told_how_an_amount_is_written(text: str) -> None:
    with pytest.raises(ValueError, match="an amount is a number and a unit, such as '2000 steps'"):
        parse_amount(text)


def test_a_fraction_of_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'1\.5 steps' is not a whole number of steps"):
        parse_amount("1.5 steps")


def test_an_amount_in_the_wrong_unit_names_the_right_ones() -> None:
    with pytest.raises(ValueError, match="must be counted in steps, such as '2000 steps'"):
        parse_amount("10 tokens", units=("steps",))


@pytest.mark.parametrize("text", ["9" * 30 + " steps", "9" * 5000 + " steps", "2000000T tokens"])
def test_an_absurd_amount_is_refused_instead_of_rounded(text: str) -> None:
    with pytest.raises(ValueError, match="at most 1,000,000,000,000,000,000"):
        parse_amount(text)


@pytest.mark.parametrize("text", ["7 steps", "216320 samples", "300000000000 tokens"])
def test_an_amount_is_written_as_it_is_read(text: str) -> None:
    assert str(parse_amount(text)) == text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("19h50m", 71_400),
        ("90m", 5400),
        ("2d", 172_800),
        ("45s", 45),
        ("1d2h3m4s", 93_784),
        ("0.5s", 0.5),
        ("1h 30m", 5400),
    ],
)
def test_durations_are_read_as_people_say_them(text: str, seconds: float) -> None:
    assert parse_duration(text).seconds == seconds


@pytest.mark.parametrize("text", ["", "  ", "10", "1.5h", "20:00:00", "1m1h", "h", "-5m", "10 steps", "10min"])
def test_anything_else_is_told_how_a_duration_is_written(text: str) -> None:
    with pytest.raises(ValueError, match="a duration is written like '19h50m'"):
        parse_duration(text)


@pytest.mark.parametrize("text", ["9" * 400 + "s", "9" * 5000 + "h", "99999d"])
def test_an_absurd_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="at most ten years"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(71_400, "19h50m"), (172_800, "48h"), (45, "45s"), (0, "0s"), (0.5, "0.5s"), (1e-7, "0.0000001s")],
)
def test_a_duration_reads_back_what_it_writes(seconds: float, text: str) -> None:
    assert str(Duration(seconds)) == text
    assert parse_duration(text).seconds == seconds


def test_numbers_for_people_keep_four_digits() -> None:
    assert [format_count(n) for n in (0, 999, 1000, 12_853_386_240, 3e12)] == ["0", "999", "1k", "12.85B", "3T"]
    assert [format_bytes(n) for n in (0, 1023, 1024, 76 * 2**30, 2**41)] == [
        "0 B",
        "1023 B",
        "1 KiB",
        "76 GiB",
        "2 TiB",
    ]
    assert [format_seconds(n) for n in (42.3, 61, 3725, 90_000)] == ["42s", "1m01s", "1h02m", "1d01h"]


def test_an_error_is_one_line_whatever_its_place_is_called() -> None:
    assert str(Problem("is wrong", place="a\nb\udce9.txt:7")) == "a\\nb\\udce9.txt:7: is wrong."
    assert str(Problem("is wrong", place="caf\xe9 \u6f22.txt")) == "caf\xe9 \u6f22.txt: is wrong."


def test_a_problem_reads_as_sentences() -> None:
    problem = Problem("lr.peak is -1", "must be greater than 0", "did you mean 1?", "my.yaml:3")
    assert str(problem) == "my.yaml:3: lr.peak is -1. Must be greater than 0. Did you mean 1?"
    assert str(Problem("a is 1", "lr.min lies below it", "lr.decay ends later.")) == (
        "a is 1. lr.min lies below it. lr.decay ends later."
    )
