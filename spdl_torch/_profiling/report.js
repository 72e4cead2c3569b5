"use strict";

const { stats, scalings, headroom, bottleneck, lanes } = JSON.parse(
  document.getElementById("data").textContent,
);
const { stages, loop } = stats;
const main = document.querySelector("main");
const tip = document.getElementById("tip");

const unit = (stage) => (["collate", "transfer"].includes(stage.name) ? "batch" : "sample");
const ratio = (part, whole) => (whole > 0 ? part / whole : 0);
const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

// ---- Text

function number(value) {
  const decimals = value >= 99.95 || value === 0 ? 0 : value >= 9.995 ? 1 : 2;
  return value.toLocaleString("en", {
    minimumFractionDigits: decimals,
    maximumFractionDigits: decimals,
  });
}

// Where there is no room for more than six characters.
function short(value) {
  if (value >= 999500) return `${number(value / 1e6)} M`;
  return value >= 9999.5 ? `${number(value / 1e3)} k` : number(value);
}

function duration(seconds) {
  if (seconds === 0) return "0 s";
  if (seconds >= 0.9995) return `${number(seconds)} s`;
  if (seconds >= 0.9995e-3) return `${number(1e3 * seconds)} ms`;
  return `${number(1e6 * seconds)} µs`;
}

function size(bytes) {
  const units = ["bytes", "kB", "MB", "GB", "TB"];
  while (bytes >= 999.5 && units.length > 1) {
    bytes /= 1000;
    units.shift();
  }
  return `${units[0] === "bytes" ? Math.round(bytes) : number(bytes)} ${units[0]}`;
}

const percent = (share) => `${Math.round(100 * share)}\u00a0%`;
const plural = (noun) => noun + (noun.endsWith("ch") ? "es" : "s");
const count = (amount, noun) =>
  `${amount.toLocaleString("en")} ${amount === 1 ? noun : plural(noun)}`;

// Times of an axis: in the largest unit that does not need more than three decimals.
function tickText(seconds, step, most) {
  const [factor, unit] =
    most >= 1 && step >= 0.99e-3
      ? [1, "s"]
      : most >= 1e-3 && step >= 0.99e-6
        ? [1e3, "ms"]
        : [1e6, "µs"];
  const decimals = clamp(Math.ceil(-Math.log10(step * factor) - 1e-9), 0, 3);
  const digits = { minimumFractionDigits: decimals, maximumFractionDigits: decimals };
  return `${(seconds * factor).toLocaleString("en", digits)} ${unit}`;
}

// ---- Elements

