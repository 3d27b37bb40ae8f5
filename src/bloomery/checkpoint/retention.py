"""The two tiers of checkpoints, and which of them are kept. Nothing is deleted before something newer is complete.

run/checkpoints/                         durable: all of it in the run folder
run/checkpoints-local/step-00000050/     node-local: index, state, recipe and manifest; the tensor files are links
/nvme/my-run-1a2b3c4d/step-00000050-<attempt>/tensors-00003.safetensors      on the node of rank 3 only

A link leads to a file on the node that has it, and nowhere on the others. What makes a checkpoint complete, newest or
fenced happens in the shared folder in both tiers; only the bytes of the tensors stay on the node.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bloomery.base.errors import DataError
from bloomery.base.storage import make_folder, own_folder, sweep_folder, written_to
from bloomery.checkpoint import folder as folders
from bloomery.checkpoint.folder import SUSPICIOUS, Writer, read_manifest
from bloomery.config.recipe import KeepSection, LocalTierSection
from bloomery.sizing.schedule import kept_steps

if TYPE_CHECKING:
    from bloomery.checkpoint.remote import Uploader


@dataclass(frozen=True)
class Tier:
    writer: Writer
    keep: KeepSection | None = None
    parts_root: Path | None = None
    """Where on each node's own disk its tensor files lie; None: in `root`."""

    @property
    def root(self) -> Path:
        return self.writer.root

    @classmethod
    def node_local(cls, local: LocalTierSection, run_folder: Path, writer: Writer) -> Tier:
        mark = hashlib.sha256(str(run_folder.absolute()).encode()).hexdigest()[:8]  # two runs of one name stay apart
        parts_root = Path(local.path).absolute() / f"{run_folder.name}-{mark}"
        return cls(writer, KeepSection(last=local.keep), parts_root)

    def prepare_node_dir(self) -> None:
        """Make the folder on this node, and delete what earlier starts have left there and no checkpoint needs. Every
        rank calls it, after one of them has tidied `root`. StorageError if nothing can be written there."""
        assert self.parts_root is not None, "only the node-local tier has one"
        with written_to("checkpoint.local.path"):
            make_folder(own_folder(self.parts_root, parents=True))
        sweep_parts(self.parts_root, self.root)


def sweep_parts(parts_root: Path, root: Path, *, spare: tuple[str, ...] = ()) -> None:
    """Delete what lies on this node's disk and belongs to no checkpoint in `root`, retired ones included. `spare`:
    how the names of folders of saves in flight end. Ranks of one node may do it at once. Never fails: what cannot be
    deleted stays."""
    steps = [*folders.complete_checkpoints(root), *root.glob(f"{folders.RETIRED}/*")]
    kept = tuple(f"{path.name.partition('.')[0]}-" for path in steps)  # two that were retired from one step: `.2`
    sweep_folder(parts_root, lambda name: not name.startswith(kept) and not name.endswith(spare))


@dataclass(frozen=True)
class Retention:
    """What one save deletes in its tier, and who uploads the new checkpoint."""

    tier: Tier
    uploader: Uploader | None = None
    known: int | None = None
    """The step that this job has loaded or saved last. Without one nothing is deleted to make room."""
    is_good: Callable[[int], bool] | None = None
    """Which steps have a good checkpoint, in the durable tier. The newest of them stays, because this one is not proven
    yet, and after it the oldest that the next steps may prove."""
    is_suspicious: bool = False
    """The state may be worse than that of older checkpoints: nothing is deleted."""
    is_final: bool = False
    """It is the last one of the run."""

    def make_room(self) -> list[str]:
        """Before the first byte, if the disk has no room: delete what retention would delete after this save, except
        what this job has loaded or saved. A node-local tier without room for all that it should keep keeps the newest.
        Returns the names, like `after_save`."""
        if self.tier.parts_root is not None:
            return apply_retention(self.tier.writer, KeepSection(last=1))
        if self.is_suspicious or self.known is None:
            return []
        return self._retain({self.known}, in_need=True)

    def after_save(self, folder: Path) -> list[str]:
        """When the checkpoint is complete."""
        if self.uploader is not None:
            self.uploader.offer(folder, final=self.is_final)
        return [] if self.is_suspicious else self._retain(set())

    def _retain(self, spare: set[int], *, in_need: bool = False) -> list[str]:
        spare |= {*(self.uploader.protected() if self.uploader else ())}
        if is_good := self.is_good:
            good = next(good_steps(self.tier.root, is_good), -1)
            spare |= {good}
            if not (self.is_final or in_need):  # else frequent saves would delete each before it is proven
                unproven = [*good_steps(self.tier.root, lambda step: step > good and not is_good(step))]
                spare |= {*unproven[-1:]}
        return apply_retention(self.tier.writer, self.tier.keep, spare=spare)


def apply_retention(writer: Writer, keep: KeepSection | None, *, spare: Collection[int] = ()) -> list[str]:
    """Delete the complete checkpoints that `keep` does not name, never the newest and none of `spare`; their names,
    oldest first. The best are those with the lowest validation loss measured at their very step."""
    if keep is None:
        return []
    found = {folders.step_of(path): path for path in folders.complete_checkpoints(writer.root)}
    manifests = {step: _manifest(path) for step, path in found.items()}
    measured = {step: manifest.get("validation") or {} for step, manifest in manifests.items()}
    losses = {step: float(loss["loss"]) for step, loss in measured.items() if loss.get("step") == step}
    suspicious = {step for step, manifest in manifests.items() if manifest.get(SUSPICIOUS)}
    kept = kept_steps(list(manifests), keep, losses, suspicious)
    doomed = [found[step] for step in sorted(found.keys() - kept - {*spare})]
    for folder in doomed:
        folders.remove(folder, writer)
    return [folder.name for folder in doomed]


def good_steps(root: Path, is_good: Callable[[int], bool]) -> Iterator[int]:
    """Complete checkpoints that are known to be good, the newest first, without those saved in a stretch of spikes or
    NaNs."""
    steps = filter(is_good, map(folders.step_of, reversed(folders.complete_checkpoints(root))))
    return (step for step in steps if not _manifest(root / folders.step_name(step)).get(SUSPICIOUS))


def _manifest(folder: Path) -> Mapping[str, Any]:
    """One that cannot be read is suspicious."""
    try:
        return read_manifest(folder)
    except DataError:
        return {SUSPICIOUS: True}
