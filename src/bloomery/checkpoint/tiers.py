"""The places where a run keeps checkpoints: its folder, and perhaps a faster one that is saved to more often."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryFile

from bloomery.base.storage import own_folder, writing, written_to
from bloomery.checkpoint.fence import Writer
from bloomery.checkpoint.folder import CHECKPOINTS, LOCAL_CHECKPOINTS, manifests_with_parts
from bloomery.checkpoint.parts import sweep_parts
from bloomery.checkpoint.remote import Uploader
from bloomery.checkpoint.retention import apply_retention, good_steps
from bloomery.config.recipe import CheckpointSection, KeepSection

DURABLE, LOCAL = "durable", "local"


@dataclass(frozen=True)
class Tier:
    name: str
    """`durable` or `local`."""
    root: Path
    writer: Writer
    keep: KeepSection | None
    parts_root: Path | None = None
    """Where on each node's own disk its tensor files lie (parts.py); None: in `root`."""

    def prepare_node_dir(self) -> None:
        """Make the folder on this node, and delete what earlier starts have left there and no checkpoint needs. Every
        rank calls it, after one of them has put `root` in order. StorageError if nothing can be written there."""
        if self.parts_root is not None:
            with written_to("checkpoint.local.path"), writing(self.parts_root, "write in the folder"):
                own_folder(self.parts_root, parents=True)
                with TemporaryFile(dir=self.parts_root) as proof:  # without a name: a kill leaves nothing
                    proof.write(b"proof")
            sweep_parts(self.parts_root, manifests_with_parts(self.root))


@dataclass(frozen=True)
class TierRetention:
    """What one save deletes in its tier, and to whom it offers the new checkpoint."""

    tier: Tier
    uploader: Uploader | None = None
    known: int | None = None
    """The step that this job has loaded or saved last. Without one nothing is deleted to make room."""
    proven_until: int = -1
    given_up: range = range(0)
    """Which checkpoints are good (retention.good_steps). The newest of them stays, because this one is not proven."""
    is_suspicious: bool = False
    """The state may be worse than that of older checkpoints: nothing is deleted."""
    is_final: bool = False
    """It is the last one of the run."""

    def make_room(self) -> list[str]:
        """What retention would delete after this save, less what this job has loaded or saved: a save without room
        would otherwise fail again and again. A fast place without room for all that it should keep keeps the newest."""
        if self.tier.name == LOCAL:
            return apply_retention(self.tier.root, KeepSection(last=1), writer=self.tier.writer)
        if self.is_suspicious or self.known is None:
            return []
        return self._retain({self.known})

    def after_save(self, folder: Path) -> list[str]:
        if self.uploader is not None:
            self.uploader.offer(folder, keep_all=self.is_suspicious, final=self.is_final)
        return [] if self.is_suspicious else self._retain(set())

    def _retain(self, spare: set[int]) -> list[str]:
        good = good_steps(self.tier.root, proven_until=self.proven_until, given_up=self.given_up)
        spare |= {*islice(good, 1), *(self.uploader.protected() if self.uploader else ())}
        return apply_retention(self.tier.root, self.tier.keep, writer=self.tier.writer, spare=spare)


def tier_roots(section: CheckpointSection, run_folder: Path) -> dict[str, Path]:
    """Where checkpoints are listed, by tier; all ranks see these."""
    roots = {DURABLE: run_folder / CHECKPOINTS}
    if section.local is not None:
        roots[LOCAL] = run_folder / LOCAL_CHECKPOINTS
    return roots


def all_roots(run_folder: Path) -> list[Path]:
    """Where checkpoints may be listed, whatever the recipe has now."""
    return [run_folder / CHECKPOINTS, run_folder / LOCAL_CHECKPOINTS]


def parts_in(name: str, section: CheckpointSection, run_folder: Path) -> Path | None:
    """Where a tier's tensor files lie on each node. The place carries a mark of the run's folder: two runs of one name
    must not take each other's."""
    if name != LOCAL:
        return None
    assert section.local is not None
    mark = hashlib.sha256(str(run_folder.absolute()).encode()).hexdigest()[:8]
    return Path(section.local.path).absolute() / f"{run_folder.name}-{mark}"


def kept_in(name: str, section: CheckpointSection) -> KeepSection | None:
    if name == LOCAL:
        assert section.local is not None
        return KeepSection(last=section.local.keep)
    return section.keep
