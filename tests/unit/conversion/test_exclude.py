"""``convert --exclude``: images that lists name are left out, for good and for every source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fields import make_fields
from helpers import invoke, jpeg, make_folder, make_tree, tree
from refusals import refused, refuses
from stated import done, stated

from shardkit import append, convert, open_dataset, repair, verify
from shardkit.errors import UsageError

EXCLUDED = "excluded"
LIST_HEAD = "# rows of the dataset with the content digest "


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "photos", each=4)


@pytest.fixture
def excluded(tmp_path: Path) -> Path:
    path = tmp_path / "list.txt"
    path.write_text("cat/000\n# a comment\ndog/002.png\n")
    return path


def names(place: Path) -> set[str]:
    return {*open_dataset(place).paths}


def test_the_images_are_counted_and_known_ever_after(
    source: Path, excluded: Path, tmp_path: Path
) -> None:
    options = ("--to", "lmdb", "--workers", 1, "--exclude", excluded)
    made = tmp_path / "made"
    shown = invoke("convert", "imagefolder", source, made, *options).output

    assert f"2 {EXCLUDED} (cat/000" in shown
    assert len(names(made)) == 6
    assert stated(made).ignored == {EXCLUDED: 2}
    assert "already contains" in invoke("convert", "imagefolder", source, made, *options).output
    with refused(UsageError, "force=True"):
        convert(source, made, to="lmdb")


def test_jobs_make_the_same_files(source: Path, excluded: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "whole", to="lmdb", shard_samples=4, workers=1, exclude=excluded)
    options = ("--to", "lmdb", "--shard-samples", 4, "--exclude", excluded, "--plan-only")
    done("convert", "imagefolder", source, tmp_path / "jobs", *options)
    for number in (1, 0):
        done("work", tmp_path / "jobs", "--task", number)
    done("commit", tmp_path / "jobs")

    assert tree(tmp_path / "jobs") == tree(tmp_path / "whole")


def test_verify_still_finds_a_new_image_and_respects_the_limit(
    source: Path, excluded: Path, tmp_path: Path
) -> None:
    made = tmp_path / "made"
    convert(source, made, to="lmdb", exclude=excluded, limit=4, seed=3)
    assert verify(made, against=source).findings == []

    whole = tmp_path / "whole"
    convert(source, whole, to="lmdb", exclude=excluded)
    make_tree(source, {"cat/new.jpg": jpeg(seed=99)})
    (found,) = verify(whole, against=source).findings
    assert (found.file, found.reason) == (
        "cat/new.jpg",
        "it is in the source but not in the dataset",
    )


def test_append_leaves_them_out_too(source: Path, excluded: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    convert(source, made, to="lmdb", exclude=excluded)
    make_tree(source, {"cat/new.jpg": jpeg(seed=99)})
    added = append(made, source, skip_existing=True)

    assert added.images == 1
    assert verify(made, against=source).findings == []


def test_each_split_has_lists_of_its_own(tmp_path: Path) -> None:
    for split in ("train", "val"):
        make_folder(tmp_path / "photos" / split, each=3)
    for name, text in (("a", "cat/000\n"), ("b", "cat/001\ncat/000\n")):
        (tmp_path / name).write_text(text)
    made = tmp_path / "made"
    lists = [f"train={tmp_path / 'a'}", f"train={tmp_path / 'b'}"]
    convert(tmp_path / "photos", made, to="lmdb", exclude=lists)

    assert len(names(made / "val")) == 6
    assert not any(
        "000" in path or "001" in path for path in names(made / "train") if "cat" in path
    )
    (made / "train" / "ignored.jsonl").unlink()
    assert repair(made, tmp_path / "photos").findings == []
    assert verify(made, against=tmp_path / "photos").findings == []
    (tmp_path / "c").write_text("nowhere\n")
    with refused(UsageError, "val", "'nowhere'"):
        convert(tmp_path / "photos", tmp_path / "x", to="lmdb", exclude=[f"val={tmp_path / 'c'}"])
    with refused(UsageError, "train, val", "exclude='train=FILE'"):
        convert(tmp_path / "photos", tmp_path / "other", to="lmdb", exclude=tmp_path / "a")


def test_a_division_stays_as_it_was(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "whole", to="lmdb", val=0.4, stratify=True)
    train = names(tmp_path / "whole" / "train")
    (tmp_path / "list").write_text(f"{min(train)}\n")
    made = tmp_path / "made"
    lists = f"train={tmp_path / 'list'}"
    convert(source, made, to="lmdb", val=0.4, stratify=True, exclude=lists)

    assert names(made / "train") == train - {min(train)}
    assert names(made / "val") == names(tmp_path / "whole" / "val")
    assert verify(made, against=source).findings == []


@pytest.mark.parametrize("stratify", [False, True])
def test_one_list_holds_for_all_sides_of_a_division(
    source: Path, tmp_path: Path, stratify: bool
) -> None:
    options: dict[str, Any] = {"to": "lmdb", "val": 0.4, "stratify": stratify}
    convert(source, tmp_path / "all", **options)
    sides = {side: names(tmp_path / "all" / side) for side in ("train", "val")}
    (tmp_path / "list").write_text("".join(f"{min(paths)}\n" for paths in sides.values()))
    convert(source, tmp_path / "fewer", exclude=tmp_path / "list", **options)

    for side, paths in sides.items():
        assert names(tmp_path / "fewer" / side) == paths - {min(paths)}
    assert verify(tmp_path / "fewer", against=source).findings == []
    (tmp_path / "list").write_text("nowhere\n")
    with refused(UsageError, source, "'nowhere'"):
        convert(source, tmp_path / "none", exclude=tmp_path / "list", **options)


def test_rows_of_a_dataset(source: Path, tmp_path: Path) -> None:
    place = make_fields(tmp_path / "fields")
    digest = stated(place).content_digest
    (tmp_path / "rows").write_text(f"{LIST_HEAD}{digest}\n3\n")
    options = ("--to", "lmdb", "--workers", 1, "--exclude", tmp_path / "rows")
    invoke("convert", "dataset", place, tmp_path / "fewer", *options)

    assert "000000003" not in {*open_dataset(tmp_path / "fewer").keys}
    assert verify(tmp_path / "fewer", against=place).findings == []
    with refused(UsageError, "shardkit convert dataset"):
        convert(source, tmp_path / "x", to="lmdb", exclude=tmp_path / "rows")
    (tmp_path / "rows").write_text(f"{LIST_HEAD}{'0' * 64}\n3\n")
    refuses(2, "convert", "dataset", place, tmp_path / "x", *options, facts=(tmp_path / "rows",))


def test_other_lists_are_refused(source: Path, tmp_path: Path) -> None:
    everything = "".join(f"{c}/00{n}\n" for c in ("cat", "dog") for n in range(4))
    for text, facts in (
        ("cat/000\ncat/9\n", ("1 of 2", source, "'cat/9'")),
        ("", ("list",)),
        ("0\n", ("1 of 1", "'0'")),
        (everything, (source,)),
    ):
        (tmp_path / "list").write_text(text)
        with refused(UsageError, *facts):
            convert(source, tmp_path / "made", to="lmdb", exclude=tmp_path / "list")
        assert not (tmp_path / "made").exists()
