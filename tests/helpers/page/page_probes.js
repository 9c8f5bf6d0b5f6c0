// What the tests of the page ask in the browser; loaded before each question.

// Once the page has turned to `hash`; on a busy machine the turn before may not have been told yet.
const go = (hash) => new Promise((done) => {
  if (location.hash === hash) return done();
  const heard = ({ newURL }) => {
    if (newURL !== location.href) return;
    removeEventListener("hashchange", heard);
    setTimeout(done);
  };
  addEventListener("hashchange", heard);
  location.hash = hash;
});
const found = () => Number(document.querySelector(".found").dataset.rows);
const all = (selector) => [...document.querySelectorAll(selector)];
const numeral = (e) => Number(e.textContent.replaceAll(",", ""));

// Figures of the view whose link leads to another number of rows than they say.
async function wrongFigures(figures) {
  const wrong = [];
  for (const [text, href] of figures) {
    await go(href);
    if (found() !== Number(text.replaceAll(",", ""))) wrong.push([text, href, found()]);
  }
  return wrong;
}

// Every cell of the matrix, ops unfolded.
function cells() {
  all(".matrix button.op").forEach((b) => b.click());
  const heads = all(".matrix thead th").map((th) => th.textContent);
  let op = "";
  return all(".matrix tbody tr").flatMap((tr) => {
    const type = tr.classList.contains("type");
    if (!type) op = (tr.cells[0].querySelector(".op")?.childNodes[1] ?? tr.cells[0]).textContent.trim();
    return [...tr.cells].slice(1).map((td, k) => ({
      op,
      type: type ? tr.cells[0].textContent : null,
      backend: heads[k + 1],
      word: td.querySelector(".badge").textContent.slice(2),
      counts: [...td.querySelectorAll(".counts a")].map(numeral),
      links: [...td.querySelectorAll("a")].map((a) => a.getAttribute("href")),
    }));
  });
}

function choose(element, value) {
  element.value = value;
  element.dispatchEvent(new Event(element.tagName === "INPUT" ? "input" : "change"));
}

function chooser(name) {
  return all(".filters label").find((l) => l.querySelector("select") && l.firstChild.textContent === name).querySelector("select");
}

// Word -> the ways it looks: its sign, colour, ground and border.
function looks() {
  const seen = {};
  for (const e of all(".badge")) {
    const s = getComputedStyle(e);
    const look = JSON.stringify([e.textContent[0], s.color, s.backgroundColor, s.borderTopStyle]);
    (seen[e.textContent.slice(2)] ||= new Set()).add(look);
  }
  return Object.fromEntries(Object.entries(seen).map(([word, found]) => [word, [...found].map((l) => JSON.parse(l))]));
}

// Texts that stand out less than 4.5 to 1 from what is behind them.
function pale() {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const over = (top, under) => [0, 1, 2].map((k) => (top[k] * top[3] + under[k] * (255 - top[3])) / 255).concat(255);
  const behind = (e) => {
    const box = e.closest(".box")?.querySelector("rect");
    if (box) return rgba(getComputedStyle(box).fill);
    const layers = [];
    for (let p = e; p; p = p.parentElement) layers.push(rgba(getComputedStyle(p).backgroundColor));
    return layers.reverse().reduce((under, top) => over(top, under), [255, 255, 255, 255]);
  };
  const poor = new Set();
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const e = walk.currentNode.parentElement;
    const hidden = e.closest("script, style, title, option, .unseen, [disabled]") || !e.getClientRects().length;
    if (hidden || !walk.currentNode.textContent.trim()) continue;
    const style = getComputedStyle(e), under = behind(e);
    const text = over(rgba(e.namespaceURI.endsWith("svg") ? style.fill : style.color), under);
    const [a, b] = [light(text), light(under)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) poor.add([e.tagName, e.getAttribute("class"), text, under, ratio.toFixed(2)].join(" "));
  }
  return [...poor];
}

// Texts that are smaller than so many pixels on the screen; in an SVG, than `drawn`.
function small(least, drawn) {
  const texts = all("body *").filter((e) => !e.closest("script, style, title, option, .unseen") && e.getClientRects().length)
    .filter((e) => [...e.childNodes].some((c) => c.nodeType === Node.TEXT_NODE && c.textContent.trim()));
  const size = (e) => parseFloat(getComputedStyle(e).fontSize) * (e.getScreenCTM ? Math.hypot(e.getScreenCTM().a, e.getScreenCTM().b) : 1);
  return [...new Set(texts.filter((e) => size(e) < (e.getScreenCTM ? drawn : least)).map((e) => `${e.tagName} ${e.className.baseVal ?? e.className} ${size(e)}`))];
}

// What takes the focus and is no link, button, field or named region, or has no name, or has one without its own words;
// links in a text that only a colour tells; columns without a head.
function odd() {
  const known = "a[href], button, input, select, summary, main, .scroll[aria-label], code, pre";
  const named = (e) => e.ariaLabel || e.textContent.trim() || e.closest("label")?.textContent.trim();
  const words = (text) => text.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, " ").trim();
  const renamed = (e) => e.ariaLabel && e.matches("a, button") && !words(e.ariaLabel).includes(words(e.textContent));
  const hidden = (e) => !e.closest("td, th, nav, ul.others, .rows") && !e.querySelector(".badge, .name") && e.closest("p, li, dd, figcaption") && e.textContent.trim()
    && e.closest("p, li, dd, figcaption").textContent.trim() !== e.textContent.trim() && !getComputedStyle(e).textDecorationLine.includes("underline");
  return all("[tabindex], a, button, input, select, summary")
    .filter((e) => !e.matches(known) || !named(e) || renamed(e))
    .concat(all("main a[href]").filter((e) => e.namespaceURI.endsWith("xhtml") && hidden(e)), all("th[scope=col]").filter((e) => !e.textContent.trim()))
    .map((e) => e.outerHTML.slice(0, 120));
}

// Words that a line ends within, other than behind a separator or before a bracket.
function torn() {
  const found = new Set(), range = new Range();
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const top = (node, from, to) => {
    range.setStart(node, from);
    range.setEnd(node, to);
    return [...range.getClientRects()].map((r) => Math.round(r.top));
  };
  while (walk.nextNode()) {
    const node = walk.currentNode;
    if (node.parentElement.closest("script, style, svg, option, pre, .unseen") || !node.parentElement.getClientRects().length) continue;
    for (const word of node.textContent.matchAll(/\S+/g)) {
      const begin = word.index, end = begin + word[0].length;
      if (new Set(top(node, begin, end)).size < 2) continue;
      const at = [...word[0]].findIndex((_, k) => k && top(node, begin + k, begin + k + 1)[0] > top(node, begin + k - 1, begin + k)[0]);
      const [before, after] = [word[0].slice(0, at), word[0].slice(at)];
      if (at > 0 && (/\d[eE]-$/.test(before) || !/[-/,&?:…]$/.test(before)) && !/^[([]/.test(after)) found.add(`${before}|${after}`);
    }
  }
  return [...found];
}
