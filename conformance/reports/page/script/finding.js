// One finding, told in full.

const PROBE = "probe/";

function findingArticle(own) {
  const column = data.columns[own.column];
  const [name, , level, sentence] = data.requirements[own.requirement];
  const told = F.told[own.case];
  return el("article", { class: "finding", "aria-labelledby": "finding-title" },
    el("p", { class: "kicker" }, `${column.key} · ${own.dtype} · mode ${own.mode} · ${column.device}`),
    el("h3", { id: "finding-title", tabindex: "-1" }, verdictWord(own.verdict), " ", el("code", {}, breakable(own.case))),
    foundPart(own),
    casePart(own, told),
    state.panel.requirement && state.panel.by !== "implementation" ? "" : el("section", {}, el("h4", {}, "The requirement"),
      el("p", {}, el("code", {}, name), level ? el("span", { class: "level" }, level) : "", " ", sentence)),
    againPart(own, column),
    restPart(own));
}

function foundPart(own) {
  const part = el("section", { class: "found" });
  if (own.detail) part.append(el("p", { class: "detail" }, own.detail));
  if (own.value) part.append(el("p", {}, "Observed: ", el("b", {}, own.value)));
  if (own.cause) part.append(el("p", {}, "Likely cause: ", el("mark", {}, own.cause)));
  if (own.madeBy) part.append(el("p", {}, "Arises in ", data.makers[own.madeBy], "."));
  if (own.where) part.append(el("p", {}, "Deviates only in: ", own.where, "."));
  if (own.figures) {
    const { array, max, rms, bias, limit, accuracy } = own.figures;
    part.append(el("figure", { class: "measured" }, gauge(own.figures),
      el("figcaption", {}, el("code", {}, array), " is off by at most ", el("b", {}, `${ratio(max)}σ`),
        ", allowed ", `${limit}σ`, "; typically (rms) ", `${ratio(rms)}σ`,
        accuracy ? `; accuracy class ${accuracy}` : "", ". Signed errors add up to ",
        el("span", { title: "The sum of error / σ over all N elements, divided by √N. Errors of independent signs keep it within a few units; errors of one sign let it grow with N, beyond the rms." },
          `Σ(error/σ) / √N = ${bias < 0 ? "−" : "+"}${ratio(Math.abs(bias))}`),
        Math.abs(bias) > 5 ? ": more than chance would give, so they lean to one side." : ".")));
  }
  if (own.worst) part.append(worstPart(own));
  if (!part.childNodes.length) {
    part.append(el("p", { class: "muted" }, own.verdict === "conforms"
      ? "As required; there is nothing to measure here." : "Nothing more was recorded."));
  } else if (!own.worst && own.figures && own.verdict === "conforms") {
    part.append(el("p", { class: "muted small" }, "Single elements are recorded where an answer deviates."));
  } else if (!own.worst && own.figures) {
    part.append(el("p", { class: "muted small" }, "The page has the worst element of the worst findings only; the record has that of each."));
  }
  return part;
}

// "output[batch 2, query 1, component 6]": as a terminal writes it.
function element(array, index) {
  const names = F.axes[`${array} ${index.length}`];
  return `${array}[${index.map((at, axis) => (names ? `${names[axis]} ${at}` : at)).join(", ")}]`;
}

function worstPart(own) {
  const { array, index, got, want, noise } = own.worst;
  const difference = Number(got) - Number(want);
  const apart = Number.isFinite(difference) ? Number(difference.toPrecision(4)) : "not a number";
  const sigma = Math.abs(difference) / Number(noise);
  const line = (head, value, kind = "") =>
    el("tr", kind ? { class: kind } : {}, el("th", { scope: "row" }, head), el("td", {}, String(value)));
  return el("table", { class: "worst-element" },
    el("caption", {}, "Worst element ", el("code", {}, element(array, index))),
    el("tbody", {}, line("got", got), line("want", want), line("difference", apart, "apart"),
      line("noise σ", noise), Number.isFinite(sigma) ? line("difference / σ", ratio(sigma)) : ""));
}

