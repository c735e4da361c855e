// One sample or its group: facts, transcript, tokens.

// --- one sample ------------------------------------------------------------------------------------------------------
let drawing = 0; // number of the newest drawing of the detail; an older one stops

function choose(row, look = true) {
  if (!row) return;
  state.chosen = row;
  const at = state.shown.indexOf(row);
  const scroller = $("scroller");
  const head = $("heads").offsetHeight;
  if (at >= 0) {
    if (at * ROW < scroller.scrollTop) scroller.scrollTop = at * ROW;
    else if ((at + 1) * ROW + head > scroller.scrollTop + scroller.clientHeight)
      scroller.scrollTop = (at + 1) * ROW + head - scroller.clientHeight;
  }
  drawRows();
  if (look) document.body.classList.add("looking");
  drawDetail();
}

function step(by) {
  const at = state.shown.indexOf(state.chosen);
  choose(state.shown[at < 0 ? 0 : Math.min(state.shown.length - 1, Math.max(0, at + by))]);
}

async function drawDetail() {
  const mine = ++drawing;
  const row = state.chosen;
  if (groupOf(row).length < 2) state.group = false;
  const members = state.group ? groupOf(row) : [row];
  const prompt = await chunk(`p${row.prompt}`);
  const loaded = [];
  for (const member of members) loaded.push(await chunk(`s${member.id}`));
  if (mine !== drawing) return;
  const body = el("div", {
    class: `body ${state.group ? "group " : ""}${state.tokens ? "tokens" : "text"}`,
    tabindex: "0",
    role: "region",
    "aria-label": "Transcript",
  });
  body.append(promptBlock(prompt.text));
  if (state.group)
    body.append(el("div", { class: "columns" }, ...members.map((member, at) => column(member, loaded[at]))));
  else body.append(...transcript(row, loaded[0]));
  if (state.tokens) body.addEventListener("pointerover", readOut);
  const around = state.tokens
    ? [legend(), el("output", { id: "readout", class: "readout" }, "Point at a token for its log-prob.")]
    : [];
  document.body.classList.toggle("comparing", state.group);
  $("detail").replaceChildren(detailHeader(row), ...around.slice(0, 1), body, ...around.slice(1));
  const match = markMatches();
  if (match) match.startContainer.parentElement.scrollIntoView({ block: "center" });
  else if (state.group) body.scrollLeft = body.querySelector(".column.chosen").offsetLeft - body.offsetLeft - 40;
}

const groupOf = (row) =>
  row.group == null ? [row] : rows.filter((one) => one.file === row.file && one.group === row.group);

function detailHeader(row) {
  const size = groupOf(row).length;
  const title = el(
    "h2",
    {},
    `Sample ${row.index ?? row.id}`,
    el(
      "small",
      {},
      [
        row.group != null && `group ${row.group}`,
        several && `rollout ${row.rollout}`,
        index.files[row.file].evaluation && "evaluation",
      ]
        .filter(Boolean)
        .join(" · "),
    ),
  );
  const toggle = (label, key, on, off, enabled, why) =>
    el(
      "div",
      { class: "switch", role: "group", "aria-label": label, title: enabled ? null : why },
      ...[off, on].map((name, at) =>
        el(
          "button",
          {
            type: "button",
            disabled: !enabled && at === 1,
            "aria-pressed": String(state[key] === (at === 1)),
            on: { click: () => set(key, at === 1) },
          },
          name,
        ),
      ),
    );
  const back = el("button", { type: "button", class: "back", on: { click: leave } }, "‹ Table");
  const modes = el(
    "div",
    { class: "modes" },
    toggle(
      "One sample or its group",
      "group",
      `Group of ${size}`,
      "Sample",
      size > 1,
      "The sample is alone in its group",
    ),
    toggle(
      "Text or tokens",
      "tokens",
      "Tokens",
      "Text",
      index.tokenized,
      "Tokens need --tokenizer DIR when the page is made",
    ),
  );
  const header = el(
    "header",
    {},
    el("div", { class: "title" }, back, title, modes),
    state.group ? null : facts(row, true),
  );
  if (row.lost)
    header.append(
      el("p", { class: "banner" }, "Lost to an infrastructure error, aborted or removed: none of it is trained on."),
    );
  return header;
}

