"""The models: a causal Decoder and a bidirectional Encoder, built from a Family and the sizes of a recipe."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from bloomery.base.errors import Problem, RecipeError
from bloomery.config.recipe import ModelSection, Recompute
from bloomery.families.bloom import alibi_slopes
from bloomery.families.family import Family
from bloomery.families.registry import FAMILIES
from bloomery.model.attention import AttentionContext, attention_context, choose_kernel, rotary_table
from bloomery.model.layers import Block, Embeddings, MaskedHead, Pooler, make_norm
from bloomery.model.linear import Linear
from bloomery.sizing.parameters import padded_vocab_size, second_loss


def build_model(config: ModelSection) -> Transformer:
    """The model on the meta device, in fp32: names and shapes, no memory. In training mode."""
    family = FAMILIES[config.family]
    if family.build is not None:
        return cast(Transformer, _by_contract(family.build(config), config))
    with torch.device("meta"):
        return Encoder(config, family) if family.encoder else Decoder(config, family)


def _by_contract(model: nn.Module, config: ModelSection) -> nn.Module:
    """A model of the user's own. RecipeError if it cannot be trained like ours."""
    layers = getattr(model, "layers", None)
    wrong = {
        "its `layers` are no nn.ModuleDict with the keys '0' to 'num_layers - 1'": not isinstance(layers, nn.ModuleDict)
        or list(layers) != [str(n) for n in range(config.num_layers)],
        "it has parameters that are not on the meta device": not all(each.is_meta for each in model.parameters()),
        "it has buffers, which would hold nothing: compute them in forward": any(True for _ in model.buffers()),
    }
    if problems := [
        Problem(f"the model {config.family}: {what}", "see docs/python.md") for what in wrong if wrong[what]
    ]:
        raise RecipeError(problems)
    return model


def materialise(model: Transformer, device: torch.device | str) -> None:
    """Give a meta-device model, or a stage of one, memory, in place, without values. That makes new parameters,
    which separates tied ones, and leaves garbage in buffers. Buffers are always fp32 and of all heads: cut them
    afterwards."""

    def memory(like: Tensor) -> Tensor:
        if type(like) in (Tensor, nn.Parameter):  # of these, empty_like imports sympy, for half a second
            return torch.empty(like.shape, dtype=like.dtype, device=device)
        return torch.empty_like(like, device=device)

    model._apply(memory)  # type: ignore[no-untyped-call]
    if not isinstance(model, Transformer):
        return
    model.tie_weights()
    if model.slopes is not None:
        model.slopes = torch.tensor(alibi_slopes(model.config.num_heads), dtype=torch.float32, device=device)


def apply_recompute(model: Transformer, mode: Recompute) -> None:
    """Set what `model` recomputes: nothing, activation functions (what the last matrix of an MLP reads is not stored),
    the attention cores (their scores are not) or whole blocks (only the input of each is). May be called again to
    change it."""
    if mode == "none" and not isinstance(model, Transformer):
        return
    for block in cast(Any, model.layers).values():
        block.recompute = mode == "full"
        block.attention.core.recompute = mode == "selective"
        block.mlp.recompute = mode == "mlp"


def use_fp8(model: Transformer) -> None:
    """Let the matrices of the blocks multiply in 8 bits; not embeddings, norms, attention cores and heads."""
    for module in model.layers.modules():
        if isinstance(module, Linear):
            module.fp8 = True


class Transformer(nn.Module):
    """What both models share. For a pipeline stage set `embed` or what follows the layers to None and delete layers by
    key; the names of what remains do not change."""

    embed: Embeddings | None
    final_norm: nn.Module | None
    head: nn.Module | None
    slopes: Tensor | None
    """ALiBi's, of each head: a tensor-parallel rule cuts them along dimension 0. Not in checkpoints."""

    def __init__(self, config: ModelSection, family: Family) -> None:
        super().__init__()
        self.config = config
        self.family = family
        self.embed = Embeddings(config, family)
        self.layers = nn.ModuleDict({str(n): Block(config, family) for n in range(config.num_layers)})
        has_slopes = family.positions == "alibi"
        self.register_buffer("slopes", torch.empty(config.num_heads) if has_slopes else None, persistent=False)

    def tie_weights(self) -> None:
        """Make `head.weight` the embedding's parameter again if the recipe ties them and both are here; anything that
        replaces parameters, such as `to_empty`, separates them. On a pipeline stage that has only the head,
        `head.weight` stays a parameter of its own, a copy that `parallel` must keep equal."""
        if self.config.tie_embeddings and self.head is not None and self.embed is not None:
            self.head.weight = self.embed.tokens.weight

    def _context(
        self,
        x: Tensor,
        *,
        causal: bool,
        seq_length: int,
        rotary: tuple[Tensor, Tensor] | None = None,
        **parts: Tensor | None,
    ) -> AttentionContext:
        """What all layers share, for the kernel that suits it; `parts` of the scores as in `attention_context`."""
        kernel = choose_kernel(
            x.device.type,
            plain=all(part is None for part in parts.values()),
            dropout=self.config.dropout if self.training else 0.0,
            seq_length=seq_length,
            head_dim=self.config.head_size,
        )
        return attention_context(kernel, causal=causal, seq_length=seq_length, device=x.device, rotary=rotary, **parts)


