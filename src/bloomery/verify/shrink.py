"""The layouts to verify; and from a user's recipe to a small one of the same structure, which each of them can train in
seconds, with the shards it trains on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import bloomery
from bloomery.base.errors import Problem, RecipeError
from bloomery.config.load import as_dict, leaves
from bloomery.config.recipe import LossScaleSection, ModelSection, Recipe
from bloomery.config.schema import closest
from bloomery.data.manifest import ShardManifest
from bloomery.data.shards import ShardWriter, token_dtype
from bloomery.data.tokenizer import Tokenizer
from bloomery.families.registry import FAMILIES
from bloomery.sizing.check import load_checked_recipe
from bloomery.sizing.layout import Layout, layout_overrides, world_size

CLIP = 0.05
"""Small enough to bind on every step: Adam hides a wrong gradient norm unless it is clipped with."""
EPS = 1e-5
"""Where a gradient is zero, as of key biases, the rounding of it must not become a full step of Adam's."""
PEAK_LR = 5e-3
_MOST_SOURCES = 4
_SHORTEST = 32
_SMALLEST_BATCH = 8
_MOST_GROUPED = 8
_WORDS = 300
_REPORTED = ("model", "data", "batch", "optimizer", "lr", "train", "precision")
_NOT_REPORTED = ("data.train", "data.validation", "data.cache_dir", "train.compile", "batch.micro_batch_size")


@dataclass(frozen=True)
class Shrunk:
    values: dict[str, Any]
    """The small recipe as plain YAML values."""
    batch: int
    """Samples of a global batch, at the start of a ramp. The reference takes them all at once, so that how a batch is
    cut is compared too."""
    changes: dict[str, tuple[Any, Any]]
    """Path -> (the user's value, the small one)."""
    remarks: list[str]
    """What is not verified, and why."""