function facts(row, all) {
  const trained = row.observed == null ? null : row.tokens - row.observed;
  const list = [
    ["reward", el("span", {}, say(row.score, 3), " ", mark(row))],
    ["advantage", say(row.advantage)],
    all && ["label", row.label || "–"],
    ["answer", row.prediction || "–"],
    ["ended by", row.end.replaceAll("_", " ")],
    [
      "tokens",
      trained == null
        ? row.tokens.toLocaleString("en")
        : `${trained.toLocaleString("en")} + ${row.observed.toLocaleString("en")} masked`,
    ],
    ["calls", row.calls ? `${row.calls}${row.seconds ? ` in ${seconds(row.seconds)}` : ""}` : "none"],
    all && row.turns != null && ["turns", String(row.turns)],
    row.hallucinated ? ["hallucinated outputs", String(row.hallucinated)] : null,
  ];
  return el(
    "dl",
    { class: "facts" },
    ...list
      .filter(Boolean)
      .map(([name, value]) =>
        el("div", {}, el("dt", {}, name), el("dd", { title: typeof value === "string" ? value : null }, value)),
      ),
  );
}

function set(key, value) {
  if (key === "tokens" && !index.tokenized) return;
  if (!state.chosen || (key === "group" && groupOf(state.chosen).length < 2)) return;
  state[key] = value;
  const place = document.activeElement?.closest(".switch")?.getAttribute("aria-label");
  drawDetail().then(() => {
    if (place)
      [...document.querySelectorAll(".switch")]
        .find((one) => one.getAttribute("aria-label") === place)
        ?.querySelector('[aria-pressed="true"]')
        ?.focus();
  });
}

function leave() {
  document.body.classList.remove("looking");
  $("scroller").focus({ preventScroll: true });
}

function column(row, loaded) {
  const head = el(
    "button",
    {
      type: "button",
      on: {
        click: () => {
          state.group = false;
          choose(row);
        },
      },
    },
    `Sample ${row.index ?? row.id}`,
  );
  return el(
    "section",
    { class: `column${row === state.chosen ? " chosen" : ""}`, "aria-label": `Sample ${row.index ?? row.id}` },
    el("header", {}, head, facts(row, false)),
    ...transcript(row, loaded),
  );
}

// --- the transcript --------------------------------------------------------------------------------------------------
const TITLES = { model: "model", masked: "masked", observation: "output", hallucinated: "hallucinated output" };
const NOTES = { masked: "the model's, not trained on", hallucinated: "written by the model" };

function block(kind, title, content, note) {
  return el(
    "section",
    { class: `block ${kind}` },
    el("h3", {}, ...title, note ? el("span", { class: "note" }, note) : null),
    content,
  );
}

function promptBlock(text) {
  const messages = splitPrompt(text);
  const asked = messages.at(-1);
  const content = el("div", { class: "content" });
  if (messages.length > 1) {
    const before = messages
      .slice(0, -1)
      .map((message) => `${message.role}\n${message.text}`)
      .join("\n\n");
    const inside = el("div", { class: "content" }, ...visible(before));
    content.append(
      el(
        "details",
        {},
        el(
          "summary",
          {},
          `${plural(messages.length - 1, "message")} before it, ${before.length.toLocaleString("en")} characters`,
        ),
        inside,
      ),
    );
  }
  content.append(el("div", { class: "asked" }, ...visible(asked.text)));
  return block("prompt", ["prompt"], content);
}

/** The messages of a prompt in ChatML, the open assistant turn left out; the whole text as one if it is none. */
function splitPrompt(text) {
  const messages = text
    .split("<|im_start|>")
    .filter((part) => part.trim())
    .map((part) => {
      const end = part.indexOf("\n");
      return { role: part.slice(0, Math.max(0, end)), text: part.slice(end + 1).replace(/<\|im_end\|>\s*$/, "") };
    });
  if (!text.startsWith("<|im_start|>")) return [{ role: "user", text }];
  while (messages.length > 1 && messages.at(-1).role === "assistant" && !messages.at(-1).text.trim()) messages.pop();
  return messages.length ? messages : [{ role: "", text }];
}

