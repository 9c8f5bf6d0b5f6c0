// Support: op × type × backend. Each count is a link to the rows that it counts.

// Counts of one set of results: each row says which it raises (conformance/report/matrix.py:counts).
function tally(rows) {
  const t = tables.results;
  const c = { cases: rows.length, declared: 0, executed: 0, passed: 0, failed: 0, lost: 0, waived: 0, last: null };
  for (const i of rows) {
    const names = t.value("counts", i);
    for (const name of names) c[name]++;
    if (names[0] === "declared" && (c.last === null || t.written(i) > c.last)) c.last = t.written(i);
  }
  return c;
}

// The one word of a cell, its symbol and its colour, and the filter of the rows that it speaks of.
function standing(c) {
  if (!c.cases) return { word: "not run", look: ["○", "notrun"], filter: null };
  if (c.lost && !c.failed) return { word: `${count(c.lost)} missing`, look: LOOKS[LOST], filter: { verdict: LOST } };
  if (!c.declared && !c.lost) return { word: "unsupported", look: ["⊘", "refused"], filter: {} };
  if (!c.passed) return { word: "0 %", look: ["✗", "zero"], filter: { taken: [...DECLARED, LOST] } };
  if (c.failed) return { word: `${count(c.failed)} failed${c.lost ? `, ${count(c.lost)} missing` : ""}`, look: ["✗", "bad"], filter: { verdict: BAD } };
  if (c.waived) return { word: `${count(c.waived)} known`, look: ["≈", "known"], filter: { verdict: "XFAIL" } };
  return { word: "passed", look: ["✓", "good"], filter: { verdict: PASSED } };
}

const LOOKING = ["bad", "lost", "zero", "known", "refused", "notrun", "good"];

function worst(looks) {
  return Math.min(...looks.map((look) => (look === "zero" ? 0 : LOOKING.indexOf(look))), LOOKING.length);
}

// Backends with a failure first, then those with fewer passes.
function worstFirst(backends) {
  const t = tables.results;
  const of = new Map(backends.map((backend) => [backend, tally(select(t, new URLSearchParams({ backend })))]));
  const look = (b) => worst([standing(of.get(b)).look[1]]);
  return [...backends].sort((a, b) => look(a) - look(b) || of.get(b).failed + of.get(b).lost - of.get(a).failed - of.get(a).lost);
}

function cell(c, filter) {
  const { word, look, filter: own } = standing(c);
  const label = { "data-label": brief(nameOf(filter.backend)) };
  if (!own) return h("td", label, rowsLink("missing", filter, badge(word, look), `${word}: show the cases`));
  const counts = [
    ["passed", c.passed, { verdict: PASSED }],
    ["executed", c.executed, { taken: "finished" }],
    ["declared", c.declared, { taken: DECLARED }],
    ["cases", c.cases, {}],
  ];
  return h("td", label,
    rowsLink("results", { ...filter, ...own }, badge(word, look), `${word}: show the rows`, "state"),
    h("div", { class: "counts" },
      counts.map(([name, n, more], k) => [
        k ? h("span", { "aria-hidden": "true" }, "/") : "",
        rowsLink("results", { ...filter, ...more }, count(n), `${count(n)} ${name}`, name),
      ]),
      c.last ? h("span", { class: "age", title: `last run ${when(c.last)}` }, age(c.last)) : ""));
}

