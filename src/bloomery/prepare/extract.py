"""`bloomery extract`: many .jsonl files, compressed or not, to N plain ones; no line is lost, cut or joined."""

import codecs
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from threading import Event
from typing import Any

from bloomery.base.bounded import LARGE_BYTES, read_json
from bloomery.base.doing import doing
from bloomery.base.errors import DataError, Problem, mask
from bloomery.base.storage import locked, make_folder, publish, write_all, write_atomically, writing, written_to
from bloomery.prepare.download import AGAIN
from bloomery.prepare.pool import thread_pool
from bloomery.prepare.read import Span, content, open_span, whole_lines
from bloomery.prepare.sources import LINES, InputFile, find_files, natural_order

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
        inputs = [[mask(file.name), file.size, file.stamp] for file in self.inputs]
        return [*inputs, ["", now.st_size, str(now.st_mtime_ns)]]

    def record(self) -> dict[str, Any] | None:
        """Facts for the manifest, if the chunk is complete and made of the inputs as they are now."""
        try:
            record = read_json(self.record_path, LARGE_BYTES)
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
    manifest: str | None
    """None for a share, which writes none."""


@written_to("--output", AGAIN)
def extract(
    sources: Sequence[str], output: Path, *, chunks: int, jobs: int = 1, share: tuple[int, int] | None = None
) -> ExtractResult:
    """Makes the chunks that are not there yet. DataError names every input that is damaged; StorageError ends all.

    `share`: (k, n) for the chunks k, k + n, k + 2n, ..., as one of several processes or machines."""
    plan, path = plan_chunks(sources, output, chunks=chunks), output / MANIFEST
    plan = plan[share[0] :: share[1]] if share else plan
    make_folder(output)
    with locked(output, share):
        todo = [chunk for chunk in plan if chunk.record() is None]
        if todo:
            with writing(path):
                path.unlink(missing_ok=True)  # it is there only when every chunk is
            _make_chunks(todo, jobs)
        records = [chunk.record() or {} for chunk in plan]
        inputs = [each for record in records for each in record["inputs"]]
        documents, size = (sum(record[name] for record in records) for name in ("documents", "bytes"))
        counts = {"documents": documents, "bytes": size, "input_files": len(inputs), "input_documents": documents}
        if not share:
            write_atomically(path, json.dumps({"format_version": 1, **counts, "chunks": records}, indent=1) + "\n")
    made, there = len(todo), len(plan) - len(todo)
    return ExtractResult(len(plan), made, there, len(inputs), documents, size, None if share else str(path))


def _make_chunks(todo: Sequence[Chunk], jobs: int) -> None:
    problems = list[Problem]()
    with (
        doing("extracting") as work,
        thread_pool(jobs) as (pool, stop),
    ):  # unpacking, hashing and the disk release Python's lock
        for done in work.over(as_completed([pool.submit(make_chunk, chunk, stop) for chunk in todo]), len(todo)):
            try:
                done.result()
            except DataError as error:
                problems += error.problems
    if problems:
        raise DataError(problems)


def plan_chunks(sources: Sequence[str], output: Path, *, chunks: int) -> list[Chunk]:
    """Chunk k holds the files [k * n // chunks, (k + 1) * n // chunks) of the inputs in natural order."""
    paths = [output / f"chunk-{k:05d}-of-{chunks:05d}.jsonl" for k in range(chunks)]
    others = {path.name for path in output.glob("chunk-*-of-*.jsonl")} - {path.name for path in paths}
    if os.path.lexists(output / MANIFEST) and not any(path.exists() for path in paths):
        others.add(MANIFEST)
    if others:
        what = f"holds {min(others)}, which is not of this extraction"
        raise DataError(Problem(what, "one folder, one extraction", "choose another --output", str(output)))
    ours = {os.path.realpath(path) for path in paths}  # chunks are never made of chunks
    inputs = [file for file in find_files(sources) if file.kind == "jsonl" and file.real not in ours]
    inputs.sort(key=lambda file: natural_order(file.path))
    if len(inputs) < chunks:
        what = f"{len(inputs)} input files cannot fill {chunks} chunks"
        rule = f"inputs end in {', '.join(LINES)}, plain or with .gz or .zst, and each file goes into one chunk"
        raise DataError(Problem(what, rule, f"use --chunks {len(inputs)} or less" if inputs else "correct the sources"))
    n = len(inputs)
    return [Chunk(path, tuple(inputs[k * n // chunks : (k + 1) * n // chunks])) for k, path in enumerate(paths)]


def make_chunk(chunk: Chunk, stop: Event) -> None:
    """Writes the chunk and its record. The chunk has its name only when it is whole, its record comes last."""
    partial = chunk.path.with_name(f".{chunk.path.name}.partial")
    hasher, inputs = sha256(), list[dict[str, Any]]()
    with writing(chunk.path):
        chunk.record_path.unlink(missing_ok=True)
        partial.unlink(missing_ok=True)  # of a process that was killed
    try:
        with writing(chunk.path), open(partial, "xb", buffering=0) as file:
            for lines in (lines for source in chunk.inputs for lines in _lines(source, inputs)):
                write_all(file.fileno(), lines)
                hasher.update(lines)
                if stop.is_set():
                    return
            publish(partial, chunk.path)
    finally:
        partial.unlink(missing_ok=True)  # gives the space back to a full disk
    counts = {"documents": sum(each["documents"] for each in inputs), "bytes": chunk.path.stat().st_size}
    facts = {"file": chunk.path.name, **counts, "sha256": hasher.hexdigest()}
    write_atomically(chunk.record_path, json.dumps({"facts": {**facts, "inputs": inputs}, "of": chunk.stamps()}) + "\n")


def _lines(source: InputFile, inputs: list[dict[str, Any]]) -> Iterator[bytes]:
    """Blocks of whole lines, each line with its newline, without blank ones and byte order mark; what the file held is
    appended to `inputs` at its end. DataError where it is truncated or damaged."""
    documents = 0
    with open_span(Span(source, 0, source.size), sha256) as stored:
        for number, block in enumerate(whole_lines(content(stored, source.compression), source)):
            lines = block.removeprefix(b"" if number else codecs.BOM_UTF8).split(b"\n")
            kept = [line for line in lines if line and not line.isspace()]
            if not block.endswith(b"\n") and kept and not kept[-1].rstrip().endswith(b"}"):
                raise EOFError("its last line has neither newline nor closing brace")
            documents += len(kept)
            yield b"".join(line + b"\n" for line in kept)
        if not source.size:
            raise EOFError("it is empty")
    digest = stored.hasher.hexdigest()
    inputs.append({"path": mask(source.name), "bytes": source.size, "sha256": digest, "documents": documents})
