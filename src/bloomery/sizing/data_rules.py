"""Rules about what is prepared and what is trained on; `rules.py` lists them with the others."""

from __future__ import annotations

import fnmatch
import math
import os
import re
from collections.abc import Iterator, Sequence

from bloomery.base.errors import first_few
from bloomery.config.draft import Draft
from bloomery.config.recipe import DataSection, Recipe, SourceSection
from bloomery.families.registry import FAMILIES, families_that
from bloomery.sizing.finding import Finding

_SHORTEST_PAIR = 5
"""[CLS], a token, [SEP], a token, [SEP]."""


def data(recipe: Recipe, draft: Draft) -> Iterator[Finding]:
    if recipe.prepare and recipe.tokenizer is None:
        yield Finding(
            ("prepare", "tokenizer"),
            "prepare is set but tokenizer is not",
            "text needs one",
            "add `tokenizer: {path: ...}`",
        )
    yield from _preparations(recipe)
    if recipe.data is None:
        return
    groups = {f"data.validation.{group}": sources for group, sources in recipe.data.validation.items()}
    for place, sources in {"data.train": recipe.data.train, **groups}.items():
        yield from _sources(place, sources, recipe.data.order)
        yield from _weights(place, sources)
    yield from _trained_on(recipe.data)
    split, validation, evaluate = recipe.data.split, recipe.data.validation, recipe.train.evaluate
    paths = ("data.validation", "data.split", "train.evaluate")
    if split:
        yield from _split(split, evaluates=evaluate is not None)
    if split and validation:
        yield Finding(
            paths,
            "data.split and data.validation are both set",
            "validation comes either from a split of the training sources or from groups of its own",
            "remove one of them",
        )
    if evaluate and not (split or validation):
        yield Finding(
            ("train.evaluate", *paths),
            "train.evaluate is set but there is nothing to evaluate",
            "it needs data.validation or data.split",
            "add one, or remove train.evaluate",
        )
    for group in [group for group, sources in validation.items() if not sources]:
        yield Finding(
            (f"data.validation.{group}",), f"data.validation.{group} is empty", "a group has sources", "add one"
        )
    if not evaluate and validation:
        yield Finding(
            paths,
            "data.validation is set but train.evaluate is not",
            "the groups would be ignored",
            "add for example `evaluate: {every: 1000 steps}` to `train`",
        )


def source_key(section: SourceSection) -> str:
    """What names a source in orders, checkpoints and metrics."""
    return section.name or os.path.normpath(section.path)


def split_shares(split: str) -> list[float]:
    """The numbers of data.split: train, valid, test; missing ones are 0."""
    shares = [float(share) for share in re.split(r"[,/]", split)]
    return shares + [0.0] * (3 - len(shares))


def _split(split: str, *, evaluates: bool) -> Iterator[Finding]:
    paths, remedy = ("data.split", "train.evaluate"), "use for example '949,50,1'"
    train, valid, test = split_shares(split)
    if not math.isfinite(train + valid + test):
        yield Finding(paths, f"data.split is '{split:.40}...'", "the sum of its parts must be a finite number", remedy)
    elif not (train > 0 and (valid > 0 or not evaluates)):
        part = "validation" if train > 0 else "training"
        what = f"data.split is '{split}', which leaves nothing for {part}"
        yield Finding(paths, what, "the parts are train, valid and test, in this order", remedy)


