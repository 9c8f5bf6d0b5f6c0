// The overview; what did not run, and the runs themselves.

function overviewSection(root) {
  const t = tables.results, grouped = tables.causes.count;
  add(root, h("h2", { class: "unseen" }, "Overview"));
  if (report.base) add(root, h("h3", null, "Compared with ", breakable(report.base.names.slice(-3).join(", ")), report.base.names.length > 3 ? ` and ${count(report.base.names.length - 3)} more` : ""), comparedCounts());
  if (grouped) add(root, h("h3", null, plural(faults().length, "cause"), faults().length > 1 ? ", most urgent first" : ""), causesList(), archCauses());
  const others = t.count ? failures() : null;
  if (others) add(root, h("h3", null, grouped ? "Other failures" : "Failures"), others);
  add(root, changedCode());
  if (t.count) add(root, h("h3", null, "Backends"), scroller("Backends", backendsTable()));
  const gaps = gapsOfAll();
  if (gaps.length) add(root, h("h3", null, "Not run"), h("ul", { class: "stories" }, gaps));
  add(root, scopeOfAll());
}

const CAUSES = 50;

// The rows of each fault: several backends may have the same.
function faults() {
  const t = tables.causes, found = new Map();
  for (let i = 0; i < t.count; i++) {
    const key = `${t.value("id", i)}\n${causeText(i)}`;
    found.set(key, [...(found.get(key) || []), i]);
  }
  return [...found.values()];
}

// The verdicts of compared pairs in the base or now, with their numbers.
function verdictsOf(rows, side) {
  const counts = new Map();
  for (const i of rows) counts.set(tables.compared.value(side, i), (counts.get(tables.compared.value(side, i)) || 0) + 1);
  return [...counts].map(([verdict, n]) => [badge(verdict), ` ${count(n)} `]);
}

// What became of a cause's pairs since the base: verdicts of both sides only where they differ.
function sinceBase(id) {
  const rows = select(tables.compared, new URLSearchParams({ cause: id })), moved = rows.filter((i) => tables.compared.value("before", i) !== tables.compared.value("after", i));
  if (!report.base || !rows.length) return null;
  if (!moved.length) return h("span", { class: "base-and-now" }, "same verdicts in the base");
  return h("span", { class: "base-and-now" }, "base ", verdictsOf(moved, "before"), "→ now ", verdictsOf(moved, "after"), moved.length < rows.length ? ` (${count(rows.length - moved.length)} as in the base)` : "");
}

// Since when it fails: the first run of the failures that the newest run ends, and the last pass before.
function sinceWhen(i) {
  const runs = tables.causes.value("history", i), failing = runs.length - 1 - runs.findLastIndex((r) => !r.failed);
  const told = (r) => [when(r.written), " UTC", commitText(r) ? [" at ", h("code", null, commitText(r))] : ""];
  const [first, before] = [runs.at(-failing), runs.at(-failing - 1)];
  if (!failing || runs.length < 2) return null;
  return [h("div", null, historyOf(runs)), before ? ["failed ", told(first), ", passed ", told(before)] : [`in all ${count(runs.length)} runs, from `, told(first)]];
}

// Both, or else the first run that has the cause.
function sinceOf(i) {
  const note = tables.causes.value("note", i), since = [sinceBase(tables.causes.value("id", i)), note && breakable(note), sinceWhen(i)].filter(Boolean), first = report.documents[tables.causes.value("first", i)];
  if (since.length) return since.map((text) => h("div", null, text));
  return h("span", { class: "first" }, "first seen ", when(first.written), " UTC", report.documents.every((d) => d.run === first.run) ? ", the only run here" : ` in ${first.file}`);
}

const HISTORY = 30;

