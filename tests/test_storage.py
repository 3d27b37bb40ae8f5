"""Promises of base.storage: whole files or none, nothing torn, nothing lost silently."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bloomery.base import exit_codes, storage
from bloomery.base.bounded import parse_json, read_small
from bloomery.base.errors import StorageError
from bloomery.base.storage import AppendFile, free_space, locked, make_folder, write_atomically, written_to
from monitor_samples import fill, mounted


def is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


class Disk:
    """A seam for failures that no real disk gives on demand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.write_error = self.sync_error = 0
        self._write, self._fsync = os.write, os.fsync
        monkeypatch.setattr(storage, "write_all", self.write_all)
        monkeypatch.setattr(os, "fsync", self.fsync)

    def write_all(self, descriptor: int, data: bytes) -> None:
        if self.write_error:
            self._write(descriptor, data[: len(data) // 2])  # half a line reaches the file, as on a real full disk
            raise OSError(self.write_error, os.strerror(self.write_error))
        self._write(descriptor, data)

    def fsync(self, descriptor: int) -> None:
        if self.sync_error:
            raise OSError(self.sync_error, os.strerror(self.sync_error))
        self._fsync(descriptor)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def test_write_atomically_writes_text_and_bytes_and_replaces(tmp_path: Path) -> None:
    target = tmp_path / "manifest.json"
    write_atomically(target, b"old")
    write_atomically(str(target), "größer")
    assert target.read_text(encoding="utf-8") == "größer"
    assert os.listdir(tmp_path) == ["manifest.json"]


def test_write_atomically_gives_the_permissions_a_plain_open_would(tmp_path: Path) -> None:
    write_atomically(tmp_path / "ours", "x")
    (tmp_path / "plain").write_text("x")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_failed_atomic_write_keeps_the_old_file_and_leaves_no_temporary(tmp_path: Path, disk: Disk) -> None:
    target = tmp_path / "latest"
    target.write_text("old")
    disk.write_error = errno.ENOSPC
    with pytest.raises(StorageError, match=r"No space left on device \(ENOSPC\)"):
        write_atomically(target, "new")
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["latest"]


def test_a_failed_sync_is_a_failed_write_but_a_missing_sync_is_not(tmp_path: Path, disk: Disk) -> None:
    target = tmp_path / "latest"
    disk.sync_error = errno.EINVAL  # what mounts without fsync answer
    write_atomically(target, "first")
    disk.sync_error = errno.EIO
    with pytest.raises(StorageError, match="EIO"):
        write_atomically(target, "second")
    assert target.read_text() == "first"


def test_a_full_disk_error_says_how_much_is_free(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "size=64k") as small:
        with pytest.raises(StorageError) as caught:
            write_atomically(small / "big", bytes(100_000))
        assert os.listdir(small) == []
    message = str(caught.value)
    assert str(small / "big") in message
    assert re.search(r"choose another --run-dir \([\d.]+ (B|KiB) free\)", message)
    assert caught.value.exit_code == exit_codes.STORAGE


def test_free_space_is_known_where_the_working_directory_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "gone").mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert free_space(Path("runs/small")).endswith(" free")


def test_make_run_folder_creates_parents_and_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "runs" / "a")
    assert folder.is_dir()
    assert os.listdir(folder) == []
    assert make_folder(folder) == folder


def test_make_run_folder_refuses_a_read_only_place(tmp_path: Path) -> None:
    with mounted(tmp_path / "sealed", "ro") as sealed:
        with pytest.raises(StorageError, match=r"Read-only file system \(EROFS\).*another --run-dir"):
            make_folder(sealed)
        with pytest.raises(StorageError, match="cannot create the folder"):
            make_folder(sealed / "new")


def test_make_run_folder_refuses_a_full_place_and_cleans_up(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "size=64k") as small:
        fill(small)
        with pytest.raises(StorageError, match="cannot write in the folder"):
            make_folder(small)
        assert os.listdir(small) == ["ballast"]


@pytest.mark.parametrize("below", ["", "deeper"])
def test_make_run_folder_refuses_a_file_in_the_way(tmp_path: Path, below: str) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(StorageError, match="Something stands in its place"):
        make_folder(tmp_path / "taken" / below)


def test_append_file_appends_across_openings(tmp_path: Path) -> None:
    for line in ("one", "zwölf"):
        file = AppendFile(tmp_path / "log")
        assert file.append(line)
        assert (file.pending_lines, file.last_error, file.repaired) == (0, None, "")
        file.close()
        file.close()
    assert (tmp_path / "log").read_text(encoding="utf-8") == "one\nzwölf\n"


