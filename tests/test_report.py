"""Profiles as text, as a trace and as a page. The page is opened in a browser."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import re
from collections import defaultdict

import pytest

from spdl_torch import (
    Headroom,
    LoaderStats,
    LoopStats,
    Profile,
    Scaling,
    Span,
    StageStats,
    Verdict,
)

from .browser import CHROMIUM, Browser

# -- profiles made by hand ------------------------------------------------------------------------


IO_BOUND = Verdict(
    "io-bound",
    "io-bound: 15.2 of 16 load workers busy, and they waited 96 % of that, preprocess idle 26 %.",
    "Raise num_io_workers (now 16).",
    "load",
)


@dataclasses.dataclass(frozen=True)
class Judged(LoaderStats):
    """Statistics with a verdict that was chosen."""

    given: Verdict = IO_BOUND

    @property
    def verdict(self):
        return self.given


def histogram_of(seconds):
    counts = defaultdict(int)
    for one in seconds:
        counts[2 ** (math.ceil(8 * math.log2(one)) / 8)] += 1
    return tuple(sorted(counts.items()))


def stage(name, width=2, *, spans=(), elapsed=2.0, cpu=0.9, queued=0.0):
    """Return the statistics that belong to some spans."""
    own = [span.seconds for span in spans if span.stage == name]
    return StageStats(
        name=name,
        width=width,
        elapsed_seconds=elapsed,
        num_samples=len(own),
        busy_seconds=sum(own),
        cpu_seconds=cpu * sum(own),
        queued_seconds=queued * sum(own),
        num_in_flight=1,
        histogram=histogram_of(own),
    )


def pipeline_spans(num_batches=40, batch_size=32, *, num_load=16, num_cpu=2, elapsed=2.0):
    """Samples through load, preprocess, collate and transfer, to a loop that waits for them."""
    rng = random.Random(0)
    spans = []
    free = defaultdict(float)

    def work(stage_name, worker, ready, seconds, batch, num_samples=1, index=None):
        start = max(ready, free[worker])
        free[worker] = start + seconds
        spans.append(Span(stage_name, worker, start, seconds, batch, num_samples, index))
        return free[worker]

    scale = elapsed / (num_batches * batch_size * 0.018 / num_load)
    for batch in range(num_batches):
        made = 0.0
        for place in range(batch_size):
            number = batch * batch_size + place
            worker = min(range(num_load), key=lambda n: free[f"load-{n}"])
            took = scale * 0.012 * rng.lognormvariate(0, 0.45) * (4 if rng.random() < 0.02 else 1)
            index = f"'train/n{number:05}.jpg'"
            loaded = work("load", f"load-{worker}", 0.0, took, batch, index=index)
            worker = min(range(num_cpu), key=lambda n: free[f"preprocess-{n}"])
            took = scale * 0.0014 * rng.lognormvariate(0, 0.2)
            name = f"preprocess-{worker}"
            made = max(made, work("preprocess", name, loaded, took, batch, index=index))
        made = work("collate", "preprocess-0", made, scale * 0.0011, batch, batch_size)
        made = work("transfer", "transfer", made, scale * 0.0006, batch, batch_size)
        asked = free["loop"]
        work("wait", "loop", asked, max(made - asked, 2e-6), batch)
        work("step", "loop", 0.0, scale * 0.012, batch)
    return tuple(spans)


def profile(spans=None, **changes):
    """A realistic profile, some parts of which may be changed."""
    spans = pipeline_spans() if spans is None else spans
    elapsed = max((span.started_seconds + span.seconds for span in spans), default=2.0)
    waits = [span.seconds for span in spans if span.stage == "wait"] or [0.2]
    steps = [span.seconds for span in spans if span.stage == "step"] or [0.1]
    fields = {
        "kind": "thread",
        "is_running": False,
        "elapsed_seconds": elapsed,
        "stages": (
            stage("load", 16, spans=spans, elapsed=elapsed, cpu=0.04),
            stage("preprocess", 2, spans=spans, elapsed=elapsed, cpu=0.8, queued=0.1),
            stage("collate", 2, spans=spans, elapsed=elapsed),
            stage("transfer", 1, spans=spans, elapsed=elapsed, cpu=0.2),
        ),
        "loop": LoopStats(len(steps), sum(waits), waits[0], sum(steps), 0.0003),
        "window": 8,
        "num_ready": 1,
        "num_bytes": 770_000_000,
        "num_bad_samples": 3,
        "num_retries": 0,
        "num_cores": 2,
    }
    parts = {
        "spans": spans,
        "scalings": (
            Scaling("load", ((1, 61.0), (2, 122.0), (4, 240.0), (8, 470.0), (16, 690.0))),
            Scaling("preprocess", ((1, 655.0), (2, 1204.0), (4, 1190.0))),
            Scaling("collate", ((1, 905.0), (2, 700.0))),
        ),
        "headroom": Headroom(16.2, 39.4),
    }
    for name, value in changes.items():
        (parts if name in parts else fields)[name] = value
    return Profile(stats=Judged(**fields), **parts)


MANY = tuple((2**k, 10_123.4 * 1.9**k) for k in range(9))


def iterable():
    spans = tuple(
        Span("iterate", f"iterate-{n % 2}", 0.05 * (n // 2), 0.05, n, 8, None) for n in range(40)
    )
    return profile(
        spans,
        stages=(stage("iterate", 2, spans=spans, elapsed=1.0),),
        scalings=(Scaling("iterate", ((1, 1_089_133.0),)), Scaling("collate", MANY)),
        headroom=None,
    )


def nothing_yet():
    unknown = Verdict("unknown", "unknown: 0 batches are too few to tell.", "Iterate for a while.")
    return profile(
        (),
        elapsed_seconds=0.0,
        stages=(stage("load", 8, elapsed=0.0), stage("preprocess", None, elapsed=0.0)),
        loop=LoopStats(0, 0.0, 0.0, 0.0, 0.0),
        scalings=(),
        headroom=None,
        num_ready=0,
        num_bytes=0,
        given=unknown,
    )


def overlapping():
    """An event loop with eight loads at a time, and an executor that does not say its width."""
    rng = random.Random(1)
    loads = [
        Span("load", "load", 0.02 * n, 0.1 + rng.random() / 10, n // 4, 1, str(n))
        for n in range(90)
    ]
    others = [Span("preprocess", "preprocess", 0.03 * n, 0.07, n // 3, 4, None) for n in range(60)]
    spans = (*loads, *others)
    stages = (stage("load", 64, spans=spans), stage("preprocess", None, spans=spans))
    gil = Verdict("gil-bound", "Without its kind before it.", "An advice.", "preprocess")
    return profile(spans, stages=stages, given=gil)


def processes():
    bound = Verdict("process-bound", "process-bound: the loop waited.", "Raise num_workers.")
    return profile((), kind="multiprocessing", stages=(), scalings=(), headroom=None, given=bound)


def of_kind(kind, stage=None):
    return profile(given=Verdict(kind, f"{kind}: a sentence with figures.", "An advice.", stage))


PROFILES = {
    "realistic": profile,
    "iterable": iterable,
    "nothing yet": nothing_yet,
    "overlapping": overlapping,
    "processes": processes,
    "training-bound": lambda: of_kind("training-bound"),
    "window-bound": lambda: of_kind("window-bound"),
}

every_profile = pytest.mark.parametrize("make", PROFILES.values(), ids=PROFILES)


# -- a browser ------------------------------------------------------------------------------------


in_browser = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if not CHROMIUM.exists():
        pytest.skip(f"needs {CHROMIUM}")
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture
def trace(tmp_path):
    """Return a function that saves a trace and reads it."""

    def saved(profile):
        path = tmp_path / "trace.json"
        profile.save(path)
        return json.loads(path.read_text("utf-8"))

    return saved


@pytest.fixture
def page(tmp_path):
    """Return a function that saves a report."""

    def write(profile):
        path = tmp_path / "report.html"
        profile.save(path)
        return path

    return write


# -- text -----------------------------------------------------------------------------------------


def test_table_begins_with_verdict():
    """The verdict comes first, then one aligned row for each stage."""
    lines = str(profile()).splitlines()
    assert lines[0].startswith("io-bound: 15.2 of 16 load workers busy")
    assert lines[1] == "Raise num_io_workers (now 16)."
    rows = [row.split()[0] for row in lines[4:8]]
    assert rows == ["load", "preprocess", "collate", "transfer"]
    assert len({len(row) for row in lines[3:8]}) == 1


def test_table_chooses_units():
    """Durations are printed in the unit that suits them."""
    load = stage("load", 4, spans=[Span("load", "load-0", 0.0, 0.0183, 0, 1, None)], elapsed=1.0)
    quick = stage("collate", 1, spans=[Span("collate", "load-0", 0.0, 8.5e-5, 0, 1, None)])
    text = str(profile((), stages=(load, quick)))
    assert re.search(r"load +4 +sample +1\.00 +0\.0 +0\.0 +18\.3 ms( +1[78]\.[0-9] ms){2}", text)
    assert re.search(r"collate +1 +batch +0\.50 .* 85\.0 µs( +8[0-9]\.[0-9] µs){2}", text)


def test_table_has_scalings_and_headroom():
    """The table says how each stage scales and what a faster loader could gain."""
    text = str(profile())
    assert "preprocess  1: 655/s  2: 1,204/s  4: 1,190/s  rises" in text
    assert "16.2 batches/s would be 39.4 (2.43 times)" in text


@every_profile
def test_table_fits_a_terminal(make):
    """No line is longer than 100 characters, and none contains colour codes."""
    lines = str(make()).splitlines()
    assert max(map(len, lines)) <= 100
    assert not any(row != row.rstrip() or "\x1b" in row for row in lines)


def test_long_scalings_are_wrapped():
    """Lines are broken between two measurements only."""
    many = Scaling("load", tuple((2**k, 123.4 * 2**k) for k in range(14)))
    lines = str(profile(scalings=(many,))).splitlines()
    assert max(map(len, lines)) <= 100
    assert " ".join(lines).count("/s  ") >= 12
    assert not any(row.rstrip().endswith(":") for row in lines[-2:])


# -- the trace ------------------------------------------------------------------------------------

NUMBER = (int, float)
FIELDS = {
    "X": {
        "name": str,
        "cat": str,
        "ts": NUMBER,
        "dur": NUMBER,
        "pid": int,
        "tid": int,
        "args": dict,
    },
    "M": {"name": str, "pid": int, "tid": int, "args": dict},
    "C": {"name": str, "ts": NUMBER, "pid": int, "tid": int, "args": dict},
}
METADATA = {"process_name": ("name", str), "thread_name": ("name", str)}
METADATA["thread_sort_index"] = ("sort_index", int)


def check_trace(document):
    """Strictly: what the format allows, with nothing besides that we use of it."""
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert set(document) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert document["displayTimeUnit"] in ("ms", "ns")
    by_phase = defaultdict(list)
    for event in document["traceEvents"]:
        fields = FIELDS[event["ph"]]
        assert set(event) == {"ph", *fields}, event
        for name, kinds in fields.items():
            assert isinstance(event[name], kinds), event
            assert not isinstance(event[name], bool), event
        by_phase[event["ph"]].append(event)
    for event in by_phase["M"]:
        name, kind = METADATA[event["name"]]
        assert isinstance(event["args"][name], kind)
    for event in by_phase["C"]:
        assert all(isinstance(value, NUMBER) and value >= 0 for value in event["args"].values())
    names = [e["tid"] for e in by_phase["M"] if e["name"] == "thread_name"]
    assert len(names) == len(set(names))
    threads = defaultdict(list)
    for event in by_phase["X"]:
        assert event["dur"] >= 0
        threads[event["tid"]].append(event)
    assert set(threads) <= set(names)
    for events in threads.values():
        check_nesting(events)


def check_nesting(events):
    """One within another or one after the other, by the sums that a viewer makes."""
    under_way = []
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        start, end = event["ts"], event["ts"] + event["dur"]
        while under_way and under_way[-1][1] <= start:
            under_way.pop()
        if under_way:
            assert end <= under_way[-1][1], event
            assert event["name"] != under_way[-1][0], event  # No stage is a part of itself.
        under_way.append((event["name"], end))


def lanes_in(document):
    """Return the spans of each lane of a trace, in the order of a viewer."""
    events = document["traceEvents"]
    names = [(e["tid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"]
    return {
        name: [(e["name"], e["ts"]) for e in events if e["ph"] == "X" and e["tid"] == thread]
        for thread, name in sorted(names)
    }


@every_profile
def test_trace_is_valid(trace, make):
    """A trace has only fields that the format allows, with spans that nest."""
    check_trace(trace(make()))


def test_trace_checker_finds_errors(trace):
    """The checker above fails for events that a viewer would reject."""
    good = trace(overlapping())
    event = next(event for event in good["traceEvents"] if event["ph"] == "X")
    for change in ({"dur": -1.0}, {"tid": 999}, {"tid": "1"}, {"ts": math.nan}, {"dur": 1e7}):
        events = [*good["traceEvents"], event | change]
        with pytest.raises((AssertionError, ValueError)):
            check_trace(good | {"traceEvents": events})


def test_span_becomes_one_event(trace):
    """An event has the batch and the index of its span."""
    span = Span("load", "load-3", 1.5, 0.25, 7, 1, "'a.jpg'")
    events = trace(profile((span,)))["traceEvents"]
    (event,) = [event for event in events if event["ph"] == "X"]
    assert event["args"] == {"batch": 7, "samples": 1, "index": "'a.jpg'"}
    assert (event["ts"], event["dur"], event["cat"]) == (1_500_000, 250_000, "load")


def test_overlapping_loads_get_own_lanes(trace):
    """Loads that run at the same time are drawn on several lanes."""
    spans = [Span("load", "load", start, 1.0, 0, 1, None) for start in (0.0, 0.5, 1.0, 1.2, 2.0)]
    lanes = lanes_in(trace(profile(tuple(spans))))
    assert {name: len(own) for name, own in lanes.items()} == {
        "load (1)": 3,
        "load (2)": 1,
        "load (3)": 1,
    }


def test_lanes_follow_the_pipeline(trace):
    """The loop comes first, then the stages in their order and the workers by number."""
    stages = ("transfer", "preprocess-10", "preprocess-2", "load-0", "loop")
    spans = [Span(name.split("-")[0], name, 0.0, 1.0, 0, 1, None) for name in stages[:-1]]
    spans.append(Span("wait", "loop", 0.0, 1.0, 0, 0, None))
    assert list(lanes_in(trace(profile(tuple(spans))))) == [
        "loop",
        "load-0",
        "preprocess-2",
        "preprocess-10",
        "transfer",
    ]


def test_trace_counts_ready_batches(trace):
    """A counter shows how many batches wait for the loop."""
    spans = (
        Span("collate", "preprocess-0", 0.0, 1.0, 0, 4, None),
        Span("collate", "preprocess-0", 1.0, 1.0, 1, 4, None),
        Span("wait", "loop", 0.0, 2.5, 0, 0, None),
        Span("wait", "loop", 3.0, 0.1, 1, 0, None),
        Span("wait", "loop", 4.0, 0.1, 2, 0, None),  # There was no third batch.
    )
    events = [event for event in trace(profile(spans))["traceEvents"] if event["ph"] == "C"]
    assert [(event["ts"] / 1e6, event["args"]["batches"]) for event in events] == [
        (1.0, 1),
        (2.0, 2),
        (2.5, 1),
        (3.1, 0),
    ]


# -- the page -------------------------------------------------------------------------------------

EVIL = "</script><script>document.title = 'broken out'</script><!-- {{table}} \u2028 & ]]>"

CONTRAST = """
(() => {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 1;
  const pen = canvas.getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    pen.clearRect(0, 0, 1, 1);
    pen.fillStyle = colour;
    pen.fillRect(0, 0, 1, 1);
    return [...pen.getImageData(0, 0, 1, 1).data];
  };
  const luminance = (colour) => {
    const [r, g, b] = rgba(colour).map((c) => c / 255)
      .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const grounds = (node) => {
    const fill = node.closest(".badge") ? null : node.closest(".box")?.querySelector(".fill");
    const found = fill ? [getComputedStyle(fill).backgroundColor] : [];
    for (let up = node; up; up = up.parentElement) {
      const colour = getComputedStyle(up).backgroundColor;
      if (rgba(colour)[3] === 255) return [...found, colour];
    }
    return [...found, "white"];
  };
  const bad = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const node = texts.currentNode.parentElement;
    if (!texts.currentNode.data.trim()) continue;
    if (node.closest("script, title, [hidden]")) continue;
    const style = getComputedStyle(node);
    const ink = luminance(style.color);
    for (const ground of grounds(node)) {
      const other = luminance(ground);
      const contrast = (Math.max(ink, other) + 0.05) / (Math.min(ink, other) + 0.05);
      if (contrast < 4.5) bad.push(`${texts.currentNode.data}: ${contrast.toFixed(2)}`);
    }
  }
  return bad;
})()
"""
"""Texts with less contrast than WCAG's level AA asks for."""

