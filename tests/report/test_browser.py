"""The report in a real browser: no error on its console, every chart drawn, nothing wider than a phone."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess

import pytest
from PIL import Image

from dshuffle.noninferiority import PairedRuns, PairedTest
from dshuffle.report import write_report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS = (1280, 500, 390)
LEAST_WINDOW = 500
"""Pixels. A window is not narrower, but a frame in it may be."""

QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--enable-logging=stderr",
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian: apt install chromium)"),
]


def browse(page, folder):
    """What a page has become, and what the console said, by width."""
    # The page itself notes what a person would see: whether anything sticks out, and where the charts are.
    watch = """<script>addEventListener("load", () => setTimeout(() => {
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
    }, 2000))</script></body>"""
    page.write_text(page.read_text().replace("</body>", watch))
    found = {}
    for width in WIDTHS:
        done = subprocess.run(
            [
                str(CHROMIUM),
                *QUIET,
                f"--user-data-dir={folder / str(width)}",
                f"--window-size={max(LEAST_WINDOW, width)},900",
                "--virtual-time-budget=8000",
                "--dump-dom",
                (page if width >= LEAST_WINDOW else framed(page, folder, width)).as_uri(),
            ],
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
        )
        found[width] = done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return found


def framed(page, folder, width):
    """A page with a frame that is narrower than a window can be. It becomes what the page in the frame tells it."""
    tells = """<script>addEventListener("load", () => setTimeout(
        () => parent.postMessage(document.documentElement.innerHTML, "*"), 3500))</script></body>"""
    (folder / "inner.html").write_text(page.read_text().replace("</body>", tells))
    frame = folder / "outer.html"
    frame.write_text(
        f"""<body style="margin: 0"><iframe src="inner.html" style="border: 0" width="{width}" height="900"></iframe>
        <script>addEventListener("message", (told) => {{ document.documentElement.innerHTML = told.data; }})</script>"""
    )
    return frame


def colours_on(page, folder, width, *options):
    """The colours of all pixels of a picture of a page. A frame has the width."""
    frame = folder / "frame.html"
    frame.write_text(
        f"<body style='margin: 0'><iframe src='{page.name}' style='border: 0' width='{width}' height='4200'>"
    )
    subprocess.run(
        [
            str(CHROMIUM),
            *QUIET,
            *options,
            f"--user-data-dir={folder / 'pictures'}",
            f"--window-size={max(LEAST_WINDOW, width)},4200",
            "--virtual-time-budget=8000",
            f"--screenshot={folder / 'picture.png'}",
            frame.as_uri(),
        ],
        capture_output=True,
        timeout=100,
        check=True,
    )
    with Image.open(folder / "picture.png") as picture:
        counts = picture.convert("RGB").getcolors(picture.width * picture.height)
    return {f"#{red:02X}{green:02X}{blue:02X}": count for count, (red, green, blue) in counts}


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True])
def test_a_picture_has_the_colours_of_its_page(tested, tmp_path, width, dark):
    page = write_report(tested, tmp_path)
    scheme = "--blink-settings=preferredColorScheme=" + ("0" if dark else "1")
    shown = colours_on(page, tmp_path, width, scheme)
    light, of_dark = page.read_text().split("prefers-color-scheme: dark")[:2]
    # A swatch has about a hundred pixels, a bar in a chart more.
    for name in (*(f"w{place}" for place in range(len(tested.ways))), "waiting", "training"):
        here, there = (re.search(rf"--{name}: (#\w+)", part)[1].upper() for part in (light, of_dark))
        expected, absent = (there, here) if dark else (here, there)
        assert shown.get(expected, 0) > 50
        assert shown.get(absent, 0) == 0


def test_a_shadow_shows_where_a_table_goes_on(comparison, tmp_path):
    page = write_report(comparison, tmp_path)
    light = "--blink-settings=preferredColorScheme=1"
    shade, _ = re.findall(r"--shade: (#\w+)", page.read_text())
    assert colours_on(page, tmp_path, 390, light).get(shade.upper(), 0) > 500
    assert colours_on(page, tmp_path, 1280, light).get(shade.upper(), 0) == 0


@pytest.fixture(scope="module")
def tested(comparison):
    runs = PairedRuns(
        test=PairedTest("loss", margin=0.1, pairs=5), reference=(1.0,) * 5, way=(1.01, 1.02, 0.99, 1.0, 9.0)
    )
    ways = (dataclasses.replace(comparison.ways[0], pairs={"models": runs}), *comparison.ways[1:])
    return dataclasses.replace(comparison, ways=ways)


@pytest.fixture(scope="module")
def opened(tested, tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    return browse(write_report(tested, folder), folder)


def complaints(console):
    # Anything that a console shows as an error or a warning does not pass.
    return [line for line in console if re.search(r"error|warn|failed|uncaught", line, re.IGNORECASE)]


@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_draws_everything_and_complains_of_nothing(opened, width):
    document, console = opened[width]
    assert complaints(console) == []
    [body] = re.findall(r"<body data-[^>]*>", document)
    facts = dict(re.findall(r'data-(\w+)="(-?\d+)"', body))
    assert int(facts["drawn"]) == document.count("<figure>") == 3
    assert int(facts["sticks"]) <= 0
    assert int(facts["lost"]) == 0, "what is beyond the edge can be scrolled to"
    assert int(facts["folded"]) == document.count("<details") >= 4