function put(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "colour") node.style.setProperty("--colour", `var(--${value}, var(--none))`);
    else if (value !== null && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

const html = (tag, attributes = {}, ...children) =>
  put(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) =>
  put(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

function section(title, note, ...children) {
  main.append(
    html("section", {}, html("h2", {}, title), html("p", { class: "note" }, note), ...children),
  );
}

function label(text, detail, colour) {
  const swatch = colour ? html("span", { class: "swatch", colour }) : null;
  return html("div", { class: "label" }, html("span", {}, swatch, text), html("small", {}, detail));
}

function legend(...entries) {
  const items = entries.map(([kind, text, colour = "step"]) =>
    html("li", {}, html("i", { class: kind, colour }), text),
  );
  return html("ul", { class: "legend" }, ...items);
}

// Charts are drawn to the pixel, again whenever they get another width.
const drawings = [];

function plot(className, draw) {
  const node = html("div", { class: `plot ${className}` });
  drawings.push(() => draw(node, Math.floor(node.clientWidth)));
  return node;
}

const draw = () => drawings.forEach((drawing) => drawing());

// ---- The verdict

const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

function drawVerdict() {
  const { kind, sentence, advice } = stats.verdict;
  document.title = `spdl_torch profile: ${kind}`;
  const hasKind = sentence.startsWith(`${kind}: `);
  const rest = sentence.slice(kind.length + 2);
  const figures = {
    "batches per second": number(ratio(loop.num_batches, stats.elapsed_seconds)),
    "the loop waited": percent(loop.waited_share),
    "first batch after": duration(loop.first_wait_seconds),
    "cores at work": stages.length
      ? `${number(ratio(sum(stages.map((stage) => stage.cpu_seconds)), stats.elapsed_seconds))} of ${stats.num_cores}`
      : null,
    data: stats.num_bytes ? `${size(ratio(stats.num_bytes, stats.elapsed_seconds))}/s` : null,
    "bad samples": stats.num_bad_samples ? stats.num_bad_samples.toLocaleString("en") : null,
  };
  const known = Object.entries(figures).filter(([, text]) => text !== null);
  main.append(
    html(
      "header",
      {},
      html(
        "p",
        { class: "source" },
        `spdl_torch profile · ${count(loop.num_batches, "batch")} in ${duration(stats.elapsed_seconds)}`,
      ),
      html(
        "h1",
        {},
        hasKind ? html("span", { class: "kind" }, kind) : null,
        hasKind ? capital(rest) : sentence,
      ),
      html("p", { class: "advice" }, advice),
      html(
        "dl",
        { class: "key-figures" },
        ...known.map(([name, text]) => html("div", {}, html("dt", {}, name), html("dd", {}, text))),
      ),
    ),
  );
}

// ---- The pipeline

function box(name, title, lines, { colour = "none", share = null } = {}) {
  const isBottleneck = name === bottleneck;
  const fill = html("span", { class: "fill" });
  fill.style.width = `${100 * clamp(share ?? 0, 0, 1)}%`;
  const [first, big, ...rest] = lines;
  return html(
    "li",
    {},
    html(
      "div",
      { class: `box${isBottleneck ? " bottleneck" : ""}`, "data-name": name, colour },
      html("span", { class: "gauge" }, share === null ? null : fill),
      isBottleneck ? html("span", { class: "badge" }, "▼ bottleneck") : null,
      html("b", {}, title),
      html("span", {}, first),
      big ? html("span", { class: "big" }, big) : null,
      ...rest.map((text) => html("span", {}, text)),
    ),
  );
}

function workers(stage) {
  if (stage.name === "collate") return "by the workers before it";
  return stage.width === null ? "workers of an executor" : count(stage.width, "worker");
}

function stageBox(stage) {
  const share = stage.width === null ? null : stage.utilisation;
  const busy = `${number(stage.num_busy)} busy`;
  return box(
    stage.name,
    stage.name,
    [
      workers(stage),
      html(
        "span",
        {},
        number(stage.samples_per_second),
        html("small", {}, ` ${plural(unit(stage))}/s`),
      ),
      share === null ? busy : `${busy} · ${percent(share)}`,
    ],
    { colour: stage.name, share },
  );
}

function unmeasuredBox() {
  const who = { caller: "in the loop's own thread", multiprocessing: "in worker processes" };
  return box("workers", "dataset", [
    who[stats.kind] ?? "not measured",
    "",
    "not split into stages",
  ]);
}

function drawPipeline() {
  const busyShare = loop.num_batches ? 1 - loop.waited_share : null;
  const loopBox = box(
    "loop",
    "training loop",
    [
      `step ${duration(ratio(loop.step_seconds, loop.num_batches))}`,
      html(
        "span",
        {},
        number(ratio(loop.num_batches, stats.elapsed_seconds)),
        html("small", {}, " batches/s"),
      ),
      busyShare === null ? "no batch yet" : `computes ${percent(busyShare)}`,
    ],
    { colour: "step", share: busyShare },
  );
  const boxes = stages.length ? stages.map(stageBox) : [unmeasuredBox()];
  const isBottleneck = bottleneck === "window";
  section(
    "The pipeline",
    "What each stage gets done. The fill is the share of its workers that is busy.",
    html("ol", { class: "pipeline" }, box("sampler", "sampler", ["indices"]), ...boxes, loopBox),
    html(
      "p",
      { class: `window${isBottleneck ? " bottleneck" : ""}`, "data-name": "window" },
      isBottleneck ? html("span", { class: "badge" }, "▼ bottleneck") : null,
      `Window: at most ${count(stats.window, "batch")} in flight, ` +
        `${stats.num_ready} ready for the loop at the end.`,
    ),
  );
}

// ---- Where the time went

function split(parts, colour) {
  const whole = sum(parts.map(([, , seconds]) => seconds));
  const bars = parts.map(([kind, name, seconds]) => {
    const bar = html("div", {
      class: `part-${kind}`,
      title: `${name}: ${percent(ratio(seconds, whole))}`,
    });
    bar.style.width = `${100 * ratio(seconds, whole)}%`;
    return bar;
  });
  const text = parts
    .map(([, name, seconds]) => `${name} ${percent(ratio(seconds, whole))}`)
    .join(", ");
  return html(
    "div",
    { class: "plot" },
    html("div", { class: "split", role: "img", "aria-label": text, colour }, ...bars),
  );
}

function stageSplit(stage) {
  const { busy_seconds: busy, starved_seconds: starved, blocked_seconds: blocked } = stage;
  const onCore = Math.min(stage.cpu_seconds, busy);
  const queued = Math.min(stage.queued_seconds, busy - onCore);
  const known = busy + starved + blocked;
  const whole = stage.width === null ? known : stage.width * stage.elapsed_seconds;
  const shares = [
    `busy ${percent(ratio(busy, whole))}`,
    starved > 0.005 * whole ? `starved ${percent(ratio(starved, whole))}` : null,
    blocked > 0.005 * whole ? `blocked ${percent(ratio(blocked, whole))}` : null,
  ];
  return [
    label(stage.name, shares.filter(Boolean).join(", "), stage.name),
    split(
      [
        ["core", "on a core", onCore],
        ["queued", "queued for a core", queued],
        ["off-core", "waiting for I/O or a lock", busy - onCore - queued],
        ["starved", "starved", starved],
        ["blocked", "blocked", blocked],
        ["rest", "other", Math.max(whole - known, 0)],
      ],
      stage.name,
    ),
  ];
}

function loopSplit() {
  const parts = [
    ["core", "step", loop.step_seconds],
    ["waited", "waited", Math.max(loop.waited_seconds - loop.first_wait_seconds, 0)],
    ["first", "first batch", loop.first_wait_seconds],
  ];
  const whole = sum(parts.map(([, , seconds]) => seconds));
  const shares = parts.map(([, name, seconds]) => `${name} ${percent(ratio(seconds, whole))}`);
  return [label("training loop", shares.join(", "), "step"), split(parts, "step")];
}

function headroomRows() {
  const { batches_per_second: now, free_batches_per_second: free } = headroom;
  const most = Math.max(now, free);
  const bar = (rate) => {
    const node = html("div", { class: "part-core" });
    node.style.width = `${100 * ratio(rate, most)}%`;
    return html("div", { class: "plot" }, html("div", { class: "split", colour: "step" }, node));
  };
  return [
    label("as it is", `${number(now)} batches/s`),
    bar(now),
    label("without loading", `${number(free)} batches/s`),
    bar(free),
  ];
}

const STAGE_PARTS = [
  ["part-core", "on a core"],
  ["part-queued", "queued for a core"],
  ["part-off-core", "waiting for I/O or a lock"],
  ["part-starved", "starved"],
  ["part-blocked", "blocked"],
  ["part-rest", "other"],
];
const LOOP_PARTS = [
  ["part-waited", "the loop waited"],
  ["part-first", "for the first batch"],
];

function drawSplits() {
  section(
    "Where the time went",
    "All workers of a stage together. Starved: the stage before it was too slow. " +
      "Blocked: enough batches were under way.",
    html(
      "div",
      { class: "rows" },
      ...stages.flatMap(stageSplit),
      ...(loop.num_batches ? loopSplit() : []),
    ),
    legend(...(stages.length ? STAGE_PARTS : []), ...(loop.num_batches ? LOOP_PARTS : [])),
  );
  if (headroom) {
    const speedUp = ratio(headroom.free_batches_per_second, headroom.batches_per_second);
    section(
      `Headroom: ${number(speedUp)} times as fast, at most`,
      "The loop as it is, and with batches that are already there: what better loading can bring.",
      html("div", { class: "rows headroom" }, ...headroomRows()),
    );
  }
}

// ---- Over time

const [STAGE, START, LENGTH, BATCH, SAMPLES, INDEX] = [0, 1, 2, 3, 4, 5];
const MICRO = 1e-6;
const endOf = (span) => span[START] + span[LENGTH];
const allSpans = lanes.flatMap((lane) => lane.spans);
const whole = {
  start: allSpans.reduce((least, span) => Math.min(least, span[START]), 0),
  end: allSpans.reduce((most, span) => Math.max(most, endOf(span)), 1),
};
let view = { ...whole };

function show(start, end) {
  // Not closer than ten microseconds: nothing shorter is measured.
  const length = clamp(end - start, 10, whole.end - whole.start);
  const from = clamp(start, whole.start, whole.end - length);
  view = { start: from, end: from + length };
  draw();
}

function zoom(factor) {
  const middle = (view.start + view.end) / 2;
  const half = ((view.end - view.start) * factor) / 2;
  show(middle - half, middle + half);
}

function shift(share) {
  const by = share * (view.end - view.start);
  show(view.start + by, view.end + by);
}

function tools() {
  const button = (text, name, action) => {
    const node = html("button", { type: "button", "aria-label": name, title: name }, text);
    node.addEventListener("click", action);
    return node;
  };
  return html(
    "div",
    { class: "tools" },
    button("+", "Zoom in", () => zoom(0.5)),
    button("−", "Zoom out", () => zoom(2)),
    button("←", "Earlier", () => shift(-0.4)),
    button("→", "Later", () => shift(0.4)),
    button("All", "Show all", () => show(whole.start, whole.end)),
  );
}

function ticks(width) {
  const least = ((view.end - view.start) * MICRO * 76) / Math.max(width, 1);
  const power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].map((times) => times * power).find((size) => size >= least);
  const found = [];
  for (let k = Math.ceil((view.start * MICRO) / step); k * step <= view.end * MICRO; k++)
    found.push(k * step);
  return found.map((seconds) => {
    const x = ((seconds / MICRO - view.start) / (view.end - view.start)) * width;
    return { x, text: tickText(seconds, step, view.end * MICRO) };
  });
}

function drawTimeAxis(node, width) {
  const marks = ticks(width).map(({ x, text }) => {
    const anchor = x < 20 ? "start" : x > width - 24 ? "end" : "middle";
    return svg("text", { x: clamp(x, 0, width), y: 13, "text-anchor": anchor }, text);
  });
  node.replaceChildren(svg("svg", { width, height: 18, "aria-hidden": "true" }, ...marks));
}

// How many of a stage's spans there are in each bin of the view, on average.
function busyOverTime(name, numBins) {
  const bins = new Float64Array(numBins);
  const binLength = (view.end - view.start) / numBins;
  for (const span of allSpans) {
    if (span[STAGE] !== name) continue;
    const from = (Math.max(span[START], view.start) - view.start) / binLength;
    const to = (Math.min(endOf(span), view.end) - view.start) / binLength;
    for (let bin = Math.floor(from); bin < to && bin < numBins; bin++) {
      bins[bin] += Math.min(bin + 1, to) - Math.max(bin, from);
    }
  }
  return bins;
}

function areaPath(bins, width, height, most) {
  const y = (value) => (height - (value / most) * height).toFixed(1);
  const x = (bin) => ((bin / bins.length) * width).toFixed(1);
  let path = `M0,${height}`;
  bins.forEach((value, bin) => (path += `V${y(value)}H${x(bin + 1)}`));
  return `${path}V${height}Z`;
}

function drawArea(node, width, name, capacity) {
  const height = 44;
  const bins = busyOverTime(name, clamp(Math.floor(width / 5), 10, 240));
  // Collate has the workers of another stage, of which it hardly ever needs all.
  const limit = name === "collate" ? 1 : (capacity ?? 1);
  // Less than a fiftieth too much is rounding.
  const most = Math.max(limit, Math.ceil(Math.max(...bins) - 0.02));
  node.replaceChildren(
    svg(
      "svg",
      {
        width,
        height: height + 2,
        role: "img",
        "aria-label": `${name} over time`,
        class: "over-time",
        colour: name,
      },
      svg("line", { class: "grid", x1: 0, x2: width, y1: 1, y2: 1 }),
      svg(
        "g",
        { transform: "translate(0 1)" },
        svg("path", { class: "area", d: areaPath(bins, width, height, most) }),
      ),
      svg("line", { class: "grid", x1: 0, x2: width, y1: height + 1, y2: height + 1 }),
    ),
  );
  node.previousSibling.querySelector("small").textContent =
    name === "step" ? "in a step" : `0 to ${most} busy`;
}

function areaRows() {
  const names = stages
    .map((stage) => stage.name)
    .filter((name) => allSpans.some((span) => span[STAGE] === name));
  const rows = names.flatMap((name) => {
    const { width: capacity } = stages.find((stage) => stage.name === name);
    return [
      label(name, "", name),
      plot("", (node, width) => drawArea(node, width, name, capacity)),
    ];
  });
  if (allSpans.some((span) => span[STAGE] === "step")) {
    rows.push(
      label("training loop", "", "step"),
      plot("", (node, width) => drawArea(node, width, "step", 1)),
    );
  }
  return rows;
}

// ---- Lanes

function colourOf(name) {
  const style = getComputedStyle(document.documentElement);
  return style.getPropertyValue(`--${name}`).trim() || style.getPropertyValue("--none").trim();
}

function hatching(context, colour) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const pen = tile.getContext("2d");
  pen.strokeStyle = colour;
  pen.lineWidth = 1.6;
  pen.beginPath();
  for (const offset of [-6, 0, 6]) {
    pen.moveTo(offset, 6);
    pen.lineTo(offset + 6, 0);
  }
  pen.stroke();
  return context.createPattern(tile, "repeat");
}

