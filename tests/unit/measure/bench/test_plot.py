"""Plots of any report, and outputs that are refused before anything is measured."""

from __future__ import annotations

import io
import os
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from bench_reports import hostile, usual
from PIL import Image, ImageColor

from shardkit.errors import ShardkitError, UsageError
from shardkit.measure.bench import plot
from shardkit.measure.bench.plot import drawn, require_output, save_plot


def picture_of(data: bytes) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def share_of(pixels: np.ndarray[tuple[int, ...], np.dtype[np.uint8]], color: str) -> float:
    return float((np.abs(pixels.astype(int) - ImageColor.getrgb(color)).max(axis=2) < 8).mean())


def test_a_picture_has_bars_of_both_kinds() -> None:
    pixels = picture_of(drawn(usual(), "png"))

    assert pixels.shape[1] > 1000
    for color in plot.COLORS.values():
        assert share_of(pixels, color) > 0.01
    assert share_of(pixels, "#ffffff") > 0.5


def test_bars_are_as_long_as_their_numbers() -> None:
    """The dataset reads twice as fast from memory as the folder."""
    pixels = picture_of(drawn(usual(), "png"))
    warm = np.abs(pixels.astype(int) - ImageColor.getrgb(plot.COLORS["warm"])).max(axis=2) < 8
    lengths = warm.sum(axis=1)
    bars = lengths[lengths > 100]  # the legend's patch is shorter

    assert np.percentile(bars, 95) / np.percentile(bars, 5) == pytest.approx(2, rel=0.1)


def test_an_svg_is_the_same_each_time_and_whole() -> None:
    text = drawn(usual(), "svg")

    assert drawn(usual(), "svg") == text
    assert ET.fromstring(text).tag.endswith("svg")


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_any_names_can_be_drawn(kind: str) -> None:
    assert len(drawn(hostile(), kind)) > 10_000


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("plot.pdf", r"\*\.png or \*\.svg"),
        ("plot", r"\*\.png or \*\.svg"),
        ("nowhere/plot.png", "there is no folder"),
        ("folder.png", "this is a folder"),
    ],
)
def test_a_plot_that_cannot_be_written_is_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "folder.png").mkdir()

    with pytest.raises(UsageError, match=message):
        require_output(tmp_path / name, "--plot")


def test_a_missing_matplotlib_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_output(tmp_path / "plot.svg", "--plot")
    monkeypatch.setattr(plot, "has_matplotlib", lambda: False)

    with pytest.raises(UsageError, match=r"pip install 'shardkit\[plot\]'"):
        require_output(tmp_path / "plot.svg", "--plot")


def test_a_plot_is_written_whole(tmp_path: Path) -> None:
    save_plot(usual(), tmp_path / "plot.PNG")

    with Image.open(tmp_path / "plot.PNG") as image:
        assert image.format == "PNG"
    assert [path.name for path in tmp_path.iterdir()] == ["plot.PNG"]
    with pytest.raises(ShardkitError, match="cannot be written: Not a directory"):
        save_plot(usual(), tmp_path / "plot.PNG" / "other.svg")


@pytest.mark.parametrize("name", ["plot.png", "plot.svg"])
def test_only_own_plots_are_overwritten(tmp_path: Path, name: str) -> None:
    other = tmp_path / f"other{Path(name).suffix}"
    if other.suffix == ".png":
        Image.new("RGB", (8, 8)).save(other)
    else:
        other.write_text("<?xml version='1.0'?><svg xmlns='http://www.w3.org/2000/svg'/>")
    before = other.read_bytes()

    save_plot(usual(), tmp_path / name)
    require_output(tmp_path / name, "--plot")
    with pytest.raises(UsageError, match="shardkit bench did not write"):
        require_output(other, "--plot")
    (tmp_path / f"empty-{name}").touch()
    require_output(tmp_path / f"empty-{name}", "--plot")

    assert other.read_bytes() == before


def test_a_read_only_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: not mode & os.W_OK)

    with pytest.raises(UsageError, match="cannot be written"):
        require_output(tmp_path / "plot.svg", "--plot")
