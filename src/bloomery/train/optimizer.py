"""AdamW over the fp32 pieces of this rank, with clipping, unscaling and skipped updates on the device; loss scale."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bloomery.base.errors import DivergedError, Problem
from bloomery.base.ranks import Piece
from bloomery.config.recipe import LossScaleSection, OptimizerSection
from bloomery.parallel.gradients import Gradients, Weight, is_distributed, local_of

_ELEMENTS_AT_ONCE = 1 << 28
"""That are updated by one call: 1 GiB of gradients."""


@dataclass(frozen=True)
class UpdateNumbers:
    """What an update found out, still on the device."""

    grad_norm: Tensor
    """Global L2 norm of the unscaled gradients, before clipping."""
    skipped: Tensor
    """1.0 if nothing was changed, because the gradients were not finite or beyond what they may reach; else 0.0."""
    num_zeros: Tensor
    """Gradient entries that are exactly zero; NaN if they were not counted."""
    params_norm: Tensor
    """Global L2 norm of the weights after the update; NaN like num_zeros."""


class Optimizer:
    """Owns the fp32 truth. Where the model computes with other tensors, those follow the masters."""

    def __init__(
        self,
        weights: Sequence[Weight],
        section: OptimizerSection,
        *,
        compute_dtype: torch.dtype,
        offload: bool = False,
        counts_steps: bool = True,
    ) -> None:
        """Turns plain parameters into `compute_dtype`; sharded ones are turned by FSDP. `offload`: masters and moments
        live in host memory. `counts_steps`: whether this rank saves the number of updates, as one of them must."""
        self._counts_steps = counts_steps
        self._masters: list[Tensor] = []
        self._followers: list[tuple[Tensor, Tensor]] = []
        """(what is computed with, its master) where these are two tensors."""
        for weight in weights:
            value = weight.piece.tensor
            assert value.dtype == torch.float32, "masters must not start from rounded weights"
            master = value.to("cpu", copy=True) if offload else value
            if compute_dtype != torch.float32 and not is_distributed(weight.parameter):
                weight.parameter.data = value.to(compute_dtype)
                self._followers.append((weight.parameter.data, master))
            elif offload:
                self._followers.append((value, master))
            self._masters.append(master)
        self.weights = [
            replace(weight, piece=weight.piece.with_tensor(master))
            for weight, master in zip(weights, self._masters, strict=True)
        ]
        """As given, but their pieces are the masters: whoever uses these keeps no other copy alive."""
        self._on_device = [local_of(each.parameter.data) for each in weights] if offload else self._masters
        self._moments = [(torch.zeros_like(master), torch.zeros_like(master)) for master in self._masters]
        self._step = torch.zeros((), dtype=torch.float32, device=self._masters[0].device)
        self._section = section
        decays = [section.weight_decay if len(each.piece.shape) > 1 else 0.0 for each in weights]  # no biases, no norms
        self._portions = list(_portions(self._masters, decays))

    def update(
        self,
        gradients: Gradients,
        *,
        lr: float,
        loss_scale: float,
        logs: bool = False,
        most_norm: float = math.inf,
        unless: Tensor | None = None,
    ) -> UpdateNumbers:
        """One step, unless a gradient is not finite, the norm is above `most_norm` or `unless` is true: then nothing
        changes. Decided on the device, without waiting, and on all ranks alike, because they share the numbers."""
        norm = gradients.norm() / loss_scale
        most = self._section.clip_grad_norm
        clip = torch.ones_like(norm) if most is None else (norm / most).clamp(min=1.0)
        skipped = ~torch.isfinite(norm) | (norm > most_norm)
        skipped = (skipped if unless is None else skipped | unless.to(norm.device)).to(torch.float32)
        # One more pass over the gradients, so only for steps that are logged.
        num_zeros = params_norm = torch.full_like(norm, float("nan"))
        if logs:
            num_zeros = gradients.num_zeros()
        device = self._step.device
        self._apply_adamw(gradients.tensors(), lr, scale=(clip * loss_scale).to(device), skipped=skipped.to(device))
        self.follow_masters()
        if logs:
            params_norm = gradients.norm_of(self._on_device)
        return UpdateNumbers(norm, skipped, num_zeros, params_norm)

    @torch.no_grad()
    def _apply_adamw(self, sums: Sequence[Tensor], lr: float, *, scale: Tensor, skipped: Tensor) -> None:
        """By torch's kernel, which divides a gradient by `scale` as it reads it: unscaling and clipping cost no extra
        pass. Not by its class, which imports the compiler."""
        self._step += 1
        beta1, beta2 = self._section.betas
        for decay, portion in self._portions:
            masters = [self._masters[i] for i in portion]
            torch._fused_adamw_(
                masters,
                _as_masters([sums[i] for i in portion], masters),
                [self._moments[i][0] for i in portion],
                [self._moments[i][1] for i in portion],
                [],
                [self._step] * len(masters),
                lr=lr,
                beta1=beta1,
                beta2=beta2,
                weight_decay=decay,
                eps=self._section.eps,
                amsgrad=False,
                maximize=False,
                grad_scale=scale,
                found_inf=skipped,
            )
        self._step -= skipped

    def pieces(self) -> dict[str, Piece]:
        """What a checkpoint holds, under stable names; the very tensors, so loading into them restores."""
        flat = {"optim.step": Piece(self._step, (), (), owned=self._counts_steps)}
        for weight, moments in zip(self.weights, self._moments, strict=True):
            flat[f"model.{weight.name}"] = weight.piece
            for key, moment in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
                flat[f"optim.{weight.name}.{key}"] = weight.piece.with_tensor(moment)
        return flat

    def shared_pieces(self) -> dict[str, Piece]:
        """Those that other ranks hold too, moments included: they must stay the same."""
        prefixes = [(f"model.{weight.name}", f"optim.{weight.name}.") for weight in self.weights if weight.is_shared]
        names, starts = {model for model, _ in prefixes}, tuple(start for _, start in prefixes)
        return {name: piece for name, piece in self.pieces().items() if name in names or name.startswith(starts)}

    @torch.no_grad()
    def follow_masters(self) -> None:
        """What is computed with takes the masters' values. Call it after pieces() were overwritten."""
        if self._followers:
            followers, masters = zip(*self._followers, strict=True)
            torch._foreach_copy_(list(followers), list(masters))


