// The head of the page: whether all is well, what is missing, and what was run where.

const MOST_NAMED = 5;
const FEW = 0.1;

// What speaks against the runs, gravest first, and what needs a look though nothing failed. A base of `build test` is
// only compared with.
function standingOfAll() {
  const { results: r } = tables, backends = r.words("backend").filter((b) => !OLD.has(b)), own = OLD.size ? { backend: backends } : {};
  const n = (t, filter) => select(t, new URLSearchParams(link("", filter).slice(2))).length;
  const bad = [], look = [];
  const tell = (list, k, text, href) => k && list.push([`${count(k)} ${k === 1 ? text.replace(/\b(waiver|case)s\b/, "$1") : text}`, href]);
  const side = (i, name) => tables.compared.value(name, i);
  const fresh = report.base && select(tables.compared, new URLSearchParams(FAILED.map((v) => ["after", v]))).filter((i) => !BAD.includes(side(i, "before"))).length;
  tell(bad, n(r, { verdict: FAILED, fresh: "none", ...own }), `failed${report.base ? ` (${fresh ? count(fresh) : "none"} new)` : ""}`, link("results", { verdict: FAILED, fresh: "none", ...own }));
  const listed = n(r, { verdict: LOST });
  for (const [why, k] of Object.entries(report.lacking)) tell(why === "lost" ? bad : look, k, why === "lost" ? "missing" : `missing (${why})`, listed === k && !unlisted() ? link("results", { verdict: LOST }) : "#notrun");
  if (!anyRan()) bad.push(["no cases ran", "#notrun"]);
  for (const backend of backends) {
    const c = tally(select(r, new URLSearchParams({ backend })));
    if (!c.passed && anyRan()) bad.push([`no case passed on ${nameOf(backend)}`, link("results", { backend })]);
    else if (c.cases && c.declared < FEW * c.cases) look.push([`${nameOf(backend)} supports ${count(c.declared)} of ${plural(c.cases, "case")}`, link("results", { backend })]);
  }
  for (const d of report.documents) for (const b of Object.keys(d.asked || {})) {
    if (d.asked[b] && !r.words("backend").includes(b)) bad.push([`${nameOf(b)} has no result`, "#runs"]);
  }
  tell(bad, report.documents.reduce((sum, d) => sum + d.waivers.length, 0), "waivers that fail a run", "#runs");
  tell(look, n(r, { verdict: FAILED, fresh: "fresh", ...own }), "fresh cases failed (reported only)", link("results", { verdict: FAILED, fresh: "fresh", ...own }));
  const of = n(r, own);
  return { bad, look, passed: of ? [`${count(n(r, { verdict: PASSED, ...own }))} of ${plural(of, "case")} passed`, link("results", { verdict: PASSED, ...own })] : null };
}

function fillHeader() {
  const { bad, look, passed } = standingOfAll(), told = [...bad, ...look];
  const [word, kind] = bad.length ? ["✗", "bad"] : look.length ? ["?", "unsure"] : ["✓ No failures", "good"];
  const title = [word, told[0]?.[0]].filter(Boolean).join(" ") + (report.subject ? `: ${report.subject}` : "");
  add(document.querySelector("h1"), title.split(" ").flatMap((part) => [breakable(part), " "]));
  const headline = document.getElementById("headline"), more = told.length - MOST_NAMED;
  headline.className = `headline ${kind}`;
  const parts = [...told.slice(0, MOST_NAMED), ...(more > 0 ? [[`${count(more)} more`, "#notrun"]] : []), ...(passed ? [passed] : [])];
  add(headline, h("strong", null, word), parts.map(([text, href], k) => [k ? ", " : " ", h("a", { href }, breakable(text))]));
  fillOrigin();
  return title;
}

// How far the headline reaches: a line per backend and selection.
function scopeOfAll() {
  return report.scopes.length ? [h("h3", null, "Scope"), h("ul", { class: "stories" }, report.scopes.map(([text, further]) =>
    h("li", null, breakable(text), "; more cases: ", copyable(further))))] : "";
}

