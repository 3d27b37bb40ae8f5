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
from bloomery.config.recipe import LrSection, ModelSection, Recipe
from bloomery.data.manifest import ShardManifest
from bloomery.data.shards import ShardWriter, token_dtype
from bloomery.data.tokenizer import Tokenizer
from bloomery.families.registry import FAMILIES
from bloomery.sizing.check import load_checked_recipe
from bloomery.sizing.layout import Layout, layout_overrides
from bloomery.verify.trials import middle

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
_DOCUMENTS = 300
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


@dataclass(frozen=True)
class Shrunk:
    values: dict[str, Any]
    """The small recipe as plain YAML values."""
    batch: int
    """Samples of a global batch, at the start of a ramp. The reference takes them all at once, so that how a batch is
    cut is compared too."""
    changes: dict[str, dict[str, Any]]
    """Path -> the user's value and the small one, of the sections that decide what is learned."""
    remarks: list[str]
    """What is not verified, and why."""


def shrink(recipe: Recipe, layouts: Sequence[VerifiedLayout], folder: Path, *, steps: int) -> Shrunk:
    """The recipe reads shards and a tokenizer in `folder` (`write_data`)."""
    before = as_dict(recipe)
    unit = math.lcm(*(each.micro_batches for each in layouts))
    batch = -(-_SMALLEST_BATCH // unit) * unit
    data, evaluates = before["data"] or {}, recipe.data is not None and recipe.train.evaluate is not None
    science = {
        "model": _model(recipe.model, layouts),
        "data": {"split": "90,10" if data.get("split") else None},
        "batch": _batch(recipe, batch, steps),
        "optimizer": {"clip_grad_norm": CLIP, "eps": max(EPS, recipe.optimizer.eps)},
        "lr": _lr(recipe.lr, steps),
        "train": {
            "for": f"{steps} steps",
            "evaluate": {"every": f"{steps} steps", "steps": 1} if evaluates else None,
            "exit_after": None,
            "skip": [],
        },
    }
    small = before | {section: (before[section] or {}) | fields for section, fields in science.items()}
    small["init"] = None  # those weights have another shape
    small["data"] |= {
        "train": _sources(recipe, folder),
        "validation": {"valid": [{"path": str(folder / "valid")}]} if evaluates and data.get("validation") else {},
        "cache_dir": str(folder / "cache"),
    }
    small["batch"]["micro_batch_size"] = batch
    small["train"]["compile"] = False
    small |= {
        "tokenizer": {"path": str(folder / "tokenizer")},
        "prepare": [],
        "precision": "fp32",
        "loss_scale": {},
        "parallel": {"recompute": recipe.parallel.recompute, "offload": recipe.parallel.offload},
        "checkpoint": {"phases": [{"every": f"{middle(steps)} steps"}]},
        "monitor": {"log_every": "1 steps", "tensorboard": False},
        "launch": None,
    }
    old = dict(leaves(before))
    changes = {path: {"from": old.get(path), "to": new} for path, new in leaves(science) if old.get(path) != new}
    return Shrunk(small, batch, changes, _remarks(recipe))


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
        "init_std": model.init_std * math.sqrt(model.hidden_size / hidden),
    }


