"""Several documents in one causal sample: masks, positions and labels at their ends, and that they do not meet."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import UnionType
from typing import Any, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import models

from bloomery.base.errors import DataError
from bloomery.data.batch import Batch, Packing, causal_batch
from bloomery.data.causal import CausalSource
from bloomery.data.manifest import ShardManifest
from bloomery.data.open import open_data
from bloomery.data.shards import ShardReader, ShardWriter
from bloomery.families.family import IGNORED_LABEL
from bloomery.model.loss import row_losses
from bloomery.sizing.check import load_checked_recipe
from conftest import VOCAB, Workshop
from model_samples import small_config, small_model

EOD = 0
ALL = Packing(EOD, mask_documents=True, reset_positions=True, eod_loss=False)


def lists(batch: Batch) -> dict[str, list[Any]]:
    return {name: tensor.tolist() for name, tensor in {**batch.inputs, **batch.targets}.items()}


def test_the_end_of_a_document_belongs_to_it_and_the_next_begins_behind() -> None:
    rows = np.array([[5, 6, EOD, 7, EOD, EOD, 8, 9, 1], [EOD, 5, 5, 5, 5, 5, 5, EOD, 6]])
    found = lists(causal_batch(rows, ALL))
    assert found["tokens"] == rows[:, :-1].tolist()
    assert found["document_ids"] == [[0, 0, 0, 1, 1, 2, 3, 3], [0, 1, 1, 1, 1, 1, 1, 1]]
    assert found["positions"] == [[0, 1, 2, 0, 1, 0, 0, 1], [0, 0, 1, 2, 3, 4, 5, 6]]
    none = IGNORED_LABEL
    assert found["lm loss"] == [[6, EOD, none, EOD, none, none, 9, 1], [none, 5, 5, 5, 5, 5, EOD, none]]


def test_each_option_does_one_thing() -> None:
    rows = np.array([[5, EOD, 6, 7, EOD]])
    plain = lists(causal_batch(rows))
    assert set(plain) == {"tokens", "lm loss"}
    assert lists(causal_batch(rows, Packing(EOD))) == plain
    assert set(lists(causal_batch(rows, Packing(EOD, mask_documents=True)))) == {*plain, "document_ids"}
    assert set(lists(causal_batch(rows, Packing(EOD, reset_positions=True)))) == {*plain, "positions"}
    silent = lists(causal_batch(rows, Packing(EOD, eod_loss=False)))
    assert silent == {"tokens": plain["tokens"], "lm loss": [[EOD, IGNORED_LABEL, 7, EOD]]}
    assert rows.tolist() == [[5, EOD, 6, 7, EOD]], "the tokens read are not touched"


def test_the_loss_mask_and_positions_are_megatrons() -> None:
    """get_ltor_masks_and_position_ids, written out: loops over the ends of documents."""
    rows = np.random.default_rng(0).integers(0, 6, (20, 33))
    batch = causal_batch(rows, ALL)
    for data, positions, documents, labels in zip(
        rows[:, :-1],
        batch.inputs["positions"].numpy(),
        batch.inputs["document_ids"].numpy(),
        batch.targets["lm loss"].numpy(),
        strict=True,
    ):
        position_ids, attention = np.arange(32), np.tril(np.ones((32, 32), bool))
        previous = 0
        for end in np.flatnonzero(data == EOD):
            attention[end + 1 :, : end + 1] = False
            position_ids[end + 1 :] -= end + 1 - previous
            previous = end + 1
        assert (positions == position_ids).all()
        same = documents[:, None] == documents[None, :]
        assert ((same & np.tril(np.ones((32, 32), bool))) == attention).all()
        assert ((labels == IGNORED_LABEL) == (data == EOD)).all()


@pytest.mark.parametrize("family", ["gpt2", "bloom", "llama"])
def test_packed_documents_train_as_they_would_alone(family: str, tmp_path: Path) -> None:
    """Loss and gradients of a sample of three documents are the sums of those of the documents."""
    random = np.random.default_rng(1)
    config = small_config(family, seq_length=32)
    documents = [np.append(random.integers(1, config.vocab_size, length), EOD) for length in (9, 13, 8)]
    with ShardWriter(str(tmp_path / "x"), np.uint16) as writer:
        for document in documents:
            writer.append(document)
    packing = dataclasses.replace(ALL, reset_positions=family != "bloom")
    with_ends = CausalSource(
        ShardReader(writer.prefix), seq_length=32, vocab_size=config.vocab_size, seed=1, packing=packing
    ).read(np.array([0]))  # fmt: skip
    model = small_model(config)

    def loss_and_gradients(batches: list[Batch]) -> tuple[float, list[torch.Tensor]]:
        model.zero_grad()
        total = torch.cat([row_losses(model(**b.inputs), b.targets)["lm loss"] for b in batches]).sum()
        total.backward()
        return total.item(), [parameter.grad.clone() for parameter in model.parameters()]

    loss, gradients = loss_and_gradients([with_ends])
    alone_loss, alone = loss_and_gradients([causal_batch(document[None]) for document in documents])
    assert loss == pytest.approx(alone_loss, rel=1e-5)
    for ours, theirs in zip(gradients, alone, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    merged, _ = loss_and_gradients([causal_batch(np.concatenate(documents)[None])])
    assert abs(merged - alone_loss) > 1.0, "without the options the documents do see each other"


def write_manifest(prefix: Path, *, eod_id: int | None) -> None:
    """A manifest that says only what these tests are about, and fits the shard."""
    with ShardReader(str(prefix)) as shard:
        counts = {"documents": shard.num_documents, "sequences": shard.num_sequences, "tokens": shard.num_tokens}
    values: dict[str, Any] = {
        "tokenizer_hash": "", "vocab_size": VOCAB, "dtype": "uint16", "eod_id": eod_id,
        "append_eod": eod_id is not None, **counts,
    }  # fmt: skip
    kinds = get_type_hints(ShardManifest)
    for field in dataclasses.fields(ShardManifest):
        if field.name not in values and field.default is dataclasses.MISSING:
            kind = get_origin(kinds[field.name]) or kinds[field.name]
            values[field.name] = kind() if isinstance(kind, type) and kind is not UnionType else None
    ShardManifest(**values).write(str(prefix))


PACKED = ["data.mask_documents=true", "data.reset_positions=true", "data.eod_loss=false"]


def first_batch(workshop: Workshop, *overrides: str) -> Batch:
    with open_data(load_checked_recipe(str(workshop.recipe), overrides).recipe) as data:
        return data.train.batch(0, 8)


def test_the_end_is_that_of_the_manifest(workshop: Workshop) -> None:
    write_manifest(workshop.folder / "train", eod_id=3)
    batch = first_batch(workshop, *PACKED)
    ends = batch.inputs["tokens"] == 3
    assert ends.any()
    assert torch.equal(batch.targets["lm loss"] == IGNORED_LABEL, ends)
    assert batch.inputs["document_ids"].max() > 0
    assert set(first_batch(workshop).inputs) == {"tokens"}


def save_words(folder: Path) -> None:
    """A tokenizer whose end of document is the last id."""
    tokenizer = HfTokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB - 1)}, unk_token="w0"))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))


def test_without_a_manifest_it_is_that_of_the_tokenizer(workshop: Workshop) -> None:
    save_words(workshop.folder / "words")
    with ShardWriter(str(workshop.folder / "ended"), np.uint16) as writer:
        for length in range(60):
            writer.append(np.array([*range(length), VOCAB - 1]))
    ended = ("data.train.0.path=ended", "tokenizer.path=words")
    batch = first_batch(workshop, *PACKED, *ended)
    ends = batch.inputs["tokens"] == VOCAB - 1
    assert ends.any()
    assert torch.equal(batch.targets["lm loss"] == IGNORED_LABEL, ends)


@pytest.mark.parametrize("order", ["timeless", "megatron"])
def test_documents_that_do_not_end_are_found_without_a_manifest(workshop: Workshop, order: str) -> None:
    """Megatron's own preprocessing without --append-eod: the options would do nothing."""
    save_words(workshop.folder / "words")
    words = ("tokenizer.path=words", f"data.order={order}")
    with ShardWriter(str(workshop.folder / "endless"), np.uint16) as writer:
        for number in range(1000):
            writer.append(np.array([5, 6, VOCAB - 1 if number < 980 else 7], np.uint16))
    with pytest.raises(DataError) as caught:
        first_batch(workshop, PACKED[0], "data.train.0.path=endless", *words)
    (problem,) = caught.value.problems
    assert problem.place == "endless"
    assert problem.what == f"its last token is 7, not {VOCAB - 1}, the end of a document"
    assert "find the ends of documents by their token" in problem.rule
    assert "append_eod: true (Megatron: --append-eod), or turn them off" in problem.remedy
    first_batch(workshop, "data.train.0.path=endless", *words)


