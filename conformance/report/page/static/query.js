// A figure on the page is a query, and its link shows the rows that the query finds: `#results?backend=cpu&verdict=FAIL`.

const CONTROL = new Set(["q", "sort", "page"]);

function link(view, filter = {}) {
  const params = new URLSearchParams();
  for (const [key, value] of Object.entries(filter)) {
    for (const v of Array.isArray(value) ? value : [value]) if (v !== null && v !== undefined) params.append(key, v);
  }
  const text = params.toString();
  return `#${view}${text ? `?${text}` : ""}`;
}

// Change the address without a new view. Back undoes each choice; letters of one search are one step.
function remember(hash, typing) {
  if (hash === location.hash || (hash === "#" && !location.hash)) return;
  history[typing && remember.typing ? "replaceState" : "pushState"](null, "", hash);
  remember.typing = typing;
}

function parse(hash) {
  const [view, query] = hash.replace(/^#/, "").split(/\?(.*)/s);
  return { view, params: new URLSearchParams(query || "") };
}

// A figure: the number of rows that a filter finds in a table, and the way to them.
function figure(table, filter, { text, label, className } = {}) {
  const n = select(tables[table], new URLSearchParams(link("", filter).slice(2))).length;
  return rowsLink(table, filter, text ?? count(n), label, className);
}

function rowsLink(table, filter, text, label, className) {
  return h("a", { href: link(table, filter), class: `figure ${className || ""}`, "aria-label": label }, text);
}

// Rows of a table that a query takes: for each column one of the given words, or a number in `low..high` (above low, up
// to high), or `none`; and each word of `q` somewhere in the row. In the order of `sort`, where it says one.
function select(table, params) {
  const kept = new Uint8Array(table.count).fill(1);
  for (const key of new Set(params.keys())) {
    if (CONTROL.has(key)) continue;
    const column = Object.hasOwn(table.columns, key) && table.columns[key];
    if (!column || column.objects) return [];
    if (column.words) oneOf(kept, column, params.getAll(key));
    else between(kept, column.numbers, params.get(key));
  }
  for (const token of (params.get("q") || "").toLowerCase().split(/\s+/)) if (token) holding(kept, table, token);
  const order = ordered(table, params.get("sort") || table.first), found = [];
  for (let k = 0; k < kept.length; k++) {
    const i = order ? order[k] : k;
    if (kept[i]) found.push(i);
  }
  return found;
}

function oneOf(kept, { words, at }, wanted) {
  const none = words.length, taken = new Uint8Array(none + 1);
  words.forEach((w, k) => (taken[k] = wanted.includes(w) ? 1 : 0));
  if (wanted.includes("none")) taken[none] = 1;
  for (let i = 0; i < kept.length; i++) kept[i] &= taken[at[i] < 0 ? none : at[i]];
}

function between(kept, values, range) {
  const [low, high] = range.includes("..")
    ? range.split("..").map((x, k) => (x === "" ? (k ? Infinity : -Infinity) : Number(x))) : [null, Number(range)];
  for (let i = 0; i < kept.length; i++) {
    const v = values[i];
    const fits = range === "none" ? v === null : v !== null && (low === null ? v === high : v > low && v <= high);
    if (!fits) kept[i] = 0;
  }
}

function holding(kept, table, token) {
  const hit = new Uint8Array(kept.length);
  for (const [name, { words, at }] of Object.entries(table.columns)) {
    if (!words || name === "list") continue;
    const mask = Uint8Array.from(table.lower(name), (w) => (w.includes(token) ? 1 : 0));
    if (mask.includes(1)) for (let i = 0; i < hit.length; i++) if (at[i] >= 0) hit[i] |= mask[at[i]];
  }
  for (let i = 0; i < kept.length; i++) kept[i] &= hit[i];
}

// All rows in the order of a column, rows without a value last; made once for each.
function ordered(table, sort) {
  const down = sort?.startsWith("-"), name = down ? sort.slice(1) : sort, column = Object.hasOwn(table.columns, name ?? "") && table.columns[name];
  if (!column || column.objects) return null;
  if (!table.orders.has(sort)) table.orders.set(sort, order(column, down ? -1 : 1, table.count));
  return table.orders.get(sort);
}

function order(column, sign, length) {
  let rank = column.numbers;
  if (!rank) {
    const place = new Map((column.state ? ranked(column.words) : [...column.words].sort()).map((w, k) => [w, k]));
    rank = Array.from(column.at, (k) => (k < 0 ? null : place.get(column.words[k])));
  }
  return Array.from({ length }, (_, i) => i).sort((a, b) => {
    if (rank[a] === rank[b]) return a - b;
    if (rank[a] === null) return 1;
    if (rank[b] === null) return -1;
    return sign * (rank[a] - rank[b]);
  });
}
