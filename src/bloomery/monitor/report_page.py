"""The page around the report's charts: its style and its few lines of script. Nothing is fetched from a network."""

from __future__ import annotations

from html import escape

STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #ffffff; --ink: #1b1f27; --soft: #626b7a; --rule: #e3e6ec;
  --bad: #d92d20; --c0: #2563c9; --c1: #d9730d; --c2: #0f8a6d; --c3: #8b46d6; --c4: #0e8fb0; --c5: #7a6a00; }
@media (prefers-color-scheme: dark) { :root { --page: #111419; --card: #1a1e26; --ink: #e8ebf0; --soft: #9aa4b5;
  --rule: #2c323d; --bad: #ff6b5e; --c0: #6ea8fe; --c1: #f6a560; --c2: #4cd3ac; --c3: #c49bff; --c4: #5fd0ea;
  --c5: #d8c75a; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; font-variant-numeric: tabular-nums; }
main { max-width: 1180px; margin: 0 auto; padding: 28px 16px 48px; }
h1 { font-size: 26px; line-height: 1.2; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 32px 0 10px; }
.lead { color: var(--soft); margin: 0 0 20px; overflow-wrap: anywhere; }
.bad { color: var(--bad); }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(158px, 1fr)); gap: 10px; margin: 0 0 16px; }
.facts div, figure, .table { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; }
.facts div { padding: 10px 14px; }
dt { color: var(--soft); font-size: 13px; }
dd { margin: 0; font-size: 20px; font-weight: 600; overflow-wrap: anywhere; line-height: 1.3; }
dd small { display: block; font-size: 12.5px; font-weight: 400; color: var(--soft); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); gap: 14px; }
figure { margin: 0; padding: 14px 16px 10px; min-width: 0; }
figure.wide { grid-column: 1 / -1; }
figcaption { font-weight: 600; margin-bottom: 6px; }
.unit { color: var(--soft); font-weight: 400; font-size: 13px; }
.empty { color: var(--soft); margin: 24px 0; text-align: center; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; font-size: 13px; color: var(--soft); margin-bottom: 8px; }
.legend i { display: inline-block; width: 14px; height: 3px; border-radius: 2px; margin-right: 6px;
  vertical-align: middle; background: currentColor; }
.frame { display: grid; grid-template: 190px 24px / 48px 1fr; margin-top: 8px; }
.wide .frame { grid-template-rows: 330px 24px; }
.y-labels, .x-labels, .plot { position: relative; min-width: 0; }
.x-name { grid-row: 2; font-size: 12px; color: var(--soft); padding: 5px 8px 0 0; text-align: right; }
.x-labels { grid-row: 2; grid-column: 2; }
.y-labels span, .x-labels span, .reference-label { position: absolute; font-size: 12px; color: var(--soft);
  white-space: nowrap; }
.y-labels span { right: 8px; transform: translateY(-50%); }
.x-labels span { top: 5px; transform: translateX(-50%); }
.plot { border-bottom: 1px solid var(--soft); touch-action: pan-y; outline-offset: 4px; }
.reference-label { right: 4px; transform: translateY(calc(-100% - 3px)); padding: 0 4px; }
svg { display: block; width: 100%; height: 100%; overflow: visible; }
path { fill: none; vector-effect: non-scaling-stroke; stroke-linejoin: round; stroke-linecap: round; }
.grid { stroke: var(--rule); }
.reference { stroke: var(--soft); stroke-dasharray: 5 5; stroke-width: 1.5; stroke-linecap: butt; }
.line { stroke: currentColor; stroke-width: 1.8; }
.dots { stroke: currentColor; stroke-width: 5.5; }
.nan { stroke: var(--bad); stroke-width: 2; }
.c0 { color: var(--c0); } .c1 { color: var(--c1); } .c2 { color: var(--c2); }
.c3 { color: var(--c3); } .c4 { color: var(--c4); } .c5 { color: var(--c5); }
.cursor { position: absolute; top: 0; bottom: 0; width: 1px; background: var(--soft); display: none;
  pointer-events: none; }
