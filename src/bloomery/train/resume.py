"""What a run resumes from: nothing, its newest checkpoint, or the one a user names."""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bloomery.base.bounded import LARGE_BYTES, read_small
from bloomery.base.errors import DataError, Problem
from bloomery.base.ranks import ALONE, Ranks, agreed
from bloomery.base.storage import writing
from bloomery.checkpoint import load
from bloomery.checkpoint.folder import MANIFEST, RETIRED, complete_checkpoints, find_checkpoint, read_manifest, tidy
from bloomery.checkpoint.load import Checkpoint, Choice, read_checkpoint
from bloomery.checkpoint.remote import RemoteSource
from bloomery.checkpoint.select import choose
from bloomery.config.recipe import Recipe
from bloomery.data.blend import BlendState
from bloomery.data.causal import DataCursor
from bloomery.data.open import OpenData
from bloomery.data.tokenizer import Tokenizer, is_other_tokenizer
from bloomery.monitor.history import Start, set_abandoned_aside
from bloomery.monitor.journal import Journal
from bloomery.monitor.meters import IntervalMeter
from bloomery.monitor.names import Event
from bloomery.sizing.schedule import TrainingPlan
from bloomery.train.contract import Difference, Side, differences, refusals
from bloomery.train.optimizer import LossScale
from bloomery.train.state import TrainState

_SHARD_FACTS = ("documents", "tokens", "sample_digest")


@dataclass(frozen=True)
class ResumePoint:
    state: TrainState
    plan: TrainingPlan
    """Of the present recipe, after the steps that are done."""
    checkpoint: Checkpoint | None = None
    before: DataCursor | None = None
    """What was consumed of the data; None if nothing was."""
    changes: Sequence[Difference] = ()
    """What differs from the checkpoint's recipe, by --change."""
    interval: Mapping[str, Any] | None = None
    """The logging interval that the stop cut in two."""
    choice: Choice = field(default_factory=Choice)
    """Where the checkpoint comes from, and which others cannot be used."""
    weights: Checkpoint | None = None
    """Whose weights a run without a checkpoint begins with, by `init`."""


def find_resume_point(
    recipe: Recipe,
    roots: Sequence[Path],
    starts: Sequence[Start],
    *,
    wanted: str | None,
    changes: Sequence[str],
    ranks: Ranks,
) -> ResumePoint:
    """The checkpoint called `wanted`, else the newest good one, local or remote. DataError if it is of another
    training, except for the fields named by `changes`. All ranks call it: they share the work of verifying. `roots`:
    the durable one first."""
    upload = recipe.checkpoint.upload
    remote = None if upload is None else RemoteSource(upload.to, roots[0], recipe.name, starts, ranks)
    with agreed(ranks):
        choice = choose(roots, wanted, ranks=ranks, remote=remote, check=_read)
        if choice.checkpoint is None:
            state = TrainState(loss_scale=LossScale.start(recipe.loss_scale) if recipe.precision == "fp16" else None)
            weights = None
            if recipe.init is not None:
                weights = read_checkpoint(find_checkpoint(Path(recipe.init.from_)), ranks=ranks, check=_read)
                resume_point_at(weights, recipe, changes=changes, reads=("model", "tokenizer"))
                state.imported_from = {"folder": str(weights.folder), "sha256 of its manifest": _hash(weights)}
            return ResumePoint(state, TrainingPlan.of(recipe), weights=weights)
        _refuse_other_beginning(choice.checkpoint, recipe)
        point = resume_point_at(choice.checkpoint, recipe, changes=changes)
        if wanted is not None:  # a branch is newer than what it leaves behind, also by a clock that is not
            point.state.saved_at = max(point.state.saved_at, _last_saved(roots))
        if choice.checkpoint.folder.parent != roots[0]:
            point.state.saved_step = None  # a node-local checkpoint is no promise: a run that stops here still saves
        return replace(point, choice=choice)


