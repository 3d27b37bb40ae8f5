"""Whatever takes long says what it is doing, and disturbs nothing by it."""

import contextlib
import importlib
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bloomery.base import doing

LISTENS = (
    "import os, time; from bloomery.base import signals; signals.listen(); from bloomery.base.doing import doing\n"
)


def in_python(code: str, *, closed: str = "") -> str:
    """What it says on standard error, after how it ended."""
    words = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", LISTENS + code]
    environment = {**os.environ, "BLOOMERY_SAY_AFTER": "0.2", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    return f"{done.returncode} {done.stderr}"


def test_long_work_says_what_it_is_once_and_short_work_nothing() -> None:
    said = in_python("with doing('short'): pass\nwith doing('digging'): time.sleep(1.5)\nwith doing('short'): pass")
    assert said == "0 bloomery: digging\n"


def test_a_terminal_gets_a_bar_that_leaves_nothing_behind() -> None:
    code = (
        "with doing('digging') as work:\n for _ in work.over(range(4), 4): time.sleep(0.6)\nprint('done', flush=True)"
    )
    ours, theirs = pty.openpty()
    environment = {**os.environ, "BLOOMERY_SAY_AFTER": "0.2", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen([sys.executable, "-c", LISTENS + code], env=environment, stdout=theirs, stderr=theirs):
        os.close(theirs)
        said = b""
        with contextlib.suppress(OSError):  # the end, on Linux
            while more := os.read(ours, 1 << 12):
                said += more
    os.close(ours)
    assert re.search(rb"\r\x1b\[Kbloomery: digging \[#{5,15}\.{5,15}\]  (25|50|75)%", said)
    assert said.endswith(b"%\r\x1b[Kdone\r\n")
    assert b"\n" not in said.removesuffix(b"\r\n")


def test_an_import_that_takes_long_is_named_by_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "heavy.py").write_text("import heavier")
    (tmp_path / "heavier.py").write_text("import time; time.sleep(1.5)")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert in_python("import heavy") == "0 bloomery: loading heavy\n"


def test_a_worker_says_nothing_and_no_file_gets_what_is_said(tmp_path: Path) -> None:
    forked = (
        "with doing('parent'):\n if not os.fork():\n  with doing('child'): time.sleep(1)\n  os._exit(0)\n os.wait()"
    )
    assert in_python(forked) == "0 bloomery: parent\n"
    file = tmp_path / "file"
    written = f"file = open({str(file)!r}, 'w')\nwith doing('digging'): time.sleep(1)\nfile.write('whole')"
    for closed in ("2>&-", "<&- >&- 2>&-"):
        assert in_python(written, closed=closed) == "0 "
        assert file.read_text() == "whole"


def test_a_text_that_changes_is_said_again_every_ten_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    monkeypatch.setattr(doing, "FIRST_SECONDS", 2.0)
    monkeypatch.setattr(doing, "is_quiet", False)  # as an earlier test of this process may have wanted
    clock = [now, now + 1.9, now + 2.0, now + 11.9, now + 12.1, now + 30.0, now + 50.0]
    with doing.doing("1%") as work:
        said = []
        for second in clock:
            monkeypatch.setattr(doing.time, "monotonic", lambda second=second: second + 0.05)
            work.what = "1%" if second < now + 10 else "50%"
            said.append([line for line in doing.lines_due() if "%" in line])
    assert said == [[], [], ["1%"], [], ["50%"], [], []]
    (tmp_path / "brief.py").write_text("from bloomery.base import doing\nsaid = doing.lines_due()")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(doing.time, "monotonic", lambda: now + 90.0)  # long after the last look
    assert importlib.import_module("brief").said == []
