// One case on one backend: everything its row says, its graph, and the command that runs it again.

function caseLink(i, text, className) {
  const t = tables.results;
  const d = t.value("document", i);
  return h("a", { href: link("case", { run: report.documents[d].run, row: t.value("row", i), document: d }), class: `row ${className || ""}` }, text || t.value("case", i));
}

function caseSection(root, params) {
  const t = tables.results;
  const found = select(t, new URLSearchParams({ document: params.get("document"), row: params.get("row") }));
  if (found.length !== 1 || report.documents[params.get("document")]?.run !== params.get("run")) {
    return add(root, h("h2", null, "No such row"), h("p", null, h("a", { href: "#results" }, "All results")));
  }
  const i = found[0];
  const get = (column) => t.value(column, i);
  const { file, run, written, place } = t.source(i);
  add(root,
    h("p", { class: "back" }, h("button", { type: "button", onclick: () => history.back() }, "← Back")),
    h("h2", { class: "id" }, get("case")),
    h("p", { class: "verdict" }, badge(get("verdict")), ` on ${get("backend")}`, get("waived") ? ` (${get("waived")}, as a waiver says)` : "", get("fresh") ? " · a fresh case: filed, fails no run" : ""),
    get("detail") ? h("p", { class: "story" }, get("detail")) : "",
    h("div", { class: "columns" },
      h("section", null, h("h3", null, "Numbers"), facts(numbersOf(i)), divergence(get("first_divergence"))),
      h("section", null, h("h3", null, "Run it again"), commands(i), h("h3", null, "Elsewhere"), elsewhere(i))),
    h("h3", null, "Graph"), graph(i),
    h("h3", null, "Witness"), get("witness") ? facts(Object.entries(get("witness")).map(([k, v]) => [k, show(v)])) : h("p", { class: "quiet" }, "It did not run to the end, so nothing witnessed it."),
    h("h3", null, "Source"),
    h("p", null, `${place} of ${file}, run ${run}, written ${when(written)} UTC`),
    h("details", null, h("summary", null, "The row as JSON"), h("pre", { tabindex: "0" }, JSON.stringify(rowJson(i), null, 1))));
}

function numbersOf(i) {
  const t = tables.results;
  const used = t.value("budget_used", i);
  const checked = t.value("nmse", i) !== null;
  const bar = used === null ? "" : h("meter", { min: 0, max: 1, low: 0.5, high: 0.9, optimum: 0, value: Math.min(used, 1), "aria-label": "budget used" });
  return [
    ["budget used", used === null ? (checked ? "no budget allows the difference" : "nothing was checked") : [h("span", { title: String(used) }, share(used)), " ", bar]],
    ["NMSE, declared arithmetic", number(t.value("nmse", i), 4)],
    ["NMSE, exact", checked && t.value("nmse_exact", i) === null ? "the same" : number(t.value("nmse_exact", i), 4)],
    ["steps that ran", number(t.value("steps", i))],
    ["time of the backend", duration(t.value("seconds", i))],
  ];
}

function divergence(d) {
  if (!d) return "";
  const rows = Object.entries(d).map(([k, v]) => [k, show(v)]);
  return [h("h3", null, "First divergence"), facts(rows)];
}

function show(v) {
  if (v === null) return "–";
  if (Array.isArray(v)) return v.length ? v.map((x) => (typeof x === "object" ? JSON.stringify(x) : String(x))).join(", ") : "–";
  if (typeof v === "object") return Object.entries(v).map(([k, x]) => `${k} ${typeof x === "object" ? JSON.stringify(x) : x}`).join(", ") || "–";
  if (typeof v === "number") return number(v, 10);
  return v === "" ? "–" : String(v);
}

function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.map(([k, v]) => [h("dt", null, k), h("dd", null, v)]));
}

function commands(i) {
  const t = tables.results;
  const id = t.value("case", i), backend = quoted(t.value("backend", i)), saved = t.value("saved", i);
  return [
    saved ? copyable(`conform repro ${quoted(saved)} --backend ${backend}`) : "",
    copyable(`conform run --case ${quoted(id)} --backend ${backend}`),
    copyable(`conform show ${quoted(id)} --svg graph.svg`),
  ];
}

