"""`bloomery sync`: to folders, object stores, the Hub's stand-in and a git remote with LFS."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from bloomery.base.errors import DataError, RecipeError
from bloomery.cli.main import main
from bloomery.launch import sync as module
from bloomery.launch.sync import sync, targets
from conftest import Workshop, start_training, wait_for_steps
from object_stores import bucket_in

EVERYTHING = next(iter(targets("x", []).values()))
LARGE = "checkpoints/step-00000005/rank-0.safetensors"
SECRET = "hf_very_secret_token"


def make_run(folder: Path, *, size: int = 3 * 2**20) -> Path:
    """Two checkpoints, one of which is unfinished, and logs."""
    for name in ("checkpoints/step-00000005", "checkpoints/step-00000010", "logs", "tensorboard", "launch"):
        (folder / name).mkdir(parents=True)
    for step in (5, 10):
        (folder / f"checkpoints/step-{step:08}/rank-0.safetensors").write_bytes(os.urandom(size))
    (folder / "checkpoints/step-00000005/manifest.json").write_text("{}")
    (folder / "logs/main_log.txt").write_text("one\n")
    (folder / "tensorboard/events.out.tfevents.1").write_bytes(b"x" * 100)
    (folder / "metrics.jsonl").write_text('{"a": 1}\n')
    (folder / "elsewhere").symlink_to("/etc/passwd")
    (folder / "logs/linked.txt").symlink_to("/etc/passwd")
    return folder


EXPECTED = {
    "checkpoints/step-00000005/rank-0.safetensors", "checkpoints/step-00000005/manifest.json", "logs/main_log.txt",
    "tensorboard/events.out.tfevents.1", "metrics.jsonl",
}  # fmt: skip


def arrived(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_only_what_is_whole_and_new_goes_to_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, there = make_run(tmp_path / "run"), tmp_path / "there"
    assert main(["sync", str(run), str(there)]) == 0
    assert arrived(there) == EXPECTED
    for file in EXPECTED:
        assert (there / file).read_bytes() == (run / file).read_bytes()
    assert main(["sync", str(run), str(there)]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{there}: 5 files", f"{there}: nothing new"]
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"a": 2}\n')
    (run / "checkpoints/step-00000010/manifest.json").write_text("{}")
    files = sync(run, str(there), EVERYTHING)
    assert "metrics.jsonl" in files
    assert files.index("checkpoints/step-00000010/rank-0.safetensors") < files.index(
        "checkpoints/step-00000010/manifest.json"
    )
    assert sync(run, str(there), ["logs/*"]) == []


def test_a_target_is_a_place_outside_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A copy onto itself would take the files away that a training appends to."""
    run = make_run(tmp_path / "run")
    before = (run / "metrics.jsonl").stat().st_ino
    for target in (str(run), f"file://{run}", str(run / "inside"), f"{run}/../run", ""):
        assert main(["sync", str(run), target]) == 2
        assert "is no place outside of the run" in capsys.readouterr().err
    assert (run / "metrics.jsonl").stat().st_ino == before
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        monkeypatch.chdir(tmp_path / place)
        assert main(["sync", "../run", "there"]) == 0
        assert arrived(tmp_path / place / "there") == EXPECTED
    for target, folder in ((f"file://{tmp_path}/a b", tmp_path / "a b"), ("x::y", tmp_path / "two" / "x::y")):
        assert main(["sync", "../run", target]) == 0
        assert arrived(folder) == EXPECTED


def test_checkpoints_may_lie_on_another_disk(tmp_path: Path) -> None:
    run, there = make_run(tmp_path / "run"), tmp_path / "there"
    (run / "checkpoints").rename(tmp_path / "disk")
    (run / "checkpoints").symlink_to(tmp_path / "disk")
    assert set(sync(run, str(there), EVERYTHING)) == EXPECTED
    assert arrived(there) == EXPECTED


