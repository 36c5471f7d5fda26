"""The report in a real browser: no error on its console, every chart drawn, nothing wider than a phone."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from PIL import Image

from dshuffle.report import write_report

from .conftest import with_pairs

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS = (1280, 390)
QUIET = "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking hide-scrollbars"
QUIET += " disable-component-update disable-sync enable-logging=stderr virtual-time-budget=8000"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian: apt install chromium)"),
]

WATCH = """<script>addEventListener("load", () => setTimeout(() => {
    document.body.dataset.folded = document.querySelectorAll("details:not([open])").length;
    for (const folded of document.querySelectorAll("details")) folded.open = true;
    document.body.dataset.drawn = [...document.querySelectorAll("figure")].filter((figure) => {
        const marks = figure.querySelectorAll(".bar b, .marks s, polyline");
        const frame = figure.getBoundingClientRect();
        return marks.length > 0 && [...marks].every((mark) => {
            const box = mark.getBoundingClientRect();
            return box.left >= frame.left && box.right <= frame.right;
        }) && frame.height > 100;
    }).length;
    const scrolls = (one) => one && (getComputedStyle(one).overflowX === "auto" || scrolls(one.parentElement));
    document.body.dataset.lost = [...document.querySelectorAll("main *")].filter(
        (one) => one.getBoundingClientRect().right > innerWidth && !scrolls(one)).length;
    document.body.dataset.sticks = document.documentElement.scrollWidth - innerWidth;
    setTimeout(() => parent.postMessage(document.documentElement.innerHTML, "*"), 1500)
}, 2000))</script></body>"""
"""The page itself notes what a person would see: whether anything sticks out, and where the charts are."""

HEARD = (
    """<script>addEventListener("message", (told) => { document.documentElement.innerHTML = told.data; })</script>"""
)


def browse(page, width, height, *options, frame=""):
    """Open a page in a frame, which can be narrower than a window."""
    outer = page.with_name(f"outer-{width}.html")
    style = f"src='{page.name}' style='border: 0' width='{width}' height='{height}'"
    outer.write_text(f"<body style='margin: 0'><iframe {style}></iframe>{frame}")
    window = [f"--user-data-dir={page.parent / str(width)}", f"--window-size={max(500, width)},{height}"]
    command = [str(CHROMIUM), *(f"--{option}" for option in (*QUIET.split(), *options)), *window, outer.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)


def colours_on(page, width, *options):
    """The colours of all pixels of a picture of a page."""
    picture = page.with_name("picture.png")
    browse(page, width, 4200, f"screenshot={picture}", *options)
    with Image.open(picture) as opened:
        counts = opened.convert("RGB").getcolors(opened.width * opened.height)
    return {f"#{red:02X}{green:02X}{blue:02X}": count for count, (red, green, blue) in counts}


@pytest.fixture(scope="module")
def tested(comparison):
    return with_pairs(comparison, [comparison.ways[0].label], (1.01, 1.02, 0.99, 1.0, 9.0), metric="loss", margin=0.1)


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_a_picture_has_the_colours_of_its_page(tested, tmp_path, width, dark):
    page = write_report(tested, tmp_path)
    shown = colours_on(page, width, f"blink-settings=preferredColorScheme={0 if dark else 1}")
    light, of_dark = page.read_text().split("prefers-color-scheme: dark")[:2]
    # A swatch has about a hundred pixels, a bar in a chart more.
    for name in (*(f"w{place}" for place in range(len(tested.ways))), "waiting", "training"):
        here, there = (re.search(rf"--{name}: (#\w+)", part)[1].upper() for part in (light, of_dark))
        expected, absent = (there, here) if dark else (here, there)
        assert shown.get(expected, 0) > 50
        assert shown.get(absent, 0) == 0
    # A shadow shows where a table goes on.
    shade = re.findall(r"--shade: (#\w+)", page.read_text())[dark].upper()
    assert (shown.get(shade, 0) > 500) == (width == 390)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_draws_everything_and_complains_of_nothing(tested, tmp_path, width):
    page = write_report(tested, tmp_path)
    page.write_text(page.read_text().replace("</body>", WATCH))
    done = browse(page, width, 900, "dump-dom", frame=HEARD)
    # Anything that a console shows as an error or a warning does not pass.
    assert not [
        line for line in done.stderr.splitlines() if re.search(r"CONSOLE.*(error|warn|failed|uncaught)", line, re.I)
    ]
    [body] = re.findall(r"<body data-[^>]*>", done.stdout)
    facts = dict(re.findall(r'data-(\w+)="(-?\d+)"', body))
    assert int(facts["drawn"]) == done.stdout.count("<figure>") == 3
    assert int(facts["sticks"]) <= 0
    assert int(facts["lost"]) == 0, "what is beyond the edge can be scrolled to"
    assert int(facts["folded"]) == done.stdout.count("<details") >= 4
