"""A fast place that is each node's own: two nodes are two mount namespaces, with another disk at the same path."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest

import rank_commands
from bloomery.base import exit_codes
from bloomery.checkpoint import folder as folders
from bloomery.checkpoint.load import read_checkpoint
from bloomery.checkpoint.retention import sweep_parts
from bloomery.launch.local import run_local_ranks
from checkpoints import assert_same_tensors
from conftest import Workshop

DP = ("launch={on: local, gpus_per_node: 4}", "batch={micro_batch_size: 2, global_batch_size: 8}")


class Nodes:
    """Two nodes with two ranks each, and what lies on their disks."""

    def __init__(self, workshop: Workshop) -> None:
        self.workshop, self.run = workshop, workshop.folder / "run"
        self.mount = workshop.folder / "nvme"
        self.disks = [workshop.folder / "disk-0", workshop.folder / "disk-1"]
        for path in (self.mount, *self.disks):
            path.mkdir()

    def train(self, *overrides: str, run: str = "run", size: int = 4) -> int:
        saves = f"checkpoint={{phases: [{{every: 4 steps}}], local: {{path: {self.mount}, every: 1 steps, keep: 1}}}}"
        place = ["--run-dir", str(self.workshop.folder / run), "--device", "cpu", "--quiet"]
        arguments = ["train", str(self.workshop.recipe), saves, *overrides, *place]
        command = partial(rank_commands.on_two_nodes, str(self.mount), [str(disk) for disk in self.disks])
        logged = partial(rank_commands.logged, command, str(self.workshop.folder / "said.txt"))
        return run_local_ranks(size, logged, arguments)

    def said(self) -> str:
        return (self.workshop.folder / "said.txt").read_text()

    def files(self, node: int) -> list[str]:
        """Of this run, as `step-00000006/tensors-00002.safetensors`."""
        found = self.disks[node].glob("run-*/*/*")
        return sorted(f"{path.parent.name[:13]}/{path.name}" for path in found)

    def kill_after(self, step: int) -> None:
        """As if the job had been killed there: what is newer in the run folder is gone."""
        for path in folders.complete_checkpoints(self.run / "checkpoints"):
            if folders.step_of(path) > step:
                shutil.rmtree(path)


def _may_mount() -> None:
    os._exit(0 if ctypes.CDLL(None).unshare(0x20000) == 0 else 1)


@pytest.fixture
def nodes(workshop: Workshop) -> Nodes:
    process = multiprocessing.get_context("fork").Process(target=_may_mount)
    process.start()
    process.join()
    if process.exitcode:
        pytest.skip("needs the right to mount")
    return Nodes(workshop)


def test_nodes_with_disks_of_their_own_go_on_from_them(nodes: Nodes) -> None:
    """A rank needs what the rank of the other node has written: the number of updates."""
    train = partial(nodes.train, "launch={on: local, gpus_per_node: 2}", "parallel.pp=2", size=2)
    assert train("train.exit_after=6 steps") == exit_codes.OK, nodes.said()
    for node in (0, 1):
        assert {int(name[-17:-12]) for name in nodes.files(node)} == {node}, "each node keeps its rank's files"
        assert {name[:13] for name in nodes.files(node)} <= {"step-00000005", "step-00000006"}, "older ones are swept"
    nodes.kill_after(4)
    assert train("train.exit_after=3 steps") == exit_codes.OK, nodes.said()
    assert nodes.workshop.events(nodes.run, "start")[1]["resumed_from"] == "step-00000006"
    assert train("train.exit_after=9 steps", run="whole") == exit_codes.OK
    assert_same_tensors(nodes.run, nodes.workshop.folder / "whole")


def test_the_disks_of_all_nodes_are_used_by_other_ranks_unless_files_there_are_damaged_or_lost(nodes: Nodes) -> None:
    assert nodes.train(*DP, "train.exit_after=6 steps") == exit_codes.OK, nodes.said()
    nodes.kill_after(4)
    kept = {place: place.with_name(f"{place.name}-kept") for place in (nodes.run, *nodes.disks)}
    for place, copy in kept.items():
        shutil.copytree(place, copy, symlinks=True)
    assert nodes.train("train.exit_after=1 steps", size=2) == exit_codes.OK, nodes.said()
    assert nodes.workshop.events(nodes.run, "start")[1]["resumed_from"] == "step-00000006"
    for place, copy in kept.items():
        shutil.rmtree(place)
        copy.rename(place)
    files = {path.name: path for path in nodes.disks[1].glob("run-*/step-00000006-*/*")}
    lost, changed = "tensors-00002.safetensors", "tensors-00003.safetensors"
    files[changed].write_bytes(files[changed].read_bytes()[:-1] + b"?")
    files[lost].unlink()
    assert nodes.train(*DP, "train.exit_after=1 steps") == exit_codes.OK, nodes.said()
    assert nodes.workshop.events(nodes.run, "start")[1]["resumed_from"] == "step-00000004"
    (event,) = nodes.workshop.events(nodes.run, "damaged")
    reasons = {f"{lost} is on none of the nodes", f"{changed} has been changed since it was saved"}
    assert (event["folder"], set(event["reasons"])) == ("step-00000006", reasons)
    assert f"{lost} is on none of the nodes" in nodes.said()
    assert not any(name.startswith("step-00000006") for name in nodes.files(0)), "what is left of it is swept"


def test_only_what_no_checkpoint_needs_is_swept(tmp_path: Path) -> None:
    root, disk = tmp_path / "checkpoints-local", tmp_path / "disk"
    needed = {"step-00000002-ab-1", "step-00000009-ab-1", "step-00000009-cd-3", "step-00000010-ab-2"}
    for name in (*needed, "step-00000003-ab-1", "step-000000020-ab-1", "damaged"):
        (disk / name).mkdir(parents=True)
    for folder in ("step-00000002", "retired/step-00000009", "retired/step-00000009.2", "damaged-step-00000003"):
        (root / folder).mkdir(parents=True)
        (root / folder / "manifest.json").write_text("{")
    sweep_parts(disk, root, spare=("-ab-2",))
    assert {path.name for path in disk.iterdir()} == needed
    sweep_parts(tmp_path / "nowhere", root)


def test_a_fast_checkpoint_is_no_promise_so_a_run_that_stops_there_still_saves(workshop: Workshop) -> None:
    fast = workshop.folder / "nvme"
    settings = ("train.for=4 steps", "lr.warmup=1 steps", f"checkpoint.local={{path: {fast}, every: 2 steps}}")
    run = workshop.train(*settings)
    shutil.rmtree(run / "checkpoints" / "step-00000004")  # as if it had been killed between the two saves
    (run / "checkpoints" / "latest").unlink()
    workshop.train(*settings)
    assert workshop.events(run, "start")[1]["resumed_from"] == "step-00000004"
    assert folders.read_latest(run / "checkpoints") == "step-00000004"
    read_checkpoint(run / "checkpoints" / "step-00000004")


def test_a_disk_that_was_emptied_is_told_and_the_run_folder_is_used(workshop: Workshop) -> None:
    """As a memory disk after a restart of the machine."""
    fast = workshop.folder / "shm"
    settings = ("checkpoint.phases=[{every: 4 steps}]", f"checkpoint.local={{path: {fast}, every: 1 steps}}")
    run = workshop.train(*settings, "train.exit_after=6 steps")
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    shutil.rmtree(fast)
    workshop.train(*settings, "train.exit_after=1 steps")
    assert workshop.events(run, "start")[1]["resumed_from"] == "step-00000004"
    assert workshop.events(run, "damaged")[0]["reasons"] == ["tensors-00000.safetensors is on none of the nodes"]


def test_a_local_place_that_is_too_small_for_what_it_should_keep_keeps_the_newest(workshop: Workshop) -> None:
    fast = workshop.folder / "nvme"
    fast.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1200k", "tmpfs", fast], capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        tiers = f"checkpoint={{phases: [{{every: 100 steps}}], local: {{path: {fast}, every: 1 steps, keep: 9}}}}"
        run = workshop.train(tiers, "train.exit_after=12 steps")
        saved = [event["step"] for event in workshop.events(run, "save") if event["tier"] == "local"]
        assert saved == list(range(1, 13))
        assert len(folders.complete_checkpoints(run / "checkpoints-local")) < 9
    finally:
        subprocess.run(["umount", "-l", fast], check=True)


def test_a_local_place_that_cannot_be_written_is_named_with_its_field(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    fast = workshop.folder / "file"
    fast.write_text("")
    run = workshop.train(f"checkpoint.local={{path: {fast}, every: 1 steps}}", "train.exit_after=3 steps", code=5)
    said = capsys.readouterr().err
    assert f"{fast}/run-" in said
    assert "choose another checkpoint.local.path" in said
    assert "--run-dir" not in said
    assert not workshop.metrics(run)  # before the first step
