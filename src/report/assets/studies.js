// Measurements of several runs: policies (`guards`), failing guards (`guards --chaos-sweep`), `bench`.
"use strict";

/** Fewer than six runs have no interval. */
const hasInterval = (r) => r.low !== null && r.high !== null;
const interval = (r, format) => hasInterval(r) ? `${format(r.median)} (${format(r.low)} to ${format(r.high)})` : `${format(r.median)} (too few runs for an interval)`;
const times = (x) => `${x.toFixed(2)} ×`;

/** The columns of a bench: all rows have the same. */
const launchersOf = (bench) => (bench.rows[0]?.cells ?? []).map((cell) => cell.launcher);

function geometricMean(rows, column) {
  const ratios = rows.map((row) => row.cells[column]).filter((cell) => cell?.ratio && !cell.trouble).map((cell) => cell.ratio.median);
  return ratios.length ? Math.exp(sum(ratios, Math.log) / ratios.length) : null;
}

const heading = (content, ...more) => [
  h("h3", {}, h("code", { class: "command" }, content.command.join(" "))),
  h("p", { class: "how" }, chip(`--tier ${content.tier}`), chip(`--threshold ${exact(content.threshold)}`), chip(`${content.clock} time`), more),
];

// Policies.

const MEASURES = {
  native: { title: "time / native", of: (row) => row.to_native, reference: 1, format: times },
  default: { title: "time / default", of: (row) => row.to_default, reference: 1, format: times },
  deopt: { title: "cost of a deoptimisation", of: (row) => row.deopt_ns, format: duration },
};

function comparison({ name, content }) {
  const place = h("div");
  const usable = Object.entries(MEASURES).filter(([, measure]) => content.policies.some((row) => measure.of(row)));
  const show = (key) => {
    const measure = MEASURES[key];
    const rows = content.policies.map((row) => {
      const r = row.trouble ? null : measure.of(row);
      return { label: row.policy, note: row.trouble ?? (r ? null : "not determined"),
        points: r ? [{ series: 0, ...r, tip: `${row.policy}: ${row.about}\n${measure.title} ${interval(r, measure.format)}` }] : [] };
    });
    replaceChildren(place, intervalPlot({ rows, series: [measure.title], reference: measure.reference, format: key === "deopt" ? duration : plain }));
  };
  if (usable.length) show(usable[0][0]);
  const kinds = [...new Set(content.policies.flatMap((row) => Object.keys(row.counts.kinds)))].sort();
  const table = h("div", { class: "scroll" }, h("table", {},
    h("thead", {}, h("tr", {}, ["policy", "traces", "guards", "checked", "failed", "to the runtime", ...kinds.map((k) => `${k} checked / failed`), "code", "compiling", "time"].map((t, n) => h("th", { class: n ? "number" : null }, t)))),
    h("tbody", {}, content.policies.map((row) => h("tr", {}, [
      h("td", { "data-tip": row.about }, h("b", {}, row.policy), row.trouble ? [" ", chip(row.trouble, "bad")] : null),
      ...[exact(row.counts.traces), exact(row.counts.guards), short(row.counts.executed), short(row.counts.failed), short(row.counts.left),
        ...kinds.map((k) => (row.counts.kinds[k] ? `${short(row.counts.kinds[k].executed)} / ${short(row.counts.kinds[k].failed)}` : "–")),
        `${(row.code_bytes / 1024).toFixed(1)} KiB`, row.compile_ms === null ? "–" : `${row.compile_ms.toFixed(1)} ms`, row.seconds ? seconds(row.seconds.median) : "–",
      ].map((text) => h("td", { class: "number" }, text))])))));
  return h("article", {}, heading(content, content.native === null ? null : chip(`natively ${seconds(content.native)}`), chip(name)),
    usable.length > 1 ? choice("Measure", usable.map(([key, measure]) => [key, measure.title]), usable[0][0], show) : null,
    usable.length ? place : h("p", { class: "note" }, "No policy has times."), table);
}

if (DATA.comparisons.length) {
  section("policies", "Policies", "Where guards stand, and what that costs. Points are medians; lines are intervals of 95 %, which fewer than six runs do not have.", (body) =>
    body.append(...DATA.comparisons.map(comparison)));
}

// Failing guards.

/** The cost of a deoptimisation in nanoseconds, if it is known to be more than nothing. */
const costOf = (sweep) => (sweep.deopt_ns && sweep.deopt_ns.low > 0 ? sweep.deopt_ns : null);

