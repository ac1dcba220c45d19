// The graph of traces: exits that lead to side traces and to other traces. dagre places the nodes.
"use strict";

/** Nodes that are shown at once; more cannot be read. */
const MOST_NODES = 30;
/** Edges that were taken less often than this share of the most frequent one are left out. */
const LEAST_EDGE = 0.001;

/** Where control went from a version: `[{ fragment, times }]`, and the times that it went to the runtime. */
function exitsOf(version) {
  const went = [...(version.body?.guards ?? []).flatMap((guard) => guard.went), ...version.ends.flatMap((end) => end.went)];
  const times = new Map();
  for (const w of went) if (w.fragment !== null) times.set(w.fragment, (times.get(w.fragment) ?? 0) + w.times);
  return {
    to: [...times].map(([fragment, n]) => ({ fragment, times: n })),
    runtime: leftFor(went, "runtime"),
  };
}

/** The edges among versions: counted ones, and those of side traces whose origin has no counts here. */
function edgesOf(versions) {
  const there = new Set(versions.map(({ version }) => version.id));
  const edges = new Map();
  const add = (from, to, times) => {
    if (!there.has(from) || !there.has(to)) return;
    const key = `${from} ${to}`;
    edges.set(key, { from, to, times: Math.max(edges.get(key)?.times ?? 0, times) });
  };
  for (const { version } of versions) {
    for (const { fragment, times } of exitsOf(version).to) if (times) add(version.id, fragment, times);
    if (version.from) add(version.from.fragment, version.id, version.entered);
  }
  return [...edges.values()];
}

function drawGraph(versions) {
  const graph = new dagre.graphlib.Graph({ directed: true });
  graph.setGraph({ rankdir: "LR", nodesep: 18, ranksep: 64, edgesep: 12, marginx: 12, marginy: 12 });
  graph.setDefaultEdgeLabel(() => ({}));
  const [width, height] = [196, 62];
  for (const { version } of versions) graph.setNode(String(version.id), { width, height });
  const counted = edgesOf(versions);
  const most = Math.max(1, ...counted.map((edge) => edge.times));
  const edges = counted.filter((edge) => edge.times >= most * LEAST_EDGE);
  for (const { from, to, times } of edges.filter((edge) => edge.from !== edge.to)) {
    graph.setEdge(String(from), String(to), { width: short(times).length * 7 + 6, height: 14, labelpos: "c" });
  }
  dagre.layout(graph);
  const { width: w, height: h_ } = graph.graph();
  const drawing = svg("svg", { width: w, height: h_, viewBox: `0 0 ${w} ${h_}`, role: "group", "aria-label": "Traces and the exits among them" },
    svg("defs", {}, svg("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7.5, refY: 4, markerWidth: 9, markerHeight: 9, markerUnits: "userSpaceOnUse", orient: "auto" },
      svg("path", { d: "M0,0 L8,4 L0,8 z", class: "arrow" }))));
  for (const edge of edges.filter((edge) => edge.from !== edge.to)) {
    const { points, x, y } = graph.edge(String(edge.from), String(edge.to));
    const weight = 1 + 3 * (Math.log(edge.times + 1) / Math.log(most + 1));
    drawing.append(
      svg("path", { class: "edge", d: curve(points), "stroke-width": weight.toFixed(2), "marker-end": "url(#arrow)" }),
      svg("text", { class: "edge-label", x, y: y + 4, "text-anchor": "middle" }, short(edge.times)));
  }
  const all = Math.max(1, sum(versions, ({ version }) => version.instructions));
  for (const { version, region, index } of versions) {
    const { x, y } = graph.node(String(version.id));
    const share = version.instructions / all;
    const { runtime } = exitsOf(version);
    const facts = [
      `${version.name}, ${kindName(version.kind)} at ${version.symbol}`,
      `in the region ${region.symbol}`,
      `entered ${exact(version.entered)} times`,
      version.iterations !== null ? `${exact(version.iterations)} iterations` : null,
      `${exact(version.failed)} of ${exact(version.executed)} guards failed`,
      version.body ? `to the runtime ${exact(runtime)} times` : null,
    ].filter(Boolean).join("\n");
    const left = x - width / 2;
    const top = y - height / 2;
    const open = () => {
      select({ version: version.id, guard: null });
      document.getElementById("code").scrollIntoView();
    };
    const onKey = (event) => {
      if (event.key === "Enter" || event.key === " ") {
        event.preventDefault();
        open();
      }
    };
    const loop = version.iterations !== null;
    drawing.append(svg("g", { class: "node", tabindex: "-1", role: "button", "data-id": version.id, "data-tip": facts,
      style: { "--colour": `var(${seriesVariable(index)})` }, on: { click: open, keydown: onKey } },
      svg("rect", { class: "box", x: left, y: top, width, height, rx: 7 }),
      svg("rect", { class: "edge-bar", x: left, y: top, width: 5, height, rx: 2.5 }),
      svg("rect", { class: "share", x: left + 14, y: top + height - 10, width: Math.max(1, (width - 28) * share), height: 4, rx: 2 }),
      svg("text", { class: "name", x: left + 14, y: top + 20 }, version.name),
      svg("text", { class: "share-text", x: left + width - 12, y: top + 20, "text-anchor": "end" }, percent(share)),
      svg("text", { class: "where", x: left + 14, y: top + 36 }, shortened(version.symbol, 27)),
      svg("text", { class: "fact", x: left + 14, y: top + 48 },
        [loop ? `↻ ${short(version.iterations)}` : `→ ${short(version.entered)}`, runtime ? `  ⤶ ${short(runtime)}` : ""].join(""))));
  }
  drawing.querySelector(".node")?.setAttribute("tabindex", "0");
  arrows(drawing, ".node");
  return drawing;
}

