// Which part is shown: the address says it, so that every view can be linked, and Back works.

const resultsGrid = grid(tables.results, {
  title: "Results",
  about: "One row per case and backend. Arrow keys go from row to row, Enter opens one.",
  facets: ["verdict", "cause", "backend", "family", "op", "type"],
  hint: "search case, backend, detail …",
  columns: [
    { name: "verdict", label: "verdict", bare: true, show: (i) => badge(tables.results.value("verdict", i)) },
    { name: "case", label: "case", main: true, show: (i) => [caseLink(i), tables.results.value("detail", i) ? h("div", { class: "quiet clip" }, breakable(tables.results.value("detail", i))) : ""] },
    { name: "cause", label: "cause", show: (i) => (tables.results.value("cause", i) ? causeLink(tables.results.value("cause", i), tables.results.value("backend", i)) : "–") },
    { name: "backend", label: "backend", show: (i) => breakable(nameOf(tables.results.value("backend", i))) },
    { name: "budget_used", label: "error", number: true, unit: share },
    { name: "nmse", label: "NMSE", number: true, wide: true },
    { name: "seconds", label: "time", number: true, wide: true, unit: duration },
    { name: "row", ...source(tables.results) },
  ],
});

function simple(name, title, facets, columns, about) {
  const t = tables[name];
  return grid(t, {
    title, about, facets,
    columns: columns.map((c) => {
      const [column, label, kind] = c;
      const column_ = t.columns[column];
      const shows = {
        cause: (i) => causeLink(t.value("id", i), t.value("backend", i)),
        badge: (i) => badge(t.value(column, i)),
        newest: (i) => comparedCase(i),
        change: (i) => change(i),
        named: (i) => (t.value(column, i) ? causeLink(t.value(column, i), t.value("backend", i)) : "–"),
        ident: (i) => breakable(t.value(column, i)),
        lines: (i) => h("pre", null, t.value(column, i)),
        object: (i) => h("span", { class: "quiet" }, show_(t.value(column, i))),
      };
      const show = shows[kind];
      return { name: column, label: label || column, number: Boolean(column_?.numbers), wide: kind === "wide", ...(show && { show }) };
    }).concat(t.columns.row ? [source(t)] : []),
  });
}

function show_(v) {
  return v === null ? "–" : Array.isArray(v) ? v.map((x) => number(x)).join(", ") : show(v);
}

const VIEWS = {
  builds: ["Builds", buildsSection],
  overview: ["Overview", overviewSection],
  support: ["Support", supportSection],
  results: ["Results", resultsGrid],
  budgets: ["Error", budgetSection],
  speed: ["Speed", speedSection],
  comparison: ["Comparison", comparisonSection],
  notrun: ["Not run", notRunSection],
  runs: ["Runs", runsSection],
  case: ["Case", caseSection, "results"],
  cause: ["Cause", causeSection, "overview"],
  causes: ["Causes", simple("causes", "Causes", ["verdict", "backend", "op", "seen"], [["verdict", "", "badge"], ["id", "cause", "cause"], ["state"], ["sentence"], ["backend"], ["op"], ["message"], ["architectures", "affected architectures"], ["counted", "architectures checked"], ["failed"], ["passed"], ["seen"], ["smallest", "smallest case", "ident"]]), "overview"],
  compared: ["Compared", simple("compared", "Compared with the base", ["state", "cause", "backend", "family", "op", "before", "after"], [["state", "", "badge"], ["case", "", "newest"], ["backend"], ["after", "base → now", "change"], ["cause", "cause", "named"], ["detail"], ["machine", "machine", "wide"]]), "comparison"],
  missing: ["Cases not run", simple("missing", "Cases not run", ["backend", "family", "op", "known"], [["case", "case", "ident"], ["backend", "backend", "ident"], ["known", "known because it"], ["where", "there"]]), "notrun"],
  units: ["Units", simple("units", "Timed units", ["unit", "backend", "model"], [["unit"], ["backend"], ["model"], ["of", "unit of work"], ["rate", "work per second"], ["low"], ["high"], ["rounds"]]), "speed"],
};

// Views that have a tab only where there is something to see.
const DATA = {
  builds: () => BUILDS.length > 1,
  support: () => tables.results.count,
  results: () => tables.results.count,
  budgets: () => tables.results.columns.budget_used.numbers.some((x) => x !== null),
  speed: () => tables.units.count,
  comparison: () => report.base,
};

const main = document.getElementById("main");

function route() {
  const { view, params } = parse(location.hash);
  const name = Object.hasOwn(VIEWS, view) ? view : DATA.builds() ? "builds" : "overview";
  const [title, section, parent] = VIEWS[name];
  const root = h("div", { class: `view ${name}` });
  section(root, params);
  main.replaceChildren(root);
  document.title = `${TITLE} – ${title}`;
  for (const a of document.querySelectorAll("#nav a")) {
    if (a.dataset.view === (parent || name)) a.setAttribute("aria-current", "page");
    else a.removeAttribute("aria-current");
  }
}

const TITLE = fillHeader();
document.getElementById("made").append(
  `Made ${when(report.made)} UTC from ${plural(new Set(report.documents.map((d) => d.file)).size, "file")} with ggml-conformance ${report.version}`);
document.getElementById("nav").append(...Object.entries(VIEWS).filter(([name, v]) => !v[2] && (!Object.hasOwn(DATA, name) || DATA[name]())).map(([name, [title]]) =>
  h("li", null, h("a", { href: `#${name}`, "data-view": name }, title))));
document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
addEventListener("hashchange", () => {
  remember.typing = false;
  route();
  scrollTo(0, 0);
  main.focus({ preventScroll: true });
});
addEventListener("keydown", (event) => {
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName);
  if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey) {
    const search = document.getElementById("search");
    if (search) {
      event.preventDefault();
      search.focus();
    }
  }
});
route();
(globalThis.requestIdleCallback || setTimeout)(() => {
  for (const c of Object.keys(tables.results.columns)) if (tables.results.words(c)) tables.results.lower(c);
});
document.documentElement.dataset.ready = "yes";
