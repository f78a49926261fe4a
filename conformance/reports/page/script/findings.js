// What the page knows: at once the names, the counts and the parts of the page; the single findings
// and the cards when somebody asks for them.

async function unpacked(id) {
  const packed = atob(document.getElementById(id).textContent);
  const bytes = new Uint8Array(packed.length);
  for (let at = 0; at < packed.length; at += 1) bytes[at] = packed.charCodeAt(at);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}
const read = (bytes) => JSON.parse(new TextDecoder().decode(bytes));

const data = read(await unpacked("contents"));
const VERDICTS = data.verdicts;
const GRAVITY = data.gravity.map((verdict) => VERDICTS.indexOf(verdict));
const RANK = VERDICTS.map((_, verdict) => GRAVITY.indexOf(verdict));
const ROWS = data.requirements.length, KINDS = VERDICTS.length;

// Counts by column, row and verdict, as one array.
const EVERY = new Uint32Array(data.columns.length * ROWS * KINDS);
data.cells.forEach((cells, row) => cells.forEach((counts, column) => {
  for (let at = 0; at < counts.length; at += 2) {
    EVERY[(column * ROWS + row) * KINDS + counts[at]] = counts[at + 1];
  }
}));
const FINDINGS = EVERY.reduce((sum, times) => sum + times, 0);

// Every finding as columns of numbers: F.verdict[place], and its item F.item[place].
let F;
let reading;
async function loadFindings() {
  const bytes = new Uint8Array(await unpacked("findings-of"));
  const line = bytes.indexOf(10);
  const head = read(bytes.subarray(0, line));
  const found = { ...head.lists, exacts: head.exact, told: head.cases, axes: head.axes };
  let from = line + 1;
  for (const [name, many, wide] of head.numbers) {
    const values = new (wide === 1 ? Uint8Array : wide === 2 ? Uint16Array : Uint32Array)(many);
    for (let octet = 0; octet < wide; octet += 1) {
      for (let at = 0; at < many; at += 1) values[at] |= bytes[from + at] << (8 * octet);
      from += many;
    }
    found[name] = values;
  }
  found.first = new Uint32Array(found.many.length);
  found.item = new Uint32Array(found.verdict.length);
  let at = 0;
  found.many.forEach((many, item) => {
    found.first[item] = at;
    found.item.fill(item, at, at + many);
    at += many;
  });
  F = found;
}
let CARDS;
async function needed(cards) {
  reading ??= loadFindings();
  await reading;
  if (cards && !CARDS) CARDS = read(await unpacked("cards-of"));
}

// How far beyond what is allowed, for sorting.
function excess(place) {
  const limit = F.limits[F.limit[place]];
  return limit ? F.ratios[F.max[place]] / limit : -1;
}

// One finding as an object with words.
function finding(place) {
  const at = F.item[place];
  const [detail, value, cause, where, madeBy] = F.texts[F.text[place]];
  const limit = F.limits[F.limit[place]];
  const [exact, worst] = F.exacts[F.exact[place]];
  return {
    place,
    column: F.column[at],
    case: F.cases[F.case[at]],
    dtype: F.in[F.dtype[at]],
    mode: F.modes[F.mode[at]],
    requirement: F.requirement[place],
    verdict: VERDICTS[F.verdict[place]],
    detail, value, cause, where, madeBy,
    figures: limit ? {
      array: F.arrays[F.array[place]],
      max: exact?.max_ratio ?? F.ratios[F.max[place]],
      rms: exact?.rms_ratio ?? F.ratios[F.rms[place]],
      bias: exact?.bias ?? F.ratios[F.bias[place]],
      limit: Number(limit.toPrecision(3)), accuracy: F.accuracies[F.accuracy[place]],
    } : undefined,
    worst,
  };
}

// What a finding must be to pass a filter: a word that is among those wanted, if any are.
function passes(filter) {
  const among = (wanted, word) => !wanted.size || wanted.has(word);
  return {
    column: data.columns.map((own) =>
      among(filter.implementation, own.key) && among(filter.device, own.device)),
    row: data.requirements.map((own) => among(filter.chapter, own[1])),
    verdict: VERDICTS.map((word) => among(filter.verdict, word)),
    dtype: F?.in.map((word) => among(filter.dtype, word)),
  };
}

function count(filter) {
  const shown = passes(filter);
  const found = new Uint32Array(EVERY.length);
  for (let item = 0; item < F.many.length; item += 1) {
    const column = F.column[item];
    if (!shown.column[column] || !shown.dtype[F.dtype[item]]) continue;
    const end = F.first[item] + F.many[item];
    for (let place = F.first[item]; place < end; place += 1) {
      const row = F.requirement[place], verdict = F.verdict[place];
      if (shown.row[row] && shown.verdict[verdict]) found[(column * ROWS + row) * KINDS + verdict] += 1;
    }
  }
  return found;
}

// Findings of a column, of a requirement or of both, the worst first.
function select(filter, column, requirement) {
  const shown = passes(filter);
  const grave = [];
  for (let place = 0; place < F.verdict.length; place += 1) {
    const item = F.item[place], row = F.requirement[place];
    const ofColumn = column === -1 ? shown.column[F.column[item]] : F.column[item] === column;
    const ofRow = requirement === -1 ? shown.row[row] : row === requirement;
    if (ofColumn && ofRow && shown.verdict[F.verdict[place]] && shown.dtype[F.dtype[item]]) {
      grave.push([RANK[F.verdict[place]], -excess(place), place]);
    }
  }
  grave.sort((one, other) => one[0] - other[0] || one[1] - other[1] || one[2] - other[2]);
  return grave.map((own) => own[2]);
}

const versions = (own) =>
  Object.entries(own.versions).map((pair) => pair.join(" ")).join(", ");

// Counts as a vector of [verdict, times], the worst first.
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
