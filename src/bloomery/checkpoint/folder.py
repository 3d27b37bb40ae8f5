"""The folder of a run's checkpoints: names, the manifest that makes one complete, `latest`, moving them aside, and the
write lease. Without torch: it takes longer to import than a long list of checkpoints to read.

checkpoints/step-00000100/   tensors-*.safetensors, index.json, state.json, recipe.yaml; written last, manifest.json:
                             {"format": 2, "step": 100, ..., "files": {"state.json": {"bytes": 770, "sha256": "72..."}}}
checkpoints/latest           the name of a complete checkpoint
"""

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, ValidationError

from bloomery.base.bounded import LARGE_BYTES, open_regular, parse_json, read_json, read_small
from bloomery.base.errors import DataError, Problem, StorageError, unreadable
from bloomery.base.storage import (
    make_folder,
    open_plain,
    opened_folder,
    own_folder,
    reason,
    sweep_folder,
    write_atomically,
    writing,
)

CHECKPOINTS, LOCAL_CHECKPOINTS = "checkpoints", "checkpoints-local"
"""Where a run lists its checkpoints, and the node-local ones."""
INDEX, MANIFEST, STATE, RECIPE, LATEST = "index.json", "manifest.json", "state.json", "recipe.yaml", "latest"
FORMAT = 2
RETIRED, DEBRIS = "retired", "debris"
"""Folders of checkpoints whose branch of the run was abandoned, and of what killed saves have left."""
LINK = "it is a link to another place, which no save makes"
_LONGEST_NAME = 255
_NAME = re.compile(r"^step-(\d{8,})$")
SUSPICIOUS = "suspicious"
"""In a manifest: whether it was saved in a stretch of spikes or NaNs, so that older ones may be better."""
ANOTHER = "use another checkpoint, `bloomery train` with --from; `bloomery inspect checkpoint RUN --list` names them"
LATEST_TIME = 1e11
"""That a manifest may have: what a forged one brings is taken over by those that follow."""
Count = Annotated[int, Field(ge=0, strict=True)]


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def is_step_name(name: str) -> bool:
    return _NAME.match(name) is not None


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def complete_checkpoints(root: Path) -> list[Path]:
    """Folders with a manifest, oldest first."""
    return [path for path in step_folders(root) if os.path.isfile(path / MANIFEST) and not path.is_symlink()]


