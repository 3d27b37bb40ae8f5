// Draws every figure of the report from the data in it, with uPlot. Texts reach the page as textContent only.
const color = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const short = v => {
  const [size, unit] = [[1e12, 'T'], [1e9, 'B'], [1e6, 'M'], [1e3, 'k']].find(([s]) => Math.abs(v) >= s) || [1, ''];
  return Number((v / size).toPrecision(4)) + unit;
};
const exact = v => v == null ? '' : Number(v.toPrecision(5)).toLocaleString(undefined, {maximumSignificantDigits: 5});

function draw(figure) {
  const data = JSON.parse(figure.querySelector('script').textContent), box = figure.querySelector('.plot');
  const references = Object.entries(data.references), curves = Object.entries(data.curves);
  // A point that is not a number is null, which uPlot leaves as a gap; a step that a series lacks is undefined.
  const isNumber = p => typeof p[1] === 'number';
  const columns = uPlot.join(
    curves.map(([, points]) => [points.map(p => p[0]), points.map(p => isNumber(p) ? p[1] : null)]));
  const bad = curves.flatMap(([, points]) => points.filter(p => !isNumber(p)).map(p => p[0]));
  const range = (u, low, high) => {
    const known = [low, high, ...references.map(([, y]) => y)].filter(v => v != null);
    [low, high] = known.length ? [Math.min(...known), Math.max(...known)] : [0, 1];
    if (data.from_zero && low >= 0) return [0, high * 1.08 || 1];
    const margin = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
    return [low - margin, high + margin];
  };
  const line = (u, x0, y0, x1, y1, dash) => {
    u.ctx.setLineDash(dash);
    u.ctx.beginPath();
    u.ctx.moveTo(x0, y0);
    u.ctx.lineTo(x1, y1);
    u.ctx.stroke();
  };
  const marks = u => {
    const {left, top, width, height} = u.bbox, px = devicePixelRatio;
    u.ctx.save();
    Object.assign(u.ctx, {strokeStyle: color('--bad'), lineWidth: 2 * px});
    for (const x of bad) {
      const at = u.valToPos(x, 'x', true);
      if (at >= left && at <= left + width) line(u, at, top + height, at, top + height - 12 * px, []);
    }
    const soft = color('--soft');
    Object.assign(u.ctx, {strokeStyle: soft, fillStyle: soft, lineWidth: 1.5 * px, textAlign: 'right',
      textBaseline: 'bottom', font: 12 * px + 'px system-ui, sans-serif'});
    for (const [name, y] of references) {
      const at = u.valToPos(y, 'y', true);
      line(u, left, at, left + width, at, [5 * px, 5 * px]);
      u.ctx.fillText(name + ' ' + short(y), left + width - 6 * px, at - 3 * px);
    }
    u.ctx.restore();
  };
  const axis = {stroke: color('--soft'), grid: {stroke: color('--rule'), width: 1}, ticks: {show: false},
    font: '12px system-ui, sans-serif', values: (u, ticks) => ticks.map(v => v == null ? '' : short(v))};
  const options = {
    width: box.clientWidth, height: figure.classList.contains('wide') ? 330 : 200,
    scales: {x: {time: false}, y: data.log ? {distr: 3} : {range}},
    axes: [{...axis, incrs: [1, 2, 5].flatMap(n => [...Array(13).keys()].map(e => n * 10 ** e)).sort((a, b) => a - b)},
      {...axis, size: 56}],
    series: [{label: data.x, value: (u, v) => v == null ? '' : v.toLocaleString()}, ...curves.map(([name, points], i) => ({
      label: name, stroke: color('--c' + i % 6), width: 1.8, value: (u, v) => exact(v),
      points: {size: 6, ...(points.length < 100 && {show: true})}}))],
    cursor: {points: {size: 7}, focus: {prox: 24}},
    hooks: {draw: [marks]},
  };
  box.replaceChildren();
  const plot = new uPlot(options, columns, box), steps = columns[0];
  box.onkeydown = event => {
    const move = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (!move) return;
    const at = Math.max(0, Math.min(steps.length - 1, (plot.cursor.idx ?? steps.length) + move));
    plot.setCursor({left: plot.valToPos(steps[at], 'x'), top: plot.over.clientHeight / 2});
    event.preventDefault();
  };
  return plot;
}

let plots = [];
const drawAll = () => {
  plots.forEach(plot => plot.destroy());
  plots = [...document.querySelectorAll('figure')].filter(figure => figure.querySelector('script')).map(draw);
};
drawAll();
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', drawAll);
addEventListener('resize', () => plots.forEach(plot =>
  plot.setSize({width: plot.root.parentNode.clientWidth, height: plot.height})));