OVERLAPS = """
(() => {
  const bad = [];
  for (const axis of document.querySelectorAll(".axis")) {
    const outer = axis.getBoundingClientRect();
    const boxes = [...axis.querySelectorAll("span")]
      .map((node) => [node, node.getBoundingClientRect()]);
    boxes.forEach(([node, a], k) => {
      const isCut = a.left < outer.left - 1 || a.right > outer.right + 1;
      if (isCut) bad.push(`${node.textContent} is cut`);
      for (const [other, b] of boxes.slice(k + 1)) {
        if (a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom)
          bad.push(`${node.textContent} on ${other.textContent}`);
      }
    });
  }
  const texts = ".box, .label, .key-figures div, .scaling, h1, .advice";
  for (const node of document.querySelectorAll(texts)) {
    if (node.scrollWidth > node.clientWidth + 1) bad.push(`${node.textContent} is too wide`);
  }
  return bad;
})()
"""
"""Labels that collide, are cut off, or burst their box."""

OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"

PAINTED = """
[...document.querySelectorAll("canvas")].map((canvas) => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let painted = 0;
  for (let k = 3; k < data.length; k += 4) painted += data[k] > 100;
  return painted / (data.length / 4);
})
"""


@every_profile
def test_page_loads_nothing(page, make):
    """A page contains no address that a browser would load something from."""
    text = page(make()).read_text("utf-8")
    assert re.findall(r"https?://", text) == []
    assert not re.search(r"(?i)\b(src|href|srcset|action|@import|url)\s*[=(]", text)
    assert "default-src 'none'" in text


