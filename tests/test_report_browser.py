"""The report as people see it: opened in a real Chromium, which draws, zooms, and has nothing to complain about."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bloomery.monitor.gather import Gathered
from bloomery.monitor.report import RunOf, report_html, write_report
from monitor_samples import step_record, validation_record
from test_monitor_report import make_run

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: `apt-get install chromium`")

PROBE = """
const drawn = plot => {  // how many pixels of the canvas are not empty
  const canvas = plot.ctx.canvas, data = plot.ctx.getImageData(0, 0, canvas.width, canvas.height).data;
  let count = 0;
  for (let i = 3; i < data.length; i += 4) count += data[i] > 0;
  return count;
};
const seen = {charts: plots.length, pixels: plots.map(drawn), milliseconds: performance.now()};
const ends = () => plots.map(plot => [plot.scales.x.min, plot.scales.x.max]);
const press = (plot, kind, part) => {
  const box = plot.over.getBoundingClientRect(), to = kind === 'mouseup' ? document : plot.over;
  to.dispatchEvent(new MouseEvent(kind, {clientX: box.left + part * box.width, clientY: box.top + 40, button: 0,
    movementX: 9, buttons: 1, bubbles: true}));
};
seen.before = ends();
press(plots[0], 'mousemove', 0.25);
press(plots[0], 'mousedown', 0.25);
press(plots[0], 'mousemove', 0.5);
press(plots[0], 'mouseup', 0.5);
setTimeout(async () => {
  seen.zoomed = ends();
  seen.legend = plots[0].root.querySelector('.u-legend').textContent;
  for (const button of document.querySelectorAll('.bar button[data-x]')) {
    button.click();
    await new Promise(done => setTimeout(done, 50));
    seen[button.dataset.x] = ends();
  }
  document.querySelector('[data-do=theme]').click();
  seen.theme = getComputedStyle(document.body).backgroundColor;
  seen.width = [document.body.scrollWidth, document.body.clientWidth];
  document.title = JSON.stringify(seen);
}, 300);
"""


def opened(report: Path, *, width: int = 1200) -> dict[str, Any]:
    """What a script in a copy of the page saw. Anything on its console fails."""
    copy = report.with_name("copy.html")
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", report.read_text())
    narrow = f"<style>body {{ width: {width}px }}</style>"  # no window of Chromium is narrower than 500
    copy.write_text(page.replace("</head>", f"{narrow}</head>").replace("</body>", f"<script>{PROBE}</script></body>"))
    (title,) = re.findall("<title>(.*?)</title>", chromium(copy, width), re.S)
    return dict(
        json.loads(title.replace("&quot;", '"').replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    )


def chromium(page: Path, width: int = 1200) -> str:
    profile = page.with_name(f"profile-{page.stem}")
    quiet = (
        "--headless --no-sandbox --disable-gpu --disable-background-networking --no-first-run --enable-logging=stderr"
    )
    command = [CHROMIUM, *quiet.split(), f"--user-data-dir={profile}", f"--window-size={width},1500", "--dump-dom"]
    done = subprocess.run(
        [str(word) for word in [*command, "--virtual-time-budget=4000", page.as_uri()]],
        capture_output=True, text=True, timeout=120, env={**os.environ, "HOME": str(profile)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr
    return done.stdout


def test_the_page_draws_and_zooms_on_every_axis_and_a_script_in_a_name_stays_text(tmp_path: Path) -> None:
    nasty = "<script>document.title='taken'</script>"
    steps = range(10, 410, 10)
    records = [step_record(n, loss=5 - n / 100, lr=n / 1e6, grad_norm=1 + n % 3, mfu=0.4 + n / 1e4) for n in steps]
    left = [step_record(n, loss=9.0) for n in range(210, 260, 10)]
    events = (
        {"kind": "start", "recipe": nasty},
        {"kind": "spike", "step": 100, "time": 1_700_000_100.0},
        {"kind": "start", "job": 2, "step": 200, "time": 1_700_000_300.0},
    )
    later = [step_record(n, loss=5 - n / 100, job=2, time=1_700_000_500.0 + n) for n in steps if n > 200]
    groups = [validation_record(200, group=nasty), validation_record(400, group=nasty, job=2)]
    run = make_run(tmp_path / "run", *records[:20], groups[0], *left, *later, groups[1], events=events)
    report = write_report(run)
    chromium(report)  # as it is, with its policy against scripts of others
    seen = opened(report)
    assert seen["charts"] >= 4
    assert all(count > 500 for count in seen["pixels"])
    low, high = seen["before"][0]
    for start, end in seen["zoomed"]:
        assert start == pytest.approx(low + (high - low) / 4, rel=0.05), "all charts show the stretch that was drawn"
        assert end == pytest.approx(low + (high - low) / 2, rel=0.05)
    assert nasty in seen["legend"]
    assert seen["step"][0] == [10, 400]
    assert seen["consumed_tokens"][0] == [10 * 512, 400 * 512]
    assert seen["time"][0] == [0.0, pytest.approx(890 / 3600, rel=1e-6)]
    assert seen["consumed_gigaflops"][0] == [30e9, 1200e9]
    assert seen["theme"] == "rgb(17, 20, 25)"


def test_a_phone_shows_several_runs_without_scrolling_sideways(tmp_path: Path) -> None:
    for name, speed in (("a", 0.01), ("b", 0.02)):
        events = ({"kind": "start", "recipe": f"run-{name}"},)
        records = [step_record(n, loss=5 - n * speed, lr=n * speed) for n in range(1, 60)]
        make_run(tmp_path / name, *records, events=events)
    seen = opened(write_report(tmp_path / "a", tmp_path / "b", output=tmp_path / "both.html"), width=390)
    assert "run-a" in seen["legend"]
    assert "run-b" in seen["legend"]
    assert seen["width"] == [390, 390]


def test_a_long_run_stays_small_and_is_drawn_in_seconds(tmp_path: Path) -> None:
    """What is drawn is the same for a million steps, which `benchmarks/load.py` gathers."""
    rng, noise = np.random.default_rng(0), {f"node-{i}/power watts": 300.0 for i in range(8)}
    found, records = Gathered(), []
    for step, each in enumerate(rng.normal(size=20_000).tolist(), 1):
        losses = {"lm loss": 3 + each / 10 + 8 / step}
        record = step_record(step, losses=losses, grad_norm=1 + each**2, source_losses={**noise, "node-0": each})
        records.append(vars(record))
    found.take(records)
    report = tmp_path / "report.html"
    report.write_text(report_html([RunOf(tmp_path, found, "long")]))
    assert report.stat().st_size < 2_000_000
    seen = opened(report)
    assert seen["milliseconds"] < 3_000
    assert min(seen["pixels"]) > 500
