"""`bloomery extract`: many .jsonl files, compressed or not, to N plain ones; no line is lost, cut or joined."""

from __future__ import annotations

import codecs
import json
import os
import re
import secrets
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from bloomery.base.bounded import LARGE_BYTES, read_json
from bloomery.base.errors import BloomeryError, DataError, Problem
from bloomery.base.storage import publish, write_all, write_atomically, writing, written_to
from bloomery.prepare.download import AGAIN
from bloomery.prepare.sources import LINES, InputFile, find_files, open_input
from bloomery.prepare.unpack import HashedFile, bounded_lines, unpacked

MANIFEST = "manifest.json"
_DAMAGED = "download or copy it again"


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


@dataclass
class ExtractResult:
    chunks: int
    written: int = 0
    already_there: int = 0
    input_files: int = 0
    """Of the chunks that are complete, as all counts here."""
    documents: int = 0
    bytes: int = 0
    missing: list[str] = field(default_factory=list)
    """Chunks of other units that are not there yet."""
    stale: list[str] = field(default_factory=list)
    """Chunks of other units whose inputs have changed since."""
    waiting_for: list[int] = field(default_factory=list)
    """The units that make these."""
    manifest: str | None = None
    """Written once every chunk is complete, by whichever unit sees that first."""


@written_to("--output", AGAIN)
def extract(
    sources: Sequence[str], output: Path, *, chunks: int, unit: int = 0, units: int = 1, jobs: int = 1
) -> ExtractResult:
    """Makes the chunks c with c % units == unit that are not there yet. DataError names every input that is damaged."""
    plan = plan_chunks(sources, output, chunks=chunks)
    with writing(output):
        output.mkdir(parents=True, exist_ok=True)
    _refuse_other_files(output, chunks)
    mine = plan[unit::units]
    todo = [chunk for chunk in mine if _record(chunk) is None]
    if todo:
        with writing(output / MANIFEST):
            (output / MANIFEST).unlink(missing_ok=True)  # it lists chunks that are not there
    _make(todo, jobs)
    records = {chunk: _record(chunk) for chunk in plan}  # other units may have finished theirs meanwhile
    complete = [record for record in records.values() if record is not None]
    result = ExtractResult(chunks, len(todo), len(mine) - len(todo))
    result.input_files = sum(len(record["inputs"]) for record in complete)
    result.documents = sum(record["documents"] for record in complete)
    result.bytes = sum(record["bytes"] for record in complete)
    for number, chunk in enumerate(plan):
        if records[chunk] is None:
            (result.stale if chunk.path.exists() else result.missing).append(chunk.path.name)
            result.waiting_for = sorted({*result.waiting_for, number % units})
    if len(complete) == chunks:
        result.manifest = str(output / MANIFEST)
        inputs = [each for record in complete for each in record["inputs"]]
        counts = {"documents": result.documents, "bytes": result.bytes, "input_files": result.input_files}
        counts["input_documents"] = sum(each["documents"] for each in inputs)
        content = {"format_version": 1, **counts, "chunks": complete}
        write_atomically(output / MANIFEST, json.dumps(content, indent=1) + "\n")
    return result


