"""The folder of a run's checkpoints: names, which are complete, `latest`, and moving them aside.

checkpoints/step-00000100/   tensors-*.safetensors, index.json, state.json, recipe.yaml, and manifest.json, written last
checkpoints/latest           the name of a complete checkpoint
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bloomery.base.bounded import LARGE_BYTES, read_json, read_small
from bloomery.base.errors import DataError, Problem, StorageError
from bloomery.base.storage import (
    make_folder,
    open_plain,
    opened_folder,
    own_folder,
    storage_error,
    sweep_folder,
    write_atomically,
)
from bloomery.checkpoint.manifest import ANOTHER, MANIFEST, STATE, parse_manifest

CHECKPOINTS, LOCAL_CHECKPOINTS = "checkpoints", "checkpoints-local"
"""Where a run lists its checkpoints, and the node-local ones."""
LATEST = "latest"
RETIRED, DEBRIS = "retired", "debris"
"""Folders of checkpoints whose branch of the run was abandoned, and of what killed saves have left."""
LINK = "it is a link to another place, which no save makes"
_LONGEST_NAME = 255
_NAME = re.compile(r"^step-(\d{8,})$")


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def is_step_name(name: str) -> bool:
    return _NAME.match(name) is not None


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def complete_checkpoints(root: Path) -> list[Path]:
    """Folders with a manifest, oldest first."""
    return [path for path in step_folders(root) if (path / MANIFEST).is_file() and not path.is_symlink()]


def step_folders(root: Path) -> list[Path]:
    """All that have the name of a checkpoint, oldest first. Neither saves nor deletions leave one without a manifest:
    such a folder has lost it."""
    if not root.is_dir():
        return []
    return sorted((path for path in root.iterdir() if _NAME.match(path.name) and path.is_dir()), key=step_of)


def read_manifest(folder: Path) -> dict[str, Any]:
    """DataError if it is missing, damaged, of another format or of another step."""
    try:
        manifest = parse_manifest(read_small(folder / MANIFEST, LARGE_BYTES))
        text = f"its manifest is of step {manifest['step']}: the folder was copied or renamed"
        if not is_step_name(folder.name) or manifest["step"] == step_of(folder):
            return manifest
    except FileNotFoundError:
        text = f"{MANIFEST} is missing"
    except (OSError, ValueError) as error:
        text = f"{MANIFEST} cannot be used: {error}"
    raise DataError(Problem(text, "", ANOTHER, str(folder)))


def read_latest(root: Path) -> str | None:
    """What `latest` says; None if there is no such file."""
    try:
        with open(root / LATEST, errors="replace", opener=open_plain) as file:
            return file.read(_LONGEST_NAME).strip("\0 \n")
    except OSError:
        return None


def find_checkpoint(path: Path) -> Path:
    """A step folder itself; of a `checkpoints` or run folder the newest complete one, which may be a node-local one if
    all of its files are on this machine. DataError if there is none."""
    if (path / MANIFEST).is_file() and (path / STATE).is_file():
        return path
    local = [each for each in complete_checkpoints(path / LOCAL_CHECKPOINTS) if all(p.exists() for p in each.iterdir())]
    found = [*local, *(complete_checkpoints(path) or complete_checkpoints(path / CHECKPOINTS))]
    if not found:
        rule = "a checkpoint is a folder with a manifest.json, or a run folder that has one"
        raise DataError(Problem(f"there is no complete checkpoint at {path}", rule, "name another folder"))
    return sorted(found, key=step_of)[-1]  # stable: of one step not the local one


def name_of(wanted: str) -> str:
    """`step-00000100` for what a user calls `100`."""
    return step_name(int(wanted)) if wanted.isascii() and wanted.isdecimal() else wanted


def checkpoint_named(roots: Sequence[Path], name: str) -> Path:
    """The complete checkpoint `step-00000100` or `100`, in the first root that has it. DataError lists those there
    are."""
    wanted = name_of(name)
    complete = [path for root in roots for path in complete_checkpoints(root)]
    for path in complete:
        if path.name == wanted or ("/" in wanted and path.resolve() == Path(wanted).resolve()):
            return path
    have = ", ".join(path.name for path in complete) or "none"
    place = ", ".join(map(str, roots))
    raise DataError(Problem(f"there is no complete checkpoint {wanted}", f"there are: {have}", "name one", place))


@dataclass(frozen=True)
class Tidied:
    """What `tidy` has done, by the names of folders."""

    quarantined: dict[Path, str]
    """The new names of damaged checkpoints."""
    retired: list[str]
    debris: list[str]
    latest_said: str | None
    """If `latest` had to be changed: what it said, empty if it was not there."""


def tidy(root: Path, *, step: int, damaged: Iterable[Path] = (), keep_debris: bool = False) -> Tidied:
    """Prepare a folder of checkpoints for a run that resumes from `step`: only for the holder of its write lease.

    Damaged ones get a name that nothing resumes from, those of an abandoned branch are retired, debris is swept. Before
    any of them moves, `latest` names one that stays.
    """
    doomed = [path for path in damaged if path.parent == root]
    complete = [path for path in complete_checkpoints(root) if path not in doomed]
    later = [path for path in complete if step_of(path) > step]
    said, wanted = read_latest(root), next((path.name for path in reversed(complete) if path not in later), None)
    if wanted is not None and said != wanted:
        write_atomically(root / LATEST, wanted + "\n")
    elif wanted is None:
        (root / LATEST).unlink(missing_ok=True)
    quarantined = {path: quarantine(path).name for path in doomed}
    for path in later:
        path.rename(_free_name(own_folder(root / RETIRED) / path.name))
    real, debris = root.resolve(), list[str]()
    for place in (real, *real.glob(f"{STALE}*")):
        with contextlib.suppress(NotADirectoryError), opened_folder(place) as source:  # not through a link
            found = [name for name in os.listdir(source) if name.startswith(".step-")]
            debris += found
            for name in found if keep_debris else ():
                with opened_folder(own_folder(real / DEBRIS)) as kept:
                    free = _free_name(real / DEBRIS / name).name
                    os.rename(name, free, src_dir_fd=source, dst_dir_fd=kept)
    # Of saves, older starts, files that were being replaced or tried out.
    sweep_folder(real, lambda name: name.startswith((".step-", STALE, ".tmp-", ".probe-")))
    return Tidied(quarantined, [path.name for path in later], sorted(debris), (said or "") if said != wanted else None)


def quarantine(folder: Path) -> Path:
    """Give a damaged checkpoint a name that nothing resumes from; the new path."""
    place = _free_name(folder.with_name(f"damaged-{folder.name}"))
    folder.rename(place)
    return place


def _free_name(wanted: Path) -> Path:
    place, number = wanted, 1
    while os.path.lexists(place):
        number += 1
        place = wanted.with_name(f"{wanted.name}.{number}")
    return place


def remove(folder: Path, staging_dir: Path) -> None:
    """Delete a checkpoint: one rename takes it out of its folder, to a staging dir in the same file system."""
    gone = staging_dir / f".{folder.name}-{secrets.token_hex(4)}.old"
    os.rename(folder, gone)
    shutil.rmtree(gone)


# ---------------------------------------------------------------- who may write here

WRITER = ".writer"
STAGING = ".writer-"
STALE = ".left-"
"""What the names of staging dirs begin with: of the start that writes, and of older ones."""


class FencedError(StorageError):
    """A newer start has taken over: this process must stop."""


@dataclass(frozen=True)
class Writer:
    """The right to write into a folder of checkpoints. All ranks of a start share one."""

    root: Path
    incarnation: int
    """Counts the starts that wrote here, from 1."""
    token: str

    def require(self) -> None:
        """FencedError if a newer start has taken over."""
        newest = _read(self.root)
        if newest is not None and newest.get("token") != self.token:
            who = f"start {newest.get('incarnation')} ({newest.get('who')})"
            what = f"{who} has taken over {self.root}; this is start {self.incarnation}"
            rule = "an older start may neither complete nor delete a checkpoint"
            raise FencedError(Problem(what, rule, "stop this process; the newer one continues"))

    def fenced(self) -> FencedError | None:
        """The error, if a newer start is known to have taken over."""
        try:
            self.require()
        except StorageError as error:
            return error if isinstance(error, FencedError) else None
        return None

    @property
    def staging_dir(self) -> Path:
        """Where this start's drafts are made, and what it deletes goes to."""
        return self.root / f"{STAGING}{self.token}"

    @contextlib.contextmanager
    def acting(self) -> Iterator[None]:
        """For renames from the staging dir or to it. FencedError if a newer start has taken over, before or within."""
        self.require()
        try:
            yield
        except FileNotFoundError:
            self.require()
            raise