def _sources(place: str, sections: Sequence[SourceSection], order: str) -> Iterator[Finding]:
    names: dict[str, int] = {}
    shards: dict[str, int] = {}
    for number, section in enumerate(sections):
        paths = (f"{place}.{number}.name", f"{place}.{number}.path", f"{place}.{number}")
        namesake = names.setdefault(source_key(section), number)
        same = shards.setdefault(_shard(section), number)
        as_before = order != "timeless"  # a run of another system that did so must come out as it was
        if namesake != number:
            remedy = "give each a `name`" if same == number or as_before else "add up their weights in one of them"
            yield Finding(
                paths,
                f"{place}.{number} and {place}.{namesake} are both called '{source_key(section)}'",
                "orders, checkpoints and metrics tell sources apart by `name`, by default the path",
                remedy,
            )
        elif same != number:
            yield Finding(
                (paths[1], *paths),
                f"{place}.{number} and {place}.{same} are the same shard, {section.path}",
                "each name goes through it in an order of its own, so text repeats before an epoch is over",
                f"remove one of them and give the other the weight {section.weight + sections[same].weight:g}",
                is_warning=as_before,
            )


def _weights(place: str, sections: Sequence[SourceSection]) -> Iterator[Finding]:
    weights = [section.weight for section in sections]
    if not math.isfinite(sum(weights)):
        largest = weights.index(max(weights))
        yield Finding(
            (f"{place}.{largest}.weight", f"{place}.{largest}", place),
            f"the weights of {place} have no finite sum, with {weights[largest]:g} for {place}.{largest}",
            "only their proportions matter, and these are taken from the sum",
            "use smaller ones, such as 0.7 and 0.3",
        )


def _trained_on(data: DataSection) -> Iterator[Finding]:
    """That validation is on text which is new to the model."""
    trained = {_shard(section) for section in data.train}
    for group, sections in data.validation.items():
        if known := [section.path for section in sections if _shard(section) in trained]:
            yield Finding(
                (f"data.validation.{group}", "data.train"),
                f"data.validation.{group} evaluates on {first_few(known)}, which data.train trains on",
                "its loss will not tell how the model does on text that is new to it",
                "give it a shard of its own, or cut a part off the training sources with data.split",
                is_warning=True,
            )


def _shard(section: SourceSection) -> str:
    """The same for the same shard, however the path is written and wherever links lead."""
    return os.path.realpath(f"{section.path}.bin")


def _preparations(recipe: Recipe) -> Iterator[Finding]:
    first: dict[str, int] = {}
    for i, section in enumerate(recipe.prepare):
        output = os.path.normpath(section.output)
        if (before := first.setdefault(output, i)) != i:
            what = f"prepare.{i} and prepare.{before} both write {section.output}"
            rule = "the later one would replace the shard of the earlier one"
            yield Finding((f"prepare.{i}.output", f"prepare.{i}"), what, rule, "give each an output of its own")
        for j, other in enumerate(recipe.prepare):
            for k, source in enumerate(other.sources):
                if _reads(source, section.output):
                    what = f"prepare.{i}.output is {section.output}, which the source '{source}' would take for text"
                    rule = "the next run would read the shard"
                    remedy = "choose an output outside of all sources"
                    yield Finding((f"prepare.{i}.output", f"prepare.{j}.sources.{k}"), what, rule, remedy)
        if section.output.endswith("/"):
            what, rule = f"prepare.{i}.output is '{section.output}'", "it is a prefix, such as shards/books"
            yield Finding((f"prepare.{i}.output", f"prepare.{i}"), what, rule, "add a name behind the last /")
        if section.max_tokens is not None and section.min_tokens > section.max_tokens:
            yield Finding(
                (f"prepare.{i}.min_tokens", f"prepare.{i}.max_tokens"),
                f"prepare.{i}.min_tokens is {section.min_tokens} and max_tokens is {section.max_tokens}",
                "no document is that long and that short",
                "exchange them, or remove one",
            )


def _reads(source: str, output: str) -> bool:
    """Whether a source reaches a file of the shard, by the names alone; prepare/made.py knows links."""
    if "://" in source:
        return False
    pattern = os.path.abspath(source).split("/")
    endings = (".bin", ".idx", ".manifest.json", ".origins", ".parts/000000.part")
    return any(_reaches(pattern, os.path.abspath(f"{output}{ending}").split("/")) for ending in endings)


