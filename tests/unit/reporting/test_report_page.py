"""The page: self-contained, complete, small, and harmless with any names; also in a browser."""

from __future__ import annotations

import base64
import html
import io
import itertools
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fields import make_fields
from helpers import encoded, execute, make_dataset, make_tree
from parsed import Parsed
from PIL import Image
from planted_faults import FAULTS, planted, scene

from shardkit import report
from shardkit.recipe import Recipe
from shardkit.reporting import page as page_module
from shardkit.reporting.charts import histogram
from shardkit.reporting.page import page
from shardkit.reporting.report import DatasetReport, Histogram
from shardkit.system.numbers import significant
from shardkit.system.text import printable, size

SECTIONS = (
    "Findings",
    "Contact sheets",
    "Overview",
    "Channel statistics",
    "Distributions",
    "Classes",
)
HOSTILE = "<script>document.title='broken'<script> \x1b[31m & \"x\" {7}"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> DatasetReport:
    folder = tmp_path_factory.mktemp("planted")
    source = planted(folder / "photos", each=20)
    content = encoded(scene(5000))
    make_tree(source, {f"train/{HOSTILE}/{n}{HOSTILE}.jpg": content for n in range(2)})
    return report(make_dataset(source, folder / "made"))


@pytest.fixture(scope="module")
def text(made: DatasetReport) -> str:
    return page(made)


def test_the_page_is_self_contained(text: str) -> None:
    parsed = Parsed(text)

    assert all(re.match(r"#|data:(image/webp|text/plain);base64,", link) for link in parsed.links)
    assert not set(parsed.tags) & {"script", "iframe", "object", "embed", "base", "link", "form"}
    assert "default-src 'none'" in text
    assert "url(" not in text
    assert "@import" not in text


def test_every_section_and_finding_is_shown(made: DatasetReport, text: str) -> None:
    parsed = Parsed(text)

    for name in SECTIONS:
        assert f'<h2 id="{name.lower().replace(" ", "-")}">{name}</h2>' in text
    assert {f"#{name.lower().replace(' ', '-')}" for name in SECTIONS} <= {*parsed.links}
    for kind in FAULTS.keys() - {"broken"}:
        assert f'<details open id="{kind}">' in text
        assert f'<a href="#{kind}">' in text
    assert made.normalize in parsed.text
    assert text.count("<img ") == text.count(' alt="') > 40


def test_lists_of_keys_are_in_the_page(made: DatasetReport, text: str) -> None:
    listed = re.findall(
        r'<code>--exclude (\w+=)</code><a download="train-leak.txt" href="data:text/plain;base64,'
        r'([^"]+)">([^<]+)<',
        text,
    )

    ((split, content, name),) = listed
    assert (split, name) == ("train=", "train-leak.txt")
    assert {*base64.b64decode(content).decode().split()} == {"cat/02", "cat/03"}


def written(value: Any) -> Iterator[str]:
    """Yield everything in JSON as the page writes it: names, numbers, sizes and counts."""
    if isinstance(value, (dict, list)):
        yield f"{len(value):,}"
        if isinstance(value, dict):
            yield ", ".join(f"{name} {each}" for name, each in value.items())
        for each in itertools.chain(*value.items()) if isinstance(value, dict) else value:
            yield from written(each)
    elif isinstance(value, str):
        yield printable(value)
        yield value[:16]  # of a digest
        yield from re.findall(NUMBER, f"{value} {value[:16]}")
    elif value is not None:
        yield from (f"{value:,}", f"{value:.4f}", significant(value), size(value))
        yield from re.findall(NUMBER, size(value))
        yield f"{value:.0f}"


NUMBER = r"\d[\d,.]*(?<=\d)"


def test_json_has_everything_that_the_page_states(made: DatasetReport, tmp_path: Path) -> None:
    for each in (made, report(make_fields(tmp_path / "made", to="lmdb"))):
        known, text = {*written(each.as_dict())}, page(each)
        sheets = re.compile('<section aria-labelledby="contact-sheets".*?</section>', re.DOTALL)
        stated = sheets.sub("", text[text.index("<section") :])
        names = re.findall(r'class="key">([^<]+)|<td>([^<]+)</td>|alt="([^"]+)"', stated)
        numbers = re.findall(NUMBER, re.sub(r"<[^>]*>", " ", stated))

        assert len(names) > 30
        assert {html.unescape("".join(name)) for name in names} - known <= NOTED
        assert len(numbers) > 100
        assert {*numbers} - known <= {"0", "1", "6", "100", "255"}  # ranges of scales


