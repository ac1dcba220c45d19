// Plots: points with intervals (SVG of our own), and plots with a continuous axis (uPlot).
"use strict";

/** Functions that draw again after a change of the theme or of the width. */
const redraws = new Set();
const redrawAll = () => redraws.forEach((redraw) => redraw());

/** Calls `draw(width)` now, and whenever the width of the container or the theme changes. */
function responsive(container, draw) {
  let last = 0;
  const redraw = (force) => {
    const width = container.clientWidth;
    if (width > 0 && (force || Math.abs(width - last) > 4)) {
      last = width;
      draw(width);
    }
  };
  // In the next frame: drawing changes the size again, which the observer would complain about.
  new ResizeObserver(() => requestAnimationFrame(() => redraw(false))).observe(container);
  redraws.add(() => redraw(true));
}

/** Round numbers that divide an axis from `low` to `high`. */
function ticks(low, high, most) {
  const rough = (high - low) / most;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = unit * [1, 2, 5, 10].find((m) => m * unit >= rough);
  const out = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-6; at += step) out.push(at);
  return out;
}

const plain = (n) => (n === 0 ? "0" : Number(n.toPrecision(3)).toString());

/**
 * A plot with a row for each label, and points with intervals in it.
 *
 * `rows`: `[{ label, points: [{ series, median, low, high, tip }], note }]`. `series`: their names.
 * `reference`: where a line stands, such as 1 for ratios.
 */
function intervalPlot({ rows, series, reference, unit = "", logarithmic = false, format = plain }) {
  const container = h("div", { class: "plot" });
  const points = rows.flatMap((row) => row.points);
  const values = points.flatMap((p) => [p.low, p.high, p.median]).filter(Number.isFinite);
  if (reference !== undefined) values.push(reference);
  let [low, high] = [Math.min(...values), Math.max(...values)];
  if (!logarithmic) low = Math.min(low, reference ?? 0);
  const margin = logarithmic ? 0 : (high - low || Math.abs(high) || 1) * 0.05;
  high += margin;
  low = Math.max(0, low - margin);
  if (logarithmic) [low, high] = [low / 1.15, high * 1.15];
  const scale = logarithmic ? Math.log : (x) => x;
  const longest = Math.max(...rows.map((row) => row.label.length));
  responsive(container, (width) => {
    const left = Math.min(longest * 7.2 + 14, width * 0.34);
    const right = 18;
    const each = 13;
    const heights = rows.map((row) => Math.max(24, row.points.length * each + 10));
    const total = sum(heights, (height) => height);
    const height = total + 30;
    const x = (v) => left + ((scale(v) - scale(low)) / (scale(high) - scale(low) || 1)) * (width - left - right);
    const drawing = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img",
      "aria-label": `${rows.length} rows: ${series.join(", ")}` });
    const marks = logarithmic ? logTicks(low, high) : ticks(low, high, Math.max(3, Math.floor((width - left) / 90)));
    for (const at of marks) {
      drawing.append(
        svg("line", { class: "grid", x1: x(at), x2: x(at), y1: 0, y2: total }),
        svg("text", { class: "tick", x: x(at), y: total + 18, "text-anchor": "middle" }, format(at) + unit));
    }
    if (reference !== undefined) {
      drawing.append(svg("line", { class: "reference", x1: x(reference), x2: x(reference), y1: 0, y2: total }));
    }
    let top = 0;
    rows.forEach((row, r) => {
      const middle = top + heights[r] / 2;
      if (r % 2 === 1) drawing.prepend(svg("rect", { class: "stripe", x: 0, y: top, width, height: heights[r] }));
      const room = Math.ceil((left - 14) / 7.2);
      const label = row.label.length > room ? `${row.label.slice(0, room - 1)}…` : row.label;
      drawing.append(svg("text", { class: "label", x: left - 10, y: middle + 4, "text-anchor": "end", "data-tip": row.label }, label));
      if (row.note) drawing.append(svg("text", { class: "trouble", x: left + 8, y: middle + 4 }, row.note));
      row.points.forEach((point, p) => {
        const y = middle + (p - (row.points.length - 1) / 2) * each;
        const group = svg("g", { class: "interval", "data-tip": point.tip, style: { "--colour": `var(${seriesVariable(point.series)})` } });
        if (Number.isFinite(point.low) && Number.isFinite(point.high)) {
          group.append(
            svg("line", { x1: x(point.low), x2: x(point.high), y1: y, y2: y }),
            svg("line", { x1: x(point.low), x2: x(point.low), y1: y - 4, y2: y + 4 }),
            svg("line", { x1: x(point.high), x2: x(point.high), y1: y - 4, y2: y + 4 }));
        }
        group.append(
          svg("circle", { cx: x(point.median), cy: y, r: 4 }),
          svg("rect", { class: "target", x: x(Math.min(point.low ?? point.median, point.median)) - 8, y: y - 7, height: 14,
            width: Math.max(16, x(Math.max(point.high ?? point.median, point.median)) - x(Math.min(point.low ?? point.median, point.median)) + 16) }));
        drawing.append(group);
      });
      top += heights[r];
    });
    replaceChildren(container, drawing);
  });
  return series.length > 1 ? h("div", {}, legend(series), container) : container;
}

