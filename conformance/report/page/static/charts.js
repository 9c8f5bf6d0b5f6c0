// How much of their error budgets the backends use: one histogram each, a decade of the budget per two bars.

const STEPS = 2;
const LOWEST = -8;

// Edges of the bars: equal to the bit, then half decades up to the whole budget, then over it.
function bins() {
  const edges = [];
  for (let k = LOWEST * STEPS; k <= 0; k++) edges.push(10 ** (k / STEPS));
  const list = [{ low: -Infinity, high: 0, name: "exact", range: "..0" }, { low: 0, high: edges[0], name: `up to ${share(edges[0])}`, range: `0..${edges[0]}` }];
  for (let k = 1; k < edges.length; k++) {
    list.push({ low: edges[k - 1], high: edges[k], name: `${share(edges[k - 1])} to ${share(edges[k])}`, range: `${edges[k - 1]}..${edges[k]}` });
  }
  list.push({ low: 1, high: Infinity, name: "over the tolerance", range: "1..", over: true });
  return list;
}

function budgetSection(root, params) {
  const t = tables.results;
  add(root, h("h2", null, "Error"));
  if (!t.count) return add(root, nothing("results", "conform run --json FILE"));
  const chosen = params.get("op") || "";
  const ops = [...new Set(t.words("op"))].sort();
  const select = h("select", { onchange: () => (location.hash = link("budgets", { op: select.value || null })) },
    h("option", { value: "" }, "all"), ops.map((o) => h("option", { value: o }, o)));
  select.value = chosen;
  add(root,
    h("p", { class: "about" }, "The largest error of a case's tensors as a share of its tolerance; beyond 100 % the case fails. Each bar is a link to its rows."),
    h("form", { class: "filters", onsubmit: (e) => e.preventDefault() }, h("label", null, h("span", null, "op or family"), select)),
    h("div", { class: "panels" }, t.words("backend").map((b) => histogram(b, chosen))));
}

function histogram(backend, op) {
  const t = tables.results, values = t.columns.budget_used.numbers, list = bins();
  const rows = select(t, new URLSearchParams({ backend, ...(op && { op }) }));
  const counts = list.map(() => 0);
  let checked = 0;
  for (const i of rows) {
    if (values[i] === null) continue;
    checked++;
    counts[list.findIndex((b) => values[i] > b.low && values[i] <= b.high)]++;
  }
  const filter = { backend, ...(op && { op }) };
  const width = 360, height = 120, top = 14, w = width / list.length, most = Math.max(1, ...counts);
  const y = (n) => (n ? Math.max(2, (height * Math.log1p(n)) / Math.log1p(most)) : 0);
  const bars = list.map((b, k) => counts[k] ? s("a", { href: link("results", { ...filter, budget_used: b.range }) },
    s("title", null, `${plural(counts[k], "result")}: ${b.name}`),
    s("rect", { x: k * w, y: 0, width: w, height: top + height, class: "reach" }),
    s("rect", { x: k * w + 1, y: top + height - y(counts[k]), width: w - 2, height: y(counts[k]), class: b.over ? "bar over" : "bar" }),
    s("text", { x: k * w + w / 2, y: top + height - y(counts[k]) - 3, class: "tiny" }, short(counts[k]))) : "");
  const decade = (e) => (2 + (e - LOWEST) * STEPS) * w;
  const axis = [[0, "exact", "start"], [decade(-6), "10⁻⁴ %"], [decade(-3), "0.1 %"], [decade(0), "100 %"]]
    .map(([x, text, side]) => s("text", { x, y: top + height + 13, class: `axis ${side || ""}` }, text));
  const svg = s("svg", { viewBox: `0 0 ${width} ${height + top + 18}`, role: "group", "aria-label": `Errors on ${backend}` },
    s("line", { x1: 0, x2: width, y1: top + height + 0.5, y2: top + height + 0.5, class: "base" }), bars, axis);
  roving(svg, "a");
  const unchecked = rows.length - checked;
  return h("figure", { class: "panel" },
    h("figcaption", null, h("strong", null, breakable(nameOf(backend))), h("span", { class: "quiet" }, " ",
      rowsLink("results", { ...filter, budget_used: "..Infinity" }, count(checked)), " checked, ",
      rowsLink("results", { ...filter, budget_used: "none" }, count(unchecked)), " not checked; logarithmic heights")),
    checked ? svg : h("p", { class: "note" }, "Nothing was checked."),
    closest(rows, filter));
}

function short(n) {
  return n < 1000 ? String(n) : `${Number((n / 1000).toPrecision(2))}k`;
}

