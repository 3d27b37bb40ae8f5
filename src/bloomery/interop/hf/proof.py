"""The proof of an export or an import: the folder as transformers loads it against the checkpoint as we load it."""

from __future__ import annotations

import importlib.util
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bloomery.base.errors import DataError, Problem
from bloomery.base.losses import IGNORED_LABEL, LM_LOSS, SOP_LOSS
from bloomery.checkpoint.load import load_model
from bloomery.config.recipe import Recipe
from bloomery.data.tokenizer import Tokenizer
from bloomery.families.registry import FAMILIES
from bloomery.model.generate import generate
from bloomery.model.loss import padding_of, row_losses, token_losses

PROOF_FILE = "export-proof.json"
LIMIT = 1e-4
"""Of the difference of logits, for logits up to 1; larger ones in proportion."""
PROMPTS = ("The", "def main(", "Once upon a time", "1 + 1 =", "In the beginning was the word, and")
_LOSS_LIMIT = 1e-5
_NEW_TOKENS = 16
_IMPORTED_TOKENS = 512


@dataclass
class Proof:
    proven: bool
    reason: str = ""
    """Why there is no proof."""
    transformers: str = ""
    """Its version."""
    max_logit_difference: float | None = None
    """Between both, in fp32, with the weights of the folder."""
    limit: float | None = None
    rounding_difference: float | None = None
    """What --dtype changed: between the checkpoint's fp32 weights and those of the folder."""
    sequences: int = 0
    greedy_equal: int = 0
    """Prompts that both continue alike, token by token."""
    compared: str = "greedy continuations"
    """Of the prompts; bert continues nothing."""
    training_loss: float | None = None
    """Of an import, as it is trained with, and as transformers has it."""
    their_loss: float | None = None
    prompts: list[dict[str, str]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        if self.max_logit_difference is None:
            return f"not proven: {self.reason}"
        if self.training_loss is not None:
            losses = f"training loss {self.training_loss:.6g}, transformers' {self.their_loss:.6g}"
            return f"proof: {losses}; largest logit difference {self.max_logit_difference:.1e}"
        rounding = f", rounding changed them by {self.rounding_difference:.1e}" if self.rounding_difference else ""
        return (
            f"proof: largest logit difference {self.max_logit_difference:.1e} on {self.sequences} sequences{rounding}; "
            f"{self.compared} equal for {self.greedy_equal} of {len(self.prompts)} prompts"
        )


def has_transformers() -> bool:
    return importlib.util.find_spec("transformers") is not None


@torch.no_grad()
def prove(checkpoint: Path, exported: Path, tokenizer: Tokenizer, dtype: torch.dtype) -> Proof:
    """Both models are held in fp32 at once: 8 bytes a parameter and more."""
    import transformers

    recipe, model = load_model(checkpoint, device=torch.device("cpu"))
    theirs = _their_model(recipe, exported)
    prompts = _prompt_tokens(recipe, tokenizer)
    random = torch.Generator().manual_seed(0)
    full = torch.randint(recipe.model.vocab_size, (1, recipe.model.seq_length), generator=random)
    sequences = [full, *(tokens for _, tokens in prompts)]
    before = [head for tokens in sequences for head in _ours(model, recipe, tokens)] if dtype != torch.float32 else []
    for parameter in model.parameters():
        parameter.copy_(parameter.to(dtype).to(torch.float32))
    ours = [head for tokens in sequences for head in _ours(model, recipe, tokens)]
    if not all(bool(logits.isfinite().all()) for logits in ours):
        what = "the model of this checkpoint computes logits that are not finite, though its weights are"
        rule = "it has diverged, and there is nothing to compare"
        raise DataError(Problem(what, rule, "export an earlier checkpoint; --no-proof exports this one as it is"))
    others = [head for tokens in sequences for head in _theirs(theirs, recipe, tokens)]
    difference = _largest(ours, others)
    limit = LIMIT * max(1.0, max(float(logits.abs().max()) for logits in ours))
    proof = Proof(
        proven=difference <= limit,
        transformers=transformers.__version__,
        max_logit_difference=difference,
        limit=limit,
        rounding_difference=_largest(before, ours) if before else None,
        sequences=len(sequences),
    )
    if FAMILIES[recipe.model.family].encoder:
        proof.compared = "likeliest tokens"
    for text, tokens in prompts:
        a, b = _continued(model, theirs, recipe, tokenizer, tokens)
        proof.greedy_equal += a == b
        proof.prompts.append({"prompt": text, "ours": tokenizer.decode(a), "transformers": tokenizer.decode(b)})
    proof.proven = proof.proven and proof.greedy_equal == len(prompts)
    proof.reason = "" if proof.proven else "the two models do not compute the same"
    return proof


@torch.no_grad()
def prove_import(checkpoint: Path, folder: Path) -> Proof:
    """Logits and training loss of a first checkpoint against the folder that it was made of, on random tokens."""
    import transformers

    recipe, model = load_model(checkpoint, device=torch.device("cpu"))
    theirs, config = _their_model(recipe, folder), recipe.model
    length, random = min(config.seq_length, _IMPORTED_TOKENS), torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (1, length), generator=random)
    targets, order = {LM_LOSS: F.pad(tokens[:, 1:], (0, 1), value=IGNORED_LABEL)}, {}
    if FAMILIES[config.family].encoder:
        targets, order = (
            {LM_LOSS: tokens, SOP_LOSS: torch.ones(1).long()},
            {"next_sentence_label": torch.ones(1).long()},
        )
    rows = row_losses(model(tokens), targets, partial(token_losses, padding=padding_of(config, tokens.device)))
    loss = sum(float(rows[name].sum()) / int((labels != IGNORED_LABEL).sum()) for name, labels in targets.items())
    their_loss = float(theirs(tokens, labels=tokens, **order).loss)
    ours = _ours(model, recipe, tokens)
    difference = _largest(ours, _theirs(theirs, recipe, tokens))
    limit = LIMIT * max(1.0, max(float(logits.abs().max()) for logits in ours))
    return Proof(
        proven=difference <= limit and abs(loss - their_loss) <= _LOSS_LIMIT * max(1.0, their_loss),
        transformers=transformers.__version__,
        max_logit_difference=difference,
        limit=limit,
        sequences=1,
        training_loss=loss,
        their_loss=their_loss,
    )


