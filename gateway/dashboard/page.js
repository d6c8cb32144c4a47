// The dashboard: asks the gateway every two seconds, and shows what it answers. While nobody looks, it asks nothing.

"use strict";

const EVERY_MS = 2000;
const ACTIVE = ["running", "waiting", "in_tool_call", "declared"];
const DOING = ["finished", ...ACTIVE, "aborted"];
const WORDS = { in_tool_call: "in a tool call" };
const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

// --- asking ------------------------------------------------------------------------------------------------------

class Refused extends Error {}

let key = sessionStorage.getItem("heddle-key") ?? "";

async function ask(path) {
  const answer = await fetch(path, { headers: key ? { authorization: `Bearer ${key}` } : {}, cache: "no-store" });
  const said = await answer.json();
  if (answer.ok || path === "healthz") return said; // which is 503 once another gateway has taken over
  if (answer.status === 401) throw new Refused(key ? "The gateway does not know this key." : "");
  if (answer.status === 403) throw new Refused(said.error.message); // a key of agents
  throw new Error(said.error?.message ?? `the gateway answered ${answer.status}`);
}

async function refresh() {
  try {
    const [overview, engines, health] = await Promise.all([ask("v1/overview"), ask("v1/engines"), ask("healthz")]);
    show(overview, engines.data, health);
    const hadNoKey = !$("key").hidden;
    $("key").hidden = true;
    document.querySelector("main").hidden = false;
    if (hadNoKey) showLinked();
  } catch (error) {
    const isRefused = error instanceof Refused;
    $("key").hidden = !isRefused;
    tell(isRefused ? error.message : `No news: ${error.message}. What is below is old.`, !isRefused || key !== "");
  }
}

async function keepFresh() {
  for (;;) {
    if (!document.hidden) await refresh();
    await new Promise((resolve) => setTimeout(resolve, EVERY_MS));
  }
}

// --- words and numbers -------------------------------------------------------------------------------------------

const count = (number) => (number ?? 0).toLocaleString("en");

function short(number) {
  const rounded = Number(number.toPrecision(3)); // 999,700 is 1.00 M
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "K"]])
    if (rounded >= size) return `${(rounded / (unit === "K" ? 1e3 : size)).toPrecision(3)} ${unit}`;
  return count(Math.round(number));
}

function duration(seconds) {
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 600) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

const percent = (share) => `${Math.round(100 * share)} %`;
const word = (name) => WORDS[name] ?? name;

function tell(text, isBad) {
  $("status").textContent = text;
  $("status").className = isBad ? "bad" : "";
}

// --- pieces of a page --------------------------------------------------------------------------------------------

function make(tag, attributes, ...children) {
  const made = tag.startsWith("svg:") ? document.createElementNS(SVG, tag.slice(4)) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) made.setAttribute(name, value);
  made.append(...children.map((child) => child ?? ""));
  return made;
}

function table(heads, rows, none) {
  if (!rows.length) return make("p", { class: "dim" }, none);
  const cells = (tag, row) => row.map((cell) => (cell instanceof Element && cell.matches("td, th") ? cell : make(tag, {}, cell)));
  const top = make("thead", {}, make("tr", {}, ...cells("th", heads)));
  return make("table", {}, top, make("tbody", {}, ...rows.map((row) => make("tr", {}, ...cells("td", row)))));
}

const text = (content) => make("td", { class: "text" }, content);
const head = (content) => make("th", { class: "text" }, content);

// Parts of a whole, side by side: [[class, number], ...].
function bar(parts, whole) {
  const said = parts.length > 1 ? { title: parts.map(([kind, number]) => `${count(number)} ${word(kind)}`).join(", ") } : {};
  const made = make("span", { class: "bar", ...said });
  for (const [kind, number] of parts) {
    const part = make("i", { class: kind });
    part.style.width = `${(100 * number) / (whole || 1)}%`;
    if (number) made.append(part);
  }
  return made;
}

// The same with its words, which take the same room in every row.
const barred = (parts, whole, words) => make("span", {}, bar(parts, whole), make("span", { class: "words" }, words));

// A line over a width of 100 and a height of 100; the points are equally far apart, or at `xs`.
function line(ys, top, kind, xs = ys.map((_, index) => index)) {
  const [first, last] = [xs[0], xs.at(-1)];
  const at = ys.map((y, index) => `${((xs[index] - first) / (last - first || 1)) * 100},${100 - (100 * y) / (top || 1)}`);
  return make("svg:polyline", { class: kind, points: at.join(" ") });
}

function picture(kind, ...lines) {
  return make("svg:svg", { class: kind, viewBox: "0 0 100 100", preserveAspectRatio: "none", "aria-hidden": "true" }, ...lines);
}

// --- what is shown -----------------------------------------------------------------------------------------------

