"use strict";
const facts = JSON.parse(document.getElementById("facts").textContent);
const rows = new Map([...document.querySelectorAll(".row")].map((row) => [row.id, row]));
const panel = document.getElementById("panel"), list = document.getElementById("fact-list");

function reveal(element) {
  for (let up = element.parentElement; up; up = up.parentElement) if (up.tagName === "DETAILS") up.open = true;
}

function pick(id, scroll) {
  const row = rows.get(id), fact = facts[id];
  if (!row || !fact) return;
  for (const other of rows.values()) other.classList.remove("picked", "near");
  row.classList.add("picked");
  for (const near of [...fact.from, ...fact.to]) rows.get(near)?.classList.add("near");
  list.replaceChildren();
  for (const [name, value] of Object.entries(fact.shown)) {
    const term = document.createElement("dt"), told = document.createElement("dd");
    term.textContent = name;
    told.textContent = value;
    list.append(term, told);
  }
  for (const [name, ids] of [["takes", fact.from], ["goes to", fact.to]]) {
    if (!ids.length) continue;
    const term = document.createElement("dt"), told = document.createElement("dd");
    term.textContent = name;
    ids.forEach((near, i) => {
      const link = document.createElement("a");
      link.textContent = (i ? ", " : "") + (facts[near]?.name ?? near);
      link.addEventListener("click", () => pick(near, true));
      told.append(link);
    });
    list.append(term, told);
  }
  panel.classList.add("open");
  if (scroll) {
    reveal(row);
    row.scrollIntoView({ block: "center" });
  }
}

function search(text) {
  const wanted = text.trim().toLowerCase();
  let count = 0;
  for (const [id, row] of rows) {
    const hit = wanted !== "" && facts[id].search.includes(wanted);
    row.classList.toggle("found", hit);
    if (hit && ++count <= 200) reveal(row);
  }
  document.getElementById("hits").textContent = wanted === "" ? "" : count + " found";
}

document.body.addEventListener("click", (event) => {
  const row = event.target.closest(".row"), link = event.target.closest("[data-row]");
  if (row) pick(row.id, false);
  else if (link) pick(link.dataset.row, true);
});
document.getElementById("search").addEventListener("input", (event) => search(event.target.value));
document.getElementById("close").addEventListener("click", () => panel.classList.remove("open"));
document.getElementById("open-all").addEventListener("click", () => document.querySelectorAll("main details").forEach((d) => (d.open = true)));
document.getElementById("fold-all").addEventListener("click", () => document.querySelectorAll("main details").forEach((d) => (d.open = false)));
