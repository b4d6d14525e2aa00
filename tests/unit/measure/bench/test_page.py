"""Pages and charts are self-contained, and safe with any names; other files are never lost."""

from __future__ import annotations

import os
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from bench_reports import hostile, report, result, usual
from parsed import Parsed
from refusals import refused

from shardkit import UsageError
from shardkit.measure.bench.page import chart, page, require_output

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("made", [usual, hostile])
def test_a_page_is_self_contained(made: Any) -> None:
    text = page(made())
    parsed = Parsed(text)

    assert all(link.startswith(("#", "data:")) for link in parsed.links), parsed.links
    assert not set(parsed.tags) & {"script", "iframe", "object", "embed", "img", "base"}
    assert "@import" not in text
    assert set(re.findall(r"url\((.)", text)) <= {"#"}


def test_a_page_shows_the_answer_the_chart_the_table_and_the_machine() -> None:
    made = usual()
    parsed = Parsed(page(made))

    assert made.headline in parsed.text
    assert " ".join(made.table().split()) in " ".join(parsed.text.split())
    assert "shardkit bench photos" in parsed.text
    assert chart(made) in page(made)


def test_names_are_text_and_nothing_else() -> None:
    text = page(hostile())
    parsed = Parsed(text)

    assert "<script>document.title=" not in text
    assert "<script>document.title='broken'</script>0" in parsed.text
    assert "{{ 7 * 7 }}" in parsed.text
    assert "failed: failed\\non" in parsed.text
    assert "$\\frac{1}{0}$ {{ 7 * 7 }}" in "".join(ET.fromstring(chart(hostile())).itertext())


def test_bars_are_as_long_as_their_numbers() -> None:
    root = ET.fromstring(chart(usual()))
    bars = [
        float(bar.attrib["width"]) for bar in root.iter(f"{SVG}rect") if "class" not in bar.attrib
    ]
    texts = [each.text for each in root.iter(f"{SVG}text")]

    assert [bar / bars[0] for bar in bars] == pytest.approx([1, 0.5, 2, 1.5], abs=0.01)
    assert {"photos: plain:num_workers=2, warm", "200 (2.00x)", "100"} <= set(texts)
    assert texts[:6] == ["0", "50", "100", "150", "200", "250"]


@pytest.mark.parametrize("rate", [0.003, 1, 9.99, 1000, 123_456])
def test_the_axis_covers_any_rates(rate: float) -> None:
    root = ET.fromstring(chart(report(result("a", rates=(rate,)))))
    ticks = [each for each in root.iter(f"{SVG}text") if each.get("text-anchor") == "middle"]

    assert 3 <= len(ticks) <= 6
    assert all(0 <= float(each.attrib["x"]) <= 760 for each in ticks)


def test_without_measurements_there_is_no_chart() -> None:
    failed = Parsed(page(report(result("a", problem="gone"))))

    assert "Nothing could be measured." in failed.text
    assert "failed: gone" in failed.text
    assert "svg" not in failed.tags
    ET.fromstring(chart(report(result("a", problem="gone"))))


def test_only_own_files_in_folders_that_can_be_written_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder.svg").mkdir()
    for name, facts in {
        "plot.png": ("*.svg",),
        "plot": ("*.svg",),
        "nowhere/plot.svg": ("/nowhere",),
        "folder.svg": ("/folder.svg", "folder"),
    }.items():
        with refused(UsageError, *facts):
            require_output(tmp_path / name, "--plot")
    for made, name, option in (
        (page(hostile()), "page.html", "--html"),
        (chart(hostile()), "plot.svg", "--plot"),
    ):
        for content in (made, ""):
            (tmp_path / name).write_text(content, "utf-8")
            require_output(tmp_path / name, option)
        for content in ("<!doctype html>mine", "\xff\xd8"):
            (tmp_path / name).write_text(content, "latin-1")
            with refused(UsageError, f"/{name}"):
                require_output(tmp_path / name, option)
    monkeypatch.setattr("os.access", lambda path, mode: not mode & os.W_OK)
    with refused(UsageError, "written"):
        require_output(tmp_path / "new.svg", "--plot")
