// The summary, the time over the run, the flame view of regions, and the heads.
"use strict";

// The guards of a run that the page knows in detail.
function guardsOf(run) {
  return versionsOf(run).flatMap(({ version, index }) =>
    (version.body?.guards ?? []).map((guard) => ({ guard, version, index })));
}

const leftFor = (went, what) => sum(went.filter((w) => w.to === what), (w) => w.times);

function ending(run) {
  if (run.signal !== null) return `was killed by signal ${run.signal}`;
  return `ended with status ${run.status}`;
}

const card = (value, label, tipText) =>
  h("div", { class: "card", "data-tip": tipText ?? null }, h("strong", {}, value), h("span", {}, label));

function summaryOfRun(run) {
  const versions = versionsOf(run).map(({ version }) => version);
  const executed = sum(versions, (v) => v.executed);
  const failed = sum(versions, (v) => v.failed);
  const compiling = sum(versions, (v) => v.compile_ns.record + v.compile_ns.build + v.compile_ns.optimise + v.compile_ns.emit);
  const bytes = sum(versions, (v) => v.hot_bytes + v.cold_bytes);
  const hottest = run.regions[0];
  const text = hottest
    ? [
        `It ${ending(run)}. Traces executed `, h("b", {}, short(run.instructions)), " guest instructions; the hottest region, ",
        h("code", {}, hottest.symbol), `, has `, h("b", {}, percent(hottest.share)), " of them. ",
        failed === 0
          ? "No guard of the shown traces failed."
          : `Of ${short(executed)} executed guards of the shown traces ${short(failed)} failed (${percent(failed / executed)}).`,
        run.exact ? "" : " The counts are not exact, because several threads ran one trace at once.",
      ]
    : [`It ${ending(run)}. No trace was made. `, run.attempts?.length
        ? `Traces were tried at ${plural(run.attempts.length, "head")}; the list of heads says what became of them.`
        : `Either no code was executed ${exact(run.threshold)} times, or no trace promised to gain anything.`];
  return h("article", { class: "summary" },
    h("h3", {}, h("code", { class: "command" }, commandLine(run))),
    h("p", { class: "how" }, chip(`--tier ${run.tier}`), chip(`--threshold ${exact(run.threshold)}`), chip(run.name)),
    h("p", { class: "lead" }, text),
    h("div", { class: "cards" },
      card(short(run.instructions), "guest instructions in traces", exact(run.instructions)),
      card(exact(run.traces), `traces in ${plural(run.regions_in_all, "region")}`),
      card(executed ? percent(failed / executed) : "–", "of guards failed", `${exact(failed)} of ${exact(executed)}`),
      card(duration(compiling), `spent on the ${plural(versions.length, "shown trace")}`, "recording, building, optimising and emitting"),
      card(`${(bytes / 1024).toFixed(1)} KiB`, "native code of them", "with the counters of this run")));
}

const chip = (text, kind = "") => h("span", { class: `chip ${kind}` }, text);

function summaryOfStudies() {
  const lines = [];
  for (const { content } of DATA.comparisons) {
    const rows = content.policies.filter((row) => !row.trouble && row.to_native);
    const best = rows.reduce((best, row) => (!best || row.to_native.median < best.to_native.median ? row : best), null);
    const bad = content.policies.filter((row) => row.trouble).length;
    lines.push(h("li", {}, h("a", { href: "#policies" }, "Policies"), ` of `, h("code", {}, content.command.join(" ")), ": ",
      best ? [h("b", {}, best.policy), ` has the lowest median, ${best.to_native.median.toFixed(2)} × native`] : "nothing was measured",
      bad ? `; ${plural(bad, "policy", "policies")} failed` : "", "."));
  }
  for (const { content } of DATA.sweeps) {
    const cost = costOf(content);
    lines.push(h("li", {}, h("a", { href: "#chaos" }, "Failing guards"), ` in `, h("code", {}, content.command.join(" ")), ": ",
      cost ? `a deoptimisation costs ${duration(cost.value)}` : "the cost of a deoptimisation is not determined", "."));
  }
  for (const { content } of DATA.benches) {
    const means = launchersOf(content).map((column, c) => [column, geometricMean(content.rows, c)]).filter(([, mean]) => mean);
    lines.push(h("li", {}, h("a", { href: "#bench" }, "Bench"), ` of ${plural(content.rows.filter((row) => !row.skipped).length, "workload")}: `,
      means.map(([column, mean], n) => [n ? ", " : "", h("b", {}, column), ` ${mean.toFixed(2)} × native`]), " (geometric means)."));
  }
  return lines.length ? h("ul", { class: "lead" }, lines) : null;
}

