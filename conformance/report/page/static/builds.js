// Builds from old to new: their devices, their causes, and their figures of speed and memory.

const BUILDS = report.builds;
const NOTABLE = 0.01;
// Figures that are the same in each run; resident memory is not.
const EXACT = / in |^instructions$|^cycles$/;

function packageOf(b) {
  return b.name.replace(/(==|@)[^=@]*$/, "");
}

function versionOf(b) {
  return b.name.slice(packageOf(b).length).replace(/^(==|@)/, "") || brief(b.name);
}

function buildsSection(root) {
  add(root, h("h2", null, "Builds"),
    h("p", { class: "about" }, "Each build ran the same cases in the same order, for a limited time. A dash: it did not run, or the build lacks it."),
    h("h3", null, "Devices"), scroller("Devices of builds", devicesOfBuilds()));
  const causes = causesOfBuilds(), figures = figuresOfBuilds();
  if (causes.length) add(root, h("h3", null, "Causes"), h("p", { class: "about" }, "The verdict of the smallest case of each cause in each build, the newest first."), buildMatrix("cause", causes));
  if (figures.length) add(root, h("h3", null, "Speed and memory"),
    h("p", { class: "about" }, "Counted instructions, estimated cycles, and bytes. A ratio compares with the previous build of the same package, if a figure that does not vary differs by more than 1 %."), buildMatrix("figure", figures));
}

function devicesOfBuilds() {
  const names = [...new Set(BUILDS.flatMap((b) => Object.keys(b.devices)))];
  return h("table", { class: "plain cards" },
    h("thead", null, h("tr", null, ["build", ...names].map((x) => h("th", { scope: "col" }, x)))),
    h("tbody", null, [...BUILDS].reverse().map((b) => h("tr", null,
      h("th", { scope: "row" }, brief(b.name), h("div", { class: "quiet" }, [b.released, b.number, b.ggml && `ggml ${b.ggml}`].filter(Boolean).join(", "))),
      names.map((name) => h("td", null, deviceOfBuild(b.devices[name])))))));
}

function deviceOfBuild(backend) {
  const c = backend ? tally(select(tables.results, new URLSearchParams({ backend }))) : { declared: 0 };
  if (!c.declared) return "–";
  const causes = select(tables.causes, new URLSearchParams({ backend })).length;
  return [
    c.failed ? rowsLink("results", { backend, verdict: FAILED }, badge(`${count(c.failed)} failed`, LOOKS.FAIL)) : badge("no failure", LOOKS.PASS),
    h("div", { class: "quiet" }, rowsLink("results", { backend, verdict: PASSED }, `${count(c.passed)} of ${count(c.declared)} passed`),
      causes ? [", ", rowsLink("causes", { backend }, plural(causes, "cause"))] : ""),
  ];
}

// A row per smallest case of a cause, those of the newest builds first: a label, and a cell per build.
function causesOfBuilds() {
  const t = tables.causes, found = new Map();
  for (let i = 0; i < t.count; i++) {
    const { backend, smallest } = causeOf(i), device = report.setups[backend]?.[1], k = BUILDS.findIndex((b) => b.devices[device] === backend);
    if (k < 0) continue;
    if (!found.has(smallest)) found.set(smallest, { devices: new Set(), causes: new Map(), last: k });
    const row = found.get(smallest);
    row.devices.add(device);
    row.last = Math.max(row.last, k);
    row.causes.set(k, i);
  }
  return [...found].sort(([, a], [, b]) => b.last - a.last).slice(0, CAUSES).map(([smallest, { devices, causes, last }]) => ({
    label: [t.value("sentence", causes.get(last)), h("div", { class: "quiet" }, `${[...devices].join(", ")}: `, breakable(smallest))],
    cells: BUILDS.map((b, k) => {
      if (causes.has(k)) {
        const { id, backend, verdict } = causeOf(causes.get(k));
        return causeLink(id, backend, badge(verdict));
      }
      const row = [...devices].map((device) => NEWEST.get(`${smallest}\n${b.devices[device]}`)).find((i) => i !== undefined);
      return row === undefined ? "–" : caseLink(row, badge(tables.results.value("verdict", row)));
    }),
  }));
}

