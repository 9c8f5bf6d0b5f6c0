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
  list.push({ low: 1, high: Infinity, name: "over the budget", range: "1..", over: true });
  return list;
}

function budgetSection(root, params) {
  const t = tables.results;
  add(root, h("h2", null, "Error budgets"));
  if (!t.count) return add(root, nothing("conformance"));
  const chosen = params.get("op") || "";
  const ops = [...new Set(t.words("op"))].sort();
  const select = h("select", { onchange: () => (location.hash = link("budgets", { op: select.value || null })) },
    h("option", { value: "" }, "all"), ops.map((o) => h("option", { value: o }, o)));
  select.value = chosen;
  add(root,
    h("p", { class: "about" }, "The largest share of its error budget that any checked tensor of a case used. Right of 1 it is over, and fails. Each bar is a link to its rows."),
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
  const bars = list.map((b, k) => counts[k] ? s("a", { href: link("results", { ...filter, budget_used: b.range }), "aria-label": `${plural(counts[k], "result")}: ${b.name}` },
    s("title", null, `${plural(counts[k], "result")}: ${b.name}`),
    s("rect", { x: k * w, y: 0, width: w, height: top + height, class: "reach" }),
    s("rect", { x: k * w + 1, y: top + height - y(counts[k]), width: w - 2, height: y(counts[k]), class: b.over ? "bar over" : "bar" }),
    s("text", { x: k * w + w / 2, y: top + height - y(counts[k]) - 3, class: "tiny" }, short(counts[k]))) : "");
  const decade = (e) => (2 + (e - LOWEST) * STEPS) * w;
  const axis = [[0, "exact", "start"], [decade(-6), "10⁻⁶"], [decade(-3), "10⁻³"], [decade(0), "1 = whole"]]
    .map(([x, text, side]) => s("text", { x, y: top + height + 13, class: `axis ${side || ""}` }, text));
  const svg = s("svg", { viewBox: `0 0 ${width} ${height + top + 18}`, role: "group", "aria-label": `Budgets used on ${backend}` },
    s("line", { x1: 0, x2: width, y1: top + height + 0.5, y2: top + height + 0.5, class: "base" }), bars, axis);
  roving(svg, "a");
  const unchecked = rows.length - checked;
  return h("figure", { class: "panel" },
    h("figcaption", null, h("strong", null, backend), h("span", { class: "quiet" }, " ",
      rowsLink("results", { ...filter, budget_used: "..Infinity" }, count(checked)), " checked, ",
      rowsLink("results", { ...filter, budget_used: "none" }, count(unchecked)), " without a figure; heights are logarithmic")),
    checked ? svg : h("p", { class: "note" }, "Nothing was checked here, so there is no distribution."),
    closest(rows, filter));
}

function short(n) {
  return n < 1000 ? String(n) : `${Number((n / 1000).toPrecision(2))}k`;
}

function closest(rows, filter) {
  const t = tables.results, values = t.columns.budget_used.numbers;
  const top = rows.filter((i) => values[i] > 0).sort((a, b) => values[b] - values[a]).slice(0, 3);
  if (!top.length) return "";
  return h("ol", { class: "closest", "aria-label": "Closest to the budget" },
    top.map((i) => h("li", null, h("span", { class: "number", title: String(values[i]) }, share(values[i])), " ", caseLink(i))),
    h("li", { class: "more" }, h("a", { href: link("results", { ...filter, sort: "-budget_used" }) }, "all, closest first")));
}