section("summary", "Summary", null, (body) => {
  if (DATA.runs.length > 1) {
    const options = DATA.runs.map((run, n) => h("option", { value: n, selected: n === state.run }, `${commandLine(run)} (${run.tier})`));
    const pick = h("select", { id: "run", on: { change: (event) => select({ run: Number(event.target.value), version: null, guard: null }) } }, options);
    body.append(h("label", { class: "field" }, "Run ", pick));
  }
  const place = h("div");
  body.append(place);
  const draw = () => replaceChildren(place, DATA.runs.length ? summaryOfRun(currentRun()) : null);
  state.listeners.push(draw);
  draw();
  const studies = summaryOfStudies();
  if (studies) body.append(studies);
});

// Time.

const PHASES = [
  ["in traces", "--series-1"],
  ["in copied blocks", "--series-6"],
  ["in guest code", "--series-3"],
  ["in lookups and entries", "--series-8"],
  ["interpreting", "--series-2"],
  ["translating", "--series-5"],
  ["recording", "--series-4"],
  ["optimising", "--series-7"],
  ["emitting", "--series-9"],
  ["dispatching", "--series-10"],
  ["system calls", "--series-11"],
];

/** Nanoseconds of each kind of work in each bucket; native time is divided by the samples. */
function layersOf(timeline) {
  const length = Math.max(0, ...Object.values(timeline.phases).map((values) => values.length));
  const layers = {};
  for (const [phase, values] of Object.entries(timeline.phases)) if (phase !== "native") layers[phase] = values;
  const native = timeline.phases.native ?? [];
  const parts = Object.entries(timeline.native_samples);
  const all = parts.map(([, samples]) => sum(samples, (n) => n));
  const total = sum(all, (n) => n);
  // A bucket without samples is divided as the one before it that has some, or the first one that has.
  let last = null;
  const shares = native.map((_, n) => {
    const here = sum(parts, ([, samples]) => samples[n] ?? 0);
    if (here) last = parts.map(([, samples]) => (samples[n] ?? 0) / here);
    return last;
  });
  const first = shares.find((share) => share);
  shares.forEach((share, n) => (shares[n] = share ?? first));
  for (const [p, [part]] of parts.entries()) {
    layers[part] = native.map((ns, n) => (total ? ns * (shares[n]?.[p] ?? all[p] / total) : 0));
  }
  if (!parts.length) layers["in traces"] = native;
  const known = PHASES.filter(([name]) => layers[name] && sum(layers[name], (n) => n) > 0);
  return {
    length,
    unsampled: !parts.length && native.length > 0,
    layers: known.map(([name, variable]) => ({ name: !parts.length && name === "in traces" ? "native" : name, variable,
      values: Array.from({ length }, (_, n) => layers[name][n] ?? 0) })),
  };
}

if (DATA.runs.some((run) => run.timeline)) {
  section("time", "Time", "What the guest's threads did, over the run without counters. Drag to zoom, double-click to see all.", (body) => {
    const draw = () => {
      const timeline = currentRun().timeline;
      if (!timeline) return replaceChildren(body, h("p", { class: "note" }, "This run has no times."));
      const { layers, length, unsampled } = layersOf(timeline);
      const width = timeline.bucket_nanoseconds;
      const totals = layers.map((layer) => sum(layer.values, (n) => n));
      const all = sum(totals, (n) => n);
      const bar = h("div", { class: "bar" }, layers.map((layer, n) =>
        h("span", { style: { flex: `${totals[n] / all} 0 0`, background: `var(${layer.variable})` },
          "data-tip": `${layer.name}: ${duration(totals[n])}, ${percent(totals[n] / all)}` })));
      const names = h("ul", { class: "legend" }, layers.map((layer, n) =>
        h("li", {}, h("i", { style: { background: `var(${layer.variable})` } }), `${layer.name} `, h("b", {}, percent(totals[n] / all)))));
      const x = Array.from({ length: length + 1 }, (_, n) => (n * width) / 1e9);
      replaceChildren(body, bar, names,
        stackedPlot({
          x,
          // The last step needs a point at its end.
          layers: layers.map((layer) => ({ ...layer, values: [...layer.values, layer.values.at(-1)].map((ns) => ns / width) })),
          xFormat: (s) => `${plain(s)} s`,
          yFormat: (share) => `${(share * 100).toFixed(0)} %`,
        }),
        h("p", { class: "note" }, `Shares of one processor, in steps of ${duration(width)}. `,
          unsampled ? "Native time could not be divided, because perf_event_open is not allowed." : "Native time is divided by samples."));
    };
    state.listeners.push(draw);
    draw();
  });
}

// Regions.

/** Percent of the samples in a region's traces, by the address of its head. */
const timeOf = (run) => new Map((run.attempts ?? []).filter((a) => a.in_traces !== null).map((a) => [`0x${a.pc.toString(16)}`, a.in_traces / 100]));

/** Regions with a smaller share are drawn as one. */
const LEAST_WIDTH = 0.004;