def _reaches(pattern: Sequence[str], path: Sequence[str]) -> bool:
    """Whether a glob matches the path, or a folder above it in which it is not hidden."""
    if not pattern:
        return not any(name.startswith(".") for name in path)
    if not path:
        return False
    if pattern[0] == "**":
        return _reaches(pattern[1:], path) or (path[0][:1] != "." and _reaches(pattern, path[1:]))
    is_hidden = path[0][:1] == "." and pattern[0][:1] != "."
    same = path[0] == pattern[0] or (fnmatch.fnmatchcase(path[0], pattern[0]) and not is_hidden)
    return same and _reaches(pattern[1:], path[1:])


def samples(recipe: Recipe, draft: Draft) -> Iterator[Finding]:
    """That the options of `data:` belong to the samples of this family."""
    if recipe.data is None:
        return
    family, data = FAMILIES[recipe.model.family], recipe.data
    if data.blend_one_source and data.order == "timeless":
        yield Finding(
            ("data.blend_one_source", "data.order"),
            "data.blend_one_source is true but data.order is timeless",
            "only the orders of other systems know the difference, so it would be ignored",
            "set it back to false, or use the order of the run to be continued",
        )
    if family.encoder:
        yield from _masked_samples(recipe, data)
    elif data.masking is not None:
        yield Finding(
            ("data.masking", "model.family"),
            f"data.masking is set but model.family is {family.name}",
            f"only {', '.join(families_that(encoder=True))} is trained on masked tokens, so it would be ignored",
            "remove it, or take it back with data.masking=null",
        )
    if family.positions == "alibi" and data.reset_positions:
        yield Finding(
            ("data.reset_positions", "model.family"),
            f"data.reset_positions is true but model.family is {family.name}",
            "ALiBi knows distances only: there is no position to reset",
            "set data.reset_positions=false; data.mask_documents=true keeps documents apart",
        )


def _masked_samples(recipe: Recipe, data: DataSection) -> Iterator[Finding]:
    for name in ("mask_documents", "reset_positions", "eod_loss"):
        value, default = getattr(data, name), DataSection.model_fields[name].default
        if value != default:
            yield Finding(
                (f"data.{name}", "model.family"),
                f"data.{name} is {str(value).lower()} but model.family is {recipe.model.family}",
                "a masked sample never leaves its document, so it would be ignored",
                f"set it back to {str(default).lower()}",
            )
    if data.order != "timeless":
        yield Finding(
            ("data.order", "model.family"),
            f"data.order is {data.order} but model.family is {recipe.model.family}",
            "the orders of other systems are those of their GPT datasets",
            "use data.order=timeless",
        )
    if recipe.tokenizer is None:
        yield Finding(
            ("tokenizer", "model.family"),
            f"model.family is {recipe.model.family} but tokenizer is not set",
            "masking needs the ids of [CLS], [SEP], [MASK] and [PAD], and which tokens continue a word",
            "add `tokenizer: {path: ...}`",
        )
    if recipe.model.seq_length < _SHORTEST_PAIR:
        yield Finding(
            ("model.seq_length", "model.family"),
            f"model.seq_length is {recipe.model.seq_length} but model.family is {recipe.model.family}",
            "a sample is [CLS] A [SEP] B [SEP] with at least one token in A and in B",
            f"use at least {_SHORTEST_PAIR}",
        )
    groups = [data.train, *data.validation.values()]
    read = {source.path for sources in groups for source in sources}
    for i, section in enumerate(recipe.prepare):
        if section.output in read and not section.split_sentences:
            yield Finding(
                (f"prepare.{i}.split_sentences", f"prepare.{i}", "model.family"),
                f"prepare.{i} makes {section.output} without split_sentences but model.family is {recipe.model.family}",
                "its samples are pairs of sentences, so the shard must keep them apart",
                f"add `split_sentences: true` to prepare.{i}",
            )
