"""What another way of storing images would change: candidates, and what is measured of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import jpeg, make_dataset, make_tree, png

from shardkit import BadImage, CenterCrop, RandomResizedCrop, open_dataset
from shardkit.conversion.recipe import Recipe
from shardkit.measure.doctor import changes
from shardkit.measure.doctor.changes import Change, candidates, predict
from shardkit.measure.runner.folder import PlainFolder

SIDE = 320


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JPEGs that are far larger than the crop of 32."""
    files: dict[str, bytes | None] = {f"a/{n}.jpg": jpeg(SIDE + 80, SIDE, n) for n in range(4)}
    return make_tree(tmp_path_factory.mktemp("changes") / "photos", files)


def by_name(found: list[Change]) -> dict[str, Change]:
    return {each.name: each for each in found}


@pytest.mark.parametrize(
    ("crop", "kinds", "side", "names"),
    [
        (224, ["jpg"], 500, ["resize", "raw"]),
        (224, ["jpg"], 300, []),  # 256 is too near
        (224, ["png", "jpg"], 500, ["resize", "jpeg", "raw"]),
        (224, ["png"], 256, ["jpeg"]),
        (None, ["jpg"], 500, []),
        (None, ["bmp"], 500, ["jpeg"]),
        (448, ["jpg"], 1000, ["resize"]),  # 512 x 512 raw pixels are too large
        (224, ["raw"], 500, []),
        (224, [], 500, []),
    ],
)
def test_only_what_may_be_worth_it_is_tried(
    crop: int | None, kinds: list[str], side: float, names: list[str]
) -> None:
    assert list(candidates(crop, kinds, side)) == names


def test_the_size_is_that_of_people() -> None:
    found = candidates(224, ["png"], 500)

    assert found["resize"] == Recipe(resize=(256, 256))
    assert found["jpeg"] == Recipe(resize=(256, 256), encode="jpeg")
    assert found["raw"].raw_shape == (256, 256, 3)


def test_smaller_images_are_decoded_sooner(large: Path, tmp_path: Path) -> None:
    made = make_dataset(large, tmp_path / "made")
    operation = CenterCrop(32, resize=36, oversample=float("inf"))
    found = by_name(predict(open_dataset(made, decode=operation), 32))

    assert list(found) == ["resize", "raw", "fast"]
    small, raw, fast = found.values()
    assert small.images == 4
    assert small.before > 3 * small.after
    assert small.before > 3 * raw.after
    assert small.bytes_before > 3 * small.bytes_after
    assert raw.bytes_after == 37 * 37 * 3
    assert Recipe.restored(small.recipe) == Recipe(resize=(37, 37))
    assert fast.recipe == {}
    assert fast.bytes_after == fast.bytes_before
    assert not any(each.other_pixels or each.maybe_other for each in found.values())


def test_a_crop_of_pixels_shows_more_of_a_smaller_image(large: Path, tmp_path: Path) -> None:
    made = make_dataset(large, tmp_path / "made")
    found = by_name(predict(open_dataset(made, decode=CenterCrop(32)), 32))

    assert {name: each.other_pixels for name, each in found.items()} == {
        "resize": True,
        "raw": True,
        "fast": False,
    }


def test_a_folder_would_be_converted(large: Path) -> None:
    found = by_name(predict(PlainFolder(large, RandomResizedCrop(32)), 32))

    assert list(found) == ["convert", "resize", "raw"]
    assert Recipe.restored(found["convert"].recipe) == Recipe()
    assert found["convert"].bytes_after == found["convert"].bytes_before
    assert found["resize"].before == found["convert"].before


def test_a_transform_is_a_part_of_it(large: Path) -> None:
    seen: list[Any] = []

    def transform(image: Any) -> Any:
        seen.append(image.size)
        return image

    found = by_name(predict(PlainFolder(large, "pil", transform), 32))
    assert {name for name, each in found.items() if each.maybe_other} == {"resize", "raw"}
    assert (SIDE + 80, SIDE) in seen
    assert (37 * (SIDE + 80) // SIDE, 37) in seen


def test_where_nothing_is_decoded_nothing_is_tried(large: Path, tmp_path: Path) -> None:
    recipe = Recipe(encode="raw", resize=(64, 64), resize_mode="crop")
    raw = make_dataset(large, tmp_path / "raw", recipe=recipe)

    assert predict(open_dataset(raw, decode=CenterCrop(32)), 32) == []
    assert predict(open_dataset(raw, decode="bytes"), None) == []


def test_what_cannot_be_made_is_left_out(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Recipe.apply

    def apply(self: Recipe, record: Any) -> Any:
        if self.encode == "raw":
            raise BadImage("it is bad")
        return real(self, record)

    monkeypatch.setattr(Recipe, "apply", apply)
    assert list(by_name(predict(PlainFolder(large, CenterCrop(32)), 32))) == ["convert", "resize"]


def test_png_files_would_be_jpegs(tmp_path: Path) -> None:
    files: dict[str, bytes | None] = {f"a/{n}.png": png(160, 120, n) for n in range(3)}
    made = make_dataset(make_tree(tmp_path / "photos", files), tmp_path / "made")
    found = by_name(predict(open_dataset(made, decode=CenterCrop(100)), 100))

    assert list(found) == ["jpeg"]
    assert found["jpeg"].bytes_after < found["jpeg"].bytes_before
    assert Recipe.restored(found["jpeg"].recipe) == Recipe(encode="jpeg")


def test_no_more_images_than_asked_for_are_taken(large: Path) -> None:
    assert {each.images for each in predict(PlainFolder(large, CenterCrop(32)), 32, 2)} == {2}
    assert changes.IMAGES == 24