function casePart(own, told) {
  const part = el("section", { class: "case" }, el("h4", {}, "The case"));
  if (own.case.startsWith(PROBE)) {
    const topic = data.topics[own.case.slice(PROBE.length)];
    const card = data.carded.includes(data.columns[own.column].key);
    part.append(el("p", {}, topic ? `An experiment. ${topic[1]}` : "An experiment.", " ",
      card ? el("a", { href: panelAddress({ card: data.columns[own.column].key }) }, "What it showed: the convention card") : ""));
    return part;
  }
  if (!told) {
    part.append(el("p", { class: "muted" }, "This record does not say what the case asks; ",
      el("code", {}, `mha-conformance explain ${quoted(own.case)}`), " does."));
    return part;
  }
  part.append(el("p", {}, told.why), el("ul", { class: "fact-list" }, told.facts.map((fact) => el("li", {}, fact))));
  const planes = told.planes ?? [];
  if (planes.length) {
    const drawn = planes.some((plane) => plane.runs.length);
    part.append(!drawn ? "" : el("p", { class: "mask-key" },
      draw("svg", { class: "mask", width: 14, height: 14, "aria-hidden": "true" }, draw("path", { class: "yes", d: "M1 1h12v12h-12z" })), "may be attended",
      draw("svg", { class: "mask", width: 14, height: 14, "aria-hidden": "true" }, draw("rect", { class: "ground", x: 0, y: 0, width: 14, height: 14 }), draw("path", { class: "no", d: "M5 5l4 4m0-4l-4 4" })), "blocked",
      el("span", { class: "muted" }, "queries downwards, keys to the right")),
    el("div", { class: "planes" }, planes.map((plane) => maskPicture(plane, own.case))),
    told.more ? el("p", { class: "muted small" }, `and ${plural(told.more, "more pattern")} for other batch entries and heads`) : "");
  } else {
    part.append(el("p", { class: "muted" }, "No mask: every query may attend every key."));
  }
  return part;
}

function againPart(own, column) {
  const device = column.device === "cpu" ? [] : ["--device", column.device];
  const part = el("section", { class: "again-part" }, el("h4", {}, "Again"));
  if (own.case.startsWith(PROBE)) {
    part.append(shell(["mha-conformance", "probe", column.spec, "--experiment", own.case.slice(PROBE.length), "--mode", own.mode, "--evidence", ...device]));
    return part;
  }
  const one = ["--dtype", own.dtype, "--mode", own.mode, ...device];
  part.append(el("p", { class: "muted small" }, "Just this item:"),
    shell(["mha-conformance", "run", column.spec, "--case", own.case, ...one, "--strict"]));
  if (own.verdict === "deviates" || own.verdict === "error") {
    part.append(el("p", { class: "muted small" }, "As small as it gets, in a script that needs no suite:"),
      shell(["mha-conformance", "reproduce", own.case, column.spec, ...one]));
  }
  return part;
}

// What else was asked of the same answer.
function restPart(own) {
  const item = F.item[own.place];
  const others = Array.from({ length: F.many[item] }, (_, at) => F.first[item] + at)
    .filter((place) => place !== own.place).map(finding);
  if (!others.length) return "";
  return el("section", {}, el("h4", {}, "Of the same answer"),
    el("ul", { class: "rest-list" }, others.map((other) => el("li", {},
      el("a", { href: panelAddress(findingPanel(other)) },
        el("span", { class: `count v-${other.verdict}` }, sign(other.verdict), unseen(`${other.verdict}: `)),
        el("code", {}, breakable(data.requirements[other.requirement][0])),
        other.figures ? el("span", { class: "muted" }, ` ${ratio(other.figures.max)}σ`) : "")))));
}
