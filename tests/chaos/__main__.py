"""`make chaos`: every fault in every layout, as a table on the terminal and in docs/reliability.md.

python -m chaos [WORDS]     only faults with these words; the document is then left alone
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from chaos.matrix import FAULTS, FIVE, Fault, play
from chaos.scene import TESTS, Stage

PAGE = TESTS.parent / "docs" / "reliability.md"
BEGIN, END = "<!-- made by `make chaos`: begin -->\n", "<!-- made by `make chaos`: end -->\n"
THEN = {
    "resumes": "the next start ends bit-equal",
    "finishes": "ends bit-equal",
    "stops": "nothing is lost",
    "refuses": "nothing is changed",
}


def main(words: Sequence[str]) -> int:
    wanted = [fault for fault in FAULTS if all(word in f"{fault.group} {fault.name}" for word in words)]
    failed, cells, began = [], 0, time.monotonic()
    lines: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory(prefix="bloomery-chaos-") as folder:
        stage = Stage(Path(folder))
        for fault in wanted:
            marks = {}
            for layout in fault.layouts:
                cells += 1
                try:
                    seconds = play(fault, stage.scene(layout, *fault.overrides)).seconds
                    marks[layout] = "ok" if seconds is None else f"{seconds:.1f} s"
                except Exception as error:  # whatever it is, the other cells are still worth knowing
                    marks[layout] = "FAILED"
                    failed.append(f"{fault.group}: {fault.name}, {layout}: {error}")
                print(f"{marks[layout]:>8}  {fault.group}: {fault.name}, {layout}", flush=True)
            lines.setdefault(fault.group, []).append(_row(fault, marks))
    minutes = (time.monotonic() - began) / 60
    print(f"\n{len(wanted)} faults, {cells} cells, {len(failed)} failed, {minutes:.0f} minutes")
    print("\n\n".join(failed))
    if not words and not failed:
        _write(
            lines,
            f"{len(wanted)} faults in {cells} cells, all as stated; {minutes:.0f} minutes on {os.cpu_count()} cores.",
        )
    return 1 if failed else 0


def _row(fault: Fault, marks: dict[str, str]) -> str:
    codes = fault.code if isinstance(fault.code, tuple) else (fault.code,)
    code = " or ".join("killed" if code == -9 else str(code) for code in codes)
    others = ", ".join(f"{layout}: {mark}" for layout, mark in marks.items() if layout not in FIVE)
    cells = [marks.get(layout, "-") for layout in FIVE]
    name = fault.name + (f" ({others})" if others else "")
    return f"| {name} | {code} | {THEN[fault.then]} | {' | '.join(cells)} |"


def _write(lines: dict[str, list[str]], summary: str) -> None:
    text = [summary + "\n"]
    for group, rows in lines.items():
        head = ["fault", "exit", "then", *FIVE]
        text += [f"### {group[0].upper()}{group[1:]}\n", f"| {' | '.join(head)} |", "|---" * len(head) + "|", *rows, ""]
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + "\n".join(text) + "\n" + END + rest.partition(END)[2])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
