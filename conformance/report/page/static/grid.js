// A table of rows with filters, search, order and pages.

const PAGE = 50;

// spec: { title, about, columns: [{ name, label, show(i), wide, number }], facets: [column, ...], first(i) }
function grid(table, spec) {
  return (root, params) => {
    const state = new URLSearchParams(params);
    const body = h("tbody");
    const heads = new Map();
    const found = h("p", { class: "found", role: "status" });
    const chips = h("div", { class: "chips" });
    const pager = h("div", { class: "pager" });
    const search = h("input", {
      type: "search", id: "search", placeholder: spec.hint || "words of any column", autocomplete: "off",
      value: state.get("q") || "",
      oninput: () => change({ q: search.value || null }),
    });
    const selects = spec.facets.filter((f) => (table.words(f) || []).length > 1).map((f) => facet(f));
    const head = h("tr", null, spec.columns.map((c) => header(c)));
    add(root,
      h("h2", null, spec.title),
      spec.about ? h("p", { class: "about" }, spec.about) : "",
      h("form", { class: "filters", role: "search", onsubmit: (e) => e.preventDefault() },
        h("label", { class: "search" }, h("span", null, "Search"), search),
        selects.map(({ label }) => label)),
      h("div", { class: "bar" }, found, chips),
      scroller(spec.title, h("table", { class: "rows" }, h("thead", null, head), body)),
      pager,
    );
    const settle = roving(body, "a.row");
    show();

    function facet(name) {
      const select = h("select", { onchange: () => change({ [name]: select.value || null }) },
        h("option", { value: "" }, "any"),
        (table.columns[name].state ? ranked(table.words(name)) : [...table.words(name)].sort()).map((w) => h("option", { value: w }, w || "(none)")));
      return { name, select, label: h("label", null, h("span", null, name.replaceAll("_", " ")), select) };
    }

    function header(c) {
      if (!table.columns[c.name] || table.columns[c.name].objects) return h("th", { scope: "col", class: c.wide && "wide" }, c.label);
      const button = h("button", {
        type: "button",
        onclick: () => change({ sort: (state.get("sort") || table.first) === c.name ? `-${c.name}` : c.name }),
      }, c.label);
      const th = h("th", { scope: "col", class: `${c.wide ? "wide" : ""} ${c.number ? "number" : ""}` }, button);
      heads.set(c.name, th);
      return th;
    }

    function change(what) {
      if (!("page" in what)) state.delete("page");
      for (const [key, value] of Object.entries(what)) {
        state.delete(key);
        if (value !== null) state.set(key, value);
      }
      remember(`#${table.name}?${state}`.replace(/\?$/, ""), "q" in what);
      show();
    }

    function show() {
      const rows = select(table, state);
      const pages = Math.max(1, Math.ceil(rows.length / PAGE));
      const at = Math.min(Math.max(1, Number(state.get("page")) || 1), pages);
      const from = (at - 1) * PAGE;
      body.replaceChildren(...rows.slice(from, from + PAGE).map(line));
      found.textContent = rows.length === table.count
        ? plural(rows.length, "row") : `${count(rows.length)} of ${plural(table.count, "row")}`;
      found.dataset.rows = rows.length;
      for (const { name, select } of selects) choose(select, state.getAll(name));
      chips.replaceChildren(...active());
      for (const [name, th] of heads) {
        const sort = state.get("sort") || table.first;
        th.setAttribute("aria-sort", sort === name ? "ascending" : sort === `-${name}` ? "descending" : "none");
      }
      pager.replaceChildren(
        h("button", { type: "button", disabled: at <= 1, onclick: () => change({ page: at - 1 }) }, "← Previous"),
        h("span", null, rows.length ? `${count(from + 1)}–${count(Math.min(from + PAGE, rows.length))} of ${count(rows.length)}` : "No row matches"),
        h("button", { type: "button", disabled: at >= pages, onclick: () => change({ page: at + 1 }) }, "Next →"),
      );
      settle();
    }

    function line(i) {
      return h("tr", null, spec.columns.map((c, k) => {
        const shown = c.show ? c.show(i) : text(c, i);
        const kinds = ["wide", "number", "main"].filter((kind) => c[kind]).join(" ");
        return h(k ? "td" : "th", { scope: k ? null : "row", class: kinds, "data-label": k && !c.main ? c.label : null }, shown);
      }));
    }

    function text(c, i) {
      const v = table.value(c.name, i);
      return c.number ? (c.unit || number)(v) : v === null ? "–" : breakable(String(v));
    }

    function choose(select, values) {
      select.querySelector("option.several")?.remove();
      if (values.length > 1 || (values.length && ![...select.options].some((o) => o.value === values[0]))) {
        select.append(h("option", { class: "several", value: "several", selected: true }, values.join(" or ")));
        select.value = "several";
      } else {
        select.value = values[0] || "";
      }
    }

    function active() {
      const keys = [...new Set(state.keys())].filter((k) => !CONTROL.has(k));
      return keys.map((k) => h("button", {
        type: "button", class: "chip", "aria-label": `Remove the filter on ${k}`,
        onclick: () => change({ [k]: null }),
      }, `${k.replaceAll("_", " ")}: ${state.getAll(k).map((v) => v || "(none)").join(" or ")}`, h("span", { "aria-hidden": "true" }, " ✕")));
    }
  };
}

function source(table) {
  return { name: "source", label: "row of the run", wide: true, show: (i) => h("span", { class: "source" }, breakable(sourceText(table, i))) };
}
