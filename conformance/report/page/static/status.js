// The head of the page: whether all is well, what is missing, and what was run where.

const MOST_NAMED = 5;
const FEW = 0.1;

// What speaks against the runs, gravest first, and what needs a look though nothing failed.
function standingOfAll() {
  const { results: r } = tables;
  const n = (t, filter) => select(t, new URLSearchParams(link("", filter).slice(2))).length;
  const bad = [], look = [];
  const tell = (list, k, text, href) => k && list.push([`${count(k)} ${k === 1 ? text.replace(/\b(waiver|case)s\b/, "$1") : text}`, href]);
  tell(bad, n(r, { verdict: FAILED, fresh: "none" }), "failed", link("results", { verdict: FAILED, fresh: "none" }));
  const listed = n(r, { verdict: LOST });
  tell(bad, listed + unlisted(), "missing", listed && !unlisted() ? link("results", { verdict: LOST }) : "#notrun");
  if (!anyRan()) bad.push(["no cases ran", "#notrun"]);
  for (const backend of r.words("backend")) {
    const c = tally(select(r, new URLSearchParams({ backend })));
    if (!c.passed && anyRan()) bad.push([`no case passed on ${brief(backend)}`, link("results", { backend })]);
    else if (c.cases && c.declared < FEW * c.cases) look.push([`${brief(backend)} supports ${count(c.declared)} of ${plural(c.cases, "case")}`, link("results", { backend })]);
  }
  for (const d of report.documents) for (const b of Object.keys(d.asked || {})) {
    if (d.asked[b] && !r.words("backend").includes(b)) bad.push([`${brief(b)} has no result`, "#runs"]);
  }
  tell(bad, report.documents.reduce((sum, d) => sum + d.waivers.length, 0), "waivers that fail a run", "#runs");
  tell(look, n(r, { verdict: FAILED, fresh: "fresh" }), "fresh cases failed (reported only)", link("results", { verdict: FAILED, fresh: "fresh" }));
  return { bad, look };
}

function fillHeader() {
  const { bad, look } = standingOfAll();
  const t = tables.results;
  const [word, kind] = bad.length ? ["✗", "bad"] : look.length ? ["?", "unsure"] : ["✓ No failures", "good"];
  const told = [...bad, ...look];
  const passed = select(t, new URLSearchParams(PASSED.map((v) => ["verdict", v]))).length;
  const title = [word, told[0]?.[0]].filter(Boolean).join(" ") + (report.subject ? `: ${report.subject}` : "");
  add(document.querySelector("h1"), breakable(title));
  const headline = document.getElementById("headline");
  headline.className = `headline ${kind}`;
  add(headline, h("strong", null, word), told.slice(0, MOST_NAMED).map(([text, href]) => [" ", h("a", { href }, text), h("span", null, ",")]),
    told.length > MOST_NAMED ? ` and ${count(told.length - MOST_NAMED)} more,` : "",
    t.count ? [" ", h("a", { href: link("results", { verdict: PASSED }) }, `${count(passed)} of ${plural(t.count, "case")} passed`)] : "");
  if (!t.count) headline.querySelector("span:last-of-type")?.remove();
  fillLost();
  fillScope();
  fillOrigin();
  return title;
}

// How far the headline reaches: a line per backend and selection.
function fillScope() {
  if (!report.scopes.length) return;
  add(document.getElementById("scope"), h("details", { open: report.scopes.length <= MOST_NAMED }, h("summary", null, "Scope"),
    h("ul", { class: "stories" }, report.scopes.map((text) => h("li", null, text)))));
}

// What was asked for and has no result stands above everything else, in every view.
function fillLost() {
  const t = tables.results, rows = select(t, new URLSearchParams({ verdict: LOST }));
  if (!rows.length && !report.unlisted.length) return;
  const counts = new Map();
  for (const i of rows) counts.set(t.value("backend", i), (counts.get(t.value("backend", i)) || 0) + 1);
  const total = rows.length + unlisted();
  const lines = [
    ...[...counts].map(([backend, n]) => h("li", null, rowsLink("results", { verdict: LOST, backend }, count(n)), ` on ${backend}${asked(backend)}`)),
    ...report.unlisted.map(([backend, n, why]) => h("li", null, `${count(n)} on ${backend}${asked(backend)}: ${why}`)),
  ];
  const list = h("ul", { class: "stories" });
  const details = h("details", {
    ontoggle: () => {
      if (details.open && !list.childNodes.length) add(list, rows.slice(0, 200).map((i) => h("li", null, caseLink(i), ` on ${t.value("backend", i)}: `, h("span", { class: "quiet" }, t.value("detail", i) || "no reason given"))),
        rows.length > 200 ? h("li", null, rowsLink("results", { verdict: LOST }, `All ${count(rows.length)}`)) : "");
    },
  }, h("summary", null, "List"), list);
  add(document.getElementById("lost"), h("section", { class: "banner", role: "alert" },
    h("p", null, h("strong", null, `! ${plural(total, "case is", "cases are")} missing`), ": requested, but without a result. The run is incomplete."),
    h("ul", null, lines.slice(0, MOST_NAMED), lines.length > MOST_NAMED ? h("li", null, h("a", { href: "#notrun" }, `and ${count(lines.length - MOST_NAMED)} more`)) : ""),
    report.unlisted.length ? h("p", { class: "quiet" }, "To list the cases of a pattern: ", h("code", null, "conform list cases --level LEVEL --case PATTERN")) : "",
    rows.length ? details : ""));
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
    const shown = found.slice(-3).map((text, k) => [k ? ", " : "", name === "CI job" ? outside(text) : name === "machine" || name === "settings" || name === "waivers" ? text : h("code", null, text)]);
    rows.push([name, [shown, found.length > 3 ? [" and ", h("a", { href: "#runs" }, `${count(found.length - 3)} more`)] : ""]]);
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