def step_folders(root: Path) -> list[Path]:
    """All that have the name of a checkpoint, oldest first. Neither saves nor deletions leave one without a manifest:
    such a folder has lost it, or cannot be read. DataError if that is so of `root`."""
    try:
        found = [root / name for name in os.listdir(root) if _NAME.match(name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise unreadable(str(root), error) from error
    return sorted((path for path in found if not os.path.isfile(path)), key=step_of)


# ---------------------------------------------------------------- the manifest


class FileFacts(BaseModel):
    """What a manifest says of a file."""

    bytes: Count
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class _Shard(BaseModel):
    documents: Count
    tokens: Count
    sample_digest: str = ""
    path: str = ""


class _Validation(BaseModel):
    step: Annotated[float, Field(ge=0)]
    """Earlier versions wrote 4.0."""
    loss: Annotated[float | str, AfterValidator(float)]
    """One that is no number is a string, as in the metrics."""


class _Manifest(BaseModel):
    """What code relies on. It reads the JSON, which may hold more."""

    format: int
    step: Count
    ranks: Annotated[int, Field(gt=0)]
    files: dict[Annotated[str, Field(pattern="^[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}$")], FileFacts]
    """By names in the checkpoint's own folder."""
    versions: dict[str, Any] | None = None
    tokenizer: str | None = None
    shards: dict[str, _Shard] | None = None
    consumed_tokens: Count | None = None
    time: Annotated[float, Field(ge=0, le=LATEST_TIME)] | None = None
    validation: _Validation | None = None
    suspicious: bool | None = None


def is_tensor_file(name: str) -> bool:
    return name.endswith(".safetensors")


def facts_of(text: str) -> FileFacts:
    content = text.encode()
    return FileFacts(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def write_manifest(folder: Path, facts: Mapping[str, Any], files: Mapping[str, FileFacts]) -> None:
    """List every file with size and hash. Call it last: with it the folder is complete."""
    listed = {name: files[name].model_dump() for name in sorted(files)}
    content = json.loads(json.dumps({"format": FORMAT, **facts, "files": listed}), parse_constant=str)
    write_atomically(folder / MANIFEST, json.dumps({**content, "sha256": _own_hash(content)}, indent=1))


def _own_hash(manifest: Mapping[str, Any]) -> str:
    """Of all else in a manifest."""
    rest = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def parse_manifest(content: bytes) -> dict[str, Any]:
    """All that code relies on is there and of the right kind; ValueError names what is not."""
    manifest = parse_json(content)
    if not isinstance(manifest, dict):
        raise ValueError("it is no JSON object")
    if "sha256" in manifest and manifest["sha256"] != _own_hash(manifest):  # those of earlier versions have none
        raise ValueError("it has been changed since it was saved")
    number = manifest.get("format")
    if type(number) is int and number != FORMAT:
        rule = f"This Bloomery reads format {FORMAT}"
        raise ValueError(f"it has format {number}. {rule}. Use the version of Bloomery that saved it")
    try:
        files = _Manifest.model_validate(manifest, strict=True).files
    except ValidationError as error:
        wrong = sorted({str(fault["loc"][0]) for fault in error.errors(include_url=False)})
        raise ValueError(f"entries are missing or malformed: {', '.join(wrong)}") from None
    if lacking := {INDEX, STATE, RECIPE} - files.keys():
        raise ValueError(f"it does not list {', '.join(sorted(lacking))}")
    if large := [name for name in files if not is_tensor_file(name) and files[name].bytes > LARGE_BYTES]:
        raise ValueError(f"{large[0]} would have {files[large[0]].bytes:,} bytes")
    return manifest


def file_damage(path: Path, expected: dict[str, Any], *, read: bool) -> str:
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


def damage_error(folder: Path, *texts: str) -> DataError:
    return DataError([Problem(text, "", ANOTHER, str(folder)) for text in texts])


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
    raise damage_error(folder, text)


# ---------------------------------------------------------------- which there are


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


def checkpoint_elsewhere(roots: Sequence[Path], wanted: str) -> Path | None:
    """What `runs/r1@100`, `runs/r1` or the path of a checkpoint names, if it is in none of these roots."""
    run, at, step = wanted.rpartition("@")
    path = Path(run if at else wanted)
    if not (path / MANIFEST).is_file() and (at or (path / CHECKPOINTS).is_dir()):
        path = checkpoint_named([path / CHECKPOINTS], step) if at else find_checkpoint(path)
    is_ours = path.resolve().parent in [root.resolve() for root in roots]
    return path if (path / MANIFEST).is_file() and not is_ours else None


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
    quarantined = {path: quarantine(path) for path in doomed}
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


def quarantine(folder: Path) -> str:
    """Give a damaged checkpoint a name that nothing resumes from; returns it."""
    return folder.rename(_free_name(folder.with_name(f"damaged-{folder.name}"))).name


def _free_name(wanted: Path) -> Path:
    place, number = wanted, 1
    while os.path.lexists(place):
        number += 1
        place = wanted.with_name(f"{wanted.name}.{number}")
    return place


# ---------------------------------------------------------------- who may write here

WRITER = ".writer"
STAGING = ".writer-"
STALE = ".left-"
"""What the names of staging dirs begin with: of the start that writes, and of older ones."""


class FencedError(StorageError):
    """A newer start has taken over: this process must stop."""


@dataclass(frozen=True)
class Writer:
    """The right to write into a folder of checkpoints. All ranks of a start share one. `take_over` gives it; without a
    token it is that of the only one who ever writes there."""

    root: Path
    incarnation: int = 0
    """Counts the starts that wrote here, from 1."""
    token: str = ""

    def require(self) -> None:
        """FencedError if a newer start has taken over."""
        newest = _read(self.root) if self.token else None
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
        return self.root / f"{STAGING}{self.token}" if self.token else self.root

    @contextlib.contextmanager
    def acting(self) -> Iterator[None]:
        """For renames from the staging dir or to it. FencedError if a newer start has taken over, before or within."""
        self.require()
        try:
            yield
        except FileNotFoundError:
            self.require()
            raise


def remove(folder: Path, writer: Writer) -> None:
    """Delete a checkpoint: one rename takes it out of its folder, to the staging dir."""
    gone = writer.staging_dir / f".{folder.name}-{secrets.token_hex(4)}.old"
    with writer.acting():
        os.rename(folder, gone)
        shutil.rmtree(gone)


def take_over(root: Path) -> Writer:
    """Become the one that writes here. Call it on one rank and tell the others."""
    make_folder(root)
    newest = _read(root)
    incarnation = 1 + (newest["incarnation"] if newest else 0)
    writer = Writer(root, incarnation, secrets.token_hex(8))
    who = f"process {os.getpid()} on {socket.gethostname()}"
    facts = {"incarnation": incarnation, "token": writer.token, "who": who}
    write_atomically(root / WRITER, json.dumps(facts) + "\n")
    with writing(root, "take over the folder"):
        for staging_dir in filter(Path.is_dir, root.glob(f"{STAGING}*")):
            staging_dir.rename(root / f"{STALE}{staging_dir.name.removeprefix(STAGING)}-{secrets.token_hex(4)}")
        writer.staging_dir.mkdir()
    return writer


def _read(root: Path) -> dict[str, Any] | None:
    """What `.writer` says; None if nobody has written it, or no start that went through."""
    facts = None
    with writing(root / WRITER, "read"), contextlib.suppress(FileNotFoundError, ValueError):
        facts = read_json(root / WRITER)
    return facts if isinstance(facts, dict) and isinstance(facts.get("incarnation"), int) else None
