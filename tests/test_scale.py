"""`bloomery scale`: the arithmetic of lost time, and a real experiment with two ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from bloomery.monitor.scaling import (
    PARTS,
    Measurement,
    RankTimes,
    bubble_share,
    processor_share,
    scaling_page,
    scaling_rows,
    scaling_table,
)
from conftest import Workshop

Command = Callable[..., tuple[int, str, str]]

ONE = Measurement(1, 1000, 0.0, [RankTimes(1.0, 0.0, 0.0, 1.0)])


def test_the_parts_of_a_step_add_up() -> None:
    times = [RankTimes(0.8, 0.1, 0.3, 0.4), RankTimes(0.8, 0.0, 0.1, 0.7)]
    row = scaling_rows([ONE, Measurement(2, 1000, 0.1, times)])[1]
    assert row.parts is not None
    assert sum(row.parts.values()) == pytest.approx(row.seconds_per_step) == pytest.approx(0.8)
    assert row.parts["computation"] == pytest.approx((0.4 + 0.7) / 2)
    assert row.parts["stragglers"] == pytest.approx(0.7 - 0.55)
    assert row.parts["bubble"] == pytest.approx(0.1 * 0.8)
    assert row.parts["communication"] == pytest.approx(0.25 - 0.15 - 0.08)
    assert row.efficiency == pytest.approx(1.0 / 0.8 / 2)
    assert row.computation_growth == pytest.approx(2 * 0.55 / 1.0)


def test_derived_parts_are_never_more_than_was_waited() -> None:
    times = [RankTimes(1.0, 0.0, 0.02, 1.0), RankTimes(1.0, 0.5, 0.02, 1.0)]
    (row,) = scaling_rows([Measurement(2, 1000, 0.5, times)])
    assert row.parts is not None
    assert row.parts["bubble"] == pytest.approx(0.02)
    assert row.parts["stragglers"] == pytest.approx(0.25)
    assert row.parts["communication"] == pytest.approx(0.0)
    assert (row.efficiency, row.computation_growth) == (1.0, 1.0)


def test_weak_scaling_is_ideal_when_a_step_takes_as_long() -> None:
    rows = scaling_rows([ONE, Measurement(4, 4000, 0.0, [RankTimes(1.0, 0.0, 0.0, 1.0)] * 4)])
    assert rows[1].efficiency == pytest.approx(1.0)


def test_what_was_not_seen_is_not_told() -> None:
    rows = scaling_rows([Measurement(1, 1000, 0.0, [RankTimes(1.0, 0.0, 0.0, 1.0)], splits=False)])
    assert rows[0].parts is None
    assert scaling_table(rows).splitlines()[1].split()[-4:] == ["-"] * 4
    assert "Where a step goes" not in scaling_page("t", "lead", [], rows)


def test_the_bubble_by_its_formula() -> None:
    assert bubble_share("1f1b", pp=1, chunks=1, micro_batches=8) == 0
    assert bubble_share("gpipe", pp=4, chunks=1, micro_batches=9) == pytest.approx(3 / 12)
    assert bubble_share("interleaved", pp=4, chunks=2, micro_batches=9) == pytest.approx(3 / 21)
    assert bubble_share("zero_bubble", pp=4, chunks=2, micro_batches=9) == pytest.approx(1 / 19)


def test_a_crowded_machine_is_noticed() -> None:
    assert processor_share(Measurement(1, 1, 0.0, [RankTimes(1.0, 0.5, 0.0, 0.1)])) == pytest.approx(0.2)
    assert processor_share(ONE) == 1.0


def test_the_page_is_whole_and_fetches_nothing() -> None:
    rows = scaling_rows([ONE, Measurement(2, 1000, 0.0, [RankTimes(0.6, 0.1, 0.0, 0.5)] * 2)])
    html = scaling_page("<name>", "lead", ["a & b"], rows)
    opened: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            if tag not in ("meta", "link", "path", "br"):
                opened.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert tag == "path" or opened.pop() == tag

    Reader().feed(html)
    assert not opened
    assert "&lt;name&gt;" in html
    assert "a &amp; b" in html
    assert "http" not in html
    for part in PARTS:
        assert f"{part}</span>" in html


def test_two_ranks_are_really_trained(workshop: Workshop, command: Command) -> None:
    recipe = yaml.safe_load(workshop.recipe.read_text())
    recipe |= {
        "train": {"for": "100 steps", "evaluate": {"every": "2 steps"}},
        "data": {"train": [{"path": "train"}], "validation": {"v": [{"path": "valid"}]}},
        "lr": {"peak": 1e-3},
        "batch": {"micro_batch_size": 2, "global_batch_size": 8},
    }
    workshop.recipe.write_text(yaml.safe_dump(recipe))
    words = ["scale", str(workshop.recipe), "--steps", "3", "--device", "cpu", "--json", "--output", "out"]
    code, out, err = command(*words, "--ranks", "2,1", "--weak")
    assert code == 0, err
    facts = json.loads(out)
    assert [row["ranks"] for row in facts["rows"]] == [1, 2]
    assert facts["scaling"] == "weak"
    for row in facts["rows"]:
        assert len(row["times"]) == row["ranks"]
        assert sum(row["parts"].values()) == pytest.approx(row["seconds_per_step"])
        assert row["parts"]["bubble"] == 0
        assert min(min(times.values()) for times in row["times"]) >= 0
    assert facts["rows"][1]["times"][0]["collective_wait"] > 0
    assert json.loads(Path("out/scaling.json").read_text()) == facts
    assert "Where a step goes" in Path("out/scaling.html").read_text()

    code, out, err = command(*words, "--ranks", "2", "parallel.pp=2")
    assert code == 0, err
    (row,) = json.loads(out)["rows"]
    assert row["bubble_share"] == pytest.approx(1 / 5)
    assert max(times["pipeline_wait"] for times in row["times"]) > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ranks", "one"], "--ranks is 'one'"),
        (["--ranks", "0"], "--ranks is '0'"),
        (["--steps", "0"], "--steps is 0"),
        (["--ranks", "1,3"], "3 ranks: batch.global_batch_size is 8."),
        (["--ranks", "1", "--steps", "30"], "1 ranks: the recipe ends after 20 steps"),
    ],
)
def test_impossible_experiments_are_refused(workshop: Workshop, command: Command, words: list[str], said: str) -> None:
    code, _, err = command("scale", str(workshop.recipe), "--ranks", "1", "lr.decay=null", *words)
    assert code == 2
    assert said in err
