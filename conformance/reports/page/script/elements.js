// Elements made of text: what a record says becomes a text node, and never markup.

const SVG = "http://www.w3.org/2000/svg";

function put(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick") element.addEventListener("click", value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== "" && child != null));
  return element;
}

const el = (tag, attributes = {}, ...children) =>
  put(document.createElement(tag), attributes, children);
const draw = (tag, attributes = {}, ...children) =>
  put(document.createElementNS(SVG, tag), attributes, children);

const each = (selector, act, root = document) => root.querySelectorAll(selector).forEach(act);
const unseen = (text) => el("span", { class: "unseen" }, text);
const number = (value) => value.toLocaleString("en-US");
const plural = (value, word) => `${number(value)} ${word}${value === 1 ? "" : "s"}`;

const superscript = (power) =>
  [...String(power)].map((digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit]).join("");

// A ratio in σ, as the rest of the page writes it.
const INFINITE = 1e300;
function ratio(value) {
  if (value >= INFINITE) return "∞";
  if (value === 0) return "0";
  if (value >= 1e4) {
    const [mantissa, exponent] = value.toExponential(1).split("e");
    return `${mantissa}×10${superscript(Number(exponent))}`;
  }
  if (value >= 10) return number(Math.round(value));
  return value >= 0.05 ? value.toFixed(1) : value.toPrecision(1);
}

// A word for a POSIX shell.
const quoted = (word) =>
  /^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`;

// A name that may break after its punctuation.
const breakable = (name) =>
  name.split(/(?<=[._/])|(?<=\w-)/).flatMap((part, place) => (place ? [el("wbr"), part] : [part]));

// A command, as it is typed into a shell.
const command = (text) => copyable(el("pre", { class: "command" }, el("code", {}, text)));
const shell = (words) => command(words.map(quoted).join(" "));

function copyable(block) {
  const button = el("button", { type: "button" }, "Copy");
  button.addEventListener("click", async () => {
    const code = block.querySelector("code");
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(code);
      button.textContent = "Selected";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 1600);
  });
  block.append(button);
  const code = block.querySelector("code");
  if (!code.textContent.includes("\n")) {
    // Options are not broken after their dashes.
    const words = code.textContent.split(" ").flatMap((word) => [" ", el("span", { class: "word" }, word)]);
    code.replaceChildren(...words.slice(1));
  }
  return block;
}
