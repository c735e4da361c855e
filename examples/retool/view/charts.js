// Charts: over rollouts where there are several, else of the samples of the one.

const WIDTH = 200,
  HEIGHT = 66,
  LEFT = 30,
  BOTTOM = 14,
  TOP = 6;

function figure(title, value, ...drawing) {
  const caption = el("figcaption", {}, el("span", {}, title), el("b", {}, value));
  return el(
    "figure",
    {},
    caption,
    svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title}: ${value}` }, ...drawing),
  );
}

const label = (x, y, text, anchor = "start") =>
  svg("text", { x, y, "text-anchor": anchor }, document.createTextNode(text));
const hint = (text) => svg("title", {}, document.createTextNode(text));

function bars(title, value, entries, bad = () => false) {
  const most = Math.max(1, ...entries.map(([, count]) => count));
  const width = WIDTH / Math.max(entries.length, 4);
  const parts = [svg("line", { class: "axis", x1: 0, x2: WIDTH, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM })];
  entries.forEach(([name, count, about], at) => {
    const height = (count / most) * (HEIGHT - BOTTOM - TOP);
    parts.push(
      svg(
        "rect",
        {
          class: `bar-fill${bad(name) ? " bad" : ""}`,
          x: at * width + 1,
          width: width - 2,
          y: HEIGHT - BOTTOM - height,
          height: Math.max(height, count ? 1 : 0),
        },
        hint(about ?? `${name}: ${count}`),
      ),
    );
    if (entries.length <= 9)
      parts.push(
        label(at * width + width / 2, HEIGHT - 3, name.slice(0, Math.max(2, Math.floor(width / 5))), "middle"),
      );
  });
  if (entries.length > 9)
    parts.push(label(0, HEIGHT - 3, entries[0][0]), label(WIDTH, HEIGHT - 3, entries.at(-1)[0], "end"));
  return figure(title, value, ...parts);
}

function histogram(title, value, values, digits) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const bins = low === high ? 1 : 20;
  const counts = new Array(bins).fill(0);
  for (const one of values) counts[Math.min(bins - 1, Math.floor(((one - low) / (high - low || 1)) * bins))]++;
  const edge = (at) => say(low + ((high - low) * at) / bins, digits);
  return bars(
    title,
    value,
    counts.map((count, at) => [
      at === bins - 1 ? edge(bins) : edge(at),
      count,
      `${edge(at)} to ${edge(at + 1)}: ${plural(count, "sample")}`,
    ]),
  );
}

function lines(title, value, series, format, fromZero) {
  const points = series.flatMap((one) => one.points);
  const values = points.flatMap((point) => [point.y, point.low ?? point.y, point.high ?? point.y]);
  let [low, high] = [Math.min(...values), Math.max(...values)];
  if (fromZero) [low, high] = [Math.min(0, low), Math.max(0, high)];
  if (low === high) [low, high] = [low - (Math.abs(low) || 1) / 10, high + (Math.abs(high) || 1) / 10];
  const xs = points.map((point) => point.x);
  const [first, last] = [Math.min(...xs), Math.max(...xs)];
  const x = (point) => LEFT + ((point.x - first) / (last - first || 1)) * (WIDTH - LEFT - 4);
  const y = (value) => TOP + (1 - (value - low) / (high - low)) * (HEIGHT - BOTTOM - TOP);
  const parts = [
    svg("line", { class: "axis", x1: LEFT, x2: WIDTH, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM }),
    label(LEFT - 4, TOP + 4, format(high), "end"),
    label(LEFT - 4, HEIGHT - BOTTOM, format(low), "end"),
    label(LEFT, HEIGHT - 3, String(first)),
    label(WIDTH, HEIGHT - 3, `rollout ${last}`, "end"),
  ];
  for (const { name, points: own } of series) {
    if (own[0]?.low != null) {
      const upper = own.map((point) => `${x(point)},${y(point.high)}`);
      const lower = own.map((point) => `${x(point)},${y(point.low)}`).reverse();
      parts.push(svg("polygon", { class: "band", points: [...upper, ...lower].join(" ") }));
    }
    parts.push(
      svg("polyline", { class: `line ${name}`, points: own.map((point) => `${x(point)},${y(point.y)}`).join(" ") }),
    );
    if (own.length <= 60)
      parts.push(
        ...own.map((point) =>
          svg(
            "circle",
            { class: `dot ${name}`, cx: x(point), cy: y(point.y), r: 2.2 },
            hint(`${name} ${point.x}: ${format(point.y)}`),
          ),
        ),
      );
  }
  return figure(title, value, ...parts);
}

function drawCharts() {
  const kept = rows.filter((row) => !row.lost);
  const scores = present(kept.map((row) => row.score));
  const outcomes = rows.flatMap((row) => row.outcomes);
  const failed = (list) => list.filter((outcome) => outcome !== "ok").length / (list.length || 1);
  const lengths = rows.map((row) => row.tokens);
  const median = quantile(lengths, 0.5);
  if (several) {
    $("charts").append(
      overRollouts(
        "Reward",
        say(mean(scores)),
        (own) => mean(present(own.filter((row) => !row.lost).map((row) => row.score))),
        say,
      ),
      overRollouts(
        "Accuracy",
        percentOf(kept),
        (own) => mean(present(own.filter((row) => !row.lost).map((row) => row.right)).map(Number)),
        percent,
      ),
      overRollouts(
        "Calls a sample",
        say(mean(rows.map((row) => row.calls))),
        (own) => mean(own.map((row) => row.calls)),
        (value) => say(value, 1),
      ),
      overRollouts(
        "Tokens, median and p5 to p95",
        median.toLocaleString("en"),
        (own) =>
          quantile(
            own.map((row) => row.tokens),
            0.5,
          ),
        thousands,
        (own) =>
          [0.05, 0.95].map((share) =>
            quantile(
              own.map((row) => row.tokens),
              share,
            ),
          ),
      ),
      overRollouts(
        "Calls that failed",
        percent(failed(outcomes)),
        (own) => failed(own.flatMap((row) => row.outcomes)),
        percent,
      ),
    );
    return;
  }
  const most = Math.max(0, ...rows.map((row) => row.calls));
  const byCalls = Array.from({ length: Math.min(most, 8) + 1 }, (_, calls) =>
    rows.filter((row) => (calls === 8 ? row.calls >= 8 : row.calls === calls)),
  );
  const name = (calls) => (calls === 8 ? "8+" : String(calls));
  const kinds = Object.keys(LETTERS).filter((kind) => outcomes.includes(kind));
  $("charts").append(
    ...(scores.length ? [histogram("Reward", `mean ${say(mean(scores))}`, scores, 2)] : []),
    bars(
      "Accuracy by calls",
      percentOf(kept),
      byCalls.map((own, calls) => {
        const right = present(own.filter((row) => !row.lost).map((row) => row.right)).map(Number);
        return [
          name(calls),
          right.length ? mean(right) : 0,
          `${plural(calls, "call")}: ${right.length ? percent(mean(right)) : "–"} of ${plural(right.length, "sample")} right`,
        ];
      }),
    ),
    bars(
      "Samples by calls",
      `mean ${say(mean(rows.map((row) => row.calls)), 1)}`,
      byCalls.map((own, calls) => [
        name(calls),
        own.length,
        `${plural(calls, "call")}: ${plural(own.length, "sample")}`,
      ]),
    ),
    histogram("Tokens", `median ${median.toLocaleString("en")}`, lengths, 0),
    ...(kinds.length
      ? [
          bars(
            "Calls by outcome",
            `${percent(failed(outcomes))} failed`,
            kinds.map((kind) => [kind.replace("_", " "), outcomes.filter((one) => one === kind).length]),
            (kind) => kind !== "ok",
          ),
        ]
      : []),
  );
}

const percentOf = (kept) => {
  const right = present(kept.map((row) => row.right));
  return right.length ? percent(mean(right.map(Number))) : "–";
};
const thousands = (value) => (value >= 1000 ? `${say(value / 1000, 1)}k` : say(value, 0));

function quantile(values, share) {
  const ordered = [...values].sort((a, b) => a - b);
  return ordered[Math.max(0, Math.ceil(ordered.length * share) - 1)] ?? 0;
}

function overRollouts(title, value, of, format, band) {
  const series = [];
  for (const evaluation of [false, true]) {
    const points = [];
    index.files.forEach((file, at) => {
      if (file.evaluation !== evaluation) return;
      const own = rows.filter((row) => row.file === at);
      const y = own.length ? of(own) : null;
      if (y == null) return;
      const [low, high] = band && !evaluation ? band(own) : [];
      points.push({ x: file.number, y, low, high });
    });
    points.sort((a, b) => a.x - b.x);
    if (points.length) series.push({ name: evaluation ? "evaluation" : "training", points });
  }
  return series.length ? lines(title, value, series, format, title !== "Reward") : figure(title, "–");
}
