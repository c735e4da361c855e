// The keyboard, and the start.

// --- keyboard --------------------------------------------------------------------------------------------------------
const KEYS = {
  j: () => step(1),
  k: () => step(-1),
  t: () => set("tokens", !state.tokens),
  g: () => set("group", !state.group),
  c: () => {
    $("charts").hidden = !$("charts").hidden;
    drawRows();
  },
  "/": () => {
    document.body.classList.remove("looking");
    $("query").focus();
    $("query").select();
  },
  "?": () => $("keys").showModal(),
  Escape: escape,
};

function escape() {
  if (document.activeElement === $("query")) {
    if (!state.query) return $("query").blur();
    $("query").value = "";
    return searchFor("");
  }
  if (document.body.classList.contains("looking") && document.activeElement !== $("scroller")) return leave();
  if (state.query) {
    $("query").value = "";
    searchFor("");
  }
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || $("keys").open) return;
  const typing = event.target.closest("input, select, textarea");
  let key = event.key;
  if (event.target === $("scroller") || event.target === document.body)
    key = { ArrowDown: "j", ArrowUp: "k" }[key] ?? key;
  if (event.target === $("query") && key === "Enter") {
    event.preventDefault();
    $("scroller").focus();
    choose(state.shown[0]);
    return;
  }
  if (!Object.hasOwn(KEYS, key) || (typing && key !== "Escape")) return;
  event.preventDefault();
  KEYS[key]();
});

// --- start -----------------------------------------------------------------------------------------------------------
if (index.notes.length) {
  $("notes").append(...index.notes.map((note) => el("li", {}, ...visible(note))));
  $("notes").hidden = false;
}
drawFilters();
drawHeads();
drawCharts();
refresh();
$("query").addEventListener("input", () => searchFor($("query").value));
$("help").addEventListener("click", () => $("keys").showModal());
$("scroller").addEventListener("scroll", drawRows, { passive: true });
$("rows").addEventListener("click", (event) => {
  const line = event.target.closest("tr[data-row]");
  if (line) choose(rows[Number(line.dataset.row)]);
});
new ResizeObserver(drawRows).observe($("scroller"));
if (rows.length) choose(state.shown[0], false);
