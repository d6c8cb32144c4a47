// Opens the link to a trajectory in the dashboard, and prints how its turns are shown.
// Arguments: where jsdom is installed, the gateway's URL, the trajectory's id.

import { open } from "./dashboard_open.mjs";

const [, , home, url, id] = process.argv;
const { faults, all, rows, until } = await open(home, url, `#${id}`);
await until("the trajectory", () => rows("one").length > 0);
const spans = all("#one rect").map((span) => ["x", "width"].map((name) => parseFloat(span.getAttribute(name))));
console.log(JSON.stringify({ turns: rows("one"), spans, faults }));
process.exit(0);