// Spans that are wider than a pixel are drawn one by one. Of the others each pixel is as opaque as
// they cover it: thousands of short spans look as busy as they are, and cost no more than few.
function drawLane(context, spans, top, height, width, styles) {
  const scale = width / (view.end - view.start);
  const covered = new Map();
  for (const span of spans) {
    if (endOf(span) < view.start || span[START] > view.end) continue;
    const from = Math.max((span[START] - view.start) * scale, 0);
    const to = Math.min((endOf(span) - view.start) * scale, width);
    if (to - from >= 1.5) {
      context.fillStyle = styles(span[STAGE]);
      // A gap tells it from the next.
      context.fillRect(from, top, to - from - (to - from > 4 ? 0.7 : 0), height);
      continue;
    }
    if (!covered.has(span[STAGE])) covered.set(span[STAGE], new Float32Array(width + 1));
    const pixels = covered.get(span[STAGE]);
    for (let x = Math.floor(from); x < to && x < width; x++) {
      pixels[x] += Math.max(Math.min(x + 1, to) - Math.max(x, from), 0);
    }
  }
  for (const [name, pixels] of covered) {
    context.fillStyle = styles(name);
    pixels.forEach((share, x) => {
      if (share === 0) return;
      context.globalAlpha = clamp(share, 0.3, 1);
      context.fillRect(x, top, 1, height);
    });
    context.globalAlpha = 1;
  }
}