def test_each_part_of_a_training_has_its_repository(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert main(["sync", str(run), f"{tmp_path}/of-{{part}}"]) == 0
    assert arrived(tmp_path / "of-tensorboard") == {"tensorboard/events.out.tfevents.1"}
    assert arrived(tmp_path / "of-logs") == {"logs/main_log.txt", "metrics.jsonl"}


def test_an_interrupted_sync_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, there = make_run(tmp_path / "run"), tmp_path / "there"
    monkeypatch.setattr(module, "_BATCH_BYTES", 1)  # every file for itself
    monkeypatch.setattr(module, "_FIRST_PAUSE_SECONDS", 0.0)
    real, calls = module._to_store, []

    def fails_later(run: Path, target: str, files: list[str]) -> None:
        calls.append(files)
        if len(calls) > 2:
            raise OSError("the network is gone")
        real(run, target, files)

    monkeypatch.setattr(module, "_to_store", fails_later)
    with pytest.raises(DataError, match=r"takes no files: OSError: the network is gone\. What has arrived stays"):
        sync(run, str(there), EVERYTHING)
    assert len(arrived(there)) == 2
    assert len(calls) == 6, "two that arrived, and four tries"
    monkeypatch.setattr(module, "_to_store", real)
    assert len(sync(run, str(there), EVERYTHING)) == 3
    assert arrived(there) == EXPECTED


def test_a_batch_has_at_most_a_thousand_files_and_a_gibibyte() -> None:
    small = {f"logs/{i}": (10, 0) for i in range(2500)}
    assert [len(batch) for batch in module._batches(small)] == [1000, 1000, 500]
    large = {f"checkpoints/{i}": (2**29, 0) for i in range(5)}
    assert [len(batch) for batch in module._batches(large)] == [2, 2, 1]
    assert list(module._batches({})) == []


def test_a_library_may_report_a_file_that_is_gone_as_it_likes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface_hub: `Provided path is not a file on the local file system`, a ValueError."""
    run, there, real = make_run(tmp_path / "run"), tmp_path / "there", module._to_store

    def send(run: Path, target: str, files: list[str]) -> None:
        if LARGE in files:
            (run / "checkpoints/step-00000005").rename(run / ".gone")
            raise ValueError("it is not a file on the local file system")
        real(run, target, files)

    monkeypatch.setattr(module, "_to_store", send)
    assert set(sync(run, str(there), EVERYTHING)) == {file for file in EXPECTED if "step-" not in file}


def test_a_batch_of_growing_files_needs_no_open_one_for_each(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    before = len(os.listdir("/proc/self/fd"))
    with ExitStack() as opened:
        copies = [opened.enter_context(module._snapshot(run / "logs/main_log.txt")) for _ in range(20)]
        assert {Path(copy).read_text() for copy in copies} == {"one\n"}
        assert len(os.listdir("/proc/self/fd")) == before
    assert not any(Path(copy).exists() for copy in copies)


@pytest.mark.parametrize("goes", ["as a whole", "with some of it sent"])
def test_a_checkpoint_that_retention_deletes_meanwhile_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, goes: str
) -> None:
    """Between the listing and the sending of its first, or second, file."""
    run, there, real = make_run(tmp_path / "run"), tmp_path / "there", module._snapshot
    (run / "checkpoints/latest").write_text("step-00000005")
    doomed = "rank-0.safetensors" if goes == "as a whole" else "manifest.json"

    def snapshot(path: Path) -> Any:
        if path.name == doomed and path.exists():
            (run / "checkpoints/step-00000005").rename(run / ".gone")
        return real(path)

    monkeypatch.setattr(module, "_snapshot", snapshot)
    monkeypatch.setattr(module, "_FIRST_PAUSE_SECONDS", 100.0)  # nothing is wrong with the target, so nobody waits
    files = sync(run, str(there), EVERYTHING)
    assert set(files) == {file for file in EXPECTED if "step-" not in file} | {"checkpoints/latest"}
    assert not list(there.glob("checkpoints/*/manifest.json"))
    assert sync(run, str(there), EVERYTHING) == []


def test_what_names_the_newest_checkpoint_goes_after_it(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "checkpoints/latest").write_text("step-00000005")
    (run / "checkpoints/.writer").write_text("a token")
    files = sync(run, str(tmp_path / "there"), EVERYTHING)
    assert files[-1] == "checkpoints/latest"
    assert set(files) == {*EXPECTED, "checkpoints/latest"}


def test_a_missing_package_or_a_wrong_address_is_no_traceback_and_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run")
    monkeypatch.setattr(module, "_FIRST_PAUSE_SECONDS", 100.0)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DataError, match=r"hf://a/b needs a package that is not installed.*bloomery doctor"):
        sync(run, "hf://a/b", EVERYTHING)
    with pytest.raises(DataError, match=r"nosuch://x takes no files: ValueError: Protocol not known: nosuch"):
        sync(run, "nosuch://x", EVERYTHING)


def test_a_sync_that_watches_outlives_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run, pauses = make_run(tmp_path / "run"), list[float]()

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 1:
            (tmp_path / "file").unlink()
        else:
            raise KeyboardInterrupt

    (tmp_path / "file").touch()
    monkeypatch.setattr(module, "_TRIES", 1)
    monkeypatch.setattr("time.sleep", pause)
    assert main(["sync", str(run), f"{tmp_path}/file/there", "--watch", "60"]) == 130
    said = capfd.readouterr()
    assert "Not a directory" in said.err
    assert "Next try in 60 s" in said.err
    assert said.out == f"{tmp_path}/file/there: 5 files\n"
    assert pauses == [60, 60]


def test_two_at_once_and_a_training_that_writes(workshop: Workshop, tmp_path: Path) -> None:
    run, there = workshop.folder / "run", tmp_path / "there"
    process = start_training(workshop, run, "checkpoint.phases=[{every: 5 steps}]", "checkpoint.keep={last: 2}")
    wait_for_steps(run, 6, process)
    errors: list[BaseException] = []

    def carry() -> None:
        try:
            for _ in range(3):
                sync(run, str(there), EVERYTHING)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=carry) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    process.terminate()
    process.wait(60)
    busy = [str(error) for error in errors]
    assert all("another process" in text or "in use" in text or "has it" in text for text in busy), busy
    sync(run, str(there), EVERYTHING)
    for manifest in there.glob("checkpoints/*/manifest.json"):
        for file, facts in json.loads(manifest.read_text())["files"].items():
            assert (manifest.parent / file).stat().st_size == facts["bytes"]
    assert (there / "metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("scheme", ["s3", "abfs"])
def test_an_object_store_gets_the_same(tmp_path: Path, scheme: str) -> None:
    import fsspec

    run = make_run(tmp_path / "run")
    with bucket_in(scheme, "runs") as url:
        assert set(sync(run, f"{url}/x", EVERYTHING)) == EXPECTED
        assert sync(run, f"{url}/x", EVERYTHING) == []
        store, root = fsspec.core.url_to_fs(f"{url}/x")
        store.invalidate_cache()
        for file in EXPECTED:
            assert store.cat_file(f"{root}/{file}") == (run / file).read_bytes()


def test_the_hub_gets_a_commit_and_the_token_is_nowhere(tmp_path: Path, hub: str) -> None:
    run = make_run(tmp_path / "run")
    words = ["sync", str(run), "hf://org/run", "--json"]
    code = f"import sys; from bloomery.cli.main import main; sys.exit(main({words!r}))"
    deadline = time.monotonic() + 60
    while True:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        if done.returncode == 0 or time.monotonic() > deadline:
            break
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"targets": [{"target": "hf://org/run", "files": 5}]}
    again = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert json.loads(again.stdout) == {"targets": [{"target": "hf://org/run", "files": 0}]}
    written = [path.read_bytes() for path in run.rglob("*") if path.is_file()]
    assert not [content for content in written if SECRET.encode() in content]
    assert SECRET not in done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("git-lfs") is None, reason="git-lfs is not installed")
def test_a_git_remote_gets_large_files_through_lfs(tmp_path: Path) -> None:
    run, remote = make_run(tmp_path / "run"), tmp_path / "remote.git"
    subprocess.run(["git", "init", "--quiet", "--bare", str(remote)], check=True)
    assert set(sync(run, f"git+file://{remote}", EVERYTHING)) == EXPECTED
    assert sync(run, f"git+file://{remote}", EVERYTHING) == []
    tree = subprocess.run(
        ["git", "-C", str(remote), "ls-tree", "-r", "--name-only", "HEAD"], capture_output=True, text=True
    )
    assert set(tree.stdout.splitlines()) == {*EXPECTED, ".gitattributes"}
    pointer = subprocess.run(
        ["git", "-C", str(remote), "show", f"HEAD:{LARGE}"],
        capture_output=True,
        text=True,
    )
    assert pointer.stdout.startswith("version https://git-lfs.github.com/spec/v1")


def test_a_secret_in_a_target_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="has a secret in it"):
        sync(make_run(tmp_path / "run"), f"git+https://user:{SECRET}@example.org/x.git", EVERYTHING)
    assert main(["sync", str(tmp_path / "nothing"), "x"]) == 3