def _as_masters(gradients: Sequence[Tensor], masters: Sequence[Tensor]) -> list[Tensor]:
    """In fp32 and where the masters are; those that are so already are not copied."""
    device, found = masters[0].device, list(gradients)
    others = [i for i, each in enumerate(found) if each.dtype != torch.float32 or each.device != device]
    for i in others:
        found[i] = torch.empty_like(gradients[i], dtype=torch.float32, device=device)
    if others:  # in few kernels
        torch._foreach_copy_([found[i] for i in others], [gradients[i] for i in others])
    return found


def _portions(tensors: Sequence[Tensor], decays: Sequence[float]) -> Iterator[tuple[float, list[int]]]:
    """Which are updated together, by their weight decay: never all, else all gradients would have copies in fp32."""
    for decay in sorted(set(decays)):
        portion: list[int] = []
        size = 0
        for i, tensor in enumerate(tensors):
            if decays[i] != decay or not tensor.numel():
                continue
            if portion and size + tensor.numel() > _ELEMENTS_AT_ONCE:
                yield decay, portion
                portion, size = [], 0
            portion.append(i)
            size += tensor.numel()
        if portion:
            yield decay, portion


@dataclass
class LossScale:
    """DeepSpeed's DynamicLossScaler as tr1-13B ran it in 2021: the scale doubles on the last clean step of a window, as
    in megatron-core. (DeepSpeed since moved that to the step after it.) Plain numbers, saved with the checkpoint."""

    scale: float
    patience: int
    """Overflows that may still pass without shrinking the scale."""
    clean_steps: int = 0
    """Clean steps since the last overflow."""

    @classmethod
    def start(cls, section: LossScaleSection) -> LossScale:
        return cls(scale=section.initial, patience=section.hysteresis)

    def update(self, section: LossScaleSection, *, overflow: bool) -> None:
        """Follow one step. DivergedError when an overflow meets the smallest scale."""
        if overflow:
            self.clean_steps = 0
            if min(self.patience, section.hysteresis) > 1:
                self.patience -= 1
                return
            if self.scale <= section.min:
                what = f"gradients overflow even at the smallest loss scale, {section.min}"
                remedy = (
                    "lower lr.peak, use bf16, or resume from an earlier checkpoint and skip this data with train.skip"
                )
                raise DivergedError(Problem(what, "fp16 cannot hold these gradients", remedy))
            self.scale = max(self.scale / 2, section.min)
            return
        self.clean_steps += 1
        grows = self.clean_steps % section.window.count == 0
        if grows:
            self.scale *= 2
        if grows or section.consecutive_hysteresis:
            self.patience = section.hysteresis