def plan_chunks(sources: Sequence[str], output: Path, *, chunks: int) -> list[Chunk]:
    """Chunk k holds the files [k * n // chunks, (k + 1) * n // chunks) of the inputs in natural order."""
    paths = [output / f"chunk-{k:05d}-of-{chunks:05d}.jsonl" for k in range(chunks)]
    ours = {os.path.realpath(path) for path in paths}  # chunks are never made of chunks
    inputs = [file for file in find_files(sources) if file.kind == "jsonl" and os.path.realpath(file.path) not in ours]
    inputs.sort(key=lambda file: (natural_key(file.path), file.path))
    if empty := [file.path for file in inputs if not file.size]:
        raise DataError([Problem("is empty (0 bytes)", "", _DAMAGED, path) for path in empty])
    if len(inputs) < chunks:
        what = f"{len(inputs)} input files cannot fill {chunks} chunks"
        rule = f"inputs end in {', '.join(LINES)}, plain or with .gz or .zst, and a file goes whole into one chunk"
        raise DataError(Problem(what, rule, f"use --chunks {len(inputs)} or less" if inputs else "correct the sources"))
    bounds = [k * len(inputs) // chunks for k in range(chunks + 1)]
    return [Chunk(path, tuple(inputs[bounds[k] : bounds[k + 1]])) for k, path in enumerate(paths)]


def natural_key(text: str) -> list[tuple[int, int, str]]:
    """Sorts shard9 before shard10."""
    return [(0, int(part), part) if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", text) if part]


def _refuse_other_files(output: Path, chunks: int) -> None:
    names = {path.name for path in output.glob("chunk-*-of-*.jsonl") if f"-of-{chunks:05d}." not in path.name}
    try:
        is_ours = not (output / MANIFEST).exists() or "chunks" in read_json(output / MANIFEST, LARGE_BYTES)
    except (OSError, ValueError):
        is_ours = False
    if names or not is_ours:
        what = f"holds {min(names, default=MANIFEST)}, which is not of this extraction"
        raise DataError(Problem(what, "one folder, one extraction", "choose another --output", str(output)))


def _make(todo: list[Chunk], jobs: int) -> None:
    """In threads: decompression, hashing and the disk do not hold Python's lock. StorageError ends all at once."""
    problems: list[Problem] = []
    stop = threading.Event()
    with ThreadPoolExecutor(jobs) as pool:
        try:
            for done in as_completed([pool.submit(make_chunk, chunk, stop) for chunk in todo]):
                if isinstance(error := done.exception(), DataError):
                    problems += error.problems
                elif error is not None:
                    raise error
        except BaseException:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    if problems:
        raise DataError(problems)


def make_chunk(chunk: Chunk, stop: threading.Event) -> None:
    """Writes the chunk and its record. The chunk has its name only when it is whole, its record comes last."""
    partial = chunk.path.with_name(f".{chunk.path.name}.partial-{secrets.token_hex(4)}")
    hasher, size, inputs = sha256(), 0, list[dict[str, Any]]()
    with writing(chunk.path):
        for stale in (chunk.record_path, *partial.parent.glob(f".{chunk.path.name}.partial-*")):
            stale.unlink(missing_ok=True)  # of a process that was killed
        file = open(partial, "xb", buffering=0)  # noqa: SIM115 - closed below
    try:
        with file:
            for source in chunk.inputs:
                for lines in _lines(source, inputs):
                    with writing(chunk.path):
                        write_all(file.fileno(), lines)
                    hasher.update(lines)
                    size += len(lines)
                    if stop.is_set():
                        return
        with writing(chunk.path):
            publish(partial, chunk.path)
    finally:
        partial.unlink(missing_ok=True)  # gives the space back to a full disk
    documents = sum(each["documents"] for each in inputs)
    facts = {"file": chunk.path.name, "documents": documents, "bytes": size, "sha256": hasher.hexdigest()}
    write_atomically(chunk.record_path, json.dumps({"facts": {**facts, "inputs": inputs}, "of": chunk.stamps()}) + "\n")


def _record(chunk: Chunk) -> dict[str, Any] | None:
    """Facts for the manifest of a chunk that is complete and made of the inputs as they are now."""
    try:
        record = read_json(chunk.record_path)
        return dict(record["facts"]) if record["of"] == chunk.stamps() else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _lines(source: InputFile, inputs: list[dict[str, Any]]) -> Iterator[bytes]:
    """Blocks of whole lines, each line with its newline, without blank ones and byte order mark; what the file held is
    appended to `inputs` at its end. DataError where it is cut off or damaged."""
    hasher, documents, text_bytes, blank = sha256(), 0, 0, 0
    try:
        with open_input(source) as raw:
            file = HashedFile(raw, hasher)
            blocks = bounded_lines(unpacked(file, source.compression), lambda line: f"{source.path}:{line}")
            for block in _whole_lines(blocks):
                lines = block.removeprefix(codecs.BOM_UTF8 if not text_bytes else b"").split(b"\n")
                kept = [line for line in lines if line and not line.isspace()]
                if not block.endswith(b"\n") and kept and not kept[-1].rstrip().endswith(b"}"):
                    raise EOFError("its last line has neither newline nor closing brace")
                text_bytes, documents = text_bytes + len(block), documents + len(kept)
                blank += len(lines) - len(kept) - block.endswith(b"\n")
                yield b"".join(line + b"\n" for line in kept)
            if file.bytes != source.size:
                raise EOFError(f"it had {source.size} bytes and now {file.bytes}: it is being written")
    except BloomeryError:
        raise
    except Exception as error:  # files, decompressors and stores each have their own kinds
        raise DataError(Problem(f"is cut off or damaged: {error}", "", _DAMAGED, source.path)) from error
    facts = {"path": source.path, "bytes": source.size, "sha256": hasher.hexdigest(), "documents": documents}
    inputs.append({**facts, "text_bytes": text_bytes, "blank_lines": blank})


def _whole_lines(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """The same bytes in blocks that end with a newline; the last one may lack it."""
    begun: list[bytes] = []
    for block in blocks:
        head, newline, tail = block.rpartition(b"\n")
        if newline:
            yield b"".join((*begun, head, newline))
            begun = []
        begun.append(tail)
    if last := b"".join(begun):
        yield last
