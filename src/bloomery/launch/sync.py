"""Carry what a run makes to another place: new and changed files only, safely beside a training that writes them.

A checkpoint goes once its manifest is there, and its manifest goes last. One that retention deletes meanwhile, by one
rename of the whole, is passed over. A record of what has arrived lies in the run folder; a lock on it keeps two syncs
apart.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from bloomery.base.bounded import parse_json, read_text
from bloomery.base.errors import DataError, Problem, RecipeError, first_line, mask
from bloomery.base.storage import locked, own_folder, write_atomically

PATTERNS = {
    "checkpoints": ["checkpoints/*"],
    "tensorboard": ["tensorboard/*"],
    "codecarbon": ["codecarbon/*"],
    "logs": ["logs/*", "metrics*.jsonl", "events.jsonl", "recipe.yaml", "report.html"],
}
"""What goes to which of the four repositories of a BigScience training; a target named `{part}` has one for each."""
_MANIFEST, _LATEST = "manifest.json", "checkpoints/latest"
_TRIES = 4
_FIRST_PAUSE_SECONDS = 1.0
_BATCH_BYTES, _BATCH_FILES = 2**30, 1000
"""Of what goes at once: a commit at the Hub. What has arrived with it does not go again."""
_LFS_FROM_BYTES = 2**20
Sizes = dict[str, tuple[int, int]]
"""File of the run -> (bytes, time of its last change)."""


def sync(run: Path, target: str, patterns: Sequence[str]) -> list[str]:
    """Bring the target up to date; the files that went there. DataError when it refuses."""
    if mask(target) != target:
        rule = "it would stand in logs and in the list of processes"
        raise RecipeError(Problem(f"the target {mask(target)} has a secret in it", rule, "use a credential helper"))
    if "://" not in target.removeprefix("file://") and not target.startswith("git+"):
        target = str(_folder(run, target.removeprefix("file://")))
    own_folder(run / "launch", may_be_linked=True)
    note = run / "launch" / f"sync-{hashlib.sha256(target.encode()).hexdigest()[:12]}.json"
    with locked(own_folder(note.with_suffix(".lock"))):
        arrived: dict[str, Any] = {}
        with suppress(OSError, ValueError):  # without a record that can be read, everything goes again
            arrived = dict(parse_json(read_text(note)))
        wanted = {file: facts for file, facts in _files(run, patterns).items() if arrived.get(file) != list(facts)}
        sent = []
        for batch in _batches(wanted):
            sent += (files := _send(run, target, batch))
            arrived |= {file: list(wanted[file]) for file in files}
            write_atomically(note, json.dumps(arrived))
    return sent


def _folder(run: Path, target: str) -> Path:
    """Absolute, so that what has arrived there is not taken for what has arrived elsewhere."""
    there = Path(target).absolute()
    if not target or there.resolve().is_relative_to(run.resolve()):
        rule = "a copy would take the place of what a training writes"
        raise RecipeError(Problem(f"the target {target!r} is no place outside of the run", rule, "name another folder"))
    return there


def _files(run: Path, patterns: Sequence[str]) -> Sizes:
    """Those that are whole, in the order in which they may go: a manifest after what it names. Links stay."""
    found: Sizes = {}
    checkpoints = run / "checkpoints"  # may be a link to another disk
    for folder, folders, names in chain(os.walk(run), os.walk(checkpoints) if checkpoints.is_symlink() else ()):
        inside = Path(folder).relative_to(run)
        folders[:] = [name for name in sorted(folders) if not name.startswith(".") and name != "launch"]
        if inside.parts[:1] == ("checkpoints",) and len(inside.parts) == 2 and _MANIFEST not in names:
            folders[:], names = [], []
        for name in sorted(names, key=lambda name: (name == _MANIFEST, name)):
            file = str(inside / name)
            if name.startswith("."):  # of the writer, and temporary ones
                continue
            if any(fnmatch.fnmatch(file, pattern) for pattern in patterns) and not (run / file).is_symlink():
                with suppress(FileNotFoundError):
                    facts = (run / file).stat()
                    found[file] = (facts.st_size, facts.st_mtime_ns)
    return dict(sorted(found.items(), key=lambda item: item[0] == _LATEST))  # it names what must be there before


def _batches(files: Sizes) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for file, (length, _) in files.items():
        batch.append(file)
        size += length
        if size >= _BATCH_BYTES or len(batch) == _BATCH_FILES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _send(run: Path, target: str, files: list[str]) -> list[str]:
    """Those that have arrived: all that are still there."""
    attempt, git = 0, target.startswith("git+")
    send = _to_hub if target.startswith("hf://") else _to_git if git else _to_store
    while files:
        try:
            send(run, target, files)
            break
        except ImportError as error:
            what = f"{target} needs a package that is not installed: {first_line(error)}"
            raise DataError(Problem(what, remedy="`bloomery doctor` says how to install it")) from error
        except Exception as error:  # of any of five libraries
            before, files = files, [file for file in files if (run / file).exists()]
            if files != before:
                continue
            attempt += 1
            if attempt == _TRIES or isinstance(error, ValueError):  # of the address: it stays wrong
                what = f"{target} takes no files: {type(error).__name__}: {str(error)[:300]}"
                raise DataError(Problem(what, "what has arrived stays", "run the command again")) from error
            time.sleep(_FIRST_PAUSE_SECONDS * 2 ** (attempt - 1))
    return files


def _to_store(run: Path, target: str, files: Sequence[str]) -> None:
    """Any store that fsspec knows, and folders: there, each file appears whole."""
    import fsspec  # type: ignore[import-untyped]

    store, root = fsspec.core.url_to_fs(target) if "://" in target else (None, target)
    for file in files:
        with _snapshot(run / file) as path:
            goal = f"{root.rstrip('/')}/{file}"
            if store is None:
                os.makedirs(os.path.dirname(goal), exist_ok=True)
                shutil.copyfile(path, f"{goal}.partial")
                os.replace(f"{goal}.partial", goal)
            else:
                store.put_file(path, goal)


def _to_hub(run: Path, target: str, files: Sequence[str]) -> None:
    """`hf://organisation/name`, created if needed. The token is that of `huggingface-cli login`, or HF_TOKEN."""
    from huggingface_hub import CommitOperationAdd, HfApi

    api, repository = HfApi(), target.removeprefix("hf://").rstrip("/")
    api.create_repo(repository, private=True, exist_ok=True)
    with ExitStack() as opened:
        adds = [CommitOperationAdd(file, opened.enter_context(_snapshot(run / file))) for file in files]
        api.create_commit(repository, adds, commit_message=f"{len(files)} files of {run.name}")


def _to_git(run: Path, target: str, files: Sequence[str]) -> None:
    """`git+URL`; what is large goes through LFS, whose `.gitattributes` is there before the first push."""
    quiet = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "GIT_LFS_SKIP_SMUDGE": "1"}  # no question, no download of all
    with tempfile.TemporaryDirectory() as folder:

        def git(*words: str) -> str:
            done = subprocess.run(
                ["git", "-C", folder, *words], capture_output=True, text=True, timeout=3600, env=quiet
            )
            if done.returncode:
                raise OSError(f"git {words[0]}: {' '.join(done.stderr.split())}")
            return done.stdout

        git("clone", "--quiet", "--depth=1", "--", target.removeprefix("git+"), ".")
        git("lfs", "install", "--local", "--skip-smudge")
        large = [file for file in files if (run / file).stat().st_size >= _LFS_FROM_BYTES]
        if patterns := sorted({f"*{Path(file).suffix}" if Path(file).suffix else file for file in large}):
            git("lfs", "track", *patterns)
        for file in files:
            (Path(folder) / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(run / file, Path(folder) / file)
        git("add", "--all", "--force")
        if git("status", "--porcelain"):
            who = ("-c", "user.name=bloomery", "-c", "user.email=bloomery@localhost")
            git(*who, "commit", "--quiet", "--message", f"{len(files)} files of {run.name}")
            git("push", "--quiet", "origin", "HEAD")


@contextmanager
def _snapshot(path: Path) -> Iterator[str]:
    """A copy that does not grow while it travels; a checkpoint's files are final."""
    if path.suffix in (".jsonl", ".txt", ".log") or "tfevents" in path.name:
        with tempfile.TemporaryDirectory() as folder:  # no open file: a batch has a thousand of them
            yield shutil.copy(path, folder)
    else:
        yield str(path)


def targets(target: str, include: Sequence[str]) -> Mapping[str, Sequence[str]]:
    """Target -> patterns: all in one, or one for each part of a training."""
    if "{part}" in target:
        return {target.replace("{part}", part): patterns for part, patterns in PATTERNS.items()}
    return {target: include or [pattern for patterns in PATTERNS.values() for pattern in patterns]}