function supportSection(root, params) {
  const t = tables.results;
  if (!t.count) return add(root, h("h2", null, "Support"), nothing("results", "conform run --json FILE"));
  add(root, h("h2", null, "Support"));
  const all = worstFirst(t.words("backend"));
  const state = { q: params.get("q") || "", state: params.get("state") || "", family: params.get("family") || "" };
  const byOp = new Map();
  for (let i = 0; i < t.count; i++) {
    const op = `${t.value("family", i)}\n${t.value("op", i)}`;
    if (!byOp.has(op)) byOp.set(op, []);
    byOp.get(op).push(i);
  }
  const rows = [...byOp].map(([key, indices]) => {
    const [family, op] = key.split("\n");
    const cells = split(indices, "backend", all).map(tally);
    return { family, op, indices, cells, words: cells.map((c) => standing(c).look[1]) };
  });
  // a base stands beside its build where it differs
  const kept = all.map((b, k) => !OLD.has(b) || rows.some(({ words }) => words[k] !== "notrun" && words[k] !== words[all.indexOf(OLD.get(b))]));
  const backends = all.filter((_, k) => kept[k]);
  for (const r of rows) for (const list of ["cells", "words"]) r[list] = r[list].filter((_, k) => kept[k]);
  rows.sort((a, b) => worst(a.words) - worst(b.words) || (a.family !== "ops") - (b.family !== "ops") || (a.op < b.op ? -1 : 1));
  drawSupport(root);
  const body = h("tbody");
  const found = h("p", { class: "found", role: "status" });
  const states = { bad: "some failed", lost: "some missing", zero: "0 % passed", known: "known failures", refused: "unsupported", notrun: "not run", good: "passed" };
  const families = t.words("family");
  add(root,
    h("p", { class: "about" },
      "Below each word: passed / executed / declared / cases, and how long ago it last ran. ",
      "Declared: supports_op accepts the case. Executed: the backend returned a result."),
    legend(),
    h("form", { class: "filters", role: "search", onsubmit: (e) => e.preventDefault() },
      h("label", { class: "search" }, h("span", null, "Search"),
        h("input", { type: "search", id: "search", placeholder: "op, type or family", value: state.q, oninput: (e) => change("q", e.target.value) })),
      pick("family", families.map((f) => [f, f])),
      pick("state", Object.entries(states))),
    found,
    scroller("Support", h("table", { class: "matrix cards" },
      h("thead", null, h("tr", null, h("th", { scope: "col" }, "op or family"), backends.map((b) => h("th", { scope: "col", title: b }, h("span", { class: "name" }, breakable(brief(nameOf(b)))))))),
      body)));
  const settle = roving(body, "a, button");
  show();

  function pick(key, options) {
    const select = h("select", { onchange: (e) => change(key, e.target.value) },
      h("option", { value: "" }, "any"), options.map(([v, text]) => h("option", { value: v }, text)));
    select.value = state[key];
    return h("label", null, h("span", null, key === "state" ? "contains" : key), select);
  }

  function change(key, value) {
    state[key] = value;
    remember(link("support", Object.fromEntries(Object.entries(state).filter(([, v]) => v))), key === "q");
    show();
  }

  function show() {
    const tokens = state.q.toLowerCase().split(/\s+/).filter(Boolean);
    const shown = rows.filter((r) =>
      (!state.family || r.family === state.family) && (!state.state || r.words.includes(state.state)) &&
      tokens.every((w) => r.op.toLowerCase().includes(w) || types(r).some((x) => x.toLowerCase().includes(w))));
    body.replaceChildren(...shown.flatMap((r) => (r.lines ||= [line(r)])));
    found.textContent = `${plural(shown.length, "row")} of ${count(rows.length)}`;
    settle();
  }

  function types(r) {
    r.types ||= [...new Set(r.indices.map((i) => t.value("type", i)))].sort();
    return r.types;
  }

  function line(r) {
    const several = types(r).filter(Boolean).length > 0;
    const button = h("button", { type: "button", class: "op", "aria-expanded": "false", onclick: () => toggle(r, button) },
      h("span", { class: "turn", "aria-hidden": "true" }, "▸"), ` ${r.op}`,
      h("span", { class: "quiet" }, ` ${plural(types(r).length, r.family === "ops" ? "type" : "kind")}`));
    return h("tr", null, h("th", { scope: "row" }, several ? button : r.op),
      r.cells.map((c, k) => cell(c, { family: r.family, op: r.op, backend: backends[k] })));
  }

  function toggle(r, button) {
    const open = button.getAttribute("aria-expanded") === "true";
    button.setAttribute("aria-expanded", String(!open));
    button.querySelector(".turn").textContent = open ? "▸" : "▾";
    if (open) {
      for (const l of r.lines.splice(1)) l.remove();
      return;
    }
    const rows = split(r.indices, "type", types(r)).map((indices, k) =>
      ({ type: types(r)[k], cells: split(indices, "backend", backends).map(tally) }));
    for (const row of rows) row.worst = worst(row.cells.map((c) => standing(c).look[1]));
    const lines = rows.sort((a, b) => a.worst - b.worst).map(({ type, cells }) =>
      h("tr", { class: "type" }, h("th", { scope: "row" }, type || "(no name)"),
        cells.map((c, b) => cell(c, { family: r.family, op: r.op, type, backend: backends[b] }))));
    r.lines[0].after(...lines);
    r.lines.push(...lines);
    lines.forEach((l) => l.querySelectorAll("a, button").forEach((e) => (e.tabIndex = -1)));
  }
}

// The sign in a square, so that no answer is a colour alone.
const SIGNS = { bad: "M4 4L10 10M10 4L4 10", zero: "M4 4L10 10M10 4L4 10", lost: "M7 3V8M7 10V11", known: "M3 7H11", refused: "M4 10L10 4" };
const SQUARE = 14, LETTER = 7.6;

