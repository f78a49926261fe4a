// Without this script everything but the single findings and the cards can be read on the page.

let applied;

function show() {
  // The rest of the page hangs on the filter, and not on what the panel shows.
  const now = address({ ...state, panel: {}, at: "" });
  if (now !== applied) {
    applied = now;
    applyFilter();
    each("a.open", (own) => { own.href = panelAddress(own.panel); });
  }
  showPanel();
}

// A place on the page; what lies in a closed panel is opened.
function visit(id) {
  const target = id && document.getElementById(id);
  if (!target) return;
  const folded = target.closest("details");
  if (folded) folded.open = true;
  target.scrollIntoView();
}

function arrive() {
  state = parse(location.hash);
  show();
  if (state.at) visit(state.at);
}

startFilter();
startMatrix();
startPanel();
each("pre.command", (block) => { if (!block.querySelector("button")) copyable(block); });
each(".scripted", (own) => { if (FINDINGS) own.hidden = false; });
each("[data-card]", (own) => {
  own.panel = { card: data.columns[own.dataset.card].key };
  own.classList.add("open");
});
each("[data-open]", (own) => {
  const [column, row] = own.dataset.open.split(" ").map(Number);
  own.panel = cellPanel(column, row);
  own.classList.add("open");
});
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
  if (box.id || box.classList.contains("tall")) return;
  const wide = box.scrollWidth > box.clientWidth + 1;
  const title = box.querySelector("caption")?.textContent.trim();
  for (const [name, value] of [["tabindex", "0"], ["role", "region"], ["aria-label", title || "Figure"]]) {
    if (wide) box.setAttribute(name, value); else box.removeAttribute(name);
  }
}
const boxes = new ResizeObserver((entries) => entries.forEach(({ target }) => fit(target.closest(".scroll, .drawn, figure"))));
each(".scroll, .heads .drawn, .over-time figure", (box) => {
  boxes.observe(box);
  if (box.firstElementChild) boxes.observe(box.firstElementChild);
  box.addEventListener("scroll", () => cut(box), { passive: true });
});

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

// Paper has no panels to open: what is folded is printed, and folded again.
let unfolded = [];
addEventListener("beforeprint", () => {
  unfolded = [...document.querySelectorAll("section > details:not([open])")];
  unfolded.forEach((panel) => { panel.open = true; });
});
addEventListener("afterprint", () => unfolded.forEach((panel) => { panel.open = false; }));