// A sign per run, oldest first.
function historyOf(runs) {
  const shown = runs.slice(-HISTORY), signs = shown.map((r) => (r.failed ? "✗" : "✓"));
  return h("span", { class: "history", role: "img", "aria-label": `${plural(shown.length, "run")}, oldest first: ${shown.map((r) => (r.failed ? "failed" : "passed")).join(", ")}` },
    shown.map((r, k) => h("span", { class: r.failed ? "bad" : "good", title: `${when(r.written)} ${commitText(r)}: ${count(r.failed)} failed, ${count(r.passed)} passed` }, signs[k])));
}

function causesList() {
  const t = tables.causes, all = faults();
  return [
    h("ol", { class: "causes", "aria-label": "Causes" }, all.slice(0, CAUSES).map(causeCard)),
    all.length > CAUSES ? h("p", null, rowsLink("causes", {}, `All ${plural(t.count, "cause")}`)) : "",
  ];
}

// What broke, where, since when, and the command that shows it.
function causeCard(same) {
  const t = tables.causes, i = same[0], { id, backend, smallest } = causeOf(i), proof = NEWEST.get(`${smallest}\n${backend}`);
  const backends = same.map((j) => t.value("backend", j)), cases = figureCount(id, backends);
  const own = backends.filter((b) => !OLD.has(b));
  const on = [...new Map((own.length ? own : backends).map((b) => [nameOf(b), b]))].map(([name, b], n) => [n ? ", " : "", b === backend ? breakable(name) : causeLink(id, b, breakable(name))]);
  return h("li", null,
    h("h4", null, causeBadges(i), " ", causeLink(id, backend, breakable(causeTold(i)))),
    facts([
      ["where", [h("span", { class: "where" }, on), t.value("at", i) ? `, in the ${t.value("at", i)}` : "", passesOn(smallest, backends), affected(i) ? `; ${affected(i)}` : ""]],
      ...(t.value("emulated", i) ? [["driver", breakable(t.value("emulated", i))]] : []),
      ["since", sinceOf(i)],
      [cases === 1 ? "case" : "cases", [figure("results", { cause: id, backend: backends }), cases === 1 ? ": " : ", such as ", h("span", { class: "smallest" }, proof === undefined ? breakable(smallest) : caseLink(proof))]],
    ]),
    copyable(t.value("command", i)));
}

function causeBadges(i) {
  const [verdict, state] = ["verdict", "state"].map((c) => tables.causes.value(c, i));
  return [badge(verdict), state ? [" ", badge(state)] : ""];
}

// Other backends of the same kind of run that pass the smallest case.
function passesOn(smallest, backends) {
  const t = tables.results, rows = select(t, new URLSearchParams([["case", smallest], ...PASSED.map((v) => ["verdict", v])]));
  const names = rows.filter((k) => !OLD.has(t.value("backend", k)) && !backends.includes(t.value("backend", k)));
  return names.length ? ["; passes on ", names.slice(0, 3).map((k, n) => [n ? ", " : "", caseLink(k, breakable(nameOf(t.value("backend", k))))]), names.length > 3 ? ` and ${count(names.length - 3)} more` : ""] : "";
}

function figureCount(cause, backend) {
  return select(tables.results, new URLSearchParams(link("", { cause, backend }).slice(2))).length;
}

const ARCHITECTURES = 200;

