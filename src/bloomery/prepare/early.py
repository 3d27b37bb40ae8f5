"""What takes long and needs nothing but the tokenizer, begun while the rest of the command is still being imported."""

from __future__ import annotations

import os
import threading
from typing import Any

from bloomery.base.errors import BloomeryError
from bloomery.data.tokenizer import Tokenizer
from bloomery.prepare.fast import Fastokens
from bloomery.prepare.judge import Judge


def early_start(values: dict[str, Any]) -> list[EarlyStart]:
    """For the values of a recipe that nobody has checked yet. None where they do not say enough, where there is no such
    tokenizer (which is reported later, after what is wrong with the recipe), or where something of the first shard is
    there already, so that perhaps nothing needs to be encoded."""
    match values:
        case {"tokenizer": {"path": str(path)}, "prepare": [{"output": str(output), **rest}, *_]}:
            if any(os.path.lexists(f"{output}{ending}") for ending in (".manifest.json", ".parts")):
                return []
            try:
                return [EarlyStart(Tokenizer.load(path, lazy=True), as_ids=rest.get("special_tokens") == "as_ids")]
            except (BloomeryError, ValueError):  # ValueError: a path that cannot be one
                return []
    return []


class EarlyStart:
    """The judge's process, and a thread in which fastokens reads the vocabulary."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        self.tokenizer, self.as_ids = tokenizer, as_ids
        self.judge = Judge(tokenizer, as_ids=as_ids)  # first: a fork copies no threads
        self._loaded: Fastokens | BaseException | None = None
        self._thread = threading.Thread(target=self._load)
        self._thread.start()

    def fastokens(self, _tokenizer: Tokenizer, _as_ids: bool) -> Fastokens:
        """Once it is there; what went wrong with it is raised here."""
        self.wait()
        if isinstance(self._loaded, Fastokens):
            return self._loaded
        assert self._loaded is not None
        raise self._loaded

    def wait(self) -> None:
        """Until there is only one thread again, so that processes may be forked."""
        self._thread.join()

    def close(self) -> None:
        self.judge.close()

    def _load(self) -> None:
        try:
            self._loaded = Fastokens(self.tokenizer, self.as_ids)
        except BaseException as error:  # a panic of Rust is no Exception
            self._loaded = error
