"""How a recipe differs from that of a checkpoint, as far as the contract minds: values, and what they come to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bloomery.base.units import Amount
from bloomery.config.describe import as_dict
from bloomery.config.recipe import DataSection, Recipe, SourceSection
from bloomery.config.yaml_nodes import inline_yaml
from bloomery.data.blend import same_shares
from bloomery.families.registry import FAMILIES, READERS
from bloomery.sizing.data_rules import source_key
from bloomery.sizing.schedule import TrainingPlan
from bloomery.train.contract import Difference, on_resume

_RESOLVED = ("lr.schedule", "lr.warmup", "lr.decay", "lr.cooldown", "data.train", "model.seq_length", "train.skip")
"""Fields that are not compared as they are written."""
_USED_AT_STEP_0 = ("seed", "model", "tokenizer")
"""What a checkpoint without a step has made use of: it has weights. Whatever else differs has not happened yet."""


@dataclass(frozen=True)
class Side:
    """A recipe and what it comes to: now, or when the checkpoint was saved."""

    recipe: Recipe
    plan: TrainingPlan


def differences(now: Side, then: Side, *, step: int, same_tokenizer: bool = False) -> list[Difference]:
    """All that the contract minds, in the order of the recipe. `step`: that of the checkpoint."""
    new, old = as_dict(now.recipe), as_dict(then.recipe)
    unread = [f"model.{name}" for name, readers in READERS.items() if not {*readers} & {*_families(now, then)}]
    sections = [name for name in new if step or name in _USED_AT_STEP_0]
    found = [each for name in sections for each in _plain(new[name], old[name], name)]
    found = [each for each in found if each.field not in unread]
    if same_tokenizer:
        found = [each for each in found if not each.field.startswith("tokenizer")]
    found += _sequence_length(now.recipe, then.recipe, step)
    if step == 0:
        return [each for each in found if each.is_fixed]
    found += [*_learning_rate(now, then, step), *_sources(now.recipe, then.recipe), *_skips(now, then, step)]
    return sorted(found, key=lambda each: list(new).index(each.field.split(".")[0]))


def _families(*sides: Side) -> Iterator[str]:
    for side in sides:
        yield side.recipe.model.family


def _plain(new: Any, old: Any, path: str) -> Iterator[Difference]:
    """As they are written, field by field, down to where only one side has a section."""
    if isinstance(new, dict) and isinstance(old, dict):
        for key in new:
            yield from _plain(new[key], old.get(key), f"{path}.{key}")
    elif new != old and path not in _RESOLVED and (kind := on_resume(path).kind) != "free":
        yield Difference(path, old, new, is_fixed=kind == "fixed")


def _sequence_length(now: Recipe, then: Recipe, step: int) -> Iterator[Difference]:
    new, old = now.model.seq_length, then.model.seq_length
    if new == old:
        return
    why = ""
    if FAMILIES[now.model.family].positions == "learned":
        why = f"positions are learned in {now.model.family}: the checkpoint has a vector for each of its {old}"
    elif step and now.data is not None and now.data.order != "timeless":
        why = f"with data.order={now.data.order} the order of all samples follows from it: some would come twice"
    yield Difference("model.seq_length", old, new, why, is_fixed=bool(why))


def _learning_rate(now: Side, then: Side, step: int) -> Iterator[Difference]:
    """Amounts as the samples that they come to: they may follow from train.for, the batch and the sequence length."""
    new, old = now.plan.lr, then.plan.lr
    if new.warmup_samples != old.warmup_samples:
        yield _amount("warmup", old.warmup_samples, new.warmup_samples, now.recipe, then.recipe)
    if new.schedule != old.schedule:
        decay = "null" if old.schedule == "constant" else f"{old.decay_samples} samples"
        cooldown = f"{old.cooldown_samples} samples" if old.schedule == "wsd" else "null"
        back = (f"lr.schedule={old.schedule}", f"lr.decay={decay}", f"lr.cooldown={cooldown}")
        yield Difference("lr.schedule", old.schedule, new.schedule, back=back)
        return
    if new.schedule == "constant":
        return
    if new.decay_samples != old.decay_samples and not _cooldown_to_come(now, then, step):
        yield _amount("decay", old.decay_samples, new.decay_samples, now.recipe, then.recipe)
    if new.cooldown_samples != old.cooldown_samples:
        yield _amount("cooldown", old.cooldown_samples, new.cooldown_samples, now.recipe, then.recipe)


def _cooldown_to_come(now: Side, then: Side, step: int) -> bool:
    """Whether only the end of a wsd schedule moves with the end of training, and no step so far has felt it."""
    new, old = now.plan.lr, then.plan.lr
    begins = min(new.decay_samples - new.cooldown_samples, old.decay_samples - old.cooldown_samples)
    follows = now.recipe.lr.decay is None and then.recipe.lr.decay is None
    return new.schedule == "wsd" and follows and then.plan.batch.consumed_after_step(step) <= begins


def _amount(name: str, old: int, new: int, now: Recipe, then: Recipe) -> Difference:
    is_now, was = _said(getattr(now.lr, name), now), _said(getattr(then.lr, name), then)
    why = f"it is {is_now} and was {was}" if is_now != was else f"it is {is_now}, which comes to other samples now"
    return Difference(f"lr.{name}", f"{old} samples", f"{new} samples", why)


def _said(amount: Amount | None, recipe: Recipe) -> str:
    return f"the end of training ({recipe.train.for_})" if amount is None else str(amount)


def _sources(now: Recipe, then: Recipe) -> Iterator[Difference]:
    """By name and share: shards may move."""
    if now.data is None or then.data is None or _is_same_blend(now.data, then.data):
        return
    order, why = now.data.order, ""
    if order != "timeless":
        why = f"with data.order={order} the order of all samples follows from it: some would come twice"
    new, old = now.data.train, then.data.train
    if [source_key(each) for each in new] == [source_key(each) for each in old]:
        for number, (one, other) in enumerate(zip(new, old, strict=True)):
            if one.weight != other.weight:
                name = f"data.train.{number}.weight"
                yield Difference(name, other.weight, one.weight, why, is_fixed=bool(why))
        return
    known = (why or "a source is known by its name, by default its path") + _hint_of_moves(new, old)
    yield Difference("data.train", _written(old), _written(new), known, is_fixed=bool(why))


def _hint_of_moves(new: list[SourceSection], old: list[SourceSection]) -> str:
    keys = {source_key(each) for each in new}
    gone = [source_key(each) for each in old if source_key(each) not in keys]
    if not gone or len(new) < len(old):
        return ""
    return f" (a shard that has only moved stays known with `name: {gone[0]}`)"


def _is_same_blend(now: DataSection, then: DataSection) -> bool:
    """Only proportions matter to a timeless blend. The other orders round: equal ones may come out otherwise."""
    new, old = ({source_key(each): each.weight for each in data.train} for data in (now, then))
    if now.order == "timeless":
        return same_shares(new, old)
    return [*new.items()] == [*old.items()]


def _written(sources: list[SourceSection]) -> list[dict[str, Any]]:
    return [each.model_dump(mode="json", exclude_none=True) for each in sources]


def _skips(now: Side, then: Side, step: int) -> Iterator[Difference]:
    new, old = (
        [(first, min(last, step)) for first, last in side.plan.skip_ranges if first <= step] for side in (now, then)
    )
    if new == old:
        return
    why = f"steps up to {step} are done: go back with --from to pass over one of them"
    to_come = [(max(first, step + 1), last) for first, last in now.plan.skip_ranges if last > step]
    back = [f"{first}-{last} steps" for first, last in [*old, *to_come]]
    overrides = (f"train.skip={inline_yaml(back)}",)
    yield Difference("train.skip", then.recipe.train.skip, now.recipe.train.skip, why, back=overrides)
