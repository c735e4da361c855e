// Draws the page: the table and its filters, charts of what they leave, one sample or its group, links to each view.
//
// What a sample says was read in Python; here it becomes text nodes, never markup. The page's policy forbids
// markup from strings as such.

const ROW = 38; // px, as --row
const MAX_CALLS_SHOWN = 3; // in the table
const MAX_CACHED_CHUNKS = 48;
const MAX_MATCHES = 2000; // marked in one sample
const MAX_UNSEEN = 240; // unseen characters written out in a row
const HEAT = [0.9, 0.5, 0.2, 0.05, 0.01, 0.001]; // a token less likely than HEAT[n] is shaded by class h(n+1)
const LETTERS = {
  ok: "✓", error: "E", timeout: "T", memory: "M", too_long: "L", crashed: "C", refused: "R", invalid: "I",
  not_found: "N", syntax_error: "S", empty: "0", unreadable: "U", other: "?",
};
const WORDS = {
  too_long: "printed too much", not_found: "no such tool", invalid: "unusable arguments", empty: "nothing to run",
  syntax_error: "not Python", unreadable: "unreadable turn",
};

// --- small things ---------------------------------------------------------------------------------------------------
const $ = (id) => document.getElementById(id);
const index = JSON.parse($("index").textContent);
const several = index.files.length > 1;

function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "click") element.addEventListener("click", value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child != null && child !== false));
  return element;
}

function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const say = (value, digits = 2) =>
  value == null ? "–" : Number(value.toFixed(digits)).toString().replace("-", "−");
const count = (value) => value.toLocaleString("en");
const percent = (share) => (share == null ? "–" : `${Math.round(100 * share)} %`);
const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;
const sum = (values) => values.reduce((total, value) => total + Number(value), 0);
const mean = (values) => (values.length ? sum(values) / values.length : null);
const outcomeWords = (outcome) => WORDS[outcome] ?? outcome;
const words = (name) => name.replaceAll("_", " ");
const seconds = (value) => (value == null ? "" : value < 0.1 ? `${say(value * 1000, 1)} ms` : `${say(value)} s`);

// Of the samples that are trained on, as far as they have one.
const kept = (list, field) => list.filter((row) => !row.lost && row[field] != null).map((row) => row[field]);
const accuracy = (list) => mean(kept(list, "right"));
const outcomes = (list) => list.flatMap((row) => row.outcomes);
const failed = (list) => mean(outcomes(list).map((outcome) => outcome !== "ok"));
function quantile(list, share) {
  const ordered = list.map((row) => row.tokens).sort((a, b) => a - b);
  return ordered[Math.max(0, Math.ceil(ordered.length * share) - 1)] ?? 0;
}

// --- rows and chunks ------------------------------------------------------------------------------------------------
const groups = new Map();
const rows = readRows(Object.entries(index.samples));

function readRows(columns) {
  const read = Array.from({ length: columns[0]?.[1].length ?? 0 }, (_, id) => {
    const row = { id, ...Object.fromEntries(columns.map(([name, values]) => [name, values[id]])) };
    const file = index.files[row.file];
    const key = row.group == null ? `alone ${id}` : `${row.file} ${row.dataset} ${row.group}`;
    row.members = groups.get(key) ?? [];
    groups.set(key, row.members);
    row.members.push(row);
    row.problem = index.problems[row.prompt];
    row.rollout = `${file.evaluation ? "e" : ""}${file.number}`;
    row.haystack = `${row.problem} ${row.label} ${row.prediction} ${row.end}`.toLowerCase();
    return row;
  });
  for (const row of read) {
    row.pass = accuracy(row.members);
    row.mix = row.pass == null ? "" : row.pass === 1 ? "all right" : row.pass === 0 ? "all wrong" : "mixed";
  }
  // A file may have them in the order in which they were finished.
  const inOrder = [...read].sort((a, b) =>
    a.file - b.file || a.dataset.localeCompare(b.dataset) || (a.index ?? a.id) - (b.index ?? b.id) || a.id - b.id);
  inOrder.forEach((row, order) => (row.order = order));
  return read;
}

const whole = new Promise((done) => {
  if (document.readyState !== "loading") done();
  else document.addEventListener("DOMContentLoaded", done);
});
const chunks = new Map(); // least lately used first

async function inflate(id) {
  if (!$(id)) await whole; // the page is still being read
  const packed = Uint8Array.from(atob($(id).textContent), (char) => char.charCodeAt(0));
  return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate-raw"))).json();
}

async function chunk(id) {
  const known = chunks.get(id) ?? (await inflate(id));
  chunks.delete(id);
  chunks.set(id, known);
  if (chunks.size > MAX_CACHED_CHUNKS) chunks.delete(chunks.keys().next().value);
  return known;
}

// --- what is shown, and the link to it ------------------------------------------------------------------------------
const state = {
  sort: "order", down: false, query: "", filters: {}, // name -> chosen value
  chosen: null, tokens: false, group: false, math: typeof katex !== "undefined",
  shown: [], // rows in the table, in its order
  found: new Set(), // rows whose transcript holds the query
  searched: null, // rows looked through so far; null: no search is going on
};

