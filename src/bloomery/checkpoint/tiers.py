"""The places where a run keeps checkpoints: its folder, and perhaps a faster one that is saved to more often."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

from bloomery.base.storage import own_folder, writing, written_to
from bloomery.checkpoint.fence import Writer
from bloomery.checkpoint.folder import CHECKPOINTS, LOCAL_CHECKPOINTS, manifests_with_parts
from bloomery.checkpoint.parts import sweep_parts
from bloomery.checkpoint.retention import apply_retention
from bloomery.config.recipe import CheckpointSection, KeepSection


@dataclass(frozen=True)
class Tier:
    name: str
    """`durable` or `local`."""
    root: Path
    writer: Writer
    keep: KeepSection | None
    parts_root: Path | None = None
    """Where on each node's own disk its tensor files lie (parts.py); None: in `root`."""

    def retain(self, spare: Collection[int] = ()) -> list[str]:
        """Delete what this tier need not keep; the names."""
        return apply_retention(self.root, self.keep, writer=self.writer, spare=spare)

    def settle(self) -> None:
        """Make the folder on this node, and delete what earlier starts have left there and no checkpoint needs. Every
        rank calls it, after one of them has put `root` in order. StorageError if nothing can be written there."""
        if self.parts_root is not None:
            with written_to("checkpoint.local.path"), writing(self.parts_root, "write in the folder"):
                own_folder(self.parts_root, parents=True)
                with TemporaryFile(dir=self.parts_root) as proof:  # without a name: a kill leaves nothing
                    proof.write(b"proof")
            sweep_parts(self.parts_root, manifests_with_parts(self.root))


def tier_roots(section: CheckpointSection, run_folder: Path) -> dict[str, Path]:
    """Where checkpoints are listed, by tier; all ranks see these."""
    roots = {"durable": run_folder / CHECKPOINTS}
    if section.local is not None:
        roots["local"] = run_folder / LOCAL_CHECKPOINTS
    return roots


def all_roots(run_folder: Path) -> list[Path]:
    """Where checkpoints may be listed, whatever the recipe has now."""
    return [run_folder / CHECKPOINTS, run_folder / LOCAL_CHECKPOINTS]


def parts_in(name: str, section: CheckpointSection, run_folder: Path) -> Path | None:
    """Where a tier's tensor files lie on each node. The place carries a mark of the run's folder: two runs of one name
    must not take each other's."""
    if name != "local":
        return None
    assert section.local is not None
    mark = hashlib.sha256(str(run_folder.absolute()).encode()).hexdigest()[:8]
    return Path(section.local.path).absolute() / f"{run_folder.name}-{mark}"


def kept_in(name: str, section: CheckpointSection) -> KeepSection | None:
    if name == "local":
        assert section.local is not None
        return KeepSection(last=section.local.keep)
    return section.keep
