"""Links that somebody planted where commands clean, repair, lock or replace: nothing outside is ever touched."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bloomery.base.errors import BloomeryError
from bloomery.checkpoint.folder import complete_checkpoints
from bloomery.data.shards import ShardReader
from bloomery.prepare.extract import MANIFEST
from conftest import Workshop
from export_samples import CASES, checkpoint_of, small_tokenizer
from prepare_samples import make, make_texts, make_tokenizer, write_jsonl

Command = Callable[..., tuple[int, str, str]]
TARGETS = ["file.json", "folder", "absent"]
"""In the victim: what a planted link leads to."""
IN_VICTIM = ["file.json", "folder/file", "folder/.step-00000001/file", "folder/step-00000001/manifest.json",
             "folder/.tmp-1", "folder/.left-1/x/file", "folder/.draft-1.tmp/file", "folder/000000.tmp-1"]  # fmt: skip
SAVES = ("checkpoint.phases=[{every: 2 steps}]", "checkpoint.keep={last: 1}")


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A folder of somebody else, with names that a run would clean."""
    folder = tmp_path / "victim"
    for name in IN_VICTIM:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"mine": 1}\n{"torn')
        os.utime(folder / name, ns=(1, 1))
    for path in [folder, *folder.rglob("*")]:
        os.utime(path, ns=(1, 1))
    return folder


def seen(folder: Path) -> dict[str, Any]:
    paths = [folder, *sorted(folder.rglob("*"))]
    facts = {str(path): (path.lstat().st_mode, path.lstat().st_size, path.lstat().st_mtime_ns) for path in paths}
    return {"facts": facts, "bytes": [path.read_bytes() for path in paths if path.is_file()]}


def untouched(
    victim: Path, link: Path, run: Callable[[], int], begin: Callable[[], object] = lambda: None
) -> list[int]:
    """Plant each kind of link at a name, and run. The exit codes."""
    before, ended = seen(victim), []
    for target in TARGETS:
        begin()
        link.parent.mkdir(parents=True, exist_ok=True)
        if link.is_dir() and not link.is_symlink():
            shutil.rmtree(link)
        link.unlink(missing_ok=True)
        link.symlink_to(victim / target)
        ended.append(run())
        assert ended[-1] in (0, 3, 5), target
        assert seen(victim) == before, target
    return ended


IN_A_RUN = [
    "metrics.jsonl", "events.jsonl", "logs/main_log.txt", "logs", ".lock", "recipe.yaml", "tensorboard",
    "control", "control/stop", "control/save", "report.html",
    *(f"checkpoints/{name}" for name in (
        "latest", ".writer", ".left-x", ".writer-x", ".left-x/y", ".step-00000001-x.tmp", ".tmp-x", ".probe-x",
        "step-00000001", "step-00000090", "step-00000004", "step-00000002/state.json", "retired", "debris",
        "damaged-step-00000090", "debris/.step-00000001-x.tmp",
    )),
]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("links"))
        return Workshop(Path.cwd()).train("train.exit_after=2 steps", *SAVES).absolute()


@pytest.mark.parametrize("name", IN_A_RUN)
def test_a_training_follows_no_link_out_of_its_folder(
    name: str, workshop: Workshop, command: Command, victim: Path, trained: Path
) -> None:
    run = workshop.folder / "run"

    def begin() -> None:
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(trained, run)
        if name == "checkpoints/retired":  # so that there is something to retire
            workshop.train(SAVES[0], "train.exit_after=2 steps")
        if name == "checkpoints/debris":  # and something to keep
            (run / "checkpoints" / ".step-00000001-y.tmp").mkdir()

    def go_on() -> int:
        words = ["train", str(workshop.recipe), *SAVES, "train.exit_after=4 steps", "--run-dir", str(run)]
        words += ["checkpoint.debris=keep"] if "debris" in name else []
        words += ["monitor.tensorboard=true"] if name == "tensorboard" else []
        words += ["--from", "2"] if name == "checkpoints/retired" else []
        code, _, err = command(*words, "--device", "cpu", "--quiet")
        assert "Traceback" not in err
        if "/" not in name:
            assert command("report", str(run))[0] in (0, 3, 5)
        if "checkpoints" in name:
            assert command("inspect", "checkpoint", str(run), "--list")[0] in (0, 3)
        return code

    ended = untouched(victim, run / name, go_on, begin)
    if name in ("recipe.yaml", "checkpoints/.left-x", "checkpoints/latest"):
        assert ended == [0, 0, 0]
        assert not (run / name).is_symlink(), "the link itself was cleaned or replaced"


