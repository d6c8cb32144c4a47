// Opens the dashboard in jsdom as a person would, and prints what there is to read.
// Arguments: where jsdom is installed, the gateway's URL, a key, the end of the page's address ("" or "#" and an id).

import { open, words } from "./dashboard_open.mjs";

const [, , home, url, key, link] = process.argv;
const { dom, document, faults, all, rows, until } = await open(home, url, link);

function enter(form, text) {
  document.querySelector(`#${form} input`).value = text;
  document.querySelector(`#${form} button`).click();
}

const seen = { url: dom.window.location.href };
await until("the question for a key", () => !document.querySelector("#key").hidden);
seen.isHiddenWithoutKey = document.querySelector("main").hidden;
enter("key", "no-such-key");
await until("the refusal", () => words(document.querySelector("#status")).includes("does not know"));
enter("key", "a-key-of-agents");
await until("the refusal of an agent's", () => words(document.querySelector("#status")).includes("needs a client key"));
enter("key", key);
await until("the figures", () => document.querySelector("#key").hidden && rows("longest").length === 2);
seen.status = words(document.querySelector("#status"));
seen.now = Object.fromEntries(all("#now div").map((tile) => [words(tile.querySelector("span")), words(tile.querySelector("b"))]));
seen.lately = all("#lately figcaption").map(words);
seen.numLines = all("#lately polyline").length;
for (const id of ["rollouts", "engines", "longest"]) seen[id] = rows(id);
if (link) await until("the trajectory of the link", () => words(document.querySelector("#one")).includes("No trajectory"));
seen.linked = words(document.querySelector("#one"));
document.querySelector("#longest button.id").click();
await until("the trajectory", () => rows("one").length === 1);
seen.one = { hash: dom.window.location.hash, about: words(document.querySelector("#one p")), turns: rows("one") };
seen.one.spans = all("#one rect").map((rect) => rect.getAttribute("class"));
enter("find", "no/such one");
await until("the word that there is none", () => document.querySelector("#one .bad") !== null);
seen.unknown = words(document.querySelector("#one"));
seen.styles = document.styleSheets.length;
seen.injected = all("script").length;
seen.faults = faults;
console.log(JSON.stringify(seen));
process.exit(0);