def shrink(
    recipe: Recipe, layouts: Sequence[VerifiedLayout], folder: Path, *, steps: int, clip: float, checkpoint_step: int
) -> Shrunk:
    """The recipe reads shards and a tokenizer in `folder` (`write_data`)."""
    before = as_dict(recipe)
    sources = _sources(recipe, folder)
    batch = -(-_SMALLEST_BATCH // (unit := math.lcm(*(_micro_batches(each) for each in layouts)))) * unit
    evaluates = recipe.train.evaluate is not None and recipe.data is not None
    data = before["data"] or {}
    validation = {"valid": [{"path": str(folder / "valid")}]} if evaluates and data.get("validation") else {}
    after = {
        **before,
        "model": before["model"] | _model(recipe.model, layouts),
        "tokenizer": {"path": str(folder / "tokenizer")} if FAMILIES[recipe.model.family].encoder else None,
        "prepare": [],
        "data": data
        | {
            "train": sources,
            "validation": validation,
            "split": "90,10" if data.get("split") else None,
            "cache_dir": str(folder / "cache"),
        },
        "batch": _batch(recipe, batch, steps),
        "optimizer": before["optimizer"] | {"clip_grad_norm": clip, "eps": max(EPS, recipe.optimizer.eps)},
        "lr": _lr(recipe, steps),
        "train": before["train"]
        | {
            "for": f"{steps} steps",
            "evaluate": {"every": f"{steps} steps", "steps": 1} if evaluates else None,
            "exit_after": None,
            "skip": [],
            "compile": False,
        },
        "precision": "fp32",
        "loss_scale": LossScaleSection().model_dump(mode="json"),
        "parallel": {"recompute": recipe.parallel.recompute, "offload": recipe.parallel.offload},
        "checkpoint": {"phases": [{"every": f"{checkpoint_step} steps"}]},
        "monitor": {"log_every": "1 steps", "tensorboard": False},
        "launch": None,
    }
    return Shrunk(after, batch, _changes(before, after), _remarks(recipe))


def _model(model: ModelSection, layouts: Sequence[VerifiedLayout]) -> dict[str, Any]:
    tp = math.lcm(*(each.layout.tp for each in layouts))
    grouped = min(model.num_heads // model.num_kv_heads, _MOST_GROUPED)
    # ALiBi slopes have another formula for heads that are no power of two, so that is kept.
    odd = 3 if model.num_heads & (model.num_heads - 1) else 2
    kv_heads = tp * (1 if grouped >= 4 else odd)
    heads = kv_heads * grouped
    hidden = heads * (8 if heads <= 16 else 4)
    tokens = math.lcm(*(2 * each.layout.cp * each.layout.tp for each in layouts))
    # Padding is more than the last of tp ranks has: all of its words, and some of the rank's before it.
    unit = math.lcm(8, tp)
    rows = -(-_WORDS * tp // (unit * max(1, tp - 1))) * unit
    stages = max(each.stages for each in layouts)
    return {
        # One more than stages where the user's layers do not divide evenly either.
        "num_layers": max(2, stages) + (model.num_layers % stages > 0),
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": None if model.head_dim is None else 2 * hidden // heads,
        "ffn_hidden_size": max(1, round(model.ffn_hidden_size / model.hidden_size * hidden / tp)) * tp,
        "seq_length": -(-_SHORTEST // tokens) * tokens,
        "vocab_size": rows - (rows // tp if tp > 1 else 0) - 3,
        "vocab_multiple": rows,
        "dropout": 0.0,
        "init_std": float(f"{model.init_std * math.sqrt(model.hidden_size / hidden):.3g}"),
    }


def micro_batch_of(chosen: VerifiedLayout, shrunk: Shrunk) -> int:
    return shrunk.batch // _micro_batches(chosen)


def _micro_batches(chosen: VerifiedLayout) -> int:
    """Over all replicas: two for each, so that gradients are accumulated, and two for every rank of a pipeline."""
    return chosen.layout.dp * 2 * chosen.layout.pp


def _batch(recipe: Recipe, batch: int, steps: int) -> dict[str, Any]:
    """A ramp stays one: it doubles the batch after a quarter of the steps."""
    if recipe.batch.rampup is None:
        return {"micro_batch_size": batch, "global_batch_size": batch, "rampup": None}
    rampup = {"start": batch, "increment": batch, "samples": batch * max(1, steps // 4)}
    return {"micro_batch_size": batch, "global_batch_size": 2 * batch, "rampup": rampup}


def _lr(recipe: Recipe, steps: int) -> dict[str, Any]:
    lr = recipe.lr
    fades = lr.schedule != "constant"
    return {
        "peak": PEAK_LR,
        "min": float(f"{PEAK_LR * lr.min / lr.peak:.3g}") if fades else 0.0,
        "schedule": lr.schedule,
        "warmup": f"{min(2, steps - 1) if lr.warmup.count else 0} steps",
        "decay": None,
        "cooldown": f"{max(1, steps // 4)} steps" if lr.schedule == "wsd" else None,
    }


def _sources(recipe: Recipe, folder: Path) -> list[dict[str, Any]]:
    """The heaviest of a blend; a source of its own for a recipe that names none."""
    if recipe.data is None:
        return [{"path": str(folder / "source-0"), "name": "source-0"}]
    heaviest = sorted(recipe.data.train, key=lambda source: -source.weight)[:_MOST_SOURCES]
    return [
        {"path": str(folder / f"source-{i}"), "name": source.name or source.path, "weight": source.weight}
        for i, source in enumerate(heaviest)
    ]


def _remarks(recipe: Recipe) -> list[str]:
    remarks = []
    if recipe.model.dropout:
        remarks.append(f"dropout {recipe.model.dropout}: masks depend on the layout, verified with dropout 0")
    if recipe.precision != "fp32":
        remarks.append(
            f"precision {recipe.precision}: its rounding depends on the order of sums, so equality is shown in fp32"
        )
    if recipe.parallel.recompute != "none":
        remarks.append(f"recompute {recipe.parallel.recompute}: in every layout, and not in the reference")
    if recipe.optimizer.eps < EPS:
        remarks.append(
            f"optimizer.eps {recipe.optimizer.eps:g}: verified with {EPS:g}, or Adam would make steps of rounding "
            "where gradients are zero"
        )
    return remarks


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Of the sections that decide what is learned; of the sources only how many there are."""
    old, new = (dict(leaves({name: values[name] for name in _REPORTED})) for values in (before, after))
    paths = [path for path in old | new if not path.startswith(_NOT_REPORTED)]
    changes = {path: (old.get(path), new.get(path)) for path in paths if old.get(path) != new.get(path)}
    sources = [f"{len(values['data']['train'])} sources" for values in (before, after) if values["data"]]
    if len(set(sources)) > 1:
        changes["data.train"] = (sources[0], sources[1])
    return changes


_DOCUMENTS = 300
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def write_data(values: Mapping[str, Any], folder: Path) -> None:
    """Everything that the shrunk recipe `values` reads."""
    vocab = values["model"]["vocab_size"]
    sources = [source["path"] for source in values["data"]["train"]]
    sources += [source["path"] for group in values["data"]["validation"].values() for source in group]
    is_masked = FAMILIES[values["model"]["family"]].encoder
    tokenizer_hash = _write_tokenizer(folder / "tokenizer", vocab) if is_masked else ""
    for seed, prefix in enumerate(sources):
        _write_shard(prefix, seed=seed, vocab=vocab, sentences=is_masked, tokenizer_hash=tokenizer_hash)


def _write_shard(prefix: str, *, seed: int, vocab: int, sentences: bool, tokenizer_hash: str) -> None:
    """Token 0 ends a document, unless it consists of sentences; each source follows rules of its own."""
    random = np.random.default_rng(seed)
    first = len(_SPECIAL) if sentences else 1
    follower = dict(zip(range(first, vocab), (first + random.permutation(vocab - first)).tolist(), strict=True))
    dtype = token_dtype(vocab)
    with ShardWriter(prefix, dtype) as writer:
        for _ in range(_DOCUMENTS):
            lengths = random.integers(3, 12, size=int(random.integers(2, 7)))
            tokens = [int(random.integers(first, vocab))]
            while len(tokens) < lengths.sum():
                is_next = random.random() < 0.8
                tokens.append(follower[tokens[-1]] if is_next else int(random.integers(first, vocab)))
            if sentences:
                document = np.array(tokens, dtype).data
                writer.append_many(document, lengths.astype("<i4"), np.array([len(lengths)], "<i4"))
            else:
                writer.append(np.array([*tokens, 0]))
        written, sequences = writer.num_tokens, writer.num_sequences
    ShardManifest(
        tokenizer_hash=tokenizer_hash,
        vocab_size=vocab,
        dtype=str(dtype),
        eod_id=None if sentences else 0,
        append_eod=not sentences,
        shuffle_seed=None,
        documents=_DOCUMENTS,
        sequences=sequences,
        tokens=written,
        sources=(),
        source_files=(),
        dropped={},
        settings={},
        encoder="synthetic",
        bloomery_version=bloomery.__version__,
    ).write(prefix)


def _write_tokenizer(folder: Path, vocab: int) -> str:
    """BERT's vocab.txt; every fourth token continues a word. Returns its hash."""
    folder.mkdir()
    words = [f"##{i}" if i % 4 == 0 else f"word{i}" for i in range(vocab - len(_SPECIAL))]
    (folder / "vocab.txt").write_text("\n".join([*_SPECIAL, *words]) + "\n")
    return Tokenizer.load(str(folder)).content_hash


STANDARD = (
    *("zero0-dp2", "zero1-dp2", "zero2-dp2", "zero3-dp2", "tp2", "cp2", "pp2", "pp2-interleaved", "pp2-zero_bubble"),
    *("tp4", "zero3-dp4-shard2", "zero3-dp2-tp2", "dp2-cp2", "pp2-tp2", "pp2-dp2"),
    *("pp2-dp2-tp2", "pp2-cp2-tp2", "zero2-dp4-tp2"),
)
"""2, 4 and 8 ranks."""
_RULE = (
    "a layout is its factors joined by dashes: dpN, tpN, ppN, cpN, zero0 to zero3, shardN, chunksN, a schedule (gpipe, "
    "1f1b, interleaved, zero_bubble), a recompute (selective, full) and offload"
)


@dataclass(frozen=True)
class VerifiedLayout:
    """A layout that the user's recipe allows."""

    name: str
    overrides: tuple[str, ...]
    layout: Layout
    stages: int


def choose_layouts(
    source: str, overrides: Sequence[str], recipe: Recipe, names: Sequence[str] | None, *, most_ranks: int | None = None
) -> tuple[list[VerifiedLayout], dict[str, str]]:
    """(layouts in the order given, those of the standard matrix that are left out and why).

    RecipeError for every named layout that is unknown, or that the recipe does not allow. `most_ranks`: devices here.
    """
    problems: list[Problem] = []
    left_out: dict[str, str] = {}
    found: list[VerifiedLayout] = []
    for name in dict.fromkeys(STANDARD if names is None else names):
        try:
            if name != "single":  # which is always run
                found.append(_legal(source, overrides, recipe, name, most_ranks))
        except RecipeError as error:
            left_out[name] = " ".join(map(str, error.problems))
            problems += [replace(each, place=f"--layouts {name}") for each in error.problems]
    if names is not None and problems:
        raise RecipeError(problems)
    if not found:
        raise RecipeError(Problem("no layout is left to verify", remedy="name at least one, such as --layouts tp2"))
    return found, left_out


def _legal(source: str, overrides: Sequence[str], recipe: Recipe, name: str, most_ranks: int | None) -> VerifiedLayout:
    try:
        factors = layout_overrides(name)
    except ValueError as error:
        guess = closest(name, STANDARD)
        raise RecipeError(Problem(str(error), _RULE, f"did you mean {guess}?" if guess else "correct it")) from None
    own = f"parallel={{recompute: {recipe.parallel.recompute}, offload: {str(recipe.parallel.offload).lower()}}}"
    # The micro-batch is no part of the science: it is chosen again for the small recipe.
    checked = load_checked_recipe(source, [*overrides, own, *factors, "batch.micro_batch_size=1"]).recipe
    layout = Layout.of(checked, world_size(checked))
    if most_ranks is not None and layout.world > most_ranks:
        what = f"{layout.world} ranks, and this machine has {most_ranks} devices"
        raise RecipeError(Problem(what, "every rank needs its own", "use --device cpu"))
    return VerifiedLayout(name, tuple(factors), layout, layout.pp * checked.parallel.chunks)