def test_page_contains_the_table(page):
    """The table is readable without scripts too."""
    text = page(profile((), given=Verdict("unknown", "a < b & c.", "Do."))).read_text("utf-8")
    assert ">a &lt; b &amp; c." in text.partition("<script")[0]


def test_data_cannot_end_its_element(page):
    """Text from a profile cannot break out of the script element that holds it."""
    span = Span("load", EVIL, 0.0, 1.0, 0, 1, EVIL)
    path = page(profile((span,), given=Verdict("io-bound", EVIL, EVIL)))
    text = path.read_text("utf-8")
    assert "broken out'</script>" not in text
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert json.loads(data[1])["lanes"][0]["spans"][0][5] == EVIL


def test_open_histogram_is_json(page):
    """The last bucket of a histogram, which has no upper end, does not break the JSON."""
    load = dataclasses.replace(stage("load"), histogram=((0.1, 3), (math.inf, 1)))
    text = page(profile((), stages=(load,))).read_text("utf-8")
    assert "[[0.1,3],[null,1]]" in text
    assert "Infinity" not in text.partition('id="data">')[2].partition("</script>")[0]


@in_browser
@every_profile
@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_fits_without_errors(browser, page, make, width, scheme):
    """A page has no error, no request, no overflow, no colliding labels and enough contrast."""
    path = page(make())
    browser.open(path, width=width, scheme=scheme)
    assert browser.evaluate(f"matchMedia('(prefers-color-scheme: {scheme})').matches")
    assert browser.complaints() == []
    assert browser.requests() == [path.as_uri()]
    assert browser.evaluate("innerWidth") == width
    assert browser.evaluate(OVERFLOW) <= 0
    assert browser.evaluate(CONTRAST) == []
    assert browser.evaluate(OVERLAPS) == []