function transcript(row, loaded) {
  const blocks = [];
  let at = 0;
  const tokens = state.tokens ? tokenReader(loaded) : null;
  for (const [kindAt, length, call] of loaded.segments) {
    const kind = index.kinds[kindAt];
    const text = loaded.text.slice(at, at + length);
    at += length;
    const content = el("div", { class: "content" });
    if (tokens) content.append(tokens(at));
    else if (kind === "observation" || kind === "hallucinated") content.append(...visible(unframed(text)));
    else content.append(...prose(text));
    const [title, note] = kind === "observation" ? callTitle(loaded.calls, call) : [[TITLES[kind]], NOTES[kind]];
    blocks.push(block(kind, title, content, note));
  }
  if (!blocks.length)
    blocks.push(block("model", ["model"], el("div", { class: "content faint" }, "An empty response.")));
  return row.lost ? [el("div", { class: "lost" }, ...blocks)] : blocks;
}

function callTitle(calls, call) {
  if (call == null) return [["reply ", square("unreadable")], "no action could be read"];
  const [, taken, outcome] = calls[call] ?? [null, null, null];
  if (!outcome) return [["output"], "of an unrecorded call"];
  return [
    [`output ${call + 1} `, square(outcome in LETTERS ? outcome : "other")],
    [outcomeWords(outcome), seconds(taken)].filter(Boolean).join(", "),
  ];
}

const FRAME_OPENS =
  /^(?:(?:<\|im_end\|>)?\n<\|im_start\|>user\n(?:<tool_response>\n|<interpreter>\n)?|\n\n<interpreter>\n)/;
const FRAME_CLOSES = [
  "\n</interpreter>\n\n",
  "<|im_end|>\n<|im_start|>assistant\n",
  "\n</tool_response>",
  "\n</interpreter>",
];

function unframed(text) {
  let inside = text.replace(FRAME_OPENS, "");
  for (const close of FRAME_CLOSES) if (inside.endsWith(close)) inside = inside.slice(0, -close.length);
  return inside;
}

const MAX_SOURCES = 500; // blocks of code told apart in one segment; a model that repeats itself writes many more
// Where code begins and what ends it; a call in JSON is shown as the code it holds.
const OPENERS = /<tool_call>|<code>|```(?:python|py)?\n/g;
const CLOSERS = { "<tool_call>": "</tool_call>", "<code>": "</code>" };

function prose(text) {
  const parts = [];
  const unclosed = new Set();
  let at = 0;
  OPENERS.lastIndex = 0;
  for (let opener; parts.length < 2 * MAX_SOURCES && (opener = OPENERS.exec(text));) {
    const close = CLOSERS[opener[0]] ?? "```";
    const from = opener.index + opener[0].length;
    const end = unclosed.has(close) ? -1 : text.indexOf(close, from);
    if (end < 0) {
      unclosed.add(close);
      continue;
    }
    parts.push(
      paragraph(text.slice(at, opener.index)),
      el("code", { class: "source" }, ...visible(source(opener[0], text.slice(from, end)))),
    );
    at = OPENERS.lastIndex = end + close.length;
  }
  parts.push(paragraph(text.slice(at)));
  return parts.filter(Boolean);
}

const paragraph = (text) => (text.trim() ? el("div", { class: "prose" }, ...visible(withoutBlankEnds(text))) : null);

function source(opener, inside) {
  if (opener === "<tool_call>") {
    try {
      const { name, arguments: given } = JSON.parse(inside);
      if (typeof given.code === "string" && Object.keys(given).length === 1) return given.code;
      return `${name} ${JSON.stringify(given, null, 2)}`;
    } catch {
      return inside.trim(); // as the model wrote it: the loop reads more than JSON
    }
  }
  const lines = withoutBlankEnds(inside.trimEnd()).split("\n");
  if (/^```(?:python|py)?$/.test(lines[0].trim())) lines.shift();
  if (lines.at(-1)?.trim() === "```") lines.pop();
  return lines.join("\n").trimEnd();
}

const MAX_UNSEEN = 240; // written out in a row
// Characters that are not seen, or that change the direction of others, are written out; chat tokens are set apart.
const UNSEEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff]+|(?:<\|[a-z_]{1,24}\|>)+/g;

