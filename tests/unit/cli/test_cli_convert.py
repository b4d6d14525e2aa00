"""``shardkit convert``: its options, what it prints, its exit codes, and its interruption."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from faulty import PROGRAM
from helpers import (
    DEADLINE,
    FORMATS,
    encoded,
    exif,
    jpeg,
    make_folder,
    make_tree,
    run,
    run_main,
    tree,
    wait_until,
)
from PIL import Image
from refusals import refuses
from table import for_each

import shardkit
from shardkit import open_dataset


def words(source: object, target: object, *options: object, to: str = "webdataset") -> list[Any]:
    return ["convert", "imagefolder", source, target, "--to", to, "--workers", 1, *options]


def told(*given: object) -> str:
    """Run the command; return what it prints, which is no error."""
    done = run_main(*given)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def made(source: Path, target: Path, *options: object, to: str = "webdataset") -> dict[str, Any]:
    """Convert, and return the manifest."""
    told(*words(source, target, *options, to=to))
    return manifest(target)


def manifest(place: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((place / "shardkit.json").read_text())
    return value


def planned(source: Path, *options: object) -> dict[str, Any]:
    """Return the plan of the only dataset."""
    value = json.loads(told(*words(source, "out", "--dry-run", "--json", *options)))
    plan: dict[str, Any] = value["plan"][""]
    return plan


# What is shown.


def test_the_summary_describes_the_dataset(folder: Path, tmp_path: Path) -> None:
    make_tree(folder, {"emu": None, "cat/notes.txt": b"x", "cat/bad.jpg": b"x"})
    make_tree(folder, {"cat/t.jpg": jpeg(exif=exif(6)), "b.jpg": jpeg(), "c.jpg": jpeg()})
    how = words(folder, tmp_path / "out", "--on-error", "skip")
    assert "  loose     2 images" in told(*how, "--dry-run")
    shown = told(*how)
    for fact in (
        *(folder, "7 images in 3 classes, 1 shard of webdataset", "emu", "1 image with"),
        "  loose     2 images",
        *("1 bad file", "skipped.jsonl", "1 not an image (cat/notes.txt)", " MB/s read"),
        f"shardkit verify {tmp_path / 'out'}",
    ):
        assert str(fact) in shown


@pytest.mark.parametrize("split", ["", "train/"])
def test_the_summary_says_how_masks_are_read(tmp_path: Path, split: str) -> None:
    """By default, a dataset gives images and labels, of which there are none."""
    pixels = np.arange(48, dtype=np.uint8).reshape(6, 8)
    files: dict[str, bytes | None] = {f"{split}images/a.jpg": jpeg(8, 6)}
    files[f"{split}masks/a.png"] = encoded(Image.fromarray(pixels), "PNG")
    printed = told(
        "convert", make_tree(tmp_path / "photos", files), tmp_path / "out", "--to", "lmdb"
    )
    (line,) = [line for line in printed.splitlines() if line.startswith("  read ")]
    dataset = eval(line.removeprefix("  read"), {"open_dataset": open_dataset})
    image, mask = dataset[0]
    assert image.size == (8, 6)
    assert np.array_equal(np.asarray(mask), pixels)


def test_the_summary_names_the_split_that_lacks_a_class(tmp_path: Path) -> None:
    files: dict[str, bytes | None] = {f"{c}/{n}.jpg": jpeg(seed=n) for n, c in enumerate("aab")}
    photos = make_tree(tmp_path / "p", files)
    assert " in val: b" in told(*words(photos, tmp_path / "out", "--val", 0.5, "--stratify"))


def test_quiet_prints_nothing(folder: Path, tmp_path: Path) -> None:
    assert told(*words(folder, tmp_path / "out", "--quiet")) == ""


@pytest.mark.parametrize("to", FORMATS)
def test_json_describes_each_dataset(tmp_path: Path, to: str) -> None:
    photos = tmp_path / "photos"
    for split in ("train", "val"):
        make_folder(photos / split)
    read = sum(path.stat().st_size for path in photos.rglob("*.*"))
    (photos / "val/cat/bad.jpg").write_bytes(b"bad")
    how = words(photos, tmp_path / "out", "--json", "--on-error", "skip", to=to)
    value = json.loads(told(*how))
    assert value["bytes_read"] == read + len(b"bad")
    assert sorted(value["datasets"]) == ["train", "val"]
    val, digest = value["datasets"]["val"], manifest(tmp_path / "out/val")["digest"]
    assert val["path"] == str(tmp_path / "out/val")
    assert (val["rows"], val["digest"], val["format"]) == (6, digest, to)
    assert [each["path"] for each in val["skipped"]] == ["cat/bad.jpg"]
    assert value["datasets"]["train"]["skipped"] == []


def test_a_dry_run_shows_the_plan_and_writes_nothing(folder: Path, tmp_path: Path) -> None:
    stored = sum(path.stat().st_size for path in folder.rglob("*.*"))
    (folder / "cat/notes.txt").write_bytes(b"x")
    (folder / "cat/broken.jpg").symlink_to("nowhere")
    shown = told(*words(folder, tmp_path / "out", "--dry-run", "--shard-samples", 4))
    for fact in ("nothing was", "6 images, 2 shards", "cat/notes.txt", "cat/broken.jpg"):
        assert fact in shown
    plan = planned(folder)
    assert (plan["images"], plan["shards"]) == (6, 1)
    assert plan["classes"] == {"cat": 3, "dog": 3}
    assert plan["estimated_bytes"] > stored
    assert os.listdir(tmp_path) == ["photos"]


def test_long_lists_are_shortened(tmp_path: Path) -> None:
    classes = make_folder(tmp_path / "photos", [f"c{n:03d}" for n in range(60)], each=1)
    assert "and 10 more" in told(*words(classes, tmp_path / "out", "--dry-run"))
    bad = make_tree(tmp_path / "bad", {f"cat/{n:02d}.jpg": b"x" for n in range(23)})
    done = refuses(1, *words(bad, tmp_path / "out"))
    listed = [line for line in done.stderr.splitlines() if line.startswith("  bad: ")]
    assert len(listed) == 21
    assert "and 3 more (--json" in listed[-1]
    as_json = run_main(*words(bad, tmp_path / "out", "--json"))
    assert len(json.loads(as_json.stdout)["bad"]) == 23


def test_bad_images_are_listed_and_exit_with_1(folder: Path, tmp_path: Path) -> None:
    (folder / "cat/new\nline.jpg").write_bytes(b"x")
    (folder / "dog/empty.png").write_bytes(b"")
    facts = ("2 bad files", "  bad: cat/new\\nline.jpg: ", "  bad: dog/empty.png: ")
    for options in ((), ("--quiet",)):
        assert refuses(1, *words(folder, tmp_path / "out", *options), facts=facts).stdout == ""
    done = run_main(*words(folder, tmp_path / "out", "--json"))
    found = [bad["path"] for bad in json.loads(done.stdout)["bad"]]
    assert found == ["cat/new\nline.jpg", "dog/empty.png"]
    assert os.listdir(tmp_path) == ["photos"]


def test_images_that_are_too_small_are_counted(tmp_path: Path) -> None:
    files: dict[str, bytes | None] = {f"a/{n}.jpg": jpeg(90, 40 + n) for n in range(6)}
    source, place = make_tree(tmp_path / "photos", files), tmp_path / "made"
    for size, count in {"43x80": 3, "41x80": 1, "40x80": 0}.items():
        how = words(source, place, "--resize", size, "--force")
        for shown in (told(*how), told("info", place)):
            assert (f"{count} image" in shown and f" smaller than {size}" in shown) == bool(count)
            assert ("--enlarge" in shown) == bool(count)
        assert manifest(place)["notes"].get("small", 0) == count


@for_each("mode", ["crop", "stretch", "shorter"])
def test_images_that_keep_their_size_are_explained(tmp_path: Path, mode: str) -> None:
    """A user meets them in the second batch otherwise; in the mode shorter, sizes vary anyway."""
    files: dict[str, bytes | None] = {"a/0.jpg": jpeg(90, 40), "a/1.jpg": jpeg(90, 90)}
    source = make_tree(tmp_path / mode / "photos", files)
    how = words(source, tmp_path / mode / "made", "--resize", "50x80", "--resize-mode", mode)
    shown = told(*how)
    assert "--enlarge" in shown
    assert ("loaders cannot stack" in shown) == (mode != "shorter")
    assert "small" not in told(*how, "--enlarge", "--force")


def test_records_without_images_are_not_called_images(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.zeros((20, 3)))
    how = ["convert", "npy", tmp_path / "rows.npy", tmp_path / "made", "--to", "lmdb", "--arrays"]
    for shown in (told(*how, "--dry-run"), told(*how, "--workers", 1)):
        assert "20 records" in shown
        assert "image" not in shown.replace(str(tmp_path), "")


# Options.


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--resize 10", {"resize": [10, 10], "resize_mode": "shorter"}),
        ("--resize 10x12", {"resize": [10, 12], "resize_mode": "crop"}),
        ("--resize 10 --resize-mode longer", {"resize_mode": "longer"}),
        ("--resize 10x12 --resize-mode pad", {"resize_mode": "pad"}),
        ("--resize 10x12 --resize-mode stretch", {"resize_mode": "stretch"}),
        ("--resize 10 --filter lanczos", {"filter": "lanczos"}),
        ("--resize 10 --dct-scaling", {"dct_scaling": True, "filter": "bicubic"}),
        ("--resize 90 --enlarge", {"enlarge": True}),
        ("--encode webp --quality 70", {"encode": "webp", "quality": 70}),
        ("--encode raw --resize 8x8", {"encode": "raw", "resize_mode": "crop"}),
        ("--orient --check header", {"encode": "keep", "orient": True, "check": "header"}),
        ("--background white", {"background": [255, 255, 255]}),
        ("--background #abc", {"background": [170, 187, 204]}),
        ("--background #01020304", {"background": [1, 2, 3]}),
        ("--background rgb(124,116,104)", {"background": [124, 116, 104]}),
        ("--background hsl(120,100%,50%)", {"background": [0, 255, 0]}),
    ],
)
def test_the_recipe_follows_the_options(
    folder: Path, options: str, expected: dict[str, Any]
) -> None:
    assert expected.items() <= planned(folder, *options.split())["recipe"].items()


def test_order_and_number_of_images_follow_the_options(folder: Path, tmp_path: Path) -> None:
    orders = []
    for name, option in [("a", "--seed=0"), ("b", "--seed=1"), ("c", "--no-shuffle")]:
        made(folder, tmp_path / name, option)
        orders.append(tuple(open_dataset(tmp_path / name).keys))
    assert orders[2] == tuple(sorted(orders[2]))
    assert len(set(orders)) == 3
    done = refuses(2, *words(folder, tmp_path / "a", "--limit", 2), facts=("--force",))
    assert done.stdout == ""
    assert made(folder, tmp_path / "a", "--limit", 2, "--force")["rows"] == 2


def test_python_and_the_command_write_the_same_dataset(folder: Path, tmp_path: Path) -> None:
    shardkit.convert(
        str(folder),
        str(tmp_path / "python"),
        to="hdf5",
        resize=(9, 12),
        enlarge=True,
        background="#ff8000",
        shard_size="1 kB",
        workers=1,
    )
    options = ("--resize", "9x12", "--enlarge", "--background", "#ff8000", "--shard-size", "1kB")
    made(folder, tmp_path / "command", *options, to="hdf5")
    assert tree(tmp_path / "command") == tree(tmp_path / "python")


# What cannot be done as asked.

REFUSED: dict[str, tuple[str, ...]] = {
    "--resize big": ("--resize big",),
    "--resize 0": ("--resize 0x0", "1"),
    f"--resize {'9' * 5000}": ("--resize 9999",),
    "--resize=": ("--resize",),
    "--resize-mode pad": ("--resize-mode requires --resize",),
    "--dct-scaling": ("--dct-scaling requires --resize",),
    "--enlarge": ("--enlarge requires --resize",),
    "--filter lanczos": ("--filter requires --resize",),
    "--shard-size 0": ("shard size", "0"),
    "--shard-size 256": ("--shard-size 256", "256MiB", "256B"),
    "--shard-size 65535": ("65535MiB",),
    "--shard-size 1MB --shard-samples 4": ("--shard-size", "--shard-samples"),
    "--dry-run --plan-only": ("--dry-run", "--plan-only"),
    "--background transparentish": ("transparentish",),
    "--background rgb(300,0,0)": ("(300, 0, 0)",),
    "--encode raw": ("raw", "HxW"),
    "--encode raw --resize 8": ("raw", "HxW"),
    "--encode png --quality 80": ("quality", "png"),
    "--quality 0": ("quality 0",),
    "--class-order missing.txt": ("missing.txt",),
    "--staging /dev/null": ("--staging",),
}
"""Facts that the only line of stderr names."""


def test_contradictory_options_are_usage_errors(folder: Path, tmp_path: Path) -> None:
    for options, facts in REFUSED.items():
        done = refuses(2, *words(folder, tmp_path / "out", *options.split()), facts=facts)
        assert done.stdout == ""
        assert done.stderr.startswith("shardkit: error: ")
        assert done.stderr.count("\n") == 1
    assert os.listdir(tmp_path) == ["photos"]


def test_invalid_values_exit_with_2(folder: Path, tmp_path: Path) -> None:
    """Click words these errors."""
    choices = "--to zip|--encode gif|--filter nearest|--resize-mode cover"
    choices += "|--check all|--on-error ignore"
    numbers = "--workers 0|--seed x|--quality high|--limit 1.5|--limit 0|--shard-samples 0"
    for options in f"{choices}|{numbers}".split("|"):
        done = run_main(*words(folder, tmp_path / "out", *options.split()))
        assert (done.returncode, done.stdout) == (2, "")
        assert options.split()[1] in done.stderr
    for given in ((), (folder,), (folder, "out")):
        assert run_main("convert", "imagefolder", *given).returncode == 2
    assert os.listdir(tmp_path) == ["photos"]


def one_line(code: int, source: object, target: object, *facts: object) -> None:
    done = refuses(code, *words(source, target), facts=facts)
    assert done.stdout == ""
    assert done.stderr.startswith("shardkit: error: ")
    assert done.stderr.count("\n") == 1


def test_unusable_sources_and_targets_exit_with_2_and_one_line(
    folder: Path, tmp_path: Path
) -> None:
    made(folder, tmp_path / "dataset", "--seed", 1)
    other = {"empty/notes.txt": b"x", "other/thesis.txt": b"x", "file.jpg": jpeg(), "file": b"x"}
    make_tree(tmp_path, other)
    (tmp_path / "loop").symlink_to("loop")
    for name in ("missing", "file.jpg", "empty"):
        one_line(2, tmp_path / name, tmp_path / "out", f"/{name}")
    for target, fact in {
        tmp_path / "dataset": "--force",
        tmp_path / "other": "thesis.txt",
        tmp_path / "file": "file",
        tmp_path / "file" / "below": "file",
        tmp_path / "loop": "loop",
        folder / "out": "/photos",
        tmp_path / ("x" * 300): "xxx",
        Path("/proc/shardkit/out"): "/proc/shardkit",
    }.items():
        one_line(2, folder, target, fact)
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_target_without_permission_exits_with_2_and_one_line(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    one_line(2, folder, tmp_path / "locked/out", "/locked")


def test_a_folder_in_place_of_the_source_type_is_recognized(folder: Path, tmp_path: Path) -> None:
    for given, missing in {"out": "--to", "": "DST"}.items():
        refuses(2, "convert", folder, *given.split(), facts=(missing,))
    done = run_main("convert", folder, tmp_path / "out", "--to", "hdf5", "--dry-run")
    assert done.stdout.startswith("read as imagefolder: class folders such as ")


def test_a_folder_that_has_the_name_of_a_kind_needs_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_folder(tmp_path / "coco")
    monkeypatch.chdir(tmp_path)
    refuses(2, "convert", "coco", "out", "--to", "lmdb", facts=("DST", "./coco"))
    assert run_main("convert", "./coco", "out", "--to", "lmdb", "--dry-run").returncode == 0


def test_a_dataset_is_no_other_kind_of_source(folder: Path, tmp_path: Path) -> None:
    suffixes = {"lmdb": "lmdb", "hdf5": "h5", "webdataset": "tar"}
    facts = ("`shardkit convert dataset`",)
    for kind, suffix in suffixes.items():
        place = tmp_path / kind
        made(folder, place, to=kind)
        for path in (place, place / f"shard-000000.{suffix}"):
            refuses(2, "convert", kind, path, "new", "--to", "lmdb", facts=facts)
            refuses(2, "attach", kind, path, "new", "--on-error", "skip", facts=facts)
        refuses(2, "convert", "hdf5", place, "new", "--to", "lmdb", facts=facts)
    place = tmp_path / "lmdb"
    refuses(2, "attach", place, "new", facts=(place, "directly"))
    refuses(2, *words(place, "new"), facts=(*facts, "/lmdb", "`shardkit merge`"))


def test_an_internal_error_is_not_hidden(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a mistake")

    monkeypatch.setattr("shardkit.cli.convert.convert", fail)
    with pytest.raises(RuntimeError, match="a mistake"):
        run_main(*words(folder, tmp_path / "out"))


# Names that are not usual text.


def test_names_that_are_not_utf8_can_be_shown(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "photos \udcff")
    (source / "cat/bad \udcfe.jpg").write_bytes(b"x")
    (source / "dog \udcfd").mkdir()
    target = tmp_path / "out \udcff"
    refuses(1, *words(source, target), facts=("\\udcfe",))
    for options in ("--dry-run", "--on-error skip", "--on-error skip --force"):
        told(*words(source, target, *options.split()))
    assert manifest(target)["rows"] == 6


@pytest.mark.slow
def test_names_that_the_terminal_cannot_show_are_escaped(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "photos ★", ["größe ★", "cat"])
    make_tree(source, {"leer ★": None, "größe ★/notes ★.txt": b"x"})
    done = run(*words(source, tmp_path / "out ★"), env={"PYTHONIOENCODING": "latin-1"})
    assert (done.returncode, done.stderr) == (0, "")
    assert r"photos \u2605" in done.stdout


# Interruptions.


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder "photos" with many images, and "expected", the dataset of an uninterrupted run."""
    root = tmp_path_factory.mktemp("crowd")
    made(make_folder(root / "photos", each=150), root / "expected", *CROWD)
    return root