function laneHeight(numLanes) {
  return clamp(Math.floor(260 / numLanes), 4, 15);
}

function drawLanes(node, width, group) {
  const pitch = laneHeight(group.length) + 2;
  const height = group.length * pitch - 2;
  const canvas = node.firstChild;
  const density = window.devicePixelRatio || 1;
  canvas.width = Math.max(Math.round(width * density), 1);
  canvas.height = Math.max(Math.round(height * density), 1);
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(density, density);
  context.fillStyle = colourOf("line");
  context.globalAlpha = 0.35;
  group.forEach((lane, k) => context.fillRect(0, k * pitch, width, pitch - 2));
  context.globalAlpha = 1;
  const known = new Map();
  const styles = (name) => {
    if (!known.has(name)) {
      known.set(name, name === "wait" ? hatching(context, colourOf("wait")) : colourOf(name));
    }
    return known.get(name);
  };
  group.forEach((lane, k) => drawLane(context, lane.spans, k * pitch, pitch - 2, width, styles));
}

// The span at a time, or the nearest within a few pixels; of two the inner one.
function spanAt(spans, time, tolerance) {
  let [low, high] = [0, spans.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (spans[middle][START] <= time + tolerance) low = middle + 1;
    else high = middle;
  }
  let best = null;
  for (let k = low - 1; k >= 0 && k >= low - 8; k--) {
    const distance = Math.max(spans[k][START] - time, time - endOf(spans[k]), 0);
    if (distance <= tolerance && (best === null || distance < best.distance))
      best = { span: spans[k], distance };
  }
  return best?.span ?? null;
}

