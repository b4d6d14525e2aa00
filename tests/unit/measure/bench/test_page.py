"""The page: whole in itself, safe with any names, and looked at in a real browser."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_reports import hostile, outcome, report, usual
from parsed import Parsed
from PIL import Image, ImageColor

from shardkit.errors import UsageError
from shardkit.measure.bench import page as page_room
from shardkit.measure.bench import plot
from shardkit.measure.bench.page import page, require_page, save_page

_MEASURE = """<script>addEventListener("load", () => {
  const root = document.documentElement, wide = [];
  for (const each of document.querySelectorAll("body *"))
    if (!each.closest(".scroll") && each.getBoundingClientRect().right > innerWidth + 1)
      wide.push(each.tagName);
  const told = document.createElement("pre");
  told.id = "measured";
  told.textContent = JSON.stringify({width: innerWidth, content: root.scrollWidth, wide,
    loaded: performance.getEntriesByType("resource").map(each => each.name),
    rows: document.querySelectorAll("tbody tr").length});
  document.body.appendChild(told);
});</script>"""


@pytest.mark.parametrize("made", [usual, hostile])
def test_it_is_whole_in_itself(made: Any) -> None:
    text = page(made())
    parsed = Parsed(text)

    assert all(link.startswith(("#", "data:")) for link in parsed.links), parsed.links
    assert not set(parsed.tags) & {"script", "iframe", "object", "embed", "img", "base"}
    assert "@import" not in text
    assert set(re.findall(r"url\((.)", text)) <= {"#"}


def test_it_says_what_was_found() -> None:
    text = Parsed(page(usual())).text

    assert "Converting makes loading 2.0 x as fast from memory and 3.0 x as fast" in text
    for told in (
        "photos",
        "plain:num_workers=2",
        "2.00 x",
        "40..62",
        "300",
        "shardkit bench photos",
    ):
        assert told in text


def test_names_are_text_and_nothing_else() -> None:
    text = page(hostile())
    parsed = Parsed(text)

    assert "<script>document.title=" not in text
    assert "<script>document.title='broken'</script>0" in parsed.text
    assert "{{ 7 * 7 }}" in parsed.text
    assert "failed: failed\\non" in parsed.text
    assert parsed.tags.count("tbody") == 41


def test_without_matplotlib_there_is_no_plot_and_it_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(page_room, "has_matplotlib", lambda: False)

    text = page(usual())

    assert "<svg" not in text
    assert "matplotlib is not installed" in Parsed(text).text


def test_where_nothing_was_measured_it_says_so() -> None:
    parsed = Parsed(page(report(outcome("a", problem="gone"))))

    assert "Nothing could be measured." in parsed.text
    assert "There is no plot: nothing was measured." in parsed.text
    assert "failed: gone" in parsed.text


def test_a_page_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    require_page(None)
    with pytest.raises(UsageError, match="there is no folder"):
        require_page(tmp_path / "nowhere" / "page.html")
    with pytest.raises(UsageError, match="this is a folder"):
        require_page(tmp_path)


def test_only_pages_of_ours_are_replaced(tmp_path: Path) -> None:
    save_page(usual(), tmp_path / "page.html")
    require_page(tmp_path / "page.html")

    for name, content in (("other.html", "<!doctype html>mine"), ("cat.jpg", "\xff\xd8")):
        (tmp_path / name).write_text(content, "latin-1")
        with pytest.raises(UsageError, match="shardkit bench did not write it"):
            require_page(tmp_path / name)


@functools.cache
def browser() -> str:
    """Return a browser that runs without a screen; skip where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    found = os.environ.get("SHARDKIT_BROWSER") or next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(names)} is here; SHARDKIT_BROWSER names one")
    return found


def browse(file: Path, *options: str) -> str:
    """Open a file in the browser, which can reach no network, and return what it prints."""
    done = subprocess.run(
        [
            browser(),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={file.parent / 'browser'}",
            *options,
            file.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


def screenshot(file: Path, *options: str) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    target = file.with_suffix(".png")
    browse(file, f"--screenshot={target}", "--window-size=1000,900", *options)
    with Image.open(target) as image:
        return np.asarray(image.convert("RGB"))


def test_a_browser_shows_it_light_and_dark(tmp_path: Path) -> None:
    browser()
    file = tmp_path / "page.html"
    save_page(usual(), file)
    light = screenshot(file)
    dark = screenshot(file, "--blink-settings=preferredColorScheme=0")

    assert np.median(light) > 240
    assert np.median(dark) < 40
    for pixels in (light, dark):
        for colour in plot._FILLS.values():
            near = np.abs(pixels.astype(int) - ImageColor.getrgb(colour)).max(axis=2) < 12
            assert near.mean() > 0.005, "the bars of the plot"
        written = np.abs(pixels.mean(axis=2) - np.median(pixels)) > 100
        assert written.mean() > 0.01, "letters"


@pytest.mark.parametrize("made", [usual, hostile])
def test_on_a_phone_nothing_is_wider_than_the_screen(made: Any, tmp_path: Path) -> None:
    browser()
    file = tmp_path / "page.html"
    save_page(made(), file)
    text = file.read_text("utf-8").replace("</body>", f"{_MEASURE}</body>")
    (tmp_path / "measured.html").write_text(text, "utf-8")

    shown = browse(tmp_path / "measured.html", "--dump-dom", "--window-size=390,800")

    found = re.search(r'<pre id="measured">(.*?)</pre>', shown)
    assert found
    told = json.loads(found[1])
    assert told["loaded"] == []
    assert told["width"] <= 500
    assert (told["content"], told["wide"]) == (told["width"], [])
    assert told["rows"] >= 6
    assert "<title>shardkit bench: " in shown
