"""The page is self-contained, and safe with any names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from bench_reports import hostile, report, result, usual
from parsed import Parsed

from shardkit.errors import UsageError
from shardkit.measure.bench.page import page, save_page
from shardkit.measure.bench.plot import require_output


@pytest.mark.parametrize("made", [usual, hostile])
def test_it_is_self_contained(made: Any) -> None:
    text = page(made())
    parsed = Parsed(text)

    assert all(link.startswith(("#", "data:")) for link in parsed.links), parsed.links
    assert not set(parsed.tags) & {"script", "iframe", "object", "embed", "img", "base"}
    assert "@import" not in text
    assert set(re.findall(r"url\((.)", text)) <= {"#"}


def test_it_shows_the_answer_the_table_and_the_machine() -> None:
    made = usual()
    parsed = Parsed(page(made))

    assert made.headline in parsed.text
    assert " ".join(made.table().split()) in " ".join(parsed.text.split())
    assert "shardkit bench photos" in parsed.text
    assert "photos plain:num_workers=2, warm" in parsed.text
    assert "200 (2.00x)" in parsed.text


def test_names_are_text_and_nothing_else() -> None:
    text = page(hostile())
    parsed = Parsed(text)

    assert "<script>document.title=" not in text
    assert "<script>document.title='broken'</script>0" in parsed.text
    assert "{{ 7 * 7 }}" in parsed.text
    assert "failed: failed\\non" in parsed.text


def test_bars_are_as_long_as_their_numbers() -> None:
    widths = re.findall(r"width: ([0-9.]+)%", page(usual()))

    assert [float(width) for width in widths] == [35.0, 17.5, 70.0, 52.5]


def test_without_measurements_there_are_no_bars() -> None:
    failed = Parsed(page(report(result("a", problem="gone"))))

    assert "Nothing could be measured." in failed.text
    assert "failed: gone" in failed.text
    assert "dd" not in failed.tags


def test_only_own_pages_are_overwritten(tmp_path: Path) -> None:
    save_page(usual(), tmp_path / "page.html")
    require_output(tmp_path / "page.html", "--html")

    for name, content in (("other.html", "<!doctype html>mine"), ("cat.jpg", "\xff\xd8")):
        (tmp_path / name).write_text(content, "latin-1")
        with pytest.raises(UsageError, match="shardkit bench did not write"):
            require_output(tmp_path / name, "--html")
