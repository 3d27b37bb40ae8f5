"""What a shard was made from: `<prefix>.manifest.json`, written last, so that a shard with one is complete."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from bloomery.base.bounded import LARGE_BYTES, read_json
from bloomery.base.credentials import mask
from bloomery.base.errors import DataError, Problem, first_few
from bloomery.base.storage import write_atomically
from bloomery.data.index_cache import file_checksum
from bloomery.data.shard_index import unreadable
from bloomery.data.shards import ShardReader

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from bloomery.data.tokenizer import Tokenizer

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
    index_hash: str | None = None
    """xxh3-128 of the `.idx`; None in manifests of earlier versions."""
    format_version: int = FORMAT_VERSION

    def write(self, prefix: str) -> None:
        write_atomically(manifest_path(prefix), mask(json.dumps(asdict(self), indent=2)) + "\n")


def manifest_path(prefix: str) -> str:
    return f"{prefix}.manifest.json"


def read_manifest(prefix: str) -> ShardManifest | None:
    """None where there is none: shards made by other tools have no manifest."""
    path = manifest_path(prefix)
    try:
        content = read_json(path, LARGE_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError as error:
        raise _broken(path, f"cannot be read: {error}", "a manifest is a JSON file") from error
    version = content.get("format_version") if isinstance(content, dict) else None
    if version != FORMAT_VERSION:
        raise _broken(path, f"has format_version {version!r}", f"this Bloomery reads version {FORMAT_VERSION}")
    return _parse(path, content)


def without_manifest(prefixes: Sequence[str], but: str) -> str:
    """One warning, however many shards have none; `but` says what follows, such as 'could not be checked'."""
    have, whose = ("has no manifest", "its") if len(prefixes) == 1 else ("have no manifests", "their")
    place = f" ({manifest_path(prefixes[0])})" if len(prefixes) == 1 else ""
    what = "tokenizer, vocabulary and end-of-document token"
    return f"{first_few(prefixes)} {have}{place}: {whose} {what} {but}"


def check_fits(manifest: ShardManifest, *, tokenizer: Tokenizer | None, vocab_size: int, place: str) -> list[Problem]:
    """Why a model with this tokenizer (None: not known) and vocabulary cannot train on the shard; empty when it can."""
    problems = []
    if tokenizer is not None and manifest.tokenizer_hash != tokenizer.content_hash:
        problems.append(
            Problem(
                what=f"the shard was made with another tokenizer (hash {manifest.tokenizer_hash[:12]}, "
                f"the recipe's is {tokenizer.content_hash[:12]})",
                rule="token ids only have a meaning together with their tokenizer",
                remedy="point tokenizer.path to the tokenizer of the shard, or run `bloomery prepare` again",
                place=place,
            )
        )
    elif tokenizer is not None and (wrong := _contradictions(manifest, tokenizer)):
        what = f"says {', '.join(wrong)} in {tokenizer.path}, whose hash it names"
        rule = "the shard must end its documents as the tokenizer does, and hold ids of its vocabulary"
        remedy = "delete the manifest and run `bloomery prepare` again, or restore what was changed"
        problems.append(Problem(what, rule, remedy, place))
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


def _contradictions(manifest: ShardManifest, tokenizer: Tokenizer) -> list[str]:
    """What a manifest says of its own tokenizer that is not so. Which token ends a document is not in the hash: it may
    stand in another file, and be missing where only tokenizer.json was copied."""
    is_so = {"vocab_size": tokenizer.vocab_size}
    if manifest.eod_id is not None and tokenizer.end_of_document is not None:
        is_so["eod_id"] = tokenizer.eod_id
    told = ((name, getattr(manifest, name), value) for name, value in is_so.items())
    return [f"{name} {said} where it is {value}" for name, said, value in told if said != value]


def check_alike(manifests: Mapping[str, ShardManifest]) -> list[Problem]:
    """Why shards, by their prefixes, cannot be trained on together; empty when they can. A shard whose documents have
    no end fits every other."""
    problems = []
    for name in ("tokenizer_hash", "vocab_size", "eod_id"):
        told = [(prefix, value) for prefix, shard in manifests.items() if (value := getattr(shard, name)) is not None]
        for prefix, value in told[1:]:
            first, expected = told[0]
            if value == expected:
                continue
            what = f"the shard has {name} {value!s:.12} but {first} has {expected!s:.12}"
            rule = "shards that are trained on together need one tokenizer: an id means another token in another"
            remedy = (
                "make them with the same tokenizer by `bloomery prepare`, and name it in the recipe as `tokenizer:`"
            )
            problems.append(Problem(what, rule, remedy, manifest_path(prefix)))
    return problems


def check_describes(manifest: ShardManifest, shard: ShardReader, *, place: str) -> list[Problem]:
    """Why the manifest does not belong to the shard beside it; empty when it does."""
    counts = {
        "dtype": (manifest.dtype, shard.dtype.name),
        "documents": (manifest.documents, shard.num_documents),
        "sequences": (manifest.sequences, shard.num_sequences),
        "tokens": (manifest.tokens, shard.num_tokens),
    }
    if manifest.index_hash is not None and shard.num_documents != shard.num_sequences:
        # Only then can sequences move from one document to another unseen: all else in an index is said twice.
        counts["index_hash"] = (manifest.index_hash, file_checksum(f"{shard.prefix}.idx"))
    wrong = [f"{name} {said} where it is {found}" for name, (said, found) in counts.items() if said != found]
    if not wrong:
        return []
    what = f"the manifest belongs to another shard: it says {', '.join(wrong)}"
    rule = "tokenizer and vocabulary are checked by it, so it must describe the .bin and .idx beside it"
    remedy = "copy all three files from where the shard was made, or run `bloomery prepare` again"
    return [Problem(what, rule, remedy, place)]


def _parse(path: str, content: dict[str, Any]) -> ShardManifest:
    names = {field.name for field in fields(ShardManifest)}
    content = {"index_hash": None, **content}
    if difference := names ^ set(content):
        kind = "lacks" if difference <= names else "has unknown"
        raise _broken(
            path, f"{kind} {', '.join(sorted(difference))}", "a manifest holds exactly the fields of its version"
        )
    wrong = _wrong_values(ShardManifest, content)
    if not wrong and content["eod_id"] is not None and not 0 <= content["eod_id"] < content["vocab_size"]:
        wrong = [f"eod_id {content['eod_id']}, which is no id of a vocabulary of {content['vocab_size']}"]
    if wrong:
        raise _broken(path, f"has {'; '.join(wrong)}", "it was damaged or changed by hand")
    sources = tuple(SourceCount(**source) for source in content["sources"])
    source_files = tuple(SourceFile(**file) for file in content["source_files"])
    return ShardManifest(**{**content, "sources": sources, "source_files": source_files})


_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "str": ("a string", lambda value: isinstance(value, str)),
    "str | None": ("a string or null", lambda value: value is None or isinstance(value, str)),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "int": ("a count", lambda value: type(value) is int and value >= 0),
    "int | None": ("a whole number or null", lambda value: value is None or type(value) is int),
    "dict[str, Any]": ("an object", lambda value: isinstance(value, dict)),
    "dict[str, int]": (
        "an object of counts",
        lambda value: isinstance(value, dict) and all(type(count) is int and count >= 0 for count in value.values()),
    ),
}
"""By the types of the fields above: what a value is, and whether it is that."""
_ENTRIES = {"tuple[SourceCount, ...]": SourceCount, "tuple[SourceFile, ...]": SourceFile}


def _wrong_values(kind: type[DataclassInstance], content: Mapping[str, Any], where: str = "") -> list[str]:
    """Fields that are not of their type."""
    wrong: list[str] = []
    for field in fields(kind):
        name, value = f"{where}{field.name}", content[field.name]
        if entry := _ENTRIES.get(str(field.type)):
            wrong += _wrong_entries(entry, name, value)
            continue
        rule, is_right = _KINDS[str(field.type)]
        if not is_right(value):
            wrong.append(f"{name} {_shown(value)}, which is not {rule}")
    return wrong


def _wrong_entries(kind: type[DataclassInstance], name: str, value: Any) -> list[str]:
    if not isinstance(value, list):
        return [f"{name} {_shown(value)}, which is not a list"]
    names, wrong = {field.name for field in fields(kind)}, []
    for number, entry in enumerate(value):
        if isinstance(entry, dict) and set(entry) == names:
            wrong += _wrong_values(kind, entry, f"{name}[{number}].")
        else:
            wrong.append(f"{name}[{number}] {_shown(entry)}, which is not an object with {', '.join(sorted(names))}")
    return wrong


def _shown(value: Any) -> str:
    return f"{json.dumps(value):.80}"


def _broken(path: str, what: str, rule: str) -> DataError:
    return DataError(Problem(what, rule, "delete the manifest and run `bloomery prepare` again", path))
