"""`bloomery download` against a real server that does everything servers do wrong."""

from __future__ import annotations

import base64
import email.utils
import gzip
import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import xxhash

from bloomery.base.errors import StorageError
from bloomery.prepare import download as download_module
from bloomery.prepare.download import DownloadResult, download, read_download_manifest
from unruly_server import Server

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download_module, "FIRST_WAIT_SECONDS", 0.02)
    monkeypatch.setattr(download_module, "LONGEST_WAIT_SECONDS", 0.05)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True).start()
        yield running
        running.shutdown()


def manifest(folder: Path, entries: list[dict[str, Any]], name: str = "files.json") -> str:
    (folder / name).write_text(json.dumps(entries))
    return str(folder / name)


def get(
    tmp_path: Path, entries: list[dict[str, Any]], jobs: int = 4, retries: int = 4, timeout_seconds: float = 0.5
) -> DownloadResult:
    wanted = read_download_manifest(manifest(tmp_path, entries))
    return download(wanted, tmp_path / "out", jobs=jobs, retries=retries, timeout_seconds=timeout_seconds)


def assert_whole(tmp_path: Path, server: Server, *names: str) -> None:
    """These files and nothing else but the lock."""
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == server.contents[name], name
    there = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert there == {*names, ".lock"}


# ---------------------------------------------------------------- what servers do


@pytest.mark.parametrize(
    "mischief",
    [
        [("status", 500)],
        [("status", 503), ("status", 502), ("status", 429)],
        [("status", 408)],
        [("status", 503, {"Retry_After": "9" * 5000})],
        [("status", 429, {"Retry_After": "-1"})],
        [("truncated", 1000)],
        [("truncated", 0), ("truncated", 10), ("truncated", 4000)],
        [("reset", 2000)],
        [("slow", 100)],
        [("wrong content",)],
        [("other file",)],
        [("truncated", 1000), ("wrong range",)],
        [("truncated", 1000), ("ignores range",)],
        [("truncated", 1000), ("wrong content",)],
        [("truncated", 1000), ("status", 416)],
        [("chunked",)],
        [("chunked", "cut")],
        [("truncated", 1000), ("status", 500), ("reset", 10), ("slow", 20), ("wrong range",)],
        [("redirect", "elsewhere")],
        [("no length",)],
    ],
    ids=lambda mischief: " then ".join(str(one[0]) + str(one[-1]) for one in mischief),
)
def test_a_file_arrives_whole_whatever_the_server_does(tmp_path: Path, server: Server, mischief: list[Any]) -> None:
    entry = server.add("a.bin", 5000, *mischief)
    server.add("elsewhere")
    server.contents["elsewhere"] = server.contents["a.bin"]
    result = get(tmp_path, [entry])
    assert not result.failures
    assert (result.files, result.bytes, result.downloaded, result.already_there) == (1, 5000, 1, 0)
    assert_whole(tmp_path, server, "a.bin")


def test_what_has_arrived_is_not_asked_for_again(tmp_path: Path, server: Server) -> None:
    entry = server.add("a.bin", 5000, ("truncated", 1000), ("reset", 500), ("truncated", 2000))
    get(tmp_path, [entry])
    first, *others = server.ranges("a.bin")
    assert first is None
    assert len(others) == 3
    starts = [int(str(asked).removeprefix("bytes=").removesuffix("-")) for asked in others]
    assert starts[0] == 1000
    assert 1000 <= starts[1] <= 1500  # a reset may take back what was on its way
    assert starts[2] == starts[1] + 2000
    assert_whole(tmp_path, server, "a.bin")


def test_attempts_that_bring_a_file_further_do_not_use_up_the_patience(tmp_path: Path, server: Server) -> None:
    entry = server.add("a.bin", 5000, *[("truncated", 300)] * 16)
    assert not get(tmp_path, [entry], retries=1).failures
    assert len(server.ranges("a.bin")) == 17


