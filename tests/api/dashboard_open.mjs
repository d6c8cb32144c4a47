// Opens the dashboard in jsdom, for the scripts beside this.

import { createRequire } from "node:module";

export const words = (element) => element.textContent.replace(/\s+/g, " ").trim();

// The page, what jsdom found faulty in it, and ways to read it.
export async function open(home, url, link) {
  const { JSDOM, VirtualConsole } = createRequire(`${home}/`)("jsdom");
  const faults = [];
  const virtualConsole = new VirtualConsole();
  virtualConsole.on("jsdomError", (error) => faults.push(String(error.detail ?? error)));

  const dom = await JSDOM.fromURL(`${url}/${link}`, {
    runScripts: "dangerously",
    resources: "usable",
    pretendToBeVisual: true,
    virtualConsole,
    beforeParse(window) {
      window.fetch = (path, options) => fetch(new URL(path, window.location), options);
    },
  });
  const { document } = dom.window;
  const all = (selector) => [...document.querySelectorAll(selector)];
  const rows = (id) => all(`#${id} tbody tr`).map((row) => [...row.cells].map(words));

  async function until(what, holds) {
    const deadline = Date.now() + 20_000;
    while (!holds()) {
      if (Date.now() > deadline) throw new Error(`${what} did not come; ${faults}; ${words(document.body)}`);
      await new Promise((resolve) => setTimeout(resolve, 10));
    }
  }
  return { dom, document, faults, all, rows, until };
}
