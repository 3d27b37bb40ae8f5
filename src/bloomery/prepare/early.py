"""What takes long and needs nothing but the tokenizer, begun while the rest of the command is still being imported."""

from __future__ import annotations

import threading

from bloomery.data.tokenizer import Tokenizer
from bloomery.prepare.fast import Fastokens
from bloomery.prepare.judge import Judge


class EarlyStart:
    """The judge's process, and a thread in which fastokens reads the vocabulary."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        self.as_ids = as_ids
        self.judge = Judge(tokenizer, as_ids=as_ids)  # first: a fork copies no threads
        self._loaded: Fastokens | Exception | None = None
        self._thread = threading.Thread(target=self._load, args=(tokenizer,))
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

    def _load(self, tokenizer: Tokenizer) -> None:
        try:
            self._loaded = Fastokens(tokenizer, self.as_ids)
        except Exception as error:
            self._loaded = error
