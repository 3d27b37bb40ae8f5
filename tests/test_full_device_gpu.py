"""A device whose memory is used up. Run this file by itself: it takes the whole device."""

from __future__ import annotations

import pytest
import torch

from bloomery.base.accelerator import pick_device
from checkpoints import assert_same_tensors
from conftest import Workshop

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator; this machine has none"),
]
SETTINGS = (
    "model.seq_length=128",
    "model.hidden_size=64",
    "train.for=12 steps",
    "precision=bf16",
    "train.compile=false",
)


def fill(device: torch.device, left_bytes: int) -> list[torch.Tensor]:
    """All memory of the device but about this much: ever smaller pieces, as a driver gives out whole pages."""
    held = []
    free_bytes, _ = torch.get_device_module(device).mem_get_info(device)
    piece_bytes = free_bytes - left_bytes
    while piece_bytes >= max(2**21, left_bytes // 8):
        try:
            held.append(torch.empty(piece_bytes, dtype=torch.uint8, device=device))
        except torch.OutOfMemoryError:
            piece_bytes //= 2
        else:
            free_bytes, _ = torch.get_device_module(device).mem_get_info(device)
            piece_bytes = min(piece_bytes, free_bytes - left_bytes)
    return held


@pytest.mark.parametrize("left_bytes", [2**20, 2**26])
def test_a_full_device_is_an_error_of_the_recipe_and_loses_nothing(
    workshop: Workshop, left_bytes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = (*SETTINGS, "checkpoint.phases=[{every: 2 steps}]")
    whole = workshop.train(*settings, run="whole", device=None)
    workshop.train(*settings, "train.exit_after=4 steps", run="halves", device=None)
    torch.accelerator.empty_cache()
    held = fill(pick_device(), left_bytes)
    large = "batch={micro_batch_size: 512, global_batch_size: 512}"
    workshop.train(*settings, large, "lr.decay=null", run="halves", device=None, changes=["batch", "lr"], code=2)
    assert "ran out of memory" in capsys.readouterr().err
    del held
    torch.accelerator.empty_cache()
    assert_same_tensors(whole, workshop.train(*settings, run="halves", device=None))
