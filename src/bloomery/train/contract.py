"""What may change when a run goes on. Every field of the recipe is free, or changes only when it is asked for by name
(`--change lr.peak`), or is fixed. This table is the only owner of that; docs/training.md shows it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bloomery.base.errors import Problem, RecipeError
from bloomery.config.draft import COMMAND_LINE, is_inside
from bloomery.config.schema import spot_at
from bloomery.config.suggest import meant_paths
from bloomery.config.yaml_nodes import inline_yaml

Kind = Literal["free", "by name", "fixed"]


@dataclass(frozen=True)
class Rule:
    fields: tuple[str, ...]
    """Fields, or sections with all that is in them."""
    kind: Kind
    why: str


CONTRACT = (
    Rule(
        ("parallel", "launch", "batch.micro_batch_size", "train.compile"),
        "free",
        "other ways to the same training; dropout is drawn anew for another micro-batch",
    ),
    Rule(
        ("train.for", "train.exit_after", "train.stop_after_nan_steps"),
        "free",
        "when to stop; a schedule or an order that follows from `train.for` is compared as what it comes to",
    ),
    Rule(
        ("train.on_spike", "train.spike_factor", "train.stop_after_spike_steps"),
        "free",
        "what spikes to come do; those of the past stay as they were",
    ),
    Rule(
        ("name", "checkpoint", "monitor", "train.evaluate", "data.validation", "data.cache_dir", "prepare"),
        "free",
        "what is saved, measured and said",
    ),
    Rule(("lr",), "by name", "the learning rate, compared as what it comes to in samples"),
    Rule(
        ("optimizer.betas", "optimizer.eps", "optimizer.weight_decay", "optimizer.clip_grad_norm"),
        "by name",
        "the size of updates",
    ),
    Rule(
        ("batch.global_batch_size", "batch.rampup"),
        "by name",
        "samples of a step; those done stay counted as they were",
    ),
    Rule(
        ("data.train",),
        "by name",
        "what is trained on; shares hold from the next sample on. Fixed with the orders `megatron` and `bigscience`",
    ),
    Rule(
        ("model.seq_length",),
        "by name",
        "tokens of a sample; each source begins its next epoch. Fixed with learned positions (gpt2, bert) and with the "
        "orders `megatron` and `bigscience`",
    ),
    Rule(("model.rope_theta",), "by name", "the rotary frequencies, which go with the sequence length"),
    Rule(
        ("precision", "loss_scale", "model.dropout", "model.softmax_over_padding"), "by name", "how a step is computed"
    ),
    Rule(("train.skip",), "by name", "only the part that lies in the past; ranges of steps to come are free"),
    Rule(
        (
            "model.family",
            "model.num_layers",
            "model.hidden_size",
            "model.num_heads",
            "model.num_kv_heads",
            "model.head_dim",
            "model.ffn_hidden_size",
            "model.vocab_size",
            "model.vocab_multiple",
            "model.init_std",
            "model.norm_eps",
            "model.tie_embeddings",
        ),
        "fixed",
        "the architecture, and how its weights began",
    ),
    Rule(("tokenizer",), "fixed", "compared by content: it may move to another path"),
    Rule(("seed", "data.order", "data.blend_one_source", "data.split"), "fixed", "which samples come when"),
    Rule(
        ("data.mask_documents", "data.reset_positions", "data.eod_loss", "data.masking"),
        "fixed",
        "what a sample is",
    ),
    Rule(("optimizer.name",), "fixed", "the optimizer's state would mean nothing to another one"),
)


@dataclass(frozen=True)
class Difference:
    """A field that is not as the checkpoint has it."""

    field: str
    old: Any
    """Plain values, as YAML has them."""
    new: Any
    why: str = ""
    """Of a field that is by name and cannot be changed here: why not. Otherwise how the difference comes about."""
    is_fixed: bool = False
    back: tuple[str, ...] = ()
    """Overrides that set it back; by default `field=old`."""

    def __str__(self) -> str:
        return f"{self.field} {inline_yaml(self.old)} -> {inline_yaml(self.new)}"

    def problem(self) -> Problem:
        what = f"{self.field} is {inline_yaml(self.new)} but the checkpoint has {inline_yaml(self.old)}"
        overrides = self.back or (f"{self.field}={inline_yaml(self.old)}",)
        remedy = f"use {' '.join(map(shlex.quote, overrides))} to go on as before"
        if self.is_fixed:
            return Problem(what, self.why or "it would make this another training", remedy)
        rule = "it changes only when it is asked for by name"
        rule = f"{self.why}, and {rule}" if self.why else rule
        return Problem(what, rule, f"{remedy}, or --change {self.field} to change it")


def rule_of(field: str) -> Rule:
    """The one rule for a field; a place in a list counts as the list."""
    (found,) = [rule for rule in CONTRACT if any(is_inside(field, outer) for outer in rule.fields)]
    return found


def check_asked(asked: Sequence[str]) -> None:
    """RecipeError for names of `--change` that are no fields, or that can never be changed."""
    problems = []
    for name in asked:
        rules = [r for r in CONTRACT if any(is_inside(field, name) or is_inside(name, field) for field in r.fields)]
        if not name or spot_at(name.split(".")) is None:
            meant = meant_paths(name.split("."))
            remedy = f"did you mean {' or '.join(meant)}?" if meant else "name a field such as lr.peak"
            problems.append(Problem(f"--change {name}: this is not a field of a recipe", "", remedy, COMMAND_LINE))
        elif all(rule.kind == "fixed" for rule in rules):
            what, rule = f"--change {name}: it cannot change when a run goes on", "it would make this another training"
            remedy = "remove it, or start afresh under another name or --run-dir"
            problems.append(Problem(what, rule, remedy, COMMAND_LINE))
    if problems:
        raise RecipeError(problems)


def refusals(differences: Sequence[Difference], asked: Sequence[str], *, checkpoint: str) -> list[Problem]:
    """Why this recipe cannot go on from the checkpoint; empty if all that differs was asked for."""
    left = [each for each in differences if each.is_fixed or not _is_asked(each, asked)]
    if not left:
        return []
    remedy = "set these back, or start afresh under another name or --run-dir"
    if not any(each.is_fixed for each in left):
        remedy = f"set these back, or add {' '.join(f'--change {each.field}' for each in left)} to change them"
    return [*(each.problem() for each in left), Problem(f"cannot resume from {checkpoint}", remedy=remedy)]


def _is_asked(difference: Difference, asked: Sequence[str]) -> bool:
    return any(is_inside(difference.field, name) for name in asked)
