"""Small models for the tests of the model and its Hugging Face maps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bloomery.base.ranks import Piece
from bloomery.config.recipe import ModelSection
from bloomery.families import registry
from bloomery.families.bloom import alibi_slopes
from bloomery.families.registry import family_defaults
from bloomery.model.attention import attend, attention_context
from bloomery.model.init import initialise
from bloomery.model.transformer import build_model, materialise

FAMILIES = list(registry.FAMILIES)
DECODERS = [name for name, family in registry.FAMILIES.items() if not family.encoder]


def small_config(family: str, **changes: Any) -> ModelSection:
    """2 layers of 8 heads x 8 (qwen3: x 16), 150 tokens padded to 160, no dropout, 4 key/value heads if it can."""
    fields: dict[str, Any] = {
        "family": family,
        "num_layers": 2,
        "hidden_size": 64,
        "num_heads": 8,
        "seq_length": 32,
        "vocab_size": 150,
        "vocab_multiple": 32,
        "dropout": 0.0,
    }
    reads = registry.FAMILIES[family].reads
    if "num_kv_heads" in reads:
        fields["num_kv_heads"] = 4
    if family == "qwen3":
        fields["head_dim"] = 16
    fields |= changes
    return ModelSection(**fields, **family_defaults(fields))


def initialised(config: ModelSection, *, seed: int = 1, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    """A model with memory and its initial values."""
    model = build_model(config).to(dtype)
    materialise(model, device)
    initialise(((name, Piece.whole(each.data)) for name, each in model.named_parameters()), config, seed)
    return model


def small_model(config: ModelSection, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    """An initialised model whose every parameter, norms and biases too, is perturbed, in evaluation mode."""
    model = initialised(config, device=device, dtype=dtype)
    perturb(model)
    return model.eval()


@torch.no_grad()
def perturb(model: nn.Module) -> None:
    """Norms and biases start as ones and zeros, which would hide mistakes: move every parameter."""
    random = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter += 0.1 * torch.randn(parameter.shape, generator=random).to(parameter)


def random_tokens(config: ModelSection, batch: int = 2, length: int | None = None) -> Tensor:
    random = torch.Generator().manual_seed(7)
    return torch.randint(0, config.vocab_size, (batch, length or config.seq_length), generator=random)


def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, slopes: Tensor | None = None, document_ids: Tensor | None = None
) -> Tensor:
    """The definition, in fp32, sharing nothing with the kernels that are tested against it."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1).float(), v.repeat_interleave(groups, dim=1).float()
    scores = q.float() @ k.mT / q.shape[-1] ** 0.5
    places = torch.arange(k.shape[2], device=q.device)
    if slopes is not None:
        scores = scores + slopes[:, None, None] * places
    if causal:
        scores = scores.masked_fill(places[None, :] > places[:, None], float("-inf"))
    if document_ids is not None:
        scores = scores.masked_fill(document_ids[:, None, :, None] != document_ids[:, None, None, :], float("-inf"))
    return (scores.softmax(-1) @ v).to(q.dtype)


def run_attention(
    kernel: Any,
    *,
    alibi: bool,
    documents: bool,
    kv_heads: int,
    sizes: tuple[int, int, int],
    causal: bool = True,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    compiled: bool = False,
    dropout: float = 0.0,
) -> list[Tensor]:
    """Output and gradients of q, k, v, from values that bf16 holds exactly; `kernel` may be "reference". `sizes`:
    heads, tokens, head size. FlexAttention has no gradients on a CPU."""
    heads, length, width = sizes
    has_gradients = kernel != "flex" or device != "cpu"
    random = torch.Generator().manual_seed(3)
    made = [torch.randn(2, count, length, width, generator=random) for count in (heads, kv_heads, kv_heads, heads)]
    q, k, v, weight = (tensor.bfloat16().to(device, dtype) for tensor in made)
    for tensor in (q, k, v):
        tensor.requires_grad_(has_gradients)
    ends = torch.tensor([[length * 5 // 16], [length]], device=device)
    extra = {
        "slopes": torch.tensor(alibi_slopes(heads), device=device) if alibi else None,
        "document_ids": torch.arange(length, device=device) // ends if documents else None,
    }

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if kernel == "reference":
            return reference_attention(q, k, v, causal=causal, **extra)
        return attend(
            q, k, v, attention_context(kernel, causal=causal, seq_length=length, device=q.device, **extra), dropout
        )

    out = (torch.compile(attention, fullgraph=True) if compiled else attention)(q, k, v)
    return [out, *torch.autograd.grad((out * weight).sum(), (q, k, v))] if has_gradients else [out]
