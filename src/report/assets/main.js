// Puts the page together: sections, navigation, the theme, keys.
"use strict";

/** A part that cannot be drawn says so, and the others are drawn. */
function drawSection({ id, title, lead, draw }) {
  const body = h("div", { class: "section-body" });
  const element = h("section", { id, class: "part", "aria-labelledby": `${id}-title` },
    h("h2", { id: `${id}-title` }, title), lead ? h("p", { class: "explanation" }, lead) : null, body);
  document.getElementById("main").append(element);
  try {
    draw(body);
  } catch (error) {
    console.error(error);
    body.append(h("p", { class: "trouble" }, `This part cannot be shown: ${error.message}`));
  }
}

// Order of the page: what ran, then measurements of several runs.
SECTIONS.forEach(drawSection);

const navigation = document.getElementById("nav");
navigation.append(...SECTIONS.map(({ id, title }, n) => h("a", { href: `#${id}`, title: `Key ${n + 1}` }, title)));

const visible = new Map();
const watcher = new IntersectionObserver((entries) => {
  for (const entry of entries) visible.set(entry.target.id, entry.isIntersecting);
  const first = SECTIONS.find(({ id }) => visible.get(id))?.id;
  for (const anchor of navigation.children) {
    if (anchor.hash === `#${first}`) anchor.setAttribute("aria-current", "true");
    else anchor.removeAttribute("aria-current");
  }
}, { rootMargin: "-20% 0px -60% 0px" });
document.querySelectorAll(".part").forEach((part) => watcher.observe(part));

const subject = DATA.runs[0] ? commandLine(DATA.runs[0]) : SECTIONS[1]?.title ?? "nothing";
document.title = `${subject} – dynasour report`;

// The theme: as the system, light, or dark.

const THEMES = ["auto", "light", "dark"];
const root = document.documentElement;
const themeButton = document.getElementById("theme");

/** Storage is not there for every page of a file. */
function remembered(value) {
  try {
    if (value !== undefined) localStorage.setItem("dynasour-theme", value);
    return localStorage.getItem("dynasour-theme");
  } catch {
    return null;
  }
}

function setTheme(theme) {
  root.dataset.theme = theme;
  themeButton.textContent = { auto: "◐ Auto", light: "☀ Light", dark: "☾ Dark" }[theme];
  redrawAll();
}

function nextTheme() {
  const theme = THEMES[(THEMES.indexOf(root.dataset.theme) + 1) % THEMES.length];
  remembered(theme);
  setTheme(theme);
}

const asked = new URLSearchParams(location.search).get("theme") ?? remembered();
setTheme(THEMES.includes(asked) ? asked : "auto");
themeButton.addEventListener("click", nextTheme);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);

// Keys.

const help = document.getElementById("help");
const KEYS = [
  ["?", "these keys"],
  ["/", "filter the guards; words, kind:branch, failed>0"],
  ["1 – 9", "go to a section"],
  ["[ and ]", "previous, next trace"],
  ["arrows", "move within regions, graph, tables and columns of code"],
  ["Enter", "open what has the focus"],
  ["Tab", "next part that takes keys"],
  ["t", "theme: as the system, light, dark"],
  ["Esc", "close, or leave the filter"],
];
help.append(
  h("h2", { id: "help-title" }, "Keys"),
  h("dl", { class: "keys" }, KEYS.map(([key, what]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, what)])),
  h("p", { class: "note" }, `dynasour ${DATA.version}. Plots are drawn by uPlot, graphs are placed by dagre (both MIT licence; the texts are in the source of this page).`),
  h("button", { type: "button", on: { click: () => help.close() } }, "Close"));
document.getElementById("help-button").addEventListener("click", () => help.showModal());

const goTo = (id) => {
  const part = document.getElementById(id);
  part?.scrollIntoView();
  return part;
};

const COMMANDS = {
  "?": () => help.showModal(),
  "/": () => {
    goTo("guards");
    document.getElementById("filter")?.focus({ preventScroll: true });
  },
  t: nextTheme,
  "[": () => stepVersion(-1),
  "]": () => stepVersion(1),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const inField = event.target.matches?.("input, select, textarea");
  if (event.key === "Escape") {
    tip.hidden = true;
    if (inField) event.target.blur();
    return;
  }
  if (inField || help.open) return;
  const command = COMMANDS[event.key] ?? (/^[1-9]$/.test(event.key) && SECTIONS[event.key - 1] && (() => goTo(SECTIONS[event.key - 1].id)));
  if (!command) return;
  event.preventDefault();
  command();
});

// The parts were not there yet when the browser looked for the one in the address.
if (location.hash) document.getElementById(location.hash.slice(1))?.scrollIntoView({ behavior: "instant" });
root.dataset.ready = "true";