def test_retry_after_may_be_a_date(tmp_path: Path, server: Server) -> None:
    date = email.utils.format_datetime(datetime.now(UTC) + timedelta(seconds=2), usegmt=True)
    entry = server.add("a.bin", 10, ("status", 503, {"Retry_After": date}))
    get(tmp_path, [entry])
    assert server.times[1] - server.times[0] > 0.5


@pytest.mark.parametrize("have", [1000, 5000])
def test_what_has_arrived_is_kept_only_where_a_checksum_verifies_it(tmp_path: Path, server: Server, have: int) -> None:
    entries = [server.add("sized.bin", 5000, ("truncated", 700)), server.add("summed.bin")]
    del entries[0]["sha256"]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".sized.bin.part").write_bytes(bytes(have))
    (tmp_path / "out" / ".summed.bin.part").write_bytes(server.contents["summed.bin"][:have])
    assert not get(tmp_path, entries).failures
    assert server.ranges("sized.bin") == [None, None]
    assert server.ranges("summed.bin") == (["bytes=1000-"] if have == 1000 else [])
    assert_whole(tmp_path, server, "sized.bin", "summed.bin")


# ---------------------------------------------------------------- what cannot be had


@pytest.mark.parametrize("with_path", [True, False])
def test_urls_that_are_none_are_named_and_the_others_arrive(tmp_path: Path, server: Server, with_path: bool) -> None:
    port = server.server_port
    bad = ["http://[abc/x", f"http://{'a' * 64}.example/y", "http://u:secret@h:p/z", f"http://127.0.0.1:{port}:1/w"]
    entries = [
        server.add("good.bin"),
        server.add("sent.bin", 10, ("redirect", "http://[bad/x")),
        server.add("late.bin"),
    ]
    entries[1:1] = [{"url": url, **({"path": f"{n}.bin"} if with_path else {})} for n, url in enumerate(bad)]
    result = get(tmp_path, entries)
    names = ["0.bin", "1.bin", "2.bin", "3.bin"] if with_path else ["x", "y", "z", "w"]
    assert [failure["path"] for failure in result.failures] == sorted([*names, "sent.bin"])
    for failure in result.failures:
        assert failure["reason"] == "its URL, or one that it redirects to, is not valid"
        assert "secret" not in str(failure)
    assert {"http://[abc/x"} <= {failure["url"] for failure in result.failures}
    assert_whole(tmp_path, server, "good.bin", "late.bin")


@pytest.mark.parametrize(
    ("mischief", "reason"),
    [
        ([("status", 403)], "the server answers 403 Forbidden"),
        (
            [("status", 503, {"Retry_After": "7200"})],
            "the server answers 503 Service Unavailable, and asks for a wait of",
        ),
        ([("status", 500)] * 9, "the server answers 500 Internal Server Error (gave up after 5 attempts)"),
        ([("wrong content",)] * 9, "its sha256 is "),
        ([("other file",)] * 9, "the server has 18 bytes, the manifest says 5000"),
        ([("truncated", 0)] * 9, "no connection, or it was lost: IncompleteRead: IncompleteRead(0 bytes read"),
    ],
)
def test_a_file_that_cannot_be_had_is_named_and_the_others_arrive(
    tmp_path: Path, server: Server, command: Command, mischief: list[Any], reason: str
) -> None:
    entries = [server.add("good.bin", 10), server.add("bad.bin", 5000, *mischief), server.add("late.bin", 10)]
    entries.append({"url": f"http://127.0.0.1:{server.server_port}/missing.bin?secret=1"})
    result = get(tmp_path, entries)
    assert [failure["path"] for failure in result.failures] == ["bad.bin", "missing.bin"]
    assert result.failures[0]["reason"].startswith(reason)
    assert result.failures[1]["reason"] == "the server answers 404 Not Found"
    assert "secret" not in result.failures[1]["url"]
    assert (result.files, result.downloaded, result.bytes) == (4, 2, 20)
    names = {path.name for path in (tmp_path / "out").iterdir() if not path.name.startswith(".")}
    assert names == {"good.bin", "late.bin"}


