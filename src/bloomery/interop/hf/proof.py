"""The proof of an export or an import: the folder as transformers loads it against the checkpoint as we load it."""

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bloomery.base.accelerator import available_host_bytes
from bloomery.base.bounded import read_json
from bloomery.base.errors import DataError, Problem
from bloomery.base.units import format_bytes
from bloomery.checkpoint.format import DTYPES
from bloomery.checkpoint.load import Checkpoint, load_model
from bloomery.config.recipe import Recipe
from bloomery.data.tokenizer import Tokenizer
from bloomery.families.family import IGNORED_LABEL, LM_LOSS
from bloomery.families.registry import FAMILIES
from bloomery.interop.hf.folder import CONFIG, HfWeights
from bloomery.model.generate import generate
from bloomery.model.loss import padding_of, row_losses, token_losses
from bloomery.sizing.parameters import count_parameters, second_loss

LIMIT = 1e-4
"""Of the difference of logits, for logits up to 1; larger ones in proportion."""
PROMPTS = ("The", "def main(", "Once upon a time", "1 + 1 =", "In the beginning was the word, and")
_LOSS_LIMIT = 1e-5
_NEW_TOKENS = 16
_IMPORTED_TOKENS = 512
_UNUSED = re.compile("^_|_implementation$|label")
"""What decides nothing that is compared: transformers fetches the code that an implementation names, and makes a table
of as many labels as a config.json says there are."""
_BYTES_TO_PROVE = 10
"""A parameter: both models in fp32, and some room for logits."""


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
    """Of the prompts; an encoder continues nothing."""
    training_loss: float | None = None
    """Of an import, as it is trained with, and as transformers has it."""
    their_loss: float | None = None
    prompts: list[dict[str, str]] = field(default_factory=list)

    def __str__(self) -> str:
        if self.max_logit_difference is None:
            return f"not verified: {self.reason}"
        if self.training_loss is not None:
            losses = f"training loss {self.training_loss:.6g}, transformers' {self.their_loss:.6g}"
            return f"proof: {losses}; largest logit difference {self.max_logit_difference:.1e}"
        rounding = f", rounding changed them by {self.rounding_difference:.1e}" if self.rounding_difference else ""
        return (
            f"proof: largest logit difference {self.max_logit_difference:.1e} on {self.sequences} sequences{rounding}; "
            f"{self.compared} equal for {self.greedy_equal} of {len(self.prompts)} prompts"
        )


def why_unproven(recipe: Recipe) -> str:
    """Why nothing can be compared with transformers here; empty if it can."""
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed here"
    needed = _BYTES_TO_PROVE * count_parameters(recipe.model).total
    free = available_host_bytes()
    lacking = f"it needs about {format_bytes(needed)} of memory, and {format_bytes(free)} are available"
    return lacking if needed > free else ""


@torch.no_grad()
def prove(checkpoint: Checkpoint, exported: Path, tokenizer: Tokenizer, dtype: torch.dtype) -> Proof:
    """Logits and continuations of an export. Both models are held in fp32 at once: 8 bytes a parameter and more."""
    both = _Both(checkpoint, exported)
    prompts = _prompt_tokens(both.recipe, tokenizer)
    sequences = [both.random_tokens(both.recipe.model.seq_length), *(tokens for _, tokens in prompts)]
    before = both.ours(*sequences) if dtype != torch.float32 else []
    for parameter in both.model.parameters():
        parameter.copy_(parameter.to(dtype).to(torch.float32))
    ours = both.ours(*sequences)
    if not all(bool(logits.isfinite().all()) for logits in ours):
        what = "the model of this checkpoint computes logits that are not finite, though its weights are"
        rule = "it has diverged, and there is nothing to compare"
        raise DataError(Problem(what, rule, "export an earlier checkpoint; --no-proof exports this one as it is"))
    proof = both.compare(ours, sequences)
    proof.rounding_difference = _largest(before, ours) if before else None
    if both.is_encoder:
        proof.compared = "likeliest tokens"
    for text, tokens in prompts:
        a, b = both.continued(tokenizer, tokens)
        proof.greedy_equal += a == b
        proof.prompts.append({"prompt": text, "ours": tokenizer.decode(a), "transformers": tokenizer.decode(b)})
    proof.proven = proof.proven and proof.greedy_equal == len(prompts)
    proof.reason = "" if proof.proven else "the two models do not compute the same"
    return proof


