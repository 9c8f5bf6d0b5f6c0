// llama.cpp itself on devices: architecture × device × run; and prefill and decode of a decoder.

const FINE = ["PASS", "NO REFERENCE"];

function zooSection(root) {
  const t = tables.cells;
  add(root, h("h2", null, "Zoo"));
  if (!t.count) return add(root, nothing("zoo"));
  const columns = new Map(), rows = new Map();
  for (let i = 0; i < t.count; i++) {
    const [backend, run, name] = ["backend", "run", "architecture"].map((c) => t.value(c, i));
    const key = JSON.stringify([backend, run]);
    columns.set(key, [backend, run]);
    if (!rows.has(name)) rows.set(name, new Map());
    rows.get(name).set(key, [...(rows.get(name).get(key) || []), i]);
  }
  const bad = (i) => !FINE.includes(t.value("verdict", i));
  const failing = ([, cells]) => [...cells.values()].flat().filter(bad).length;
  const ordered = [...rows].sort((a, b) => (failing(a) > 0 ? 0 : 1) - (failing(b) > 0 ? 0 : 1) || (a[0] < b[0] ? -1 : 1));
  const words = ranked(t.words("verdict"));
  add(root,
    h("p", { class: "about" }, "llama.cpp runs each architecture on each device, and its logits are held against those of its own CPU run. Below a word: the largest NMSE, and into how many parts the graph was cut."),
    h("p", null, words.map((w) => [figure("cells", { verdict: w }), " ", badge(w), "  "])),
    scroller("Zoo", h("table", { class: "matrix" },
      h("thead", null, h("tr", null, h("th", { scope: "col" }, "architecture"),
        [...columns.values()].map(([b, run]) => h("th", { scope: "col", title: `${b}, ${run}` }, h("span", { class: "name" }, brief(b)), h("span", { class: "quiet" }, run))))),
      h("tbody", null, ordered.map(([name, cells]) => h("tr", null, h("th", { scope: "row" }, name),
        [...columns].map(([key, [backend, run]]) => zooCell(cells.get(key) || [], { architecture: name, backend, run }))))))));
}

function zooCell(found, filter) {
  const t = tables.cells;
  if (!found.length) return h("td", null, badge("not run"));
  return h("td", null, found.map((i) => {
    const verdict = t.value("verdict", i), splits = t.value("splits", i), nmse = t.value("nmse", i);
    const title = t.value("detail", i) || null;
    return [
      h("a", { href: link("cells", filter), class: "state", title, "aria-label": `${verdict}: show the row` }, badge(verdict)),
      h("div", { class: "counts" }, nmse === null ? "" : number(nmse, 2), splits > 1 ? ` ${plural(splits, "split")}` : ""),
    ];
  }));
}

function phasesSection(root) {
  const t = tables.phases;
  add(root, h("h2", null, "Phases"));
  if (!t.count) return add(root, nothing("phases"));
  const heads = ["", "backend", "phase", "model", "tokens/s", "time", "W", "J/token", "splits", "share of the time", "reason"];
  const rows = select(t, new URLSearchParams());
  const share = (v) => (v ? Object.entries(v).map(([device, x]) => `${device} ${typeof x === "number" ? Math.round(100 * x) : "?"} %`).join(", ") : "–");
  add(root,
    h("p", { class: "about" }, "Prefill (pp) and decode (tg) of a decoder. Energy is what the processor packages used by their own counters, whoever used it."),
    scroller("Phases", h("table", { class: "plain" },
      h("thead", null, h("tr", null, heads.map((x) => h("th", { scope: "col" }, x || h("span", { class: "unseen" }, "state"))))),
      h("tbody", null, rows.map((i) => h("tr", null,
        h("td", null, badge(t.value("timed", i))), h("th", { scope: "row" }, t.value("backend", i)), h("td", null, t.value("name", i) || "–"), h("td", null, t.value("model", i)),
        h("td", { class: "number" }, number(t.value("tokens_per_second", i), 4)), h("td", { class: "number" }, duration(t.value("seconds", i))),
        ["watts", "joules_per_token", "splits"].map((c) => h("td", { class: "number" }, number(t.value(c, i)))),
        h("td", null, share(t.value("shares", i))), h("td", null, t.value("reason", i) || "–")))))));
}