def test_the_command_ends_with_3_and_names_every_lost_file(tmp_path: Path, server: Server, command: Command) -> None:
    entries = [server.add("good.bin", 10), server.add("a.bin"), server.add("b.bin")]
    del server.contents["a.bin"], server.contents["b.bin"]
    words = ["download", manifest(tmp_path, entries), "--output", str(tmp_path / "out")]
    code, out, err = command(*words)
    assert code == 3
    assert "3 files, 10 B complete (1 downloaded, 0 already there), 2 failed" in out
    assert "a.bin: the server answers 404" in err
    assert "b.bin: the server answers 404" in err
    assert "2 of 3 files could not be downloaded" in err
    code, out, err = command(*words, "--json", "--jobs", "1", "--retries", "0", "--timeout", "5")
    assert code == 3
    facts = json.loads(out)
    assert (facts["files"], facts["bytes"], facts["failed"], facts["already_there"]) == (3, 10, 2, 1)
    assert [failure["path"] for failure in facts["failures"]] == ["a.bin", "b.bin"]


@pytest.mark.parametrize(("name", "coding"), [("a.jsonl.gz", "x-gzip"), ("a.tgz", "gzip"), ("A.ZST", "zstd")])
def test_a_server_may_say_that_the_file_itself_is_packed(
    tmp_path: Path, server: Server, name: str, coding: str
) -> None:
    entry = server.add(name, 5000, ("labelled", coding))
    assert not get(tmp_path, [{"url": entry["url"]}]).failures
    assert (tmp_path / "out" / name).read_bytes() == server.contents[name]


def test_a_length_that_nobody_knows_is_no_success(tmp_path: Path, server: Server) -> None:
    entry = server.add("a.bin", 100, ("no length",))
    (failure,) = get(tmp_path, [{"url": entry["url"]}]).failures
    assert "does not say how long it is" in failure["reason"]


def test_a_server_that_trickles_or_never_ends_is_left(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download_module, "_MOST_UNKNOWN_BYTES", 1000)
    entries = [server.add("slow", 5000, *[("trickle",)] * 9), server.add("endless", 5000, ("no length",))]
    del entries[1]["size"]
    endless, slow = get(tmp_path, entries, retries=1).failures
    assert "less than 1024 bytes a second arrived (gave up after 2 attempts)" in slow["reason"]
    assert "give its size in the manifest" in endless["reason"]


def test_headers_and_redirects_without_an_end_are_left(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download_module, "_MOST_TIMEOUTS", 2)
    entries = [server.add("drips", 10, ("drip",), ("drip",)), server.add("redirects", 0, ("endless redirect", "whole"))]
    whole = server.add("whole")
    entries[1] |= {"size": whole["size"], "sha256": whole["sha256"]}
    (failure,) = get(tmp_path, entries, retries=1).failures
    assert "its headers do not come to an end (gave up after 2 attempts)" in failure["reason"]
    assert (tmp_path / "out" / "redirects").read_bytes() == server.contents["whole"]


def test_user_and_password_of_a_url_go_to_its_host_alone(tmp_path: Path, server: Server) -> None:
    server.login = f"Basic {base64.b64encode(b'me:se@cr:et').decode()}"
    with Server() as other:
        threading.Thread(target=other.serve_forever, args=(0.02,), daemon=True).start()
        there = other.add("c")
        entries = [server.add("a"), there | {"url": server.add("b", 0, ("redirect", there["url"]))["url"]}]
        for entry in entries:
            entry["url"] = entry["url"].replace("127.0.0.1", "me:se%40cr%3aet@127.0.0.1")
        result = get(tmp_path, entries, timeout_seconds=10.0)
        other.shutdown()
    assert not result.failures
    assert (tmp_path / "out" / "a").read_bytes() == server.contents["a"]
    assert (server.logins, other.logins) == ([server.login] * 2, [None])
    sent_on = server.add("e") | {
        "url": server.add("f", 0, ("redirect", "e"))["url"].replace("//", "//me:se%40cr%3aet@")
    }
    assert not get(tmp_path, [sent_on | {"path": "within"}], timeout_seconds=10.0).failures
    assert server.logins == [server.login] * 4, "who is sent on within the host logs in again"
    wrong = get(tmp_path, [server.add("d") | {"url": f"http://me:guess@127.0.0.1:{server.server_port}/d"}]).failures
    assert [(failed["url"], failed["reason"]) for failed in wrong] == [
        (f"http://127.0.0.1:{server.server_port}/d", "the server answers 401 Unauthorized")
    ]
    kept = b"".join(path.read_bytes() for path in (tmp_path / "out").iterdir())
    assert not [secret for secret in (b"se%40cr", b"se@cr", b"guess") if secret in kept]


