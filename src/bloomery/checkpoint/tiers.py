"""The places where a run keeps checkpoints: its folder, and perhaps a faster one that is saved to more often."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from bloomery.checkpoint.fence import Writer
from bloomery.checkpoint.retention import apply_retention
from bloomery.config.recipe import CheckpointSection, KeepSection

CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class Tier:
    name: str
    """`durable` or `local`."""
    root: Path
    writer: Writer
    keep: KeepSection | None

    def retain(self, spare: Collection[int] = ()) -> list[str]:
        """Delete what this tier need not keep; the names."""
        return apply_retention(self.root, self.keep, writer=self.writer, spare=spare)


def tier_roots(section: CheckpointSection, run_folder: Path) -> dict[str, Path]:
    """Where checkpoints lie, by tier. The local place carries a mark of the run's folder: two runs of one name must not
    take each other's."""
    roots = {"durable": run_folder / CHECKPOINTS}
    if section.local is not None:
        mark = hashlib.sha256(str(run_folder.absolute()).encode()).hexdigest()[:8]
        roots["local"] = Path(section.local.path) / f"{run_folder.name}-{mark}"
    return roots


def kept_in(name: str, section: CheckpointSection) -> KeepSection | None:
    if name == "local":
        assert section.local is not None
        return KeepSection(last=section.local.keep)
    return section.keep
