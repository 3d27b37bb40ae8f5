"""The checkpoint folder: names, whether it is whole, and `latest`.

checkpoints/step-00000100/   tensors-*.safetensors, index.json, state.json, recipe.yaml, and manifest.json, written last
checkpoints/latest           the name of a complete checkpoint
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bloomery.base.bounded import LARGE_BYTES, open_regular, read_small
from bloomery.base.errors import DataError, Problem
from bloomery.base.ranks import ALONE, Ranks
from bloomery.base.storage import open_plain, opened_folder, own_folder, reason, remove_tree, write_atomically
from bloomery.checkpoint.fence import STALE
from bloomery.checkpoint.manifest import FORMAT as FORMAT
from bloomery.checkpoint.manifest import MANIFEST as MANIFEST
from bloomery.checkpoint.manifest import parse_manifest
from bloomery.checkpoint.parts import is_part, shares
from bloomery.checkpoint.prove import contradictions

CHECKPOINTS, LOCAL_CHECKPOINTS = "checkpoints", "checkpoints-local"
"""Where a run lists its checkpoints, and those in a faster place."""
LATEST = "latest"
RETIRED = "retired"
"""Folder of checkpoints whose branch of the run was left."""
_LONGEST_NAME = 255
_LARGE_BYTES = 2**20
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


def manifests_with_parts(root: Path) -> list[Path]:
    """Manifests of checkpoints whose tensor files must stay: of complete ones, and of those put aside by hand."""
    return [*(path / MANIFEST for path in complete_checkpoints(root)), *root.glob(f"{RETIRED}/*/{MANIFEST}")]


def latest_checkpoint(root: Path) -> Path | None:
    """The newest complete one: what `latest` names, unless a crash or a hand came between."""
    whole = complete_checkpoints(root)
    return whole[-1] if whole else None


def read_latest(root: Path) -> str | None:
    """What `latest` says; None if there is no such file."""
    try:
        with open(root / LATEST, errors="replace", opener=open_plain) as file:
            return file.read(_LONGEST_NAME).strip("\0 \n")
    except OSError:
        return None


def point_latest(folder: Path) -> None:
    """Let `latest` name this checkpoint."""
    write_atomically(folder.parent / LATEST, folder.name + "\n")


def find_checkpoint(path: Path) -> Path:
    """What a user means by a checkpoint: a step folder, a `checkpoints` folder, or a run folder for its newest,
    which may lie in its fast place if all of that is on this machine. DataError if none."""
    if (path / MANIFEST).is_file() and (path / "state.json").is_file():
        return path
    found = latest_checkpoint(path) or latest_checkpoint(path / CHECKPOINTS)
    local = [each for each in complete_checkpoints(path / LOCAL_CHECKPOINTS) if _is_all_here(each)]
    if local and (found is None or step_of(local[-1]) > step_of(found)):
        return local[-1]
    if found is None:
        rule = "a checkpoint is a folder with a manifest.json, or a run folder that has one"
        raise DataError(Problem(f"there is no complete checkpoint at {path}", rule, "name another folder"))
    return found


def _is_all_here(folder: Path) -> bool:
    """Whether no tensor file is a link to the disk of another node."""
    return all(path.exists() for path in folder.iterdir())


def verify(folder: Path, *, ranks: Ranks = ALONE, tensors: bool = True) -> None:
    """DataError names every file that is missing, short or changed. All ranks call it, and all return or raise."""
    found = damage(folder, ranks=ranks, tensors=tensors)
    if found:
        others = [path for path in complete_checkpoints(folder.parent) if path != folder]
        whole = [path.name for path in others if not damage(path, tensors=False)]
        remedy = (
            f"use another one, `bloomery train` with --from: {', '.join(whole)}"
            if whole
            else "there is no other checkpoint in this folder"
        )
        problems = [Problem(text, place=str(folder)) for text in found]
        what = f"checkpoint {folder.name} cannot be used"
        raise DataError([*problems, Problem(what, remedy=remedy, place=str(folder))])


def damage(folder: Path, *, ranks: Ranks = ALONE, tensors: bool = True, quick: bool = False) -> list[str]:
    """Why a checkpoint cannot be used; nothing if it is whole, unchanged and of this version's format.

    All ranks call it: each reads its share, all return the same. `tensors`: read the files of tensors too, and prove
    that they fit index and recipe; without it only their sizes are looked at, of those on this node. `quick`: for very
    many checkpoints, likewise what is large of the other files, and what the index says.
    """
    manifest: dict[str, Any] | str = _manifest_or_damage(folder) if ranks.rank == 0 else ""
    manifest = ranks.broadcast(manifest)
    if isinstance(manifest, str):
        return [manifest]
    share, nowhere = shares(manifest, ranks)
    files = manifest["files"]
    reads = {name: tensors or not (is_part(name) or (quick and files[name]["bytes"] > _LARGE_BYTES)) for name in share}
    found = [_damage(folder / name, files[name], read=reads[name]) for name in share]
    lost = [f"{name} is on none of the nodes" for name in nowhere if tensors]
    told = sorted([*lost, *(text for texts in ranks.gather(found) for text in texts if text)])
    if told or quick:
        return told
    wrong = contradictions(folder, manifest, read=share if tensors else (), recipe=tensors and ranks.rank == 0)
    return sorted({text for texts in ranks.gather(wrong) for text in texts})


def _manifest_or_damage(folder: Path) -> dict[str, Any] | str:
    try:
        manifest = parse_manifest(read_small(folder / MANIFEST, LARGE_BYTES))
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError) as error:
        return f"{MANIFEST} cannot be used: {error}"
    if is_step_name(folder.name) and manifest["step"] != step_of(folder):
        return f"its manifest says step {manifest['step']}: the folder was copied or renamed"
    return manifest


def _damage(path: Path, expected: dict[str, Any], *, read: bool) -> str:
    """What is wrong with a file; empty if nothing is."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            size = os.fstat(file.fileno()).st_size
            if size != expected["bytes"]:
                return f"{path.name} has {size:,} bytes instead of {expected['bytes']:,}"
            same = not read or hashlib.file_digest(file, "sha256").hexdigest() == expected["sha256"]
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read: {reason(error)}"
    return "" if same else f"{path.name} has been changed since it was saved"