function sweep({ name, content }) {
  const points = content.rates.filter((p) => p.slowdown && p.one_in && !p.trouble).sort((a, b) => b.one_in - a.one_in);
  const troubles = content.rates.filter((p) => p.trouble);
  const x = points.map((p) => 1 / p.one_in);
  const cost = costOf(content);
  const plot = () => uplot(() => ({
    scales: {
      x: { time: false, distr: 3 },
      y: { range: (_, low, high) => {
        const lowest = Math.min(low, ...points.map((p) => p.slowdown.low ?? p.slowdown.median), 1);
        const highest = Math.max(high, ...points.map((p) => p.slowdown.high ?? p.slowdown.median));
        return [Math.max(0, lowest - (highest - lowest) * 0.06), highest + (highest - lowest) * 0.06];
      } },
    },
    axes: [
      { values: (_, at) => at.map((v) => (v && Number.isInteger(Math.round(Math.log10(v) * 1e6) / 1e6) ? `1/${exact(Math.round(1 / v))}` : "")) },
      { values: (_, at) => at.map((v) => `${plain(v)} ×`), size: 60 },
    ],
    series: [
      { label: "probability", value: (_, v) => (v === null ? "–" : `1/${exact(Math.round(1 / v))}`) },
      { label: "slowdown", stroke: colour("--series-1"), width: 2, points: { show: true, size: 8, fill: colour("--series-1") }, value: (_, v, __, n) => (n === null || n === undefined ? "–" : interval(points[n].slowdown, times)) },
    ],
    plugins: [errorBars([points.map((p) => (hasInterval(p.slowdown) ? [p.slowdown.low, p.slowdown.high] : null))])],
  }), [x, points.map((p) => p.slowdown.median)], 300);
  return h("article", {}, heading(content, chip(`policy ${content.policy}`), chip(name)),
    h("div", { class: "cards" },
      cost ? card(duration(cost.value), "for one deoptimisation", `${duration(cost.low)} to ${duration(cost.high)}`) : card("–", "a deoptimisation: not determined"),
      cost && content.deopt_cycles ? card(short(Math.round(content.deopt_cycles.value)), "cycles for one deoptimisation") : null,
      content.line ? card(content.line.r_squared.toFixed(3), "R² of the line through all runs", `${content.line.points} runs`) : null,
      content.linked.seconds && content.unlinked.seconds ? card(times(content.unlinked.seconds.median / content.linked.seconds.median), "without links between fragments", "before any guard is made to fail") : null),
    points.length ? [h("p", { class: "axis" }, "slowdown against a run without forced failures, by the probability of a failure"), plot()] : h("p", { class: "note" }, "No rate has times."),
    troubles.map((p) => h("p", {}, chip(`1/${exact(p.one_in)}: ${p.trouble}`, "bad"))));
}

if (DATA.sweeps.length) {
  section("chaos", "Failing guards", "Each guard was made to fail with the probability on the axis.", (body) => body.append(...DATA.sweeps.map(sweep)));
}

// Bench.

function bench({ name, content }) {
  const measured = content.rows.filter((row) => !row.skipped);
  const columns = launchersOf(content);
  const suites = [...new Set(content.rows.map((row) => row.suite).filter(Boolean))];
  const { clock = "", version = "" } = content.rows[0] ?? {};
  const means = columns.map((_, c) => geometricMean(measured, c));
  const pointOf = (row, c) => {
    const cell = row.cells[c];
    if (!cell?.ratio || cell.trouble) return null;
    const memory = cell.memory ? `\n${(cell.memory / 2 ** 20).toFixed(0)} MiB` : "";
    return { series: c, ...cell.ratio, tip: `${row.name}, ${columns[c]}: ${interval(cell.ratio, times)} native${memory}` };
  };
  const rows = measured.map((row) => ({
    label: row.name,
    note: [row.native.trouble && `native ${row.native.trouble}`, ...columns.map((column, c) => row.cells[c]?.trouble && `${column} ${row.cells[c].trouble}`)].filter(Boolean).join(", ") || null,
    points: columns.map((_, c) => pointOf(row, c)).filter(Boolean),
  }));
  if (measured.length > 1 && means.some((mean) => mean)) {
    rows.push({ label: "geometric mean", points: means.map((mean, c) => mean && { series: c, median: mean, low: mean, high: mean, tip: `${columns[c]}: ${times(mean)} native` }).filter(Boolean) });
  }
  const spread = rows.flatMap((row) => row.points.map((p) => p.median));
  const logarithmic = Math.max(...spread) / Math.min(...spread) > 8;
  const skipped = content.rows.filter((row) => row.skipped);
  return h("article", {},
    h("h3", {}, suites.join(", ") || name),
    h("p", { class: "how" }, chip(`${clock} time`), chip(plural(measured.length, "workload")), chip(`dynasour ${version}`), chip(name)),
    spread.length ? intervalPlot({ rows, series: columns, reference: 1, unit: " ×", logarithmic }) : h("p", { class: "note" }, "No workload has times."),
    skipped.length ? h("details", {}, h("summary", {}, `${plural(skipped.length, "workload")} not measured`), h("ul", {}, skipped.map((row) => h("li", {}, h("code", {}, row.name), `: ${row.skipped}`)))) : null);
}

if (DATA.benches.length) {
  section("bench", "Bench", "Time of each workload relative to native. Lines are intervals of 95 %, which fewer than six runs do not have.", (body) => body.append(...DATA.benches.map(bench)));
}