function writeLink() {
  const link = new URLSearchParams(Object.entries(state.filters).filter(([, value]) => value));
  if (state.query) link.set("q", state.query);
  if (state.sort !== "order" || state.down) link.set("sort", (state.down ? "-" : "") + state.sort);
  for (const view of ["tokens", "group"]) if (state[view]) link.set(view, 1);
  if (state.chosen) link.set("sample", state.chosen.id);
  history.replaceState(null, "", `#${link}`);
}

function readLink() {
  const link = new URLSearchParams(location.hash.slice(1));
  const sort = link.get("sort") ?? "order";
  state.down = sort.startsWith("-");
  state.sort = COLUMNS.some((column) => column.key === sort.slice(state.down)) ? sort.slice(state.down) : "order";
  state.filters = { prompt: link.get("prompt") ?? "" };
  for (const [key, { values }] of Object.entries(FILTERS))
    state.filters[key] = values().find(([value]) => value === link.get(key))?.[0] ?? "";
  state.tokens = link.has("tokens") && index.tokenized;
  state.group = link.has("group");
  state.chosen = rows[Number(link.get("sample") ?? -1)] ?? null;
  $("query").value = link.get("q") ?? "";
  drawFilters();
  drawHeads();
  searchFor($("query").value);
  if (state.chosen ?? state.shown[0]) choose(state.chosen ?? state.shown[0], false);
}

// --- the table ------------------------------------------------------------------------------------------------------
const named = new Set(rows.map((row) => row.dataset)).size > 1;
const COLUMNS = [
  { key: "order", name: "#", width: 40, number: true,
    cell: (row) => el("button", { type: "button", tabindex: -1 }, String(row.index ?? row.id)) },
  { key: "problem", name: "problem",
    cell: (row) => el("span", { class: "problem", title: row.problem }, row.problem) },
  (several || named) && { key: "file", name: "rollout", width: named ? 92 : 52, number: true,
    cell: (row) => `${row.rollout} ${row.dataset}` },
  { key: "group", name: "group", width: 52, number: true, wide: true, cell: (row) => row.group ?? "–" },
  { key: "pass", name: "pass", width: 42, number: true, title: "share of right answers in the group",
    cell: (row) => `${kept(row.members, "right").filter(Boolean).length}/${row.members.length}` },
  { key: "score", name: "reward", width: 58, number: true, cell: (row) => say(row.score) },
  { key: "right", name: "right", width: 42, cell: mark },
  { key: "advantage", name: "adv.", width: 56, number: true, wide: true, title: `advantage (${words(index.rule)})`,
    cell: (row) => say(row.advantage) },
  { key: "calls", name: "calls", width: 78, cell: callsCell },
  { key: "end", name: "ended by", width: 72, wide: true, cell: (row) => words(row.end) },
  { key: "tokens", name: "tokens", width: 58, number: true, wide: true, cell: (row) => count(row.tokens) },
].filter(Boolean);

function mark(row) {
  if (row.lost) return el("span", { class: "faint", title: "lost: not trained on" }, "lost");
  if (row.right == null) return el("span", { class: "faint" }, "–");
  const [kind, sign] = row.right ? ["right", "✓"] : ["wrong", "✗"];
  return el("span", { class: kind }, sign, el("span", { class: "hidden" }, kind));
}

const square = (outcome) =>
  el("span", { class: `call ${outcome}`, title: outcomeWords(outcome) }, LETTERS[outcome] ?? "?");

function callsCell(row) {
  const more = row.outcomes.length - MAX_CALLS_SHOWN;
  const all = row.outcomes.map(outcomeWords).join(", ") || "no calls";
  const squares = row.outcomes.slice(0, MAX_CALLS_SHOWN).map(square);
  return el("span", { class: "calls", "aria-label": all, role: "img" }, ...squares,
    more > 0 && el("span", { class: "more" }, `+${more}`));
}

function drawHeads() {
  $("heads").replaceChildren(...COLUMNS.map((column) => {
    const order = state.sort === column.key && (state.down ? "descending" : "ascending");
    const head = el("th", { scope: "col", class: classOf(column), "aria-sort": order },
      el("button", { type: "button", title: column.title, click: () => sortBy(column) }, column.name));
    if (column.width) head.style.width = `${column.width}px`;
    return head;
  }));
}

const classOf = ({ number, wide }) => `${number ? "number" : ""} ${wide ? "wide" : ""}`;

function sortBy({ key }) {
  state.down = state.sort === key && !state.down;
  state.sort = key;
  drawHeads();
  refresh();
  $("heads").children[COLUMNS.findIndex((column) => column.key === key)].firstChild.focus();
}

function compare(a, b) {
  const [x, y] = [a[state.sort], b[state.sort]];
  if (x === y) return a.order - b.order;
  if (x == null || x === "") return 1;
  if (y == null || y === "") return -1;
  const order = typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y;
  return (state.down ? -order : order) || a.order - b.order;
}

let version = 0; // of what the table shows
let drawn = { lines: new Map() }; // what of it is in the document

