"""AdamW over fp32 master weights, with clipping, loss scaling and the skipping of broken steps done on the device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bloomery.base.piece import Piece
from bloomery.config.recipe import OptimizerSection


@dataclass(frozen=True)
class UpdateNumbers:
    """What an update found out, still on the device."""

    grad_norm: Tensor
    """Global L2 norm of the unscaled gradients, before clipping."""
    skipped: Tensor
    """1.0 if the gradients were not finite and nothing was changed, else 0.0."""
    num_zeros: Tensor
    """Gradient entries that are exactly zero; NaN if they were not counted."""


class Optimizer:
    """Owns the fp32 truth. If the model computes in 16 bits, its parameters are copies that follow the masters."""

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        section: OptimizerSection,
        *,
        compute_dtype: torch.dtype,
    ) -> None:
        self._names, self._parameters = (list(column) for column in zip(*named_parameters, strict=True))
        self._clip_norm = section.clip_grad_norm
        self._masters: list[Tensor] = []
        for parameter in self._parameters:
            assert parameter.dtype == torch.float32, "masters must not start from rounded weights"
            self._masters.append(parameter.data if compute_dtype == torch.float32 else parameter.data.clone())
            parameter.data = parameter.data.to(compute_dtype)
        decayed = [master for master in self._masters if master.ndim > 1]
        exempt = [master for master in self._masters if master.ndim <= 1]  # every bias and every norm
        groups = [
            {"params": decayed, "weight_decay": section.weight_decay},
            {"params": exempt, "weight_decay": 0.0},
        ]
        beta1, beta2 = section.betas
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=0.0, betas=(beta1, beta2), eps=section.eps, fused=True
        )
        for master in self._masters:  # made now, so that a checkpoint can be loaded before the first step
            self._adamw.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=master.device),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }

    def update(
        self, gradients: list[Tensor], *, lr: float, loss_scale: float, count_zeros: bool = False
    ) -> UpdateNumbers:
        """One step, unless a gradient is not finite: then nothing changes. Decided on the device, without waiting."""
        norm = torch.nn.utils.get_total_norm(gradients) / loss_scale
        clip = torch.ones_like(norm) if self._clip_norm is None else (norm / self._clip_norm).clamp(min=1.0)
        skipped = (~torch.isfinite(norm)).to(torch.float32)
        num_zeros = torch.full_like(norm, float("nan"))
        if count_zeros:  # one more pass over the gradients, so only for steps that are logged
            nonzero = torch.stack([torch.count_nonzero(gradient) for gradient in gradients]).sum()
            num_zeros = (sum(gradient.numel() for gradient in gradients) - nonzero).to(torch.float32)
        for master, gradient in zip(self._masters, gradients, strict=True):
            master.grad = gradient
        for group in self._adamw.param_groups:
            group["lr"] = lr
        # The fused kernel divides by grad_scale while it reads the gradient: unscaling and clipping cost no extra pass.
        self._adamw.grad_scale = clip * loss_scale  # type: ignore[attr-defined]
        self._adamw.found_inf = skipped  # type: ignore[attr-defined]
        self._adamw.step()
        self._follow_masters()
        for master in self._masters:
            master.grad = None
        return UpdateNumbers(norm, skipped, num_zeros)

    def pieces(self) -> dict[str, Piece]:
        """What a checkpoint holds, under stable names; the very tensors, so loading into them restores."""
        flat = {"optim.step": self._steps()[0]}  # the same for all parameters
        for name, master in zip(self._names, self._masters, strict=True):
            flat[f"model.{name}"] = master
            flat |= {f"optim.{name}.{key}": self._adamw.state[master][key] for key in ("exp_avg", "exp_avg_sq")}
        return {name: Piece.whole(tensor) for name, tensor in flat.items()}

    def restored(self) -> None:
        """Call after pieces() were overwritten."""
        first, *others = self._steps()
        for step in others:
            step.copy_(first)
        self._follow_masters()

    def _steps(self) -> list[Tensor]:
        return [self._adamw.state[master]["step"] for master in self._masters]

    @torch.no_grad()
    def _follow_masters(self) -> None:
        if self._parameters[0].dtype != torch.float32:
            torch._foreach_copy_([parameter.data for parameter in self._parameters], self._masters)