NOTED = {
    *("Images", "Encoded size of images", "Classes", "Kinds", "Pixel modes"),
    *("With an ICC profile", "With several frames", "red", "green", "blue"),
}
"""Words of the page itself in tables."""


def test_names_are_text_and_nothing_else(text: str) -> None:
    shown = Parsed(text).text

    assert HOSTILE.replace("\x1b", "\\x1b") in shown
    assert "\x1b" not in text


def test_pictures_are_those_of_the_dataset(made: DatasetReport, text: str) -> None:
    (red,) = {*re.findall(r'<img src="data:image/webp;base64,([^"]+)" alt="dog/red.jpg"', text)}
    shown = Image.open(io.BytesIO(base64.b64decode(red)))

    assert shown.size == (128, 96)
    assert np.asarray(shown)[..., 0].mean() > 80 > np.asarray(shown)[..., 1:].mean()


def test_the_page_stays_small(made: DatasetReport, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = len(page(made))
    for name in ("_CLASSES", "_PER_CLASS", "_GROUPS", "_PER_GROUP", "_BALANCE", "_LISTED"):
        monkeypatch.setattr(page_module, name, 1)
    small = page(made)

    assert len(small) < whole / 2
    assert "more. <code>shardkit report --json</code> lists all" in small
    assert "1 of 3 classes, drawn at random" in small
    assert "--exclude DIR" in small

    monkeypatch.setattr(page_module, "_EMBEDDED", 2000)
    small = page(made)
    assert small.count("<img ") < 4
    assert "image not shown" in small


def test_a_large_group_shows_each_class(tmp_path: Path) -> None:
    files = {f"ant/{n}.png": encoded(scene(0), "PNG") for n in range(9)}
    files["bee/9.png"] = files["ant/0.png"]
    made = report(make_dataset(make_tree(tmp_path / "a", files), tmp_path / "made", shuffle=False))
    (conflict,) = re.findall(r'id="label-conflict">(.*?)</details>', page(made))

    assert conflict.count("<img ") == 6
    assert "6 of 10 images" in conflict
    assert "class bee" in conflict


def test_images_that_cannot_be_decoded_are_crossed_out(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "photos", {"a/x.jpg": encoded(scene(0))[:300]})
    made = report(make_dataset(source, tmp_path / "made", recipe=Recipe(check="none")))
    text = page(made)

    assert "No image can be decoded." in text
    assert "<summary>broken: 1 image</summary>" in text


def test_fields_are_drawn_and_described(tmp_path: Path) -> None:
    drawn = page(report(make_fields(tmp_path / "made", to="lmdb")))
    text = Parsed(drawn).text

    bars = drawn[drawn.index("boxes: boxes by class") :]
    assert re.findall(r'fill="(#\w+)"', bars)[:2] == ["#E69F00", "#56B4E9"]  # as in the pictures
    for part in (
        "boxes per image",
        "characters",
        "pixel values",
        "boxes: boxes by class",
        "number 3 äß★",
    ):
        assert part in text


def test_a_histogram_says_what_it_shows() -> None:
    drawn = histogram(Histogram("Width", "pixels", [1.0, 2.0, 4.0], [10, 5], 1.5))

    assert 'aria-label="Width, pixels: 1 to 4, median 1.50"' in drawn
    assert re.findall(r"v-([0-9.]+)h", drawn) == ["150.0", "75.0"]
    assert "All 1,000 images: 32 (pixels)" in histogram(
        Histogram("Width", "pixels", [32.0, 32.0], [1000], 32.0)
    )


def browse(text: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Open a page in a browser; return the page after its scripts, and the log."""
    if BROWSER is None:
        pytest.skip("no Chromium or Chrome is installed")
    (folder / "page.html").write_text(text, "utf-8")
    return execute(
        BROWSER,
        *("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'user'}"),
        *("--enable-logging=stderr", "--log-level=0", "--dump-dom", *options),
        (folder / "page.html").as_uri(),
        check=True,
    )


@pytest.mark.slow
def test_a_browser_shows_the_page_without_requests_or_errors(text: str, tmp_path: Path) -> None:
    # Its policy forbids scripts and requests; a violation is an error on the console.
    done = browse(text, tmp_path)

    assert "<title>Report on made: train, val</title>" in done.stdout
    assert "CONSOLE" not in done.stderr