@pytest.mark.parametrize("name", ["", "x", "step-00000001-x"])
def test_a_fast_place_follows_no_link(name: str, workshop: Workshop, victim: Path) -> None:
    run, place = workshop.folder / "run", workshop.folder / "nvme"
    mark = hashlib.sha256(str(run).encode()).hexdigest()[:8]
    codes = iter([5, 5, 5] if not name else [0, 0, 0])
    local = f"checkpoint.local={{path: {place}, every: 1 steps, keep: 1}}"

    def train() -> int:
        code = next(codes)
        workshop.train("train.exit_after=2 steps", local, code=code)
        return code

    untouched(victim, place / f"run-{mark}" / name, train)


@pytest.mark.parametrize("name", ["samples.jsonl", "step-00000001"])
def test_a_trace_follows_no_link(name: str, workshop: Workshop, command: Command, victim: Path) -> None:
    trace, words = workshop.folder / "trace", ("train.exit_after=1 steps", "--trace-steps", "1", "--device", "cpu")

    def run() -> int:
        shutil.rmtree(workshop.folder / "run", ignore_errors=True)
        where = ("--trace", str(trace), "--run-dir", str(workshop.folder / "run"))
        return command("train", str(workshop.recipe), *words, *where, "--quiet")[0]

    untouched(victim, trace / name, run)


def test_links_above_a_run_and_a_users_own_link_as_checkpoints_work(workshop: Workshop) -> None:
    (workshop.folder / "disk/run").mkdir(parents=True)
    (workshop.folder / "disk/checkpoints").mkdir()
    (workshop.folder / "run").symlink_to("disk/run")
    (workshop.folder / "run/checkpoints").symlink_to("../checkpoints")
    run = workshop.train("train.exit_after=4 steps", *SAVES)
    workshop.train("train.exit_after=4 steps", *SAVES)
    assert [path.name for path in complete_checkpoints(workshop.folder / "disk/checkpoints")][-1] == "step-00000008"
    assert (run / "checkpoints").is_symlink()


def test_a_link_of_another_user_as_checkpoints_is_refused(workshop: Workshop, victim: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make a link of another user")
    run, before = workshop.folder / "run", seen(victim)
    run.mkdir()
    (run / "checkpoints").symlink_to(victim)
    os.lchown(run / "checkpoints", 12345, 12345)
    workshop.train("train.exit_after=2 steps", *SAVES, code=5)
    assert seen(victim) == before


def test_a_checkpoint_that_is_a_link_is_put_aside_and_said(workshop: Workshop, command: Command) -> None:
    run = workshop.train("train.exit_after=2 steps", *SAVES)
    shutil.copytree(run / "checkpoints/step-00000002", workshop.folder / "far/step-00000004")
    (run / "checkpoints/step-00000004").symlink_to(workshop.folder / "far/step-00000004")
    assert "it is a link" in command("inspect", "checkpoint", str(run), "--list")[1]
    workshop.train("train.exit_after=2 steps", *SAVES)
    (event,) = workshop.events(run, "damaged")
    assert event["reasons"] == ["it is a link to another place, which no save makes"]
    assert (run / "checkpoints/damaged-step-00000004").is_symlink()
    assert (workshop.folder / "far/step-00000004/manifest.json").is_file()


@pytest.mark.parametrize("name", ["step-00000002", "step-00000002/recipe.yaml"])
def test_an_upload_to_a_folder_follows_no_link(workshop: Workshop, victim: Path, name: str) -> None:
    there, before = workshop.folder / "remote" / name, seen(victim)
    there.parent.mkdir(parents=True)
    there.symlink_to(victim if "/" not in name else next(path for path in victim.rglob("*") if path.is_file()))
    workshop.train("train.for=2 steps", f"checkpoint.upload={{to: {workshop.folder / 'remote'}}}")
    assert seen(victim) == before
    assert workshop.events(workshop.folder / "run", "upload" if "/" in name else "upload_failed")


IN_PREPARE = [".x.lock", "x.bin", "x.idx", "x.manifest.json", "x.partial-x.bin", "x.parts",
              "x.parts/000000.part", "x.parts/000000.done", "x.parts/000000.tmp-1-x", "x.parts/strange"]  # fmt: skip


@pytest.mark.parametrize("name", IN_PREPARE)
def test_prepare_follows_no_link(name: str, tmp_path: Path, victim: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = make_tokenizer(tmp_path / "tok")
    write_jsonl(tmp_path / "corpus/a.jsonl", make_texts(20))
    write_jsonl(tmp_path / "corpus/b.jsonl", make_texts(20, seed=1))

    def prepare() -> int:
        for path in tmp_path.glob("out/x.*"):
            if path.is_dir() and not path.is_symlink() and ".parts/" not in name:
                shutil.rmtree(path)
            elif path.is_file() and not path.is_symlink():
                path.unlink()
        try:
            make(tokenizer, output="out/x")
        except BloomeryError as error:
            return error.exit_code
        with ShardReader("out/x") as shard:
            assert shard.num_documents > 30
        return 0

    untouched(victim, tmp_path / "out" / name, prepare)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "README.md", ".draft-1.tmp", "tokenizer.json"])
