"""`bloomery extract`: many .jsonl files, compressed or not, to N plain ones; no line is lost, cut or joined."""

from __future__ import annotations

import codecs
import json
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from threading import Event
from typing import Any

from bloomery.base.bounded import LARGE_BYTES, read_json, read_small
from bloomery.base.errors import DataError, Problem
from bloomery.base.storage import publish, write_all, write_atomically, writing, written_to
from bloomery.prepare.download import AGAIN
from bloomery.prepare.pool import thread_pool
from bloomery.prepare.read import Span, content, open_span, whole_lines
from bloomery.prepare.sources import LINES, InputFile, find_files

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Chunk:
    """One output file and the inputs that go into it, whole and in order."""

    path: Path
    inputs: tuple[InputFile, ...]

    @property
    def record_path(self) -> Path:
        """Counts and hashes of a finished chunk; hidden, so that no glob takes it for data."""
        return self.path.with_name(f".{self.path.stem}.json")

    def stamps(self) -> list[list[Any]]:
        """What shows whether an input, or the chunk itself, has changed."""
        now = self.path.stat()
        return [[file.path, file.size, file.stamp] for file in self.inputs] + [["", now.st_size, str(now.st_mtime_ns)]]

    def record(self) -> dict[str, Any] | None:
        """Facts for the manifest, if the chunk is complete and made of the inputs as they are now."""
        try:
            record = read_json(self.record_path)
            facts = dict(record["facts"])
            is_sound = [type(facts[name]) for name in ("documents", "bytes", "inputs")] == [int, int, list]
            return facts if is_sound and record["of"] == self.stamps() else None
        except (OSError, ValueError, TypeError, KeyError):
            return None


@dataclass
class ExtractResult:
    chunks: int
    written: int
    already_there: int
    input_files: int
    documents: int
    bytes: int
    manifest: str


@written_to("--output", AGAIN)
def extract(sources: Sequence[str], output: Path, *, chunks: int, jobs: int = 1) -> ExtractResult:
    """Makes the chunks that are not there yet. DataError names every input that is damaged."""
    plan, path = plan_chunks(sources, output, chunks=chunks), output / MANIFEST
    with writing(output):
        output.mkdir(parents=True, exist_ok=True)
    todo = [chunk for chunk in plan if chunk.record() is None]
    if todo:
        with writing(path):
            path.unlink(missing_ok=True)  # it lists chunks that are not there
        _make(todo, jobs)
    records = [chunk.record() or {} for chunk in plan]
    inputs = [each for record in records for each in record["inputs"]]
    documents, size = (sum(record[name] for record in records) for name in ("documents", "bytes"))
    counts = {"documents": documents, "bytes": size, "input_files": len(inputs), "input_documents": documents}
    write_atomically(path, json.dumps({"format_version": 1, **counts, "chunks": records}, indent=1) + "\n")
    return ExtractResult(chunks, len(todo), chunks - len(todo), len(inputs), documents, size, str(path))


