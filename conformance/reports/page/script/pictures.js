// Pictures: who may attend whom, and how far an answer is from what was wanted.

// A record is a stranger's: whatever its sizes are, drawing it must end.
const MOST = 1 << 18;

function maskPicture(plane, caseName) {
  const { queries, keys, runs } = plane;
  const total = queries * keys;
  if (!(runs.length && queries > 0 && keys > 0 && total <= MOST)) return el("p", { class: "muted" }, "Too large to be drawn.");
  const size = Math.max(1, Math.min(18, Math.floor(340 / Math.max(queries, keys))));
  const small = size >= 8;
  const edge = small ? 16 : 4;
  const gap = small ? 1.5 : 0;
  const parts = { yes: [], no: [] };
  let at = 0, seen = 0;
  const rows = Array.from({ length: queries }, () => []);
  runs.forEach((length, place) => {
    const allowed = place % 2 === 1;
    for (let left = Math.min(length, total - at); left > 0;) {
      const query = Math.floor(at / keys), key = at % keys;
      const wide = Math.min(left, keys - key);
      if (allowed) { seen += wide; rows[query].push([key, key + wide - 1]); }
      const x = edge + key * size, y = edge + query * size;
      if (!small && allowed) parts.yes.push(`M${x} ${y}h${wide * size}v${size}h${-wide * size}z`);
      for (let step = 0; small && step < wide; step += 1) {
        const left = x + step * size;
        if (allowed) parts.yes.push(`M${left} ${y}h${size - gap}v${size - gap}h${gap - size}z`);
        else parts.no.push(`M${left + size * 0.36} ${y + size * 0.36}l${size * 0.2} ${size * 0.2}m0 ${-size * 0.2}l${-size * 0.2} ${size * 0.2}`);
      }
      at += wide;
      left -= wide;
    }
  });
  const width = edge + keys * size + 2, height = edge + queries * size + 2;
  const label = `Mask of ${caseName}${plane.where ? `, ${plane.where}` : ""}: ${plural(queries, "query").replace("querys", "queries")} by ${plural(keys, "key")}, ${number(seen)} of ${number(total)} may be attended`;
  const picture = draw("svg", { class: "mask", role: "img", "aria-label": label, width, height,
    viewBox: `0 0 ${width} ${height}` },
  draw("rect", { class: "ground", x: edge - 1, y: edge - 1, width: keys * size + 2 - gap, height: queries * size + 2 - gap }),
  draw("path", { class: "yes", d: parts.yes.join("") }),
  draw("path", { class: "no", d: parts.no.join("") }));
  if (small) {
    const step = Math.max(keys, queries) > 12 ? 5 : 1;
    for (let key = 0; key < keys; key += step) {
      picture.append(draw("text", { x: edge + (key + 0.5) * size - gap / 2, y: 10, "text-anchor": "middle" }, String(key)));
    }
    for (let query = 0; query < queries; query += step) {
      picture.append(draw("text", { x: 10, y: edge + (query + 0.5) * size + 3, "text-anchor": "end" }, String(query)));
    }
  }
  const ranges = (own) => own.map(([from, to]) => (from === to ? from : `${from}–${to}`)).join(", ") || "none";
  return el("figure", { class: "plane" }, picture,
    el("figcaption", {}, plane.where || "every batch entry and head",
      queries <= 32 ? el("details", {}, el("summary", {}, "in words"),
        el("ul", {}, rows.map((own, query) =>
          el("li", {}, `query ${query} may attend ${own.length ? `keys ${ranges(own)}` : "no key"}`)))) : ""));
}

// A logarithmic axis in σ: what is allowed, the limit, the typical and the worst error.
function gauge(figures) {
  const lowest = 0.01, highest = Math.max(1000, figures.limit * 10, Math.min(figures.max * 10, 1e20));
  const width = 560, left = 14, right = width - 14;
  const x = (value) => {
    const inside = Math.min(Math.max(value, lowest), highest);
    return left + (right - left) * Math.log(inside / lowest) / Math.log(highest / lowest);
  };
  const over = figures.max > figures.limit;
  const ticks = [];
  for (let power = -2; 10 ** power <= highest; power += 1) ticks.push(power);
  const step = Math.ceil(ticks.length / 8);
  const label = `${figures.array}: worst ${ratio(figures.max)} σ, typical ${ratio(figures.rms)} σ, allowed ${figures.limit} σ`;
  const picture = draw("svg", { class: `gauge ${over ? "out" : "in"}`, role: "img", "aria-label": label,
    viewBox: `0 0 ${width} 62` });
  picture.append(
    draw("rect", { class: "within", x: left, y: 20, width: x(figures.limit) - left, height: 22, rx: 3 }),
    draw("rect", { class: "over", x: x(figures.limit), y: 20, width: right - x(figures.limit), height: 22, rx: 3 }),
    ...ticks.filter((_, place) => place % step === 0).flatMap((power) => [
      draw("line", { class: "tick", x1: x(10 ** power), x2: x(10 ** power), y1: 20, y2: 42 }),
      draw("text", { x: x(10 ** power), y: 57, "text-anchor": "middle" }, ratioTick(power))]),
    draw("line", { class: "limit", x1: x(figures.limit), x2: x(figures.limit), y1: 14, y2: 46 }),
    draw("text", { class: "limit", x: x(figures.limit), y: 10, "text-anchor": "middle" }, `allowed ${figures.limit}σ`),
    draw("line", { class: "range", x1: x(figures.rms), x2: x(figures.max), y1: 31, y2: 31 }),
    draw("circle", { class: "typical", cx: x(figures.rms), cy: 31, r: 5 }),
    figures.max > highest
      ? draw("path", { class: "worst", d: `M${right - 8} 24L${right + 4} 31L${right - 8} 38Z` })
      : draw(over ? "path" : "circle", over
        ? { class: "worst", d: `M${x(figures.max)} 24l7 7l-7 7l-7-7z` }
        : { class: "worst", cx: x(figures.max), cy: 31, r: 6 }));
  return picture;
}
const ratioTick = (power) => (power < 0 ? `${10 ** power}` : power < 4 ? number(10 ** power)
  : `10${superscript(power)}`);
