// The table of samples, what it is filtered by, and the search.

// --- the table -------------------------------------------------------------------------------------------------------
const several = index.files.length > 1;
const COLUMNS = [
  {
    key: "order",
    name: "#",
    class: "number w-index",
    cell: (row) => el("button", { type: "button", tabindex: -1 }, String(row.index ?? row.id)),
  },
  { key: "preview", name: "problem", class: "w-problem", cell: (row) => row.preview },
  several && {
    key: "rollout",
    name: "rollout",
    class: "number w-file",
    cell: (row) => `${index.files[row.file].evaluation ? "e" : ""}${row.rollout}`,
  },
  { key: "group", name: "group", class: "number w-group", cell: (row) => row.group ?? "–" },
  { key: "score", name: "reward", class: "number w-score", cell: (row) => say(row.score) },
  { key: "right", name: "right", class: "w-right", cell: (row) => mark(row) },
  {
    key: "advantage",
    name: "adv.",
    title: "advantage in the group",
    class: "number w-advantage",
    cell: (row) => say(row.advantage),
  },
  { key: "calls", name: "calls", class: "w-calls", cell: callsCell },
  { key: "end", name: "ended by", class: "w-end", cell: (row) => row.end.replaceAll("_", " ") },
  { key: "tokens", name: "tokens", class: "number w-tokens", cell: (row) => row.tokens.toLocaleString("en") },
].filter(Boolean);

function mark(row) {
  if (row.lost) return el("span", { class: "faint", title: "lost: not trained on" }, "lost");
  if (row.right == null) return el("span", { class: "faint" }, "–");
  return el(
    "span",
    { class: row.right ? "right" : "wrong" },
    row.right ? "✓" : "✗",
    el("span", { class: "hidden" }, row.right ? "right" : "wrong"),
  );
}

const square = (outcome) =>
  el("span", { class: `call ${outcome}`, title: outcomeWords(outcome) }, LETTERS[outcome] ?? "?");

function callsCell(row) {
  const more = row.outcomes.length - MAX_CALLS_SHOWN;
  const cell = el("span", {
    class: "calls",
    "aria-label": row.outcomes.map(outcomeWords).join(", ") || "no calls",
    role: "img",
  });
  cell.append(...row.outcomes.slice(0, MAX_CALLS_SHOWN).map(square));
  if (more > 0) cell.append(el("span", { class: "more" }, `+${more}`));
  return cell;
}

function drawHeads() {
  const heads = COLUMNS.map((column) => {
    const sorted = state.sort.key === column.key;
    const button = el(
      "button",
      { type: "button", title: column.title, on: { click: () => sortBy(column.key) } },
      column.name,
    );
    return el(
      "th",
      { scope: "col", class: column.class, "aria-sort": sorted && (state.sort.down ? "descending" : "ascending") },
      button,
    );
  });
  $("heads").replaceChildren(...heads);
}

function sortBy(key) {
  const { sort } = state;
  state.sort = { key, down: sort.key === key && !sort.down };
  drawHeads();
  refresh();
  const column = COLUMNS.findIndex((one) => one.key === key);
  $("heads").children[column].firstChild.focus();
}

function compare(a, b) {
  const { key, down } = state.sort;
  const [x, y] = [a[key], b[key]];
  if (x === y) return a.order - b.order;
  if (x == null || x === "") return 1;
  if (y == null || y === "") return -1;
  const order = typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y;
  return (down ? -order : order) || a.order - b.order;
}

let drawn = { version: -1, first: 0, last: 0, lines: new Map() }; // what of the table is in the document

function drawRows() {
  const scroller = $("scroller");
  const top = Math.floor(scroller.scrollTop / ROW);
  const bottom = Math.min(state.shown.length, top + Math.ceil(scroller.clientHeight / ROW) + 1);
  const same = drawn.version === version;
  if (same && drawn.chosen === state.chosen && drawn.first <= top && bottom <= drawn.last) return;
  const first = Math.max(0, top - 15);
  const last = Math.min(state.shown.length, bottom + 15);
  const lines = new Map();
  for (let at = first; at < last; at++) lines.set(at, (same && drawn.lines.get(at)) || drawRow(state.shown[at], at));
  for (const [at, line] of lines) line.setAttribute("aria-selected", String(state.shown[at] === state.chosen));
  const nothing = el("tr", {}, el("td", { class: "empty", colspan: COLUMNS.length }, "No sample matches."));
  $("rows").replaceChildren(pad(first), ...(lines.size ? lines.values() : [nothing]), pad(state.shown.length - last));
  drawn = { version, chosen: state.chosen, first, last, lines };
}

function pad(count) {
  const cell = el("td");
  cell.style.height = `${count * ROW}px`;
  return el("tr", { class: "pad", "aria-hidden": "true" }, cell);
}

function drawRow(row, at) {
  const cells = COLUMNS.map((column) => el("td", { class: column.class }, column.cell(row)));
  return el("tr", { "aria-rowindex": at + 2, class: row.lost ? "lost" : "", "data-row": row.id }, ...cells);
}

let version = 0; // of what the table shows

