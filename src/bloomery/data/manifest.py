"""What a shard was made from: `<prefix>.manifest.json`, written last, so that a shard with one is complete."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from bloomery.base.errors import DataError, Problem
from bloomery.base.storage import write_atomically
from bloomery.data.shards import ShardReader

FORMAT_VERSION = 2


@dataclass(frozen=True)
class SourceCount:
    """What one source gave to a shard."""

    name: str
    """As the recipe writes it."""
    documents: int
    tokens: int
    """End-of-document tokens included."""
    bytes: int
    """UTF-8 text."""


@dataclass(frozen=True)
class SourceFile:
    """A file that was read."""

    name: str
    bytes: int
    hash: str
    """xxh3-128 of its bytes; of a large .jsonl, of the hashes of the ranges in which it was read."""
    stamp: str
    """Of the moment it was read (modification time, or what its store calls a version): the same stamp and size are
    taken for the same content."""


@dataclass(frozen=True)
class ShardManifest:
    tokenizer_hash: str
    """`Tokenizer.content_hash`: the same wherever the tokenizer lies."""
    vocab_size: int
    dtype: str
    eod_id: int | None
    """The token that ends each document; None when none was appended."""
    append_eod: bool
    shuffle_seed: int | None
    """Seed of the documents' order; None when they keep the order of their sources."""
    documents: int
    sequences: int
    """More than documents where each sentence is a sequence."""
    tokens: int
    sources: tuple[SourceCount, ...]
    source_files: tuple[SourceFile, ...]
    dropped: dict[str, int]
    """Documents that were left out, by reason: empty, short, long, duplicate, bad."""
    settings: dict[str, Any]
    """The other fields of `prepare:` that decide the content: text_key, special_tokens, split_sentences, ..."""
    encoder: str
    """The library that made the ids, with its version; every library gives the same ids."""
    bloomery_version: str
    format_version: int = FORMAT_VERSION

    def write(self, prefix: str) -> None:
        write_atomically(manifest_path(prefix), json.dumps(asdict(self), indent=2) + "\n")


def manifest_path(prefix: str) -> str:
    return f"{prefix}.manifest.json"


def read_manifest(prefix: str) -> ShardManifest | None:
    """None where there is none: shards made by other tools have no manifest."""
    path = manifest_path(prefix)
    try:
        with open(path, "rb") as file:
            content = json.loads(file.read())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise _broken(path, f"cannot be read: {error}", "a manifest is a JSON file") from error
    version = content.get("format_version") if isinstance(content, dict) else None
    if version != FORMAT_VERSION:
        raise _broken(path, f"has format_version {version!r}", f"this Bloomery reads version {FORMAT_VERSION}")
    return _parse(path, content)


def check_fits(manifest: ShardManifest, *, tokenizer_hash: str | None, vocab_size: int, place: str) -> list[Problem]:
    """Why a model with this tokenizer (None: not known) and vocabulary cannot train on the shard; empty when it can."""
    problems = []
    if tokenizer_hash is not None and manifest.tokenizer_hash != tokenizer_hash:
        problems.append(
            Problem(
                what=f"the shard was made with another tokenizer (hash {manifest.tokenizer_hash[:12]}, "
                f"the recipe's is {tokenizer_hash[:12]})",
                rule="token ids only have a meaning together with their tokenizer",
                remedy="point tokenizer.path to the tokenizer of the shard, or run `bloomery prepare` again",
                place=place,
            )
        )
    if manifest.vocab_size > vocab_size:
        problems.append(
            Problem(
                what=f"the shard's vocabulary has {manifest.vocab_size} entries but model.vocab_size is {vocab_size}",
                rule="every token id must be below model.vocab_size",
                remedy=f"set model.vocab_size to {manifest.vocab_size}",
                place=place,
            )
        )
    return problems


def check_describes(manifest: ShardManifest, shard: ShardReader, *, place: str) -> list[Problem]:
    """Why the manifest does not belong to the shard beside it; empty when it does."""
    counts = {
        "dtype": (manifest.dtype, shard.dtype.name),
        "documents": (manifest.documents, shard.num_documents),
        "sequences": (manifest.sequences, shard.num_sequences),
        "tokens": (manifest.tokens, shard.num_tokens),
    }
    wrong = [f"{name} {said} where it is {found}" for name, (said, found) in counts.items() if said != found]
    if not wrong:
        return []
    what = f"the manifest belongs to another shard: it says {', '.join(wrong)}"
    rule = "tokenizer and vocabulary are checked by it, so it must describe the .bin and .idx beside it"
    remedy = "copy all three files from where the shard was made, or run `bloomery prepare` again"
    return [Problem(what, rule, remedy, place)]


def _parse(path: str, content: dict[str, Any]) -> ShardManifest:
    names = {field.name for field in fields(ShardManifest)}
    if difference := names ^ set(content):
        kind = "lacks" if difference <= names else "has unknown"
        raise _broken(
            path, f"{kind} {', '.join(sorted(difference))}", "a manifest holds exactly the fields of its version"
        )
    try:
        sources = tuple(SourceCount(**source) for source in content["sources"])
        source_files = tuple(SourceFile(**file) for file in content["source_files"])
    except TypeError as error:
        rule = "each source has name, documents, tokens and bytes, each file name, bytes, hash and stamp"
        raise _broken(path, f"has a broken list of sources: {error}", rule) from error
    return ShardManifest(**{**content, "sources": sources, "source_files": source_files})


def _broken(path: str, what: str, rule: str) -> DataError:
    return DataError(Problem(what, rule, "delete the manifest and run `bloomery prepare` again", path))
