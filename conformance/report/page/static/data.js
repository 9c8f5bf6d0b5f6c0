// The rows behind everything: tables of columns, each word or object stored once.

const report = JSON.parse(document.getElementById("data").textContent);
// Verdicts that fail a run, and those of a passed case.
const FAILED = report.failed, PASSED = report.passed;
// In place of a verdict: the case was requested of the backend and has no result.
const LOST = "missing";
const BAD = [...FAILED, LOST];
// Everything that a row can come to, in the order in which people want to know of it.
const RANKS = ["FAIL", "ERROR", "CRASH", "TIMEOUT", "OVERCLAIM", "UNSOUND", "UNDERCLAIM", "VACUOUS", "XPASS", "missing",
  "regressed", "undecided", "XFAIL", "not timed", "not run", "UNRUN", "NO REFERENCE",
  "UNSUPPORTED", "fine", "agreed", "timed", "PASS"];
RANKS.push(...report.states);
const STATES = ["state", "verdict", "answer", "finding", "timed"];

function ranked(words) {
  const rank = (w) => (RANKS.indexOf(w) + RANKS.length + 1) % (RANKS.length + 1);
  return [...words].sort((a, b) => rank(a) - rank(b) || (a < b ? -1 : a > b ? 1 : 0));
}
const DECLARED = ["begun, not finished", "finished"];

class Table {
  constructor(name, { count, columns }) {
    this.name = name;
    this.count = count;
    this.columns = columns;
    this.lowered = new Map();
    this.orders = new Map();
    for (const c of Object.values(columns)) if (c.at) c.at = Int32Array.from(c.at);
    // Rows come in the order of what became of them, what needs a look first.
    this.first = STATES.find((name) => Object.hasOwn(columns, name)) || null;
    if (this.first) columns[this.first].state = true;
  }

  value(column, i) {
    const c = this.columns[column];
    if (c.numbers) return c.numbers[i];
    const at = c.at[i];
    return at < 0 ? null : (c.words || c.objects)[at];
  }

  words(column) {
    return this.columns[column].words;
  }

  lower(column) {
    if (!this.lowered.has(column)) this.lowered.set(column, this.words(column).map((w) => w.toLowerCase()));
    return this.lowered.get(column);
  }

  // Where row i stands in the JSON of its run: the file, the run and `results[17]`.
  source(i) {
    const d = report.documents[this.value("document", i)];
    return { file: d.file, run: d.run, written: d.written, place: this.place(i) };
  }

  place(i) {
    const list = this.value("list", i), row = this.value("row", i);
    return row === null ? list : `${list}[${row}]`;
  }

  written(i) {
    return report.documents[this.value("document", i)].written;
  }
}

const tables = Object.fromEntries(Object.entries(report.tables).map(([name, raw]) => [name, new Table(name, raw)]));
const made = Date.parse(report.made);

// What is known to exist and has no result: of each backend the cases that another one has a result of, and what a
// level lists and no backend ran.
const EVERY = "every backend";
// Families whose cases are of the backends that were chosen for them.
const OWN = ["perf", "gate"];

function missing() {
  const t = tables.results;
  const cases = t.columns.case, backends = t.words("backend");
  const ran = new Uint8Array(cases.words.length * backends.length);
  const subject = new Array(cases.words.length);
  for (let i = 0; i < t.count; i++) {
    ran[cases.at[i] * backends.length + t.columns.backend.at[i]] = 1;
    subject[cases.at[i]] = i;
  }
  const rows = [];
  const index = new Map(cases.words.map((w, k) => [w, k]));
  backends.forEach((backend, b) => {
    cases.words.forEach((id, k) => {
      if (OWN.includes(t.value("family", subject[k]))) return;
      if (!ran[k * backends.length + b]) {
        const i = subject[k];
        const [family, op, type] = ["family", "op", "type"].map((c) => t.value(c, i));
        const s = t.source(i);
        rows.push([backend, id, family, op, type, `ran on ${t.value("backend", i)}`, `${s.file}, run ${s.run.slice(0, 8)}, ${s.place}`]);
      }
    });
  });
  for (const [level, ids] of Object.entries(report.planned)) {
    for (const [id, family, op, type] of ids) {
      if (!index.has(id)) rows.push([EVERY, id, family, op, type, `of level ${level}`, `conform list cases --level ${level}`]);
    }
  }
  const names = ["backend", "case", "family", "op", "type", "known", "where"];
  const columns = Object.fromEntries(names.map((name, k) => [name, coded(rows.map((r) => r[k]))]));
  return new Table("missing", { count: rows.length, columns });
}

function coded(values) {
  const known = new Map();
  const at = values.map((v) => {
    if (!known.has(v)) known.set(v, known.size);
    return known.get(v);
  });
  return { words: [...known.keys()], at };
}

tables.missing = missing();