function refresh() {
  state.shown = rows.filter(passes).sort(compare);
  version++;
  document.querySelector("table").setAttribute("aria-rowcount", state.shown.length + 1);
  const scored = present(state.shown.filter((row) => !row.lost).map((row) => row.score));
  const right = present(state.shown.filter((row) => !row.lost).map((row) => row.right));
  const calls = state.shown.map((row) => row.calls);
  const parts = [
    el(
      "b",
      {},
      state.shown.length === rows.length
        ? plural(rows.length, "sample")
        : `${state.shown.length.toLocaleString("en")} of ${plural(rows.length, "sample")}`,
    ),
  ];
  if (right.length) parts.push(` · accuracy ${percent(mean(right.map(Number)))}`);
  if (scored.length) parts.push(` · reward ${say(mean(scored))}`);
  if (calls.length) parts.push(` · ${say(mean(calls), 1)} calls a sample`);
  if (state.searching) parts.push(` · searching transcripts, ${percent(state.searching / rows.length)}`);
  $("summary").replaceChildren(...parts);
  drawRows();
}

// --- filters and search ----------------------------------------------------------------------------------------------
const FILTERS = {
  rollout: {
    name: "Rollout",
    values: () =>
      several
        ? index.files.map((file, at) => [String(at), `${file.evaluation ? "eval " : ""}${file.number}: ${file.name}`])
        : [],
    test: (row, value) => row.file === Number(value),
  },
  result: {
    name: "Result",
    values: () => [
      ["right", "right"],
      ["wrong", "wrong"],
      ["lost", "lost"],
    ],
    test: (row, value) => (value === "lost" ? row.lost : !row.lost && row.right === (value === "right")),
  },
  end: {
    name: "Ended by",
    values: () => [...new Set(rows.map((row) => row.end))].sort().map((end) => [end, end.replaceAll("_", " ")]),
    test: (row, value) => row.end === value,
  },
  outcome: {
    name: "Call",
    values: () => [
      ["none", "no call"],
      ...[...new Set(rows.flatMap((row) => row.outcomes))].sort().map((outcome) => [outcome, outcomeWords(outcome)]),
    ],
    test: (row, value) => (value === "none" ? row.outcomes.length === 0 : row.outcomes.includes(value)),
  },
};

function drawFilters() {
  for (const [key, { name, values }] of Object.entries(FILTERS)) {
    const options = values();
    if (!options.length) continue;
    const select = el(
      "select",
      {},
      el("option", { value: "" }, "all"),
      ...options.map(([value, text]) => el("option", { value }, text)),
    );
    select.addEventListener("change", () => {
      state.filters[key] = select.value;
      select.classList.toggle("set", select.value !== "");
      refresh();
    });
    $("filters").append(el("label", {}, name, select));
  }
}

function passes(row) {
  for (const [key, value] of Object.entries(state.filters)) if (value && !FILTERS[key].test(row, value)) return false;
  return !state.query || row.haystack.includes(state.query) || state.found.has(row.id);
}

let search = 0; // number of the newest search; an older one stops

async function searchFor(text) {
  const mine = ++search;
  state.query = text.trim().toLowerCase();
  state.found = new Set();
  state.searching = 0;
  refresh();
  markMatches();
  if (!state.query) return;
  await new Promise((done) => setTimeout(done, 250)); // while more is typed
  const pattern = queryPattern();
  let shownAt = performance.now();
  for (const row of rows) {
    if (mine !== search) return;
    const { text: transcript } = chunks.get(`s${row.id}`) ?? (await inflate(`s${row.id}`));
    pattern.lastIndex = 0;
    if (pattern.test(transcript)) state.found.add(row.id);
    state.searching = row.id + 1;
    if (performance.now() - shownAt > 120) {
      if (mine === search) refresh();
      await nextTask();
      shownAt = performance.now();
    }
  }
  if (mine !== search) return;
  state.searching = 0;
  refresh();
}

const queryPattern = () => new RegExp(state.query.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), "giu");

/** Mark the query in what is shown of the chosen sample, over the borders of tokens; gives the first match. */
function markMatches() {
  if (!("highlights" in CSS)) return null;
  CSS.highlights.delete("search");
  const body = document.querySelector(".body");
  if (!state.query || !body) return null;
  const walker = document.createTreeWalker(body, NodeFilter.SHOW_TEXT);
  const nodes = [];
  const starts = [];
  let text = "";
  while (walker.nextNode()) {
    nodes.push(walker.currentNode);
    starts.push(text.length);
    text += walker.currentNode.data;
  }
  const ranges = [];
  let node = 0;
  const place = (range, side, at, last) => {
    while (node + 1 < nodes.length && starts[node + 1] <= at - (last ? 1 : 0)) node++; // an end lies after its last character
    range[side](nodes[node], at - starts[node]);
  };
  for (const match of text.matchAll(queryPattern())) {
    const range = new Range();
    place(range, "setStart", match.index, false);
    place(range, "setEnd", match.index + match[0].length, true);
    if (ranges.push(range) >= MAX_MATCHES) break;
  }
  if (ranges.length) CSS.highlights.set("search", new Highlight(...ranges));
  return ranges[0] ?? null;
}
