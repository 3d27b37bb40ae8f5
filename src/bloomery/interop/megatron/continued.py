"""A checkpoint of Megatron as one of ours, in a run folder that `train` continues: its recipe, step and samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bloomery.base.doing import doing
from bloomery.base.errors import DataError, Problem, RecipeError
from bloomery.checkpoint.load import Checkpoint, load_model
from bloomery.config.load import COMMAND_LINE, Places, apply_override, as_dict, load_recipe, validated
from bloomery.config.recipe import Recipe
from bloomery.data.blend import TimelessBlend
from bloomery.families.registry import FAMILIES
from bloomery.interop.hf.importer import begin_run, proven
from bloomery.interop.hf.proof import Proof
from bloomery.interop.megatron.checkpoint import MODEL, MOMENTS, Found
from bloomery.interop.megatron.data import fill_data
from bloomery.interop.megatron.flags import MAPPED, POST_NORM, READ, REFUSED, CommandLine, Given, kind_of
from bloomery.interop.megatron.recipe import Builder, fill
from bloomery.interop.megatron.weights import Weights, model_rows
from bloomery.sizing.check import check, source_key
from bloomery.sizing.schedule import History, Stretch, TrainingPlan

_OTHER_MODELS = [word.partition("=")[0] for words in [*REFUSED.values()][:2] for word in words]
_READ = {*READ, *_OTHER_MODELS}
"""Arguments that decide the recipe, or a model that is none of ours."""
_NEGATED = {
    "add_bias_linear": "disable-bias-linear",
    "bias_gelu_fusion": "no-bias-gelu-fusion",
    "bert_binary_head": "bert-no-binary-head",
}
_POSITIONS = {1: "rotary", 2: "absolute", 3: "alibi"}
"""An enumeration of BigScience's."""


@dataclass
class Continued:
    recipe: Recipe
    step: int
    consumed_samples: int
    held_samples: int
    skipped_updates: int
    has_moments: bool
    history: History
    loss_scale: float = 0.0
    """0: unknown."""
    warnings: list[Problem] = field(default_factory=list)

    @property
    def blend(self) -> dict[str, Any] | None:
        """Of the timeless order, which then begins here."""
        data = self.recipe.data
        if not self.step or data is None or data.order != "timeless":
            return None
        begun = TimelessBlend.start({source_key(each): each.weight for each in data.train}).state
        return replace(begun, first_sample=self.consumed_samples).to_json()

    @property
    def tokens(self) -> int:
        return self.consumed_samples * self.recipe.model.seq_length


def _command_line(found: Found) -> CommandLine:
    """The arguments of the training as its flags."""
    args, flags = found.args, dict[str, Given]()
    if args.get("train_samples"):
        args = {**args, "train_iters": None, "lr_decay_iters": None, "lr_warmup_iters": None}
    args = {**args, "padded_vocab_size": model_rows(found), "pad_vocab_size_to": None}
    for key, value in args.items():
        name = key.replace("_", "-")
        if key in _NEGATED and value is False:
            name, value = _NEGATED[key], True
        if key == "position_embedding_type" and not isinstance(value, str):
            value = _POSITIONS.get(*getattr(value, "args", (0,)))
        values = value if isinstance(value, (list, tuple)) else [] if value is True else [value]
        is_plain = values is not None and all(isinstance(each, (str, int, float)) for each in values)
        if value is not None and value is not False and is_plain and {name, name.replace("-", "_")} & _READ:
            flags[name] = Given(f"--{name}", [str(each) for each in values], f"the arguments in {found.folder}")
    is_encoder = any(name.startswith(("binary_head.", "lm_head.dense.")) for name in found.tensors[MODEL])
    return CommandLine("pretrain_bert.py" if is_encoder else "pretrain_gpt.py", flags)


def recipe_of(found: Found, recipe: str | None, overrides: Sequence[str], *, weights_only: bool) -> Recipe:
    """By the arguments of the training; or that one, with its `model`."""
    if "num_layers" not in found.args:
        what, rule = f"{found.folder} has no arguments of its training", "the shape of the model follows from them"
        raise DataError(Problem(what, rule, "import a checkpoint with `args`"))
    b = Builder(_command_line(found), deepspeed=found.is_deepspeed)
    fill(b)
    fill_data(b)
    is_encoder = FAMILIES[b.raw["model"]["family"]].encoder
    if is_encoder and not b.has(POST_NORM):
        rule = f"bert here is post-norm, as Megatron's is with --{POST_NORM} only"
        b.refuse("", "this BERT is pre-norm", rule, "no family here computes it")
    for name, given in b.line.flags.items():
        kind, why = kind_of(name, given.values)
        if kind == "refused" and not (name == POST_NORM and is_encoder) and name not in MAPPED:
            b.refuse(name, f"{given.flag} {given.text}".strip(), why, "no family here computes it")
    if b.problems:
        raise RecipeError(b.problems)
    if "data" in b.raw and not is_encoder:
        b.raw["data"]["order"] = "bigscience" if found.is_deepspeed else "megatron"
    if not Path(b.raw.get("tokenizer", {}).get("path", "")).is_dir():
        b.raw.pop("tokenizer", None)
    raw: dict[str, Any] = {"name": "continued", **b.raw}
    if recipe is not None:
        raw = {**as_dict(load_recipe(recipe).recipe), "model": raw["model"]}
    places = Places(COMMAND_LINE)
    for override in overrides:
        apply_override(raw, override, places)
    made = check(validated(raw, places)).recipe
    if made.data is None and not weights_only:
        rule = "a training continues in its data, whose order is part of the checkpoint"
        remedy = "add 'data.train=[{path: SHARD}]' data.order=megatron, or import the weights alone: --weights-only"
        raise RecipeError(Problem("the recipe has no data", rule, remedy))
    return made


