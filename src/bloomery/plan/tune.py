"""The fastest way to train a recipe on this machine, by short real trials: the planner prunes and orders them."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bloomery.base.errors import Problem, RecipeError
from bloomery.base.storage import append_line, make_folder, write_atomically
from bloomery.config.load import as_yaml, load_recipe
from bloomery.config.recipe import Recipe
from bloomery.monitor.history import readable_lines
from bloomery.plan.candidates import COLUMNS, Question
from bloomery.plan.constants import Constants
from bloomery.plan.hardware import Machine
from bloomery.plan.search import Ranking
from bloomery.plan.setup import RECOMPUTE
from bloomery.plan.trials import Bench, Trial
from bloomery.sizing.layout import world_size

OBJECTIVES: dict[str, Callable[[Trial], float]] = {
    "tokens": lambda trial: trial.tokens_per_second or 0.0,
    "latency": lambda trial: 1 / (trial.step_seconds or 1e9),
    "flops": lambda trial: trial.tflops or 0.0,
    "fit": lambda trial: 1 / (trial.peak_memory_bytes or 2**60),
}
"""More is better. With one global batch, the first three agree."""
LAYOUT_FIELDS = {
    **{name: f"parallel.{name}" for name in ("tp", "pp", "chunks", "cp", "zero", "recompute")},
    "micro_batch": "batch.micro_batch_size",
}
JOURNAL = "tune.jsonl"
_LOSER = 0.9
"""Of the best tokens per second: a trial that is slower is ended at its first figure."""
_DOUBT = 1.03
"""A candidate is tried while its prediction, corrected by what was measured, might reach the best with this."""


@dataclass(frozen=True)
class Candidate:
    words: tuple[str, ...]
    kind: tuple[Any, ...]
    """Candidates of a kind share the planner's error."""
    tokens_per_second: float
    memory_bytes: float

    def predicted(self, objective: str) -> float:
        return 1 / self.memory_bytes if objective == "fit" else self.tokens_per_second


@dataclass
class Search:
    """What was tried and what remains. Every trial is in the journal: a search that is started again goes on there."""

    bench: Bench
    objective: str
    candidates: list[Candidate]
    device_bytes: float
    most_trials: int
    seconds: float
    text: str
    """Of the untuned recipe."""
    everything: bool = False
    """Try all candidates, and each to its end."""
    trials: list[Trial] = field(default_factory=list)

    @property
    def score(self) -> Callable[[Trial], float]:
        return OBJECTIVES[self.objective]

    @property
    def best(self) -> Trial | None:
        return max((trial for trial in self.trials if trial.outcome == "ok"), key=self.score, default=None)

    def run(self, say: Callable[[str], None]) -> None:
        """The untuned recipe first, then the most promising."""
        journal = make_folder(self.bench.folder) / JOURNAL
        head = {"recipe": hashlib.sha256(repr((self.bench.recipe, self.bench.words, self.text)).encode()).hexdigest()}
        if head not in list(readable_lines(journal, recipe=str)):  # of another recipe
            write_atomically(journal, json.dumps(head) + "\n")
        self.trials = [Trial(**fields) for fields in readable_lines(journal, words=list, outcome=str, said=str)]
        candidate: Candidate | None = Candidate((), (), 0.0, 0.0)
        if self.trials:
            candidate = self.next()
        while candidate is not None:
            say(f"trial {len(self.trials) + 1}: {' '.join(candidate.words) or 'the recipe as it is'} ...")
            best = None if self.everything or self.objective == "fit" else self.best
            slow = _LOSER * (best.tokens_per_second or 0.0) if best else 0.0
            trial = self.bench.run(candidate.words, slower_than=slow)
            append_line(journal, json.dumps(asdict(trial)))
            self.trials.append(trial)
            candidate = self.next()

    def next(self) -> Candidate | None:
        """The best that remains, by what was predicted and measured so far; None where none is worth a trial."""
        if len(self.trials) >= self.most_trials or sum(trial.wall_seconds for trial in self.trials) >= self.seconds:
            return None
        known = {candidate.words: candidate for candidate in self.candidates}
        tried = {tuple(trial.words): trial for trial in self.trials}
        full = [
            known[words].memory_bytes
            for words, trial in tried.items()
            if trial.outcome == "out of memory" and words in known
        ]
        limit = min([self.device_bytes, *full])
        ratios: dict[tuple[Any, ...], list[float]] = {}
        for words, trial in tried.items():
            if words in known and trial.step_seconds:
                ratios.setdefault(known[words].kind, []).append(
                    self.score(trial) / known[words].predicted(self.objective)
                )
        usual = max((median(found) for found in ratios.values()), default=1.0)

        def hoped(candidate: Candidate) -> float:
            return candidate.predicted(self.objective) * median(ratios.get(candidate.kind, [usual]))

        left = [each for each in self.candidates if each.words not in tried and each.memory_bytes < limit]
        best = max(left, key=hoped, default=None)
        done = self.best
        is_hopeless = best is None or (done and hoped(best) * _DOUBT < self.score(done))
        return None if is_hopeless and not self.everything else best


