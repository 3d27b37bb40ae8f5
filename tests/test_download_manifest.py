"""Manifests of `bloomery download` that cannot be used: what is wrong in them is named, and nothing is made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Command = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "should have at least 1 item"),
        ("{}", "valid list"),
        ("[", "cannot be used"),
        ('["http://a/b"]', 'has [0] "http://a/b" ('),
        ('[{"size": 5}]', "has no [0].url"),
        ('[{"url": "http://a/b"}, {"url": "http://a/c", "sha265": "00"}]', '[1].sha265 "00" (Extra inputs'),
        ('[{"url": "http://a/b", "size": -1}]', "[0].size -1 (should be greater than or equal to 0)"),
        ('[{"url": "http://a/b", "size": "5"}]', '[0].size "5" (should be a valid integer)'),
        ('[{"url": "http://a/b", "sha256": "00"}]', '[0].sha256 "00" ('),
        ('[{"url": "http://a/b", "path": "../b"}]', "'../b' is not a name below the output folder"),
        ('[{"url": "http://a/b", "path": "/b"}]', "'/b' is not a name below"),
        ('[{"url": "http://a/"}]', "[0].path "),
        ('[{"url": "http://a/b"}, {"url": "http://c/b"}]', "it has two files for the path b"),
        ('[{"url": "http://a/\\ud800"}]', "[0].url "),
        ('[{"url": "http://a/b", "path": "\\ud800"}]', "[0].path "),
        ('[{"url": "http://a/.lock"}]', "not a name below the output folder"),
        ('[{"url": "http://a/b", "path": ".lock-0-of-2"}]', "not a name below the output folder"),
    ],
)
def test_a_wrong_manifest_is_refused(tmp_path: Path, command: Command, content: str, message: str) -> None:
    (tmp_path / "files.json").write_text(content)
    code, _, err = command("download", str(tmp_path / "files.json"), "--output", str(tmp_path / "out"))
    assert code == 3
    assert message in err
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_a_missing_manifest_and_a_broken_line(tmp_path: Path, command: Command) -> None:
    assert "No such file" in command("download", "nowhere.json", "--output", str(tmp_path))[2]
    (tmp_path / "files.jsonl").write_text('{"url": "http://a/b"}\n{"url": \n')
    assert (
        "files.jsonl: cannot be used"
        in command("download", str(tmp_path / "files.jsonl"), "--output", str(tmp_path))[2]
    )


@pytest.mark.parametrize("text", ['!!int ""', "!!bool x", "!!timestamp x", "!!float x", "2001-99-99", "? [a]\n: b"])
def test_yaml_whose_values_cannot_be_made_is_refused(tmp_path: Path, command: Command, text: str) -> None:
    (tmp_path / "files.yaml").write_text(text)
    code, _, err = command("download", str(tmp_path / "files.yaml"), "--output", str(tmp_path / "out"))
    assert code == 3
    assert "cannot be used" in err