// Architecture × plan, where a cause is at work: results of the families `zoo` and `arch`.
function archCauses() {
  const columns = new Set(), rows = new Map(), t = tables.results;
  for (const i of select(t, new URLSearchParams([["family", "zoo"], ["family", "arch"]]))) {
    const [id, family, name, cause, backend] = ["case", "family", "type", "cause", "backend"].map((c) => t.value(c, i));
    if (!cause) continue;
    const plan = id.slice(`${family}/${name}-`.length, id.lastIndexOf("@"));
    columns.add(plan);
    if (!rows.has(name)) rows.set(name, new Map());
    const plans = rows.get(name);
    plans.set(plan, [...(plans.get(plan) || []), [causeLink(cause, backend), h("span", { class: "quiet" }, " ", breakable(brief(nameOf(backend))))]]);
  }
  if (!rows.size) return "";
  const plans = [...columns].sort();
  return [
    h("h3", null, "Causes by architecture and plan"),
    scroller("Causes by architecture", h("table", { class: "matrix cards" },
      h("thead", null, h("tr", null, h("th", { scope: "col" }, "architecture"), plans.map((p) => h("th", { scope: "col", title: p }, h("span", { class: "name" }, breakable(brief(p))))))),
      h("tbody", null, [...rows].sort((a, b) => (a[0] < b[0] ? -1 : 1)).slice(0, ARCHITECTURES).map(([name, found]) =>
        h("tr", null, h("th", { scope: "row" }, name), plans.map((p) => h("td", null, (found.get(p) || ["–"]).map((x) => h("div", null, x))))))))),
    rows.size > ARCHITECTURES ? h("p", { class: "quiet" }, `and ${plural(rows.size - ARCHITECTURES, "more architecture")}`) : "",
  ];
}

function backendsTable() {
  const t = tables.results;
  const heads = ["backend", "", "failed", "missing", "known", "unsupported", "not run", "passed", "cases", ...(Object.keys(report.good).length ? ["last good run (UTC)"] : [])];
  return h("table", { class: "plain cards" },
    h("thead", null, h("tr", null, heads.map((x, k) => h("th", { scope: "col", class: k > 1 ? "number" : "" }, x || h("span", { class: "unseen" }, "state"))))),
    h("tbody", null, worstFirst(t.words("backend")).map((backend) => {
      const c = tally(select(t, new URLSearchParams({ backend }))), uncounted = unlisted(backend);
      c.lost += uncounted;
      const { word, look, filter } = standing(c);
      const before = [{ verdict: "XFAIL" }, { verdict: "UNSUPPORTED" }];
      const after = [{ verdict: PASSED }, {}];
      const cells = (filters) => filters.map((f) => h("td", { class: "number" }, figure("results", { backend, ...f })));
      const lost = uncounted ? h("td", { class: "number" }, h("a", { href: "#notrun" }, count(c.lost))) : cells([{ verdict: LOST }]);
      const [build, device] = report.setups[backend] || [];
      return h("tr", null, h("th", { scope: "row", title: device && backend }, device ? [breakable(device), h("div", { class: "quiet" }, breakable(build))] : breakable(backend)),
        h("td", null, rowsLink("results", { backend, ...filter }, badge(word, look), `${word}: show the rows`)),
        cells([{ verdict: FAILED }]), lost, cells(before), h("td", { class: "number" }, figure("missing", { backend })), cells(after),
        heads.length > 9 ? h("td", { class: "number" }, report.good[backend] ? when(report.good[backend]) : "none") : "");
    })));
}

function anyRan() {
  return select(tables.results, new URLSearchParams(link("", { taken: DECLARED }).slice(2))).length > 0;
}

// Where no case ran, nothing is said of failures.
function noCasesRan() {
  const { count: n } = tables.results, lost = select(tables.results, new URLSearchParams({ verdict: LOST })).length + unlisted();
  const why = [n - lost > 0 && `${plural(n - lost, "case")} UNSUPPORTED`, lost && `${plural(lost, "case")} missing`].filter(Boolean);
  return h("p", null, badge("no cases ran", ["✗", "bad"]), why.length ? ` ${why.join(", ")}.` : " The run files have no results.");
}