def _refuse_other_beginning(checkpoint: Checkpoint, recipe: Recipe) -> None:
    """Weights that a recipe names must not be passed over because another run has the folder."""
    if recipe.init is None or recipe.init == (began := checkpoint.recipe.init):
        return
    how = f"with {began.from_}" if began else "without init"
    raise DataError(
        Problem(
            f"init.from is {recipe.init.from_}, but the run of {checkpoint.folder} began {how}",
            "only a new run begins with other weights",
            "name another folder with --run-dir, or use init=null to resume this run",
        )
    )


def _last_saved(roots: Sequence[Path]) -> float:
    """By the clocks of those that saved."""
    times = [0.0]
    for path in (path for root in roots for path in complete_checkpoints(root)):
        with suppress(DataError):
            times.append(float(read_manifest(path).get("time") or 0.0))
    return max(times)


def resume_point_at(
    checkpoint: Checkpoint, recipe: Recipe, *, changes: Sequence[str] = (), reads: Collection[str] | None = None
) -> ResumePoint:
    """This checkpoint, for a recipe that resumes from it. DataError if that is another training, except for the fields
    named by `changes`. `reads`: the sections to compare, where it is not all of them."""
    saved, facts = checkpoint.recipe, checkpoint.state
    state, blend = _read(checkpoint)
    same_tokenizer = recipe.tokenizer == saved.tokenizer or _is_tokenizer_of(checkpoint, recipe)
    then = Side(saved, TrainingPlan.of(saved, state.history))
    now = Side(recipe, TrainingPlan.resumed(recipe, then.plan, state.step))
    different = differences(now, then, step=state.step, same_tokenizer=same_tokenizer)
    if reads is not None:
        different = [each for each in different if each.field.split(".")[0] in reads]
    if problems := refusals(different, changes, checkpoint=str(checkpoint.folder)):
        raise DataError(problems)
    state.history = now.plan.history
    state.saved_at = float(checkpoint.manifest.get("time") or 0.0)
    if any(each.field.startswith(("data.", "model.", "batch.")) for each in different):
        # With other data or another model: what was normal says nothing of what will be.
        state.spikes = replace(state.spikes, losses=[], grad_norms=[], ceiling=None)
    if recipe.precision != "fp16":
        state.loss_scale = None
    elif state.loss_scale is None:
        state.loss_scale = LossScale.start(recipe.loss_scale)
    same_length = saved.model.seq_length == recipe.model.seq_length
    return ResumePoint(
        state,
        now.plan,
        checkpoint=checkpoint,
        before=DataCursor(saved, then.plan, state.consumed_samples, blend) if state.step else None,
        changes=different,
        interval=facts["interval"] if same_length else None,  # tokens per second would be of neither length
    )


def _read(checkpoint: Checkpoint) -> tuple[TrainState, BlendState | None]:
    """State of a checkpoint, and its blend. DataError or RecipeError if they make no sense."""
    saved, facts = checkpoint.recipe, checkpoint.state
    with checkpoint.using_state():
        state = TrainState.from_json(facts)
        if state.step != checkpoint.manifest["step"]:
            raise ValueError(f"it is of step {state.step}")
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
    return state, blend


