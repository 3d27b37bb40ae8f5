// Draws every figure of the page from the data in it, with uPlot. Texts reach the page as textContent only.
const root = document.documentElement, probe = document.body.appendChild(document.createElement('i'));
const color = (name, alpha) => {
  probe.style.color = `var(${name})`;
  const found = getComputedStyle(probe).color;
  return alpha ? found.replace('rgb(', 'rgba(').replace(')', `, ${alpha})`) : found;
};
const short = v => {
  const [size, unit] = [[1e18, 'E'], [1e15, 'P'], [1e12, 'T'], [1e9, 'B'], [1e6, 'M'], [1e3, 'k']]
    .find(([s]) => Math.abs(v) >= s) || [1, ''];
  return Number((v / size).toPrecision(4)) + unit;
};
const exact = v => v == null ? '' : Number(v.toPrecision(5)).toLocaleString(undefined, {maximumSignificantDigits: 5});
const run = JSON.parse(document.getElementById('run')?.textContent || '{"axes": {}, "marks": []}');
const view = {x: 'step', log: false, raw: true};
const TITLES = {step: 'step', consumed_tokens: 'tokens', time: 'hours', consumed_gigaflops: 'FLOPs'};
const SCALE = {step: 1, consumed_tokens: 1, time: 1 / 3600, consumed_gigaflops: 1e9};


// Where a step is on the chosen axis: straight lines between the steps that are known.
const begin = key => {  // time is counted from the start of each run; a branch shares that of its run
  const own = run.axes[key.split('/')[0]]?.time;
  return own?.length ? Math.min(own[0], run.axes[key].time[0]) : 0;
};
function place(key) {
  const axis = run.axes[key];
  if (!axis?.step?.length || view.x === 'step') return step => step;
  const from = axis.step, to = axis[view.x], base = view.x === 'time' ? begin(key) : 0, last = from.length - 1;
  return step => {
    let low = 0, high = last;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      from[middle] <= step ? low = middle : high = middle;
    }
    const part = from[high] > from[low] ? Math.min(1, Math.max(0, (step - from[low]) / (from[high] - from[low]))) : 0;
    return (to[low] + part * (to[high] - to[low]) - base) * SCALE[view.x];
  };
}