// What was asked for and has no result: its number per backend, and the list.
function lostCases() {
  const rows = select(tables.results, new URLSearchParams({ verdict: LOST })), counts = new Map();
  for (const i of rows) counts.set(tables.results.value("backend", i), (counts.get(tables.results.value("backend", i)) || 0) + 1);
  if (!rows.length && !report.unlisted.length) return "";
  const line = (backend, n, why) => h("li", null, badge(LOST), " ", n, " on ", breakable(nameOf(backend)), asked(backend), why ? ": " : "", why ? breakable(why) : "");
  return [
    h("p", null, `${plural(rows.length + unlisted(), "case was", "cases were")} requested and ${rows.length + unlisted() === 1 ? "has" : "have"} no result.`),
    h("ul", { class: "stories" },
      [...counts].map(([backend, n]) => line(backend, rowsLink("results", { verdict: LOST, backend }, count(n)))),
      report.unlisted.map(([backend, n, why]) => line(backend, count(n), why))),
    report.unlisted.length ? h("p", { class: "quiet" }, "To list the cases of a pattern: ", h("code", null, commandText("conform list cases --level LEVEL --case PATTERN"))) : "",
  ];
}

// The number of cases without a result that have no row: of one backend, or of all.
function unlisted(backend) {
  return report.unlisted.reduce((sum, [of, n]) => sum + (backend === undefined || of === backend ? n : 0), 0);
}

function asked(backend) {
  const n = report.documents.reduce((sum, d) => sum + (Number.isInteger(d.asked?.[backend]) ? d.asked[backend] : 0), 0);
  return n ? ` of ${count(n)} requested` : "";
}

// What was run where: each thing once, with the number of files that say it where they do not all.
function fillOrigin() {
  const kinds = [
    ["written", (d) => `${when(d.written)} UTC`],
    ["commit", (d) => commitText(d.environment)],
    ["CI job", (d) => (d.environment.ci ? String(d.environment.ci) : "")],
    ["run", (d) => d.run.slice(0, 8)],
    ["machine", (d) => machineText(d.environment)],
    ["settings", (d) => settingsText(d.environment.settings)],
  ];
  const rows = [];
  for (const [name, of] of kinds) {
    const found = [...new Set(report.documents.map(of).filter(Boolean))];
    if (!found.length && ["commit", "CI job"].includes(name)) rows.push([name, h("span", null, "not recorded")]);
    if (!found.length) continue;
    const shown = found.slice(-1).map((text) => [name === "CI job" ? outside(text) : ["machine", "settings", "written"].includes(name) ? breakable(text) : h("code", null, text)]);
    rows.push([name, [shown, found.length > 1 ? [" and ", h("a", { href: "#runs" }, `${count(found.length - 1)} more`)] : ""]]);
  }
  // folded on a phone, where it would push everything else down
  add(document.getElementById("origin"), h("details", { open: innerWidth > 640 }, h("summary", null, "Commit, machine and settings"),
    h("dl", { class: "origin" }, rows.map(([k, v]) => h("div", null, h("dt", null, k), h("dd", null, v))))));
}

function commitText(e) {
  const commit = e.commit ? String(e.commit).slice(0, 12) : "";
  return [commit, e.branch ? `${commit ? "on " : "branch "}${e.branch}` : ""].filter(Boolean).join(" ");
}

function settingsText(v) {
  if (v === null || v === undefined || v === "") return "";
  if (typeof v !== "object") return String(v);
  const { file, names, levels, waivers, ...others } = v;
  const list = (value) => (value !== null && typeof value === "object" ? Object.entries(value) : []);
  return [
    file || "",
    list(names).length ? `names: ${list(names).map(([, name]) => String(name)).join(", ")}` : "",
    ...list(levels).map(([name, level]) => `level of ${name}: ${String(level)}`),
    ...list(waivers).map(([name, w]) => `waivers of ${name}: ${String(w?.file)} (${plural(Number(w?.known) || 0, "known failure")})`),
    Object.keys(others).length ? show(others) : "",
  ].filter(Boolean).join("; ");
}
