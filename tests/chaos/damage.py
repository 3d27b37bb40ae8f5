"""What is done to the files of a run that has stopped half way, and what must be found of it afterwards."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bloomery.checkpoint import folder as folders
from chaos.scene import HALF, Ended, Scene
from checkpoints import flip_bit

FILES = ("manifest.json", "index.json", "state.json", "recipe.yaml", "tensors-00000.safetensors", "last tensors")


def newest(scene: Scene) -> Path:
    return scene.run / "checkpoints" / folders.step_name(HALF)


def older(scene: Scene) -> Path:
    return scene.run / "checkpoints" / folders.step_name(HALF - 1)


def file_of(folder: Path, name: str) -> Path:
    return sorted(folder.glob("tensors-*"))[-1] if name == "last tensors" else folder / name


def flipped(name: str) -> Callable[[Scene], None]:
    def do(scene: Scene) -> None:
        path = file_of(newest(scene), name)
        flip_bit(path, path.stat().st_size * 8 // 2)

    return do


def truncated(name: str) -> Callable[[Scene], None]:
    def do(scene: Scene) -> None:
        path = file_of(newest(scene), name)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    return do


def missing(name: str) -> Callable[[Scene], None]:
    return lambda scene: file_of(newest(scene), name).unlink()


def swapped(name: str) -> Callable[[Scene], None]:
    """The older checkpoint's file in place of the newest's."""
    return lambda scene: shutil.copyfile(file_of(older(scene), name), file_of(newest(scene), name)) and None


def copied_under_another_step(scene: Scene) -> None:
    shutil.copytree(newest(scene), newest(scene).with_name(folders.step_name(HALF + 2)))


def emptied(scene: Scene) -> None:
    shutil.rmtree(newest(scene))
    newest(scene).mkdir()


def all_damaged(scene: Scene) -> None:
    for folder in (scene.run / "checkpoints").glob("step-*"):
        flip_bit(folder / "tensors-00000.safetensors", 8 * 400)


def latest_says(text: str | None) -> Callable[[Scene], None]:
    def do(scene: Scene) -> None:
        path = scene.run / "checkpoints" / "latest"
        path.unlink()
        if text is not None:
            path.write_text(text)

    return do


def torn(name: str) -> Callable[[Scene], None]:
    def do(scene: Scene) -> None:
        with (scene.run / name).open("ab") as file:
            file.write(b'{"kind": "st')

    return do


def require_event(kind: str, step: int | None = None) -> Callable[[Scene, Ended], None]:
    def check(scene: Scene, _: Ended) -> None:
        events = scene.events(kind)
        assert any(step in (None, event["step"]) for event in events), f"no {kind} at step {step}: {events}"

    return check


def require_stop(text: str) -> Callable[[Scene, Ended], None]:
    def check(scene: Scene, _: Ended) -> None:
        assert scene.events("stop")[-1]["text"] == text

    return check


def forged(change: Callable[[dict], None]) -> Callable[[Scene], None]:  # type: ignore[type-arg]
    """An index that says something else, under a manifest that vouches for it."""

    def do(scene: Scene) -> None:
        from bloomery.checkpoint.folder import facts_of

        folder = newest(scene)
        index = json.loads((folder / "index.json").read_text())
        change(index["tensors"])
        text = json.dumps(index)
        (folder / "index.json").write_text(text)
        vouch(folder, "index.json", text, facts_of)

    return do


def forged_file(name: str, text: str) -> Callable[[Scene], None]:
    def do(scene: Scene) -> None:
        from bloomery.checkpoint.folder import facts_of

        (newest(scene) / name).write_text(text)
        vouch(newest(scene), name, text, facts_of)

    return do


def vouch(folder: Path, name: str, text: str, facts_of: Callable[[str], object]) -> None:
    from bloomery.checkpoint.folder import MANIFEST, FileFacts, write_manifest

    said = json.loads((folder / MANIFEST).read_text())
    said.pop("sha256", None)
    files = {each: FileFacts(**facts) for each, facts in said.pop("files").items()} | {name: facts_of(text)}
    (folder / MANIFEST).unlink()
    write_manifest(folder, said, files)  # type: ignore[arg-type]


def linked(name: str) -> Callable[[Scene], None]:
    """In the place of this name a link to a file, or with a slash at the end to a folder, outside of the run."""

    def do(scene: Scene) -> None:
        victim = scene.folder / "victim"
        (victim / "deep").mkdir(parents=True)
        for path in ("file", "deep/file", "manifest.json", "stop"):
            (victim / path).write_text(f"{path} of somebody")
        (scene.folder / "before").write_text(json.dumps(_contents(victim)))
        place = scene.run / name.rstrip("/")
        if place.is_dir():
            shutil.rmtree(place)
        place.unlink(missing_ok=True)
        place.symlink_to(victim if name.endswith("/") else victim / "file")

    return do


def _contents(folder: Path) -> dict[str, Any]:
    return {
        str(path.relative_to(folder)): [path.read_text() if path.is_file() else "", path.stat().st_mtime_ns]
        for path in sorted(folder.rglob("*"))
    }


def require_untouched(scene: Scene, ended: Ended) -> None:
    assert _contents(scene.folder / "victim") == json.loads((scene.folder / "before").read_text()), ended.said


def vanish(plant: Any, _: Any) -> None:
    run = Path(plant.notes).parent / "run"
    run.rename(run.with_name("elsewhere"))


def bring_back(scene: Scene, _: Ended) -> None:
    shutil.rmtree(scene.run, ignore_errors=True)
    (scene.folder / "elsewhere").rename(scene.run)


def _killed_at_step_5(scene: Scene) -> None:
    from chaos.plant import AfterStep, Plant, kill

    scene.start(plant=Plant(AfterStep(5), kill, None))


def local_tier_wiped(scene: Scene) -> Ended:
    _killed_at_step_5(scene)
    shutil.rmtree(scene.folder / "nvme")
    return scene.start()


def local_tier_flipped(scene: Scene) -> Ended:
    _killed_at_step_5(scene)
    newest = sorted((scene.folder / "nvme").glob("*/step-*"))[-1]
    flip_bit(next(newest.glob("tensors-*")), 8 * 400)
    return scene.start()


def fetched(scene: Scene) -> Ended:
    assert scene.start(f"train.exit_after={HALF} steps").code == 0
    shutil.rmtree(scene.run / "checkpoints")
    return scene.start()


def fetched_damaged(scene: Scene) -> Ended:
    assert scene.start(f"train.exit_after={HALF} steps").code == 0
    shutil.rmtree(scene.run / "checkpoints")
    flip_bit(scene.folder / "remote" / folders.step_name(HALF) / "tensors-00000.safetensors", 8 * 400)
    return scene.start()


def _flip_idx(part: float) -> Callable[[Path], None]:
    return lambda shard: flip_bit(shard.with_suffix(".idx"), int(shard.with_suffix(".idx").stat().st_size * part) * 8)


SHARDS: dict[str, Callable[[Path], None]] = {
    "the .bin is missing": lambda shard: shard.with_suffix(".bin").unlink(),
    "the .bin is truncated": lambda shard: os.truncate(shard.with_suffix(".bin"), 1000),
    "the .idx is truncated": lambda shard: os.truncate(shard.with_suffix(".idx"), 200),
    "the .idx of another shard": lambda shard: (
        shutil.copyfile(shard.with_name("valid.idx"), shard.with_suffix(".idx")) and None
    ),
    "bit flip among the lengths of an .idx": _flip_idx(0.2),
    "bit flip among the pointers of an .idx": _flip_idx(0.5),
    "bit flip among the documents of an .idx": _flip_idx(0.9),
    "tokens beyond the vocabulary": lambda shard: high_bits(shard.with_suffix(".bin")),
}


def high_bits(path: Path) -> None:
    """One in every 64 tokens of a shard of uint16, so that each sample has some."""
    tokens = bytearray(path.read_bytes())
    for place in range(1, len(tokens), 128):
        tokens[place] |= 128
    path.write_bytes(tokens)


def damaged_shard(how: Callable[[Path], None]) -> Callable[[Scene], Ended]:
    def act(scene: Scene) -> Ended:
        for path in scene.folder.parent.glob("*.bin"), scene.folder.parent.glob("*.idx"):
            for file in path:
                shutil.copy(file, scene.folder)
        how(scene.folder / "train")
        return scene.start(f"data.train=[{{path: '{scene.folder / 'train'}'}}]")

    return act


def require_equal_if_ok(scene: Scene, ended: Ended) -> None:
    """Damage is named, or it did not matter."""
    if ended.code == 0:
        scene.require_equal()