def candidates(
    loaded_from: str, words: Sequence[str], fields: Mapping[str, Sequence[str]], machine: Machine, constants: Constants
) -> Iterator[Candidate]:
    """Every legal layout, micro-batch and recomputation that may fit, for every combination of the values of other
    fields; `fields` may also name those of layouts, of which only these values are then taken. The recipe as it is
    has no words."""
    own = load_recipe(loaded_from, list(words)).recipe
    others = {name: values for name, values in fields.items() if name not in LAYOUT_FIELDS.values()}
    for values in product(*others.values()):
        more = [f"{name}={value}" for name, value in zip(others, values, strict=True)]
        recipe = load_recipe(loaded_from, [*words, *more]).recipe
        changed = [word for word in more if load_recipe(loaded_from, [*words, word]).recipe != own]
        ranking = Ranking.of(Question(recipe, machine, constants))
        for row in np.flatnonzero(ranking.memory.expected <= machine.device.memory_gib * 2**30):
            degrees = dict(zip(COLUMNS, ranking.grid.rows[row].astype(int).tolist(), strict=True))
            layout = _layout_fields(degrees, recipe)
            if any(str(layout[name]) not in fields.get(name, [str(layout[name])]) for name in layout):
                continue
            of_own = _layout_fields(None, own)
            differs = [f"{name}={value}" for name, value in layout.items() if value != of_own[name]]
            tokens = float(ranking.tokens_per_s[row]) * world_size(recipe)
            kind = (*values, layout["parallel.recompute"])
            yield Candidate((*changed, *differs), kind, tokens, float(ranking.memory.expected[row]))


def _layout_fields(degrees: Mapping[str, int] | None, recipe: Recipe) -> dict[str, Any]:
    """Fields of the recipe, with the degrees of a layout or its own."""
    sections = {"parallel": recipe.parallel, "batch": recipe.batch}
    found = {path: getattr(sections[path.split(".")[0]], path.split(".")[1]) for path in LAYOUT_FIELDS.values()}
    if degrees is None:
        return found | {"parallel.schedule": recipe.parallel.schedule}
    alone = degrees["dp"] * degrees["cp"] == 1  # then there is nothing to shard
    found |= {path: degrees[name] for name, path in LAYOUT_FIELDS.items() if not (alone and name == "zero")}
    found["parallel.recompute"] = RECOMPUTE[degrees["recompute"]]
    usual = "1f1b" if recipe.parallel.chunks > 1 else recipe.parallel.schedule
    return found | {"parallel.schedule": "interleaved" if degrees["chunks"] > 1 else usual}


def tuned(search: Search, loaded_from: str, words: Sequence[str], target: Path) -> dict[str, Any]:
    """Write the tuned recipe; what was found. RecipeError where nothing could be trained."""
    trials, best = search.trials, search.best
    if best is None:
        what = f"none of {len(trials)} trials could train: {trials[0].outcome}"
        raise RecipeError(Problem(what, trials[0].said, "use a smaller model, more devices or parallel.offload=true"))
    write_atomically(target, as_yaml(load_recipe(loaded_from, [*words, *best.words]).recipe))
    untuned = next((trial for trial in trials if not trial.words and trial.outcome == "ok"), None)
    return {
        "trials": [{"trial": " ".join(trial.words) or "the recipe as it is", **_shown(trial)} for trial in trials],
        "objective": search.objective,
        "candidates": len(search.candidates),
        "best": " ".join(best.words) or "the recipe as it is",
        "improvement": search.score(best) / search.score(untuned) - 1 if untuned else None,
        "tuned_recipe": str(target),
        "command": shlex.join(["bloomery", "train", str(target)]),
        "seconds": sum(trial.wall_seconds for trial in trials),
    }


def _shown(trial: Trial) -> dict[str, Any]:
    return {name: value for name, value in asdict(trial).items() if name not in ("words", "said")}