function failures() {
  const t = tables.results;
  const explained = { ...(tables.causes.count && { cause: "none" }), ...(OLD.size && { backend: t.words("backend").filter((b) => !OLD.has(b)) }) };
  const rows = select(t, new URLSearchParams(link("", { verdict: FAILED, ...explained }).slice(2)));
  if (!anyRan()) return noCasesRan();
  if (!rows.length) return null;
  const groups = new Map();
  for (const i of rows) {
    const key = `${t.value("verdict", i)}\n${t.value("reason", i)}`;
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(i);
  }
  const ordered = [...groups.values()].sort((a, b) => RANKS.indexOf(t.value("verdict", a[0])) - RANKS.indexOf(t.value("verdict", b[0])) || b.length - a.length);
  const before = new Map();
  const shown = ordered.filter(([i]) => {
    const verdict = t.value("verdict", i);
    before.set(verdict, (before.get(verdict) || 0) + 1);
    return before.get(verdict) <= GROUPS;
  });
  return [
    tables.causes.count ? "" : untriaged(),
    h("ul", { class: "stories" }, shown.map(groupItem)),
    h("p", null, rowsLink("results", { verdict: FAILED, ...explained }, `All ${plural(rows.length, "failure")}`), ` in ${plural(groups.size, "group")}${groups.size > shown.length ? `, the ${GROUPS} largest of each verdict here` : ""}.`),
  ];
}

const GROUPS = 10;

// How to group failures of records without causes: `triage` of each file that has some. A file may not choose backends
// with options, such as a library, so the command names them.
function untriaged() {
  const t = tables.results, rows = select(t, new URLSearchParams(FAILED.map((v) => ["verdict", v])));
  const names = new Map();
  for (const i of rows) {
    const { file } = t.source(i), backend = t.value("backend", i);
    if (!names.has(file)) names.set(file, new Set());
    if (backend.includes("?")) names.get(file).add(backend);
  }
  const command = ([file, backends]) => [`conform triage ${quoted(file)} --json ${quoted(file)} -o bugs`, ...[...backends].map((b) => `--backend ${quoted(b)}`)].join(" ");
  return h("div", { class: "note" }, h("p", null, "Not grouped by cause yet. This command finds the causes; then make the page again:"), [...names].slice(0, 3).map((of) => copyable(command(of))),
    report.base ? "" : h("p", null, "An earlier run shows since when they fail: ", h("code", null, commandText("conform report RUN.json --against EARLIER.json -o DIR"))));
}

// Failures alike: their number, why, which ops and backends they are of, and one to begin with.
function groupItem(rows) {
  const t = tables.results, i = rows[0], verdict = t.value("verdict", i), reason = t.value("reason", i);
  const filter = { verdict, reason, ...(tables.causes.count && { cause: "none" }) };
  const counted = (column, name = (x) => x) => {
    const counts = new Map();
    for (const k of rows) counts.set(t.value(column, k), (counts.get(t.value(column, k)) || 0) + 1);
    const all = [...counts].sort((a, b) => b[1] - a[1]);
    return all.slice(0, 6).map(([x, n]) => (counts.size > 1 && all[0][1] > 1 ? `${name(x)} (${count(n)})` : name(x))).join(", ") + (all.length > 6 ? ` and ${all.length - 6} more` : "");
  };
  return h("li", null,
    badge(verdict), " ", h("strong", null, figure("results", filter)), rows.length === 1 ? " case" : " cases", ` of ${counted("op")}`, t.words("backend").length > 1 ? [" on ", breakable(counted("backend", nameOf))] : "",
    h("p", { class: "story clip4", title: rows.length > 1 ? reason : null }, breakable((rows.length > 1 ? reason : t.value("detail", i)) || "no detail")),
    h("p", { class: "quiet" }, rows.length > 1 ? "such as " : "", caseLink(i)),
    copyable(t.value("command", i)));
}

// This run compared with another, the base: pairs of case and backend by what became of them, and by cause.

const MATTERS = ["new", "worse", "lost coverage", "changed", "fixed", "still failing"];

function comparedCounts() {
  return h("p", null, report.states.filter((state) => select(tables.compared, new URLSearchParams({ state })).length).map((state) => [h("span", { class: "pair" }, figure("compared", { state }), " ", badge(state)), "  "]), h("a", { href: "#comparison" }, "by cause"));
}