function describe(lane, span) {
  const lines = [
    `${lane.name}: ${span[STAGE]} ${duration(span[LENGTH] * MICRO)}`,
    `batch ${span[BATCH]}` + (span[SAMPLES] > 1 ? `, ${span[SAMPLES]} samples` : ""),
    span[INDEX] === null
      ? null
      : `index ${span[INDEX].length > 120 ? `${span[INDEX].slice(0, 120)}…` : span[INDEX]}`,
    `at ${duration(span[START] * MICRO)}`,
  ];
  return lines.filter(Boolean).join("\n");
}

function showTip(event, text) {
  tip.textContent = text;
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const below = event.clientY + 18;
  const top = below + height > window.innerHeight ? event.clientY - height - 10 : below;
  tip.style.left = `${clamp(event.clientX + 12, 8, Math.max(window.innerWidth - width - 8, 8))}px`;
  tip.style.top = `${Math.max(top, 4)}px`;
}

function makeInteractive(node, group) {
  const canvas = node.firstChild;
  const timeAt = (x) =>
    view.start + (x / Math.max(canvas.clientWidth, 1)) * (view.end - view.start);
  let selection = null;
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    selection = {
      from: event.offsetX,
      to: event.offsetX,
      node: html("div", { class: "selection" }),
    };
    node.append(selection.node);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (selection) {
      selection.to = clamp(event.offsetX, 0, canvas.clientWidth);
      selection.node.style.left = `${Math.min(selection.from, selection.to)}px`;
      selection.node.style.width = `${Math.abs(selection.to - selection.from)}px`;
    }
    const lane = group[Math.floor(event.offsetY / (laneHeight(group.length) + 2))];
    const tolerance = (3 * (view.end - view.start)) / Math.max(canvas.clientWidth, 1);
    const span = lane && spanAt(lane.spans, timeAt(event.offsetX), tolerance);
    if (span) showTip(event, describe(lane, span));
    else tip.hidden = true;
  });
  canvas.addEventListener("pointerup", () => {
    const { from, to } = selection ?? { from: 0, to: 0 };
    selection?.node.remove();
    selection = null;
    // Less is a click that was not held still.
    if (Math.abs(to - from) > 5) show(timeAt(Math.min(from, to)), timeAt(Math.max(from, to)));
  });
  canvas.addEventListener("pointercancel", () => {
    selection?.node.remove();
    selection = null;
  });
  canvas.addEventListener("pointerleave", () => (tip.hidden = true));
  canvas.addEventListener("dblclick", () => show(whole.start, whole.end));
}

