"""A profile as text, as a trace and as a page; the page in a real browser."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import re
from collections import defaultdict

import pytest

from spdl_torch._profiling import Headroom, Profile, Scaling, Span
from spdl_torch._profiling._report import report
from spdl_torch._profiling._table import line, table
from spdl_torch._profiling._trace import lanes, trace
from spdl_torch._stats import LoaderStats, LoopStats, StageStats
from spdl_torch._verdict import Verdict

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


def stage(name, width=2, *, spans=(), elapsed=2.0, cpu=0.9, queued=0.0, starved=0.1, blocked=0.05):
    """The statistics that belong to some spans."""
    own = sorted(span.seconds for span in spans if span.stage == name)
    whole = (width or 1) * elapsed
    return StageStats(
        name=name,
        width=width,
        elapsed_seconds=elapsed,
        num_samples=len(own),
        busy_seconds=sum(own),
        cpu_seconds=cpu * sum(own),
        queued_seconds=queued * sum(own),
        starved_seconds=starved * whole,
        blocked_seconds=blocked * whole,
        num_in_flight=1,
        mean_seconds=sum(own) / max(len(own), 1),
        p50_seconds=own[len(own) // 2] if own else 0.0,
        p99_seconds=own[int(0.99 * len(own))] if own else 0.0,
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
            stage("load", 16, spans=spans, elapsed=elapsed, cpu=0.04, starved=0.0, blocked=0.04),
            stage("preprocess", 2, spans=spans, elapsed=elapsed, cpu=0.8, queued=0.1, starved=0.2),
            stage("collate", 2, spans=spans, elapsed=elapsed, starved=0.0, blocked=0.0),
            stage("transfer", 1, spans=spans, elapsed=elapsed, cpu=0.2, starved=0.9),
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


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if not CHROMIUM.exists():
        pytest.skip(f"needs {CHROMIUM}")
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture
def page(tmp_path):
    """Writes a page for the browser."""

    def write(profile):
        path = tmp_path / "report.html"
        path.write_text(report(profile), "utf-8")
        return path

    return write


# -- text -----------------------------------------------------------------------------------------


def test_the_table_begins_with_the_verdict_and_has_a_row_for_each_stage():
    lines = table(profile()).splitlines()
    assert lines[0].startswith("io-bound: 15.2 of 16 load workers busy")
    assert lines[1] == "Raise num_io_workers (now 16)."
    rows = [row.split()[0] for row in lines[4:8]]
    assert rows == ["load", "preprocess", "collate", "transfer"]
    assert len({len(row) for row in lines[3:8]}) == 1  # The columns are aligned.


def test_the_table_has_units_that_fit():
    load = stage("load", 4, spans=[Span("load", "load-0", 0.0, 0.0183, 0, 1, None)], elapsed=1.0)
    quick = stage("collate", 1, spans=[Span("collate", "load-0", 0.0, 8.5e-5, 0, 1, None)])
    text = table(profile((), stages=(load, quick)))
    assert re.search(r"load +4 +sample +1\.00 +0\.0 +0\.0 +10 % +5 %( +18\.3 ms){3}", text)
    assert re.search(r"collate +1 +batch +0\.50 .*( +85\.0 µs){3}", text)


def test_the_table_says_how_stages_scale_and_what_there_is_to_gain():
    text = table(profile())
    assert "preprocess  1: 655/s  2: 1,204/s  4: 1,190/s  rises" in text
    assert "16.2 batches/s would be 39.4 (2.43 times)" in text


@every_profile
def test_the_table_fits_a_terminal(make):
    lines = table(make()).splitlines()
    assert max(map(len, lines)) <= 100
    assert not any(row != row.rstrip() or "\x1b" in row for row in lines)


def test_many_measurements_are_wrapped_between_two_of_them():
    many = Scaling("load", tuple((2**k, 123.4 * 2**k) for k in range(14)))
    lines = table(profile(scalings=(many,))).splitlines()
    assert max(map(len, lines)) <= 100
    assert " ".join(lines).count("/s  ") >= 12
    assert not any(row.rstrip().endswith(":") for row in lines[-2:])


def test_a_line_for_a_log():
    stages = (
        dataclasses.replace(stage("load", 16, elapsed=1.0), busy_seconds=3.1),
        dataclasses.replace(stage("preprocess", 2, elapsed=1.0), busy_seconds=2.0),
        dataclasses.replace(stage("collate", 2, elapsed=1.0), busy_seconds=0.1),
    )
    loop = LoopStats(120, 0.25, 0.1, 3.6, 0.0)
    stats = profile((), stages=stages, loop=loop, elapsed_seconds=3.85, num_ready=4, window=4).stats
    assert line(stats) == (
        "batch 120 · 31.7 batches/s · waited 4 % · load 3.1/16 busy · preprocess 2.0/2 · "
        "collate 0.1 · 4/4 ready"
    )


@every_profile
def test_a_line_is_one_line(make):
    assert "\n" not in line(make().stats)


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


@every_profile
def test_a_trace_is_what_viewers_read(make):
    check_trace(trace(make()))


def test_the_checker_of_traces_finds_what_is_wrong():
    good = trace(overlapping())
    event = next(event for event in good["traceEvents"] if event["ph"] == "X")
    for change in ({"dur": -1.0}, {"tid": 999}, {"tid": "1"}, {"ts": math.nan}, {"dur": 1e7}):
        events = [*good["traceEvents"], event | change]
        with pytest.raises((AssertionError, ValueError)):
            check_trace(good | {"traceEvents": events})


def test_every_span_is_an_event_with_its_batch_and_index():
    span = Span("load", "load-3", 1.5, 0.25, 7, 1, "'a.jpg'")
    events = trace(profile((span,)))["traceEvents"]
    (event,) = [event for event in events if event["ph"] == "X"]
    assert event["args"] == {"batch": 7, "samples": 1, "index": "'a.jpg'"}
    assert (event["ts"], event["dur"], event["cat"]) == (1_500_000, 250_000, "load")


def test_loads_at_the_same_time_get_lanes_of_their_own():
    spans = [Span("load", "load", start, 1.0, 0, 1, None) for start in (0.0, 0.5, 1.0, 1.2, 2.0)]
    assert [lane.name for lane in lanes(tuple(spans))] == ["load (1)", "load (2)", "load (3)"]
    assert [len(lane.spans) for lane in lanes(tuple(spans))] == [3, 1, 1]


def test_collate_within_preprocess_stays_on_its_lane():
    outer = Span("preprocess", "preprocess-0", 0.0, 1.0, 0, 1, None)
    inner = Span("collate", "preprocess-0", 0.8, 0.2, 0, 1, None)
    (lane,) = lanes((inner, outer))
    assert lane.spans == (outer, inner)


def test_lanes_come_loop_first_then_down_the_pipeline_and_by_number():
    stages = ("transfer", "preprocess-10", "preprocess-2", "load-0", "loop")
    spans = [Span(name.split("-")[0], name, 0.0, 1.0, 0, 1, None) for name in stages[:-1]]
    spans.append(Span("wait", "loop", 0.0, 1.0, 0, 0, None))
    assert [lane.name for lane in lanes(tuple(spans))] == [
        "loop",
        "load-0",
        "preprocess-2",
        "preprocess-10",
        "transfer",
    ]


def test_the_trace_counts_batches_that_are_ready():
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
    if (node.closest("script, noscript, title, [hidden]")) continue;
    const style = getComputedStyle(node);
    const ink = luminance(node.closest("svg") ? style.fill : style.color);
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
  for (const picture of document.querySelectorAll("svg")) {
    const outer = picture.getBoundingClientRect();
    const boxes = [...picture.querySelectorAll("text")]
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
  for (const node of document.querySelectorAll(".box, .label, .key-figures div, h1, .advice")) {
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
def test_a_page_needs_nothing_from_elsewhere(make):
    text = report(make())
    addresses = re.findall(r"https?://[^\s\"'`]+", text)
    assert set(addresses) <= {"http://www.w3.org/2000/svg"}  # A name, not an address.
    assert not re.search(r"(?i)\b(src|href|srcset|action|@import|url)\s*[=(]", text)
    assert "default-src 'none'" in text


def test_a_page_without_scripts_has_the_table():
    text = report(profile((), given=Verdict("unknown", "a < b & c.", "Do.")))
    assert "<noscript><pre>a &lt; b &amp; c." in text


def test_nothing_in_a_profile_can_end_the_element_that_holds_it():
    span = Span("load", EVIL, 0.0, 1.0, 0, 1, EVIL)
    text = report(profile((span,), given=Verdict("io-bound", EVIL, EVIL)))
    assert "broken out'</script>" not in text
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert json.loads(data[1])["lanes"][0]["spans"][0][5] == EVIL


def test_an_open_end_of_a_histogram_is_still_json():
    load = dataclasses.replace(stage("load"), histogram=((0.1, 3), (math.inf, 1)))
    text = report(profile((), stages=(load,)))
    assert "[[0.1,3],[null,1]]" in text
    assert "Infinity" not in text.partition('id="data">')[2].partition("</script>")[0]


@every_profile
@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_is_drawn_without_errors_and_fits(browser, page, make, width, scheme):
    path = page(make())
    browser.open(path, width=width, scheme=scheme)
    assert browser.evaluate(f"matchMedia('(prefers-color-scheme: {scheme})').matches")
    assert browser.complaints() == []
    assert browser.requests() == [path.as_uri()]
    assert browser.evaluate("innerWidth") == width
    assert browser.evaluate(OVERFLOW) <= 0
    assert browser.evaluate(CONTRAST) == []
    assert browser.evaluate(OVERLAPS) == []


@every_profile
def test_a_page_has_a_picture_of_everything_that_was_measured(browser, page, make):
    shown = make()
    browser.open(page(shown))

    def number_of(selector):
        return browser.evaluate(f"document.querySelectorAll({selector!r}).length")

    stages = shown.stats.stages
    num_stages = len(stages)
    assert number_of(".box") == (num_stages or 1) + 2
    assert number_of(".histogram") == sum(bool(one.histogram) for one in stages)
    assert number_of(".scaling") == len(shown.scalings)
    assert number_of(".headroom") == (shown.headroom is not None)
    assert number_of(".over-time") == len({span.stage for span in shown.spans} - {"wait"})
    assert number_of("table") == (2 if stages else 1)
    lanes_drawn = browser.evaluate(
        "[...document.querySelectorAll('canvas')].map((canvas) => Number(canvas.dataset.lanes))"
    )
    assert sum(lanes_drawn) == len(lanes(shown.spans))
    assert all(share > 0.01 for share in browser.evaluate(PAINTED))
    headline = browser.evaluate("document.querySelector('h1').innerText")
    assert shown.stats.verdict.sentence.split(": ")[-1][1:] in headline


@pytest.mark.parametrize(
    ("make", "marked"),
    [
        (profile, "load"),
        (overlapping, "preprocess"),
        (processes, "workers"),
        (nothing_yet, None),
        (lambda: of_kind("training-bound"), "loop"),
        (lambda: of_kind("window-bound"), "window"),
        (lambda: of_kind("collate-bound", "collate"), "collate"),
        (lambda: of_kind("transfer-bound", "transfer"), "transfer"),
    ],
)
def test_the_bottleneck_is_marked_with_a_word(browser, page, make, marked):
    browser.open(page(make()))
    found = browser.evaluate(
        "[...document.querySelectorAll('.bottleneck')]"
        ".map((node) => [node.dataset.name, node.querySelector('.badge').innerText])"
    )
    assert found == ([[marked, "▼ bottleneck"]] if marked else [])


def test_nothing_in_a_profile_is_run(browser, page):
    span = Span("load", EVIL, 0.0, 1.0, 0, 1, EVIL)
    browser.open(page(profile((span,), given=Verdict(EVIL, f"{EVIL}: {EVIL}", EVIL))))
    assert browser.complaints() == []
    assert browser.evaluate("document.title").startswith("spdl_torch profile")
    assert browser.evaluate("document.scripts.length") == 2


def middle_of(browser, selector):
    return browser.evaluate(
        f"(() => {{ const node = document.querySelector({selector!r});"
        "node.scrollIntoView({ block: 'center' }); const box = node.getBoundingClientRect();"
        "return [box.left, box.top, box.width, box.height]; })()"
    )


def test_pointing_at_a_span_shows_its_batch_index_and_duration(browser, page):
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


def test_dragging_looks_closer_and_a_button_shows_all_again(browser, page):
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


def test_fifty_thousand_spans_are_drawn_at_once(browser, page):
    many = profile(pipeline_spans(780, 32, elapsed=60.0))
    assert len(many.spans) > 50_000
    browser.open(page(many))
    assert browser.complaints() == []
    seconds = browser.evaluate(
        "(() => { const start = performance.now(); draw(); return performance.now() - start; })()"
    )
    assert seconds / 1000 < 2  # A tenth of that, on an idle core.
    load_lanes = browser.evaluate(PAINTED)[1]
    assert load_lanes > 0.8  # They are as dense as they are busy.


# Changes are told to the page with the next frames.
FRAMES = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


def test_the_page_follows_the_width_of_its_window(browser, page):
    browser.open(page(profile()), width=1280)
    browser.resize(400)
    browser.call("Runtime.evaluate", expression=FRAMES, awaitPromise=True)
    assert browser.evaluate("innerWidth") == 400
    assert browser.evaluate(OVERFLOW) <= 0
    assert browser.evaluate("document.querySelector('canvas').width") < 400


def test_lanes_follow_the_colours_of_the_page(browser, page):
    browser.open(page(profile()), scheme="light")
    picture = "document.querySelector('canvas').toDataURL()"
    before = browser.evaluate(picture)
    browser.prefer("dark")
    browser.call("Runtime.evaluate", expression=FRAMES, awaitPromise=True)
    assert browser.evaluate(picture) != before