function comparisonSection(root) {
  add(root, h("h2", null, "Comparison"));
  if (!report.base) return add(root, h("p", { class: "note" }, badge("not run", LOOKS["not run"]), " No base given: conform report RUN.json --against BASE.json -o DIR"));
  add(root,
    h("p", { class: "about" }, "Each case on each backend, here and in ", breakable(report.base.names.join(", ")), ", the base. New: a failure that the base does not have. Lost coverage: it passed, and is now unsupported or not run. Changed: any other verdict, or another cause. Not run and added: only in the base, or only here."),
    comparedCounts(),
    h("h3", null, "By cause"), comparedCauses(),
    h("h3", null, "By backend"), comparedTable("backend", tables.compared.words("backend").map((backend) => [breakable(nameOf(backend)), { backend }])));
  const loose = select(tables.compared, new URLSearchParams([["cause", "none"], ["state", "new"], ["state", "worse"], ["state", "changed"]]));
  if (loose.length) add(root, h("h3", null, "New or changed, without a cause"), h("ul", { class: "stories" }, loose.slice(0, 30).map(comparedStory)),
    loose.length > 30 ? h("p", null, rowsLink("compared", { cause: "none", state: ["new", "worse", "changed"] }, `All ${count(loose.length)}`)) : "");
}

// Causes that make something new first, then by how many pairs they change.
function comparedCauses() {
  const t = tables.compared, told = new Map(report.base.causes.map(([id, backend, sentence]) => [`${id}\n${backend}`, sentence]));
  const found = new Map();
  for (const i of select(t, new URLSearchParams(MATTERS.map((s) => ["state", s])))) {
    const [cause, backend, state] = ["cause", "backend", "state"].map((c) => t.value(c, i));
    if (!cause) continue;
    const text = told.get(`${cause}\n${backend}`), key = `${cause}\n${text}`;
    if (!found.has(key)) found.set(key, { cause, text, backends: new Set(), n: Object.fromEntries(MATTERS.map((s) => [s, 0])) });
    found.get(key).backends.add(backend);
    found.get(key).n[state]++;
  }
  if (!found.size) return h("p", { class: "quiet" }, "None of the compared cases has a cause. To find causes: conform triage RUN.json --json RUN.json");
  const rows = [...found].sort(([, a], [, b]) => MATTERS.map((s) => b.n[s] - a.n[s]).find((d) => d) || 0);
  return comparedTable("cause", rows.map(([, { cause, text, backends }]) => {
    const backend = [...backends];
    return [[causeLink(cause, backend[0], text), h("div", { class: "quiet" }, "on ", backend.map((b, k) => [k ? ", " : "", breakable(nameOf(b))]))], { cause, backend }];
  }));
}

function comparedTable(what, rows) {
  const count_ = (state, filter) => select(tables.compared, new URLSearchParams(link("", { ...filter, state }).slice(2))).length;
  const states = (what === "cause" ? MATTERS : report.states).filter((state) => rows.some(([, filter]) => count_(state, filter)));
  return scroller(`Differences by ${what}`, h("table", { class: `plain cards ${what === "cause" ? "causes" : ""}` },
    h("thead", null, h("tr", null, h("th", { scope: "col" }, what), states.map((s) => h("th", { scope: "col", class: "number" }, badge(s))))),
    h("tbody", null, rows.map(([name, filter]) => h("tr", null, h("th", { scope: "row" }, name), states.map((state) => h("td", { class: "number" }, figure("compared", { ...filter, state }))))))));
}

function comparedStory(i) {
  const t = tables.compared;
  return h("li", null, badge(t.value("state", i)), " ", comparedCase(i), " on ", breakable(t.value("backend", i)), ": ", change(i),
    h("p", { class: "story clip4" }, breakable(t.value("detail", i) || "no detail")));
}

// The case, as a link where this run has a result of it.
function comparedCase(i) {
  const t = tables.compared, row = t.value("after", i) === "not run" ? undefined : NEWEST.get(`${t.value("case", i)}\n${t.value("backend", i)}`);
  return row === undefined ? breakable(t.value("case", i)) : caseLink(row);
}