def test_export_follows_no_link(name: str, tmp_path: Path, victim: Path, command: Command) -> None:
    (tmp_path / "tok").mkdir()
    checkpoint = checkpoint_of(CASES["gpt2"], tmp_path / "run", small_tokenizer(tmp_path / "tok"))
    words = ("export", str(checkpoint), str(tmp_path / "hf"), "--no-proof")
    assert command(*words)[0] == 0
    untouched(victim, tmp_path / "hf" / name, lambda: command(*words)[0])
    assert not (tmp_path / "hf" / name).is_symlink()


CHUNK = "chunk-00000-of-00001.jsonl"


@pytest.mark.parametrize("name", [CHUNK, f".{CHUNK}.partial", f"{CHUNK}.json", f".{CHUNK}.json", MANIFEST])
def test_extract_follows_no_link(name: str, tmp_path: Path, victim: Path, command: Command) -> None:
    write_jsonl(tmp_path / "raw/a.jsonl", make_texts(5))
    words = ("extract", str(tmp_path / "raw"), "--output", str(tmp_path / "out"), "--chunks", "1")

    def extract() -> int:
        for path in (tmp_path / "out").iterdir():
            if not path.is_symlink():
                path.unlink()
        return command(*words)[0]

    untouched(victim, tmp_path / "out" / name, extract)


@pytest.mark.parametrize("name", [".lock", "a/.b.txt.part", "a/b.txt", "a"])
def test_download_follows_no_link(name: str, tmp_path: Path, victim: Path, command: Command) -> None:
    (tmp_path / "local.txt").write_text("text\n")
    wanted = {"url": f"file://{tmp_path}/local.txt", "path": "a/b.txt", "sha256": hashlib.sha256(b"text\n").hexdigest()}
    (tmp_path / "files.json").write_text(json.dumps([wanted]))
    words = ("download", str(tmp_path / "files.json"), "--output", str(tmp_path / "out"))
    untouched(victim, tmp_path / "out" / name, lambda: command(*words)[0])


def test_an_index_cache_follows_no_link(workshop: Workshop, victim: Path) -> None:
    order = ("data.order=megatron", "train.exit_after=1 steps", "data.cache_dir=cache")
    workshop.train(*order)
    cache = workshop.folder / "cache"
    runs = iter(range(9))

    def train() -> int:
        for path in cache.glob("samples-*"):
            path.unlink()
        workshop.train(*order, run=f"run-{next(runs)}", code=5)
        return 5

    (cache / ".lock").unlink()
    untouched(victim, cache / ".lock", train)


@pytest.mark.parametrize("name", ["metrics.jsonl", ".lock", "checkpoints/latest"])
def test_a_pipe_in_place_of_a_file_is_no_hang(name: str, workshop: Workshop) -> None:
    run = workshop.train("train.exit_after=2 steps", *SAVES)
    (run / name).unlink()
    os.mkfifo(run / name)
    workshop.train("train.exit_after=2 steps", *SAVES, code=0 if name == "checkpoints/latest" else 5)
