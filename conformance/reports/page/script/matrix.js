// The matrix: its counts under the filter, links into its cells, and arrow keys between them.

const matrix = document.getElementById("the-matrix");
const rowsOf = () => [...(matrix?.querySelectorAll("tr[data-row]") ?? [])];

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

// A row gets its cells when it comes into sight, of the counts that the filter leaves.
let counts = EVERY;
let shownColumns = data.columns.map(() => true);
const inSight = new IntersectionObserver((entries) => entries.forEach((entry) => {
  if (entry.isIntersecting) fillRow(entry.target);
}), { rootMargin: "400px" });

// The columns stand as the headings do: those of one layer side by side.
const order = matrix ? [...matrix.querySelectorAll("thead th[data-for]")].flatMap((head) =>
  head.dataset.for.trim().split(/\s+/).map(Number)).filter((own, at, every) => every.indexOf(own) === at) : [];

function countsOf(column, row) {
  if (row >= 0) return counts.subarray((column * ROWS + row) * KINDS, (column * ROWS + row + 1) * KINDS);
  const sum = new Uint32Array(KINDS);
  for (let at = column * ROWS * KINDS; at < (column + 1) * ROWS * KINDS; at += 1) sum[at % KINDS] += counts[at];
  return sum;
}

function fillRow(line) {
  if (line.filled === counts) return;
  const row = Number(line.dataset.row);
  if (!line.filled) {
    line.cells[1].remove();
    line.append(...order.map((column) => el("td", { class: "cell", "data-for": column })));
  }
  line.filled = counts;
  for (const cell of [...line.cells].slice(1)) {
    const column = Number(cell.dataset.for);
    fillCell(cell, countsOf(column, row), column, row);
    cell.toggleAttribute("data-hidden", !shownColumns[column]);
    if (row < 0) cell.className = "cell";
  }
}

function fillMatrix(active, found) {
  if (!matrix || (!active && counts === EVERY)) return;
  counts = found ?? EVERY;
  shownColumns = passes(state.filter).column;
  let left = false;
  rowsOf().forEach((line) => {
    const row = Number(line.dataset.row);
    const any = order.some((column) => countsOf(column, row).some(Boolean));
    line.toggleAttribute("data-hidden", active && !any);
    left = left || (row >= 0 && any);
    if (line.filled) fillRow(line);
  });
  each("tbody", (body) => {
    const any = [...body.querySelectorAll("tr[data-row]")].some((row) => !row.hasAttribute("data-hidden"));
    body.toggleAttribute("data-hidden", !any);
  }, matrix);
  matrix.parentElement.toggleAttribute("data-hidden", !left);
  document.getElementById("matrix-nothing").hidden = left;
  enter();
}

// One cell can be tabbed to; arrows go on from there.
function enter(cell) {
  each("a.open[tabindex='0']", (own) => own.setAttribute("tabindex", "-1"), matrix);
  const own = cell ?? matrix.querySelector("tbody:not([data-hidden]) tr[data-row]:not([data-hidden]) th a.open");
  if (own) own.setAttribute("tabindex", "0");
}

function move(from, down, right) {
  const near = rowsOf();
  const here = near.indexOf(from.closest("tr"));
  near.slice(Math.max(0, here - 2), here + 3).forEach(fillRow);
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
    inSight.observe(line);
    if (row < 0) return;
    const code = line.querySelector("th code");
    code.replaceChildren(link(cellPanel(-1, row), "", [...code.childNodes]));
  });
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