def _batch(recipe: Recipe, batch: int, steps: int) -> dict[str, Any]:
    """A ramp stays one: it doubles the batch after a quarter of the steps."""
    if recipe.batch.rampup is None:
        return {"global_batch_size": batch}
    rampup = {"start": batch, "increment": batch, "samples": batch * max(1, steps // 4)}
    return {"global_batch_size": 2 * batch, "rampup": rampup}


def _lr(lr: LrSection, steps: int) -> dict[str, Any]:
    return {
        "peak": PEAK_LR,
        "min": PEAK_LR * lr.min / lr.peak,
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
    dropout, recompute, eps = recipe.model.dropout, recipe.parallel.recompute, recipe.optimizer.eps
    rounding = f"verified with {EPS:g}, or Adam would make steps of rounding where gradients are zero"
    in_fp32 = "its rounding depends on the order of sums, so equality is shown in fp32"
    many = recipe.data is not None and len(recipe.data.train) > _MOST_SOURCES
    remarks = (
        (dropout > 0, f"dropout {dropout}: masks depend on the layout, verified with dropout 0"),
        (recipe.precision != "fp32", f"precision {recipe.precision}: {in_fp32}"),
        (recompute != "none", f"recompute {recompute}: in every layout, and not in the reference"),
        (eps < EPS, f"optimizer.eps {eps:g}: {rounding}"),
        (many, f"data.train: the {_MOST_SOURCES} heaviest sources"),
    )
    return [text for holds, text in remarks if holds]


def write_data(values: Mapping[str, Any], folder: Path) -> None:
    """A tokenizer (BERT's vocab.txt; every fourth token continues a word) and every shard that the shrunk recipe
    `values` reads. Each source follows rules of its own."""
    vocab, data, is_encoder = values["model"]["vocab_size"], values["data"], FAMILIES[values["model"]["family"]].encoder
    (folder / "tokenizer").mkdir()
    words = [f"##{i}" if i % 4 == 0 else f"word{i}" for i in range(vocab - len(_SPECIAL))]
    (folder / "tokenizer" / "vocab.txt").write_text("\n".join([*_SPECIAL, *words]) + "\n")
    tokenizer = Tokenizer.load(str(folder / "tokenizer"))
    for seed, source in enumerate(
        source for group in (data["train"], *data["validation"].values()) for source in group
    ):
        _write_shard(source["path"], tokenizer, seed=seed, sentences=is_encoder)


def _write_shard(prefix: str, tokenizer: Tokenizer, *, seed: int, sentences: bool) -> None:
    """[SEP] ends a document, unless it consists of sentences."""
    random, first, vocab = np.random.default_rng(seed), len(_SPECIAL), tokenizer.vocab_size
    dtype, eod_id = token_dtype(vocab), None if sentences else tokenizer.eod_id
    follower = dict(zip(range(first, vocab), (first + random.permutation(vocab - first)).tolist(), strict=True))
    with ShardWriter(prefix, dtype) as writer:
        for _ in range(_DOCUMENTS):
            lengths = random.integers(3, 12, size=int(random.integers(2, 7)))
            tokens = [int(random.integers(first, vocab))]
            while len(tokens) < lengths.sum():
                is_next = random.random() < 0.8
                tokens.append(follower[tokens[-1]] if is_next else int(random.integers(first, vocab)))
            if eod_id is None:
                document = np.array(tokens, dtype).data
                writer.append_many(document, lengths.astype("<i4"), np.array([len(lengths)], "<i4"))
            else:
                writer.append(np.array([*tokens, eod_id]))
    ShardManifest(
        tokenizer_hash=tokenizer.content_hash,
        vocab_size=vocab,
        dtype=str(dtype),
        eod_id=eod_id,
        append_eod=eod_id is not None,
        shuffle_seed=None,
        documents=writer.num_documents,
        sequences=writer.num_sequences,
        tokens=writer.num_tokens,
        sources=(),
        source_files=(),
        dropped={},
        settings={},
        encoder="synthetic",
        bloomery_version=bloomery.__version__,
    ).write(prefix)


STANDARD = (
    *("zero0-dp2", "zero1-dp2", "zero2-dp2", "zero3-dp2", "tp2", "cp2", "pp2", "pp2-interleaved", "pp2-zero_bubble"),
    *("tp4", "zero3-dp4-shard2", "zero3-dp2-tp2", "dp2-cp2", "pp2-tp2", "pp2-dp2"),
    *("pp2-dp2-tp2", "pp2-cp2-tp2", "zero2-dp4-tp2"),
)
"""2, 4 and 8 ranks."""


@dataclass(frozen=True)
class VerifiedLayout:
    """A layout that the user's recipe allows."""

    name: str
    overrides: tuple[str, ...]
    layout: Layout
    stages: int

    @property
    def micro_batches(self) -> int:
        """Over all replicas: two for each, so that gradients are accumulated, and two for every rank of a pipeline."""
        return self.layout.dp * 2 * self.layout.pp


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
    factors = layout_overrides(name)
    own = f"parallel={{recompute: {recipe.parallel.recompute}, offload: {str(recipe.parallel.offload).lower()}}}"
    # The micro-batch is no part of the science: it is chosen again for the small recipe.
    checked = load_checked_recipe(source, [*overrides, own, *factors, "batch.micro_batch_size=1"]).recipe
    layout = Layout.of(checked)
    if most_ranks is not None and layout.world > most_ranks:
        what = f"{layout.world} ranks, and this machine has {most_ranks} devices"
        raise RecipeError(Problem(what, "every rank needs its own", "use --device cpu"))
    return VerifiedLayout(name, tuple(factors), layout, layout.pp * checked.parallel.chunks)