def _their_model(recipe: Recipe, exported: Path) -> Any:
    from transformers import AutoModelForCausalLM, BertForPreTraining  # the heavy extra, only for this
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    kind: Any = BertForPreTraining if FAMILIES[recipe.model.family].encoder else AutoModelForCausalLM
    # Foreign folders are only read: no pickles, no code, nothing from elsewhere.
    safely = {"use_safetensors": True, "trust_remote_code": False, "local_files_only": True}
    return kind.from_pretrained(exported, dtype=torch.float32, attn_implementation="eager", **safely).eval()


def _ours(model: nn.Module, recipe: Recipe, tokens: Tensor) -> list[Tensor]:
    """The logits of each head: bert has a second one, for the order of sentences."""
    made = model(tokens)
    logits, *others = made if FAMILIES[recipe.model.family].encoder else [made]
    return [logits[..., : recipe.model.vocab_size], *others]


def _theirs(model: Any, recipe: Recipe, tokens: Tensor) -> list[Tensor]:
    made = model(tokens)
    return (
        [made.prediction_logits, made.seq_relationship_logits]
        if FAMILIES[recipe.model.family].encoder
        else [made.logits]
    )


def _largest(left: list[Tensor], right: list[Tensor]) -> float:
    """NaN counts as infinitely far."""
    return max(float((a - b).abs().nan_to_num(nan=float("inf")).max()) for a, b in zip(left, right, strict=True))


def _prompt_tokens(recipe: Recipe, tokenizer: Tokenizer) -> list[tuple[str, Tensor]]:
    room = max(1, recipe.model.seq_length - _NEW_TOKENS)
    ids = ((text, tokenizer.encode_lists([text])[0][:room]) for text in PROMPTS)
    return [(text, torch.tensor([one])) for text, one in ids if one]


def _continued(
    model: nn.Module, theirs: Any, recipe: Recipe, tokenizer: Tokenizer, tokens: Tensor
) -> tuple[list[int], list[int]]:
    """What each makes of a prompt: the likeliest next tokens, or for bert the likeliest token at each place."""
    if FAMILIES[recipe.model.family].encoder:
        logits = _ours(model, recipe, tokens)[0], _theirs(theirs, recipe, tokens)[0]
        return logits[0][0].argmax(-1).tolist(), logits[1][0].argmax(-1).tolist()
    sizes = {"vocab_size": recipe.model.vocab_size, "seq_length": recipe.model.seq_length}
    count = min(_NEW_TOKENS, recipe.model.seq_length - tokens.shape[1])
    if count < 1:
        return [], []
    end = tokenizer.eod_id
    ours = generate(model, tokens, max_new_tokens=count, temperature=0, eod_id=end, **sizes)
    other = theirs.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=end,
        pad_token_id=end,
    )
    return ours[0, tokens.shape[1] :].tolist(), other[0, tokens.shape[1] :].tolist()