function closest(rows, filter) {
  const t = tables.results, values = t.columns.budget_used.numbers;
  const top = rows.filter((i) => values[i] > 0).sort((a, b) => values[b] - values[a]).slice(0, 3);
  if (!top.length) return "";
  return h("ol", { class: "closest", "aria-label": "Closest to the tolerance" },
    top.map((i) => h("li", null, h("span", { class: "number", title: String(values[i]) }, share(values[i])), " ", caseLink(i))),
    h("li", { class: "more" }, h("a", { href: link("results", { ...filter, sort: "-budget_used" }) }, "all, closest first")));
}

// Series of each work unit, with intervals, change points and gates.

const MARKS = ["M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0", "M-4,-4h8v8h-8z", "M0,-5L5,4H-5z", "M0,-5L5,0L0,5L-5,0z", "M0,5L5,-4H-5z", "M-5,-2h10v4h-10z"];

function speedSection(root) {
  const t = tables.units, gates = { family: "gate" };
  add(root, h("h2", null, "Speed"));
  if (!t.count) return add(root, nothing("measurements", "conform perf run --json FILE"));
  add(root,
    h("p", { class: "about" }, figure("units"), " measurements. A point is the median of a run's rounds; the bar is its 95 % confidence interval (from 6 rounds on). ",
      "Points of different machines are not joined."));
  if (select(tables.results, new URLSearchParams(gates)).length) add(root, h("h3", null, "Gates"), h("p", null,
    [...FAILED, LOST, "UNSUPPORTED", ...PASSED].map((verdict) => [verdict, select(tables.results, new URLSearchParams({ ...gates, verdict })).length])
      .filter(([, n]) => n).map(([verdict, n]) => [rowsLink("results", { ...gates, verdict }, count(n)), " ", badge(verdict), "  "])));
  add(root, h("h3", null, "Series"));
  const groups = new Map();
  for (let i = 0; i < t.count; i++) {
    const machine = report.documents[t.value("document", i)].environment.machine;
    const key = JSON.stringify([t.value("unit", i), t.value("model", i), machine]);
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(i);
  }
  add(root, h("div", { class: "panels" }, [...groups].map(([key, rows]) => series(...JSON.parse(key), rows))));
}

function series(unit, model, machine, rows) {
  const t = tables.units;
  const backends = [...new Set(rows.map((i) => t.value("backend", i)))];
  const drawn = rows.filter((i) => t.value("rate", i) !== null);
  const of = rows.length ? t.value("of", rows[0]) : "";
  const ends = drawn.flatMap((i) => ["rate", "low", "high"].map((c) => t.value(c, i)).filter((v) => v !== null));
  const changes = report.changes.filter((c) => c.unit === unit && c.model === model && c.machine === machine);
  const svg = timeline(t, drawn, {
    label: `${unit} of ${model}`, lines: backends, line: (i) => t.value("backend", i), high: above(Math.max(0, ...ends)),
    times: rows.map((i) => t.written(i)), href: unitLink, tell: paceText,
    tick: (v) => pace(v, of).replace(/ ?(\S+)\/s$/, of === "bytes" ? "$1" : ""),
    marks: changes.map((c) => [drawn.find((r) => t.written(r) === c.written && t.value("backend", r) === c.backend), c.change > 0 ? "▲" : "▼", changeText(c)]),
  });
  return h("figure", { class: "panel" },
    h("figcaption", null, h("strong", null, unit), h("span", { class: "quiet" }, ` ${model} · ${of === "bytes" ? "bytes" : of} per second, from zero · machine ${machine}`)),
    drawn.length ? svg : "",
    h("table", { class: "plain" }, h("tbody", null, backends.map((b, k) => latest(rows, b, k)))),
    changes.length ? h("ul", { class: "changes" }, changes.map((c) => h("li", null, changeText(c)))) : "");
}