.tip { position: absolute; top: 6px; display: none; pointer-events: none; background: var(--card); z-index: 1;
  border: 1px solid var(--rule); border-radius: 8px; padding: 6px 10px; font-size: 12.5px; white-space: nowrap;
  box-shadow: 0 4px 14px rgb(0 0 0 / .16); }
.tip b { display: block; }
.tip i { display: inline-block; width: 8px; height: 8px; border-radius: 50%; margin-right: 6px;
  background: currentColor; }
.table { overflow: auto; max-height: 520px; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
th, td { text-align: left; padding: 7px 14px; border-bottom: 1px solid var(--rule); vertical-align: top; }
tr:last-child td { border-bottom: 0; }
th { color: var(--soft); font-weight: 500; position: sticky; top: 0; background: var(--card); }
td.number, th.number { text-align: right; white-space: nowrap; }
td.when { white-space: nowrap; color: var(--soft); }
td.facts-cell { overflow-wrap: anywhere; min-width: 180px; }
.bars { display: grid; grid-template-columns: auto 1fr auto; gap: 6px 12px; align-items: center; font-size: 13.5px; }
.bars .bar { display: flex; height: 18px; border-radius: 4px; overflow: hidden; }
.bars .bar i { display: block; background: currentColor; min-width: 1px; }
footer { color: var(--soft); font-size: 13px; margin-top: 28px; }
"""

SCRIPT = """
for (const figure of document.querySelectorAll('figure')) {
  const source = figure.querySelector('script'), plot = figure.querySelector('.plot');
  if (!source || !plot) continue;
  const data = JSON.parse(source.textContent);
  const cursor = plot.querySelector('.cursor'), tip = plot.querySelector('.tip');
  const span = data.high - data.low;
  const steps = [...new Set(data.series.flatMap(s => s.points.map(p => p[0])))].sort((a, b) => a - b);
  let at = steps.length - 1;
  const nearest = (points, x, key) => points.reduce((a, b) => Math.abs(key(b) - x) < Math.abs(key(a) - x) ? b : a);
  const show = step => {
    const left = 100 * (step - data.low) / span;
    cursor.style.left = left + '%';
    tip.replaceChildren();
    const title = document.createElement('b');
    title.textContent = data.x + ' ' + step.toLocaleString();
    tip.append(title);
    data.series.forEach((series, index) => {
      const point = nearest(series.points, step, p => p[0]);
      if (Math.abs(point[0] - step) > span / 100) return;
      const row = document.createElement('div'), dot = document.createElement('i');
      dot.className = 'c' + index % 6;
      const value = typeof point[1] === 'number' ? Number(point[1].toPrecision(5)).toLocaleString(undefined,
        {maximumSignificantDigits: 5}) : point[1];
      row.append(dot, series.name + '  ' + value);
      tip.append(row);
    });
    tip.style.left = left > 55 ? 'auto' : 'calc(' + left + '% + 12px)';
    tip.style.right = left > 55 ? 'calc(' + (100 - left) + '% + 12px)' : 'auto';
    cursor.style.display = tip.style.display = 'block';
  };
  const hide = () => { cursor.style.display = tip.style.display = 'none'; };
  plot.addEventListener('pointermove', event => {
    const box = plot.getBoundingClientRect();
    const step = nearest(steps, data.low + span * (event.clientX - box.left) / box.width, x => x);
    at = steps.indexOf(step);
    show(step);
  });
  plot.addEventListener('pointerleave', hide);
  plot.addEventListener('blur', hide);
  plot.addEventListener('keydown', event => {
    if (event.key !== 'ArrowLeft' && event.key !== 'ArrowRight') return;
    at = Math.max(0, Math.min(steps.length - 1, at + (event.key === 'ArrowLeft' ? -1 : 1)));
    show(steps[at]);
    event.preventDefault();
  });
}
"""


def page(title: str, body: str) -> str:
    """`body` is HTML; `title` is text."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{escape(title)}</title><link rel="icon" href="data:,"><style>{STYLE}</style></head>\n'
        f"<body><main>{body}</main><script>{SCRIPT}</script></body></html>\n"
    )