def test_a_full_disk_tears_nothing_and_the_kept_lines_follow_in_order(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "size=64k") as small:
        file = AppendFile(small / "log", is_whole=is_json)
        assert file.append(json.dumps("first"))
        ballast = fill(small)
        lines = [json.dumps(f"{number} " + "x" * 3000) for number in range(4)]
        results = [file.append(line) for line in lines]
        assert results[-1] is False
        assert file.last_error is not None
        assert file.last_error.errno == errno.ENOSPC
        on_disk = (small / "log").read_text()
        assert on_disk.endswith("\n")
        assert len(on_disk.splitlines()) == 1 + len(lines) - file.pending_lines
        assert file.flush() is False
        ballast.unlink()
        assert file.append(json.dumps("last"))
        assert (file.pending_lines, file.last_error) == (0, None)
        file.close()
        assert (small / "log").read_text().splitlines() == [json.dumps("first"), *lines, json.dumps("last")]


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_failed_write_is_cut_back_and_retried(tmp_path: Path, disk: Disk, error: int) -> None:
    file = AppendFile(tmp_path / "log")
    file.append("good")
    disk.write_error = error
    assert file.append("kept") is False
    assert file.append("also kept") is False
    assert file.pending_lines == 2
    assert (tmp_path / "log").read_text() == "good\n"
    disk.write_error = 0
    assert file.flush() is True
    assert (tmp_path / "log").read_text() == "good\nkept\nalso kept\n"
    file.close()


def test_a_cut_that_fails_too_is_made_before_the_next_write(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = AppendFile(tmp_path / "log")
    file.append("good")

    def fail(descriptor: int, size: int) -> None:
        raise OSError(errno.EIO, "no")

    disk.write_error = errno.EIO
    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", fail)
        assert file.append("kept") is False
        assert (tmp_path / "log").read_text() == "good\nke"
    disk.write_error = 0
    assert file.flush() is True
    assert (tmp_path / "log").read_text() == "good\nkept\n"
    file.close()


def test_lines_that_a_failed_sync_may_have_lost_are_written_again(tmp_path: Path, disk: Disk) -> None:
    file = AppendFile(tmp_path / "log")
    file.append("synced")
    assert file.flush()
    file.append("a")
    file.append("b")
    disk.sync_error = errno.ENOSPC  # how a network mount reports a full disk
    assert file.flush() is False
    assert file.pending_lines == 2
    assert (tmp_path / "log").read_text() == "synced\n"
    disk.sync_error = 0
    assert file.append("c")
    file.close()
    assert (tmp_path / "log").read_text() == "synced\na\nb\nc\n"


def test_two_writers_of_one_file_cut_nothing_of_each_other(tmp_path: Path, disk: Disk) -> None:
    path = tmp_path / "log"
    one, two = AppendFile(path), AppendFile(path)
    one.append("a")
    two.append("b")
    disk.write_error = errno.ENOSPC
    assert one.append("c") is False
    assert path.read_text() == "a\nb\n", "half a line of its own is cut, and nothing else"
    disk.write_error = 0
    two.append("d")
    assert one.append("e")
    assert path.read_text() == "a\nb\nd\nc\ne\n"
    disk.sync_error = errno.EIO
    two.append("f")
    assert two.flush() is False, "its b, d and f may be lost"
    disk.sync_error = 0
    for file in (one, two):
        file.close()
    lines = path.read_text().split()
    assert lines[:5] == ["a", "b", "d", "c", "e"]
    assert {*lines[5:]} == {"b", "d", "f"}, "written again"


def test_what_another_process_appends_while_a_cut_is_not_possible_stays(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    one, two = AppendFile(path), AppendFile(path)

    def fail(descriptor: int, size: int) -> None:
        raise OSError(errno.EIO, "no")

    disk.write_error = errno.EIO
    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", fail)
        assert one.append("torn") is False
    disk.write_error = 0
    two.append("whole")
    assert one.append("last")
    assert path.read_text() == "towhole\ntorn\nlast\n"
    one.close()
    two.close()


WRITER = """
import sys
from bloomery.base.storage import AppendFile
file = AppendFile(sys.argv[1])
for number in range(2000):
    file.append(f"{sys.argv[2]} {number}")
file.close()
"""


def test_lines_of_several_processes_are_all_there(tmp_path: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "log"), name]) for name in ("one", "two")]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    lines = (tmp_path / "log").read_text().splitlines()
    for name in ("one", "two"):
        assert [line for line in lines if line.startswith(name)] == [f"{name} {number}" for number in range(2000)]


def test_shares_of_one_number_hold_a_folder_together_and_nobody_else_does(tmp_path: Path) -> None:
    def refused(share: tuple[int, int] | None) -> bool:
        try:
            with locked(tmp_path, share):
                return False
        except StorageError as error:
            return f"{tmp_path} is in use by process {os.getpid()} on " in str(error)

    with locked(tmp_path, (0, 2)):
        assert [refused(share) for share in (None, (0, 2), (1, 2), (1, 3))] == [True, True, False, True]
    with locked(tmp_path):
        assert [refused(share) for share in (None, (0, 2), (1, 3))] == [True, True, True]
    assert not refused(None)