@in_browser
@every_profile
def test_page_shows_every_measurement(browser, page, trace, make):
    """Each stage, histogram, scaling and lane is drawn."""
    shown = make()
    browser.open(page(shown))

    def number_of(selector):
        return browser.evaluate(f"document.querySelectorAll({selector!r}).length")

    stages = shown.stats.stages
    assert number_of(".pipeline .box") == (len(stages) or 1) + 1
    assert number_of(".split") == len(stages) + bool(shown.stats.loop.num_batches)
    assert number_of(".histogram") == sum(bool(one.histogram) for one in stages)
    assert number_of(".scaling") == len(shown.scalings)
    figures = browser.evaluate("document.querySelector('.key-figures').innerText")
    assert ("if loading took no time" in figures) == (shown.headroom is not None)
    lanes_drawn = browser.evaluate(
        "[...document.querySelectorAll('canvas')].map((canvas) => Number(canvas.dataset.lanes))"
    )
    assert sum(lanes_drawn) == len(lanes_in(trace(shown)))
    assert all(share > 0.01 for share in browser.evaluate(PAINTED))
    headline = browser.evaluate("document.querySelector('h1').innerText")
    assert shown.stats.verdict.sentence.split(": ")[-1][1:] in headline


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, " · worker threads in this process"),
        ({"num_processes": 1}, " · worker threads in 1 child process"),
        ({"num_processes": 3}, " · worker threads in 3 child processes"),
        ({"kind": "caller"}, ""),
    ],
)
def test_page_says_where_workers_live(tmp_path, changes, words):
    """The page has in its data where the workers live, and shows it."""
    path = tmp_path / "report.html"
    profile(**changes).save(path)
    assert json.dumps({"home": words}, separators=(",", ":"))[1:-1] in path.read_text()
    assert "${home}" in path.read_text()