class Decoder(Transformer):
    """embed -> layers -> final_norm -> head."""

    def __init__(self, config: ModelSection, family: Family) -> None:
        super().__init__(config, family)
        self.final_norm = make_norm(config, family)
        self.head = nn.Linear(config.hidden_size, padded_vocab_size(config), bias=False)
        self.tie_weights()

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        places: Tensor | None = None,
    ) -> Tensor:
        """Logits (B, S, padded vocabulary) of tokens (B, S). A stage without `embed` takes hidden states instead of
        tokens, one without `head` returns them.

        positions (B, S): default the places; attention is causal by place whatever they say, and ALiBi ignores them.
        document_ids (B, seq_length): tokens see only their own document.
        places (S,): where the tokens stand, if they are a part of a sequence of seq_length whose other keys and values
        the attention cores get from elsewhere; default 0..S-1, and that is all there is.
        """
        positions = places if positions is None else positions
        x = tokens if self.embed is None else self.embed(tokens, positions)
        # Hidden states do not tell the length: between attentions they may be cut along the sequence.
        seq_length = x.shape[1] if places is None else self.config.seq_length
        rotary = None
        if self.family.positions == "rotary":
            turns = torch.arange(seq_length, device=x.device) if positions is None else positions
            rotary = rotary_table(turns, head_dim=self.config.head_size, theta=self.config.rope_theta)
        context = self._context(
            x,
            causal=True,
            seq_length=seq_length,
            slopes=self.slopes,
            document_ids=document_ids,
            query_places=places if places is not None and len(places) < seq_length else None,
            rotary=rotary,
        )
        for layer in self.layers.values():
            x = layer(x, context)
        if self.final_norm is not None:
            x = self.final_norm(x)
        return x if self.head is None else self.head(x)


class Encoder(Transformer):
    """embed -> layers -> head and, with a second head, pooler and order_head. Post-norm blocks end in a norm, so
    `final_norm` is None."""

    pooler: Pooler | None
    order_head: nn.Linear | None

    def __init__(self, config: ModelSection, family: Family) -> None:
        super().__init__(config, family)
        self.final_norm = None
        self.head = MaskedHead(config, family)
        is_paired = second_loss(config) is not None
        self.pooler = Pooler(config) if is_paired else None
        self.order_head = nn.Linear(config.hidden_size, 2) if is_paired else None
        self.tie_weights()

    def forward(
        self,
        tokens: Tensor,
        token_types: Tensor | None = None,
        attention_mask: Tensor | None = None,
        places: Tensor | None = None,
        predicted: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """(masked-token logits (B, S, padded vocabulary), order logits (B, 2)) of tokens (B, S); without a second head
        the first alone. A stage without
        `embed` takes hidden states instead of tokens, one without `head` returns them.

        attention_mask (B, S): 1 for a real token, of which each sample has some. What is computed for padding means
        nothing.
        places (S,): 0..S-1, needed where hidden states do not tell the length because they are cut.
        predicted (B, P): the tokens whose logits are wanted, then (B, P, padded vocabulary); default all.
        """
        x = tokens if self.embed is None else self.embed(tokens, places, token_types)
        seq_length = x.shape[1] if places is None else len(places)
        context = self._context(x, causal=False, seq_length=seq_length, is_token=attention_mask)
        for layer in self.layers.values():
            x = layer(x, context)
        if self.head is None:
            return x
        logits: Tensor = self.head(x, predicted)
        return logits if self.pooler is None or self.order_head is None else (logits, self.order_head(self.pooler(x)))