def test_close_names_the_rescue_file_that_holds_the_unwritten_lines(tmp_path: Path, disk: Disk) -> None:
    file = AppendFile(tmp_path / "metrics.jsonl")
    disk.write_error = errno.ENOSPC
    file.append("one")
    file.append("two")
    with pytest.raises(StorageError) as caught:
        file.close()
    message = str(caught.value)
    assert "2 line(s) could not be written" in message
    assert str(tmp_path / "metrics.jsonl") in message
    assert "ENOSPC" in message
    rescue = re.search(r"Nothing is lost: they are in (\S+);", message)
    assert rescue is not None
    assert Path(rescue[1]).read_text() == "one\ntwo\n"
    (tmp_path / "plain").touch()
    assert Path(rescue[1]).stat().st_mode == (tmp_path / "plain").stat().st_mode  # the user's umask
    Path(rescue[1]).unlink()


def test_close_is_honest_when_the_rescue_fails_too(tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.tempfile, "tempdir", str(tmp_path / "missing"))
    file = AppendFile(tmp_path / "log")
    disk.write_error = errno.EIO
    file.append("one")
    with pytest.raises(StorageError, match=r"These lines are lost.*ENOENT"):
        file.close()


@pytest.mark.parametrize(
    ("content", "left", "report"),
    [
        (b'{"a": 1}\n{"b": 2', b'{"a": 1}\n', "removed a torn last line of 7 bytes"),
        (b'{"a": 1}\n{"b": 2}', b'{"a": 1}\n{"b": 2}\n', "completed the last line"),
        (b'{"a": 1}\n\0\0\0', b'{"a": 1}\n', "removed a torn last line of 3 bytes"),
        (b'{"torn', b"", "removed a torn last line"),
        (b'{"a": 1}\n', b'{"a": 1}\n', ""),
        (b"", b"", ""),
    ],
)
def test_a_torn_tail_is_mended_when_the_file_is_opened(
    tmp_path: Path, content: bytes, left: bytes, report: str
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(content)
    file = AppendFile(path, is_whole=is_json)
    assert path.read_bytes() == left
    assert report in file.repaired
    assert bool(file.repaired) == bool(report)
    file.append("{}")
    file.close()
    assert path.read_bytes() == left + b"{}\n"


def test_a_torn_line_of_text_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "main_log.txt"
    path.write_bytes(b"one\nhalf a l\xc3")  # cut inside a character
    file = AppendFile(path)
    file.append("two")
    file.close()
    assert path.read_text(encoding="utf-8") == "one\nhalf a l\ntwo\n"


def test_a_long_torn_tail_is_found(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"good\n" + b"{" * 200_000)
    AppendFile(path, is_whole=is_json).close()
    assert path.read_bytes() == b"good\n"


def test_a_line_without_end_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"good\n")
    os.truncate(path, 1 << 40)
    with pytest.raises(StorageError, match=r"a line of more than 16 MiB.*[Mm]ove it away"):
        AppendFile(path)


def test_append_file_that_cannot_be_opened_says_so(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot open"):
        AppendFile(tmp_path / "missing" / "log")


def test_advice_names_the_option_of_the_command(tmp_path: Path, command: Callable[..., tuple[int, str, str]]) -> None:
    (tmp_path / "file").write_text("x y " * 500)
    words = ["tokenizer", "train", str(tmp_path / "file"), "--vocab-size", "257"]
    code, _, err = command(*words, "--output", str(tmp_path / "file" / "t"))
    assert code == 5
    assert "another --output" in err
    assert "--run-dir" not in err
    with (
        pytest.raises(StorageError, match=r"choose another --there; then wait\.$"),
        written_to("--there", "; then wait"),
    ):
        write_atomically(tmp_path / "file" / "x", "")


# ---------------------------------------------------------------- what comes from elsewhere


@pytest.mark.parametrize("opened", ["[", '{"a":', '[{"a":'])
def test_json_is_refused_where_it_is_nested_deeper_than_the_code_that_walks_it(opened: str) -> None:
    closed = "".join("]" if char == "[" else "}" for char in reversed(opened) if char in "[{")
    levels = len(closed)
    value = parse_json(opened * (60 // levels) + "1" + closed * (60 // levels))
    assert type(value) in (list, dict)
    for count in (100, 400, 900, 100_000):
        with pytest.raises(ValueError, match="nested more than 64 levels deep"):
            parse_json(opened * (count // levels) + "1" + closed * (count // levels))


@pytest.mark.parametrize("digits", [41, 400, 5000])
def test_json_has_no_number_that_is_too_long_for_a_float(digits: int) -> None:
    assert parse_json("9" * 40) == 10**40 - 1
    with pytest.raises(ValueError, match=f"it has a number of {digits} digits"):
        parse_json("9" * digits)


def test_no_more_is_read_of_a_small_file_than_it_may_have(tmp_path: Path) -> None:
    with open(tmp_path / "small", "wb") as file:
        file.truncate(1 << 40)  # of holes
    with pytest.raises(OSError, match="it is larger than 16 MiB"):
        read_small(tmp_path / "small")