function show(overview, engines, health) {
  const ready = engines.filter((engine) => engine.state === "ready").length;
  const store = health.store.ok ? "" : `; the store is away: ${health.store.detail}`;
  tell(`${ready} of ${engines.length} engines ready; policy ${health.policy}${store}`, !ready || !health.store.ok);
  showNow(overview);
  showLately(overview.history);
  $("rollouts").replaceChildren(rolloutsTable(overview));
  $("engines").replaceChildren(enginesTable(engines));
  $("longest").replaceChildren(longestTable(overview.longest));
}

function showNow(overview) {
  const tiles = [...ACTIVE, "finished", "aborted"].map((doing) => {
    const number = overview.num_trajectories[doing] ?? 0;
    return make("div", { class: doing }, make("b", {}, count(number)), make("span", {}, word(doing)));
  });
  $("now").replaceChildren(...tiles);
}

function showLately(history) {
  const at = history.at;
  const last = (name) => history[name].at(-1);
  const rates = outputRates(history);
  const turns = Math.max(1, ...history.num_running_turns, ...history.num_waiting_turns);
  const speed = Math.max(1, ...rates);
  const figure = (caption, ...lines) => make("figure", {}, make("figcaption", {}, ...caption), picture("", ...lines));
  const name = (kind, words) => make("span", { class: `name ${kind}` }, words);
  $("lately").replaceChildren(
    figure(
      ["Turns: ", name("running", `${count(last("num_running_turns"))} running`), " ",
        name("waiting", `${count(last("num_waiting_turns"))} waiting`), ` (at most ${count(turns)})`],
      line(history.num_running_turns, turns, "running", at),
      line(history.num_waiting_turns, turns, "waiting", at),
    ),
    figure([`KV claimed: ${percent(last("kv_claimed_share"))}`], line(history.kv_claimed_share, 1, "running", at)),
    figure(
      [`Output, of turns that ended: ${short(rates.at(-1))} tokens/s (at most ${short(speed)})`],
      line(rates, speed, "finished", at),
    ),
  );
}

// Tokens per second over the minute before each sample: tokens are counted when a turn ends.
function outputRates({ at, output_tokens: made }) {
  let first = 0;
  return at.map((now, index) => {
    while (at[first] < now - 60) first += 1;
    return (made[index] - made[first]) / Math.max(now - at[first], 5);
  });
}

function rolloutsTable({ rollouts, num_rollouts: all }) {
  const rows = rollouts.map((rollout) => {
    const counts = rollout.num_trajectories;
    const whole = DOING.reduce((sum, doing) => sum + counts[doing], 0);
    const ended = counts.finished + counts.aborted;
    return [
      rollout.id ?? make("span", { class: "dim" }, "without a rollout"),
      bar(DOING.map((doing) => [doing, counts[doing]]), whole),
      `${count(ended)} of ${count(whole)}`,
      picture("small", line(rollout.num_ended, whole, "finished")),
      short(rollout.output_tokens),
      short(rollout.remaining_tokens),
      duration(rollout.until - rollout.began_at),
    ];
  });
  const heads = ["", "trajectories", "ended", "ended over time", "tokens made", "predicted to come", "time"];
  const shown = table(heads, rows, "None yet.");
  return all > rows.length ? make("div", {}, shown, make("p", { class: "dim" }, `${count(all)} rollouts; these are the latest.`)) : shown;
}

function enginesTable(engines) {
  const latest = Math.max(1e-9, ...engines.map((engine) => engine.finish_s ?? 0));
  const rows = engines.map((engine) => {
    const isWell = engine.state === "ready" && !engine.is_cordoned;
    const state = engine.is_cordoned ? `${engine.state}, cordoned` : engine.state;
    const capacity = engine.kv_capacity_tokens;
    const claimed = capacity ? engine.kv_claimed_tokens / capacity : 0;
    return [
      engine.id,
      text(make("span", { class: isWell ? "" : "bad", title: engine.last_fault ?? "" }, state)),
      engine.tp,
      barred([["running", engine.num_legs]], engine.slots, `${count(engine.num_legs)} of ${engine.slots ? count(engine.slots) : "?"}`),
      count(engine.num_trajectories),
      capacity ? barred([["in_tool_call", engine.kv_claimed_tokens]], capacity, percent(claimed)) : "unknown",
      barred([["running", engine.finish_s ?? 0]], latest, duration(engine.finish_s ?? 0)),
    ];
  });
  return table(["", head("state"), "TP", "turns", "trajectories", "KV claimed", "work left"], rows, "None.");
}

function longestTable(longest) {
  const most = Math.max(1, ...longest.map((one) => one.remaining_tokens));
  const rows = longest.map((one) => [
    idButton(one.id),
    text(one.rollout_id),
    text(make("span", { class: one.doing }, word(one.doing))),
    text(one.home),
    count(one.num_turns),
    short(one.output_tokens) + (one.live_chunks ? ` + ${short(one.live_chunks)}` : ""),
    short(one.context_tokens),
    barred([["running", one.remaining_tokens]], most, short(one.remaining_tokens)),
  ]);
  const heads = ["", head("rollout"), head("now"), head("home"), "turns", "tokens made", "context", "predicted to come"];
  return table(heads, rows, "No trajectory is active.");
}

