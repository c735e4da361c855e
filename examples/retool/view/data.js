// What the page knows: the index (columns of the table) at once, a sample's chunk when it is looked at.
//
// Text of a sample is data: it becomes text nodes, never markup. The page's policy forbids markup from strings as such.

const ROW = 30; // px, as --row
const MAX_CALLS_SHOWN = 4; // in the table
const MAX_CACHED_CHUNKS = 48;
const MAX_MATCHES = 2000; // marked in one sample
const HEAT = [0.9, 0.5, 0.2, 0.05, 0.01, 0.001]; // a token less likely than HEAT[n] is shaded by class h(n+1)
const LETTERS = {
  ok: "✓",
  error: "E",
  timeout: "T",
  memory: "M",
  too_long: "L",
  crashed: "C",
  refused: "R",
  invalid: "I",
  not_found: "N",
  unreadable: "U",
  other: "?",
};
const WORDS = {
  too_long: "printed too much",
  not_found: "no such tool",
  invalid: "unusable arguments",
  unreadable: "unreadable turn",
};

const $ = (id) => document.getElementById(id);
const index = JSON.parse($("index").textContent);
const rows = readRows(index);
const state = {
  sort: { key: "order", down: false },
  query: "",
  filters: {}, // name -> chosen value
  found: new Set(), // rows whose transcript holds the query
  searching: 0, // rows looked through so far; 0: no search is going on
  shown: [], // rows in the table, in its order
  chosen: null,
  tokens: false,
  group: false,
};

// --- small things ----------------------------------------------------------------------------------------------------
function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "on") for (const [event, handler] of Object.entries(value)) element.addEventListener(event, handler);
    else if (name === "class") element.className = value;
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

const svg = (tag, attributes, ...children) => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
};

const say = (number, digits = 2) =>
  number == null ? "–" : Number(number.toFixed(digits)).toString().replace("-", "−");
const percent = (share) => `${Math.round(100 * share)} %`;
const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);
const present = (values) => values.filter((value) => value != null);
const outcomeWords = (outcome) => WORDS[outcome] ?? outcome;
const seconds = (value) => (value == null ? "" : value < 0.1 ? `${say(value * 1000, 1)} ms` : `${say(value, 2)} s`);
const nextTask = () => new Promise((done) => setTimeout(done));

function readRows({ samples, files }) {
  const names = Object.keys(samples);
  const read = Array.from({ length: samples.file?.length ?? 0 }, (_, id) => {
    const row = Object.fromEntries(names.map((name) => [name, samples[name][id]]));
    row.id = id;
    row.preview = index.previews[row.prompt];
    row.rollout = files[row.file].number;
    row.errors = row.outcomes.filter((outcome) => outcome !== "ok").length;
    row.haystack = `${row.preview} ${row.label} ${row.prediction} ${row.end}`.toLowerCase();
    return row;
  });
  // A file may have them in the order in which they were finished.
  const inOrder = [...read].sort((a, b) => a.file - b.file || (a.index ?? a.id) - (b.index ?? b.id) || a.id - b.id);
  inOrder.forEach((row, order) => {
    row.order = order;
  });
  return read;
}

// --- chunks ----------------------------------------------------------------------------------------------------------
const whole = new Promise((done) => {
  if (document.readyState !== "loading") done();
  else document.addEventListener("DOMContentLoaded", done);
});
const chunks = new Map(); // least lately used first

async function inflate(id) {
  if (!$(id)) await whole; // the page is still being read
  const binary = atob($(id).textContent);
  const packed = new Uint8Array(binary.length);
  for (let at = 0; at < binary.length; at++) packed[at] = binary.charCodeAt(at);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  const view = new DataView(bytes.buffer);
  const read = (at) => new TextDecoder().decode(bytes.subarray(at + 4, at + 4 + view.getUint32(at, true)));
  const textAt = 4 + view.getUint32(0, true);
  return {
    header: JSON.parse(read(0)),
    text: read(textAt),
    rest: bytes.subarray(textAt + 4 + view.getUint32(textAt, true)),
  };
}

async function chunk(id) {
  const known = chunks.get(id) ?? unpack(await inflate(id));
  chunks.delete(id);
  chunks.set(id, known);
  if (chunks.size > MAX_CACHED_CHUNKS) chunks.delete(chunks.keys().next().value);
  return known;
}

function unpack({ header, text, rest }) {
  const count = header.tokens ?? 0;
  const lengths = new Uint32Array(count);
  let at = 0;
  for (let token = 0; token < count; token++) {
    let byte;
    do lengths[token] += byte = rest[at++];
    while (byte === 255);
  }
  return { ...header, text, lengths, logProbs: rest.subarray(at, at + count) };
}

const logProb = (byte) => (byte === 255 ? null : -((byte / index.scale) ** 3));