// Rates over time, from zero up to `high`, each where its date stands on the axis: a line for each of `lines`, a point for each row with its interval, and marks
// at rows.
function timeline(t, rows, { label, lines, line, high, times: written, tick, tell, href, marks = [] }) {
  const times = [...new Set(written)].sort();
  const width = 360, height = 150, left = 52, right = 12, top = 12;
  const [begin, end] = [times[0], times.at(-1)].map((w) => Date.parse(w));
  const x = (i) => left + (width - left - right) * (end > begin ? (Date.parse(t.written(i)) - begin) / (end - begin) : 0.5);
  const y = (v) => top + height * (1 - v / (high || 1));
  const parts = [0, 0.5, 1].map((f) => high * f).map((v, k) => [
    s("line", { x1: left, x2: width - right, y1: y(v), y2: y(v), class: k ? "rule" : "base" }),
    s("text", { x: left - 6, y: y(v) + 3, class: "axis end" }, k ? tick(v) : "0")]);
  lines.forEach((name, k) => {
    const own = rows.filter((i) => line(i) === name).sort((p, q) => (t.written(p) < t.written(q) ? -1 : 1));
    const shift = end > begin ? 0 : (k - (lines.length - 1) / 2) * 26;
    parts.push(s("polyline", { points: own.map((i) => `${x(i) + shift},${y(t.value("rate", i))}`).join(" "), class: `line c${k % 6}` }));
    own.forEach((i) => parts.push(point(t, i, x(i) + shift, y, k, tell(i), href(i))));
  });
  for (const [i, sign, text] of marks) {
    if (i !== undefined) parts.push(s("g", { class: "change" }, s("title", null, text),
      s("line", { x1: x(i), x2: x(i), y1: top, y2: top + height }), s("text", { x: x(i), y: top - 2, class: "axis" }, sign)));
  }
  // days, or minutes where all of it is one day
  const day = (f) => new Date(begin + f * (end - begin)).toISOString().replace("T", " ").slice(0, times[0].slice(0, 10) === times.at(-1).slice(0, 10) ? 16 : 10);
  const dates = !times.length ? [] : end > begin ? [[0, "start"], [0.5, ""], [1, "end"]] : [[0.5, ""]];
  for (const [f, side] of dates) {
    const at = left + f * (width - left - right);
    parts.push(s("line", { x1: at, x2: at, y1: top + height, y2: top + height + 4, class: "base" }),
      s("text", { x: at, y: height + top + 15, class: `axis date ${side}` }, day(f)));
  }
  const svg = s("svg", { viewBox: `0 0 ${width} ${height + top + 21}`, role: "group", "aria-label": label }, parts);
  roving(svg, "a");
  return svg;
}

// A round number that a chart may end with: the largest of it stands in its upper part, and its half is round too.
function above(x) {
  const decade = 10 ** Math.floor(Math.log10(x || 1));
  return decade * ([1, 1.2, 1.6, 2, 3, 4, 5, 6, 8, 10].find((f) => f * decade >= x * 1.05) || 12);
}

function changeText(c) {
  const percent = `${c.change > 0 ? "+" : "−"}${number(Math.abs(c.change) * 100, 2)} %`;
  return `${c.change > 0 ? "▲" : "▼"} change point ${c.written.slice(0, 10)} on ${c.backend}: ${percent} (${pace(c.before, c.of)} before, ${pace(c.after, c.of)} after; run ${c.run.slice(0, 8)})`;
}

function paceText(i) {
  const t = tables.units, of = t.value("of", i);
  const [rate, low, high] = ["rate", "low", "high"].map((c) => t.value(c, i));
  return `${t.value("backend", i)}: ${pace(rate, of)}${low === null ? "" : ` (${pace(low, of)} to ${pace(high, of)})`}, ${when(t.written(i))}; ${sourceText(t, i)}`;
}

function point(t, i, px, y, k, text, href) {
  const [rate, low, high] = ["rate", "low", "high"].map((c) => t.value(c, i));
  return s("a", { href, "aria-label": text, class: `c${k % 6}` }, s("title", null, text),
    low === null ? "" : s("path", { d: `M${px - 3},${y(low)}h6M${px},${y(low)}V${y(high)}M${px - 3},${y(high)}h6`, class: "interval" }),
    s("path", { d: MARKS[k % MARKS.length], transform: `translate(${px},${y(rate)}) scale(.7)`, class: "mark" }));
}

function unitLink(i) {
  const t = tables.units;
  const names = t.value("row", i) === null ? ["document", "unit", "model", "backend"] : ["document", "list", "row"];
  return link("units", Object.fromEntries(names.map((n) => [n, t.value(n, i)])));
}

// An interval; its unit once where both ends have the same.
function between_(low, high, of) {
  const [a, b] = [pace(low, of), pace(high, of)], unit = / .*$/;
  return a.match(unit)[0] === b.match(unit)[0] ? `${a.replace(unit, "")} to ${b.replace(unit, "")}` : `${a} to ${b}`;
}

function latest(rows, backend, k) {
  const t = tables.units;
  const i = rows.filter((r) => t.value("backend", r) === backend).sort((a, b) => (t.written(a) < t.written(b) ? 1 : -1))[0];
  const rate = t.value("rate", i);
  return h("tr", null, h("th", { scope: "row" }, key(k), ` ${backend}`),
    h("td", { class: "number" }, rate === null
      ? h("a", { href: unitLink(i), class: "figure" }, badge("not timed", LOOKS["not timed"]))
      : [h("a", { href: unitLink(i), class: "figure" }, pace(rate, t.value("of", i))), t.value("low", i) === null ? "" : h("span", { class: "quiet" }, ` ${between_(t.value("low", i), t.value("high", i), t.value("of", i))}`)]));
}

// The mark of the k-th line of a chart.
function key(k) {
  return s("svg", { viewBox: "-6 -6 12 12", class: `key c${k % 6}`, "aria-hidden": "true" }, s("path", { d: MARKS[k % MARKS.length], class: "mark" }));
}
