// Tools that all other scripts use: elements, numbers as text, colours, the tooltip.
//
// Every text of a guest goes into the page as text, never as HTML.
"use strict";

/** The data that `dynasour report` has put into the page. */
const DATA = JSON.parse(document.getElementById("data").textContent);

/** What the readers look at now. Scripts that show it subscribe to changes. */
const state = { run: 0, version: null, guard: null, listeners: [] };

const select = (changes) => {
  Object.assign(state, changes);
  for (const listener of state.listeners) listener();
};

const currentRun = () => DATA.runs[state.run];

/** All versions of a run, in the order of the page, each with its region. */
function versionsOf(run) {
  return run.regions.flatMap((region, index) =>
    region.versions.map((version) => ({ version, region, index })));
}

// Elements.

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name === "on") {
      for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    } else if (name === "style") {
      for (const [property, text] of Object.entries(value)) element.style.setProperty(property, text);
    } else if (value === true) {
      element.setAttribute(name, "");
    } else if (value !== false && value !== null && value !== undefined) {
      element.setAttribute(name, value);
    }
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** An HTML element: `h("p", { class: "note" }, "text", otherElement)`. */
const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);

/** The same for SVG. */
const svg = (tag, attributes, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

const replaceChildren = (element, ...children) =>
  element.replaceChildren(...children.flat(Infinity).filter(Boolean));

// Numbers.

const exactFormat = new Intl.NumberFormat("en");
const exact = (n) => exactFormat.format(n);

/** A count in few characters: 9,876 or 1.23 M. */
function short(n) {
  if (n < 10000) return exact(n);
  const units = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
  const [unit, name] = units.find(([unit]) => n >= unit * 0.9995);
  return `${(n / unit).toPrecision(3)} ${name}`;
}

/** A share as percent; small ones keep their size. */
function percent(share) {
  if (share === 0) return "0 %";
  if (share < 0.0001) return "< 0.01 %";
  const p = share * 100;
  return `${p >= 99.95 && share < 1 ? "> 99.9" : p.toFixed(p < 1 ? 2 : 1)} %`;
}

function duration(ns) {
  if (ns < 1e3) return `${ns.toFixed(0)} ns`;
  if (ns < 1e6) return `${(ns / 1e3).toPrecision(3)} µs`;
  if (ns < 1e9) return `${(ns / 1e6).toPrecision(3)} ms`;
  return `${(ns / 1e9).toPrecision(3)} s`;
}

const seconds = (s) => duration(s * 1e9);

const plural = (n, one, many = `${one}s`) => `${exact(n)} ${n === 1 ? one : many}`;

const sum = (list, of) => list.reduce((total, item) => total + of(item), 0);

const commandLine = (run) => [run.program, ...run.args].join(" ");

// Colours.

const colourProbe = h("span", { hidden: true });

/** The value of a colour variable of the style sheet in the current theme. */
function colour(name) {
  if (!colourProbe.isConnected) document.body.append(colourProbe);
  colourProbe.style.color = `var(${name})`;
  return getComputedStyle(colourProbe).color;
}

const SERIES = 8;
const seriesVariable = (n) => `--series-${(n % SERIES) + 1}`;

// The tooltip: elements with `data-tip` show it at the pointer and when they have the focus.

const tip = document.getElementById("tip");

function showTip(text, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - width - 8))}px`;
  tip.style.top = `${y + 18 + height > innerHeight ? Math.max(4, y - height - 10) : y + 18}px`;
}

document.addEventListener("pointermove", (event) => {
  const about = event.target.closest?.("[data-tip]");
  if (about) showTip(about.dataset.tip, event.clientX, event.clientY);
  else tip.hidden = true;
});
document.addEventListener("focusin", (event) => {
  const about = event.target.closest("[data-tip]");
  if (!about || !about.matches(":focus-visible")) return;
  const box = about.getBoundingClientRect();
  showTip(about.dataset.tip, box.left, box.bottom);
});
document.addEventListener("focusout", () => (tip.hidden = true));

// Parts of the page.

const SECTIONS = [];

/** Announces a part of the page. `draw` fills it; a part without data is not announced. */
function section(id, title, lead, draw) {
  SECTIONS.push({ id, title, lead, draw });
}

/** A group of buttons of which one is chosen; left and right go through them. */
function choice(label, options, chosen, onChange) {
  const group = h("div", { class: "choice", role: "radiogroup", "aria-label": label });
  const mark = (value) => {
    for (const button of group.children) {
      const is = button.dataset.value === value;
      button.setAttribute("aria-checked", is);
      button.tabIndex = is ? 0 : -1;
    }
  };
  const pick = (value) => {
    mark(value);
    onChange(value);
  };
  for (const [value, text] of options) {
    const on = { click: () => pick(value) };
    group.append(h("button", { type: "button", role: "radio", "data-value": value, on }, text));
  }
  arrows(group, "button", (button) => pick(button.dataset.value));
  mark(chosen);
  return group;
}

/** Lets the arrow keys go through elements of a container, of which only one is in the tab order. */
function arrows(container, selector, onMove) {
  container.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const jump = { Home: 0, End: -1 }[event.key];
    if (step === undefined && jump === undefined) return;
    const all = [...container.querySelectorAll(selector)];
    const at = all.indexOf(event.target.closest(selector));
    if (at < 0) return;
    const next = all.at(jump ?? Math.min(Math.max(at + step, 0), all.length - 1));
    event.preventDefault();
    all[at].tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
    onMove?.(next);
  });
}