/** Ones, twos and fives of each power of ten. */
function logTicks(low, high) {
  const out = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const m of [1, 2, 5]) {
      const at = m * 10 ** power;
      if (at >= low && at <= high) out.push(at);
    }
  }
  return out;
}

const legend = (names, variable = seriesVariable) =>
  h("ul", { class: "legend" }, names.map((name, n) =>
    h("li", {}, h("i", { style: { background: `var(${variable(n)})` } }), name)));

/** An uPlot that is drawn again when the theme or the width changes. */
function uplot(options, data, height) {
  const container = h("div", { class: "plot" });
  let shown = null;
  responsive(container, (width) => {
    shown?.destroy();
    const axis = { stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1 },
      font: "12px system-ui, sans-serif" };
    const made = options();
    shown = new uPlot({ ...made, width, height, axes: made.axes.map((own) => ({ ...axis, ...own })) }, data, container);
  });
  return container;
}

/** A plugin of uPlot that draws intervals: `intervals[series][point]` is `[low, high]` or null. */
function errorBars(intervals) {
  const draw = (u) => {
    const context = u.ctx;
    context.save();
    context.lineWidth = 1.5 * devicePixelRatio;
    intervals.forEach((bars, s) => {
      const series = u.series[s + 1];
      context.strokeStyle = typeof series.stroke === "function" ? series.stroke(u, s + 1) : series.stroke;
      bars.forEach((bar, n) => {
        if (!bar) return;
        const x = u.valToPos(u.data[0][n], "x", true);
        const [low, high] = bar.map((value) => u.valToPos(value, "y", true));
        const cap = 4 * devicePixelRatio;
        context.beginPath();
        context.moveTo(x, low);
        context.lineTo(x, high);
        context.moveTo(x - cap, low);
        context.lineTo(x + cap, low);
        context.moveTo(x - cap, high);
        context.lineTo(x + cap, high);
        context.stroke();
      });
    });
    context.restore();
  };
  return { hooks: { draw } };
}

/**
 * Areas on top of each other. `x`: where; `layers`: `[{ name, values, variable }]`, the lowest first.
 */
function stackedPlot({ x, layers, xFormat, yFormat, height = 240 }) {
  // uPlot draws each series from the axis, so the sum of all comes first.
  const sums = [];
  for (const layer of layers) {
    const below = sums.at(-1);
    sums.push(layer.values.map((value, n) => value + (below ? below[n] : 0)));
  }
  const order = layers.map((_, n) => n).reverse();
  const options = () => ({
    scales: { x: { time: false }, y: { range: (_, __, most) => [0, most || 1] } },
    axes: [
      { values: (_, at) => at.map(xFormat) },
      { values: (_, at) => at.map(yFormat), size: 56 },
    ],
    series: [
      { label: "at", value: (_, at) => (at === null ? "–" : xFormat(at)) },
      ...order.map((n) => ({
        label: layers[n].name,
        stroke: colour(layers[n].variable),
        fill: colour(layers[n].variable),
        width: 0,
        points: { show: false },
        paths: uPlot.paths.stepped({ align: 1 }),
        value: (_, __, ___, at) => (at === null || at === undefined ? "–" : yFormat(layers[n].values[at])),
      })),
    ],
    cursor: { points: { show: false }, drag: { x: true, y: false } },
  });
  return uplot(options, [x, ...order.map((n) => sums[n])], height);
}
