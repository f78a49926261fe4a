// The findings, read from the page's data. What does not print on the page is unpacked here.

async function unpacked(id) {
  const packed = atob(document.getElementById(id).textContent);
  const bytes = Uint8Array.from(packed, (char) => char.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

const data = await unpacked("contents");
const VERDICTS = data.verdicts;
const GRAVITY = data.gravity.map((verdict) => VERDICTS.indexOf(verdict));
const RANK = VERDICTS.map((_, verdict) => GRAVITY.indexOf(verdict));

// Every finding with its item; an item knows where its findings begin.
const FOUND = [];
for (const item of data.items) {
  item.first = FOUND.length;
  for (const own of item.findings) FOUND.push(Object.assign(own, { item }));
}
const FINDINGS = FOUND.length;

// How far beyond what is allowed, for sorting.
function excess({ figures }) {
  return figures ? figures.max_ratio / figures.limit : -1;
}

// One finding as an object with words.
function finding(place) {
  const own = FOUND[place];
  const { item, figures } = own;
  return {
    place,
    item,
    column: item.column,
    case: item.case,
    dtype: item.dtype,
    mode: item.mode,
    requirement: own.requirement,
    verdict: VERDICTS[own.verdict],
    detail: own.detail,
    cause: own.cause,
    where: own.where,
    value: own.value,
    madeBy: own.made_by,
    figures: figures && {
      array: figures.array, max: figures.max_ratio, rms: figures.rms_ratio, bias: figures.bias,
      limit: Number(figures.limit.toPrecision(3)), accuracy: figures.accuracy,
    },
    worst: own.worst,
  };
}

// What a finding must be to pass a filter: a word that is among those wanted, if any are.
function passes(filter) {
  const among = (wanted, word) => !wanted.size || wanted.has(word);
  const column = data.columns.map((own) =>
    among(filter.implementation, own.key) && among(filter.device, own.device));
  const row = data.requirements.map((own) => among(filter.chapter, own[1]));
  const verdict = VERDICTS.map((word) => among(filter.verdict, word));
  return { column, row, rest: ({ item, verdict: kind }) =>
    verdict[kind] && among(filter.dtype, item.dtype) };
}

// Counts by column, row and verdict, as one array.
function count(filter) {
  const { column, row, rest } = passes(filter);
  const rows = data.requirements.length, kinds = VERDICTS.length;
  const found = new Uint32Array(data.columns.length * rows * kinds);
  for (const own of FOUND) {
    if (column[own.item.column] && row[own.requirement] && rest(own)) {
      found[(own.item.column * rows + own.requirement) * kinds + own.verdict] += 1;
    }
  }
  return found;
}

// Findings of a column, of a requirement or of both, the gravest first.
function select(filter, column, requirement) {
  const shown = passes(filter);
  const grave = [];
  FOUND.forEach((own, place) => {
    const ofColumn = column === -1 ? shown.column[own.item.column] : own.item.column === column;
    const ofRow = requirement === -1 ? shown.row[own.requirement] : own.requirement === requirement;
    if (ofColumn && ofRow && shown.rest(own)) grave.push([RANK[own.verdict], -excess(own), place]);
  });
  grave.sort((one, other) => one[0] - other[0] || one[1] - other[1] || one[2] - other[2]);
  return grave.map((own) => own[2]);
}

const versions = (own) =>
  Object.entries(own.versions).map((pair) => pair.join(" ")).join(", ");

// Counts as a vector of [verdict, times], the gravest first.
const vector = (counts) =>
  GRAVITY.filter((kind) => counts[kind]).map((kind) => [VERDICTS[kind], counts[kind]]);
const said = (counts) =>
  counts.map(([verdict, times]) => `${number(times)} ${verdict}`).join(", ") || "nothing";

const sign = (verdict) =>
  el("span", { class: "sign", "aria-hidden": "true" }, data.symbols[verdict] ?? "·");
const counted = (counts) =>
  el("span", { class: "vector" }, counts.map(([verdict, times]) =>
    el("span", { class: `count v-${verdict}`, title: `${number(times)} ${verdict}` },
      sign(verdict), number(times), unseen(` ${verdict} `))));
const verdictWord = (verdict) =>
  el("span", { class: `count v-${verdict}` }, sign(verdict), verdict);
