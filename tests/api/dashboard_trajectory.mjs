// Opens the link to a trajectory in the dashboard, and prints how its turns are shown.
// Arguments: where jsdom is installed, the gateway's URL, the trajectory's id, and, if the address is then changed to
// another trajectory, its id and the number of its turns.

import { open } from "./dashboard_open.mjs";

const [, , home, url, id, nextId, numTurns] = process.argv;
const { dom, faults, all, rows, until } = await open(home, url, `#${id}`);
await until("the trajectory", () => rows("one").length > 0);
if (nextId) {
  dom.window.location.hash = nextId;
  await until("the next trajectory", () => rows("one").length === Number(numTurns));
}
const spans = all("#one rect").map((span) => ["x", "width"].map((name) => parseFloat(span.getAttribute(name))));
console.log(JSON.stringify({ turns: rows("one"), spans, faults }));
process.exit(0);