@in_browser
@pytest.mark.parametrize(
    ("make", "marked"),
    [
        (profile, "load"),
        (overlapping, "preprocess"),
        (processes, "workers"),
        (nothing_yet, None),
        (lambda: of_kind("training-bound"), "loop"),
        (lambda: of_kind("gil-bound"), "loop"),
        (lambda: of_kind("window-bound"), "window"),
        (lambda: of_kind("collate-bound", "collate"), "collate"),
        (lambda: of_kind("transfer-bound", "transfer"), "transfer"),
    ],
)
def test_bottleneck_is_marked(browser, page, make, marked):
    """The box that the verdict is about has a badge with a word."""
    browser.open(page(make()))
    found = browser.evaluate(
        "[...document.querySelectorAll('.bottleneck')]"
        ".map((node) => [node.dataset.name, node.querySelector('.badge').innerText])"
    )
    assert found == ([[marked, "▼ bottleneck"]] if marked else [])


@in_browser
def test_markup_in_data_is_text(browser, page):
    """Markup in worker names, indices and verdicts is shown and not run."""
    evil = f"<img src=x onerror=\"document.title = 'run'\">{EVIL}"
    span = Span("load", evil, 0.0, 1.0, 0, 1, evil)
    browser.open(page(profile((span,), given=Verdict(evil, f"{evil}: {evil}", evil))))
    assert browser.complaints() == []
    assert browser.evaluate("document.title").startswith("spdl_torch profile")
    assert browser.evaluate("document.scripts.length") == 2
    assert browser.evaluate("document.images.length") == 0


