// Making elements. Whatever comes from a run is set as text, never as markup.

function h(tag, props, ...children) {
  return fill(document.createElement(tag), props, children);
}

function s(tag, props, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), props, children);
}

function fill(element, props, children) {
  for (const [key, value] of Object.entries(props || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : key === "href" || key === "value" ? value : seen(value));
  }
  element.append(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== "").map(seen));
  return element;
}

// Characters that turn the direction of what follows would show a text as another one; they are shown by their number.
function seen(text) {
  return typeof text === "string" && /[\u200e\u200f\u202a-\u202e\u2066-\u2069]/.test(text)
    ? text.replace(/[\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, (c) => `\\u${c.charCodeAt(0).toString(16)}`) : text;
}

// A name of bounded length: its begin and its end, which tell a library's devices apart.
function brief(text, most = 44) {
  return text.length <= most ? text : `${text.slice(0, Math.floor(most / 3))}…${text.slice(text.length - Math.floor((2 * most) / 3) + 1)}`;
}

// Backends that are only the base of `conform build test`, and what is compared with them.
const OLD = new Map(Object.entries(report.bases));

// A backend for people: its device, and its build where several are shown; those outside `build test` by their name.
function nameOf(backend) {
  const [build, device] = report.setups[backend] || [];
  return !device ? backend : OLD.has(backend) || report.builds.length > 1 ? `${build} on ${device}` : device;
}

function add(element, ...children) {
  return fill(element, null, children);
}

function say(text) {
  document.getElementById("said").textContent = text;
}

// A verdict or another answer: a symbol and a word, and a colour besides.
const LOOKS = {
  PASS: ["✓", "good"], FAIL: ["✗", "bad"], OVERCLAIM: ["✗", "bad"], CRASH: ["✗", "bad"], TIMEOUT: ["✗", "bad"],
  VACUOUS: ["✗", "bad"], ERROR: ["✗", "bad"], missing: ["!", "lost"], "NO REFERENCE": ["○", "notrun"], XPASS: ["✗", "bad"], XFAIL: ["≈", "known"], UNSUPPORTED: ["⊘", "refused"],
  "not run": ["○", "notrun"], unsupported: ["⊘", "refused"], "0 %": ["✗", "zero"],
  fine: ["✓", "good"], regressed: ["✗", "bad"], undecided: ["?", "unsure"],
  agreed: ["✓", "good"], UNSOUND: ["✗", "bad"], UNDERCLAIM: ["✗", "bad"], UNRUN: ["○", "notrun"],
  new: ["✗", "bad"], worse: ["✗", "bad"], changed: ["?", "unsure"], "lost coverage": ["⊘", "lost"], "still failing": ["≈", "known"], added: ["+", "plain"], fixed: ["✓", "good"], same: ["·", "plain"],
  timed: ["✓", "good"], "not timed": ["○", "notrun"],
};

function badge(word, look) {
  const [symbol, kind] = look || (Object.hasOwn(LOOKS, word) ? LOOKS[word] : ["·", "plain"]);
  return h("span", { class: `badge ${kind}` }, h("span", { "aria-hidden": "true" }, symbol), ` ${word}`);
}

function number(x, digits = 3) {
  if (x === null || x === undefined) return "–";
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (size >= 1e4 && size < 1e15) return Math.round(x).toLocaleString("en");
  if (size >= 1e15 || size < 1e-3) return x.toExponential(digits - 1).replace(/\.?0*e\+?/, "e");
  return Number.isInteger(x) ? String(x) : String(Number(x.toPrecision(digits)));
}

// A share of an error budget: in per cent up to the whole, in times beyond it.
function share(x) {
  if (x === null || x === undefined) return "–";
  if (x === 0) return "0 %";
  if (x <= 1) return x < 1e-4 ? "< 0.01 %" : x > 0.999 && x < 1 ? "99.9 %" : `${Number((100 * x).toPrecision(3))} %`;
  if (x > 1000) return "> 1000×";
  return `${x < 1.01 ? x.toPrecision(5) : Number(x.toPrecision(3))}×`;
}

const SIZES = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

// A rate with its unit: 812 tokens/s, 1,230 tokens/s, 402 MB/s.
function pace(x, of) {
  if (x === null || x === undefined) return "–";
  const [unit, big] = of === "bytes" ? ["B", 1e3] : [of, 1e6];
  const [size, letter] = (x >= big && SIZES.find(([n]) => x >= n)) || [1, ""];
  return `${Number((x / size).toPrecision(4)).toLocaleString("en")} ${letter}${letter && of !== "bytes" ? " " : ""}${unit}/s`;
}

function duration(x) {
  if (x === null || x === undefined) return "–";
  const [size, unit] = x >= 1 || x === 0 ? [1, "s"] : x >= 1e-3 ? [1e-3, "ms"] : [1e-6, "µs"];
  return `${number(x / size)} ${unit}`;
}

// A link out of the page: only to the web; anything else stays text.
function outside(address) {
  return /^https?:\/\/[^\s"'<>\\]+$/.test(address) && URL.canParse(address) ? h("a", { href: address, rel: "noreferrer noopener" }, address) : address;
}

function count(n) {
  return n.toLocaleString("en");
}

function plural(n, one, many) {
  return `${count(n)} ${n === 1 ? one : many || `${one}s`}`;
}

function age(written) {
  const minutes = Math.max(0, (made - Date.parse(written)) / 60000);
  if (minutes < 60) return `${Math.round(minutes)} min`;
  return minutes < 48 * 60 ? `${Math.round(minutes / 60)} h` : `${Math.round(minutes / 1440)} d`;
}

function when(written) {
  return written.replace("T", " ").replace(":00Z", "").replace("Z", "");
}

function sourceText(table, i) {
  const { file, run, place } = table.source(i);
  return `${file}, run ${run.slice(0, 8)}, ${place}`;
}

// A region that scrolls sideways by itself, so that the page never does; on a phone the rows of a table are cards.
function scroller(label, ...children) {
  for (const table of children.flat(Infinity).filter((e) => e.matches?.(".cards"))) {
    const heads = [...table.tHead.rows[0].cells].map((th) => (th.querySelector(".name") || th).textContent);
    for (const row of table.tBodies[0].rows) for (const td of row.querySelectorAll("td")) {
      if (heads[td.cellIndex] && !td.querySelector(":scope > .unseen") && heads[td.cellIndex] !== "state") td.dataset.label = heads[td.cellIndex];
    }
  }
  return h("div", { class: "scroll", role: "region", tabindex: "0", "aria-label": label }, children);
}

// A command, whose options do not break after their hyphens.
function commandText(command) {
  return command.split(/(?= )/).map((word) => (/^ ?-/.test(word) ? h("span", { class: "option" }, word) : breakable(word)));
}

function copyable(command) {
  const code = h("code", { tabindex: "0" }, commandText(command));
  const button = h("button", {
    type: "button",
    class: "copy",
    onclick: async () => {
      try {
        await navigator.clipboard.writeText(command);
      } catch {
        getSelection().selectAllChildren(code);
        document.execCommand("copy");
      }
      button.textContent = "Copied";
      say("Copied");
      setTimeout(() => (button.textContent = "Copy"), 1500);
    },
  }, "Copy");
  return h("div", { class: "command" }, code, button);
}

// A word of a shell, as Python's shlex.quote has it.
function quoted(text) {
  return text && !/[^\w@%+=:,./-]/.test(text) ? text : `'${text.replaceAll("'", `'"'"'`)}'`;
}

// One tab stop for a set of links; arrow keys go on from there, in rows and columns where they stand in a table.
function roving(container, selector) {
  const all = () => [...container.querySelectorAll(selector)];
  const settle = () => {
    const items = all();
    const stop = items.find((e) => e.getAttribute("tabindex") === "0") || items[0];
    for (const e of items) e.setAttribute("tabindex", e === stop ? "0" : "-1");
  };
  const go = (from, to) => {
    if (!to) return;
    from.tabIndex = -1;
    to.tabIndex = 0;
    to.focus();
  };
  container.addEventListener("focusin", (event) => {
    const item = event.target.closest(selector);
    if (!item || item.tabIndex === 0) return;
    all().forEach((e) => (e.tabIndex = -1));
    item.tabIndex = 0;
  });
  container.addEventListener("keydown", (event) => {
    const item = event.target.closest(selector);
    if (!item || event.altKey || event.ctrlKey || event.metaKey) return;
    const items = all(), k = items.indexOf(item);
    const moves = {
      ArrowRight: () => items[k + 1], ArrowLeft: () => items[k - 1], Home: () => items[0], End: () => items.at(-1),
      ArrowDown: () => vertical(items, item, 1), ArrowUp: () => vertical(items, item, -1),
    };
    if (!moves[event.key]) return;
    event.preventDefault();
    go(item, moves[event.key]());
  });
  settle();
  return settle;
}

function vertical(items, item, step) {
  const cell = item.closest("td, th"), row = item.closest("tr");
  if (!row) return items[items.indexOf(item) + step];
  const nth = [...cell.querySelectorAll("a, button")].indexOf(item);
  for (let r = row; r; ) {
    r = step > 0 ? r.nextElementSibling : r.previousElementSibling;
    const other = r && [...(r.cells[cell.cellIndex]?.querySelectorAll("a, button") || [])].filter((e) => items.includes(e));
    if (other?.length) return other[Math.min(nth, other.length - 1)];
  }
  return null;
}