function flame(run, by) {
  const times = timeOf(run);
  const shareOf = (region) => (by === "time" ? times.get(region.pc) ?? 0 : region.share);
  const shown = run.regions.map((region, index) => ({ region, index, share: shareOf(region) })).filter((r) => r.share >= LEAST_WIDTH);
  const rest = Math.max(0, 1 - sum(shown, (r) => r.share));
  const what = by === "time" ? "of the samples" : "of the instructions";
  const box = (share, kind, label, tipText, index, onClick) =>
    h("button", { type: "button", class: `flame ${kind}`, tabindex: "-1", "data-tip": tipText,
      style: { flex: `${share} 1 0`, "--colour": index === null ? "var(--muted)" : `var(${seriesVariable(index)})` }, on: { click: onClick } }, label);
  const open = (version) => () => {
    select({ version: version.id, guard: null });
    document.getElementById("code")?.scrollIntoView();
  };
  const columns = shown.map(({ region, index, share }) => {
    const versions = region.versions.filter((v) => v.share * share >= LEAST_WIDTH / 2).sort((a, b) => b.share - a.share);
    const first = versions[0] ?? region.versions[0];
    return h("div", { class: "flame-column", style: { flex: `${share} 1 0` } },
      box(1, "region", [h("b", {}, percent(share)), " ", region.symbol],
        `${region.symbol}\n${percent(share)} ${what}, ${exact(region.instructions)} guest instructions in ${plural(region.versions.length, "trace")}`, index, open(first)),
      h("div", { class: "flame-row" }, versions.map((v) =>
        box(v.share, "version", v.name, `${v.name}, ${kindName(v.kind)} at ${v.symbol}\n${percent(v.share)} of the region's instructions`, index, open(v)))));
  });
  if (rest > 0.0005) {
    const label = by === "time" ? "other code" : "other regions";
    columns.push(h("div", { class: "flame-column", style: { flex: `${rest} 1 0` } },
      h("div", { class: "flame region rest", "data-tip": `${label}: ${percent(rest)} ${what}` }, h("b", {}, percent(rest)), ` ${label}`)));
  }
  const root = h("div", { class: "flame root" }, by === "time" ? "all samples" : `all traces: ${short(run.instructions)} guest instructions`);
  const view = h("div", { class: "flames" }, root, h("div", { class: "flame-row" }, columns));
  view.querySelector("button")?.setAttribute("tabindex", "0");
  arrows(view, "button");
  return view;
}

const KINDS = { loop: "loop", linear: "linear trace", side: "side trace", "side-loop": "side trace with a loop", stub: "stub" };
const kindName = (kind) => KINDS[kind] ?? kind;

function headsTable(run) {
  const share = (p) => (p === null || p === undefined ? "–" : `${p.toFixed(1)} %`);
  const raced = (race) => race && `${(race.trace / 1000).toFixed(2)} ns against ${(race.floor / 1000).toFixed(2)} ns ± ${(race.error / 1000).toFixed(2)}`;
  const rows = run.attempts.slice(0, 60).map((a) =>
    h("tr", {}, h("td", {}, h("code", {}, a.symbol)), h("td", { class: "number" }, share(a.in_traces)), h("td", { class: "number" }, share(a.in_function)),
      h("td", { class: "number" }, exact(a.tries)), h("td", {}, chip(a.outcome, a.outcome.startsWith("refused") || a.outcome === "floor" ? "bad" : "good")), h("td", { class: "number" }, raced(a.race) ?? "")));
  return h("details", { class: "heads", open: !run.regions.length },
    h("summary", {}, `${plural(run.attempts.length, "head")} at which traces were tried, in the run without counters`),
    h("div", { class: "scroll" }, h("table", {},
      h("thead", {}, h("tr", {}, ["head", "in its traces", "in its function", "tries", "outcome", "race: trace, what it replaces"].map((t, n) => h("th", { class: n && n !== 4 ? "number" : null }, t)))),
      h("tbody", {}, rows))));
}

if (DATA.runs.some((run) => run.regions.length || run.attempts?.length)) {
  section("regions", "Regions", "Where traces ran. The width is the share; click to see the code.", (body) => {
    let by = "instructions";
    const place = h("div");
    const tools = h("div", { class: "row" });
    body.append(tools, place);
    const redraw = () => {
      const run = currentRun();
      const timed = timeOf(run).size > 0 && [...timeOf(run).values()].some((share) => share > 0);
      if (!timed) by = "instructions";
      replaceChildren(tools, timed && choice("Width by", [["instructions", "by instructions"], ["time", "by time"]], by, (value) => {
        by = value;
        replaceChildren(place, contents(run));
      }));
      replaceChildren(place, contents(run));
    };
    const contents = (run) => [
      run.regions.length ? flame(run, by) : h("p", { class: "note" }, "No trace was made."),
      run.attempts?.length ? headsTable(run) : null,
    ];
    let drawn = null;
    const draw = () => {
      if (drawn !== state.run) redraw();
      drawn = state.run;
    };
    state.listeners.push(draw);
    draw();
  });
}