def middle_of(browser, selector):
    return browser.evaluate(
        f"(() => {{ const node = document.querySelector({selector!r});"
        "node.scrollIntoView({ block: 'center' }); const box = node.getBoundingClientRect();"
        "return [box.left, box.top, box.width, box.height]; })()"
    )


@in_browser
def test_pointing_shows_span_details(browser, page):
    """Pointing at a span shows its batch, index and duration."""
    spans = (
        Span("load", "load-0", 0.0, 0.25, 7, 1, "'<b>cat</b>.jpg'"),
        Span("load", "load-0", 0.5, 0.5, 8, 1, None),
    )
    browser.open(page(profile(spans)))
    left, top, width, height = middle_of(browser, "canvas")
    browser.hover(left + 0.1 * width, top + height / 2)
    text = browser.evaluate("tip.textContent")
    assert text == "load-0: load 250 ms\nbatch 7\nindex '<b>cat</b>.jpg'\nat 0 s"
    browser.hover(left + 0.4 * width, top + height / 2)
    assert browser.evaluate("tip.hidden")


@in_browser
def test_dragging_zooms_in(browser, page):
    """Dragging over a lane zooms in, and a button shows all again."""
    browser.open(page(profile()))
    left, top, width, height = middle_of(browser, "canvas")
    y = top + height / 2
    browser.drag((left + 0.25 * width, y), (left + 0.5 * width, y))
    share = "(view.end - view.start) / (whole.end - whole.start)"
    assert browser.evaluate(share) == pytest.approx(0.25, abs=0.01)
    assert browser.evaluate(OVERLAPS) == []
    browser.evaluate("document.querySelector('.tools button:last-child').click()")
    assert browser.evaluate(share) == 1
    assert browser.complaints() == []