// The verdict in the base and now; once if both are the same.
function change(i) {
  const [before, after] = ["before", "after"].map((side) => tables.compared.value(side, i));
  return before === after ? badge(after) : [badge(before), " → ", badge(after)];
}

// What did not run at all, in plain sight: one line each, with the reason.
function gapsOfAll() {
  const lines = [];
  const note = (word, ...rest) => lines.push(h("li", null, badge(word, LOOKS[word]), " ", rest));
  if (!anyRan()) lines.push(h("li", null, noCasesRan()));
  for (const d of report.documents.filter((x) => x.interrupted)) note(LOST, h("strong", null, d.file), ": interrupted: the run was killed before it wrote its record");
  for (const [backend, why] of Object.entries(report.unavailable)) note("not run", h("strong", null, breakable(backend)), `: not available: ${why}`);
  for (const level of Object.keys(report.planned)) {
    const filter = { backend: EVERY, known: `of level ${level}` };
    const n = select(tables.missing, new URLSearchParams(filter)).length;
    if (n) note("not run", h("strong", null, "level ", level), ": ", figure("missing", filter), ` of ${plural(report.planned[level].length, "case")} ran on no backend`);
  }
  return lines;
}

function notRunSection(root) {
  const lines = gapsOfAll();
  for (const backend of tables.results.words("backend")) {
    const n = select(tables.missing, new URLSearchParams({ backend })).length;
    if (n) lines.push(h("li", null, badge("not run"), " ", h("strong", null, breakable(nameOf(backend))), ": ", figure("missing", { backend }), ` ${n === 1 ? "case" : "cases"} that another backend ran`));
  }
  const lost = lostCases();
  add(root, h("h2", null, "Not run"), lost,
    lines.length ? h("ul", { class: "stories" }, lines) : lost ? "" : h("p", null, badge("complete", ["✓", "good"]), " Every known case ran."),
    h("p", null, figure("missing", {}, { text: "Every case that did not run" })));
  const levels = Object.entries(report.planned);
  if (!levels.length) add(root, h("p", { class: "quiet" }, "To list the cases of a level that no run has: ", h("code", null, commandText("conform report --level NAME"))));
}

function runsSection(root) {
  add(root, h("h2", null, "Runs"), h("p", { class: "about" }, "Records that this page shows. ", report.superseded ? `${plural(report.superseded, "older result")} of cases that ran again ${report.superseded === 1 ? "is" : "are"} not shown.` : ""));
  add(root, scroller("Runs", h("table", { class: "plain cards" },
    h("thead", null, h("tr", null, ["file", "run", "written (UTC)", "commit", "CI job", "rows", "machine", "versions"].map((x) => h("th", { scope: "col" }, x)))),
    h("tbody", null, report.documents.map((d) => h("tr", null,
      h("th", { scope: "row" }, d.file), h("td", null, h("code", null, d.run)), h("td", null, when(d.written)),
      h("td", null, commitText(d.environment) || "–"), h("td", null, d.environment.ci ? outside(String(d.environment.ci)) : "–"),
      h("td", null, Object.entries(d.lists).map(([k, n]) => `${count(n)} ${k}`).join(", ")),
      h("td", null, machineText(d.environment)), h("td", null, Object.entries(d.environment.packages || {}).map(([k, v]) => `${k} ${v ?? "–"}`).join(", "))))))));
  const waivers = report.documents.flatMap((d) => d.waivers.map((w) => `${d.file}: ${w}`));
  if (waivers.length) add(root, h("h3", null, "Waivers that fail a run"), h("ul", null, waivers.map((w) => h("li", null, w))));
}

function machineText(e) {
  return [e.machine, e.cpu, e.cores && plural(e.cores, "core"), e.system, e.python && `Python ${e.python}`].filter(Boolean).join(", ");
}
