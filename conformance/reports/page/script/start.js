// Parts of a page of many implementations are put in place when they come into sight, when an address
// leads into them, and the rest while nothing else is to be done.

const FEW = 24;
const SLICE = 20; // milliseconds
let applied;
let asked = 0;

async function show() {
  const own = (asked += 1);
  if (filtered() || panelled()) await needed(state.panel.card !== undefined);
  if (own !== asked) return;
  // The rest of the page hangs on the filter, and not on what the panel shows.
  const now = address({ ...state, panel: {}, at: "" });
  if (now !== applied) {
    applied = now;
    applyFilter();
    each("a.open", (link) => { link.href = panelAddress(link.panel); });
  }
  showPanel();
}

const looking = new IntersectionObserver((entries) => entries.forEach((entry) => {
  if (entry.isIntersecting) fill(entry.target);
}), { rootMargin: "200px" });

function fill(part) {
  looking.unobserve(part);
  if (part.childElementCount) return;
  // Escaped when the page was made; the page's policy lets nothing in it run.
  part.innerHTML = data.parts[part.dataset.part] ?? "";
  adopt(part);
}

function adopt(root) {
  each("pre.command", (block) => { if (!block.querySelector("button")) copyable(block); }, root);
  each(".scripted", (own) => { if (FINDINGS) own.hidden = false; }, root);
  each("[data-card]", (own) => {
    own.panel = { card: data.columns[own.dataset.card].key };
    own.classList.add("open");
  }, root);
  each("[data-open]", (own) => {
    const [column, row] = own.dataset.open.split(" ").map(Number);
    own.panel = cellPanel(column, row);
    own.classList.add("open");
  }, root);
  each("a.open", (link) => { link.href = panelAddress(link.panel); }, root);
  each(".bar nav, .scroll, .heads .drawn, .over-time figure", (box) => {
    boxes.observe(box);
    if (box.firstElementChild) boxes.observe(box.firstElementChild);
    box.addEventListener("scroll", () => cut(box), { passive: true });
  }, root);
  each("details", (own) => own.addEventListener("toggle", () => {
    if (own.open) each(".part", fill, own);
  }), root);
  each(".part", (part) => looking.observe(part), root);
  if (filtered() && F) hide(root);
}

// A place on the page; the part that holds it is put in place, and what it lies in is opened.
function visit(id) {
  if (!id) return;
  if (!document.getElementById(id)) {
    const holds = Object.entries(data.parts).find(([, text]) => text.includes(`id="${id}"`));
    const part = holds && document.querySelector(`[data-part="${CSS.escape(holds[0])}"]`);
    if (part) fill(part);
  }
  const target = document.getElementById(id);
  if (!target) return;
  for (let own = target.closest("details"); own; own = own.parentElement.closest("details")) own.open = true;
  if (target.matches("details.about")) each(".part", fill, target);
  target.scrollIntoView();
}

function arrive() {
  state = parse(location.hash);
  return show().then(() => { if (state.at) visit(state.at); });
}

// What is wider than its box is scrolled by keys too, and fades where it is cut.
function cut(box) {
  const over = getComputedStyle(box).overflowX !== "visible";
  box.classList.toggle("cut-right", over && box.scrollLeft + box.clientWidth < box.scrollWidth - 2);
  box.classList.toggle("cut-below", over && box.scrollTop + box.clientHeight < box.scrollHeight - 2);
}
function fit(box) {
  if (box.classList.contains("broad")) {
    box.classList.remove("fits");
    box.classList.toggle("fits", box.scrollWidth <= box.clientWidth + 1);
  }
  cut(box);
  if (box.id || box.matches("nav, .tall")) return;
  const wide = box.scrollWidth > box.clientWidth + 1;
  const title = box.querySelector("caption")?.textContent.trim();
  for (const [name, value] of [["tabindex", "0"], ["role", "region"], ["aria-label", title || "Figure"]]) {
    if (wide) box.setAttribute(name, value); else box.removeAttribute(name);
  }
}
const boxes = new ResizeObserver((entries) => entries.forEach(({ target }) => fit(target.closest(".bar nav, .scroll, .drawn, figure"))));
startFilter();
startMatrix();
startPanel();
adopt(document);
// In the end, all is there for those who search in the page, save it or take a picture of it.
const rest = rowsOf().map((line) => () => fillRow(line));
each("main > section > .part, [data-part=causes]", (part) => rest.push(() => fill(part)));
function fillRest(until) {
  while (rest.length && performance.now() < until) rest.shift()();
  if (rest.length) setTimeout(() => fillRest(performance.now() + SLICE));
}
fillRest(data.columns.length <= FEW ? Infinity : 0);

// A place on the page keeps the filter.
document.addEventListener("click", (event) => {
  const link = event.target.closest("a[href^='#']");
  if (!link || event.defaultPrevented || event.ctrlKey || event.metaKey || event.shiftKey) return;
  const target = link.getAttribute("href").slice(1);
  if (target.includes("=")) return;
  const id = decodeURIComponent(target);
  if (filtered() || panelled()) {
    event.preventDefault();
    go({ at: id, panel: {} });
  }
  visit(id);
});
addEventListener("hashchange", arrive);
arrive();
document.documentElement.dataset.ready = Math.round(performance.now());

// Paper has no panels to open: what is folded is printed, and folded again.
let unfolded = [];
addEventListener("beforeprint", () => {
  rowsOf().forEach(fillRow);
  each(".part", fill);
  unfolded = [...document.querySelectorAll("section > details:not([open]), .part > details:not([open])")];
  unfolded.forEach((panel) => { panel.open = true; });
});
addEventListener("afterprint", () => unfolded.forEach((panel) => { panel.open = false; }));
