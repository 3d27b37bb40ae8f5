"""Rules about what is prepared and what is trained on; `rules.py` lists them with the others."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence

from bloomery.base.errors import first_few
from bloomery.config.recipe import DataSection, Recipe, SourceSection
from bloomery.families.registry import FAMILIES
from bloomery.sizing.rules import Finding

_SHORTEST_PAIR = 5
"""[CLS], a token, [SEP], a token, [SEP]."""


def data(recipe: Recipe) -> Iterator[Finding]:
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
        same = shards.setdefault(os.path.normpath(section.path), number)
        as_before = order != "timeless"  # a run of another system that did so must be reproduced
        if namesake != number:
            remedy = "give each a `name`" if same == number or as_before else "add up their weights in one of them"
            yield Finding(
                paths,
                f"{place}.{number} and {place}.{namesake} are both called '{source_key(section)}'",
                "orders, checkpoints and metrics distinguish sources by `name`, by default the path",
                remedy,
            )
        elif same != number:
            yield Finding(
                (paths[1], *paths),
                f"{place}.{number} and {place}.{same} are the same shard, {section.path}",
                "each name has its own order of it, so text repeats within an epoch",
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
    trained = {os.path.normpath(section.path) for section in data.train}
    for group, sections in data.validation.items():
        if known := [section.path for section in sections if os.path.normpath(section.path) in trained]:
            yield Finding(
                (f"data.validation.{group}", "data.train"),
                f"data.validation.{group} evaluates on {first_few(known)}, which data.train trains on",
                "its loss will not measure the model on new text",
                "give it its own shard, or split the training sources with data.split",
                is_warning=True,
            )


def _preparations(recipe: Recipe) -> Iterator[Finding]:
    first: dict[str, int] = {}
    for i, section in enumerate(recipe.prepare):
        output = os.path.normpath(section.output)
        if (before := first.setdefault(output, i)) != i:
            what = f"prepare.{i} and prepare.{before} both write {section.output}"
            rule = "the later one would replace the shard of the earlier one"
            yield Finding((f"prepare.{i}.output", f"prepare.{i}"), what, rule, "give each an output of its own")
        if section.output.endswith("/"):
            what, rule = f"prepare.{i}.output is '{section.output}'", "it is a prefix, such as shards/books"
            yield Finding((f"prepare.{i}.output", f"prepare.{i}"), what, rule, "add a name after the last /")
        if section.max_tokens is not None and section.min_tokens > section.max_tokens:
            yield Finding(
                (f"prepare.{i}.min_tokens", f"prepare.{i}.max_tokens"),
                f"prepare.{i}.min_tokens is {section.min_tokens} and max_tokens is {section.max_tokens}",
                "no document has that many and that few tokens",
                "swap them, or remove one",
            )


def samples(recipe: Recipe) -> Iterator[Finding]:
    """That the samples of this family can be made."""
    if recipe.data is None:
        return
    if FAMILIES[recipe.model.family].encoder:
        yield from _masked_samples(recipe, recipe.data)


def _masked_samples(recipe: Recipe, data: DataSection) -> Iterator[Finding]:
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