@in_browser
def test_fifty_thousand_spans_are_quick(browser, page):
    """A timeline of fifty thousand spans is drawn in less than two seconds."""
    many = profile(pipeline_spans(780, 32, elapsed=60.0))
    assert len(many.spans) > 50_000
    browser.open(page(many))
    assert browser.complaints() == []
    browser.evaluate("const start = performance.now(); drawTimeline();")
    milliseconds = browser.evaluate("performance.now() - start")
    assert milliseconds / 1000 < 2  # A tenth of that, on an idle core.
    load_lanes = browser.evaluate(PAINTED)[1]
    assert load_lanes > 0.8  # They are as dense as they are busy.


# The page is told about changes with the next frames.
FRAMES = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


@in_browser
def test_page_follows_window_width(browser, page):
    """The timeline is drawn again when the window gets another width."""
    browser.open(page(profile()), width=1280)
    browser.resize(400)
    browser.call("Runtime.evaluate", expression=FRAMES, awaitPromise=True)
    assert browser.evaluate("innerWidth") == 400
    assert browser.evaluate(OVERFLOW) <= 0
    assert browser.evaluate("document.querySelector('canvas').width") < 400


@in_browser
def test_lanes_follow_colour_scheme(browser, page):
    """The timeline is drawn again when the colour scheme changes."""
    browser.open(page(profile()), scheme="light")
    picture = "document.querySelector('canvas').toDataURL()"
    before = browser.evaluate(picture)
    browser.prefer("dark")
    browser.call("Runtime.evaluate", expression=FRAMES, awaitPromise=True)
    assert browser.evaluate(picture) != before
