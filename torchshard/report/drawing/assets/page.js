"use strict";
const facts = JSON.parse(document.getElementById("facts").textContent);
const rows = new Map([...document.querySelectorAll(".row")].map((row) => [row.id, row]));
const by = (id) => document.getElementById(id), panel = by("panel"), list = by("fact-list");
const seen = (element) => element.checkVisibility();
let hits = [], at = -1;

const fact = (id) => facts.sides[id[0]][id.slice(1)];
const told = (id, name) => facts.texts[fact(id)[facts.told.indexOf(name) + 1] ?? 0];
const from = (id) => fact(id)[0].map((number) => id[0] + number);
const takers = new Map([...rows.keys()].map((id) => [id, []]));
for (const row of rows.values()) {
  row.tabIndex = -1;
  row.setAttribute("role", "button");
}
for (const button of document.querySelectorAll("[data-key]")) button.title = "copy this key of a plan";
for (const id of rows.keys()) for (const near of from(id)) takers.get(near)?.push(id);
const label = (id) => `${told(id, "module")} ${rows.get(id)?.firstChild.textContent ?? id}`.trim();

function meaning(type) {
  const letters = [/[^ PR]@/.test(type) && "S", /P@/.test(type) && "P", /R@/.test(type) && "R"].filter(Boolean);
  return (letters.length ? letters : ["I"]).map((letter) => facts.meanings[letter]).join("; ");
}

function describe(row) {
  const type = row.querySelector("u"), id = row.id;
  if (type.textContent) type.title = meaning(type.textContent);
  const why = told(id, "why");
  row.title = why ? `${why}; for ${told(id, "for")}; ${told(id, "costs")}` : told(id, "row");
}

function reveal(element) {
  for (let up = element.parentElement; up; up = up.parentElement) if (up.tagName === "DETAILS") up.open = true;
  if (element.closest(".book")) show("books", true);
  if (!element.classList.contains("collective")) show("only", false);
}

function show(id, on) {
  by(id).checked = on;
  document.body.classList.toggle(id, on);
}

function copyButton(text) {
  const button = document.createElement("button");
  button.dataset.key = text;
  button.textContent = "copy";
  return button;
}

function entry(name, ...told) {
  const term = document.createElement("dt"), value = document.createElement("dd");
  term.textContent = name;
  value.append(...told);
  list.append(term, value);
}

function pick(id, scroll) {
  const row = rows.get(id);
  if (!row) return;
  for (const other of rows.values()) other.classList.remove("picked", "near");
  row.classList.add("picked");
  for (const near of [...from(id), ...takers.get(id)]) rows.get(near)?.classList.add("near");
  list.replaceChildren();
  const [, detail, type] = [...row.children].map((cell) => cell.textContent);
  for (const name of facts.told) {
    const text = told(id, name);
    if (text) entry(name, text, ...(name === "key" ? [" ", copyButton(text)] : []));
    if (name === "module") {
      if (type) entry("type", `${type}: ${meaning(type)}`);
      if (detail) entry("split", detail);
    }
  }
  for (const [name, ids] of [["takes", from(id)], ["goes to", takers.get(id)]]) {
    if (!ids.length) continue;
    entry(name, ...ids.map((near) => {
      const link = document.createElement("button");
      link.className = "link";
      link.dataset.row = near;
      link.textContent = label(near);
      return link;
    }));
  }
  panel.classList.add("open");
  if (scroll) {
    reveal(row);
    row.scrollIntoView({ block: "center" });
  }
}

function search(text) {
  const wanted = text.trim().toLowerCase();
  hits = [];
  at = -1;
  for (const [id, row] of rows) {
    const texts = () => facts.told.map((name) => told(id, name)).join(" ") + " " + [...row.children].map((c) => c.textContent).join(" ");
    const hit = wanted !== "" && texts().toLowerCase().includes(wanted);
    row.classList.toggle("found", hit);
    if (hit) hits.push(row);
  }
  by("hits").textContent = wanted === "" ? "" : `${hits.length} found`;
}

function go(by_) {
  if (!hits.length) return;
  at = at < 0 && by_ < 0 ? hits.length - 1 : (at + by_ + hits.length) % hits.length;
  pick(hits[at].id, true);
  by("hits").textContent = `${at + 1} of ${hits.length}`;
}

function close() {
  panel.classList.remove("open");
  document.querySelector(".picked")?.focus();
}

document.body.addEventListener("click", (event) => {
  const copy = event.target.closest("[data-key]"), link = event.target.closest("[data-row]"), row = event.target.closest(".row");
  if (copy) {
    event.preventDefault();
    navigator.clipboard?.writeText(copy.dataset.key).catch(() => {});
    by("hits").textContent = `copied ${copy.dataset.key}`;
  } else if (link) pick(link.dataset.row, true);
  else if (row) pick(row.id, false);
});
document.body.addEventListener("pointerover", (event) => {
  const row = event.target.closest(".row");
  if (row) describe(row);
});
document.body.addEventListener("keydown", (event) => {
  if (event.target.tagName === "INPUT") {
    if (event.key === "Enter") go(event.shiftKey ? -1 : 1);
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (event.key === "/") {
    event.preventDefault();
    by("search").focus();
  } else if (event.key === "Escape") close();
  else if ((event.key === "ArrowDown" || event.key === "ArrowUp") && event.target.closest("#tree")) {
    const stops = [...document.querySelectorAll("#tree summary, #tree .row")].filter(seen);
    const next = stops[stops.indexOf(document.activeElement) + (event.key === "ArrowDown" ? 1 : -1)];
    if (!next) return;
    event.preventDefault();
    next.focus();
    if (next.classList.contains("row")) describe(next);
  } else if (event.key === "Enter" && event.target.classList.contains("row")) pick(event.target.id, false);
});
by("search").addEventListener("input", (event) => search(event.target.value));
by("next").addEventListener("click", () => go(1));
by("before").addEventListener("click", () => go(-1));
by("close").addEventListener("click", close);
for (const id of ["only", "books"]) by(id).addEventListener("change", (event) => show(id, event.target.checked));
for (const [id, open] of [["open-all", true], ["fold-all", false]]) {
  by(id).addEventListener("click", () => document.querySelectorAll("main details").forEach((d) => (d.open = open)));
}