@torch.no_grad()
def prove_import(checkpoint: Checkpoint, folder: Path) -> Proof:
    """Logits and training loss of a first checkpoint against the folder that it was made of, on random tokens; or
    against one that was made of the same weights, with fewer rows of the vocabulary or rounded to 16 bits."""
    both = _Both(checkpoint, folder)
    for parameter in both.model.parameters():
        parameter.copy_(parameter.to(both.their_dtype))
    config = both.recipe.model
    tokens = both.random_tokens(min(config.seq_length, _IMPORTED_TOKENS))
    targets, labels = {LM_LOSS: F.pad(tokens[:, 1:], (0, 1), value=IGNORED_LABEL)}, {"labels": tokens}
    if both.is_encoder:
        targets = {LM_LOSS: tokens}
    if both.second:
        targets[both.second] = labels["next_sentence_label"] = torch.ones(1).long()
    ours = both.ours(tokens)
    if both.vocab_size == config.vocab_size:  # as it is trained, whatever padding has to do with it
        losses = partial(token_losses, padding=padding_of(config, tokens.device))
        rows = row_losses(both.model(tokens), targets, losses)
    else:
        rows = row_losses((ours[0], ours[1]) if both.second else ours[0], targets, token_losses)
    loss = sum(float(rows[name].sum()) / int((target != IGNORED_LABEL).sum()) for name, target in targets.items())
    proof = both.compare(ours, [tokens])
    proof.training_loss, proof.their_loss = loss, float(both.their_model(tokens, **labels).loss)
    proof.proven = proof.proven and abs(loss - proof.their_loss) <= _LOSS_LIMIT * max(1.0, proof.their_loss)
    return proof


class _Both:
    """A checkpoint as we load it, and a folder as transformers does, in fp32 on the CPU."""

    def __init__(self, checkpoint: Checkpoint, folder: Path) -> None:
        self.recipe, self.model = checkpoint.recipe, load_model(checkpoint, device=torch.device("cpu"))
        self.is_encoder = FAMILIES[self.recipe.model.family].encoder
        self.second = second_loss(self.recipe.model)
        self.their_model = _their_model(folder, is_encoder=self.is_encoder, is_paired=self.second is not None)
        self.vocab_size: int = min(self.recipe.model.vocab_size, self.their_model.config.vocab_size)
        self.their_dtype = DTYPES[HfWeights(folder).dtypes.popitem()[1]]

    def random_tokens(self, length: int) -> Tensor:
        return torch.randint(self.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))

    def ours(self, *sequences: Tensor) -> list[Tensor]:
        """The logits of each head: an encoder may have a second one, for two segments."""
        made = [self.model(tokens) for tokens in sequences]
        heads = [head for each in made for head in (each if self.second else (each,))]
        return [head[..., : self.vocab_size] for head in heads]

    def theirs(self, *sequences: Tensor) -> list[Tensor]:
        made = [self.their_model(tokens) for tokens in sequences]
        if self.second:
            return [head for each in made for head in (each.prediction_logits, each.seq_relationship_logits)]
        return [each.logits for each in made]

    def compare(self, ours: Sequence[Tensor], sequences: Sequence[Tensor]) -> Proof:
        import transformers

        difference = _largest(ours, self.theirs(*sequences))
        limit = LIMIT * max(1.0, max(float(logits.abs().max()) for logits in ours))
        return Proof(
            proven=difference <= limit,
            transformers=transformers.__version__,
            max_logit_difference=difference,
            limit=limit,
            sequences=len(sequences),
        )

    def continued(self, tokenizer: Tokenizer, tokens: Tensor) -> tuple[list[int], list[int]]:
        """What each makes of a prompt: the likeliest next tokens; of an encoder, the likeliest at each place."""
        if self.is_encoder:
            pair = self.ours(tokens)[0], self.theirs(tokens)[0]
            return pair[0][0].argmax(-1).tolist(), pair[1][0].argmax(-1).tolist()
        length, end = tokens.shape[1], tokenizer.eod_id
        count = min(_NEW_TOKENS, self.recipe.model.seq_length - length)
        if count < 1:
            return [], []
        ours = generate(self.model, tokens, max_new_tokens=count, temperature=0, eod_id=end)
        options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": end, "pad_token_id": end}
        other = self.their_model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
        return ours[0, length:].tolist(), other[0, length:].tolist()


def _their_model(folder: Path, *, is_encoder: bool, is_paired: bool) -> Any:
    """From its config.json and safetensors files alone."""
    import transformers  # the heavy extra, only for this
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    kind: Any = transformers.AutoModelForMaskedLM if is_encoder else transformers.AutoModelForCausalLM
    kind = transformers.AutoModelForPreTraining if is_paired else kind
    content = {name: value for name, value in read_json(folder / CONFIG).items() if not _UNUSED.search(name)}
    config = type(transformers.AutoConfig.for_model(content["model_type"])).from_dict(content)
    generation = {} if is_encoder else {"generation_config": transformers.GenerationConfig()}
    # Foreign folders are only read: no pickles, no code, nothing from elsewhere.
    safely = {"use_safetensors": True, "trust_remote_code": False, "local_files_only": True, **generation}
    return kind.from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation="eager", **safely
    ).eval()


def _largest(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """NaN counts as infinitely far."""
    return max(float((a - b).abs().nan_to_num(nan=float("inf")).max()) for a, b in zip(left, right, strict=True))


def _prompt_tokens(recipe: Recipe, tokenizer: Tokenizer) -> list[tuple[str, Tensor]]:
    room = max(1, recipe.model.seq_length - _NEW_TOKENS)
    ids = ((text, tokenizer.encode_batch([text])[0][:room].tolist()) for text in PROMPTS)
    return [(text, torch.tensor([one])) for text, one in ids if one]