function laneRows() {
  const groups = [...new Set(lanes.map((lane) => lane.stage))];
  return groups.flatMap((stage) => {
    const group = lanes.filter((lane) => lane.stage === stage);
    const name = stage === "step" ? "training loop" : stage;
    const node = plot("lanes", (plotNode, width) => drawLanes(plotNode, width, group));
    node.append(
      html("canvas", {
        role: "img",
        "aria-label": `timeline of ${name}`,
        "data-lanes": group.length,
      }),
    );
    makeInteractive(node, group);
    const detail = stage === "step" ? "hatched: it waits" : count(group.length, "lane");
    return [label(name, detail, stage), node];
  });
}

function drawTimeline() {
  if (!allSpans.length) return;
  const axis = () => [html("div", { class: "label" }), plot("axis", drawTimeAxis)];
  section(
    "Over time",
    "How many workers of each stage were busy, then what each of them did. " +
      "Drag over the lanes to look closer, double-click to see all; point at a span for its batch and index.",
    tools(),
    html("div", { class: "rows" }, ...areaRows(), ...axis(), ...laneRows(), ...axis()),
  );
}

// ---- Latencies

// Each line of the histogram as an interval. Lines are an eighth apart at most; where that is not
// so, those between them were left out because they are empty.
function intervals(histogram) {
  const widest = 9 / 8;
  let before = 0;
  return histogram.flatMap(([upper, amount]) => {
    const end = upper ?? before * widest;
    const interval = { lower: Math.max(before, end / widest), upper: end, amount };
    before = end;
    return amount > 0 && end > 0 ? [interval] : [];
  });
}

function drawHistogram(node, width, stage, domain) {
  const height = 50;
  const bars = intervals(stage.histogram);
  const logLength = Math.log(domain.upper / domain.lower);
  const x = (seconds) =>
    (Math.log(clamp(seconds, domain.lower, domain.upper) / domain.lower) / logLength) * width;
  // By area, so that lines of unequal length are fair.
  const heightOf = ({ lower, upper, amount }) => amount / Math.log(upper / lower);
  const most = Math.max(...bars.map(heightOf));
  const rule = (seconds, kind) =>
    svg("line", { class: `rule ${kind}`, x1: x(seconds), x2: x(seconds), y1: 0, y2: height });
  node.replaceChildren(
    svg(
      "svg",
      {
        width,
        height: height + 1,
        role: "img",
        class: "histogram",
        colour: stage.name,
        "aria-label": `${stage.name}: half take at most ${duration(stage.p50_seconds)}, 99 % ${duration(stage.p99_seconds)}`,
      },
      ...decades(domain).map((seconds) =>
        svg("line", { class: "grid", x1: x(seconds), x2: x(seconds), y1: 0, y2: height }),
      ),
      ...bars.map((bar) =>
        svg(
          "rect",
          {
            class: "bars",
            x: x(bar.lower),
            width: Math.max(x(bar.upper) - x(bar.lower) - 0.6, 0.8),
            y: height - (heightOf(bar) / most) * (height - 2),
            height: (heightOf(bar) / most) * (height - 2),
          },
          svg(
            "title",
            {},
            `${bar.amount.toLocaleString("en")} took ${duration(bar.lower)} to ${duration(bar.upper)}`,
          ),
        ),
      ),
      svg("line", { class: "grid", x1: 0, x2: width, y1: height, y2: height }),
      rule(stage.p50_seconds, ""),
      rule(stage.p99_seconds, "dashed"),
    ),
  );
}

function decades({ lower, upper }) {
  const found = [];
  for (let power = Math.ceil(Math.log10(lower) - 1e-9); 10 ** power <= upper * 1.0001; power++)
    found.push(10 ** power);
  return found;
}

function drawDecades(node, width, domain) {
  const logLength = Math.log(domain.upper / domain.lower);
  const marks = decades(domain).map((seconds) => {
    const x = (Math.log(seconds / domain.lower) / logLength) * width;
    const anchor = x < 20 ? "start" : x > width - 24 ? "end" : "middle";
    const [factor, unit] =
      seconds >= 0.99 ? [1, "s"] : seconds >= 0.99e-3 ? [1e3, "ms"] : [1e6, "µs"];
    return svg(
      "text",
      { x, y: 13, "text-anchor": anchor },
      `${Math.round(seconds * factor * 100) / 100} ${unit}`,
    );
  });
  node.replaceChildren(svg("svg", { width, height: 18, "aria-hidden": "true" }, ...marks));
}

