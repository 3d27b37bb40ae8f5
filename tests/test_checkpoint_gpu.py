"""Staging from an accelerator: the copies run beside the computation, and only the next update waits for them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bloomery.base.accelerator import host_memory, pick_device
from bloomery.base.ranks import Piece
from bloomery.checkpoint.folder import Writer
from bloomery.checkpoint.load import load_pieces, read_checkpoint
from bloomery.checkpoint.retention import Tier
from bloomery.checkpoint.save import SavePlan, Saver

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator"),
]


def test_the_moment_of_staging_is_saved_though_the_weights_change_at_once(tmp_path: Path) -> None:
    device = pick_device()
    tensors = {f"w{i}": torch.zeros(1024, 1024 + i, device=device) for i in range(64)}
    tensors["half"] = torch.zeros(333, 77, device=device, dtype=torch.bfloat16).t()
    tensors["step"] = torch.zeros((), device=device)
    pieces = {name: Piece.whole(tensor) for name, tensor in tensors.items()}
    saver = Saver(pieces, device=device)
    for step in (1, 2, 3):
        for tensor in tensors.values():
            tensor.fill_(float(step))
        saver.stage()
        saver.persist(SavePlan(tier=Tier(Writer(tmp_path)), step=step, state={}, recipe_yaml=""))
        saver.wait_staged()
        for tensor in tensors.values():
            tensor.fill_(-1.0)  # queued behind the copies on the device
        (outcome,) = saver.wait()
        assert outcome.error is None
        found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        load_pieces(
            read_checkpoint(outcome.folder, tensors=False),
            {name: Piece.whole(tensor) for name, tensor in found.items()},
        )
        for name, tensor in found.items():
            assert torch.equal(tensor, torch.full_like(tensor, float(step))), (step, name)


def test_staging_does_not_wait_for_the_device(tmp_path: Path) -> None:
    device = pick_device()
    weight = torch.zeros(4096, 4096, device=device)
    pieces = {"w": Piece.whole(weight)}
    saver = Saver(pieces, device=device)
    saver.stage()
    saver.persist(SavePlan(tier=Tier(Writer(tmp_path)), step=0, state={}, recipe_yaml=""))
    saver.wait()
    torch.accelerator.synchronize(device)
    started, ended = torch.Event(device, enable_timing=True), torch.Event(device, enable_timing=True)
    matrix = torch.randn(8192, 8192, device=device)
    started.record()
    for _ in range(100):
        matrix = matrix @ matrix * 1e-4
    ended.record()
    saver.stage()
    saver.persist(SavePlan(tier=Tier(Writer(tmp_path)), step=1, state={}, recipe_yaml=""))
    busy = not ended.query()  # the host came back while the device still computed
    (outcome,) = saver.wait()
    torch.accelerator.synchronize(device)
    assert busy or outcome.blocking_seconds * 1000 < started.elapsed_time(ended)


def test_host_memory_is_pinned() -> None:
    assert host_memory(1000, pick_device()).is_pinned()