function drawRows() {
  const scroller = $("scroller");
  const top = Math.floor(scroller.scrollTop / ROW);
  const bottom = Math.min(state.shown.length, top + Math.ceil(scroller.clientHeight / ROW) + 1);
  const same = drawn.version === version;
  if (same && drawn.chosen === state.chosen && drawn.first <= top && bottom <= drawn.last) return;
  const [first, last] = [Math.max(0, top - 15), Math.min(state.shown.length, bottom + 15)];
  const lines = new Map();
  for (let at = first; at < last; at++) lines.set(at, (same && drawn.lines.get(at)) || drawRow(state.shown[at], at));
  for (const [at, line] of lines) line.setAttribute("aria-selected", String(state.shown[at] === state.chosen));
  const nothing = el("tr", {}, el("td", { class: "empty", colspan: COLUMNS.length }, "No sample matches."));
  $("rows").replaceChildren(pad(first), ...(lines.size ? lines.values() : [nothing]), pad(state.shown.length - last));
  drawn = { version, chosen: state.chosen, first, last, lines };
}

function pad(number) {
  const cell = el("td");
  cell.style.height = `${number * ROW}px`;
  return el("tr", { class: "pad", "aria-hidden": "true" }, cell);
}

function drawRow(row, at) {
  const again = state.shown[at - 1]?.prompt === row.prompt; // the problem is that of the line above
  const cells = COLUMNS.map((column) => el("td", { class: classOf(column) }, column.cell(row)));
  const kind = `${row.lost ? "lost" : ""} ${again ? "again" : ""}`;
  return el("tr", { "aria-rowindex": at + 2, class: kind, "data-row": row.id }, ...cells);
}

function refresh() {
  state.shown = rows.filter(passes).sort(compare);
  version++;
  document.querySelector("table").setAttribute("aria-rowcount", state.shown.length + 1);
  const all = plural(rows.length, "sample");
  const { shown } = state;
  $("summary").replaceChildren(el("b", {}, shown.length === rows.length ? all : `${count(shown.length)} of ${all}`), [
    accuracy(shown) != null && ` · accuracy ${percent(accuracy(shown))}`,
    kept(shown, "score").length && ` · reward ${say(mean(kept(shown, "score")))}`,
    shown.length && ` · ${say(mean(shown.map((row) => row.calls)), 1)} calls a sample`,
    state.searched != null && ` · searching transcripts, ${percent(state.searched / rows.length)}`,
  ].filter(Boolean).join(""));
  drawRows();
  drawCharts(shown);
  writeLink();
}

// --- filters and search ---------------------------------------------------------------------------------------------
const distinct = (values) => [...new Set(values)].sort();
const FILTERS = {
  rollout: { name: "Rollout", test: (row, value) => row.file === Number(value),
    values: () => several ? index.files.map((file, at) =>
      [String(at), `${file.evaluation ? "eval " : ""}${file.number}: ${file.name}`]) : [] },
  dataset: { name: "Dataset", test: (row, value) => row.dataset === value,
    values: () => named ? distinct(rows.map((row) => row.dataset)).map((name) => [name, name || "–"]) : [] },
  result: { name: "Result", values: () => ["right", "wrong", "lost"].map((name) => [name, name]),
    test: (row, value) => (value === "lost" ? row.lost : !row.lost && row.right === (value === "right")) },
  mix: { name: "Group", test: (row, value) => row.mix === value,
    values: () => ["mixed", "all right", "all wrong"].map((name) => [name, name]) },
  end: { name: "Ended by", test: (row, value) => row.end === value,
    values: () => distinct(rows.map((row) => row.end)).map((end) => [end, words(end)]) },
  outcome: { name: "Call",
    test: (row, value) => (value === "none" ? !row.outcomes.length : row.outcomes.includes(value)),
    values: () => [["none", "no call"], ...distinct(outcomes(rows)).map((name) => [name, outcomeWords(name)])] },
  prompt: { name: "Problem", test: (row, value) => row.prompt === Number(value),
    values: () => state.filters.prompt ? [[state.filters.prompt, "this one"]] : [] }, // chosen in a sample
};

function drawFilters() {
  const labels = Object.entries(FILTERS).map(([key, { name, values }]) => {
    const known = values();
    if (!known.length) return null;
    const options = [["", "all"], ...known].map(([value, text]) => el("option", { value }, text));
    const select = el("select", { class: state.filters[key] ? "set" : "" }, ...options);
    select.value = state.filters[key];
    select.addEventListener("change", () => filterBy(key, select.value));
    return el("label", {}, name, select);
  });
  $("filters").replaceChildren(...labels.filter(Boolean));
}

function filterBy(key, value) {
  state.filters[key] = value;
  drawFilters();
  $("scroller").scrollTop = 0;
  refresh();
}

function passes(row) {
  for (const [key, value] of Object.entries(state.filters)) if (value && !FILTERS[key].test(row, value)) return false;
  return !state.query || row.haystack.includes(state.query) || state.found.has(row.id);
}

let search = 0; // number of the newest search; an older one stops
const queryPattern = () => new RegExp(state.query.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), "giu");