// Op × type × backend as one drawing to quote: a square for each that ran, by its worst answer.
function drawSupport(root) {
  const t = tables.results, ops = new Map(), types = new Map();
  for (const i of select(t, new URLSearchParams({ family: "ops" }))) {
    const [op, backend, type] = [t.value("op", i), t.value("backend", i), (t.value("type", i) || "").split("+")[0] || "–"];
    const key = `${type}\n${backend}`;
    types.set(type, (types.get(type) || 0) + 1);
    if (!ops.has(op)) ops.set(op, new Map());
    ops.get(op).set(key, [...(ops.get(op).get(key) || []), i]);
  }
  if (!ops.size) return;
  const names = [...types.keys()].sort((a, b) => types.get(b) - types.get(a) || (a < b ? -1 : 1));
  const ran = (cells, type, b) => cells.get(`${type}\n${b}`), look = (of) => of && standing(tally(of)).look[1];
  // of a base only the types that differ
  const differs = (cells, type, b) => ran(cells, type, b) && (!OLD.has(b) || look(ran(cells, type, b)) !== look(ran(cells, type, OLD.get(b))));
  const columns = worstFirst(t.words("backend")).map((b) => [b, names.filter((type) => [...ops.values()].some((cells) => differs(cells, type, b)))]).filter(([, own]) => own.length);
  const backends = columns.map(([b]) => b), used = columns.map(([, own]) => own);
  const left = LETTER * Math.max(...[...ops.keys()].map((op) => op.length)) + 12;
  const top = 62 + LETTER * Math.max(...names.map((type) => type.length));
  const wide = used.map((own, k) => Math.max(own.length * SQUARE, brief(nameOf(backends[k])).length * LETTER) + 14);
  const starts = wide.map((_, k) => left + wide.slice(0, k).reduce((a, b) => a + b, 0));
  const rows = [...ops].sort((a, b) => (a[0] < b[0] ? -1 : 1)), under = top + rows.length * SQUARE;
  const title = document.querySelector("h1").textContent, legend = [["good", "passed"], ["bad", "some failed"], ["lost", "missing"], ["known", "known failures"], ["refused", "unsupported"]];
  const places = legend.map(([, word], k) => left + legend.slice(0, k).reduce((sum, [, w]) => sum + w.length * LETTER + 30, 0));
  const width = Math.max(left + wide.reduce((a, b) => a + b, 0), places.at(-1) + 110, title.length * 8.2 + 16), height = under + 32;
  const square = (look, x, y, text) => s("g", { transform: `translate(${x} ${y})` }, text ? s("title", null, text) : "", s("rect", { class: look, width: SQUARE, height: SQUARE }), SIGNS[look] ? s("path", { class: `sign ${look}`, d: SIGNS[look] }) : "");
  const svg = s("svg", { class: "picture", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Support of ${plural(rows.length, "op")} by type and backend` },
    s("rect", { class: "paper", width, height }),
    s("text", { class: "title", x: 8, y: 18 }, title), s("text", { x: 8, y: 34 }, `${when(report.made)} UTC, ggml-conformance ${report.version}`),
    backends.map((b, k) => [s("text", { x: starts[k], y: 54 }, s("title", null, b), brief(nameOf(b))),
      used[k].map((type, n) => s("text", { transform: `translate(${starts[k] + n * SQUARE + 11} ${top - 4}) rotate(-90)` }, type))]),
    rows.map(([op, cells], r) => [s("text", { x: 8, y: top + r * SQUARE + 11 }, op),
      backends.map((b, k) => used[k].map((type, n) => {
        const of = ran(cells, type, b);
        if (!of) return "";
        const { word, look } = standing(tally(of));
        return square(look[1], starts[k] + n * SQUARE, top + r * SQUARE, `${op} ${type} on ${b}: ${word}`);
      }))]),
    legend.map(([look, word], k) => [square(look, places[k], under + 10), s("text", { x: places[k] + 18, y: under + 21 }, word)]));
  add(root, zoomable("Picture of the support", svg),
    h("p", null, h("button", { type: "button", onclick: () => saveDrawing(svg, "support.svg") }, "Save as SVG")));
}

const DRAWN = ["fill", "fill-opacity", "stroke", "stroke-width", "font-size", "font-weight", "font-family", "text-anchor"];

// Writes a drawing with its colours, as it looks here, to a file of its own.
function saveDrawing(svg, name) {
  const copy = svg.cloneNode(true), from = svg.querySelectorAll("*");
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  copy.querySelectorAll("*").forEach((e, k) => {
    const style = getComputedStyle(from[k]);
    if (e.tagName !== "title") for (const key of DRAWN) e.setAttribute(key, style.getPropertyValue(key));
  });
  const address = URL.createObjectURL(new Blob([new XMLSerializer().serializeToString(copy)], { type: "image/svg+xml" }));
  h("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
  say(`${name} saved`);
}

function split(indices, column, words) {
  const t = tables.results;
  const found = new Map(words.map((w) => [w, []]));
  for (const i of indices) found.get(t.value(column, i))?.push(i);
  return [...found.values()];
}

function legend() {
  const entries = [
    [badge("2 failed", ["✗", "bad"]), "wrong result, crash or overclaim"],
    [badge("2 missing", LOOKS[LOST]), "requested, but without a result"],
    [badge("0 %", ["✗", "zero"]), "supported, none passed"],
    [badge("2 known", ["≈", "known"]), "failures with a waiver"],
    [badge("unsupported", ["⊘", "refused"]), "refused by supports_op"],
    [badge("not run", ["○", "notrun"]), "not requested"],
    [badge("passed", ["✓", "good"]), "every supported case passed"],
  ];
  return h("ul", { class: "legend" }, entries.map(([b, text]) => h("li", null, b, ` ${text}`)));
}

function nothing(what, command) {
  return h("p", { class: "note" }, badge("not run", LOOKS["not run"]), ` No ${what} in these files: ${command} writes them.`);
}
