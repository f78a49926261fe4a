// The filter: what it may ask, its panel in the bar, and what it hides all over the page.

const NAMES = { implementation: "Implementation", chapter: "Chapter", verdict: "Verdict",
  dtype: "dtype", device: "Device" };
const distinct = (words) => [...new Set(words)];
const CHOICES = {
  implementation: data.columns.map((own) => own.key),
  chapter: distinct(data.requirements.map((own) => own[1])),
  verdict: VERDICTS.filter((_, kind) => EVERY.some((times, at) => times && at % KINDS === kind)),
  dtype: data.dtypes,
  device: distinct(data.columns.map((own) => own.device)),
};

function toggle(name, value, on = !state.filter[name].has(value)) {
  const wanted = new Set(state.filter[name]);
  if (on) wanted.add(value); else wanted.delete(value);
  go({ filter: { ...state.filter, [name]: wanted } }, false);
}
const clear = () => go({ filter: nothing() }, false);

const chosen = el("div", { class: "chosen", role: "group", "aria-label": "Active filters" });
const outcome = el("output", { class: "outcome", "aria-live": "polite" });

function filterPanel() {
  const sets = FILTERS.map((name) =>
    el("fieldset", { class: `choose-${name}` }, el("legend", {}, NAMES[name]),
      CHOICES[name].map((value) => {
        const box = el("input", { type: "checkbox", "data-filter": name, value });
        box.addEventListener("change", () => toggle(name, value, box.checked));
        return el("label", name === "verdict" ? { class: `v-${value}` } : {}, box,
          name === "verdict" ? sign(value) : "", el("span", {}, value));
      })));
  const done = el("button", { type: "button", class: "plain" }, "Done");
  const panel = el("div", { class: "choices", id: "choices", hidden: true },
    el("div", { class: "sets" }, sets),
    el("p", { class: "ends" },
      el("span", { class: "muted" }, "Within a group any may hold, between groups all must."),
      el("button", { type: "button", class: "plain", onclick: clear }, "Clear"), done));
  const button = el("button", { type: "button", class: "open-filter", "aria-expanded": "false",
    "aria-controls": "choices" }, "Filter");
  const unfold = (on) => {
    panel.hidden = !on;
    button.setAttribute("aria-expanded", String(on));
  };
  button.addEventListener("click", () => unfold(panel.hidden));
  done.addEventListener("click", () => { unfold(false); button.focus(); });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !panel.hidden) { unfold(false); button.focus(); }
  });
  document.addEventListener("pointerdown", (event) => {
    if (!panel.hidden && !event.target.closest(".bar")) unfold(false);
  });
  return [button, panel];
}

function startFilter() {
  const tools = document.getElementById("tools");
  if (!data.columns.length || !FINDINGS) return;
  const [button, panel] = filterPanel();
  tools.append(button);
  startSearch(tools);
  const bar = document.querySelector(".bar");
  bar.append(el("div", { class: "active", hidden: true },
    outcome, chosen, el("button", { type: "button", class: "plain", onclick: clear }, "Clear all")), panel);
  tools.hidden = false;
  each(".legend > [data-verdict]", (entry) => {
    const verdict = entry.dataset.verdict;
    if (!CHOICES.verdict.includes(verdict)) return;
    const term = entry.querySelector("dt");
    const switched = el("button", { type: "button", "data-legend": verdict, "aria-pressed": "false",
      title: `Show only what is ${verdict}`, onclick: () => {
        toggle("verdict", verdict);
        // What it changed lies below the first screen.
        if (state.filter.verdict.has(verdict)) document.getElementById("matrix")?.scrollIntoView();
      } });
    switched.append(...term.childNodes);
    term.append(switched);
  });
  each("[data-clear]", (own) => own.addEventListener("click", clear));
}

