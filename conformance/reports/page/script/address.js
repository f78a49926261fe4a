// What is shown stands in the address, behind the #, so that it can be linked to:
//   #dtype=float32&verdict=deviates            a filter
//   #of=torch-mha&requirement=modes.agree      the findings of a cell, of a column or of a row
//   #of=…&requirement=…&case=…&in=float32&mode=eval     one finding, in the list of its cell
//   …&by=requirement, …&by=implementation               in the list of its row, of its column
//   #by=all&verdict=error                      all findings that fit a filter
//   #card=torch-mha                            a convention card
//   #at=accuracy&dtype=float32                 a place on the page, with a filter

const FILTERS = ["implementation", "chapter", "verdict", "dtype", "device"];
const PANEL = ["of", "requirement", "case", "in", "mode", "by", "card"];

const nothing = () => Object.fromEntries(FILTERS.map((name) => [name, new Set()]));

function parse(hash) {
  const state = { filter: nothing(), panel: {}, at: "" };
  const text = hash.replace(/^#/, "");
  if (!text.includes("=")) {
    try { state.at = decodeURIComponent(text); } catch { state.at = text; }
    return state;
  }
  for (const [name, value] of new URLSearchParams(text)) {
    if (FILTERS.includes(name)) state.filter[name].add(value);
    else if (PANEL.includes(name)) state.panel[name] = value;
    else if (name === "at") state.at = value;
  }
  return state;
}

const encoded = (word) =>
  encodeURIComponent(word).replaceAll("%2F", "/").replaceAll("%20", "+").replaceAll("%3A", ":");

function address(state) {
  const words = [];
  for (const name of FILTERS) for (const value of state.filter[name]) words.push([name, value]);
  for (const name of PANEL) if (state.panel[name]) words.push([name, state.panel[name]]);
  if (!words.length) return state.at ? `#${encoded(state.at)}` : "#";
  if (state.at) words.push(["at", state.at]);
  return `#${words.map(([name, value]) => `${name}=${encoded(value)}`).join("&")}`;
}

let state = parse(location.hash);
const filtered = () => FILTERS.some((name) => state.filter[name].size);
const panelled = () => PANEL.some((name) => state.panel[name]);

// The address of a panel, with the filter as it is.
const panelAddress = (panel) => address({ ...state, panel, at: "" });
const cellPanel = (column, row, more = {}) => ({
  ...(column < 0 ? {} : { of: data.columns[column].key }),
  ...(row < 0 ? {} : { requirement: data.requirements[row][0] }),
  ...more,
});
const findingPanel = (own, by) => cellPanel(own.column, own.requirement,
  { case: own.case, in: own.dtype, mode: own.mode, by });

// Change what is shown. A step that a reader may want to take back is one in the history.
function go(changes, step = true) {
  state = { ...state, ...changes };
  history[step ? "pushState" : "replaceState"](null, "", address(state));
  show();
}
