// "Can I use" and the translator: they look answers up, and compute none.
(() => {
  const read = (id) => {
    const found = document.getElementById(id);
    return found && JSON.parse(found.textContent);
  };
  const make = (name, text, more = {}) => {
    const made = Object.assign(document.createElement(name), more);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const add = (parent, ...children) => (parent.append(...children), parent);
  const option = (value, text) => make("option", text, { value });
  const choice = (form, name, label) => {
    const select = make("select", undefined, { name, id: `choose-${name}` });
    add(form, add(make("label", label, { htmlFor: select.id }), select));
    return select;
  };
  const fill = (select, options, wanted) => {
    const had = wanted ?? select.value;
    const groups = new Map();
    for (const [value, text, group = ""] of options) {
      if (!groups.has(group)) groups.set(group, []);
      groups.get(group).push(option(value, text));
    }
    select.replaceChildren(...[...groups].flatMap(([label, own]) =>
      label ? [add(make("optgroup", undefined, { label }), ...own)] : own));
    select.value = options.some(([value]) => value === had) ? had : options[0]?.[0];
  };
  const asked = new URLSearchParams(location.hash.slice(1));
  const keep = (form) => {
    history.replaceState(null, "", "#" + new URLSearchParams(new FormData(form)));
  };
  const values = (list) => list.map(([value, where]) => value + (where ? ` (${where})` : "")).join("; ");
  const plain = (list) => JSON.stringify(list.map(([value]) => value).sort());

  const site = read("site-data");
  const form = document.getElementById("can-i-use-form");
  if (site && form) {
    const answer = document.getElementById("can-i-use-answer");
    const onGpu = site.implementations.some((one) => one.gpu);
    const devices = ["cpu", "gpu"].map((value) => make("input", undefined, { type: "radio", name: "device", value }));
    if (onGpu) {
      add(form, add(make("fieldset"), make("legend", "Measured on"),
        ...devices.map((input) => add(make("label"), input, ` ${input.value.toUpperCase()}`))));
    }
    devices[asked.get("device") === "gpu" ? 1 : 0].checked = true;
    const measured = () => {
      const one = byKey.get(who.value);
      const device = devices.find((input) => input.checked).value;
      return device === one.device ? one : device === "gpu" ? one.gpu : null;
    };
    const who = choice(form, "implementation", "Implementation");
    const what = choice(form, "question", "Question");
    const dtype = choice(form, "dtype", "Dtype");
    const version = choice(form, "version", "Version");
    const byKey = new Map(site.implementations.map((one) => [one.key, one]));
    fill(who, site.implementations.map((one) => [one.key, one.title, one.library]), asked.get("implementation") ?? "torch-mha");
    fill(what, Object.entries(site.asked).map(([name, [told]]) => [name, told]), asked.get("question"));
    const narrow = (from) => {
      const own = measured();
      const packages = Object.entries(own?.versions ?? {}).map(([name, at]) => `${name} ${at}`).join(", ");
      fill(dtype, [["", "any"], ...(own?.dtypes ?? []).map((name) => [name, name])], from?.get("dtype"));
      const points = (own?.history ?? []).filter((point) => !point.now).reverse();
      fill(version, [["", packages || (own ? "today" : "–")], ...points.map((point) => [point.with, point.with])], from?.get("version"));
    };
    const since = (one, name) => {
      const course = one.courses[name] ?? [];
      const point = one.history.find((item) => (version.value ? item.with === version.value : item.now));
      const at = course.findIndex((item) => item[3].includes(point?.with));
      if (at < 0 || (course.length === 1 && (one.alone || course[0][3].length === 1))) return ["only this version was measured"];
      const told = ([first, last, seen]) => `${first === last ? first : `${first} to ${last}`}: ${seen}`;
      const others = [...course.slice(0, at).reverse(), ...course.slice(at + 1)];
      return [course[at][0] + (at ? "" : ", the oldest that answers"),
        ...others.flatMap((item) => [make("br"), told(item)])];
    };
    // Answers about who sees whom are drawn: rows are queries, columns are keys.
    const grid = (said, rows, heads) => {
      const table = make("table", undefined, { className: "answers-mask" });
      table.setAttribute("aria-label", said);
      if (heads) add(table, add(make("tr"), ...heads.map((text) => make("th", text))));
      for (const row of rows) add(table, add(make("tr"), ...row.map((on) => make("td", on ? "●" : "·", { className: on ? "on" : "" }))));
      return add(make("figure", undefined, { className: "answers-figure" }), table, make("figcaption", said));
    };
    const drawn = (name, value) => {
      const sees = (queries, keys, rule) => Array.from({ length: queries }, (_, q) => Array.from({ length: keys }, (_, k) => rule(q, k)));
      if (name.startsWith("Causal flag, fewer") && (value === "top-left" || value === "bottom-right")) {
        const ahead = value === "top-left" ? 0 : 2;
        return grid(`${value}: what 3 queries see of 5 keys, ● is seen`, sees(3, 5, (q, k) => k <= q + ahead));
      }
      const polar = { attends: (on) => on, blocks: (on) => !on };
      const marks = { "True in a mask": [["True", 1], ["False", 0], ["True", 1], ["False", 0]],
        "0 and 1, as floats": [["1.0", 1], ["0.0", 0], ["1.0", 1], ["0.0", 0]],
        "0 and 1, as integers": [["1", 1], ["0", 0], ["1", 1], ["0", 0]] }[name];
      const rule = polar[value] ?? (value.startsWith("1 attends") ? polar.attends : value.startsWith("1 blocks") ? polar.blocks : null);
      if (marks && rule) return grid("a mask over 4 keys, and which of them a query sees: ●", [marks.map(([, on]) => rule(Boolean(on)))], marks.map(([text]) => text));
      if (name === "0 and −inf" && value.startsWith("added")) return grid("a mask over 4 keys, and which of them a query sees: ●", [[true, false, true, false]], ["0", "−inf", "0", "−inf"]);
      return null;
    };
    const show = () => {
      const one = byKey.get(who.value);
      const own = measured();
      const device = devices.find((input) => input.checked).value;
      for (const half of document.querySelectorAll(".on-cpu, .on-gpu")) half.hidden = half.className !== `on-${device}`;
      const name = what.value;
      const point = version.value && one.history.find((item) => item.with === version.value);
      const answers = (point || own)?.answers ?? {};
      const seen = answers[name];
      const feature = one.features[name];
      const list = make("dl");
      const line = (term, ...told) => add(list, make("dt", term), add(make("dd"), ...told));
      const supported = site.features.includes(name)
        ? (feature?.declared?.length ? "yes" : feature?.declared ? "no argument for it" : "not asked")
        : "";
      const refused = dtype.value && !own?.dtypes.includes(dtype.value);
      const heading = !own ? `not measured on a ${device.toUpperCase()}` : own.unavailable ? `could not be run: ${own.unavailable}` : refused ? "not in this dtype" : seen ? values(seen) : supported || "not seen in an experiment";
      line(site.asked[name][0], make("strong", heading));
      if (heading === (seen && values(seen))) add(list.lastChild, ...seen.map(([value]) => drawn(name, value)).filter(Boolean));
      if (feature?.declared?.length) line("How", make("code", feature.declared.join(", ")));
      else if (name.startsWith("Causal") && one.causal) line("How", make("code", one.causal[0]), ` aligned ${one.causal[1]}`);
      else if (one.arguments.length && !site.features.includes(name)) {
        line("How", ...one.arguments.flatMap(([argument, axes, yes, number], at) => [
          at ? make("br") : "", make("code", argument),
          ` [${axes}]` + (yes ? `, True ${yes}` : "") + (number ? `, a number ${number === "added" ? "is added" : number}` : ""),
        ]));
      }
      if (seen && own.history) line("Since", ...since(one, name));
      if (own && !point) {
        const reached = Object.entries(own.accuracy).filter(([name]) => !dtype.value || name === dtype.value);
        if (reached.length) line("Accuracy", reached.map((item) => item.join(" ")).join(", "));
        if (device === "cpu") line("Measured on", `a CPU${one.gpu ? "" : "; not measured on a GPU"}`);
        else line("Measured on", `${one.gpu.on}, ${one.gpu.date}`, ...(one.gpu.asked ? [", asked: ", make("code", one.gpu.asked)] : []));
      }
      const wrong = (own?.known ?? []).filter((item) =>
        (!dtype.value || item.dtypes.includes(dtype.value)) && (!point || point.known.includes(item.reason)));
      const entries = (some) => add(make("ul"), ...some.map((item) => {
        const entry = add(make("li"), make("strong", item.kind), `: ${item.reason} (${item.dtypes.join(", ")})`);
        if (item.link.startsWith("https:")) add(entry, " ", make("a", "link", { href: item.link }));
        if (item.script) add(entry, " ", make("a", "script", { href: `source/${item.script}.html` }));
        return entry;
      }));
      const here = wrong.filter((item) => item.about.includes(name));
      const others = wrong.filter((item) => !here.includes(item));
      if (own) line("What deviates", here.length ? entries(here) : wrong.length ? "Nothing known about this question." : "Nothing known.");
      if (others.length) {
        add(list.lastChild, add(make("details"), make("summary", `${here.length ? "Other" : "Known"} deviations: ${others.length}`), entries(others)));
      }
      line("More", make("a", "this implementation", { href: `implementations/${one.key}.html` }), ", ",
        make("a", "this question, everybody", { href: site.asked[name][1] }));
      answer.replaceChildren(list);
    };
    narrow(asked);
    form.addEventListener("change", (event) => {
      if (event.target === who || devices.includes(event.target)) narrow();
      keep(form);
      show();
    });
    form.addEventListener("submit", (event) => event.preventDefault());
    form.hidden = false;
    show();
  }

  const told = read("translator-data");
  const between = document.getElementById("translator-form");
  if (told?.masks && between) {
    const answer = document.getElementById("translator-answer");
    const mask = choice(between, "mask", "I have this mask");
    const from = choice(between, "from", "for this argument");
    const to = choice(between, "to", "and need it for");
    const names = told.arguments.map(([key, name], at) => [String(at), `${key}: ${name}`, told.names[key]]);
    const at = (wanted) => String(Math.max(told.arguments.findIndex(([key, name]) => `${key}:${name}` === wanted), 0));
    fill(mask, told.masks.map(([name], at) => [String(at), name]), asked.get("mask"));
    fill(from, names, asked.get("from") ?? at("torch-mha:attn_mask"));
    fill(to, names, asked.get("to") ?? at("keras-jax-mha:attention_mask"));
    const picture = (rows, entry) => {
      const said = `Entry ${entry} of the batch: rows are queries, columns are keys`;
      const table = make("table", undefined, { className: "answers-mask" });
      table.setAttribute("aria-label", said);
      for (const row of rows) {
        add(table, add(make("tr"), ...row.map((on) => make("td", on ? "●" : "·", { className: on ? "on" : "" }))));
      }
      return [make("p", said), table];
    };
    // A line for each row, as NumPy prints arrays.
    const python = (item, dtype, indent) =>
      Array.isArray(item) ? `[${item.map((one) => python(one, dtype, indent + " ")).join(Array.isArray(item[0]) ? `,\n${indent} ` : ", ")}]`
        : item === null ? "-inf" : dtype === "bool" ? (item ? "True" : "False") : String(item);
    const array = (name, at) => {
      const [dtype, shape, items] = told.arrays[at];
      const begin = `${name} = np.array(`;
      return `# ${name}, [${shape.join(", ")}]\n${begin}${python(items, dtype, " ".repeat(begin.length))}, "${dtype}")`;
    };
    const show = () => {
      const [one, other] = [told.arguments[from.value], told.arguments[to.value]];
      const [own, targets] = told.answers[mask.value][one[2]];
      const there = own < 0 ? own : targets[other[2]];
      const code = ["import numpy as np", "from numpy import inf"];
      const name = one[1] === other[1] ? `${other[1]}_there` : other[1];
      if (own >= 0) code.push(array(one[1], own));
      if (there >= 0) {
        const sizes = Object.entries(told.sizes).map(([axis, size]) => `${axis}=${size}`).join(", ");
        code.push(array(name, there), "# for any other mask:", "from conformance.porting.masks import translate",
          `${name} = translate(${one[1]}, source="${one[0]}:${one[1]}", target="${other[0]}:${other[1]}", ${sizes})`);
      }
      const pre = add(make("pre", undefined, { tabIndex: 0 }), make("code", code.join("\n")));
      pre.setAttribute("aria-label", "Code");
      pre.setAttribute("role", "region");
      const rows = told.masks[mask.value][1];
      const same = JSON.stringify(rows[0]) === JSON.stringify(rows[1]);
      const [who, what] = own < 0 ? one : other;
      answer.replaceChildren(
        make("p", there >= 0 ? `What ${told.names[who]} takes as ${what}:`
          : `${told.names[who]} cannot take it as ${what}: ${told.problems[-1 - there]}.`),
        ...(same ? picture(rows[0], "0 and 1") : rows.flatMap(picture)), ...(own < 0 ? [] : [pre]));
    };
    between.addEventListener("change", () => { keep(between); show(); });
    between.addEventListener("submit", (event) => event.preventDefault());
    between.hidden = false;
    show();
  }
})();
