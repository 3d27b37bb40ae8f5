"""`make chaos`: every fault in every layout, as a table on the terminal and in docs/reliability.md.

python -m chaos [WORDS]     only faults with these words; the document is then left alone
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

from chaos.cells import Cell, played, set_stage
from chaos.matrix import FAULTS, FIVE, Fault
from chaos.scene import TESTS

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
    cells = [(FAULTS.index(fault), layout) for fault in wanted for layout in fault.layouts]
    marks: dict[Cell, str] = {}
    failed: list[str] = []
    began = time.monotonic()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup no training would answer it
    jobs = max(1, (os.cpu_count() or 1) // 2)
    with tempfile.TemporaryDirectory(prefix="bloomery-chaos-") as folder:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(jobs + 1, mp_context=context, initializer=set_stage, initargs=(folder,)) as pool:
            for cell, (mark, error) in zip(cells, pool.map(played, cells), strict=True):
                marks[cell] = mark
                fault = FAULTS[cell[0]]
                print(f"{mark:>8}  {fault.group}: {fault.name}, {cell[1]}", flush=True)
                failed += [f"{fault.group}: {fault.name}, {cell[1]}: {error}"] if error else []
    minutes = (time.monotonic() - began) / 60
    print(f"\n{len(wanted)} faults, {len(cells)} cells, {len(failed)} failed, {minutes:.0f} minutes")
    print("\n\n".join(failed))
    if not words and not failed:
        lines: dict[str, list[str]] = {}
        for fault in wanted:
            mine = {layout: marks[FAULTS.index(fault), layout] for layout in fault.layouts}
            lines.setdefault(fault.group, []).append(_row(fault, mine))
        cores = f"{minutes:.0f} minutes on {os.cpu_count()} cores"
        _write(lines, f"{len(wanted)} faults in {len(cells)} cells, all as stated; {cores}.")
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