def continued(found: Found, recipe: Recipe, *, weights_only: bool) -> Continued:
    """What the training had done."""
    state, args = found.state, found.args
    if weights_only:
        for moment in MOMENTS:
            found.tensors[moment].clear()
        return Continued(recipe, 0, 0, 0, 0, False, History())
    if found.unread:
        rule = "moments are read where they are by weight: fully reshardable ones, those of a plain optimizer, ZeRO-1's"
        remedy = "save once with --dist-ckpt-optim-fully-reshardable, or import the weights alone: --weights-only"
        raise DataError(Problem(found.unread, rule, remedy, str(found.folder)))
    step = int(state.get("iteration") or state.get("global_steps") or 0)
    per_step = args.get("global_batch_size") or 0
    consumed = int(args.get("consumed_train_samples") or step * per_step)
    scheduler = state.get("opt_param_scheduler") or state.get("lr_scheduler") or {}
    held = max(0, consumed - int(scheduler.get("num_steps") or consumed)) if isinstance(scheduler, dict) else 0
    plan, warnings, history = TrainingPlan.of(recipe), list[Problem](), History()
    if plan.batch.consumed_after_step(step) != consumed:
        what = f"{consumed:,} samples in {step:,} steps, where the recipe has {plan.batch.consumed_after_step(step):,}"
        warnings.append(Problem(what, "the recipe's batches hold from there on"))
        history = _past(step, consumed, recipe.model.seq_length)
    has_moments = bool(found.tensors[MOMENTS[0]])
    if not has_moments:
        warnings.append(Problem("the checkpoint has no optimizer state", "moments begin at zero"))
    updates = step if found.updates is None else found.updates
    scaler = (state.get("optimizer") or {}).get("grad_scaler") or getattr(state.get("loss_scaler"), "__dict__", {})
    scale = float(scaler.get("scale") or scaler.get("cur_scale") or 0.0) if isinstance(scaler, dict) else 0.0
    return Continued(recipe, step, consumed, held, max(0, step - updates), has_moments, history, scale, warnings)


def _past(step: int, consumed: int, seq_length: int) -> History:
    """So many samples in so many steps; which took more than others is not known."""
    least, more = divmod(consumed, max(step, 1))
    fewer = step - more
    stretches = [Stretch(least, 1, 0, 0, seq_length)] if fewer else []
    done = fewer * least
    stretches += [Stretch(least + 1, fewer + 1, done, done * seq_length, seq_length)] if more else []
    return History(step, consumed, consumed * seq_length, tuple(stretches))


def import_checkpoint(
    found: Found, output: Path, done: Continued, state: Mapping[str, Any], compare: Path | None
) -> tuple[Path, str]:
    """Write `output` as a run folder; the checkpoint, and how it was proven. After any error `output` is as it was."""
    weights = Weights(found, done.recipe.model)

    with doing(f"checking the weights of {found.folder}") as work:
        for name in work.over(weights.shapes, len(weights.shapes)):  # better now than in the middle of a save
            weights.read(name, MODEL)

    def value(name: str, shape: tuple[int, ...]) -> Tensor:
        if name == "optim.step":
            return torch.tensor(float(done.step - done.skipped_updates if done.has_moments else 0))
        kind, _, ours = name.partition(".")
        if kind == MODEL:
            return weights.read(ours, MODEL)
        ours, _, moment = ours.rpartition(".")
        return weights.read(ours, moment) if done.has_moments else torch.zeros(shape)

    def prove(checkpoint: Checkpoint) -> Proof:
        proof = _finite(checkpoint) if compare is None else proven(checkpoint, compare)
        if compare is not None and not proof.proven:
            raise DataError(Problem(str(proof), "--compare-hf asks for a proof", place=str(compare)))
        return proof

    tokens = {"consumed_samples": done.consumed_samples, "consumed_tokens": done.tokens}
    made, proof = begin_run(output, done.recipe, state, value, prove, step=done.step, facts=tokens)
    return made, str(proof)


@torch.no_grad()
def _finite(checkpoint: Checkpoint) -> Proof:
    config = checkpoint.recipe.model
    made = load_model(checkpoint, device=torch.device("cpu"))(torch.randint(config.vocab_size, (1, config.seq_length)))
    if not bool((made[0] if isinstance(made, tuple) else made).isfinite().all()):
        raise DataError(Problem("the model computes logits that are not finite", remedy="import an earlier one"))
    return Proof(False, "its logits are finite; name its Hugging Face conversion with --compare-hf to prove it")
