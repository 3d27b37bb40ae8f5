"""Tensor files on the disks of the nodes, for a tier whose fast place is not one that all ranks share.

run/checkpoints-local/step-00000050/     index, state, recipe and manifest, which all ranks see; tensor files are links
/nvme/my-run-1a2b3c4d/step-00000050-<attempt>/tensors-00003.safetensors      on the node of rank 3 alone

A link leads to a file on the node that has it, and nowhere on the others. Everything that makes a checkpoint complete,
newest or fenced happens in the shared folder, as for any other; only the bytes of the tensors stay on the node.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from bloomery.base.bounded import LARGE_BYTES, read_json
from bloomery.base.ranks import Ranks
from bloomery.base.storage import opened_folder, remove_tree

PARTS = "parts"
"""In a manifest: the folder on the nodes' disks."""


def is_part(name: str) -> bool:
    """Whether a file of a checkpoint lies on a node's disk, if any of them do."""
    return name.endswith(".safetensors")


def link_parts(folder: Path, parts: Path, names: Collection[str]) -> None:
    """Let the tensor files of a draft be links to where their ranks have written them."""
    for name in names:
        os.symlink(parts / name, folder / name)


def shares(manifest: Mapping[str, Any], ranks: Ranks) -> tuple[list[str], list[str]]:
    """(files of a checkpoint that this rank should read, those on no node at all). All ranks call it: every file is one
    rank's to read, of a rank that can."""
    names = sorted(manifest["files"])
    if manifest.get(PARTS) is None:
        return names[ranks.rank :: ranks.size], []
    try:
        here = set(os.listdir(manifest[PARTS]))
    except OSError:
        here = set()
    seen: list[set[str]] = ranks.gather(here)
    readers = {
        name: [rank for rank, found in enumerate(seen) if name in found] if is_part(name) else [0] for name in names
    }
    mine = [
        name for i, name in enumerate(names) if readers[name] and readers[name][i % len(readers[name])] == ranks.rank
    ]
    return mine, [name for name in names if not readers[name]]


def sweep_parts(parts_root: Path, manifests: Iterable[Path], *, spare: Collection[str] = ()) -> None:
    """Delete what lies on this node's disk and belongs to none of these manifests. `spare`: folders of saves on their
    way. Ranks of one node may do it at once. Never fails: what cannot be deleted now is for the next time."""
    kept = set(spare)
    for path in manifests:
        try:
            kept.add(Path(read_json(path, LARGE_BYTES).get(PARTS, "")).name)
        except FileNotFoundError:  # retention was faster
            continue
        except (OSError, ValueError, AttributeError, TypeError):  # it may name any of them
            return
    with contextlib.suppress(OSError), opened_folder(parts_root) as here:
        for name in os.listdir(here):
            if name not in kept:
                remove_tree(name, dir_fd=here)