async function searchFor(text) {
  const mine = ++search;
  const typeset = state.math && !state.query;
  Object.assign(state, { query: text.trim().toLowerCase(), found: new Set(), searched: null });
  refresh();
  if (state.chosen && typeset !== (state.math && !state.query)) drawDetail();
  else markMatches();
  if (!state.query) return;
  await new Promise((done) => setTimeout(done, 250)); // while more is typed
  const pattern = queryPattern();
  let shownAt = performance.now();
  for (const row of rows) {
    if (mine !== search) return;
    const sample = chunks.get(`s${row.id}`) ?? (await inflate(`s${row.id}`));
    pattern.lastIndex = 0;
    if (pattern.test(sample.text)) state.found.add(row.id);
    state.searched = row.id + 1;
    if (performance.now() - shownAt > 120) {
      if (mine === search) refresh();
      await new Promise((done) => setTimeout(done));
      shownAt = performance.now();
    }
  }
  if (mine !== search) return;
  state.searched = null;
  refresh();
}

let matches = []; // ranges in what is shown of the chosen sample
let match = 0;

/** Mark the query, over the borders of tokens; gives whether it is there. */
function markMatches() {
  matches = [];
  match = 0;
  CSS.highlights?.delete("search");
  const body = document.querySelector(".body");
  if (!state.query || !body || !CSS.highlights) return false;
  const walker = document.createTreeWalker(body, NodeFilter.SHOW_TEXT);
  const [nodes, starts] = [[], []];
  let [text, node] = ["", 0];
  while (walker.nextNode()) {
    nodes.push(walker.currentNode);
    starts.push(text.length);
    text += walker.currentNode.data;
  }
  const place = (range, side, at, last) => {
    while (node + 1 < nodes.length && starts[node + 1] <= at - last) node++; // an end lies after its last character
    range[side](nodes[node], at - starts[node]);
  };
  for (const found of text.matchAll(queryPattern())) {
    const range = new Range();
    place(range, "setStart", found.index, 0);
    place(range, "setEnd", found.index + found[0].length, 1);
    if (matches.push(range) >= MAX_MATCHES) break;
  }
  if (matches.length) CSS.highlights.set("search", new Highlight(...matches));
  return matches.length > 0;
}

const showMatch = () => matches[match].startContainer.parentElement.scrollIntoView({ block: "center" });

/** The next match in the sample, or in the sample after it. */
function nextMatch(by) {
  match += by;
  if (matches[match]) showMatch();
  else if (state.query) step(by);
}

// --- charts: over rollouts where several are shown, else of the samples of the one ----------------------------------
const [WIDTH, HEIGHT, LEFT, BOTTOM, TOP] = [200, 66, 30, 14, 6];
const label = (x, y, text, anchor = "start") => svg("text", { x, y, "text-anchor": anchor }, text);
const axis = (x1) => svg("line", { class: "axis", x1, x2: WIDTH, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM });

function figure(title, value, ...drawing) {
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title}: ${value}` });
  picture.append(...drawing);
  return el("figure", {}, el("figcaption", { title }, el("span", {}, title), el("b", {}, value)), picture);
}

/** Entries are [name, height, about it, whether it is bad]. */
function bars(title, value, entries) {
  const most = Math.max(...entries.map((entry) => entry[1])) || 1;
  const width = WIDTH / Math.max(entries.length, 4);
  const room = Math.max(2, Math.floor(width / 5.5)); // characters
  const parts = entries.flatMap(([name, size, about, bad], at) => {
    const height = Math.max((size / most) * (HEIGHT - BOTTOM - TOP), size ? 1 : 0);
    const box = { x: at * width + 1, width: width - 2, y: HEIGHT - BOTTOM - height, height };
    const bar = svg("rect", { class: `bar-fill${bad ? " bad" : ""}`, ...box }, svg("title", {}, about));
    const short = name.length > room ? `${name.slice(0, room - 1)}…` : name;
    return entries.length > 9 ? [bar] : [bar, label(at * width + width / 2, HEIGHT - 3, short, "middle")];
  });
  if (entries.length > 9)
    parts.push(label(0, HEIGHT - 3, entries[0][0]), label(WIDTH, HEIGHT - 3, entries.at(-1)[0], "end"));
  return figure(title, value, axis(0), ...parts);
}

function histogram(title, value, values, digits) {
  const low = values.reduce((a, b) => Math.min(a, b));
  const high = values.reduce((a, b) => Math.max(a, b));
  const counts = new Array(low === high ? 1 : 20).fill(0);
  const bins = counts.length;
  for (const one of values) counts[Math.min(bins - 1, Math.floor(((one - low) / (high - low || 1)) * bins))]++;
  const edge = (at) => say(low + ((high - low) * at) / bins, digits);
  return bars(title, value, counts.map((number, at) =>
    [edge(at === bins - 1 ? bins : at), number, `${edge(at)} to ${edge(at + 1)}: ${plural(number, "sample")}`]));
}

/** `of` gives a value for the samples of a rollout, `band` the two ends of a band around it. */
function overRollouts(shown, title, value, of, format, band) {
  const points = [...new Set(shown.map((row) => row.file))].map((at) => {
    const own = shown.filter((row) => row.file === at);
    const { number, evaluation } = index.files[at];
    return { x: number, y: of(own), ends: band && !evaluation ? band(own) : [], evaluation };
  }).filter((point) => point.y != null).sort((a, b) => a.x - b.x);
  if (!points.length) return figure(title, "–");
  const values = points.flatMap((point) => [point.y, ...point.ends]);
  if (title !== "Reward") values.push(0);
  let [low, high] = [Math.min(...values), Math.max(...values)];
  if (low === high) [low, high] = [low - (Math.abs(low) || 1) / 10, high + (Math.abs(high) || 1) / 10];
  const [first, last] = [points[0].x, points.at(-1).x];
  const x = (point) => LEFT + ((point.x - first) / (last - first || 1)) * (WIDTH - LEFT - 4);
  const y = (one) => TOP + (1 - (one - low) / (high - low)) * (HEIGHT - BOTTOM - TOP);
  const parts = [axis(LEFT), label(LEFT - 4, TOP + 4, format(high), "end"),
    label(LEFT - 4, HEIGHT - BOTTOM, format(low), "end"), label(LEFT, HEIGHT - 3, String(first)),
    label(WIDTH, HEIGHT - 3, `rollout ${last}`, "end")];
  for (const name of ["training", "evaluation"]) {
    const own = points.filter((point) => point.evaluation === (name === "evaluation"));
    const line = (list, at) => list.map((point) => `${x(point)},${y(at(point))}`);
    const ends = own.filter((point) => point.ends.length);
    const around = [...line(ends, (point) => point.ends[1]), ...line(ends, (point) => point.ends[0]).reverse()];
    parts.push(svg("polygon", { class: "band", points: around.join(" ") }),
      svg("polyline", { class: `line ${name}`, points: line(own, (point) => point.y).join(" ") }));
    for (const point of own.length <= 60 ? own : [])
      parts.push(svg("circle", { class: `dot ${name}`, cx: x(point), cy: y(point.y), r: 2.2 },
        svg("title", {}, `${name} ${point.x}: ${format(point.y)}`)));
  }
  return figure(title, value, ...parts);
}

const thousands = (value) => (value >= 1000 ? `${say(value / 1000, 1)}k` : say(value, 0));

function drawCharts(shown) {
  const scores = kept(shown, "score");
  const calls = mean(shown.map((row) => row.calls));
  const median = count(quantile(shown, 0.5));
  if (!shown.length) return $("charts").replaceChildren();
  if (new Set(shown.map((row) => row.file)).size > 1) {
    const chart = (...chosen) => overRollouts(shown, ...chosen);
    return $("charts").replaceChildren(
      chart("Reward", say(mean(scores)), (own) => mean(kept(own, "score")), say),
      chart("Accuracy", percent(accuracy(shown)), accuracy, percent),
      chart("Calls a sample", say(calls), (own) => mean(own.map((row) => row.calls)), (value) => say(value, 1)),
      chart("Tokens, median and p5 to p95", median, (own) => quantile(own, 0.5), thousands,
        (own) => [quantile(own, 0.05), quantile(own, 0.95)]),
      chart("Calls that failed", percent(failed(shown)), failed, percent),
    );
  }
  const most = shown.reduce((highest, row) => Math.max(highest, row.calls), 0);
  const byCalls = (of) => Array.from({ length: Math.min(most, 8) + 1 }, (_, calls) => {
    const own = shown.filter((row) => Math.min(row.calls, 8) === calls);
    return [calls === 8 ? "8+" : String(calls), ...of(own, plural(calls, "call"))];
  });
  const right = (own, name) => {
    const judged = plural(kept(own, "right").length, "sample");
    return [accuracy(own) ?? 0, `${name}: ${percent(accuracy(own))} of ${judged} right`];
  };
  const all = outcomes(shown);
  const kinds = Object.keys(LETTERS).map((kind) => [kind, all.filter((one) => one === kind).length])
    .filter(([, number]) => number);
  $("charts").replaceChildren(...[
    scores.length && histogram("Reward", `mean ${say(mean(scores))}`, scores, 2),
    bars("Accuracy by calls", percent(accuracy(shown)), byCalls(right)),
    bars("Samples by calls", `mean ${say(calls, 1)}`,
      byCalls((own, name) => [own.length, `${name}: ${plural(own.length, "sample")}`])),
    histogram("Tokens", `median ${median}`, shown.map((row) => row.tokens), 0),
    all.length && bars("Calls by outcome", `${percent(failed(shown))} failed`,
      kinds.map(([kind, number]) =>
        [kinds.length > 4 ? LETTERS[kind] : words(kind), number, `${words(kind)}: ${number}`, kind !== "ok"])),
  ].filter(Boolean));
}

// --- one sample, or its group ---------------------------------------------------------------------------------------
let drawing = 0; // number of the newest drawing of the detail; an older one stops

function choose(row, look = true) {
  if (!row) return;
  state.chosen = row;
  const [at, scroller, head] = [state.shown.indexOf(row), $("scroller"), $("heads").offsetHeight];
  if (at >= 0) {
    const hidden = (at + 1) * ROW + head - scroller.clientHeight;
    scroller.scrollTop = Math.max(hidden, Math.min(at * ROW, scroller.scrollTop));
  }
  drawRows();
  if (look) document.body.classList.add("looking");
  return drawDetail();
}

function step(by) {
  const at = state.shown.indexOf(state.chosen);
  return choose(state.shown[at < 0 ? 0 : Math.min(state.shown.length - 1, Math.max(0, at + by))]);
}

async function drawDetail() {
  const mine = ++drawing;
  const row = state.chosen;
  if (row.members.length < 2) state.group = false;
  writeLink();
  const members = state.group ? row.members : [row];
  const prompt = await chunk(`p${row.prompt}`);
  const loaded = [];
  for (const member of members) loaded.push(await chunk(`s${member.id}`));
  if (mine !== drawing) return;
  const kind = `body ${state.group ? "group " : ""}${state.tokens ? "tokens" : "text"}`;
  const body = el("div", { class: kind, tabindex: "0", role: "region", "aria-label": "Transcript" });
  body.append(promptBlock(prompt.messages));
  if (state.group) body.append(el("div", { class: "columns" }, ...members.map((one, at) => column(one, loaded[at]))));
  else body.append(...transcript(row, loaded[0]));
  body.addEventListener("pointerover", readOut);
  const hint = "Point at a token for its log-prob.";
  const readout = state.tokens && el("output", { id: "readout", class: "readout" }, hint);
  document.body.classList.toggle("comparing", state.group);
  $("detail").replaceChildren(...[detailHeader(row), state.tokens && legend(), body, readout].filter(Boolean));
  if (markMatches()) showMatch();
  else if (state.group) body.scrollLeft = body.querySelector(".column.chosen").offsetLeft - body.offsetLeft - 40;
}

function detailHeader(row) {
  const toggle = (name, key, on, off, why) => el("div",
    { class: "switch", role: "group", "aria-label": name, title: why },
    ...[off, on].map((text, at) => el("button", { type: "button", disabled: Boolean(why) && at === 1,
      "aria-pressed": String(state[key] === (at === 1)), click: () => set(key, at === 1) }, text)));
  const file = index.files[row.file];
  const place = [row.dataset, row.group != null && `group ${row.group}`, several && `rollout ${file.number}`,
    file.evaluation && "evaluation"].filter(Boolean).join(" · ");
  const same = rows.filter((one) => one.prompt === row.prompt);
  const rollouts = new Set(same.map((one) => one.file)).size;
  const modes = el("div", { class: "modes" },
    rollouts > 1 && el("button", { type: "button", title: "All samples of this problem, in the table and the charts",
      click: () => filterBy("prompt", String(row.prompt)) }, `In ${plural(rollouts, "rollout")}`),
    el("button", { type: "button", id: "copy", title: "Copy prompt and response as text (y)", click: copy }, "Copy"),
    toggle("One sample or its group", "group", `Group of ${row.members.length}`, "Sample",
      row.members.length < 2 && "The sample is alone in its group"),
    toggle("Formulas as written or drawn", "math", "Math", "TeX",
      typeof katex === "undefined" && "Formulas are drawn if KaTeX is there when the page is made: see --help"),
    toggle("Text or tokens", "tokens", "Tokens", "Text",
      !index.tokenized && "Tokens need --tokenizer DIR when the page is made"));
  return el("header", {},
    el("div", { class: "title" }, el("button", { type: "button", class: "back", click: leave }, "‹ Table"),
      el("h2", {}, `Sample ${row.index ?? row.id}`, el("small", {}, place)), modes),
    !state.group && facts(row, true),
    row.lost && el("p", { class: "banner" },
      "Lost to an infrastructure error, aborted or removed: none of it is trained on."));
}

function facts(row, all) {
  const masked = row.observed == null ? "" : ` + ${count(row.observed)} masked`;
  const list = [
    ["reward", el("span", {}, say(row.score, 3), " ", mark(row))],
    ["advantage", say(row.advantage)],
    all && ["label", row.label || "–"],
    ["answer", row.prediction || "–"],
    ["ended by", words(row.end)],
    ["tokens", count(row.tokens - (row.observed ?? 0)) + masked],
    ["calls", row.calls ? `${row.calls}${row.seconds ? ` in ${seconds(row.seconds)}` : ""}` : "none"],
    all && row.turns != null && ["turns", String(row.turns)],
    row.hallucinated > 0 && ["hallucinated outputs", String(row.hallucinated)],
  ];
  return el("dl", { class: "facts" }, ...list.filter(Boolean).map(([name, value]) =>
    el("div", {}, el("dt", {}, name), el("dd", { title: typeof value === "string" ? value : null }, value))));
}

async function set(key, value) {
  if (!state.chosen) return;
  const group = state.chosen.members.length > 1;
  const possible = { tokens: index.tokenized, math: typeof katex !== "undefined", group };
  if (!possible[key]) return;
  state[key] = value;
  const place = document.activeElement?.closest(".switch")?.getAttribute("aria-label");
  await drawDetail();
  if (place) document.querySelector(`.switch[aria-label="${place}"] [aria-pressed="true"]`)?.focus();
}

async function copy() {
  const { chosen } = state;
  const [prompt, sample] = [await chunk(`p${chosen.prompt}`), await chunk(`s${chosen.id}`)];
  const done = navigator.clipboard.writeText(prompt.text + sample.text);
  $("copy").textContent = await done.then(() => "Copied", () => "Not allowed");
}

function leave() {
  document.body.classList.remove("looking");
  $("scroller").focus({ preventScroll: true });
}

function column(row, loaded) {
  const name = `Sample ${row.index ?? row.id}`;
  const alone = () => {
    state.group = false;
    choose(row);
  };
  return el("section", { class: `column${row === state.chosen ? " chosen" : ""}`, "aria-label": name },
    el("header", {}, el("button", { type: "button", click: alone }, name), facts(row, false)),
    ...transcript(row, loaded));
}

// --- the transcript -------------------------------------------------------------------------------------------------
const TITLES = { model: "model", masked: "masked", hallucinated: "hallucinated output" };
const NOTES = { masked: "the model's, not trained on", hallucinated: "written by the model" };

const block = (kind, title, content, note) => el("section", { class: `block ${kind}` },
  el("h3", {}, ...title, note && el("span", { class: "note" }, note)), content);

function promptBlock(messages) {
  const before = messages.slice(0, -1).map(([role, text]) => `${role}\n${text}`).join("\n\n");
  const summary = `${plural(messages.length - 1, "message")} before it, ${count(before.length)} characters`;
  return block("prompt", ["prompt"], el("div", { class: "content" },
    before && el("details", {}, el("summary", {}, summary), el("div", { class: "content" }, ...visible(before))),
    prose(messages.at(-1)[1], "asked")));
}

function transcript(row, loaded) {
  const tokens = state.tokens && tokenReader(loaded);
  let at = 0;
  const blocks = loaded.segments.map(([kindAt, length, call, parts]) => {
    const kind = index.kinds[kindAt];
    at += length;
    const content = el("div", { class: "content" });
    if (tokens) content.append(tokens(at, kind));
    else if (kind === "observation" || kind === "hallucinated") content.append(...visible(parts[0][1]));
    else content.append(...parts.map(([part, text]) => (part === "prose" ? prose(text) : program(part, text))));
    const [title, note] = kind === "observation" ? callTitle(loaded.calls, call) : [[TITLES[kind]], NOTES[kind]];
    return block(kind, title, content, note);
  });
  if (!blocks.length) blocks.push(block("model", ["model"], el("div", { class: "content" }, "An empty response.")));
  return row.lost ? [el("div", { class: "lost" }, ...blocks)] : blocks;
}

function callTitle(calls, call) {
  if (call == null) return [["reply ", square("unreadable")], "no action could be read"];
  const [, taken, outcome] = calls[call] ?? [];
  if (!outcome) return [["output"], "of an unrecorded call"];
  const title = [`output ${call + 1} `, square(outcome in LETTERS ? outcome : "other")];
  return [title, [outcomeWords(outcome), seconds(taken)].filter(Boolean).join(", ")];
}

const idle = { class: "source idle", title: "The loop did not run this" };
const program = (part, text) => el("code", part === "ran" ? { class: "source" } : idle, ...visible(text));

// Formulas. Each opener is closed within a bounded stretch, so that a hostile text is not read more than a few times.
const MATH = new RegExp([
  /\$\$([^$]{1,2000})\$\$/, /\\\[((?:(?!\\[[\]])[^]){1,2000})\\\]/, // of their own line
  /\\\(((?:(?!\\[()])[^]){1,1000})\\\)/, /\$(?![\s$])([^$\n]{0,400}[^$\s\\])\$(?!\d)/,
  /(\\boxed\s?\{(?:[^{}\n]|\{(?:[^{}\n]|\{[^{}\n]{0,200}\}){0,200}\}){0,400}\})/,
].map((form) => form.source).join("|"), "g");
const REFUSED = "#e0e0e1"; // how KaTeX marks a command that it will not follow: links, pictures, attributes
const written = new WeakMap(); // the text of paragraphs
const drawLater = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (!isIntersecting) continue;
    drawLater.unobserve(target);
    target.replaceChildren(...formulas(written.get(target)));
  }
});

/** A paragraph; its formulas are drawn when it comes into view. While there is a search they stay as they were
    written, so that what is found can be marked. */
function prose(text, kind = "prose") {
  let [from, to] = [0, text.length];
  while (text[from] === "\n") from++; // a pattern for the end would be tried at every newline of the text
  while (to > from && text[to - 1] === "\n") to--;
  const said = text.slice(from, to);
  if (!said.trim()) return "";
  const paragraph = el("div", { class: kind }, ...visible(said));
  if (state.math && !state.query && !state.tokens && said.search(MATH) >= 0) {
    written.set(paragraph, said);
    drawLater.observe(paragraph);
  }
  return paragraph;
}

function formulas(text) {
  const parts = [];
  let at = 0;
  for (const found of text.matchAll(MATH)) {
    const [apart, bracketed, ...others] = found.slice(1);
    const formula = el("span", { class: "math", title: found[0] });
    try {
      katex.render(apart ?? bracketed ?? others.find((tex) => tex != null), formula, {
        displayMode: (apart ?? bracketed) != null, output: "mathml", throwOnError: true, trust: false, strict: true,
        maxSize: 20, maxExpand: 200, errorColor: REFUSED,
      });
      if (formula.querySelector(`[mathcolor="${REFUSED}"]`)) throw new Error("a command that wants trust");
      for (const letters of formula.querySelectorAll("[mathvariant=double-struck]"))
        letters.textContent = letters.textContent.replace(/[A-Z]/g, doubleStruck);
    } catch {
      formula.replaceChildren(...visible(found[0]));
    }
    parts.push(...visible(text.slice(at, found.index)), formula);
    at = found.index + found[0].length;
  }
  return [...parts, ...visible(text.slice(at))];
}

// Browsers know no variant of letters but "normal".
const doubleStruck = (letter) => ({ C: "ℂ", H: "ℍ", N: "ℕ", P: "ℙ", Q: "ℚ", R: "ℝ", Z: "ℤ" })[letter] ??
  String.fromCodePoint(0x1d538 + letter.charCodeAt(0) - 65);

// Characters that are not seen, or that change the direction of others, are written out; chat tokens are set apart.
const UNSEEN = new RegExp([
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff]+/.source,
  /(?:<\|[a-z_]{1,24}\|>)+/.source,
].join("|"), "g");
const codePoint = (char) => `U+${char.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
const symbol = (char) => (char < " " ? String.fromCharCode(0x2400 + char.charCodeAt(0)) : codePoint(char));

function visible(text) {
  const parts = [];
  let at = 0;
  for (const { 0: run, index: where } of text.matchAll(UNSEEN)) {
    if (where > at) parts.push(text.slice(at, where));
    const start = run.slice(0, MAX_UNSEEN); // the run may be as long as a whole response
    const more = run.length > MAX_UNSEEN ? ` and ${count(run.length - MAX_UNSEEN)} characters more` : "";
    if (run.startsWith("<")) parts.push(el("span", { class: "special" }, start + more));
    else parts.push(el("span", { class: "control" }, [...start].map(symbol).join(" ") + more));
    at = where + run.length;
  }
  if (at < text.length) parts.push(text.slice(at));
  return parts;
}

// --- tokens ---------------------------------------------------------------------------------------------------------
/** A function that gives the tokens up to a place in the text, from where it stopped before. */
function tokenReader({ text, lengths, logProbs }) {
  const chars = [...text];
  let [token, at] = [0, 0];
  return (until, kind) => {
    const parts = document.createDocumentFragment();
    const masked = kind === "masked" || kind === "observation";
    while (token < lengths.length && (at < until || (lengths[token] === 0 && until === chars.length))) {
      const piece = chars.slice(at, at + lengths[token]).join("").replaceAll("\n", "↵\n");
      const p = masked ? "" : (logProbs[token] ?? "none");
      if (piece)
        parts.append(el("span", { class: masked ? "t m" : `t${heat(p)}`, "data-token": token, "data-p": p },
          ...visible(piece)));
      at += lengths[token++];
    }
    if (at < until) parts.append(...visible(chars.slice(at, until).join(""))); // text that no token stands for
    at = Math.max(at, until);
    return parts;
  };
}

function heat(hundredths) {
  const level = HEAT.filter((limit) => Math.exp(hundredths / 100) < limit).length; // none for "none"
  return level ? ` h${level}` : "";
}

function legend() {
  const names = ["≥ 0.9", ...HEAT.map((limit) => `< ${limit}`)];
  return el("div", { class: "legend" }, el("span", {}, "probability"),
    ...names.map((name, level) => el("span", { class: level ? `t h${level}` : "t" }, name)),
    el("span", { class: "t m" }, "masked"));
}

function readOut(event) {
  const token = event.target.closest(".t[data-token]");
  if (!token) return;
  const { p } = token.dataset;
  const value = Number(p) / 100;
  const about = p === "" ? "masked, not trained on" : p === "none" ? "no log-prob"
    : `log-prob ${say(value)}, p ${Number(Math.exp(value).toPrecision(2))}`;
  const text = JSON.stringify(token.textContent.replaceAll("↵\n", "\n")).slice(0, 60);
  $("readout").textContent = `${text}  token ${token.dataset.token}: ${about}`;
}

// --- keyboard, and the start ----------------------------------------------------------------------------------------
const KEYS = {
  j: () => step(1),
  k: () => step(-1),
  n: () => nextMatch(1),
  N: () => nextMatch(-1),
  t: () => set("tokens", !state.tokens),
  g: () => set("group", !state.group),
  m: () => set("math", !state.math),
  y: copy,
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
  Escape: () => {
    const searching = document.activeElement === $("query");
    const looking = document.body.classList.contains("looking") && document.activeElement !== $("scroller");
    if (searching && !state.query) $("query").blur();
    else if (!searching && looking) leave();
    else if (state.query) searchFor(($("query").value = ""));
  },
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || $("keys").open) return;
  const typing = event.target.closest("input, select, textarea");
  const arrows = event.target === $("scroller") || event.target === document.body;
  const key = (arrows && { ArrowDown: "j", ArrowUp: "k" }[event.key]) || event.key;
  if (event.target === $("query") && key === "Enter") {
    event.preventDefault();
    $("scroller").focus();
    choose(state.shown[0]);
  } else if (Object.hasOwn(KEYS, key) && (!typing || key === "Escape")) {
    event.preventDefault();
    KEYS[key]();
  }
});

$("notes").append(...index.notes.map((note) => el("li", {}, ...visible(note))));
$("notes").hidden = !index.notes.length;
$("query").addEventListener("input", () => searchFor($("query").value));
$("help").addEventListener("click", () => $("keys").showModal());
$("scroller").addEventListener("scroll", drawRows, { passive: true });
$("rows").addEventListener("click", (event) => {
  const line = event.target.closest("tr[data-row]");
  if (line) choose(rows[Number(line.dataset.row)]);
});
new ResizeObserver(drawRows).observe($("scroller"));
addEventListener("hashchange", readLink);
readLink();
