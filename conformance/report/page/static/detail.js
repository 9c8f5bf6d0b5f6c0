// One case on one backend: everything its row says, its graph, and the command that runs it again; and one cause.

function caseLink(i, text, className) {
  const t = tables.results;
  const d = t.value("document", i);
  return h("a", { href: link("case", { run: report.documents[d].run, list: t.value("list", i), row: t.value("row", i), document: d }), class: `row ${className || ""}` }, text || breakable(t.value("case", i)));
}

// An id that breaks at its separators, not inside a word or a number that fits into a line.
function breakable(id) {
  const parts = id.split(/(?<=[^\s/]\/|[,?]|&(?!&)|::|(?<![=,(x[]|\d[eE])[-+])|(?<=\w)(?=\()/);
  const whole = (part) => part.split(/(\S*\d[eE]-\d\S*)/).map((x, k) => (k % 2 ? h("span", { class: "option" }, x) : x));
  return h("span", { class: "ident" }, parts.flatMap((part, k) => [k ? h("wbr") : "", whole(part)]));
}

function caseSection(root, params) {
  const t = tables.results;
  const found = select(t, new URLSearchParams({ document: params.get("document"), list: params.get("list") ?? "results", row: params.get("row") }));
  if (found.length !== 1 || report.documents[params.get("document")]?.run !== params.get("run")) {
    return add(root, h("h2", null, "Result not found"), h("p", null, h("a", { href: "#results" }, "All results")));
  }
  const i = found[0];
  const get = (column) => t.value(column, i);
  const { file, run, written, place } = t.source(i);
  add(root,
    h("p", { class: "back" }, h("button", { type: "button", onclick: () => history.back() }, "← Back")),
    h("h2", { class: "id" }, breakable(get("case"))),
    h("p", { class: "verdict" }, badge(get("verdict")), " on ", breakable(get("backend")), get("waived") ? ` (${get("waived")}, waived)` : "", get("fresh") ? " · fresh case, reported only" : ""),
    get("detail") ? h("p", { class: "story" }, breakable(get("detail"))) : "",
    get("cause") ? h("p", null, "Cause: ", causeLink(get("cause"), get("backend"))) : "",
    h("div", { class: "columns" },
      h("section", null, h("h3", null, "Numbers"), facts(numbersOf(i)), divergence(get("where")), failure(get("error"))),
      h("section", null, h("h3", null, "Reproduce"), commands(get("case"), get("backend"), get("saved")), h("h3", null, "Other backends"), elsewhere(i))),
    h("h3", null, "Graph"), graph(get("case"), get("where")),
    h("h3", null, "Witness"), get("witness") ? facts(Object.entries(get("witness")).map(([k, v]) => [k, show(v)])) : h("p", { class: "quiet" }, "None: the case did not run to its end."),
    h("h3", null, "Source"),
    h("p", null, `${place} of ${file}, run ${run}, written ${when(written)} UTC`),
    h("details", null, h("summary", null, "JSON"), h("pre", { tabindex: "0" }, JSON.stringify(rowJson(i), null, 1))));
}

const CASES = 200;

function causeOf(i) {
  const t = tables.causes;
  return Object.fromEntries(["id", "backend", "verdict", "smallest"].map((c) => [c, t.value(c, i)]));
}

// A cause's state in a comparison of builds, and its sentence.
function causeText(i) {
  return ["state", "sentence"].map((c) => tables.causes.value(c, i)).filter(Boolean).join(": ");
}

// Its sentence, beside badges of its verdict and its state.
function causeTold(i) {
  const [verdict, sentence] = ["verdict", "sentence"].map((c) => tables.causes.value(c, i));
  return sentence.replace(`: ${verdict}: `, ": ");
}

const CAUSE_NAMES = new Set(Array.from({ length: tables.causes.count }, (_, i) => `${tables.causes.value("id", i)}\n${tables.causes.value("backend", i)}`));

// A cause by its id and backend, which every run and build has the same; a cell may name one that no file here has.
function causeLink(id, backend, text) {
  return !CAUSE_NAMES.has(`${id}\n${backend}`) ? h("span", null, text || id) : h("a", { href: link("cause", { id, backend }), class: "row" }, text || breakable(id));
}

// Case and backend -> the row of its newest result.
const NEWEST = new Map(Array.from({ length: tables.results.count }, (_, i) => [`${tables.results.value("case", i)}\n${tables.results.value("backend", i)}`, i]));

function causeSection(root, params) {
  const t = tables.causes;
  const found = select(t, new URLSearchParams({ id: params.get("id") ?? "", backend: params.get("backend") ?? "" }));
  if (found.length !== 1) {
    return add(root, h("h2", null, "Cause not found"), h("p", null, h("a", { href: "#causes" }, "All causes")));
  }
  const i = found[0], { id, backend, verdict, smallest } = causeOf(i);
  const proof = NEWEST.get(`${smallest}\n${backend}`);
  const its = (column) => (proof === undefined ? null : tables.results.value(column, proof));
  add(root,
    h("p", { class: "back" }, h("button", { type: "button", onclick: () => history.back() }, "← Back")),
    h("h2", null, causeTold(i)),
    h("p", { class: "verdict" }, causeBadges(i), " on ", breakable(backend)),
    h("div", { class: "columns" },
      h("section", null, h("h3", null, "Facts"), causeFacts(i)),
      h("section", null, h("h3", null, "Reproduce its smallest case"), commands(smallest, backend, its("saved")),
        t.value("folder", i) ? h("p", null, "Bug report: ", h("code", null, t.value("folder", i))) : "")),
    causeHistory(i),
    h("h3", null, "Smallest case"), h("p", null, proof === undefined ? breakable(smallest) : caseLink(proof)), graph(smallest, its("where")),
    h("h3", null, "Cases"), causeCases(i),
    h("h3", null, "Source"), h("p", null, sourceText(t, i)));
}

function affected(i) {
  const [n, counted, of] = ["architectures", "counted", "of"].map((c) => tables.causes.value(c, i));
  return n === null ? "" : counted < of ? `${number(n)} of ${number(counted)} checked architectures` : plural(n, "architecture");
}

function causeFacts(i) {
  const t = tables.causes;
  const conditions = t.value("conditions", i);
  return facts([
    ["id", t.value("id", i)],
    ["op", t.value("op", i)],
    ["conditions", conditions.length ? h("ul", { class: "others" }, conditions.map(([k, v]) => h("li", null, h("code", null, /^[<>=]/.test(v) ? `${k} ${v}` : `${k} = ${v}`)))) : ""],
    ["message", t.value("message", i) && breakable(t.value("message", i))],
    ["seen", t.value("seen", i) || "not confirmed"],
    ["affected", affected(i)],
    ["matching nodes", `${number(t.value("failed", i))} failed, ${number(t.value("passed", i))} passed`],
    ["since", sinceOf(i)],
  ].filter(([, value]) => value));
}

// The runs that decided one of its cases, newest first.
function causeHistory(i) {
  const runs = tables.causes.value("history", i);
  return runs.length < 2 ? "" : [h("h3", null, "History"), scroller("History", h("table", { class: "plain cards" },
    h("thead", null, h("tr", null, ["run (UTC)", "state", "failed", "passed", "commit", "CI job", "file"].map((x) => h("th", { scope: "col" }, x)))),
    h("tbody", null, [...runs].reverse().map((r) => h("tr", null, h("th", { scope: "row" }, when(r.written)),
      h("td", null, r.failed ? badge("failed", LOOKS.FAIL) : badge("passed", LOOKS.PASS)), h("td", null, count(r.failed)), h("td", null, count(r.passed)),
      h("td", null, commitText(r) ? h("code", null, commitText(r)) : "–"), h("td", null, r.ci ? outside(String(r.ci)) : "–"), h("td", null, breakable(r.file)))))))];
}

// Its cases, smallest first: those with a result here lead to it.
function causeCases(i) {
  const t = tables.causes, { id, backend } = causeOf(i), rows = new Map();
  for (const k of select(tables.results, new URLSearchParams({ cause: id, backend }))) rows.set(tables.results.value("case", k), k);
  const listed = [...new Set([...t.value("cases", i), ...rows.keys()])];
  const item = (name) => (rows.has(name) ? [badge(tables.results.value("verdict", rows.get(name))), " ", caseLink(rows.get(name))] : breakable(name));
  return [
    h("p", null, figure("results", { cause: id, backend }), rows.size === 1 ? " result has this cause." : " results have this cause."),
    h("ul", { class: "others" }, listed.slice(0, CASES).map((name) => h("li", null, item(name)))),
    listed.length > CASES ? h("p", { class: "quiet" }, `and ${count(listed.length - CASES)} more`) : "",
  ];
}

function numbersOf(i) {
  const t = tables.results;
  const used = t.value("budget_used", i);
  const checked = t.value("nmse", i) !== null;
  const bar = used === null ? "" : h("meter", { min: 0, max: 1, low: 0.5, high: 0.9, optimum: 0, value: Math.min(used, 1), "aria-label": "error, share of the tolerance" });
  return [
    ["error (% of tolerance)", used === null ? (checked ? "bit-exact required" : "not checked") : [h("span", { title: String(used) }, share(used)), " ", bar]],
    ["NMSE, declared arithmetic", number(t.value("nmse", i), 4)],
    ["NMSE, exact", number(t.value("nmse_exact", i), 4)],
    ["worst tensor", t.value("wrong", i) === null ? "–" : wrongText(t.value("wrong", i))],
    ["golden output", t.value("golden", i) ?? "none"],
    ["steps", number(t.value("steps", i))],
    ["backend time", duration(t.value("seconds", i))],
  ];
}

function wrongText({ kind, nmse }) {
  return `${kind}, NMSE ${nmse === null ? "Inf" : number(nmse, 4)}`;
}

function divergence(where) {
  if (!where) return "";
  const { numbers, ...rest } = where;
  return [h("h3", null, "First wrong node"), facts(Object.entries({ ...rest, ...numbers }).map(([k, v]) => [k, show(v)]))];
}

function failure(error) {
  if (!error) return "";
  return [h("h3", null, "Error"), facts(Object.entries(error).map(([k, v]) => [k, show(v)]))];
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

function commands(id, backend, saved) {
  return [
    saved ? copyable(`conform repro ${quoted(saved)} --backend ${quoted(backend)}`) : "",
    copyable(`conform run --case ${quoted(id)} --backend ${quoted(backend)}`),
    copyable(`conform show ${quoted(id)} --svg graph.svg`),
  ];
}

function elsewhere(i) {
  const t = tables.results;
  const others = select(t, new URLSearchParams({ case: t.value("case", i) })).filter((k) => k !== i);
  const lacking = select(tables.missing, new URLSearchParams({ case: t.value("case", i) }));
  const machines = new Set([i, ...others].map((k) => report.documents[t.value("document", k)].environment.machine)).size;
  if (!others.length && !lacking.length) return h("p", { class: "quiet" }, "No other backend in these runs.");
  return h("ul", { class: "others" },
    others.map((k) => h("li", null, caseLink(k, [badge(t.value("verdict", k)), " ", breakable(nameOf(t.value("backend", k)))]), machines > 1 ? h("span", { class: "quiet" }, ` machine ${report.documents[t.value("document", k)].environment.machine}`) : "")),
    lacking.map((k) => h("li", null, badge("not run", LOOKS["not run"]), " ", breakable(nameOf(tables.missing.value("backend", k))))));
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

function graph(id, wrong) {
  const d = Object.hasOwn(report.drawings, id) && report.drawings[id];
  if (!d) return h("p", { class: "note" }, "Not drawn: the page draws failures and one case of each op. The last command above draws it.");
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
  requestAnimationFrame(() => {
    fit(svg);
    const wrong = d.boxes.find(([node]) => culprit !== null && node === culprit), region = svg.parentElement;
    if (wrong) region?.scrollTo(wrong[1] - region.clientWidth / 2, wrong[2] - region.clientHeight / 2);
  });
  const kinds = [...new Set(d.boxes.map((b) => b[3]))];
  return [
    h("ul", { class: "legend" }, kinds.map((k) => h("li", null, s("svg", { viewBox: "0 0 14 14", class: "swatch graph", "aria-hidden": "true" }, s("g", { class: `box ${KIND_CLASSES[k]}` }, s("rect", { x: 1, y: 1, width: 12, height: 12, rx: 3 }))), ` ${k}`)),
      culprit !== null ? h("li", null, "✗ thick border: first divergence") : ""),
    h("p", { class: "quiet" }, `Step ${d.step}.`),
    zoomable("Graph", svg),
  ];
}

const ZOOM = { least: 0.2, most: 5, step: 1.25 };

// A drawing that scrolls in its own region: buttons, + - 0 and Ctrl with the wheel change its size, dragging moves it.
function zoomable(label, svg) {
  const whole = ["width", "height"].map((side) => Number(svg.getAttribute(side)));
  const region = scroller(label, svg), said = h("output", { class: "quiet" });
  region.classList.add("zoom");
  let scale = 1;
  // what is at (x, y) of the region stays there
  const zoom = (to, x = region.clientWidth / 2, y = region.clientHeight / 2) => {
    const at = [(region.scrollLeft + x) / scale, (region.scrollTop + y) / scale];
    scale = Math.min(ZOOM.most, Math.max(ZOOM.least, to));
    ["width", "height"].forEach((side, k) => svg.setAttribute(side, whole[k] * scale));
    region.scrollTo(at[0] * scale - x, at[1] * scale - y);
    said.textContent = `${Math.round(100 * scale)} %`;
  };
  const steps = {
    "+": () => zoom(scale * ZOOM.step), "-": () => zoom(scale / ZOOM.step), "0": () => zoom(1),
    f: () => zoom(Math.min((region.clientWidth - 2) / whole[0], (region.clientHeight - 2) / whole[1])),
  };
  region.addEventListener("keydown", (event) => {
    const step = steps[event.key === "=" ? "+" : event.key];
    if (!step || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    step();
  });
  region.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    const box = region.getBoundingClientRect();
    zoom(scale * Math.exp(-event.deltaY / 300), event.clientX - box.left, event.clientY - box.top);
  }, { passive: false });
  region.addEventListener("pointerdown", (event) => {
    if (event.button || event.pointerType !== "mouse") return; // a finger scrolls by itself
    const from = [region.scrollLeft + event.clientX, region.scrollTop + event.clientY];
    const move = (e) => region.scrollTo(from[0] - e.clientX, from[1] - e.clientY);
    region.setPointerCapture(event.pointerId);
    region.addEventListener("pointermove", move);
    region.addEventListener("lostpointercapture", () => region.removeEventListener("pointermove", move), { once: true });
  });
  said.textContent = "100 %";
  const button = (text, name, key) => h("button", { type: "button", "aria-label": name, title: `${name} (${key})`, onclick: steps[key] }, text);
  return [
    h("div", { class: "bar", role: "group", "aria-label": `Size of the ${label.toLowerCase()}` },
      button("−", "Smaller", "-"), button("+", "Larger", "+"), button("1:1", "1:1, original size", "0"), button("Whole", "Whole drawing", "f"), said),
    region,
  ];
}

function rowJson(i) {
  const t = tables.results;
  const names = ["case", "backend", "verdict", "budget_used", "nmse", "nmse_exact", "seconds", "steps", "witness", "where", "error", "wrong", "saved", "fresh", "waived", "cause", "golden", "notes", "detail"];
  return Object.fromEntries(names.map((n) => [n, n === "fresh" ? t.value(n, i) !== null : t.value(n, i)]));
}
