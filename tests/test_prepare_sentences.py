"""The sentence splitter: what it cuts, what it leaves together, and that nothing is lost or slow."""

# ruff: noqa: RUF001  (signs of many scripts)

from __future__ import annotations

import random
import time

import pytest

from bloomery.prepare.sentences import split_sentences

CASES: list[list[str]] = [
    ["Mr. Smith paid $3.50 to Dr. J. R. Jones.", "He left!", "Why?", "Nobody knows."],
    ['He said "Stop."', "Then he ran.", '"Why?" she asked.', '"Because," he said, "I can."'],
    ["The U.S. President spoke.", "He lives in the U.S.", "The end came at 5 p.m.", "Everyone left."],
    ["See Fig. 3 and e.g. the table (cf. p. 12).", "It costs 3.14 (approx. 4).", "Then...she left.", "Well...", "Oh."],
    ["1. Introduction is short.", "2. Methods follow.", "(A) Items too.", "Version 2.0 is out."],
    ["It was Jan. 5 when plan B. failed.", "I saw him in Jan.", "He was fine."],
    ["Visit www.x.com.", "OK?", "See example.org/a.b.", "Yes."],
    ["Wait..", "What?!", "(He ran.)", "[Then he fell.]", "“Well,” she said.", "“Fine.”"],
    ["¿Qué pasa?", "¡Nada!", "Bueno."],
    ["Am 3. Oktober 1990 war es so.", "Das ist z.B. gut.", "Ende."],
    ["Was it 12?", "In 1999.", "25 people came.", "Acme Inc. makes it."],
    ["مرحبا؟", "نعم.", "لا."],
    ["यह एक वाक्य है।", "यह दूसरा है।"],
    ["no punctuation at all"],
    [],
]


@pytest.mark.parametrize("sentences", CASES, ids=lambda case: (case or ["empty"])[0][:20])
def test_sentences_come_apart_where_a_reader_would_cut(sentences: list[str]) -> None:
    assert split_sentences(" ".join(sentences)) == sentences


def test_chinese_and_japanese_need_no_space() -> None:
    assert split_sentences("今天天气很好。我们去公园吧！好吗？「是的。」他说。") == [
        "今天天气很好。", "我们去公园吧！", "好吗？", "「是的。」", "他说。"
    ]  # fmt: skip


def test_lines() -> None:
    text = "A heading\n\nA paragraph that was\nwrapped by hand,\nMary saw it. End\n- an item\n- Another item\n\n\n"
    assert split_sentences(text) == [
        "A heading",
        "A paragraph that was\nwrapped by hand,\nMary saw it.",
        "End",
        "- an item",
        "- Another item",
    ]


def test_nothing_is_lost() -> None:
    generator = random.Random(0)
    signs = [*"abA. .!?…\n\n\t  \"'”)(。！।-,;:1", "Mr", "U.S.", " The ", "\r\n", "\u00a0", "\u2028", "é", "𝄞", "\x1c"]
    for _ in range(2000):
        text = "".join(generator.choices(signs, k=generator.randrange(60)))
        sentences = split_sentences(text)
        assert "".join("".join(sentences).split()) == "".join(text.split())
        assert all(sentence and sentence == sentence.strip() for sentence in sentences)


@pytest.mark.parametrize(
    "text", ["." * 300_000, "A. " * 100_000, " " * 300_000 + ".", "\n " * 150_000, '."' * 150_000, "a" * 300_000]
)
def test_the_time_is_linear_whatever_the_text(text: str) -> None:
    started = time.process_time()
    split_sentences(text)
    assert time.process_time() - started < 3
