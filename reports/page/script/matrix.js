// The matrix: its counts under the filter, links into its cells, and arrow keys between them.

const matrix = document.getElementById("the-matrix");
const rowsOf = () => [...matrix.querySelectorAll("tr[data-row]")];
let recounted = false;

function link(panel, label, children) {
  const own = el("a", { class: "open", href: panelAddress(panel), tabindex: "-1" }, children);
  if (label) own.setAttribute("aria-label", label);
  own.panel = panel;
  return own;
}

function fillCell(cell, counts, column, row) {
  const found = vector(counts);
  cell.className = `cell c-${found.length ? found[0][0] : "none"}`;
  if (!found.length) {
    cell.replaceChildren(
      el("span", { class: "muted", "aria-hidden": "true" }, "·"),
      unseen(filtered() ? "nothing that fits the filter" : "not asked"));
    return false;
  }
  const where = [column < 0 ? "" : data.columns[column].key, row < 0 ? "" : data.requirements[row][0]];
  const label = `${where.filter(Boolean).join(", ")}: ${said(found)}`;
  cell.replaceChildren(link(cellPanel(column, row), label, [counted(found)]));
  return true;
}

function fillMatrix(active, counts) {
  if (!matrix || (!active && !recounted)) return;
  recounted = active;
  counts ??= count(state.filter);
  const rows = data.requirements.length, kinds = VERDICTS.length;
  const totals = data.columns.map(() => new Uint32Array(kinds));
  rowsOf().forEach((line) => {
    const row = Number(line.dataset.row);
    let any = false;
    each("td", (cell) => {
      const column = Number(cell.dataset.for);
      const start = (column * rows + row) * kinds;
      const own = counts.subarray(start, start + kinds);
      own.forEach((times, kind) => { totals[column][kind] += times; });
      any = fillCell(cell, own, column, row) || any;
    }, line);
    line.toggleAttribute("data-hidden", active && !any);
  });
  each("tfoot td", (cell) => {
    const column = Number(cell.dataset.for);
    fillCell(cell, totals[column], column, -1);
    cell.className = "cell";
  }, matrix);
  let left = false;
  each("tbody", (body) => {
    const any = [...body.querySelectorAll("tr[data-row]")].some((row) => !row.hasAttribute("data-hidden"));
    body.toggleAttribute("data-hidden", !any);
    left = left || any;
  }, matrix);
  matrix.parentElement.toggleAttribute("data-hidden", !left);
  document.getElementById("matrix-nothing").hidden = left;
  enter();
}

// One cell can be tabbed to; arrows go on from there.
function enter(cell) {
  each("a.open[tabindex='0']", (own) => own.setAttribute("tabindex", "-1"), matrix);
  const own = cell ?? matrix.querySelector("tbody:not([data-hidden]) tr[data-row]:not([data-hidden]) a.open");
  if (own) own.setAttribute("tabindex", "0");
}

function move(from, down, right) {
  const lines = [...matrix.rows].filter((line) =>
    line.offsetParent !== null && line.querySelector("a.open"));
  const line = from.closest("tr");
  const column = (cell) => cell.dataset.for ?? cell.dataset.column ?? "head";
  const own = from.closest("td, th");
  if (right) {
    const cells = [...line.cells].filter((cell) =>
      cell.offsetParent !== null && cell.querySelector("a.open"));
    return cells[cells.indexOf(own) + right]?.querySelector("a.open");
  }
  for (let at = lines.indexOf(line) + down; lines[at]; at += down) {
    const cell = [...lines[at].cells].find((other) =>
      column(other) === column(own) && other.querySelector("a.open"));
    if (cell) return cell.querySelector("a.open");
  }
  return null;
}

function startMatrix() {
  if (!matrix || !FINDINGS) return;
  rowsOf().forEach((line) => {
    const row = Number(line.dataset.row);
    const [name] = data.requirements[row];
    const code = line.querySelector("th code");
    code.replaceChildren(link(cellPanel(-1, row), "", [...code.childNodes]));
    each("td", (cell) => wrap(cell, Number(cell.dataset.for), row, name), line);
  });
  each("tfoot td", (cell) => wrap(cell, Number(cell.dataset.for), -1, "all findings"), matrix);
  each("thead th[data-column]", (head) => {
    head.replaceChildren(link(cellPanel(Number(head.dataset.column), -1), "", [...head.childNodes]));
  }, matrix);
  enter();
  matrix.addEventListener("keydown", (event) => {
    const step = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] }[event.key];
    const from = event.target.closest("a.open");
    if (!step || !from || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    const next = move(from, ...step);
    if (!next) return;
    enter(next);
    next.focus();
    next.scrollIntoView({ block: "nearest", inline: "nearest" });
  });
}

// What the page already says in a cell, inside a link to its findings.
function wrap(cell, column, row, name) {
  const counts = cell.querySelector(".vector");
  if (!counts || !counts.querySelector(".count")) return;
  const words = [...counts.querySelectorAll(".count")].map((own) => own.title);
  const label = `${data.columns[column].key}, ${name}: ${words.join(", ")}`;
  cell.replaceChildren(link(cellPanel(column, row), label, [counts]));
}