function drawLatencies() {
  const measured = stages.filter((stage) => intervals(stage.histogram).length);
  if (!measured.length) return;
  const all = measured.flatMap((stage) => intervals(stage.histogram));
  const lower = Math.min(
    ...all.map((bar) => bar.lower),
    ...measured.map((stage) => stage.p50_seconds || 1),
  );
  const upper = Math.max(
    ...all.map((bar) => bar.upper),
    ...measured.map((stage) => stage.p99_seconds),
  );
  // At least a factor of a hundred, for an axis with two marks on it.
  const margin = Math.max(1.1, Math.sqrt((100 * lower) / upper));
  const domain = { lower: lower / margin, upper: upper * margin };
  section(
    "How long it takes",
    "One row for each stage, all on the same logarithmic axis. " +
      "A long way from the middle to the 99th percentile: a few slow samples hold up their batches.",
    html(
      "div",
      { class: "rows" },
      ...measured.flatMap((stage) => [
        label(
          `${stage.name}, per ${unit(stage)}`,
          `p50 ${duration(stage.p50_seconds)}, p99 ${duration(stage.p99_seconds)}`,
          stage.name,
        ),
        plot("", (node, width) => drawHistogram(node, width, stage, domain)),
      ]),
      html("div", { class: "label" }),
      plot("axis", (node, width) => drawDecades(node, width, domain)),
    ),
    legend(
      ["key-p50", "p50: half take at most so long"],
      ["key-p99", "p99: all but one in a hundred do"],
    ),
  );
}

// ---- More workers

// If each worker did as much as the first, up to where that leaves the chart at its top.
function idealCurve(points, most) {
  const rates = points.map(([workerCount]) => (points[0][1] * workerCount) / points[0][0]);
  const end = rates.findIndex((rate) => rate > most);
  if (end < 1) return rates.map((rate, k) => [k, rate]);
  const crossing = end - 1 + (most - rates[end - 1]) / (rates[end] - rates[end - 1]);
  return [...rates.slice(0, end).map((rate, k) => [k, rate]), [crossing, most]];
}

function drawCurve(node, width, scaling) {
  const [left, right, top, bottom] = [22, 26, 20, 24];
  const height = 150;
  const points = scaling.throughputs;
  const most = Math.max(...points.map(([, rate]) => rate), 1e-9);
  const stepWidth = points.length > 1 ? (width - left - right) / (points.length - 1) : 0;
  const x = (k) => left + k * stepWidth;
  const y = (rate) => top + (1 - clamp(rate / most, 0, 1)) * (height - top - bottom);
  const isLabelled = (k) => stepWidth >= 48 || k === 0 || k === points.length - 1;
  const path = (pairs) => `M${pairs.map((pair) => pair.join(",")).join("L")}`;
  node.replaceChildren(
    svg(
      "svg",
      {
        width,
        height,
        role: "img",
        class: "scaling",
        colour: scaling.stage,
        "aria-label": `${scaling.stage}: ${points.map(([workerCount, rate]) => `${workerCount} workers ${number(rate)} samples/s`).join(", ")}`,
      },
      svg("line", { class: "grid", x1: 0, x2: width, y1: y(0), y2: y(0) }),
      svg("path", {
        class: "ideal",
        d: path(idealCurve(points, most).map(([k, rate]) => [x(k), y(rate)])),
      }),
      svg("path", { class: "curve", d: path(points.map(([, rate], k) => [x(k), y(rate)])) }),
      ...points.flatMap(([workerCount, rate], k) => [
        svg("circle", { class: "dot", cx: x(k), cy: y(rate), r: 3.5 }),
        svg("text", { x: x(k), y: height - 7, "text-anchor": "middle" }, String(workerCount)),
        isLabelled(k)
          ? svg(
              "text",
              { class: "value", x: x(k), y: y(rate) - 8, "text-anchor": "middle" },
              short(rate),
            )
          : null,
      ]),
    ),
  );
}

function drawScalings() {
  if (!scalings.length) return;
  const arrows = { rises: "↗", flat: "→", falls: "↘" };
  section(
    "More workers",
    "Each stage by itself: samples per second, by number of workers. " +
      "Dotted: if each worker added as much as the first.",
    html(
      "div",
      { class: "cards" },
      ...scalings.map((scaling) =>
        html(
          "div",
          {},
          html(
            "h3",
            {},
            html("span", {}, scaling.stage),
            html("span", { class: "shape" }, `${arrows[scaling.shape] ?? ""} ${scaling.shape}`),
          ),
          plot("", (node, width) => drawCurve(node, width, scaling)),
        ),
      ),
    ),
  );
}

