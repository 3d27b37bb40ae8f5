"""The samples of a run that is inspected by its checkpoint, also from before its last change of the data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bloomery.base.errors import DataError, Problem
from bloomery.checkpoint.folder import complete_checkpoints
from bloomery.checkpoint.load import read_state, using_state
from bloomery.cli.data_argument import InspectedRun
from bloomery.data.blend import Former
from bloomery.data.former import known_from, open_former, stretches
from bloomery.data.inspect import read_samples
from bloomery.data.tokenizer import Tokenizer
from bloomery.sizing.data_rules import source_key
from bloomery.train.past import checked_shards, known_shards


def samples_of(run: InspectedRun, first: int, last: int, *, tokenizer: Tokenizer | None) -> Iterator[dict[str, Any]]:
    """The samples at positions first..last, as the run has taken them or will."""
    checkpoint = run.past.checkpoint if run.past else None
    if run.past is None or checkpoint is None or run.data.blend is None:
        yield from read_samples(run.data.train, run.section.train, first, last, tokenizer=tokenizer)
        return
    state = run.data.blend.state
    if first < (known := known_from(state)):
        what = f"sample {first:,} lies before sample {known:,}, where sources, weights or sequence length changed"
        rule = f"a version that kept nothing of what was before has saved {checkpoint.name}"
        raise DataError(Problem(what, rule, _remedy(checkpoint, first)))
    for former, begin, end in stretches(state, first, last):
        if former is None:
            yield from read_samples(run.data.train, run.section.train, begin, end, tokenizer=tokenizer)
            continue
        paths = _paths(run, checkpoint, former, begin)
        with open_former(run.recipe, former, plan=run.plan, paths=paths) as (sections, data):
            checked_shards(run.past, data.shards())
            yield from read_samples(data.train, sections, begin, end, tokenizer=tokenizer)


def _paths(run: InspectedRun, checkpoint: Path, former: Former, position: int) -> Mapping[str, str]:
    """Where shards lie: as the recipe says, else, of sources that it no longer has, as the checkpoint does."""
    paths = {name: facts["path"] for name, facts in known_shards(checkpoint).items() if "path" in facts}
    paths |= {source_key(section): section.path for section in run.section.train}
    if lost := [name for name in former.weights if name not in paths]:
        what = f"sample {position:,} was drawn from {', '.join(former.weights)}, and the recipe no longer has {lost[0]}"
        rule = f"a version that did not keep where shards lie has saved {checkpoint.name}"
        raise DataError(Problem(what, rule, _remedy(checkpoint, position)))
    return paths


def _remedy(checkpoint: Path, position: int) -> str:
    """How to see a position that this checkpoint does not know enough of."""
    able = next((each for each in reversed(complete_checkpoints(checkpoint.parent)) if _holds_at(each, position)), None)
    such = f": {able / 'recipe.yaml'} with --run-dir {able}" if able else ", if there is a copy of one somewhere"
    return f"give a checkpoint from before that change, and its own recipe{such}"


def _holds_at(checkpoint: Path, position: int) -> bool:
    """Whether its own weights hold at the position; those of all checkpoints after a change begin there."""
    blend = read_state(checkpoint).get("blend")
    with using_state(checkpoint):
        return blend is not None and bool(blend["first_sample"] <= position)
