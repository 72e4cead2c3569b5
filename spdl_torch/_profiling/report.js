"use strict";

const { stats, scalings, headroom, bottleneck, lanes, home } = JSON.parse(
  document.getElementById("data").textContent,
);
const { stages, loop } = stats;
const tip = document.getElementById("tip");

// ---- Markup

class Markup {
  constructor(text) {
    this.text = text;
  }
}

const ESCAPES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };

function escaped(value) {
  if (Array.isArray(value)) return value.map(escaped).join("");
  if (value instanceof Markup) return value.text;
  if (value === false || value === null) return "";
  return String(value).replace(/[&<>"]/g, (character) => ESCAPES[character]);
}

// Every value in a template is escaped, unless it is markup itself.
const html = (strings, ...values) =>
  new Markup(String.raw({ raw: strings }, ...values.map(escaped)));

const colour = (name) => `--colour: var(--${name}, var(--none))`;

function section(title, note, content) {
  return html`<section>
    <h2>${title}</h2>
    <p class="note">${note}</p>
    ${content}
  </section>`;
}

function label(text, detail, name = null) {
  const swatch = name && html`<i class="swatch" style="${colour(name)}"></i>`;
  return html`<div class="label"><span>${swatch}${text}</span><small>${detail}</small></div>`;
}

// ---- Text

const ratio = (part, whole) => (whole > 0 ? part / whole : 0);
const sum = (numbers) => numbers.reduce((total, value) => total + value, 0);
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
const percent = (share) => `${Math.round(100 * share)}\u00a0%`;
const plural = (noun) => noun + (noun.endsWith("ch") ? "es" : "s");
const count = (amount, noun) =>
  `${amount.toLocaleString("en")} ${amount === 1 ? noun : plural(noun)}`;
const unit = (stage) => (["collate", "transfer"].includes(stage.name) ? "batch" : "sample");

function fixed(value, decimals) {
  const digits = { minimumFractionDigits: decimals, maximumFractionDigits: decimals };
  return value.toLocaleString("en", digits);
}

const number = (value) => fixed(value, value >= 99.95 || value === 0 ? 0 : value >= 9.995 ? 1 : 2);

function duration(seconds) {
  if (seconds === 0) return "0 s";
  if (seconds >= 0.9995) return `${number(seconds)} s`;
  if (seconds >= 0.9995e-3) return `${number(1e3 * seconds)} ms`;
  return `${number(1e6 * seconds)} µs`;
}

function size(bytes) {
  const power = bytes >= 1000 ? Math.min(Math.floor(Math.log10(bytes) / 3), 4) : 0;
  return `${number(bytes / 1000 ** power)} ${["bytes", "kB", "MB", "GB", "TB"][power]}`;
}

// The time of a mark on an axis, with as many decimals as the distance of two marks needs.
function tickText(seconds, step, most) {
  const [factor, name] = most >= 1 ? [1, "s"] : most >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
  const decimals = clamp(Math.ceil(-Math.log10(step * factor) - 1e-9), 0, 6);
  return `${fixed(seconds * factor, decimals)} ${name}`;
}

// ---- The verdict

function verdictHeader() {
  const { kind, sentence, advice } = stats.verdict;
  document.title = `spdl_torch profile: ${kind}`;
  const hasKind = sentence.startsWith(`${kind}: `);
  const rest = hasKind ? sentence.slice(kind.length + 2) : sentence;
  const cpuSeconds = sum(stages.map((stage) => stage.cpu_seconds));
  const figures = {
    "batches per second": number(loop.batches_per_second),
    "the loop waited": percent(loop.waited_share),
    "first batch after": duration(loop.first_wait_seconds),
    "cores used":
      stages.length && `${number(ratio(cpuSeconds, stats.elapsed_seconds))} of ${stats.num_cores}`,
    data: stats.num_bytes && `${size(ratio(stats.num_bytes, stats.elapsed_seconds))}/s`,
    "bad samples": stats.num_bad_samples && stats.num_bad_samples.toLocaleString("en"),
    "if loading took no time":
      headroom &&
      `${number(ratio(headroom.free_batches_per_second, headroom.batches_per_second))} × as fast`,
  };
  const known = Object.entries(figures).filter(([, text]) => text);
  const batches = count(loop.num_batches, "batch");
  return html`<header>
    <p class="source">spdl_torch profile · ${batches} in ${duration(stats.elapsed_seconds)}${home}</p>
    <h1>
      ${hasKind && html`<span class="kind">${kind}</span>`}
      ${rest.charAt(0).toUpperCase() + rest.slice(1)}
    </h1>
    <p class="advice">${advice}</p>
    <dl class="key-figures">
      ${known.map(([name, text]) => html`<div><dt>${name}</dt><dd>${text}</dd></div>`)}
    </dl>
  </header>`;
}

// ---- The pipeline

function box(name, title, { workers, rate = null, what = "", note, share = null }) {
  const isBottleneck = name === bottleneck;
  return html`<li>
    <div
      class="box ${isBottleneck && "bottleneck"}"
      data-name="${name}"
      style="${colour(name === "loop" ? "step" : name)}"
    >
      <span class="gauge">
        <span class="fill" style="width: ${100 * clamp(share ?? 0, 0, 1)}%"></span>
      </span>
      ${isBottleneck && html`<span class="badge">▼ bottleneck</span>`}
      <b>${title}</b>
      <span>${workers}</span>
      ${rate !== null && html`<span class="rate">${number(rate)}<small> ${what}/s</small></span>`}
      <span>${note}</span>
    </div>
  </li>`;
}

function stageBox(stage) {
  const share = stage.width === null ? null : stage.utilisation;
  const workers =
    stage.name === "collate"
      ? "in the workers before it"
      : stage.width === null
        ? "workers of an executor"
        : count(stage.width, "worker");
  return box(stage.name, stage.name, {
    workers,
    rate: stage.samples_per_second,
    what: plural(unit(stage)),
    note: `${number(stage.num_busy)} busy${share === null ? "" : ` · ${percent(share)}`}`,
    share,
  });
}

function pipelineSection() {
  const where = { caller: "in the training loop's thread", multiprocessing: "worker processes" };
  const boxes = stages.length
    ? stages.map(stageBox)
    : box("workers", "dataset", { workers: where[stats.kind], note: "not measured by stage" });
  const busyShare = loop.num_batches ? 1 - loop.waited_share : null;
  const loopBox = box("loop", "training loop", {
    workers: `step ${duration(ratio(loop.step_seconds, loop.num_batches))}`,
    rate: loop.batches_per_second,
    what: "batches",
    note: busyShare === null ? "no batch yet" : `in steps ${percent(busyShare)}`,
    share: busyShare,
  });
  const isWindow = bottleneck === "window";
  return section(
    "Pipeline",
    "Throughput of each stage. The fill is the share of time that its workers are busy.",
    html`<ol class="pipeline">
        ${boxes}${loopBox}
      </ol>
      <p class="box window ${isWindow && "bottleneck"}" data-name="window">
        ${isWindow && html`<span class="badge">▼ bottleneck</span>`}
        Window: at most ${count(stats.window, "batch")} in flight, ${stats.num_ready} ready for the
        loop at the end.
      </p>`,
  );
}

// ---- Where the time went

const PARTS = {
  "on-core": "on a core, or in a step",
  queued: "waiting for a core",
  "off-core": "waiting for I/O or the GIL",
  idle: "idle",
  waited: "the loop waited",
  first: "for the first batch",
};

function splitBar(seconds, name) {
  const whole = sum(Object.values(seconds));
  const words = [];
  const bars = Object.entries(seconds).map(([part, length]) => {
    const share = ratio(length, whole);
    words.push(`${PARTS[part]} ${percent(share)}`);
    return html`<div class="${part}" style="width: ${100 * share}%" title="${words.at(-1)}"></div>`;
  });
  const text = words.join(", ");
  const style = colour(name);
  return html`<div class="split" role="img" aria-label="${text}" style="${style}">${bars}</div>`;
}

function stageSplit(stage) {
  const busy = stage.busy_seconds;
  const onCore = Math.min(stage.cpu_seconds, busy);
  const queued = Math.min(stage.queued_seconds, busy - onCore);
  const whole = Math.max((stage.width ?? 0) * stage.elapsed_seconds, busy);
  const offCore = busy - onCore - queued;
  const seconds = { "on-core": onCore, queued, "off-core": offCore, idle: whole - busy };
  const text = stage.width === null ? "" : `busy ${percent(ratio(busy, whole))}`;
  return html`${label(stage.name, text, stage.name)}${splitBar(seconds, stage.name)}`;
}

function loopSplit() {
  const waited = Math.max(loop.waited_seconds - loop.first_wait_seconds, 0);
  const seconds = { "on-core": loop.step_seconds, waited, first: loop.first_wait_seconds };
  const text = `waited ${percent(loop.waited_share)}`;
  return html`${label("training loop", text, "step")}${splitBar(seconds, "step")}`;
}

function splitSection() {
  const keys = Object.entries(PARTS).map(
    ([part, text]) => html`<li><i class="${part}" style="${colour("step")}"></i>${text}</li>`,
  );
  return section(
    "Where the time went",
    "The time of all workers of a stage together, and of the training loop.",
    html`<div class="rows">${stages.map(stageSplit)}${loop.num_batches ? loopSplit() : ""}</div>
      <ul class="legend">
        ${keys}
      </ul>`,
  );
}

// ---- Timeline

const [STAGE, START, LENGTH, BATCH, SAMPLES, INDEX] = [0, 1, 2, 3, 4, 5];
const MICRO = 1e-6;
const GAP = 2;
const endOf = (span) => span[START] + span[LENGTH];
const allSpans = lanes.flatMap((lane) => lane.spans);
const whole = {
  start: allSpans.reduce((least, span) => Math.min(least, span[START]), 0),
  end: allSpans.reduce((most, span) => Math.max(most, endOf(span)), 1),
};
let view = { ...whole };

const groups = [...new Set(lanes.map((lane) => lane.stage))].map((stage) => {
  const own = lanes.filter((lane) => lane.stage === stage);
  return { stage, lanes: own, pitch: clamp(Math.floor(300 / own.length), 5, 18) + GAP };
});

const TOOLS = [
  ["+", "Zoom in", () => zoom(0.5)],
  ["−", "Zoom out", () => zoom(2)],
  ["←", "Earlier", () => move(-0.4)],
  ["→", "Later", () => move(0.4)],
  ["All", "Show all", () => show(whole.start, whole.end)],
];

function timelineSection() {
  if (!allSpans.length) return "";
  const rows = groups.map(({ stage, lanes: own }) => {
    const name = stage === "step" ? "training loop" : stage;
    const detail = stage === "step" ? "thin: it waits" : count(own.length, "lane");
    return html`${label(name, detail, stage)}
      <div class="lanes">
        <canvas role="img" aria-label="timeline of ${name}" data-lanes="${own.length}"></canvas>
      </div>`;
  });
  const tools = TOOLS.map(
    ([text, name]) =>
      html`<button type="button" aria-label="${name}" title="${name}">${text}</button>`,
  );
  return section(
    "Timeline",
    "What each worker did. Drag over the lanes to zoom in, double-click to see all; " +
      "point at a span for its batch and index.",
    html`<div class="tools">${tools}</div>
      <div class="rows">
        ${rows}
        <div class="label"></div>
        <div class="axis" id="time-axis"></div>
      </div>`,
  );
}

function show(start, end) {
  // Nothing shorter than ten microseconds is measured.
  const length = clamp(end - start, 10, whole.end - whole.start);
  const from = clamp(start, whole.start, whole.end - length);
  view = { start: from, end: from + length };
  drawTimeline();
}

function zoom(factor) {
  const middle = (view.start + view.end) / 2;
  const half = ((view.end - view.start) * factor) / 2;
  show(middle - half, middle + half);
}

function move(share) {
  const by = share * (view.end - view.start);
  show(view.start + by, view.end + by);
}

function drawTimeline() {
  const canvases = document.querySelectorAll("canvas");
  groups.forEach((group, k) => drawGroup(canvases[k], group));
  const axis = document.getElementById("time-axis");
  if (axis) axis.innerHTML = timeMarks(axis.clientWidth).text;
}

function timeMarks(width) {
  const least = ((view.end - view.start) * MICRO * 90) / Math.max(width, 1);
  const power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].map((times) => times * power).find((length) => length >= least);
  const marks = [];
  for (let k = Math.ceil((view.start * MICRO) / step); k * step <= view.end * MICRO; k++) {
    const share = ((k * step) / MICRO - view.start) / (view.end - view.start);
    marks.push(axisMark(share, tickText(k * step, step, view.end * MICRO)));
  }
  return html`${marks}`;
}

// Marks at the ends of an axis stay within it.
function axisMark(share, text) {
  const shift = share < 0.04 ? 0 : share > 0.96 ? -100 : -50;
  return html`<span style="left: ${100 * share}%; transform: translateX(${shift}%)">${text}</span>`;
}

function colourOf(name) {
  const style = getComputedStyle(document.documentElement);
  return style.getPropertyValue(`--${name}`).trim() || style.getPropertyValue("--none").trim();
}

function drawGroup(canvas, { lanes: own, pitch }) {
  const width = canvas.clientWidth;
  const height = own.length * pitch - GAP;
  const density = window.devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  canvas.width = Math.max(Math.round(width * density), 1);
  canvas.height = Math.round(height * density);
  const context = canvas.getContext("2d");
  context.scale(density, density);
  const colours = {};
  own.forEach((lane, k) => {
    context.globalAlpha = 0.35;
    context.fillStyle = colourOf("line");
    context.fillRect(0, k * pitch, width, pitch - GAP);
    context.globalAlpha = 1;
    drawLane(context, lane.spans, k * pitch, pitch - GAP, width, colours);
  });
}

// Spans wider than a pixel are drawn one by one. For the others, the opacity of a pixel is the
// share of it that they cover: thousands of short spans look as busy as they are.
function drawLane(context, spans, top, height, width, colours) {
  const scale = width / (view.end - view.start);
  const covered = {};
  for (const span of spans) {
    if (endOf(span) < view.start || span[START] > view.end) continue;
    const stage = span[STAGE];
    colours[stage] ??= colourOf(stage);
    const from = Math.max((span[START] - view.start) * scale, 0);
    const to = Math.min((endOf(span) - view.start) * scale, width);
    if (to - from >= 1.5) {
      context.fillStyle = colours[stage];
      // A wait is a thin line. A gap separates a span from the next one.
      const [y, tall] = stage === "wait" ? [top + height / 3, height / 3] : [top, height];
      context.fillRect(from, y, to - from - (to - from > 4 ? 0.7 : 0), tall);
      continue;
    }
    covered[stage] ??= new Float32Array(Math.ceil(width) + 1);
    for (let x = Math.floor(from); x < to && x < width; x++) {
      covered[stage][x] += Math.max(Math.min(x + 1, to) - Math.max(x, from), 0);
    }
  }
  for (const [stage, pixels] of Object.entries(covered)) {
    context.fillStyle = colours[stage];
    pixels.forEach((share, x) => {
      if (share === 0) return;
      context.globalAlpha = clamp(share, 0.3, 1);
      context.fillRect(x, top, 1, height);
    });
    context.globalAlpha = 1;
  }
}

// The span at a time, or the nearest within a few pixels; of two the inner one.
function spanAt(spans, time, tolerance) {
  let [found, least] = [null, tolerance];
  for (const span of spans) {
    const distance = Math.max(span[START] - time, time - endOf(span), 0);
    if (distance <= least) [found, least] = [span, distance];
  }
  return found;
}

function describe(lane, span) {
  const index = span[INDEX]?.length > 120 ? `${span[INDEX].slice(0, 120)}…` : span[INDEX];
  const lines = [
    `${lane.name}: ${span[STAGE]} ${duration(span[LENGTH] * MICRO)}`,
    `batch ${span[BATCH]}` + (span[SAMPLES] > 1 ? `, ${span[SAMPLES]} samples` : ""),
    index === null ? null : `index ${index}`,
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

function makeInteractive(canvas, { lanes: own, pitch }) {
  const length = () => view.end - view.start;
  const timeAt = (x) => view.start + (x / Math.max(canvas.clientWidth, 1)) * length();
  let selection = null;
  const endSelection = () => {
    const ended = selection;
    selection?.node.remove();
    selection = null;
    return ended ?? { from: 0, to: 0 };
  };
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    const node = document.createElement("div");
    node.className = "selection";
    canvas.parentNode.append(node);
    selection = { from: event.offsetX, to: event.offsetX, node };
  });
  canvas.addEventListener("pointermove", (event) => {
    if (selection) {
      selection.to = clamp(event.offsetX, 0, canvas.clientWidth);
      selection.node.style.left = `${Math.min(selection.from, selection.to)}px`;
      selection.node.style.width = `${Math.abs(selection.to - selection.from)}px`;
    }
    const lane = own[Math.floor(event.offsetY / pitch)];
    const tolerance = (3 * length()) / Math.max(canvas.clientWidth, 1);
    const span = lane && spanAt(lane.spans, timeAt(event.offsetX), tolerance);
    if (span) showTip(event, describe(lane, span));
    else tip.hidden = true;
  });
  canvas.addEventListener("pointerup", () => {
    const { from, to } = endSelection();
    // Less is a click with a shaking hand.
    if (Math.abs(to - from) > 5) show(timeAt(Math.min(from, to)), timeAt(Math.max(from, to)));
  });
  canvas.addEventListener("pointercancel", endSelection);
  canvas.addEventListener("pointerleave", () => (tip.hidden = true));
  canvas.addEventListener("dblclick", () => show(whole.start, whole.end));
}

// ---- Time per sample

// Buckets are an eighth of an octave wide, and the last one may have no upper end.
function buckets(stage) {
  const factor = 2 ** (1 / 8);
  let before = 0;
  return stage.histogram.flatMap(([end, amount]) => {
    const upper = end ?? before * factor;
    before = upper;
    return amount > 0 && upper > 0 ? [{ lower: upper / factor, upper, amount }] : [];
  });
}

function histogram(stage, x) {
  const bars = buckets(stage);
  const most = Math.max(...bars.map((bar) => bar.amount));
  const rule = (kind, seconds) => html`<i class="${kind}" style="left: ${x(seconds)}%"></i>`;
  const drawn = bars.map(({ lower, upper, amount }) => {
    const title = `${amount.toLocaleString("en")}: ${duration(lower)} to ${duration(upper)}`;
    const place = `left: ${x(lower)}%; width: ${x(upper) - x(lower)}%`;
    return html`<b style="${place}; height: ${(100 * amount) / most}%" title="${title}"></b>`;
  });
  const [p50, p99] = [stage.p50_seconds, stage.p99_seconds].map(duration);
  const words = `${stage.name}: half take at most ${p50}, 99 % at most ${p99}`;
  return html`${label(`${stage.name}, per ${unit(stage)}`, `p50 ${p50}, p99 ${p99}`, stage.name)}
    <div class="histogram" role="img" aria-label="${words}" style="${colour(stage.name)}">
      ${drawn}${rule("p50", stage.p50_seconds)}${rule("p99", stage.p99_seconds)}
    </div>`;
}

function latencySection() {
  const measured = stages.filter((stage) => buckets(stage).length);
  if (!measured.length) return "";
  const all = measured.flatMap(buckets);
  // From one power of ten to another.
  const low = Math.floor(Math.log10(Math.min(...all.map((bar) => bar.lower))));
  const high = Math.ceil(Math.log10(Math.max(...all.map((bar) => bar.upper))));
  const share = (power) => clamp((power - low) / (high - low), 0, 1);
  const x = (seconds) => 100 * share(Math.log10(seconds || 10 ** low));
  const marks = [];
  for (let power = low; power <= high; power++) {
    marks.push(axisMark(share(power), tickText(10 ** power, 10 ** power, 1.01 * 10 ** power)));
  }
  return section(
    "Time per sample",
    "Solid line: median (p50); dashed line: 99th percentile (p99); the axis is logarithmic. " +
      "A p99 far above the median: a few slow samples delay their batches.",
    html`<div class="rows">
      ${measured.map((stage) => histogram(stage, x))}
      <div class="label"></div>
      <div class="axis">${marks}</div>
    </div>`,
  );
}

// ---- More workers

function scalingCard({ stage, shape, throughputs }) {
  const arrow = { rises: "↗", flat: "→", falls: "↘" }[shape];
  const most = Math.max(...throughputs.map(([, rate]) => rate));
  const [firstWorkers, firstRate] = throughputs[0];
  const rows = throughputs.map(([workers, rate]) => {
    const ideal = (firstRate * workers) / firstWorkers;
    const mark = ideal <= most && html`<i style="left: ${100 * ratio(ideal, most)}%"></i>`;
    return html`<span>${workers}</span>
      <div class="bar"><b style="width: ${100 * ratio(rate, most)}%"></b>${mark}</div>
      <span>${number(rate)}</span>`;
  });
  return html`<div class="scaling" style="${colour(stage)}">
    <b>${stage}</b><span>${arrow} ${shape}</span>${rows}
  </div>`;
}

function scalingSection() {
  if (!scalings.length) return "";
  return section(
    "More workers",
    "Samples per second of each stage by itself, by number of workers. " +
      "Line: if each worker added as much as the first.",
    html`<div class="cards">${scalings.map(scalingCard)}</div>`,
  );
}

// ---- The page

document.getElementById("charts").innerHTML = escaped([
  verdictHeader(),
  pipelineSection(),
  splitSection(),
  timelineSection(),
  latencySection(),
  scalingSection(),
]);
document.querySelectorAll("canvas").forEach((canvas, k) => makeInteractive(canvas, groups[k]));
document
  .querySelectorAll(".tools button")
  .forEach((button, k) => button.addEventListener("click", TOOLS[k][2]));
drawTimeline();
window.addEventListener("resize", drawTimeline);
// A canvas does not follow the colours of the page by itself.
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawTimeline);
