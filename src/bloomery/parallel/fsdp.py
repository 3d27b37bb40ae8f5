"""Data parallelism and ZeRO, both FSDP2. Where there is one data-parallel rank, nothing is wrapped at all.

ZeRO 0 is a shard group of one rank. With fewer shards than ranks the rest are copies (HSDP).
"""

import sys
import warnings
from typing import Any, cast

import torch
from torch import nn

from bloomery.model.transformer import Transformer
from bloomery.parallel.mesh import Mesh

# It warns of changes in place to what a module returned; the losses make none.
warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")


def apply_fsdp(model: Transformer, mesh: Mesh, *, zero: int, dtype: torch.dtype) -> None:
    """Shard a meta-device model over the data-parallel ranks, a block at a time, so that communication overlaps.

    Weights are fp32 and computed with in `dtype`; gradients are summed, not averaged, in fp32.
    """
    if mesh.data is None:
        return
    # Imported here: it takes seconds, and most runs wrap nothing.
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in model.layers.values():
        fully_shard(block, mesh=mesh.data, mp_policy=policy, reshard_after_forward=zero == 3)
    # What is left, embedding and head, is needed at both ends of a pass: gathered once.
    fully_shard(model, mesh=mesh.data, mp_policy=policy, reshard_after_forward=False)
    # FSDP's own prefetch also gathers, after the first block, the last one of the micro-batch before: in vain.
    blocks = [cast(FSDPModule, each) for each in model.layers.values()]
    for each, before in zip(blocks, [cast(FSDPModule, model), *blocks], strict=False):
        each.set_modules_to_backward_prefetch([before])
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum, and 1.0 needs none


def set_fsdp_sync(model: nn.Module, *, zero: int, last: bool) -> None:
    """Set what FSDP does in the next backward pass: ZeRO 0 and 1 communicate once a step, 2 and 3 every micro-batch."""
    if wrapped := _as_fsdp(model):
        wrapped.set_is_last_backward(last)
        wrapped.set_requires_gradient_sync(last or zero >= 2)
        wrapped.set_requires_all_reduce(last)
        wrapped.set_reshard_after_backward(last or zero == 3)


def init_fsdp(model: nn.Module) -> None:
    """Call it once the parameters have memory: FSDP then moves what it must pad, which it would otherwise do in the
    first forward pass, unnoticed by whoever holds a piece."""
    if wrapped := _as_fsdp(model):
        wrapped._get_fsdp_state()._lazy_init()


def _as_fsdp(model: nn.Module) -> Any:
    """The model if FSDP has wrapped it, else None."""
    module = sys.modules.get("torch.distributed.fsdp")
    return model if module is not None and isinstance(model, module.FSDPModule) else None
