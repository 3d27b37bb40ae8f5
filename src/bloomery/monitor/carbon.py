"""Energy and emissions as CodeCarbon sees them: in a process of its own, once per node. Whatever happens to it is an
event, and nothing to the training. Run as `python -m bloomery.monitor.carbon`, this file is that process."""

import contextlib
import importlib.util
import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bloomery.base.storage import own_folder
from bloomery.monitor.journal import Journal
from bloomery.monitor.names import Event

FOLDER = "codecarbon"
_MEASURED_SECONDS = 60
_LAST_READING_SECONDS = 10.0
_JOULES_PER_KWH = 3.6e6
_MEASURING = ("intel_rapl", "intel_power_gadget", "windows_emi")


class Carbon:
    """What the training sees of it: readings that come by themselves, and a wish for a new one."""

    def __init__(self, country: str, run_folder: Path, name: str) -> None:
        """`name` of the CSV file."""
        self.reading: dict[str, Any] | None = None
        """The newest: `kg_co2e` and `joules` of this node since the job began, and which parts are `estimated`."""
        self.failure = ""
        """Why there will be none."""
        self.file = f"{FOLDER}/{name}"
        self._country, self._reported, self._is_off = country, dict[str, float](), False
        self._process: subprocess.Popen[str] | None = None
        if importlib.util.find_spec("codecarbon") is None:
            self.failure = "the package codecarbon is missing: `pip install bloomery[carbon]`"
            return
        try:
            own_folder(run_folder / FOLDER)
            command = [sys.executable, "-m", __name__, country, str(run_folder / self.file)]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            self._process = subprocess.Popen(command, **pipes, text=True, start_new_session=True)
        except Exception as error:
            self.failure = str(error)
            return
        self._listener = threading.Thread(target=self._listen, args=(self._process,), daemon=True)
        self._listener.start()

    def _listen(self, process: subprocess.Popen[str]) -> None:
        last = "it has ended"
        for line in process.stdout or ():
            try:
                reading = json.loads(line)
                self.reading = {**reading, "kg_co2e": float(reading["kg_co2e"]), "joules": float(reading["joules"])}
            except (ValueError, TypeError, KeyError):
                last = line.strip() or last
        if process.wait():
            self.failure = self.failure or last

    def flush(self) -> None:
        """Let it write its file and read again. Does not wait."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                self._process.stdin.write("\n")
                self._process.stdin.flush()

    @property
    def numbers(self) -> list[float]:
        """For a table of all ranks; NaN before the first reading."""
        return [self.reading["kg_co2e"], self.reading["joules"]] if self.reading else [math.nan, math.nan]

    def report(self, journal: Journal, step: int, total: dict[str, float]) -> None:
        """Events, for rank 0: what all nodes have emitted, when that is news, and that there will be no more."""
        if self.failure and not self._is_off:
            self._is_off = True
            journal.event(Event.CARBON_OFF, step, reason=self.failure)
            journal.warning(f"emissions are not measured: {self.failure}. Training continues")
        if total and total != self._reported and self.reading:
            self._reported = total
            facts = {"country": self._country, "estimated": self.reading.get("estimated"), "file": self.file}
            journal.event(Event.CARBON, step, **total, **facts)

    def close(self) -> None:
        """The last reading, if it comes soon."""
        process, self._process = self._process, None
        if process is None or process.stdin is None:
            return
        with contextlib.suppress(OSError):
            process.stdin.close()
        self._listener.join(_LAST_READING_SECONDS)
        if self._listener.is_alive():
            self.failure = "it does not answer"
            process.kill()


def emissions(numbers: Iterable[Sequence[float]]) -> dict[str, float]:
    """The sum over the nodes that have a reading; empty if none has."""
    known = [each for each in numbers if not math.isnan(each[0])]
    kg, joules = (sum(column) for column in zip(*known, strict=True)) if known else (0.0, 0.0)
    return {"kg_co2e": kg, "joules": joules, "nodes": len(known)} if known else {}


def main(country: str, path: str) -> None:
    """Track until standard input ends; each line of it asks for a reading."""
    from codecarbon import OfflineEmissionsTracker  # type: ignore[import-not-found,import-untyped,unused-ignore]

    tracker = OfflineEmissionsTracker(
        country_iso_code=country,
        measure_power_secs=_MEASURED_SECONDS,
        output_dir=os.path.dirname(path),
        output_file=os.path.basename(path),
        on_csv_write="update",
        allow_multiple_runs=True,
        log_level="error",
    )
    tracker.start()
    parts = {type(part).__name__: getattr(part, "_mode", "") for part in getattr(tracker, "_hardware", [])}
    estimated = [name for name, mode in parts.items() if name != "GPU" and mode not in _MEASURING]

    def say(kg: float | None, kwh: float) -> None:
        reading = {"kg_co2e": kg or 0.0, "joules": kwh * _JOULES_PER_KWH, "estimated": estimated}
        print(json.dumps(reading), flush=True)

    say(0.0, 0.0)
    for _ in sys.stdin:
        say(tracker.flush(), float(tracker._total_energy.kWh))
    say(tracker.stop(), float(tracker._total_energy.kWh))


if __name__ == "__main__":
    main(*sys.argv[1:])