@pytest.mark.parametrize("option", PACKED)
def test_an_unknown_end_is_an_error_with_its_remedy(workshop: Workshop, option: str) -> None:
    with pytest.raises(DataError, match=r"train: its end-of-document token is not known.*[Nn]ame the tokenizer"):
        first_batch(workshop, option)


def test_a_shard_without_ends_is_an_error_with_its_remedy(workshop: Workshop) -> None:
    write_manifest(workshop.folder / "train", eod_id=None)
    with pytest.raises(DataError, match=r"prepare it again with append_eod: true|Prepare it again with append_eod"):
        first_batch(workshop, PACKED[0])


def test_a_packed_run_learns_and_differs_from_a_plain_one(
    workshop: Workshop, command: Callable[..., tuple[int, str, str]]
) -> None:
    write_manifest(workshop.folder / "train", eod_id=3)
    plain = workshop.losses(workshop.train("train.for=8 steps", run="plain"))
    packed = workshop.losses(workshop.train("train.for=8 steps", *PACKED, run="packed"))
    assert packed[-1] < packed[0]
    assert packed != plain
    code, _, error = command("train", str(workshop.recipe), "model.family=bloom", PACKED[1], "--device", "cpu")
    assert code != 0
    assert "data.reset_positions is true but model.family is 'bloom'" in error
