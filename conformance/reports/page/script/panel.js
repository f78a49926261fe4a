// The panel: the findings of a cell, a row or a column, and one of them in full.

const dialog = document.getElementById("panel");
const PAGEFUL = 80;
let listed = { of: "", many: PAGEFUL, unfolded: new Set() };

function showPanel() {
  const wanted = state.panel;
  const card = wanted.card === undefined ? undefined
    : CARDS?.find((own) => own.column === wanted.card);
  const column = data.columns.findIndex((own) => own.key === wanted.of);
  const row = data.requirements.findIndex((own) => own[0] === wanted.requirement);
  if (!panelled() || !FINDINGS) {
    if (dialog.open) dialog.close();
    return;
  }
  const known = wanted.card !== undefined ? card
    : (wanted.of === undefined || column >= 0) && (wanted.requirement === undefined || row >= 0);
  const parts = known ? (card ? cardPanel(card) : findingsPanel(column, row)) : unknownPanel();
  const head = el("header", { class: "panel-head" },
    el("div", { class: "panel-told" }, parts.head),
    el("button", { type: "button", class: "close", "aria-label": "Close", onclick: closePanel }, "×"));
  const kept = dialog.querySelector(".list")?.scrollTop ?? 0;
  dialog.replaceChildren(head, parts.body);
  const list = dialog.querySelector(".list");
  if (list && parts.key === listed.was) list.scrollTop = kept;
  listed.was = parts.key;
  if (!dialog.open) {
    dialog.showModal();
    dialog.querySelector("#panel-title")?.focus();
  } else if (wanted.case) {
    dialog.querySelector("#finding-title")?.focus({ preventScroll: true });
  } else {
    dialog.querySelector("#panel-title")?.focus();
  }
  document.documentElement.classList.add("panelled");
}

function closePanel() {
  go({ panel: {} });
}

function unknownPanel() {
  return { key: "", head: [el("h2", { id: "panel-title", tabindex: "-1" }, "Not in this report")],
    body: el("div", { class: "panel-body" }, el("p", {},
      "The address names an implementation or a requirement that this report does not have. It may have been of another report."),
    el("p", {}, el("button", { type: "button", class: "plain", onclick: closePanel }, "To the report"))) };
}

// What is listed: a cell, or the whole row or column that it was chosen from.
function findingsPanel(ofColumn, ofRow) {
  const { by } = state.panel;
  const column = by === "all" || by === "requirement" ? -1 : ofColumn;
  const row = by === "all" || by === "implementation" ? -1 : ofRow;
  const key = `${column} ${row}`;
  if (listed.of !== key) listed = { of: key, many: PAGEFUL, unfolded: new Set(), was: listed.was };
  const found = select(state.filter, column, row);
  const counts = new Uint32Array(VERDICTS.length);
  found.forEach((place) => { counts[F.verdict[place]] += 1; });
  const wanted = state.panel;
  const at = wanted.case === undefined ? -1 : located(ofColumn, ofRow, wanted);
  const shown = at >= 0 ? at : wanted.case === undefined ? found[0] : undefined;
  const body = el("div", { class: `panel-body split${wanted.case === undefined ? "" : " one"}` },
    el("div", { class: "list" }, list(found, shown, column, row)),
    el("div", { class: "detail-pane", tabindex: "0", role: "region", "aria-label": "Finding" },
      el("p", { class: "back" }, el("a", { href: panelAddress(column < 0 && row < 0 ? { by: "all" } : cellPanel(column, row)) }, "← All findings")),
      shown === undefined ? emptyDetail(found) : findingArticle(finding(shown))));
  return { key, head: panelHead(column, row, vector(counts)), body };
}

function emptyDetail(found) {
  return el("p", { class: "empty" }, found.length
    ? "The address names a finding that this report does not have. Choose one from the list."
    : "Nothing here fits the filter.");
}

function panelHead(column, row, counts) {
  const own = data.columns[column];
  const [name, chapter, level, sentence, why] = data.requirements[row] ?? [];
  const kicker = [own ? own.title : "All implementations", row < 0 ? "all requirements" : chapter];
  return [
    el("p", { class: "kicker" }, kicker.join(" · ")),
    el("h2", { id: "panel-title", tabindex: "-1" }, row < 0 ? own?.key ?? "All findings" : el("code", {}, breakable(name)),
      level ? el("span", { class: "level" }, level) : "",
      row >= 0 && own ? el("span", { class: "whose" }, ` on ${own.key}`) : ""),
    sentence ? el("p", { class: "sentence-full" }, sentence, why ? el("span", { class: "muted" }, ` ${why}`) : "") : "",
    own && row < 0 ? el("p", { class: "muted" }, versions(own),
      data.carded.includes(own.key) ? [" · ", el("a", { href: panelAddress({ card: own.key }) }, "convention card")] : "") : "",
    el("div", { class: "panel-counts" }, counted(counts),
      filtered() ? el("div", { class: "chosen" }, chips()) : "")];
}

