"use strict";
// Comfort only: without this file everything on the page can be read and reached.

const each = (selector, act) => document.querySelectorAll(selector).forEach(act);

// Copy buttons on commands.
each("pre.command", (block) => {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    const text = block.querySelector("code").textContent;
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(block.querySelector("code"));
      button.textContent = "Selected";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 1600);
  });
  block.append(button);
});

// A link to evidence opens its panel.
function open() {
  const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const panel = target && target.closest("details");
  if (panel && !panel.open) {
    panel.open = true;
    target.scrollIntoView();
  }
}
addEventListener("hashchange", open);
open();

// Paper has no panels to open. Evidence is printed where the reader opened it: there is much of it.
addEventListener("beforeprint", () => each("section > details", (panel) => { panel.open = true; }));

// The filter: `data-for` says which implementations an element speaks of, by their numbers.
const form = document.querySelector(".filter");
if (form) {
  const text = document.getElementById("filter-text");
  const wrong = document.getElementById("filter-wrong");
  const every = new Map();
  each(".compared tr[data-for]", (row) => {
    const deviates = row.dataset.standing === "deviates";
    const group = row.parentElement.querySelector("th").textContent;
    every.set(row.dataset.for.trim(), { deviates, name: `${row.textContent} ${group}`.toLowerCase() });
  });
  const apply = () => {
    const words = text.value.toLowerCase().split(/\s+/).filter(Boolean);
    const shown = new Set();
    every.forEach((own, number) => {
      const named = words.every((word) => own.name.includes(word));
      if (named && (own.deviates || !wrong.checked)) shown.add(number);
    });
    each("[data-for]", (element) => {
      const own = element.dataset.for.trim().split(/\s+/);
      const left = own.filter((number) => shown.has(number)).length;
      element.toggleAttribute("data-hidden", left === 0);
      if (element.matches("th[scope=colgroup]") && left) element.colSpan = left;
    });
    each(".compared tbody", (body) => {
      const rows = [...body.rows];
      const left = rows.filter((row) => !row.hasAttribute("data-hidden"));
      body.toggleAttribute("data-hidden", left.length === 0);
      const head = body.querySelector("th");
      if (left.length && head) {
        left[0].prepend(head);
        head.rowSpan = left.length;
      }
    });
    document.getElementById("filter-told").textContent =
      shown.size === every.size ? "" : `${shown.size} of ${every.size} implementations`;
  };
  form.hidden = false;
  form.addEventListener("input", apply);
  form.addEventListener("submit", (event) => event.preventDefault());
}