def checked_shards(past: ResumePoint, data: OpenData, ranks: Ranks = ALONE) -> dict[str, dict[str, Any]]:
    """On rank 0, what identifies the shards of the data, also of sources that the recipe no longer has: they stay known
    with the position reached in them. DataError if the data is of another tokenizer than the checkpoint, under the same
    path, if a source is another shard than it was, or under a new name the shard that another one was."""
    if past.checkpoint is not None:
        remedy, place = "restore the tokenizer that it was trained with", str(past.checkpoint.folder)
        load.check_tokenizer(past.checkpoint, data.tokenizer_hash, remedy=remedy, place=place)
    shards = data.shards() if ranks.rank == 0 else {}
    if past.checkpoint is None or past.before is None:
        return shards
    known: dict[str, dict[str, Any]] = past.checkpoint.manifest.get("shards") or {}
    problems = []
    for name, facts in shards.items():
        then = known.get(name)
        others = [other for other, each in known.items() if each.get("sample_digest") == facts["sample_digest"]]
        if then is not None and any(facts[key] != then[key] for key in _SHARD_FACTS if key in then):
            sizes = [f"{each['documents']:,} documents and {each['tokens']:,} tokens" for each in (facts, then)]
            what = f"the source '{name}' has {sizes[0]}, but the checkpoint is of another shard, with {sizes[1]}"
            rule = "the position reached in it would mean other samples"
            remedy = "restore the shard, or add the new one under another `name` with --change data.train"
            problems.append(Problem(what, rule, remedy, str(past.checkpoint.folder)))
        elif then is None and others:
            old = sorted(others, key=lambda other: other in shards)[0]  # one that the recipe no longer has
            what = f"the source '{name}' is the shard that the run knows as '{old}'"
            rule = "under another name its samples would repeat from the beginning"
            remedy = f"give '{old}' more weight instead" if old in shards else f"add `name: {old}` to the source"
            problems.append(Problem(what, rule, remedy))
    if problems:
        raise DataError(problems)
    return known | shards


def archive_stale(recipe: Recipe, roots: Sequence[Path], past: ResumePoint, journal: Journal) -> None:
    """Move aside what this run does not resume from, and report it. Not before the resume point is loaded: a start that
    fails must leave every checkpoint where it was."""
    keep_debris, step, choice = recipe.checkpoint.debris == "keep", past.state.step, past.choice
    remarks: dict[Path | str, str] = {}
    if choice.checkpoint is not None and choice.fetched_from:
        journal.event(Event.FETCHED, step, folder=choice.checkpoint.folder.name, source=choice.fetched_from)
        remarks[choice.checkpoint.folder] = f"It is called {choice.put_aside} now"
    doomed = [path for path in choice.damaged if isinstance(path, Path) and path not in remarks]
    for root in filter(Path.is_dir, roots):
        with writing(root, "tidy the folder"):
            done = tidy(root, step=step, damaged=doomed, keep_debris=keep_debris)
        remarks |= {path: f"It is called {name} now" for path, name in done.quarantined.items()}
        if done.debris:
            journal.event(Event.DEBRIS_REMOVED, step, folders=done.debris, kept=keep_debris)
        if done.retired:
            journal.event(Event.RETIRED, step, folders=done.retired)
            journal.notice(f"later checkpoints belong to a branch that is abandoned now; they are in {root / RETIRED}")
        if done.latest_said is not None and past.checkpoint is not None:
            journal.event(Event.LATEST_MENDED, step, said=done.latest_said, place=str(root))
    set_abandoned_aside(roots[0].parent, step)
    used = past.checkpoint.folder.name if past.checkpoint else "nothing"
    for place, reasons in choice.damaged.items():
        parent, _, name = str(place).rpartition("/")
        journal.event(Event.DAMAGED, step, folder=name, reasons=reasons, place=parent)
        remark = remarks.get(place, "It is not used")
        journal.warning(f"{place} is damaged ({'; '.join(reasons)}). {remark}; {used} is used")


def _hash(checkpoint: Checkpoint) -> str:
    return hashlib.sha256(read_small(checkpoint.folder / MANIFEST, LARGE_BYTES)).hexdigest()


def _is_tokenizer_of(checkpoint: Checkpoint, recipe: Recipe) -> bool:
    """Whether the recipe's tokenizer is that of the checkpoint, by content."""
    then = checkpoint.manifest.get("tokenizer")
    if recipe.tokenizer is None or then is None:
        return False
    return not is_other_tokenizer(then, Tokenizer.load(recipe.tokenizer.path).content_hash)