def test_what_the_server_compresses_unasked_needs_a_size_or_a_checksum(tmp_path: Path, server: Server) -> None:
    entry = server.add("a", 5000, *[("packed", "gzip")] * 3)
    packed = gzip.compress(server.contents["a"], mtime=0)
    (failed,) = get(tmp_path, [{"url": entry["url"]}]).failures
    assert "does not say how long it is" in failed["reason"]
    assert not (tmp_path / "out" / "a").exists()
    verified = {"url": entry["url"], "sha256": hashlib.sha256(packed).hexdigest()}
    assert not get(tmp_path, [verified]).failures, "a checksum says that these bytes are meant"
    assert (tmp_path / "out" / "a").read_bytes() == packed
    server.mischief["a"] = [("packed", "identity")]
    assert not get(tmp_path, [{"url": entry["url"], "path": "b"}]).failures


def test_no_server_at_all(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/a.bin"
    (failure,) = get(tmp_path, [{"url": url}]).failures
    assert "no connection" in failure["reason"]


# ---------------------------------------------------------------- running it again


def test_a_file_changed_on_disk_is_found_and_fetched_again(tmp_path: Path, server: Server) -> None:
    names = ["same.bin", "flipped.bin", "short.bin", "gone.bin", "touched.bin"]
    entries = [server.add(name) for name in names]
    get(tmp_path, entries)
    flipped = bytearray(server.contents["flipped.bin"])
    flipped[77] ^= 1
    (tmp_path / "out" / "flipped.bin").write_bytes(flipped)
    (tmp_path / "out" / "short.bin").write_bytes(server.contents["short.bin"][:99])
    (tmp_path / "out" / "gone.bin").unlink()
    os.utime(tmp_path / "out" / "touched.bin", (1, 1))
    server.requests.clear()
    result = get(tmp_path, entries)
    assert (result.already_there, result.downloaded, result.bytes) == (2, 3, 25000)
    assert Counter(name for name, _ in server.requests) == Counter(["flipped.bin", "short.bin", "gone.bin"])
    assert_whole(tmp_path, server, *names)


def test_files_that_others_brought_are_verified_not_fetched(tmp_path: Path, server: Server) -> None:
    entry = server.add("a.bin")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a.bin").write_bytes(server.contents["a.bin"])
    assert get(tmp_path, [entry]).already_there == 1
    assert not server.requests
    bare = {"url": server.add("b.bin")["url"]}
    (tmp_path / "out" / "b.bin").write_bytes(b"who knows")
    for _ in range(2):
        assert get(tmp_path, [entry, bare]).downloaded == 1, "nothing says that it is whole"
        assert_whole(tmp_path, server, "a.bin", "b.bin")


def test_every_checksum_and_a_changed_one(tmp_path: Path, server: Server) -> None:
    entry = server.add("a.bin")
    content = server.contents["a.bin"]
    sums = {
        "sha256": hashlib.sha256(content).hexdigest().upper(),
        "md5": hashlib.md5(content).hexdigest(),
        "xxh3": xxhash.xxh3_64(content).hexdigest(),
    }
    assert not get(tmp_path, [{"url": entry["url"], **sums}]).failures
    assert not get(tmp_path, [{"url": entry["url"], "xxh3": xxhash.xxh3_128(content).hexdigest()}]).failures
    for name in sums:
        (failure,) = get(tmp_path, [{"url": entry["url"], name: "0" * len(sums[name])}]).failures
        assert failure["reason"].startswith(f"its {name} is {sums[name].lower()}, the manifest says 000")


KILLED = """
import os, sys, threading, time
from pathlib import Path
from bloomery.prepare.download import download, read_download_manifest
threading.Timer(float(sys.argv[3]), lambda: os.kill(os.getpid(), 9)).start()
download(read_download_manifest(sys.argv[1]), Path(sys.argv[2]), jobs=3, retries=50, timeout_seconds=2.0)
time.sleep(60)
"""


def test_kill_9_at_any_moment_then_again(tmp_path: Path, server: Server) -> None:
    entries = [server.add(f"{n}.bin", 300_000, *[("truncated", 40_000 + 1000 * n)] * 3) for n in range(12)]
    path = manifest(tmp_path, entries)
    for number in range(4):
        words = [sys.executable, "-c", KILLED, path, str(tmp_path / "out"), str(0.005 + 0.04 * number)]
        assert subprocess.run(words, stderr=subprocess.DEVNULL).returncode == -9
        for file in (tmp_path / "out").glob("*.bin"):  # whatever has its name is whole
            assert file.read_bytes() == server.contents[file.name]
    assert not get(tmp_path, entries).failures
    assert_whole(tmp_path, server, *(f"{n}.bin" for n in range(12)))


def test_two_at_once_in_one_folder_are_refused(tmp_path: Path, server: Server) -> None:
    entries = [server.add("a.bin", 5000, ("slow", 100))]
    other = threading.Thread(target=get, args=(tmp_path, entries))
    other.start()
    while not server.requests:
        time.sleep(0.01)
    with pytest.raises(StorageError, match=r"out is in use by process \d+ on .*or use another --output"):
        get(tmp_path, entries)
    other.join()
    assert_whole(tmp_path, server, "a.bin")


def test_shares_bring_all_files_at_the_same_time_and_a_last_run_completes_them(
    tmp_path: Path, server: Server, command: Command
) -> None:
    entries = [server.add(f"{n}.bin", 3000 + n, ("slow", 100)) for n in range(7)]
    entries[4] = server.add("4.bin", 3004, *[("status", 404)] * 2)
    wanted, out = read_download_manifest(manifest(tmp_path, entries)), tmp_path / "out"
    results: list[DownloadResult] = []

    def bring(k: int) -> None:
        results.append(download(wanted, out, jobs=2, retries=4, timeout_seconds=0.5, share=(k, 3)))

    shares = [threading.Thread(target=bring, args=(k,)) for k in range(3)]
    for share in shares:
        share.start()
    while not server.requests:
        time.sleep(0.01)
    with pytest.raises(StorageError, match="out is in use by process"):
        download(wanted, out, jobs=2)
    for share in shares:
        share.join()
    assert sorted((each.files, each.downloaded, len(each.failures)) for each in results) == [
        (2, 1, 1), (2, 2, 0), (3, 3, 0)
    ]  # fmt: skip
    words = ["download", str(tmp_path / "files.json"), "--output", str(out)]
    code, text, err = command(*words, "--unit", "1/3")
    assert (code, "4.bin: the server answers 404" in err) == (3, True), err
    assert text.startswith(f"{out}: share 1/3: 2 files, "), text
    code, text, _ = command(*words, "--unit", "1/3")
    assert (code, "(1 downloaded, 1 already there), 0 failed" in text) == (0, True), text
    (out / "6.bin").unlink()
    code, text, _ = command(*words)
    assert (code, "7 files, 20.53 KiB complete (1 downloaded, 6 already there)" in text) == (0, True), text
    for n in range(7):
        assert (out / f"{n}.bin").read_bytes() == server.contents[f"{n}.bin"]
    assert {path.name for path in out.iterdir() if path.name.startswith(".")} == {
        ".lock", *(f".lock-{k}-of-3" for k in range(3))
    }  # fmt: skip


def test_a_full_disk_ends_it_at_once_and_clearly(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    entries = [server.add(f"{n}.bin", 5000) for n in range(50)]
    with monkeypatch.context() as patch:
        patch.setattr(download_module, "publish", full)
        with pytest.raises(StorageError, match=r"No space left on device.*--output.*run the command again"):
            get(tmp_path, entries, jobs=2)
    assert len(server.requests) < 20
    assert not get(tmp_path, entries).failures


@pytest.mark.parametrize(
    ("path", "reason"),
    [("x" * 300, "File name too long (ENAMETOOLONG)"), ("file/x", "File exists"), ("folder", "Is a directory")],
)
def test_a_name_that_cannot_be_written_is_the_failure_of_that_file(
    tmp_path: Path, server: Server, command: Command, path: str, reason: str
) -> None:
    out = tmp_path / "out"
    (out / "folder").mkdir(parents=True)
    (out / "file").write_text("in the way")
    entries = [{**server.add("a.bin", 10), "path": path}, server.add("b.bin", 10)]
    code, _, err = command("download", manifest(tmp_path, entries), "--output", str(out), "--jobs", "1")
    assert (code, reason in err) == (3, True), err
    assert (out / "b.bin").exists()
    assert (out / "file").read_text() == "in the way"


# ---------------------------------------------------------------- manifests and other places


def test_any_kind_of_manifest_and_of_place(tmp_path: Path, server: Server, command: Command) -> None:
    (tmp_path / "local.txt").write_text("here")
    entries = [
        server.add("dir%20x/a%2Bb.bin"),
        {"url": f"file://{tmp_path}/local.txt"},
        {"url": str(tmp_path / "files.yaml"), "path": "deep/er/list.yaml"},
    ]
    text = "".join(json.dumps(entry) + "\n\n" for entry in entries)
    (tmp_path / "files.jsonl").write_text(text)
    (tmp_path / "files.yaml").write_text("".join(f"- {json.dumps(entry)}\n" for entry in entries))
    for name in ("files.jsonl", "files.yaml"):
        code, out, err = command("download", str(tmp_path / name), "--output", str(tmp_path / name[6:]))
        assert code == 0, err
        assert "3 files" in out
        assert "verified by size only: 2" in out
        files = [path for path in (tmp_path / name[6:]).rglob("*") if path.is_file() and path.name[0] != "."]
        assert {str(path.relative_to(tmp_path / name[6:])) for path in files} == {
            "a+b.bin",
            "local.txt",
            "deep/er/list.yaml",
        }
    assert (tmp_path / "yaml" / "local.txt").read_text() == "here"


def test_a_pipe_in_place_of_a_file_does_not_hang(tmp_path: Path, server: Server) -> None:
    entry = server.add("a", 0)
    (tmp_path / "out").mkdir()
    os.mkfifo(tmp_path / "out" / ".a.part")
    with pytest.raises(StorageError, match="it is no regular file"):
        get(tmp_path, [entry])


def test_a_local_file_that_is_not_there(tmp_path: Path) -> None:
    entries = [{"url": f"file://{tmp_path}/nowhere"}, {"url": f"file://{tmp_path}", "path": "x"}, {"url": "zz://a/b"}]
    reasons = [failure["reason"] for failure in get(tmp_path, entries).failures]
    assert "zz" in reasons[0]
    assert "No such file or directory" in reasons[1]
    assert "Is a directory" in reasons[2]
    begin = time.monotonic()
    (failure,) = get(tmp_path, [{"url": "dir://x/y"}], retries=8).failures
    assert "it cannot be read: AttributeError" in failure["reason"]
    assert time.monotonic() - begin < 1, "another attempt would not help"


def test_memory_stays_small(tmp_path: Path, server: Server) -> None:
    """A file of 64 MiB through a process that may not grow by half of that."""
    entry = server.add("large.bin", 64 << 20)
    code = (
        "import resource, sys; from pathlib import Path; from bloomery.prepare.download import *; "
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; "
        "download(read_download_manifest(sys.argv[1]), Path(sys.argv[2]), jobs=2); "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    words = [sys.executable, "-c", code, manifest(tmp_path, [entry]), str(tmp_path / "out")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 32 << 10
    assert (tmp_path / "out" / "large.bin").stat().st_size == 64 << 20