// ---- All figures

const STAGE_FIGURES = [
  [
    "workers",
    "samples it can work at at a time",
    (stage) => (stage.width === null ? "unknown" : String(stage.width)),
  ],
  ["done", "", (stage) => count(stage.num_samples, unit(stage))],
  ["per second", "", (stage) => number(stage.samples_per_second)],
  ["busy workers", "on average", (stage) => number(stage.num_busy)],
  [
    "utilisation",
    "near 100 %: the others wait for this stage",
    (stage) => (stage.width === null ? "unknown" : percent(stage.utilisation)),
  ],
  ["busy", "of all workers together", (stage) => duration(stage.busy_seconds)],
  [
    "on a core",
    "far less than busy: it waits for I/O, a core or the interpreter's lock",
    (stage) => duration(stage.cpu_seconds),
  ],
  ["queued", "much: too many threads for the cores", (stage) => duration(stage.queued_seconds)],
  ["starved", "much: look at the stage before", (stage) => duration(stage.starved_seconds)],
  ["blocked", "much: this stage is quick enough", (stage) => duration(stage.blocked_seconds)],
  ["in flight", "at the end", (stage) => String(stage.num_in_flight)],
  ["mean", "of a sample, or a batch", (stage) => duration(stage.mean_seconds)],
  ["p50", "", (stage) => duration(stage.p50_seconds)],
  [
    "p99",
    "far more than p50: a few slow samples hold up their batches",
    (stage) => duration(stage.p99_seconds),
  ],
];

function loaderFigures() {
  return [
    ["workers", "", stats.kind],
    [
      "elapsed",
      stats.is_running ? "the epoch was still running" : "",
      duration(stats.elapsed_seconds),
    ],
    ["batches", "", loop.num_batches.toLocaleString("en")],
    ["data", "tensors and arrays in the batches", size(stats.num_bytes)],
    ["waited", "in next()", duration(loop.waited_seconds)],
    ["of it, for the first batch", "", duration(loop.first_wait_seconds)],
    ["share waited", "after the first batch", percent(loop.waited_share)],
    ["step", "with the batches", duration(loop.step_seconds)],
    [
      "wake",
      "5 ms or more: other threads hold the interpreter's lock",
      duration(loop.wake_seconds),
    ],
    ["window", "batches that may be in flight", String(stats.window)],
    ["ready", "batches that waited for the loop at the end", String(stats.num_ready)],
    ["bad samples", "replaced", stats.num_bad_samples.toLocaleString("en")],
    ["retries", "", stats.num_retries.toLocaleString("en")],
    ["cores", "that the process may use", String(stats.num_cores)],
  ];
}

function figureTable(title, head, rows) {
  const heading = (name, hint) =>
    html("th", { scope: "row" }, name, hint ? html("small", {}, hint) : null);
  const body = rows.map(([name, hint, ...cells]) =>
    html("tr", {}, heading(name, hint), ...cells.map((text) => html("td", {}, text))),
  );
  const top = head.length
    ? html(
        "thead",
        {},
        html(
          "tr",
          {},
          html("th", { scope: "col" }),
          ...head.map((name) => html("th", { scope: "col" }, name)),
        ),
      )
    : null;
  const table = html("table", {}, html("caption", {}, title), top, html("tbody", {}, ...body));
  return html("div", { class: "wide", tabindex: "0", role: "region", "aria-label": title }, table);
}

function drawFigures() {
  const rows = STAGE_FIGURES.map(([name, hint, text]) => [name, hint, ...stages.map(text)]);
  const stageTable = stages.length
    ? [
        figureTable(
          "Stages",
          stages.map((stage) => stage.name),
          rows,
        ),
      ]
    : [];
  section(
    "All figures",
    "What the pictures above are drawn from.",
    html(
      "div",
      { class: "tables" },
      ...stageTable,
      figureTable("Loader and loop", [], loaderFigures()),
    ),
  );
}

drawVerdict();
drawPipeline();
drawSplits();
drawTimeline();
drawLatencies();
drawScalings();
drawFigures();
draw();

let drawnWidth = main.clientWidth;
new ResizeObserver(() => {
  if (main.clientWidth === drawnWidth) return;
  drawnWidth = main.clientWidth;
  draw();
}).observe(main);
// A canvas does not follow the colours of the page by itself.
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
