"""`bloomery extract`: many .jsonl files, compressed or not, to N plain ones; no line is lost, cut or fused."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from bloomery.base import signals
from bloomery.base.bounded import LARGE_BYTES, read_json
from bloomery.base.errors import BloomeryError, DataError, Problem, StorageError
from bloomery.base.storage import open_plain, publish, write_atomically, writing, written_to
from bloomery.prepare.jsonl_lines import InputCount, copy_lines
from bloomery.prepare.output import AGAIN, file_hashes, held_alone
from bloomery.prepare.sources import LINES, OutputGuard, find_local, kind_of, packing_problem

MANIFEST = "manifest.json"
FORMAT_VERSION = 1
_ENDINGS = f"{', '.join(LINES)}, plain or with .gz or .zst"


@dataclass(frozen=True)
class Chunk:
    """One output file and the inputs that go into it, whole and in order."""

    path: Path
    inputs: tuple[str, ...]

    @property
    def record_path(self) -> Path:
        """What is known of a finished chunk; hidden, so that no glob takes it for data."""
        return self.path.with_name(f".{self.path.stem}.json")


@dataclass(frozen=True)
class ChunkRecord:
    file: str
    documents: int
    bytes: int
    sha256: str
    mtime_ns: int
    inputs: list[InputCount]


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
    """Chunks of other units that are there, but not made of the inputs as they are now."""
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
    _refuse_a_mixture(output, chunks)
    mine = [chunk for number, chunk in enumerate(plan) if number % units == unit]
    records = {chunk: _valid_record(chunk) for chunk in plan}
    missing = [chunk for chunk in mine if records[chunk] is None]
    problems: list[Problem] = []
    result = ExtractResult(chunks, already_there=len(mine) - len(missing))
    if missing:
        with writing(output / MANIFEST):
            (output / MANIFEST).unlink(missing_ok=True)  # it speaks of chunks that are not there
    for chunk, answer in _make(missing, jobs=jobs):
        if isinstance(answer, ChunkRecord):
            records[chunk] = answer
            result.written += 1
        else:
            problems += answer
    if problems:
        raise DataError(problems)
    for chunk in plan:  # other units may have finished theirs meanwhile
        records[chunk] = records[chunk] or _valid_record(chunk)
    complete = [record for record in records.values() if record is not None]
    result.input_files = sum(len(record.inputs) for record in complete)
    result.documents = sum(record.documents for record in complete)
    result.bytes = sum(record.bytes for record in complete)
    others = [number for number, chunk in enumerate(plan) if records[chunk] is None]
    for path in (plan[number].path for number in others):
        (result.stale if path.exists() else result.missing).append(path.name)
    result.waiting_for = sorted({number % units for number in others})
    if len(complete) == chunks:
        result.manifest = str(output / MANIFEST)
        write_atomically(output / MANIFEST, _manifest(complete))
    return result


def plan_chunks(sources: Sequence[str], output: Path, *, chunks: int) -> list[Chunk]:
    """Chunk k holds the files [k * n // chunks, (k + 1) * n // chunks) of the inputs in natural order."""
    names = [f"chunk-{k:05d}-of-{chunks:05d}.jsonl" for k in range(chunks)]
    inputs = _inputs(sources, OutputGuard(chunks=[os.path.join(output, name) for name in names]))
    if len(inputs) < chunks:
        what = f"{len(inputs)} input files cannot fill {chunks} chunks"
        raise DataError(Problem(what, "a file goes whole into one chunk", f"use --chunks {len(inputs)} or less"))
    return [
        Chunk(output / name, tuple(inputs[k * len(inputs) // chunks : (k + 1) * len(inputs) // chunks]))
        for k, name in enumerate(names)
    ]


def natural_key(text: str) -> list[tuple[int, int, str]]:
    """Sorts shard9 before shard10."""
    return [(0, int(part), part) if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", text) if part]


def _inputs(sources: Sequence[str], guard: OutputGuard) -> list[str]:
    found: dict[str, str] = {}
    problems = []
    for source in sources:
        try:
            files = find_local(source, wanted=lambda name: _is_lines(name) or bool(packing_problem(name)), guard=guard)
        except DataError as error:
            problems += error.problems
            continue
        if not files:
            rule = f"a source is a file, a folder or a glob of {_ENDINGS}"
            problems.append(Problem("matches no file", rule, "correct the path", source))
        for path in (file.path for file in files if not _is_lines(file.path)):
            no_lines = Problem("is no .jsonl file", f"a source ends in {_ENDINGS}", "leave it out", path)
            problems += packing_problem(path) or [no_lines]
        for file in files:
            found.setdefault(file.real, file.path)  # globs may overlap
    if problems:
        raise DataError(problems)
    return sorted(found.values(), key=lambda path: (natural_key(path), path))


def _is_lines(path: str) -> bool:
    return kind_of(path) == "jsonl"


def _refuse_a_mixture(output: Path, chunks: int) -> None:
    ending = f"-of-{chunks:05d}.jsonl"
    if strange := sorted(path.name for path in output.glob("chunk-*-of-*.jsonl") if not path.name.endswith(ending)):
        what = f"holds {len(strange)} chunk(s) of another extraction, such as {strange[0]}"
        remedy = "remove them or choose another --output"
        raise DataError(Problem(what, "one folder, one extraction", remedy, str(output)))
    manifest = output / MANIFEST
    if manifest.exists():
        try:
            is_ours = "chunks" in read_json(manifest, LARGE_BYTES)
        except (OSError, ValueError):
            is_ours = False
        if not is_ours:
            rule = "extract writes a file of that name"
            raise DataError(Problem("is not from `bloomery extract`", rule, "choose another --output", str(manifest)))


def _make(missing: list[Chunk], *, jobs: int) -> Iterator[tuple[Chunk, ChunkRecord | list[Problem]]]:
    """The record of each chunk, or what is wrong with its inputs. StorageError ends everything at once."""
    if jobs <= 1 or len(missing) <= 1:
        for chunk in missing:
            yield chunk, _judged(_answer(chunk))
        return
    with ProcessPoolExecutor(min(jobs, len(missing)), mp_context=get_context("spawn"), initializer=_be_worker) as pool:
        futures = {pool.submit(_answer, chunk): chunk for chunk in missing}
        try:
            for future in as_completed(futures):
                yield futures[future], _judged(future.result())
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _be_worker() -> None:
    signals.ignore()  # they may reach the whole group; the parent ends its workers
    signals.end_with_parent(signal.SIGKILL)


def _answer(chunk: Chunk) -> ChunkRecord | tuple[type[BloomeryError], list[Problem]]:
    """As a value, because our errors do not survive the way between processes."""
    try:
        return make_chunk(chunk)
    except BloomeryError as error:
        return type(error), error.problems


def _judged(answer: ChunkRecord | tuple[type[BloomeryError], list[Problem]]) -> ChunkRecord | list[Problem]:
    if isinstance(answer, ChunkRecord):
        return answer
    kind, problems = answer
    if issubclass(kind, StorageError):
        raise StorageError(problems)
    return problems


def make_chunk(chunk: Chunk) -> ChunkRecord:
    """Writes the chunk and its record. The chunk has its name only when it is whole, its record comes last."""
    partial = chunk.path.with_name(f".{chunk.path.name}.partial")
    hasher, size, documents = sha256(), 0, 0
    counts: list[InputCount] = []
    with writing(chunk.path):
        chunk.record_path.unlink(missing_ok=True)
        file = open(partial, "ab", buffering=0, opener=open_plain)  # noqa: SIM115 - closed below
    with file, held_alone(file, partial):
        try:
            with writing(chunk.path):
                file.truncate(0)
            for path in chunk.inputs:
                for lines in copy_lines(path, counts):
                    with writing(chunk.path):
                        file.write(lines)
                    hasher.update(lines)
                    size, documents = size + len(lines), documents + lines.count(b"\n")
            with writing(chunk.path):
                file.flush()
                publish(partial, chunk.path)
        except BaseException:
            partial.unlink(missing_ok=True)  # gives the space back to a full disk
            raise
    assert documents == sum(count.documents for count in counts), "a document was lost or invented"
    mtime_ns = chunk.path.stat().st_mtime_ns
    record = ChunkRecord(chunk.path.name, documents, size, hasher.hexdigest(), mtime_ns, counts)
    write_atomically(chunk.record_path, json.dumps(asdict(record)) + "\n")
    return record


def _valid_record(chunk: Chunk) -> ChunkRecord | None:
    """The record of a chunk that is there, whole, and made of the inputs as they are now."""
    try:
        facts = read_json(chunk.record_path)
        record = ChunkRecord(**{**facts, "inputs": [InputCount(**count) for count in facts["inputs"]]})
        if [count.path for count in record.inputs] != list(chunk.inputs):
            return None
        same = _is_same(chunk.path, record.bytes, record.mtime_ns, record.sha256) and all(
            _is_same(Path(count.path), count.bytes, count.mtime_ns, count.sha256) for count in record.inputs
        )
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return record if same else None


def _is_same(path: Path, size: int, mtime_ns: int, expected_sha256: str) -> bool:
    """By size and time of change; where only the time differs, by content."""
    facts = path.stat()
    if facts.st_size != size:
        return False
    return facts.st_mtime_ns == mtime_ns or file_hashes(path, {"sha256"})["sha256"] == expected_sha256


def _manifest(records: list[ChunkRecord]) -> str:
    """The same bytes however often and by however many units the chunks were made: no times in it."""

    def timeless(record: Any) -> dict[str, Any]:
        return {name: value for name, value in asdict(record).items() if name != "mtime_ns"}

    content = {
        "format_version": FORMAT_VERSION,
        "documents": sum(record.documents for record in records),
        "bytes": sum(record.bytes for record in records),
        "input_files": sum(len(record.inputs) for record in records),
        "input_documents": sum(count.documents for record in records for count in record.inputs),
        "chunks": [{**timeless(record), "inputs": [timeless(count) for count in record.inputs]} for record in records],
    }
    return json.dumps(content, indent=1) + "\n"
