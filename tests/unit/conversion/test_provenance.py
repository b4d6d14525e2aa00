"""The doctor's command names all sources of a dataset, and what was left out."""

from __future__ import annotations

from pathlib import Path

from helpers import jpeg, make_dataset, make_tree

from shardkit import append
from shardkit.measure.doctor.command import command_words, provenance_of
from shardkit.recipe import Recipe


def test_of_several_sources_the_first_is_converted(folder: Path, tmp_path: Path) -> None:
    place = make_dataset(folder, tmp_path / "made")
    append(place, make_tree(tmp_path / "more", {"cat/new.jpg": jpeg(seed=8)}))
    made = provenance_of(str(place), place)
    words = ["shardkit", "convert", "imagefolder", "SRC"]
    assert command_words(Recipe(resize=8), made)[:4] == words
    assert "photos" in made.hints("new")[0]
    assert "merge" in made.hints("new")[0]


def test_images_that_a_list_left_out_are_counted(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("cat/000\ndog/001\n")
    place = make_dataset(folder, tmp_path / "made", exclude=tmp_path / "list.txt")
    (hint,) = provenance_of(str(place), place).hints("new")
    assert "2 of its images" in hint
    assert "--exclude" in hint
