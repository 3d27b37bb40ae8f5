"""What a run goes on from: nothing, its newest checkpoint, or the one a user names."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bloomery.base.errors import BloomeryError, DataError, Problem
from bloomery.base.ranks import ALONE, Ranks
from bloomery.base.storage import writing
from bloomery.checkpoint.folder import RETIRED, checkpoint_named, verify
from bloomery.checkpoint.load import read_recipe_of, read_state, using_state
from bloomery.checkpoint.manifest import read_manifest
from bloomery.checkpoint.remote import RemoteSource
from bloomery.checkpoint.select import Choice, newest_good, tidy
from bloomery.config.recipe import Recipe
from bloomery.data.blend import BlendState
from bloomery.data.causal import DataCursor
from bloomery.data.tokenizer import Tokenizer, is_other_tokenizer
from bloomery.monitor.journal import Journal
from bloomery.monitor.meters import IntervalMeter
from bloomery.monitor.names import Event
from bloomery.sizing.schedule import TrainingPlan
from bloomery.train.contract import Difference, refusals
from bloomery.train.differences import Side, differences
from bloomery.train.loss_scale import LossScale
from bloomery.train.state import TrainState


@dataclass(frozen=True)
class ResumePoint:
    state: TrainState
    plan: TrainingPlan
    """Of the recipe that goes on: it counts on from what has been."""
    checkpoint: Path | None = None
    before: DataCursor | None = None
    """What was taken from the data; None if nothing was."""
    changes: Sequence[Difference] = ()
    """What differs from the checkpoint's recipe because it was asked for by name."""
    interval: Mapping[str, Any] | None = None
    """The logging interval that the stop cut in two."""
    damaged: Mapping[Path, list[str]] = field(default_factory=dict)
    """Newer checkpoints that cannot be used, and why."""


def find_resume_point(
    recipe: Recipe,
    roots: Sequence[Path],
    *,
    wanted: str | None,
    changes: Sequence[str] = (),
    ranks: Ranks = ALONE,
    remote: RemoteSource | None = None,
) -> ResumePoint:
    """The checkpoint called `wanted`, else the newest that is whole, here or `remote`; of this very training.
    DataError if it is not, less the fields named by `changes`.

    All ranks call it: they share the work of verifying."""
    if wanted is not None:
        if remote is not None:
            remote.fetch_named(wanted, roots)
        named = checkpoint_named(roots, wanted)
        verify(named, ranks=ranks)
        choice = Choice(named)
    else:
        choice = newest_good(roots, ranks=ranks, elsewhere=remote.fetch_newer if remote else None, why_not=_why_not)
    checkpoint = choice.folder
    if checkpoint is None:
        scale = LossScale.start(recipe.loss_scale) if recipe.precision == "fp16" else None
        return ResumePoint(TrainState(loss_scale=scale), TrainingPlan.of(recipe))
    return replace(resume_point_at(checkpoint, recipe, changes=changes), damaged=choice.damaged)


def resume_point_at(
    checkpoint: Path, recipe: Recipe, *, changes: Sequence[str] = (), reads: Collection[str] | None = None
) -> ResumePoint:
    """This checkpoint, for a recipe that goes on from it. DataError if that is another training, less the fields named
    by `changes`. `reads`: the sections to compare, where it is not all of them."""
    saved, facts, state, blend = _read(checkpoint)
    then = Side(saved, TrainingPlan.of(saved, state.history))
    now = Side(recipe, TrainingPlan.resumed(recipe, then.plan, state.step))
    same_tokenizer = recipe.tokenizer == saved.tokenizer or _is_tokenizer_of(checkpoint, recipe)
    different = differences(now, then, step=state.step, same_tokenizer=same_tokenizer)
    if reads is not None:
        different = [each for each in different if each.field.split(".")[0] in reads]
    if problems := refusals(different, changes, checkpoint=str(checkpoint)):
        raise DataError(problems)
    state.history = now.plan.history
    state.saved_at = float(read_manifest(checkpoint).get("time") or 0.0)
    if any(each.field.startswith(("data.", "model.", "batch.")) for each in different):
        state.spikes = state.spikes.learn_again()
    if recipe.precision != "fp16":
        state.loss_scale = None
    elif state.loss_scale is None:
        state.loss_scale = LossScale.start(recipe.loss_scale)
    same_length = saved.model.seq_length == recipe.model.seq_length
    return ResumePoint(
        state,
        now.plan,
        checkpoint=checkpoint,
        before=DataCursor(saved, then.plan, state.step, state.consumed_samples, blend) if state.step else None,
        changes=different,
        interval=facts["interval"] if same_length else None,  # tokens per second would be of neither length
    )


def _read(checkpoint: Path) -> tuple[Recipe, dict[str, Any], TrainState, BlendState | None]:
    """Recipe, facts and state of a checkpoint, and its blend. DataError or RecipeError if they make no sense."""
    saved, facts = read_recipe_of(checkpoint), read_state(checkpoint)
    with using_state(checkpoint):
        state = TrainState.from_json(facts)
        expected = TrainingPlan.of(saved, state.history).batch.consumed_after_step(state.step)
        if expected != state.consumed_samples:
            raise ValueError(
                f"{state.consumed_samples} samples after step {state.step}, where the recipe has {expected}"
            )
        if facts["interval"] is not None:
            IntervalMeter(facts["interval"])
        blend = BlendState.from_json(facts["blend"]) if facts["blend"] is not None else None
        if blend is not None and blend.first_sample > state.consumed_samples:
            raise ValueError(f"the blend begins at sample {blend.first_sample}, after {state.consumed_samples}")
    return saved, facts, state, blend


