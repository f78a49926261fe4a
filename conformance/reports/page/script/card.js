// A convention card: what experiments showed of one implementation, with the evidence.

function cardPanel(card) {
  const column = data.columns.find((own) => own.key === card.column);
  const asked = card.chapters.filter((chapter) => chapter.subjects.length);
  const without = card.chapters.filter((chapter) => !chapter.subjects.length);
  const wrong = asked.flatMap((chapter) => chapter.subjects.flatMap((subject) =>
    subject.observed.filter((own) => own.agrees === false).map((own) => [subject.subject, own])));
  const title = (topic) => data.topics[topic]?.[0] ?? topic;
  return {
    key: `card ${card.column}`,
    head: [el("p", { class: "kicker" }, "Convention card"),
      el("h2", { id: "panel-title", tabindex: "-1" }, breakable(column.title)),
      el("p", { class: "muted" }, `${card.column} · ${versions(column)} · ${column.device}`)],
    body: el("div", { class: "panel-body card-body", tabindex: "0", role: "region", "aria-label": "Convention card" },
      wrong.length ? el("section", { class: "not-declared" }, el("h3", {}, "Not as the adapter declares"),
        el("ul", { class: "plainly" }, wrong.map(([subject, own]) => el("li", {}, el("code", {}, subject),
          `: declared ${own.declared ?? ""}, observed `, el("b", {}, own.value), own.modes.length ? ` in ${own.modes.join(", ")}` : "")))) : "",
      asked.map((chapter) => el("section", {}, el("h3", {}, title(chapter.topic)),
        el("p", { class: "muted" }, data.topics[chapter.topic]?.[1] ?? ""),
        el("table", { class: "entries" },
          el("caption", { class: "unseen" }, title(chapter.topic)),
          el("thead", {}, el("tr", {}, ["Looked at", "Seen", "Declared", "Evidence"].map((head) => el("th", { scope: "col" }, head)))),
          chapter.subjects.map((subject) => el("tbody", {}, subject.observed.map((own, place) => entry(subject, own, place))))),
        command(chapter.command))),
      without.length ? el("section", {}, el("h3", {}, "Nothing to ask"),
        el("ul", { class: "plainly" }, without.map((chapter) => el("li", {}, `${title(chapter.topic)}: ${chapter.unsupported || "no entries"}`)))) : ""),
  };
}

const ALARMING = /NaN|^unexplained$|^ignored$/;

function entry(subject, own, place) {
  const declared = own.declared ?? "";
  const agrees = own.agrees !== false;
  return el("tr", {},
    place === 0 ? el("th", { scope: "rowgroup", rowspan: subject.observed.length }, subject.subject) : "",
    el("td", {}, el("b", ALARMING.test(own.value) ? { class: "alarming" } : {}, own.value),
      own.modes.length ? el("span", { class: "note" }, own.modes.join(", ")) : ""),
    el("td", {}, !declared ? el("span", { class: "muted" }, "nothing declared")
      : el("span", { class: `count v-${agrees ? "conforms" : "deviates"}` }, sign(agrees ? "conforms" : "deviates"),
        agrees && declared === own.value ? "as seen" : declared)),
    el("td", { class: "evidence" }, own.evidence ?? "",
      own.code ? el("details", {}, el("summary", {}, "Code that shows it"), copyable(el("pre", { class: "command" }, el("code", {}, own.code)))) : ""));
}