CROWD = ("--shard-samples", 3, "--resize", 12)


@pytest.mark.parametrize(
    ("number", "code", "group"),
    [
        (signal.SIGINT, 130, False),
        (signal.SIGINT, 130, True),  # as a terminal sends it: to all processes
        (signal.SIGTERM, 143, False),
        (signal.SIGHUP, 129, True),  # as a terminal sends it when it closes
        (signal.SIGKILL, -9, False),
    ],
    ids=str,
)
@pytest.mark.slow
def test_a_signal_ends_all_processes_and_a_rerun_resumes(
    crowd: Path, tmp_path: Path, number: signal.Signals, code: int, group: bool
) -> None:
    out = tmp_path / "out"
    given = [*map(str, words(crowd / "photos", out, "--workers", 2, *CROWD))]
    command = [sys.executable, "-c", PROGRAM, *given]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    parts = out / ".shardkit-work/state/parts"
    try:
        wait_until(lambda: list(parts.glob("[0-9]*/result.json")), "the first shard")
        workers = psutil.Process(process.pid).children()
        if group:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        stdout, stderr = process.communicate(timeout=DEADLINE)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert (process.returncode, stdout) == (code, "")
    assert "Traceback" not in stderr
    if number is not signal.SIGKILL:
        assert stderr.splitlines()[-1].startswith("shardkit: error: interrupted.")
    assert len(workers) >= 2
    assert not psutil.wait_procs(workers, timeout=DEADLINE)[1]
    assert not (out / "shardkit.json").exists()
    assert "from an earlier run" in told(*given)
    assert tree(out) == tree(crowd / "expected")