function idButton(id) {
  const button = make("button", { class: "id", type: "button" }, id);
  button.addEventListener("click", () => showOne(id));
  return make("td", { class: "text long" }, button);
}

// --- one trajectory ----------------------------------------------------------------------------------------------

// The one that the page's address names, if any.
function showLinked() {
  let id = location.hash.slice(1);
  try {
    id = decodeURIComponent(id);
  } catch {
    // Written by hand, with a "%" that stands for itself.
  }
  if (id) showOne(id);
}

async function showOne(id) {
  $("find").querySelector("input").value = id;
  history.replaceState(null, "", `#${encodeURIComponent(id)}`); // so that one can link to it
  try {
    // A slash within an id stays one: the route takes the rest of the path.
    const one = await ask(`v1/trajectories/${id.split("/").map(encodeURIComponent).join("/")}`);
    $("one").replaceChildren(...trajectoryView(one));
  } catch (error) {
    $("one").replaceChildren(make("p", { class: "bad" }, error.message));
  }
  $("one").scrollIntoView?.({ behavior: "smooth", block: "nearest" });
}

const hasFinished = (turn) => turn.outcome === "finished";

function trajectoryView(one) {
  const about = [
    one.state, one.rollout_id && `rollout ${one.rollout_id}`, one.home && `home ${one.home}`,
    `${count(one.output_tokens)} tokens made`, `${short(one.predicted_tokens)} predicted in all`,
    `context ${count(one.context_tokens)}`,
  ];
  // Only finished turns count as turns of the trajectory, and the oldest may have left its history.
  let number = one.num_turns - one.turns.filter(hasFinished).length;
  const rows = one.turns.map((turn) => [
    hasFinished(turn) ? count((number += 1)) : "",
    text(make("span", { class: hasFinished(turn) ? "" : "bad", title: turn.error?.message ?? "" }, turn.outcome)),
    text(turn.engine), text(turn.why),
    duration(turn.queued_s ?? 0), duration(turn.ended_at - turn.arrived_at),
    count(turn.prompt_tokens), count(turn.cached_tokens), count(turn.output_tokens), count(turn.legs),
  ]);
  const heads = ["turn", head("outcome"), head("engine"), head("why there"), "waited", "took", "prompt", "cached", "output", "legs"];
  return [
    make("p", {}, about.filter(Boolean).join(", ")),
    one.turns.length ? turnsPicture(one.turns) : "",
    table(heads, rows, "No turn has ended yet."),
    ...one.live_turns.map((turn) => make("p", { class: turn.state }, `a turn is ${turn.state}: ${count(turn.chunks)} chunks, waited ${duration(turn.waited_s)}`)),
  ];
}

// When its turns waited and ran, on the engines one under the other; between them, tools did.
function turnsPicture(turns) {
  const engines = [...new Set(turns.map((turn) => turn.engine))];
  // They are in the order of their ends: the first to end may have begun beside an older one.
  const began = Math.min(...turns.map((turn) => turn.arrived_at));
  const ended = Math.max(...turns.map((turn) => turn.ended_at));
  const x = (at) => 20 + (75 * (at - began)) / (ended - began || 1);
  const row = (engine) => 2 + 16 * engines.indexOf(engine);
  const span = (kind, turn, from, to) =>
    make("svg:rect", { class: kind, x: `${x(from)}%`, width: `${Math.max(x(to) - x(from), 0.15)}%`, y: row(turn.engine), height: 12 });
  const names = engines.map((engine) => make("svg:text", { x: 0, y: row(engine) + 10 }, engine ?? "none"));
  const spans = turns.flatMap((turn) => {
    const runs = turn.arrived_at + (turn.queued_s ?? 0);
    return [span("waiting", turn, turn.arrived_at, runs), span("running", turn, runs, turn.ended_at)];
  });
  const foot = 14 + 16 * engines.length;
  const scale = [make("svg:text", { x: "20%", y: foot }, "0"), make("svg:text", { x: "95%", y: foot, "text-anchor": "end" }, duration(ended - began))];
  return make("svg:svg", { class: "turns", height: foot + 4, "aria-hidden": "true" }, ...names, ...spans, ...scale);
}

// --- the beginning -----------------------------------------------------------------------------------------------

$("key").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").querySelector("input").value.trim();
  sessionStorage.setItem("heddle-key", key);
  refresh();
});
$("find").addEventListener("submit", (event) => {
  event.preventDefault();
  showOne($("find").querySelector("input").value.trim());
});
document.addEventListener("visibilitychange", () => document.hidden || refresh());
window.addEventListener("hashchange", showLinked);
showLinked();
keepFresh();
