"""Lines of a log that another process writes."""

from __future__ import annotations

from pathlib import Path


class LogTail:
    """What is appended from now on."""

    def __init__(self, path: Path) -> None:
        self._path, self._rest = path, b""
        self._offset = path.stat().st_size if path.exists() else 0

    def lines(self) -> list[str]:
        """Those that are complete since the last call."""
        if not self._path.exists():
            return []
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            content = file.read()
        self._offset += len(content)
        *whole, self._rest = (self._rest + content).split(b"\n")
        return [line.decode(errors="replace") for line in whole]