function located(column, row, wanted) {
  const { case: name, in: dtype, mode } = wanted;
  return F.verdict.findIndex((_, place) => {
    const item = F.item[place];
    return (column < 0 || F.column[item] === column) && (row < 0 || F.requirement[place] === row) &&
      F.cases[F.case[item]] === name && (dtype === undefined || F.in[F.dtype[item]] === dtype) &&
      (mode === undefined || F.modes[F.mode[item]] === mode);
  });
}

// Equal errors of many requirements and items are one line, until somebody asks for all.
function folded(found, shown) {
  const groups = new Map();
  for (const place of found) {
    const [detail] = F.texts[F.text[place]];
    const same = VERDICTS[F.verdict[place]] === "error"
      ? `${F.column[F.item[place]]} ${detail.replace(/ \(at [^()]*\)$/, "")}` : place;
    const own = groups.get(same);
    if (own) own.push(place); else groups.set(same, [place]);
  }
  return [...groups].map(([same, places]) => {
    if (places.indexOf(shown) > 0) listed.unfolded.add(same);
    return { same, places: listed.unfolded.has(same) ? places : places.slice(0, 1),
      rest: listed.unfolded.has(same) ? 0 : places.length - 1 };
  });
}

function list(found, shown, column, row) {
  const lines = (row < 0 ? folded(found, shown) : found.map((place) => ({ places: [place], rest: 0 })))
    .flatMap(({ same, places, rest }) => [...places, ...(rest ? [{ same, rest }] : [])]);
  const many = Math.max(listed.many, lines.indexOf(shown) + 1);
  const parts = [el("ol", { class: "findings", "aria-label": plural(found.length, "finding") },
    lines.slice(0, many).map((own) => (own.rest ? moreLine(own)
      : listLine(finding(own), own === shown, column, row))))];
  if (lines.length > many) {
    parts.push(el("button", { type: "button", class: "more-findings", onclick: () => {
      listed.many = many + 4 * PAGEFUL;
      showPanel();
      dialog.querySelectorAll(".findings a")[many]?.focus();
    } }, `Show more: ${number(many)} of ${number(lines.length)}`));
  }
  return parts;
}

function moreLine({ same, rest }) {
  return el("li", {}, el("button", { type: "button", class: "same-error", onclick: (event) => {
    const at = [...dialog.querySelectorAll(".findings li")].indexOf(event.target.closest("li"));
    listed.unfolded.add(same);
    showPanel();
    dialog.querySelectorAll(".findings li")[at]?.querySelector("a")?.focus();
  } }, `and ${plural(rest, "finding")} more with this error`));
}

function listLine(own, current, column, row) {
  const by = column < 0 ? (row < 0 ? "all" : "requirement") : row < 0 ? "implementation" : undefined;
  return el("li", {}, el("a", { href: panelAddress(findingPanel(own, by)), "aria-current": current ? "true" : undefined },
    el("span", { class: `mark v-${own.verdict}` }, sign(own.verdict), unseen(`${own.verdict}: `)),
    el("span", { class: "what" },
      column < 0 ? el("span", { class: "who" }, data.columns[own.column].key) : "",
      row < 0 ? el("span", { class: "who" }, data.requirements[own.requirement][0]) : "",
      el("code", {}, breakable(own.case)),
      el("span", { class: "muted" }, `${own.dtype} · ${own.mode}`)),
    own.figures ? el("span", { class: "size" }, `${ratio(own.figures.max)}σ`) : own.value ? el("span", { class: "size" }, own.value.slice(0, 18)) : ""));
}

function startPanel() {
  dialog.addEventListener("cancel", (event) => { event.preventDefault(); closePanel(); });
  dialog.addEventListener("close", () => {
    document.documentElement.classList.remove("panelled");
    if (panelled()) closePanel();
  });
  dialog.addEventListener("click", (event) => { if (event.target === dialog) closePanel(); });
  dialog.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const from = event.target.closest(".findings a");
    if (!step || !from) return;
    event.preventDefault();
    const every = [...dialog.querySelectorAll(".findings a")];
    every[every.indexOf(from) + step]?.focus();
  });
}
