// The findings: read from the page's data into arrays of numbers, a few bytes each.

const data = JSON.parse(document.getElementById("contents").textContent);
const VERDICTS = data.verdicts;
const GRAVITY = data.gravity.map((verdict) => VERDICTS.indexOf(verdict));
const RANK = VERDICTS.map((_, verdict) => GRAVITY.indexOf(verdict));
const FINDINGS = data.requirement.length;

const itemOf = new Uint32Array(FINDINGS);
const firstOf = new Uint32Array(data.items.findings.length + 1);
data.items.findings.forEach((times, item) => {
  itemOf.fill(item, firstOf[item], firstOf[item] + times);
  firstOf[item + 1] = firstOf[item] + times;
});

// Where a finding's entry stands in a table that only some findings have.
function places(steps) {
  const found = new Int32Array(FINDINGS).fill(-1);
  let at = 0;
  steps.forEach((step, place) => { at += step; found[at] = place; });
  return found;
}
const figuresAt = places(data.figures.at);
const worstAt = places(data.worst.at);
const toldAt = {
  detail: places(data.detail.at), cause: places(data.cause.at), where: places(data.where.at),
  value: places(data.value.at), made_by: places(data.made_by.at),
};

const told = (kind, finding) => {
  const at = toldAt[kind][finding];
  return at < 0 ? "" : data[`${kind}s`][data[kind].word[at]];
};

// How far beyond what is allowed, for sorting.
function excess(finding) {
  const at = figuresAt[finding];
  return at < 0 ? -1 : data.figures.max[at] / Number(data.limits[data.figures.limit[at]]);
}

// One finding as an object with words.
function finding(place) {
  const item = itemOf[place];
  const at = figuresAt[place];
  const worst = worstAt[place] < 0 ? null : data.worst.worst[worstAt[place]];
  const own = data.figures;
  return {
    place,
    item,
    column: data.items.column[item],
    case: data.case_words[data.items.case[item]],
    dtype: data.dtypes[data.items.dtype[item]],
    mode: data.modes[data.items.mode[item]],
    requirement: data.requirement[place],
    verdict: VERDICTS[data.verdict[place]],
    detail: told("detail", place),
    cause: told("cause", place),
    where: told("where", place),
    value: told("value", place),
    madeBy: told("made_by", place),
    figures: at < 0 ? null : {
      array: data.arrays[own.array[at]], max: own.max[at], rms: own.rms[at], bias: own.bias[at],
      limit: Number(data.limits[own.limit[at]]), accuracy: data.classes[own.accuracy[at]],
    },
    worst: worst && {
      array: data.arrays[worst[0]], index: worst[1], got: worst[2], want: worst[3], noise: worst[4],
    },
  };
}

// A filter as tables of yes and no, so that a hundred thousand findings are gone through at once.
function tables(filter) {
  const among = (words, wanted) => words.map((word) => !wanted.size || wanted.has(word));
  const column = data.columns.map((own) =>
    (!filter.implementation.size || filter.implementation.has(own.key)) &&
    (!filter.device.size || filter.device.has(own.device)));
  return {
    column,
    row: among(data.requirements.map((own) => own[1]), filter.chapter),
    verdict: among(VERDICTS, filter.verdict),
    dtype: among(data.dtypes, filter.dtype),
  };
}

// Counts by column, row and verdict, as one array.
function count(filter) {
  const { column, row, verdict, dtype } = tables(filter);
  const rows = data.requirements.length, kinds = VERDICTS.length;
  const found = new Uint32Array(data.columns.length * rows * kinds);
  for (let place = 0; place < FINDINGS; place += 1) {
    const item = itemOf[place], own = data.items.column[item];
    const requirement = data.requirement[place], kind = data.verdict[place];
    if (column[own] && row[requirement] && verdict[kind] && dtype[data.items.dtype[item]]) {
      found[(own * rows + requirement) * kinds + kind] += 1;
    }
  }
  return found;
}

// Findings of a column, of a requirement or of both, the gravest first.
function select(filter, column, requirement) {
  const shown = tables(filter);
  const found = [];
  for (let place = 0; place < FINDINGS; place += 1) {
    const item = itemOf[place], own = data.items.column[item], row = data.requirement[place];
    if (column === -1 ? !shown.column[own] : own !== column) continue;
    if (requirement === -1 ? !shown.row[row] : row !== requirement) continue;
    if (shown.verdict[data.verdict[place]] && shown.dtype[data.items.dtype[item]]) found.push(place);
  }
  const grave = found.map((place) => [RANK[data.verdict[place]], -excess(place), place]);
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
