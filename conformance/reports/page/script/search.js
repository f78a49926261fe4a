// The search: implementations, requirements, causes and cases, by words that all must occur.

const MOST_HITS = 12;

function hits(words) {
  const fits = (text) => words.every((word) => text.toLowerCase().includes(word));
  const groups = [
    ["Implementations", data.columns.filter((own) => fits(`${own.key} ${own.title} ${versions(own)}`))
      .map((own) => [own.key, own.title, panelAddress({ of: own.key })])],
    ["Requirements", data.requirements.filter((own) => fits(`${own[0]} ${own[3]}`))
      .map((own) => [own[0], own[3], panelAddress({ requirement: own[0] })])],
    ["Causes", data.symptoms.filter((own) => fits(own[1]))
      .map(([column, text, times, id]) => [text, `${data.columns[column].key}, ${plural(times, "finding")}`,
        address({ ...state, panel: {}, at: id })])],
    ["Cases", F.cases.filter((own) => own && fits(`${own} ${F.told[own]?.why ?? ""}`)).flatMap((own) => {
      const item = F.case.indexOf(F.cases.indexOf(own));
      if (item < 0) return [];
      const first = finding(F.first[item]);
      return [[own, F.told[own]?.why ?? "", panelAddress(findingPanel(first, "requirement"))]];
    })],
  ];
  return groups.filter((group) => group[1].length);
}

function startSearch(tools) {
  const field = el("input", { type: "search", id: "search", placeholder: "Search", autocomplete: "off",
    "aria-label": "Search implementations, requirements, causes and cases" });
  const found = el("div", { class: "hits", id: "hits", hidden: true, role: "region", "aria-label": "Search results", tabindex: "0" });
  const look = async () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) { found.hidden = true; return; }
    await needed();
    const groups = hits(words);
    found.replaceChildren(...groups.map(([title, own]) => el("section", {},
      el("h2", {}, title, el("span", { class: "much" }, ` ${number(own.length)}`)),
      el("ul", {}, own.slice(0, MOST_HITS).map(([name, told, href]) =>
        el("li", {}, el("a", { href }, breakable(name)), el("span", { class: "note" }, told))),
      own.length > MOST_HITS ? el("li", { class: "muted" }, `and ${number(own.length - MOST_HITS)} more`) : ""))));
    if (!groups.length) found.replaceChildren(el("p", { class: "muted" }, "Nothing in this report has these words."));
    found.hidden = false;
  };
  const close = () => { found.hidden = true; };
  field.addEventListener("input", look);
  field.addEventListener("focus", look);
  found.addEventListener("click", (event) => { if (event.target.closest("a")) close(); });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !found.hidden) { close(); field.focus(); }
    if (event.key === "ArrowDown" && event.target === field) {
      event.preventDefault();
      found.querySelector("a")?.focus();
    }
    if (event.key === "/" && !event.target.closest("input, dialog")) { event.preventDefault(); field.focus(); }
  });
  document.addEventListener("pointerdown", (event) => { if (!event.target.closest(".bar")) close(); });
  tools.prepend(field);
  tools.closest(".bar").append(found);
}
