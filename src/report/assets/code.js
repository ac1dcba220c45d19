// One version at a time: guest code with source lines, the IR after each pass, native code; and the
// table of all guards.
"use strict";

/** The lines of the IR after each pass: `[{ pass, lines: [{ text, edit }] }]`, edit is "new", "gone" or "". */
function stagesOf(body) {
  let before = [];
  return body.stages.map(({ pass, lines, edits }) => {
    if (lines) {
      before = lines;
      return { pass, added: 0, removed: 0, lines: lines.map((text) => ({ text, edit: "" })) };
    }
    const shown = [];
    let [at, added, removed] = [0, 0, 0];
    for (const edit of edits) {
      if (Array.isArray(edit)) {
        added += edit.length;
        shown.push(...edit.map((text) => ({ text, edit: "new" })));
      } else {
        if (edit < 0) removed -= edit;
        for (const text of before.slice(at, at + Math.abs(edit))) shown.push({ text, edit: edit < 0 ? "gone" : "" });
        at += Math.abs(edit);
      }
    }
    before = shown.filter((line) => line.edit !== "gone").map((line) => line.text);
    return { pass, added, removed, lines: shown };
  });
}

// Colours of code: words that match are wrapped.

const IR_WORDS = /(\bv\d+\b)|(\ba\d+\b)|(\bassume\b|\bpoll\b|\bjump\b|\bbranch\b|\bexit\b)|(-?\b0x[0-9a-f]+\b|(?<=[ ,[(-])-?\d+\b)/g;
const ASM_WORDS = /(\b(?:[re]?(?:ax|bx|cx|dx|si|di|bp|sp)|[abcd][lh]|(?:si|di|bp|sp)l|r\d+[dwb]?|[xyz]mm\d+|k\d|rip)\b)|(^$)|(^(?:j\w+|call|ret|loop\w*)\b)|(\b0x[0-9a-f]+\b|\b\d+\b)/g;
const WORD_CLASSES = ["value", "anchor", "control", "constant"];

function coloured(text, words) {
  const out = [];
  let at = 0;
  for (const match of text.matchAll(words)) {
    const kind = match.slice(1).findIndex((group) => group !== undefined);
    if (!match[0] || kind < 0) continue;
    out.push(text.slice(at, match.index), h("span", { class: WORD_CLASSES[kind] }, match[0]));
    at = match.index + match[0].length;
  }
  out.push(text.slice(at));
  return out;
}

// Rows of the three columns. Rows with a common key belong to the same guest instruction.

const row = (keys, kind, ...children) => {
  const element = h("div", { class: `line ${kind}` }, ...children);
  if (keys.length) element.dataset.keys = keys.join(" ");
  return element;
};

const address = (text) => h("span", { class: "address" }, text.replace(/^0x/, ""));
const guardChip = (guard) => h("span", { class: `guard-chip ${guard?.failed ? "fails" : ""}`,
  "data-tip": guard ? `g${guard.index}: ${guard.english}\nchecked ${exact(guard.executed)}, failed ${exact(guard.failed)}` : null }, `g${guard?.index ?? "?"}`);

function guestRows(body, sources) {
  const rows = [];
  let source = null;
  for (const block of body.path) {
    rows.push(row([], "block", h("span", {}, block.symbol), h("b", { "data-tip": "executions of the block in this version" }, short(block.executed))));
    for (const inst of block.instructions) {
      const here = inst.source && `${inst.source.file}:${inst.source.line}`;
      if (here && here !== source) {
        const file = sources[inst.source.file];
        const text = file?.lines[inst.source.line];
        rows.push(row([], "source", h("span", { "data-tip": `${file?.path}:${inst.source.line}` }, `${baseName(file?.path ?? "?")}:${inst.source.line}`), text === undefined ? "" : ` ${text.trim()}`));
      }
      source = here ?? source;
      rows.push(row([inst.pc], "", address(inst.pc), h("span", { class: "text" }, coloured(inst.text, ASM_WORDS),
        inst.note ? h("span", { class: "note" }, `  ; ${inst.note}`) : null),
        (inst.guards ?? []).map((index) => guardChip(body.guards[index]))));
    }
  }
  return rows;
}

const baseName = (path) => path.split("/").at(-1);

function nativeRows(body) {
  const rows = [];
  let cold = false;
  let block = null;
  for (const line of body.native) {
    if (line.cold && !cold) rows.push(row([], "block", h("span", {}, "off the hot path: exits")));
    cold = !!line.cold;
    for (const mark of line.marks ?? []) {
      if (mark.mark === "loop-head") rows.push(row([], "block", h("span", {}, "loop")));
    }
    const keys = [line.pc, ...(line.marks ?? []).filter((m) => m.guard !== undefined && m.guard !== null).map((m) => body.guards[m.guard]?.pc)].filter(Boolean);
    rows.push(row([...new Set(keys)], line.cold ? "cold" : "", address(line.at), h("span", { class: "text" }, coloured(line.text, ASM_WORDS)),
      (line.marks ?? []).map((mark) => markOf(mark, body))));
  }
  return rows;
}

function markOf(mark, body) {
  switch (mark.mark) {
    case "guard": return guardChip(body.guards[mark.guard]);
    case "exit": return h("span", { class: "mark" }, `exit of g${mark.guard}`);
    case "spill": return h("span", { class: "mark spill" }, `spill ${mark.slot}`);
    case "reload": return h("span", { class: "mark spill" }, `reload ${mark.slot}`);
    case "context": return h("span", { class: "mark" }, mark.field);
    case "leaves": return h("span", { class: "mark" }, `→ ${mark.to}`);
    default: return null;
  }
}

/** The keys of each line of a stage, if the explanation has them. */
function irRows(stage, isLast, body, differences) {
  const guards = new Map(body.guards.map((guard) => [guard.position.join(" "), guard]));
  let [block, inst] = [-1, -1];
  const rows = [];
  for (const { text, edit } of stage.lines) {
    if (edit === "gone" && !differences) continue;
    const trimmed = text.trim();
    // Positions count blocks, and the instructions in each.
    if (edit !== "gone") {
      if (/^b\d+(\(|:)/.test(trimmed)) [block, inst] = [block + 1, -1];
      else if (block >= 0) inst += 1;
    }
    const guard = isLast && edit !== "gone" ? guards.get(`${block} ${inst}`) : null;
    const kind = /^b\d+(\(|:)/.test(trimmed) ? "head" : /^(anchor|native|dead|region|version|\})/.test(trimmed) ? "table" : "";
    const of = body.origins[/^(v\d+)(,| =)/.exec(trimmed)?.[1] ?? trimmed] ?? /^native n\d+ = (0x[0-9a-f]+)/.exec(trimmed)?.[1];
    rows.push(row([...new Set([of, guard?.pc])].filter(Boolean), `${kind} ${differences ? edit : ""}`, h("span", { class: "text" }, coloured(text.replace(/^ {4}/, ""), IR_WORDS)), guard ? guardChip(guard) : null));
  }
  return rows;
}

/** A column of rows: the arrow keys move a cursor in it. */
function column(title, tools, className) {
  const list = h("div", { class: `lines ${className}`, tabindex: "0", role: "group", "aria-label": title });
  const element = h("section", { class: "column" }, h("header", {}, h("h4", {}, title), tools), list);
  return { element, list };
}

/** Marks what belongs to a row in all columns. */
function link(columns, row_, scroll) {
  const keys = new Set((row_?.dataset.keys ?? "").split(" ").filter(Boolean));
  for (const list of columns) {
    let first = null;
    for (const element of list.children) {
      const is = keys.size > 0 && (element.dataset.keys ?? "").split(" ").some((key) => keys.has(key));
      element.classList.toggle("linked", is);
      if (is) first ??= element;
    }
    if (scroll && first && first.parentElement !== row_.parentElement) showIn(list, first);
  }
}

/** Scrolls a column, but not the page, so that a row is seen. */
function showIn(list, element) {
  const top = element.offsetTop;
  if (top < list.scrollTop + 20 || top > list.scrollTop + list.clientHeight - 40) list.scrollTop = top - list.clientHeight / 2;
}

function codeOf(run, version) {
  const body = version.body;
  const stages = stagesOf(body);
  let stage = stages.length - 1;
  let differences = false;
  const passes = h("select", { "aria-label": "IR after the pass", on: { change: () => ((stage = Number(passes.value)), redrawIr()) } },
    stages.map(({ pass, added, removed }, n) => h("option", { value: n, selected: n === stage }, n === 0 ? pass : `${n}. ${pass}  +${added} −${removed}`)));
  const box = h("input", { type: "checkbox", on: { change: () => ((differences = box.checked), redrawIr()) } });
  const guest = column("Guest code", null, "guest");
  const ir = column("IR", [passes, h("label", { class: "field" }, box, " changes")], "ir");
  const native = column("Native code", null, "native");
  const columns = [guest.list, ir.list, native.list];
  guest.list.append(...guestRows(body, run.sources));
  native.list.append(...(body.native.length ? nativeRows(body) : [row([], "block", "not kept")]));
  const redrawIr = () => {
    ir.list.replaceChildren(...irRows(stages[stage], stage === stages.length - 1, body, differences));
    passes.value = stage;
    link(columns, pinned, true);
    // Anchors and other tables stand first; the code is of more interest.
    if (!pinned) requestAnimationFrame(() => (ir.list.scrollTop = (ir.list.querySelector(".head")?.offsetTop ?? 0) - 8));
  };
  let pinned = null;
  redrawIr();
  const pin = (element) => {
    pinned?.classList.remove("cursor");
    pinned = element;
    pinned?.classList.add("cursor");
    link(columns, pinned, true);
  };
  for (const list of columns) {
    list.addEventListener("pointerover", (event) => {
      const over = event.target.closest(".line");
      if (over?.dataset.keys) link(columns, over, false);
    });
    list.addEventListener("pointerleave", () => link(columns, pinned, false));
    list.addEventListener("click", (event) => {
      const at = event.target.closest(".line");
      if (at) pin(at === pinned ? null : at);
    });
    list.addEventListener("keydown", (event) => {
      const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const rows = [...list.children];
      const at = rows.indexOf(pinned);
      const next = rows[at < 0 ? 0 : Math.min(Math.max(at + step, 0), rows.length - 1)];
      pin(next);
      showIn(list, next);
    });
  }
  const view = h("div", { class: "columns" }, guest.element, ir.element, native.element);
  const show = (guard) => {
    const at = [...guest.list.children].find((line) => line.dataset.keys === guard.pc);
    if (at) {
      pin(at);
      showIn(guest.list, at);
    }
  };
  return { view, show };
}

function factsOf(run, version, region) {
  const fact = (label, value, tipText) => h("div", { "data-tip": tipText ?? null }, h("dt", {}, label), h("dd", {}, value));
  const { compile_ns: c } = version;
  const parent = version.from && versionsOf(run).find((other) => other.version.id === version.from.fragment)?.version;
  return [
    h("p", { class: "how" }, chip(kindName(version.kind)), version.interpreted ? chip("a loop of the interpreted program") : null,
      version.dropped ? chip("dropped", "bad") : null,
      version.from ? chip(`made for ${parent?.name ?? `fragment ${version.from.fragment}`}, ${version.from.guards.map((g) => `g${g}`).join(", ") || "an end"}`) : null,
      version.shown.map((text) => chip(text, text.startsWith("not") ? "bad" : "good"))),
    h("dl", { class: "facts" },
      fact("of the region", percent(version.share), `${exact(version.instructions)} guest instructions`),
      fact("guest instructions", exact(version.guest_instructions), "on its path"),
      fact("entered", short(version.entered), exact(version.entered)),
      version.iterations !== null ? fact("iterations", short(version.iterations), exact(version.iterations)) : null,
      fact("guards failed", version.executed ? percent(version.failed / version.executed) : "–", `${exact(version.failed)} of ${exact(version.executed)}`),
      fact("code", `${exact(version.hot_bytes)} + ${exact(version.cold_bytes)} B`, "on the hot path, and of exits; counters included"),
      fact("spills, moves", `${version.spill_slots}, ${version.moves}`, "spill slots, and moves that the register allocator inserted on the hot path"),
      fact("made in", duration(c.record + c.build + c.optimise + c.emit), `recorded ${duration(c.record)}, built ${duration(c.build)}, optimised ${duration(c.optimise)}, emitted ${duration(c.emit)}`),
      version.polls ? fact("left by signals", exact(version.polls)) : null,
      version.faults ? fact("left by faults", exact(version.faults)) : null),
  ];
}

const wentText = (run, went) => went.map((w) => {
  const to = w.fragment === null ? w.to : versionsOf(run).find(({ version }) => version.id === w.fragment)?.version.name ?? w.to;
  return `${to} ${exact(w.times)}`;
}).join(", ");

function guardCards(run, version) {
  return version.body.guards.map((guard) =>
    h("details", { class: "guard", id: `guard-${version.id}-${guard.index}` },
      h("summary", {}, guardChip(guard), chip(guard.kind), h("code", {}, guard.english),
        h("span", { class: "counts" }, `${short(guard.executed)} checked, ${guard.failed ? `${short(guard.failed)} failed (${percent(guard.failed / Math.max(1, guard.executed))})` : "never failed"}`)),
      h("div", { class: "guard-body" },
        h("p", {}, "At ", h("code", {}, guard.pc), guard.in_loop ? ", in the loop" : ", before the loop or outside of one", "; as IR: ", h("code", {}, guard.predicate)),
        guard.went.length ? h("p", {}, "Failures went to: ", wentText(run, guard.went)) : null,
        h("p", {}, "Falls back to ", h("code", {}, guard.anchor), guard.target ? [", which continues at ", h("code", {}, guard.target)] : null, ":"),
        h("ul", { class: "restores" }, guard.restores.map((line) => h("li", {}, h("code", {}, line)))))));
}

if (DATA.runs.some((run) => versionsOf(run).some(({ version }) => version.body))) {
  section("code", "Code", "Point at a line to see what belongs to the same guest instruction; click to keep it. Arrow keys move in a column, [ and ] change the trace.", (body) => {
    const pick = h("select", { id: "version", "aria-label": "Trace", on: { change: () => select({ version: Number(pick.value), guard: null }) } });
    const previous = h("button", { type: "button", title: "Previous trace ([)", on: { click: () => stepVersion(-1) } }, "‹");
    const next = h("button", { type: "button", title: "Next trace (])", on: { click: () => stepVersion(1) } }, "›");
    const place = h("div", { class: "code" });
    body.append(h("div", { class: "row" }, h("label", { class: "field" }, "Trace ", pick), previous, next), place);
    let drawn = null;
    let shown = null;
    const draw = () => {
      const run = currentRun();
      const all = versionsOf(run);
      const found = all.find(({ version }) => version.id === state.version) ?? all.find(({ version }) => version.body) ?? all[0];
      if (!found) return replaceChildren(place, h("p", { class: "note" }, "No trace was made."));
      const { version, region } = found;
      state.version = version.id;
      if (drawn !== `${state.run} ${version.id}`) {
        drawn = `${state.run} ${version.id}`;
        replaceChildren(pick, run.regions.map((region) => h("optgroup", { label: `${region.symbol}, ${percent(region.share)}` },
          region.versions.map((v) => h("option", { value: v.id, selected: v.id === version.id }, `${v.name}  ${kindName(v.kind)} at ${v.symbol}  ${percent(v.share)}${v.body ? "" : "  (counts only)"}`)))));
        shown = version.body ? codeOf(run, version) : null;
        const missing = run.left_out ? `${plural(run.left_out, "trace")} of this run ${run.left_out === 1 ? "is" : "are"} shown without code, so that the page stays small.` : "The explanation has only its counts: less than 5 % of its region's instructions were executed in it.";
        replaceChildren(place, factsOf(run, version, region), shown ? shown.view : h("p", { class: "note" }, missing),
          version.body?.guards.length ? [h("h3", {}, `Guards of ${version.name}`), h("div", { class: "guards" }, guardCards(run, version))] : null);
      }
      const guard = version.body?.guards[state.guard];
      if (guard && shown) shown.show(guard);
    };
    state.listeners.push(draw);
    draw();
  });
}

/** Goes to another version that has code. */
function stepVersion(step) {
  const all = versionsOf(currentRun()).filter(({ version }) => version.body);
  const at = all.findIndex(({ version }) => version.id === state.version);
  const next = all[Math.min(Math.max(at + step, 0), all.length - 1)];
  if (next) select({ version: next.version.id, guard: null });
}

// The table of guards.

const GUARD_COLUMNS = [
  { title: "trace", value: (r) => r.version.name, show: (r) => r.version.name, sort: (r) => r.version.id },
  { title: "guard", show: (r) => `g${r.guard.index}`, sort: (r) => r.guard.index },
  { title: "kind", show: (r) => chip(r.guard.kind), value: (r) => r.guard.kind },
  { title: "at", show: (r) => h("code", { class: "where" }, r.where), value: (r) => r.where },
  { title: "assumes", show: (r) => h("code", { class: "predicate" }, r.guard.english), value: (r) => r.guard.english },
  { title: "checked", number: true, show: (r) => short(r.guard.executed), sort: (r) => r.guard.executed },
  { title: "failed", number: true, show: (r) => short(r.guard.failed), sort: (r) => r.guard.failed },
  { title: "failed %", number: true, show: (r) => percent(r.share), sort: (r) => r.share },
  { title: "to the runtime", number: true, show: (r) => short(r.runtime), sort: (r) => r.runtime },
];

/** Rows that are shown before "show all". */
const FIRST_ROWS = 100;

if (DATA.runs.some((run) => guardsOf(run).length)) {
  section("guards", "Guards", "Every guard of the traces that are shown in full. Click a heading to sort, a row to see its code.", (body) => {
    const order = { column: 6, down: true };
    let all = false;
    const search = h("input", { type: "search", id: "filter", placeholder: "Filter: text, kind:branch, failed>0   ( / )", "aria-label": "Filter guards", on: { input: () => redraw() } });
    const count = h("span", { class: "note", "aria-live": "polite" });
    const heads = h("tr");
    const rows = h("tbody");
    const more = h("button", { type: "button", on: { click: () => ((all = true), redraw()) } });
    body.append(h("div", { class: "row" }, search, count),
      h("div", { class: "scroll" }, h("table", { class: "guard-table" }, h("thead", {}, heads), rows)), more);
    const data = () => guardsOf(currentRun()).map(({ guard, version }) => ({
      guard, version, share: guard.executed ? guard.failed / guard.executed : 0, runtime: leftFor(guard.went, "runtime"),
      where: whereIs(version, guard.pc),
    }));
    const open = (r) => {
      select({ version: r.version.id, guard: r.guard.index });
      document.getElementById("code").scrollIntoView();
    };
    const redraw = () => {
      const { title, sort, value } = GUARD_COLUMNS[order.column];
      const key = sort ?? value;
      const compare = (a, b) => (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0) * (order.down ? -1 : 1) || a.version.id - b.version.id || a.guard.index - b.guard.index;
      const found = data().filter(matching(search.value)).sort(compare);
      replaceChildren(heads, GUARD_COLUMNS.map((column, n) => h("th", { class: column.number ? "number" : null, "aria-sort": n !== order.column ? "none" : order.down ? "descending" : "ascending" },
        h("button", { type: "button", on: { click: () => {
          order.down = n === order.column ? !order.down : !!column.number;
          order.column = n;
          redraw();
          heads.children[n].firstChild.focus();
        } } }, column.title))));
      const shown = all ? found : found.slice(0, FIRST_ROWS);
      replaceChildren(rows, shown.map((r, n) => h("tr", { tabindex: n === 0 ? "0" : "-1", on: { click: () => open(r), keydown: (event) => event.key === "Enter" && open(r) } },
        GUARD_COLUMNS.map((column) => h("td", { class: column.number ? "number" : null }, column.show(r))))));
      count.textContent = `${plural(found.length, "guard")}, by ${title}`;
      more.hidden = shown.length === found.length;
      more.textContent = `Show all ${found.length}`;
    };
    arrows(rows, "tr");
    let drawn = null;
    const draw = () => {
      if (drawn !== state.run) redraw();
      drawn = state.run;
    };
    state.listeners.push(draw);
    draw();
  });
}

/** A guest address as symbol and offset, as far as the path of its version tells. */
function whereIs(version, pc) {
  const inside = version.body.path.find((block) => block.instructions.some((inst) => inst.pc === pc));
  if (!inside) return pc;
  const offset = Number(BigInt(pc) - BigInt(inside.pc));
  const [, symbol, base] = /^(.*?)(?:\+(0x[0-9a-f]+))?$/.exec(inside.symbol);
  const at = Number(base ?? 0) + offset;
  return at ? `${symbol}+0x${at.toString(16)}` : symbol;
}

/** A test of a row: all words must be found; `kind:K` and `failed>N` are conditions. */
function matching(text) {
  const tests = text.toLowerCase().split(/\s+/).filter(Boolean).map((word) => {
    const [, kind] = /^kind:(.+)$/.exec(word) ?? [];
    if (kind) return (r) => r.guard.kind.startsWith(kind);
    const [, field, least] = /^(failed|checked)>(\d+)$/.exec(word) ?? [];
    if (field) return (r) => (field === "failed" ? r.guard.failed : r.guard.executed) > Number(least);
    return (r) => `${r.version.name} g${r.guard.index} ${r.guard.kind} ${r.where} ${r.guard.english} ${r.guard.pc}`.toLowerCase().includes(word);
  });
  return (r) => tests.every((test) => test(r));
}