function elsewhere(i) {
  const t = tables.results;
  const others = select(t, new URLSearchParams({ case: t.value("case", i) })).filter((k) => k !== i);
  const lacking = select(tables.missing, new URLSearchParams({ case: t.value("case", i) }));
  const machines = new Set([i, ...others].map((k) => report.documents[t.value("document", k)].environment.machine)).size;
  if (!others.length && !lacking.length) return h("p", { class: "quiet" }, "No other backend is in these runs.");
  return h("ul", { class: "others" },
    others.map((k) => h("li", null, caseLink(k, [badge(t.value("verdict", k)), ` ${t.value("backend", k)}`]), machines > 1 ? h("span", { class: "quiet" }, ` machine ${report.documents[t.value("document", k)].environment.machine}`) : "")),
    lacking.map((k) => h("li", null, badge("not run", LOOKS["not run"]), ` ${tables.missing.value("backend", k)}`)));
}

// As in conformance/report/graphview.py.
const BOX = { width: 184, height: 54, padding: 6 };

// Words that the reader's font makes wider than their box are cut; the title has them whole. All are measured, then all
// are cut: to do both in turns would lay the drawing out anew for each.
function fit(svg) {
  const room = BOX.width - 2 * BOX.padding;
  const wide = [...svg.querySelectorAll(".box text")].map((e) => [e, e.getComputedTextLength()]).filter(([, w]) => w > room);
  for (const [e, w] of wide) e.textContent = `${e.textContent.slice(0, Math.max(1, Math.floor((e.textContent.length * room) / w) - 2))}…`;
}

const KIND_CLASSES = { weight: "k-weight", cache: "k-cache", input: "k-input", view: "k-view", compute: "k-compute", "writes in place": "k-inplace" };

function graph(i) {
  const t = tables.results;
  const id = t.value("case", i), d = Object.hasOwn(report.drawings, id) && report.drawings[id];
  if (!d) return h("p", { class: "note" }, "Not drawn in this page, which draws failures and one case of each op. The last command above draws it.");
  const wrong = t.value("first_divergence", i);
  const culprit = wrong && wrong.step === d.step ? wrong.node : null;
  const boxes = d.boxes.map(([node, x, y, kind, head, below, holds, title]) => {
    const marked = culprit !== null && node === culprit;
    return s("g", { class: `box ${KIND_CLASSES[kind]} ${marked ? "culprit" : ""}` }, s("title", null, marked ? `first divergence\n${title}` : title),
      s("rect", { x: x - BOX.width / 2, y, width: BOX.width, height: BOX.height, rx: 5 }),
      s("text", { x, y: y + 16, class: "head" }, marked ? `✗ ${head}` : head),
      s("text", { x, y: y + 31 }, below),
      s("text", { x, y: y + 45 }, holds));
  });
  const top = 40;
  const svg = s("svg", { width: d.width, height: d.height - top, viewBox: `0 ${top} ${d.width} ${d.height - top}`, class: "graph", role: "img", "aria-label": `Graph of step ${d.step}, ${plural(d.boxes.length, "box", "boxes")}` },
    s("defs", null, s("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7.5, refY: 4, markerWidth: 7, markerHeight: 7, markerUnits: "userSpaceOnUse", orient: "auto" },
      s("path", { d: "M0 0.5L8 4L0 7.5z", class: "arrow" }))),
    d.edges.map((p) => s("path", { d: p, class: "edge", "marker-end": "url(#arrow)" })), boxes);
  requestAnimationFrame(() => fit(svg));
  const kinds = [...new Set(d.boxes.map((b) => b[3]))];
  return [
    h("ul", { class: "legend" }, kinds.map((k) => h("li", null, s("svg", { viewBox: "0 0 14 14", class: "swatch graph", "aria-hidden": "true" }, s("g", { class: `box ${KIND_CLASSES[k]}` }, s("rect", { x: 1, y: 1, width: 12, height: 12, rx: 3 }))), ` ${k}`)),
      culprit !== null ? h("li", null, "✗ thick border: first divergence") : ""),
    h("p", { class: "quiet" }, `Step ${d.step}.`),
    scroller("Graph", svg),
  ];
}

function rowJson(i) {
  const t = tables.results;
  const names = ["case", "backend", "verdict", "budget_used", "nmse", "nmse_exact", "seconds", "steps", "witness", "first_divergence", "saved", "fresh", "waived", "detail"];
  return Object.fromEntries(names.map((n) => [n, n === "fresh" ? t.value(n, i) !== null : t.value(n, i)]));
}
