"""A folder on its way, of an export or an import: written hidden inside its place, named when all of it is there."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bloomery.base.errors import Problem, StorageError
from bloomery.base.storage import make_folder, remove_tree, sync_folder, writing
from bloomery.interop.hf.proof import PROOF_FILE
from bloomery.interop.hf.shards import INDEX, SINGLE
from bloomery.interop.hf.tokenizer import CHAT_TEMPLATE

_PREFIX = ".draft-"
_CONFIG = "config.json"
_OWN = (
    _CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json", CHAT_TEMPLATE, "README.md",
    PROOF_FILE, INDEX, SINGLE,
)  # fmt: skip


def require_own(output: Path) -> None:
    """StorageError if the folder holds something that is not an older export: a README.md there may be somebody's.

    Hidden files are left alone: an export may lie in a clone of a hub's repository."""
    if PROOF_FILE not in _visible(output):
        require_empty(output, f"an export replaces an older export (with {PROOF_FILE}) and nothing else")


def require_empty(output: Path, rule: str) -> None:
    """StorageError if the folder holds anything that is not hidden: it is somebody's."""
    found = _visible(output)
    if found:
        what = f"{output} is not empty: it holds {', '.join(found[:5])}" + (" and more" if len(found) > 5 else "")
        raise StorageError(Problem(what, rule, "name another folder, or empty this one"))


def _visible(output: Path) -> list[str]:
    with writing(output, "read"):
        found = output.iterdir() if output.is_dir() else []
        return sorted(path.name for path in found if not path.name.startswith("."))


@contextmanager
def drafted(output: Path, publish: Callable[[Path, Path], None]) -> Iterator[Path]:
    """A folder to write into; `publish(it, output)` gives its files their names. After an error all is as before."""
    is_new = not output.exists()
    make_folder(output)
    for debris in output.glob(f"{_PREFIX}*.tmp"):  # of one that was killed
        remove_tree(debris)
    draft = output / f"{_PREFIX}{secrets.token_hex(4)}.tmp"
    try:
        with writing(draft, "create the folder"):
            draft.mkdir()
        yield draft
        with writing(output):
            publish(draft, output)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        if is_new:
            with suppress(OSError):  # it is not empty
                output.rmdir()


def replace_export(draft: Path, output: Path) -> None:
    """The older config goes first and the new one comes last: in between nothing loads."""
    for path in (*(output / name for name in _OWN), *output.glob("model-*-of-*.safetensors")):
        path.unlink(missing_ok=True)
    move_all(draft, output, last=_CONFIG)


def move_all(draft: Path, output: Path, *, last: str) -> None:
    for path in sorted(draft.iterdir(), key=lambda path: path.name == last):
        os.rename(path, output / path.name)
    sync_folder(output)