function figuresOfBuilds() {
  const rows = new Map();
  BUILDS.forEach((b, k) => b.figures.forEach(([device, name, metric, value]) => {
    const key = [device, name, metric].join("\n");
    if (!rows.has(key)) rows.set(key, { label: [`${name}: ${metric}`, h("div", { class: "quiet" }, device)], exact: EXACT.test(metric), values: [] });
    rows.get(key).values[k] = value;
  }));
  return [...rows.values()].map(({ label, exact, values }) => ({ label, cells: BUILDS.map((b, k) => {
    const before = values.findLast((v, j) => j < k && v !== undefined && packageOf(BUILDS[j]) === packageOf(b)), ratio = values[k] / before;
    return [number(values[k], 4), exact && Math.abs(ratio - 1) > NOTABLE ? h("div", null, badge(`${number(ratio)}×`, LOOKS[ratio > 1 ? "new" : "fixed"])) : ""];
  }) }));
}

// The newest build first, which a narrow window shows.
function buildMatrix(what, rows) {
  return scroller(`${what} by build`, h("table", { class: "matrix cards" },
    h("thead", null, h("tr", null, h("th", { scope: "col" }, what), [...BUILDS].reverse().map((b) => h("th", { scope: "col", title: b.name }, h("span", { class: "name" }, versionOf(b).split(/(?<=\.)/).flatMap((part) => [part, h("wbr")])), h("span", { class: "quiet" }, b.released))))),
    h("tbody", null, rows.map(({ label, cells }) => h("tr", null, h("th", { scope: "row" }, label), [...cells].reverse().map((c) => h("td", null, c)))))));
}

const CODE = 100;

// What differs between the two builds of a test: code with its cases, code without any, and the interface.
function changedCode() {
  return report.changed.map((c) => {
    const rows = c.rows.filter((r) => r.cases || r.is_shared), left = c.rows.filter((r) => !r.cases && !r.is_shared);
    const range = c.numbers.every(Boolean) && c.numbers[0] !== c.numbers[1] ? `, commits ${c.numbers[1]}..${c.numbers[0]}` : "";
    rows.sort((a, b) => b.failing - a.failing || a.is_shared - b.is_shared || b.cases - a.cases);
    return [
      h("h3", null, "What changed"),
      h("p", null, breakable(`${c.name} against ${c.against}${range}`), c.note ? h("div", { class: "quiet" }, c.note) : ""),
      rows.length ? scroller(`Changed code of ${c.name}`, h("table", { class: "plain cards changed" },
        h("thead", null, h("tr", null, ["changed", "kind", "cases", "runs", "failing"].map((x, k) => h("th", { scope: "col", class: k > 1 ? "number" : "" }, x)))),
        h("tbody", null, rows.slice(0, CODE).map((r) => h("tr", null,
          h("th", { scope: "row" }, breakable(r.name)), h("td", null, `${r.is_new ? "new " : ""}${r.kind}`),
          r.is_shared ? h("td", { class: "number", colspan: "3" }, "all cases") : [r.cases, r.tested].map((n) => h("td", { class: "number" }, count(n))),
          r.is_shared ? "" : h("td", { class: "number" }, r.failing ? badge(count(r.failing), LOOKS.FAIL) : "0")))))) : h("p", null, "No function, shader or kernel that a case reaches."),
      rows.length > CODE ? h("p", { class: "quiet" }, `and ${plural(rows.length - CODE, "more", "more")}`) : "",
      left.length ? h("details", null, h("summary", null, `${plural(left.length, "change")} that no case reaches`), h("p", { class: "untested" }, breakable(left.slice(0, CODE).map((r) => r.name).join(", ")), left.length > CODE ? ` and ${count(left.length - CODE)} more` : "")) : "",
      Object.keys(c.interface).length ? h("details", null, h("summary", null, "Interface"), h("table", { class: "plain interface" }, h("tbody", null, Object.entries(c.interface).map(([what, texts]) =>
        h("tr", null, h("th", { scope: "row" }, what), h("td", null, texts.slice(0, CODE).join("; "), texts.length > CODE ? ` and ${count(texts.length - CODE)} more` : "")))))) : "",
    ];
  });
}