function chips() {
  return FILTERS.flatMap((name) => [...state.filter[name]].map((value) =>
    el("button", { type: "button", class: "chip", onclick: () => toggle(name, value, false),
      "aria-label": `Remove filter ${NAMES[name]}: ${value}` },
    name === "verdict" ? sign(value) : el("span", { class: "muted" }, `${NAMES[name]} `), value,
    el("span", { class: "cross", "aria-hidden": "true" }, " ×"))));
}

function applyFilter() {
  const active = filtered();
  const bar = document.querySelector(".active");
  if (!bar) return;
  chosen.replaceChildren(...chips());
  const counts = active ? count(state.filter) : null;
  if (active) {
    const total = counts.reduce((sum, times) => sum + times, 0);
    const words = `${number(total)} of ${plural(FINDINGS, "finding")}`;
    outcome.replaceChildren(total ? el("a", { href: panelAddress({ by: "all" }) }, words) : words);
  }
  bar.hidden = !active;
  // Sticky headings stand below the bar, which grows with what it holds.
  document.documentElement.style.setProperty("--top", active ? `${document.querySelector(".bar-in").offsetHeight + bar.offsetHeight}px` : "");
  each("[data-filter]", (box) => { box.checked = state.filter[box.dataset.filter].has(box.value); });
  each("[data-legend]", (button) => {
    button.setAttribute("aria-pressed", String(state.filter.verdict.has(button.dataset.legend)));
  });
  hide(document);
  fillMatrix(active, counts);
}

// Hide in a part of the page what does not fit the filter.
function hide(root) {
  const shown = passes(state.filter);
  each("[data-for]:not(.cell)", (element) => {
    const own = element.dataset.for.trim().split(/\s+/);
    const left = own.filter((place) => shown.column[place]).length;
    element.toggleAttribute("data-hidden", left === 0);
    if (element.matches("th[scope=colgroup]") && left) element.colSpan = left;
  }, root);
  // Cells below a heading that spans rows: the heading goes with the first row that is left.
  each(".compared tbody", (body) => {
    const left = [...body.rows].filter((row) => !row.hasAttribute("data-hidden"));
    body.toggleAttribute("data-hidden", left.length === 0);
    const head = body.querySelector("th");
    if (left.length && head) {
      left[0].prepend(head);
      head.rowSpan = left.length;
    }
  }, root);
  each("[data-dtype]", (element) => {
    const wanted = state.filter.dtype;
    element.toggleAttribute("data-hidden", wanted.size > 0 && !wanted.has(element.dataset.dtype));
  }, root);
  const fits = (wanted, words) => !wanted.size || words.some((word) => wanted.has(word));
  each("details.panel", (panel) => {
    const own = panel.dataset;
    panel.toggleAttribute("data-hidden", !(fits(state.filter.chapter, own.chapter.trim().split(/\s+/)) &&
      fits(state.filter.verdict, [own.verdict]) && fits(state.filter.dtype, own.dtypes.trim().split(/\s+/))));
  }, root);
  each(".symptom", (element) => {
    const left = [...element.querySelectorAll("details.panel")].some((own) => !own.hasAttribute("data-hidden"));
    element.toggleAttribute("data-hidden", !left);
  }, root);
  // What lies in a folded implementation is not on the page yet; it says what it has.
  each("[data-own]", (element) => {
    const own = element.dataset.own.split(" ");
    const left = ["chapter", "verdict", "dtype"].every((name) => fits(state.filter[name], own));
    element.toggleAttribute("data-hidden", !left || !shown.column[element.dataset.for.trim()]);
  }, root);
  const compared = [...root.querySelectorAll(".maps > .scroll")].map((map) => {
    const few = map.querySelectorAll("tbody tr:not([data-hidden])").length < 2;
    map.toggleAttribute("data-hidden", few || map.hasAttribute("data-hidden"));
    return !map.hasAttribute("data-hidden");
  });
  const alone = document.getElementById("pairs-nothing");
  if (alone && compared.length) alone.hidden = compared.some(Boolean);
}