def plan_chunks(sources: Sequence[str], output: Path, *, chunks: int) -> list[Chunk]:
    """Chunk k holds the files [k * n // chunks, (k + 1) * n // chunks) of the inputs in natural order."""
    paths = [output / f"chunk-{k:05d}-of-{chunks:05d}.jsonl" for k in range(chunks)]
    others = {path.name for path in output.glob("chunk-*-of-*.jsonl")} - {path.name for path in paths}
    if os.path.lexists(path := output / MANIFEST):
        with writing(path, "read"):
            is_ours = b'"format_version": 1' in read_small(path, LARGE_BYTES)[:99]
        others |= set() if is_ours else {MANIFEST}
    if others:
        what = f"holds {min(others)}, which is not of this extraction"
        raise DataError(Problem(what, "one folder, one extraction", "choose another --output", str(output)))
    ours = {os.path.realpath(path) for path in paths}  # chunks are never made of chunks
    inputs = [file for file in find_files(sources) if file.kind == "jsonl" and file.real not in ours]
    inputs.sort(key=lambda file: (natural_key(file.path), file.path))
    if len(inputs) < chunks:
        what = f"{len(inputs)} input files cannot fill {chunks} chunks"
        rule = f"inputs end in {', '.join(LINES)}, plain or with .gz or .zst, and each file goes into one chunk"
        raise DataError(Problem(what, rule, f"use --chunks {len(inputs)} or less" if inputs else "correct the sources"))
    bounds = [k * len(inputs) // chunks for k in range(chunks + 1)]
    return [Chunk(path, tuple(inputs[bounds[k] : bounds[k + 1]])) for k, path in enumerate(paths)]


def natural_key(text: str) -> list[tuple[int, int, str]]:
    """Sorts shard9 before shard10."""
    return [(0, int(part), part) if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", text) if part]


def _make(todo: list[Chunk], jobs: int) -> None:
    """In threads: decompression, hashing and the disk do not hold Python's lock. StorageError ends all at once."""
    problems: list[Problem] = []
    with thread_pool(jobs) as (pool, stop):
        for done in as_completed([pool.submit(make_chunk, chunk, stop) for chunk in todo]):
            try:
                done.result()
            except DataError as error:
                problems += error.problems
    if problems:
        raise DataError(problems)


def make_chunk(chunk: Chunk, stop: Event) -> None:
    """Writes the chunk and its record. The chunk has its name only when it is whole, its record comes last."""
    partial = chunk.path.with_name(f".{chunk.path.name}.partial-{secrets.token_hex(4)}")
    hasher, size, inputs = sha256(), 0, list[dict[str, Any]]()
    with writing(chunk.path):
        for stale in (chunk.record_path, *partial.parent.glob(f".{chunk.path.name}.partial-*")):
            stale.unlink(missing_ok=True)  # of a process that was killed
    try:
        with writing(chunk.path), open(partial, "xb", buffering=0) as file:
            for lines in (lines for source in chunk.inputs for lines in _lines(source, inputs)):
                write_all(file.fileno(), lines)
                hasher.update(lines)
                size += len(lines)
                if stop.is_set():
                    return
            publish(partial, chunk.path)
    finally:
        partial.unlink(missing_ok=True)  # gives the space back to a full disk
    documents = sum(each["documents"] for each in inputs)
    facts = {"file": chunk.path.name, "documents": documents, "bytes": size, "sha256": hasher.hexdigest()}
    write_atomically(chunk.record_path, json.dumps({"facts": {**facts, "inputs": inputs}, "of": chunk.stamps()}) + "\n")


def _lines(source: InputFile, inputs: list[dict[str, Any]]) -> Iterator[bytes]:
    """Blocks of whole lines, each line with its newline, without blank ones and byte order mark; what the file held is
    appended to `inputs` at its end. DataError where it is truncated or damaged."""
    documents, text_bytes, blank = 0, 0, 0
    with open_span(Span(source, 0, source.size), sha256) as stored:
        for block in whole_lines(content(stored, source.compression), source):
            lines = block.removeprefix(codecs.BOM_UTF8 if not text_bytes else b"").split(b"\n")
            kept = [line for line in lines if line and not line.isspace()]
            if not block.endswith(b"\n") and kept and not kept[-1].rstrip().endswith(b"}"):
                raise EOFError("its last line has neither newline nor closing brace")
            text_bytes, documents = text_bytes + len(block), documents + len(kept)
            blank += len(lines) - len(kept) - block.endswith(b"\n")
            yield b"".join(line + b"\n" for line in kept)
        if not source.size:
            raise EOFError("it is empty")
    facts = {"path": source.path, "bytes": source.size, "sha256": stored.hasher.hexdigest(), "documents": documents}
    inputs.append({**facts, "text_bytes": text_bytes, "blank_lines": blank})