def name_of(wanted: str) -> str:
    """`step-00000100` for what a user calls `100`."""
    return step_name(int(wanted)) if wanted.isascii() and wanted.isdecimal() else wanted


def checkpoint_named(roots: Sequence[Path], name: str) -> Path:
    """The complete checkpoint `step-00000100`, also called `100`, in the first place that has it. DataError lists those
    there are."""
    wanted = name_of(name)
    whole = [path for root in roots for path in complete_checkpoints(root)]
    for path in whole:
        if path.name == wanted or ("/" in wanted and path.resolve() == Path(wanted).resolve()):
            return path
    have = ", ".join(path.name for path in whole) or "none"
    place = ", ".join(map(str, roots))
    raise DataError(Problem(f"there is no complete checkpoint {wanted}", f"there are: {have}", "name one", place))


def sweep_debris(root: Path, *, keep: bool = False) -> list[str]:
    """Delete what saves and deletions that were killed left behind; the names. For the one that may write here.

    `keep`: put it into `debris/` instead.
    """
    if not root.is_dir():
        return []
    aside, found = own_folder(root / "debris") if keep else None, [path.name for path in root.glob(".step-*")]
    for path in root.glob(".step-*"):
        _put_away(path, aside)
    for left in root.glob(f"{STALE}*"):
        with contextlib.suppress(NotADirectoryError), opened_folder(left) as staging_dir:  # not through a link
            for entry in [each for each in os.scandir(staging_dir) if each.is_dir(follow_symlinks=False)]:
                found.append(entry.name)
                _put_away(Path(entry.name), aside, dir_fd=staging_dir)
        remove_tree(left)
    for path in [*root.glob(".tmp-*"), *root.glob(".probe-*")]:  # of files that were being replaced or tried out
        remove_tree(path)
    return sorted(found)


def _put_away(path: Path, aside: Path | None, *, dir_fd: int | None = None) -> None:
    if aside is None:
        remove_tree(path, dir_fd=dir_fd)
    else:
        os.rename(path, _free_name(aside / path.name), src_dir_fd=dir_fd)


def retire_later(root: Path, step: int) -> list[str]:
    """Move complete checkpoints beyond `step` aside, so that they are neither resumed from nor counted; their names."""
    later = [path for path in complete_checkpoints(root) if step_of(path) > step]
    for path in later:
        _put_away(path, own_folder(root / RETIRED))
    return [path.name for path in later]


def quarantine(folder: Path) -> Path:
    """Give a damaged checkpoint a name that nothing goes on from; the new path."""
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