def _why_not(checkpoint: Path) -> list[str]:
    """What makes recipe and state of a checkpoint unusable though every file is as it was saved."""
    try:
        _read(checkpoint)
    except BloomeryError as error:
        return [problem.what for problem in error.problems]
    return []


def check_tokenizer(past: ResumePoint, tokenizer_hash: str | None) -> None:
    """DataError if the data turns out to be of another tokenizer than the checkpoint's, under the same path."""
    if past.checkpoint is None or tokenizer_hash is None:
        return
    then = _tokenizer_hash_of(past.checkpoint)
    if then is not None and is_other_tokenizer(then, tokenizer_hash):
        what = (
            f"the tokenizer has the hash {tokenizer_hash[:12]}, but {past.checkpoint.name} was trained with {then[:12]}"
        )
        rule = "with another one its tokens would mean other texts"
        raise DataError(Problem(what, rule, "put the tokenizer back that it was trained with"))


def checked_shards(past: ResumePoint, shards: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """These, and those of sources that are away: they stay known for as long as the place reached in them. DataError if
    a source is another shard than it was, or under a new name the shard that another one was."""
    if past.checkpoint is None or past.before is None:
        return shards
    told = known_shards(past.checkpoint)
    problems = []
    for name, facts in shards.items():
        if name in told and not _same_shard(facts, told[name]):
            problems.append(_other_shard(name, facts, told[name], past.checkpoint.name))
        elif name not in told:
            known = [other for other, then in told.items() if then.get("sample_digest") == facts["sample_digest"]]
            known.sort(key=lambda other: other in shards)  # one that is gone may come back
            problems += [_known_shard(name, other, in_use=other in shards) for other in known[:1]]
    if problems:
        raise DataError(problems)
    return told | shards


def known_shards(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """By source, all shards that a run was ever trained on: what tells them from others, and where they lay."""
    told: dict[str, dict[str, Any]] | None = read_manifest(checkpoint).get("shards")
    return told or {}


def _same_shard(now: Mapping[str, Any], then: Mapping[str, Any]) -> bool:
    """By all that is known of both; the hash of earlier versions was another one."""
    return all(now[key] == then[key] for key in ("documents", "tokens", "sample_digest") if key in then)


def _other_shard(name: str, now: Mapping[str, Any], then: Mapping[str, Any], checkpoint: str) -> Problem:
    sizes = [f"{facts['documents']:,} documents and {facts['tokens']:,} tokens" for facts in (now, then)]
    had = sizes[1] if sizes[0] != sizes[1] else "as many, but others"
    what = f"the source '{name}' has {sizes[0]}, but {checkpoint} was trained on one with {had}"
    rule = "the place that training has reached in it would mean other samples"
    return Problem(what, rule, "put the shard back, or add the new one under another `name` with --change data.train")


def _known_shard(name: str, known: str, *, in_use: bool) -> Problem:
    what = f"the source '{name}' is the shard that the run knows as '{known}'"
    rule = "under another name its samples would come again from the beginning"
    remedy = f"give '{known}' more weight instead" if in_use else f"add `name: {known}` to the source"
    return Problem(what, rule, remedy)


def report_fetched(remote: RemoteSource, step: int, journal: Journal) -> None:
    found = remote.fetched
    for name, reasons in found.damaged.items():
        journal.event(Event.DAMAGED, step, folder=name, reasons=reasons, place=remote.url)
        journal.warning(f"the copy {remote.place(name)} is damaged ({'; '.join(reasons)}). It is not used")
    if found.folder is None:
        return
    journal.event(Event.FETCHED, step, folder=found.folder.name, source=remote.url)
    if found.put_aside:
        journal.event(
            Event.DAMAGED, step, folder=found.folder.name, reasons=list(found.reasons), place=str(remote.root)
        )
        journal.warning(
            f"{found.folder} was damaged ({'; '.join(found.reasons)}). It is called {found.put_aside} now; "
            f"its copy from {remote.url} is used"
        )


def archive_stale(recipe: Recipe, roots: Sequence[Path], past: ResumePoint, journal: Journal) -> None:
    """Move aside what this run does not go on from, and tell it. Not before the past is loaded: a start that fails must
    leave every checkpoint where it was."""
    keep_debris = recipe.checkpoint.debris == "keep"
    renamed: dict[Path, str] = {}
    for root in roots:
        with writing(root, "put the folder in order"):
            done = tidy(root, step=past.state.step, damaged=past.damaged, keep_debris=keep_debris)
        renamed |= done.quarantined
        if done.debris:
            journal.event(Event.DEBRIS_REMOVED, past.state.step, folders=done.debris, kept=keep_debris)
        if done.retired:
            journal.event(Event.RETIRED, past.state.step, folders=done.retired)
            journal.notice(f"later checkpoints belong to a branch that is left now; they are in {root / RETIRED}")
        if done.latest_said is not None and past.checkpoint is not None:
            journal.event(Event.LATEST_MENDED, past.state.step, said=done.latest_said, place=str(root))
    for path, reasons in past.damaged.items():
        journal.event(Event.DAMAGED, past.state.step, folder=path.name, reasons=reasons, place=str(path.parent))
        used = past.checkpoint.name if past.checkpoint else "nothing"
        journal.warning(f"{path} is damaged ({'; '.join(reasons)}). It is called {renamed[path]} now; {used} is used")


def _is_tokenizer_of(checkpoint: Path, recipe: Recipe) -> bool:
    """Whether the recipe's tokenizer is that of the checkpoint, by content."""
    then = _tokenizer_hash_of(checkpoint)
    if recipe.tokenizer is None or then is None:
        return False
    return not is_other_tokenizer(then, Tokenizer.load(recipe.tokenizer.path).content_hash)


def _tokenizer_hash_of(checkpoint: Path) -> str | None:
    found: str | None = read_manifest(checkpoint).get("tokenizer")
    return found