function draw(figure) {
  const data = JSON.parse(figure.querySelector('script').textContent), box = figure.querySelector('.plot');
  const references = Object.entries(data.references), wide = figure.classList.contains('wide');
  const chosen = data.curves.some(curve => curve.axis), xTitle = chosen ? TITLES[view.x] : data.x;
  const curves = data.curves.filter(curve => view.raw || curve.style !== 'raw').map(curve => {
    const at = chosen ? place(curve.axis) : x => x;
    return {...curve, points: curve.points.map(([x, y]) => [at(x), y])};
  });
  // A point that is not a number is null, which uPlot leaves as a gap; a step that a series lacks is undefined.
  const isNumber = p => typeof p[1] === 'number';
  const columns = uPlot.join(
    curves.map(({points}) => [points.map(p => p[0]), points.map(p => isNumber(p) ? p[1] : null)]));
  const bad = curves.flatMap(({points}) => points.filter(p => !isNumber(p)).map(p => p[0]));
  const log = (data.log !== view.log) && curves.every(({points}) => points.every(p => !isNumber(p) || p[1] > 0));
  const at = place('0'), toMark = m => view.x === 'time' ? (m.time - begin('0')) / 3600 : at(m.step);
  const marks = wide && run.axes['0']?.step ? run.marks.map(m => ({...m, x: toMark(m)})) : [];
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
  const decorate = u => {
    const {left, top, width, height} = u.bbox, px = devicePixelRatio, inside = x => x >= left && x <= left + width;
    u.ctx.save();
    for (const m of marks) {
      const x = u.valToPos(m.x, 'x', true);
      Object.assign(u.ctx, {strokeStyle: color(m.bad ? '--bad' : '--soft', 0.6), lineWidth: px});
      if (inside(x)) line(u, x, top, x, top + height, [2 * px, 4 * px]);
    }
    Object.assign(u.ctx, {strokeStyle: color('--bad'), lineWidth: 2 * px});
    for (const value of bad) {
      const x = u.valToPos(value, 'x', true);
      if (inside(x)) line(u, x, top + height, x, top + height - 12 * px, []);
    }
    const soft = color('--soft');
    Object.assign(u.ctx, {strokeStyle: soft, fillStyle: soft, lineWidth: 1.5 * px, textAlign: 'right',
      textBaseline: 'bottom', font: 12 * px + 'px system-ui, sans-serif'});
    for (const [name, y] of references) {
      const y0 = u.valToPos(y, 'y', true);
      line(u, left, y0, left + width, y0, [5 * px, 5 * px]);
      u.ctx.fillText(name + ' ' + short(y), left + width - 6 * px, y0 - 3 * px);
    }
    u.ctx.restore();
  };
  const note = document.createElement('p');
  const show = u => {
    const near = marks.filter(m => Math.abs(u.valToPos(m.x, 'x') - u.cursor.left) < 7).slice(-3);
    note.textContent = near.map(m => `step ${m.step.toLocaleString()} · ${m.text}`).join(' | ') ||
      (marks.length ? 'dashed lines: events; point at one to read it' : '');
  };
  const axis = {stroke: color('--soft'), grid: {stroke: color('--rule'), width: 1}, ticks: {show: false},
    font: '12px system-ui, sans-serif', values: (u, ticks) => ticks.map(v => v == null ? '' : short(v))};
  const whole = xTitle === 'step' && {incrs: [1, 2, 5].flatMap(n => [...Array(13).keys()].map(e => n * 10 ** e))
    .sort((a, b) => a - b)};
  const stroke = ({color: i, style}) => style === 'gone' ? color('--soft', 0.7) : color('--c' + i % 6, style && 0.3);
  const options = {
    width: box.clientWidth, height: wide ? 330 : 200,
    scales: {x: {time: false}, y: log ? {distr: 3} : {range}},
    axes: [{...axis, ...whole}, {...axis, size: 56}],
    series: [{label: xTitle, value: (u, v) => exact(v)}, ...curves.map(curve => ({
      label: curve.name, stroke: stroke(curve), width: curve.style ? 1.2 : 1.8, value: (u, v) => exact(v), spanGaps: false,
      points: {size: 6, ...(curve.style ? {show: false} : curve.points.length < 100 && {show: true})}}))],
    cursor: {points: {size: 7}, focus: {prox: 24}, ...(chosen && {sync: {key: 'run', setSeries: false}})},
    hooks: {draw: [decorate], setCursor: marks.length ? [show] : []},
  };
  box.replaceChildren();
  const plot = new uPlot(options, columns, box), steps = columns[0];
  if (marks.length) {
    box.append(note);
    show(plot);
  }
  box.onkeydown = event => {
    const move = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (!move) return;
    const to = Math.max(0, Math.min(steps.length - 1, (plot.cursor.idx ?? steps.length) + move));
    plot.setCursor({left: plot.valToPos(steps[to], 'x'), top: plot.over.clientHeight / 2});
    event.preventDefault();
  };
  return plot;
}

let plots = [];
const drawAll = () => {
  plots.forEach(plot => plot.destroy());
  plots = [...document.querySelectorAll('figure')]
    .filter(figure => figure.querySelector('script') && figure.querySelector('.plot').clientWidth).map(draw);
  for (const button of document.querySelectorAll('.bar button'))
    button.classList.toggle('on', button.dataset.x ? view.x === button.dataset.x : !!view[button.dataset.do]);
};
const isDark = () => matchMedia('(prefers-color-scheme: dark)').matches;
const does = {
  theme: () => root.style.colorScheme = (root.style.colorScheme || (isDark() ? 'dark' : 'light')) === 'dark' ? 'light' : 'dark',
  log: () => view.log = !view.log,
  raw: () => view.raw = !view.raw,
};
for (const button of document.querySelectorAll('.bar button'))
  button.onclick = () => {
    button.dataset.x ? view.x = button.dataset.x : does[button.dataset.do]?.();
    drawAll();
  };
for (const details of document.querySelectorAll('details')) details.ontoggle = drawAll;
drawAll();
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', drawAll);
addEventListener('resize', () => plots.forEach(plot =>
  plot.setSize({width: plot.root.parentNode.clientWidth, height: plot.height})));
