"""An export on its way: written in a hidden folder inside its own; files get their names when all of it is there."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bloomery.base.errors import Problem, StorageError
from bloomery.base.storage import make_run_folder, sync_folder, writing
from bloomery.checkpoint.hf.proof import PROOF_FILE
from bloomery.checkpoint.hf.shards import INDEX, SINGLE

_PREFIX = ".export-"
_CONFIG = "config.json"
_OWN = (
    _CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "README.md", PROOF_FILE, INDEX,
    SINGLE,
)  # fmt: skip


def require_own(output: Path) -> None:
    """StorageError if the folder holds something that is not an older export: a README.md there may be somebody's.

    Hidden files are left alone: an export may lie in a clone of a hub's repository."""
    with writing(output, "read"):
        found = [path for path in output.iterdir() if not path.name.startswith(".")] if output.is_dir() else []
    if found and PROOF_FILE not in {path.name for path in found}:
        names = ", ".join(sorted(path.name for path in found)[:5])
        what = f"{output} is not empty: it holds {names}" + (" and more" if len(found) > 5 else "")
        rule = f"an export replaces an older export (with {PROOF_FILE}) and nothing else"
        raise StorageError(Problem(what, rule, "name another folder, or empty this one"))


@contextmanager
def drafted(output: Path) -> Iterator[Path]:
    """A folder to write into; its files then replace those of an older export. After an error all is as before."""
    is_new = not output.exists()
    make_run_folder(output)
    for debris in output.glob(f"{_PREFIX}*.tmp"):  # of an export that was killed
        shutil.rmtree(debris, ignore_errors=True)
    draft = output / f"{_PREFIX}{secrets.token_hex(4)}.tmp"
    try:
        with writing(draft, "create the folder"):
            draft.mkdir()
        yield draft
        with writing(output):
            _publish(draft, output)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        if is_new:
            with suppress(OSError):  # it holds an export
                output.rmdir()


def _publish(draft: Path, output: Path) -> None:
    """The older config goes first and the new one comes last: in between nothing loads."""
    for path in (*(output / name for name in _OWN), *output.glob("model-*-of-*.safetensors")):
        path.unlink(missing_ok=True)
    for path in sorted(draft.iterdir(), key=lambda path: path.name == _CONFIG):
        os.rename(path, output / path.name)
    sync_folder(output)
