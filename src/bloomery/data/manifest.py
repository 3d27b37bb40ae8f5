"""What a shard was made from: `<prefix>.manifest.json`, written last, so that a shard with one is complete."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

from pydantic import ConfigDict, NonNegativeInt, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from bloomery.base.bounded import LARGE_BYTES, read_small, wrong_fields
from bloomery.base.errors import DataError, Problem, first_few, mask, unreadable
from bloomery.base.storage import write_atomically
from bloomery.data.shards import ShardReader, file_checksum
from bloomery.data.tokenizer import Tokenizer

_EXACTLY = ConfigDict(strict=True, extra="forbid")


@dataclass(frozen=True, config=_EXACTLY)
class SourceCount:
    """What one source gave to a shard."""

    name: str
    """As the recipe writes it."""
    documents: NonNegativeInt
    tokens: NonNegativeInt
    """End-of-document tokens included."""
    bytes: NonNegativeInt
    """UTF-8 text."""


@dataclass(frozen=True, config=_EXACTLY)
class SourceFile:
    """A file that was read."""

    name: str
    bytes: NonNegativeInt
    hash: str
    """xxh3-128 of its bytes; of a large .jsonl, of the hashes of the ranges in which it was read."""
    stamp: str
    """Of the moment it was read (modification time, or what its store calls a version): the same stamp and size are
    taken for the same content."""


@dataclass(frozen=True, config=_EXACTLY)
class ShardManifest:
    tokenizer_hash: str
    """`Tokenizer.content_hash`: the same wherever the tokenizer lies."""
    vocab_size: NonNegativeInt
    dtype: str
    eod_id: NonNegativeInt | None
    """The token that ends each document; None when none was appended."""
    append_eod: bool
    shuffle_seed: int | None
    """Seed of the documents' order; None when they keep the order of their sources."""
    documents: NonNegativeInt
    sequences: NonNegativeInt
    """More than documents where each sentence is a sequence."""
    tokens: NonNegativeInt
    sources: tuple[SourceCount, ...]
    source_files: tuple[SourceFile, ...]
    dropped: dict[str, NonNegativeInt]
    """Documents that were left out, by reason: empty, short, long, duplicate, bad."""
    settings: dict[str, Any]
    """The other fields of `prepare:` that decide the content: text_key, special_tokens, split_sentences, ..."""
    encoder: str
    """The library that made the ids, with its version; every library gives the same ids."""
    bloomery_version: str
    index_hash: str | None = None
    """xxh3-128 of the `.idx`; None in manifests of earlier versions."""
    format_version: Literal[2] = 2

    def write(self, prefix: str) -> None:
        write_atomically(manifest_path(prefix), mask(json.dumps(asdict(self), indent=2)) + "\n")


_MANIFEST = TypeAdapter(ShardManifest)


def manifest_path(prefix: str) -> str:
    return f"{prefix}.manifest.json"


def read_manifest(prefix: str) -> ShardManifest | None:
    """None where there is none: shards made by other tools have no manifest."""
    path = manifest_path(prefix)
    try:
        return _MANIFEST.validate_json(read_small(path, LARGE_BYTES))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(path, error) from error
    except ValidationError as error:
        rule = "this Bloomery reads exactly the fields of format_version 2"
        remedy = "delete it and run `bloomery prepare` again"
        raise DataError(Problem(f"has {wrong_fields(error)}", rule, remedy, path)) from error


def manifest_of(shard: ShardReader) -> ShardManifest | None:
    """DataError where the manifest beside a shard describes another one."""
    if (manifest := read_manifest(shard.prefix)) is None:
        return None
    counts = {"dtype": (manifest.dtype, shard.dtype.name)}
    for name in ("documents", "sequences", "tokens"):
        counts[name] = getattr(manifest, name), getattr(shard, f"num_{name}")
    if manifest.index_hash is not None and shard.num_documents != shard.num_sequences:
        # Only then can sequences move from one document to another unseen: all else in an index stands there twice.
        counts["index_hash"] = (manifest.index_hash, file_checksum(f"{shard.prefix}.idx"))
    if wrong := [f"{name} {listed} where it is {found}" for name, (listed, found) in counts.items() if listed != found]:
        what = f"the manifest belongs to another shard: it records {', '.join(wrong)}"
        rule = "tokenizer and vocabulary are checked by it, so it must describe the .bin and .idx beside it"
        remedy = "copy all three files from where the shard was made, or run `bloomery prepare` again"
        raise DataError(Problem(what, rule, remedy, manifest_path(shard.prefix)))
    return manifest


def without_manifest(prefixes: Sequence[str]) -> str:
    """One warning, however many shards have none."""
    return f"no manifest of {first_few(prefixes)}: tokenizer, vocabulary and end-of-document token were not checked"


def check_fits(
    manifests: Mapping[str, ShardManifest], *, tokenizer: Tokenizer | None, vocab_size: int
) -> list[Problem]:
    """Why a model with this tokenizer (None: not known) and vocabulary cannot train on these shards, by prefix; empty
    when it can. All must name the same tokenizer, vocabulary and end of document, or no end."""
    problems = []
    known: dict[str, tuple[str, Any]] = {}
    if tokenizer is not None:
        known["tokenizer_hash"] = tokenizer.path, tokenizer.content_hash
        known["vocab_size"] = tokenizer.path, tokenizer.vocab_size
        if tokenizer.end_of_document is not None:  # it may stand in a file beside tokenizer.json that was not copied
            known["eod_id"] = tokenizer.path, tokenizer.eod_id
    for prefix, manifest in manifests.items():
        for name in ("tokenizer_hash", "vocab_size", "eod_id"):
            if (value := getattr(manifest, name)) is None:
                continue
            place, expected = known.setdefault(name, (prefix, value))
            if value != expected:
                what = f"the shard was made with another tokenizer: its {name} is {value!s:.12}, that of {place} is "
                rule = "token ids only have a meaning together with their tokenizer"
                remedy = "name the tokenizer of the shards, or delete the manifest and run `bloomery prepare` again"
                problems.append(Problem(f"{what}{expected!s:.12}", rule, remedy, manifest_path(prefix)))
                break
        if manifest.vocab_size > vocab_size:
            what = f"the shard's vocabulary has {manifest.vocab_size} entries but model.vocab_size is {vocab_size}"
            rule, remedy = "every token id must be below model.vocab_size", f"set it to {manifest.vocab_size}"
            problems.append(Problem(what, rule, remedy, manifest_path(prefix)))
    return problems
