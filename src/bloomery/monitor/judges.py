"""Verdicts on a run's numbers. Pure: the loop feeds them and acts."""

from __future__ import annotations

from typing import Literal

Verdict = Literal["ok", "skip", "stop"]


class NanJudge:
    """Counts steps in a row whose loss or gradient was not finite."""

    def __init__(self, stop_after: int, *, consecutive: int = 0) -> None:
        """`stop_after` bad steps in a row give 'stop'; 0 never does."""
        assert stop_after >= 0
        self.stop_after = stop_after
        self.consecutive = consecutive
        """Bad steps in a row so far. The whole state: save it in the checkpoint, set it after loading."""

    def feed(self, finite: bool) -> Verdict:
        """'skip': do not apply this step's update. 'stop': nor any other; the run diverged."""
        if finite:
            self.consecutive = 0
            return "ok"
        self.consecutive += 1
        return "stop" if 0 < self.stop_after <= self.consecutive else "skip"