def take_over(root: Path) -> Writer:
    """Become the one that writes here. Call it on one rank and tell the others."""
    make_folder(root)
    newest = _read(root)
    incarnation = 1 + (newest["incarnation"] if newest else 0)
    writer = Writer(root, incarnation, secrets.token_hex(8))
    who = f"process {os.getpid()} on {socket.gethostname()}"
    facts = {"incarnation": incarnation, "token": writer.token, "who": who}
    write_atomically(root / WRITER, json.dumps(facts) + "\n")
    try:
        for staging_dir in filter(Path.is_dir, root.glob(f"{STAGING}*")):
            staging_dir.rename(root / f"{STALE}{staging_dir.name.removeprefix(STAGING)}-{secrets.token_hex(4)}")
        writer.staging_dir.mkdir()
    except OSError as error:
        raise storage_error(root, error, action="take over the folder") from error
    return writer


def _read(root: Path) -> dict[str, Any] | None:
    """What `.writer` says; None if nobody has written it, or no start that went through."""
    try:
        facts = read_json(root / WRITER)
    except (FileNotFoundError, ValueError):
        return None
    except OSError as error:
        raise storage_error(root / WRITER, error, action="read") from error
    return facts if isinstance(facts, dict) and isinstance(facts.get("incarnation"), int) else None