function visible(text) {
  const parts = [];
  let at = 0;
  for (const { 0: found, index: where } of text.matchAll(UNSEEN)) {
    if (where > at) parts.push(text.slice(at, where));
    if (found.startsWith("<")) parts.push(el("span", { class: "special" }, brief(found, "")));
    else parts.push(el("span", { class: "control" }, brief([...found].map(symbol), " ")));
    at = where + found.length;
  }
  if (at < text.length) parts.push(text.slice(at));
  return parts;
}

/** A run of them, which may be as long as a whole response. */
function brief(run, between) {
  const more = run.length - MAX_UNSEEN;
  const shown = [...run.slice(0, MAX_UNSEEN)].join(between);
  return more > 0 ? `${shown} and ${more.toLocaleString("en")} characters more` : shown;
}

const codePoint = (char) => `U+${char.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
const symbol = (char) => (char < " " ? String.fromCharCode(0x2400 + char.charCodeAt(0)) : codePoint(char));

/** The text without newlines at its ends. A pattern for the end would be tried at every newline of the text. */
function withoutBlankEnds(text) {
  let [from, to] = [0, text.length];
  while (text[from] === "\n") from++;
  while (to > from && text[to - 1] === "\n") to--;
  return text.slice(from, to);
}

// --- tokens ----------------------------------------------------------------------------------------------------------
/** A function that gives the tokens up to a place in the text, from where it stopped before. */
function tokenReader({ text, lengths, logProbs, mask }) {
  let token = 0;
  let at = 0;
  let run = 0;
  let left = mask ? mask[0] : lengths.length;
  return (until) => {
    const parts = document.createDocumentFragment();
    while (token < lengths.length && (at < until || (lengths[token] === 0 && until === text.length))) {
      while (left === 0) left = mask[++run];
      const masked = run % 2 === 1;
      const piece = text.slice(at, at + lengths[token]);
      if (piece)
        parts.append(
          el(
            "span",
            {
              class: masked ? "t m" : `t${heat(logProbs[token])}`,
              "data-token": token,
              "data-p": masked ? "" : logProbs[token],
            },
            ...visible(piece.replaceAll("\n", "↵\n")),
          ),
        );
      at += lengths[token];
      token++;
      left--;
    }
    if (at < until && token >= lengths.length) {
      parts.append(...visible(text.slice(at, until)));
      at = until;
    }
    return parts;
  };
}

const LEVELS = Array.from({ length: 256 }, (_, byte) => {
  const value = logProb(byte);
  const level = value == null ? 0 : HEAT.filter((limit) => Math.exp(value) < limit).length;
  return level ? ` h${level}` : "";
});
const heat = (byte) => LEVELS[byte];

function legend() {
  const names = ["≥ 0.9", ...HEAT.map((limit) => `< ${limit}`)];
  const samples = names.map((name, level) => el("span", { class: level ? `t h${level}` : "t" }, name));
  return el(
    "div",
    { class: "legend" },
    el("span", {}, "probability"),
    ...samples,
    el("span", { class: "t m" }, "masked"),
  );
}

function readOut(event) {
  const token = event.target.closest(".t");
  if (!token) return;
  const { p } = token.dataset;
  const value = p === "" ? null : logProb(Number(p));
  const rough = (number) => Number(number.toPrecision(2)).toString().replaceAll("-", "−"); // as exact as a byte is
  const about =
    p === ""
      ? "masked, not trained on"
      : value == null
        ? "no log-prob"
        : Number(p) === 254
          ? "log-prob ≤ −24"
          : `log-prob ${rough(value)}, p ${rough(Math.exp(value))}`;
  $("readout").textContent =
    `${JSON.stringify(token.textContent.replaceAll("↵\n", "\n")).slice(0, 60)}  token ${token.dataset.token}: ${about}`;
}