const shortened = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

/** Scrolls a graph that is larger than its place so that its first node, the hottest, is seen. */
function showHottest(place) {
  const box = place.querySelector(".node .box");
  if (!box) return;
  place.scrollLeft = box.x.baseVal.value - place.clientWidth / 3;
  place.scrollTop = box.y.baseVal.value - place.clientHeight / 3;
}

/** A smooth path along the points of an edge. */
function curve(points) {
  const last = points.at(-1);
  let path = `M${points[0].x},${points[0].y}`;
  for (let n = 1; n < points.length - 1; n++) {
    const [at, next] = [points[n], points[n + 1]];
    const end = n === points.length - 2 ? last : { x: (at.x + next.x) / 2, y: (at.y + next.y) / 2 };
    path += ` Q${at.x},${at.y} ${end.x},${end.y}`;
  }
  return points.length > 2 ? path : `${path} L${last.x},${last.y}`;
}

if (DATA.runs.some((run) => run.regions.length)) {
  section("graph", "Traces and links", "Each box is a trace. An arrow is an exit that leads to another trace, with how often it was taken; rare ones are left out. ↻ iterations, → entries, ⤶ exits to the runtime.", (body) => {
    let shown = "all";
    const pick = h("select", { "aria-label": "Traces", on: { change: (event) => ((shown = event.target.value), redraw()) } });
    const place = h("div", { class: "graph scroll" });
    const note = h("p", { class: "note" });
    body.append(h("div", { class: "row" }, h("label", { class: "field" }, "Show ", pick)), place, note);
    const redraw = () => {
      const run = currentRun();
      replaceChildren(pick, h("option", { value: "all", selected: shown === "all" }, "all regions"),
        run.regions.map((region, n) => h("option", { value: n, selected: String(n) === shown }, `${region.symbol} (${percent(region.share)})`)));
      const all = versionsOf(run).filter(({ index }) => shown === "all" || index === Number(shown));
      const some = [...all].sort((a, b) => b.version.instructions - a.version.instructions).slice(0, MOST_NODES);
      replaceChildren(place, some.length ? drawGraph(some) : h("p", { class: "note" }, "No trace was made."));
      note.textContent = some.length < all.length ? `The ${some.length} hottest of ${all.length} traces. Choose a region to see its others.` : "";
      mark();
      requestAnimationFrame(() => showHottest(place));
    };
    const mark = () => {
      for (const node of place.querySelectorAll(".node")) node.classList.toggle("chosen", Number(node.dataset.id) === state.version);
    };
    let drawn = null;
    const draw = () => {
      if (drawn !== state.run) {
        shown = "all";
        redraw();
      }
      drawn = state.run;
      mark();
    };
    state.listeners.push(draw);
    draw();
  });
}
