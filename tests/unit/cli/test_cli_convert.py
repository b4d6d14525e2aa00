from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from helpers import (
    DEADLINE,
    FORMATS,
    encoded,
    exif,
    invoke,
    jpeg,
    make_dataset,
    make_folder,
    make_tree,
    opened,
    picture,
    png,
    run,
    run_main,
    shardkit_command,
    tree,
    wait_until,
)

import shardkit
from shardkit.conversion.convert import plan_conversion
from shardkit.conversion.plan import parse_bytes
from shardkit.conversion.staging import WORK_NAME
from shardkit.dataset.manifest import Manifest, load_manifest
from shardkit.errors import BadImages, ShardkitError, UsageError
from shardkit.recipe import parse_color
from shardkit.torch.data.datasets import open_dataset

not_root = pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")


def convert(source: Path, target: Path, *options: object, to: str = "webdataset") -> Result:
    return invoke("convert", "imagefolder", source, target, "--to", to, "--workers", 1, *options)


def made(source: Path, target: Path, *options: object, to: str = "webdataset") -> Manifest:
    result = convert(source, target, *options, to=to)
    assert result.exception is None, result.output
    return load_manifest(target)


# What is shown.


def test_the_summary_names_the_split_that_lacks_a_class(tmp_path: Path) -> None:
    photos = make_tree(
        tmp_path / "p", {f"{n}.jpg": jpeg(seed=int(n[-1])) for n in ("a/1", "a/2", "b/3")}
    )
    result = convert(photos, tmp_path / "out", "--val", 0.5, "--stratify")
    assert "classes without images in val: b" in result.stdout


def test_the_summary_describes_the_dataset(folder: Path, tmp_path: Path) -> None:
    make_tree(folder, {"emu": None, "cat/notes.txt": b"x", "cat/bad.jpg": b"x"})
    make_tree(folder, {"cat/t.jpg": jpeg(exif=exif(6))})
    result = convert(folder, tmp_path / "out", "--on-error", "skip")
    assert result.exit_code == 0
    for words in (
        f"converted {folder} to {tmp_path / 'out'}",
        "7 images in 3 classes, 1 shard of webdataset",
        "classes without images: emu",
        "1 image with an EXIF orientation",
        "1 bad file, listed in skipped.jsonl",
        "1 not an image (cat/notes.txt)",
        f"shardkit verify {tmp_path / 'out'}",
    ):
        assert words in result.stdout
    assert result.stderr == ""


def test_quiet_prints_nothing(folder: Path, tmp_path: Path) -> None:
    done = run_main("convert", "imagefolder", folder, tmp_path / "out", "--to", "lmdb", "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_json_describes_each_dataset(tmp_path: Path) -> None:
    for split in ("train", "val"):
        make_folder(tmp_path / "photos" / split)
    (tmp_path / "photos/val/cat/bad.jpg").write_bytes(b"bad")
    result = convert(tmp_path / "photos", tmp_path / "out", "--json", "--on-error", "skip")
    value = json.loads(result.stdout)
    assert value["seconds"] >= 0
    assert sorted(value["datasets"]) == ["train", "val"]
    val = value["datasets"]["val"]
    manifest = load_manifest(tmp_path / "out/val")
    assert val["path"] == str(tmp_path / "out/val")
    assert (val["rows"], val["digest"], val["format"]) == (6, manifest.digest, "webdataset")
    assert val["skipped"] == [{"path": "cat/bad.jpg", "reason": "its content is not an image"}]
    assert value["datasets"]["train"]["skipped"] == []


def test_a_dry_run_shows_the_plan_and_writes_nothing(folder: Path, tmp_path: Path) -> None:
    (folder / "cat/notes.txt").write_bytes(b"x")
    (folder / "cat/broken.jpg").symlink_to("nowhere")
    result = convert(folder, tmp_path / "out", "--dry-run", "--shard-samples", 4)
    assert "nothing was written" in result.stdout
    assert "6 images, 2 shards" in result.stdout
    assert "cat" in result.stdout
    assert "1 not an image (cat/notes.txt)" in result.stdout
    assert "cat/broken.jpg: a broken link" in result.stdout
    assert os.listdir(tmp_path) == ["photos"]


def test_a_dry_run_as_json(folder: Path, tmp_path: Path) -> None:
    result = convert(folder, tmp_path / "out", "--dry-run", "--json")
    value = json.loads(result.stdout)["plan"][""]
    assert (value["images"], value["shards"]) == (6, 1)
    assert value["classes"] == {"cat": 3, "dog": 3}
    assert value["recipe"]["encode"] == "keep"
    assert value["estimated_bytes"] > sum(p.stat().st_size for p in folder.rglob("*.*"))


def test_a_long_list_of_classes_is_shortened(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "photos", [f"c{n:03d}" for n in range(60)], each=1)
    result = convert(source, tmp_path / "out", "--dry-run")
    assert "... and 10 more" in result.stdout


def test_a_long_list_of_bad_images_is_shortened(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "photos", {f"cat/{n:02d}.jpg": b"x" for n in range(23)})
    result = convert(source, tmp_path / "out")
    listed = [line for line in result.stderr.splitlines() if line.startswith("  bad: ")]
    assert len(listed) == 21
    assert listed[-1] == "  bad: ... and 3 more (--json prints all)"
    (source / "cat/good.png").write_bytes(png())
    given = ("imagefolder", source, tmp_path / "out", "--to", "lmdb", "--workers", 1)
    made = run_main("convert", *given, "--json")
    assert len(json.loads(made.stdout)["bad"]) == 23


def test_bad_images_are_listed(folder: Path, tmp_path: Path) -> None:
    (folder / "cat/new\nline.jpg").write_bytes(b"x")
    (folder / "dog/empty.png").write_bytes(b"")
    result = convert(folder, tmp_path / "out", "--quiet")
    assert isinstance(result.exception, BadImages)
    assert "  bad: cat/new\\nline.jpg: its content is not an image\n" in result.stderr
    assert "  bad: dog/empty.png: it is empty\n" in result.stderr
    given = ("imagefolder", folder, tmp_path / "out", "--to", "lmdb", "--workers", 1)
    as_json = run_main("convert", *given, "--json")
    assert [bad["path"] for bad in json.loads(as_json.stdout)["bad"]] == [
        "cat/new\nline.jpg",
        "dog/empty.png",
    ]
    assert os.listdir(tmp_path) == ["photos"]


# Every option.


@pytest.mark.parametrize("to", FORMATS)
def test_to_chooses_the_format(folder: Path, tmp_path: Path, to: str) -> None:
    assert made(folder, tmp_path / "out", to=to).format == to


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--resize", "10"], {"resize": [10, 10], "resize_mode": "shorter"}),
        (["--resize", "10x12"], {"resize": [10, 12], "resize_mode": "crop"}),
        (["--resize", "10", "--resize-mode", "longer"], {"resize_mode": "longer"}),
        (["--resize", "10x12", "--resize-mode", "pad"], {"resize_mode": "pad"}),
        (["--resize", "10x12", "--resize-mode", "stretch"], {"resize_mode": "stretch"}),
        (["--resize", "10", "--filter", "lanczos"], {"filter": "lanczos"}),
        (["--resize", "10", "--resizer", "torch"], {"resizer": "torch", "filter": "bicubic"}),
        (["--resize", "10", "--dct-scaling"], {"dct_scaling": True, "filter": "bicubic"}),
        (["--resize", "90", "--enlarge"], {"enlarge": True}),
        (["--encode", "webp", "--quality", "70"], {"encode": "webp", "quality": 70}),
        (["--encode", "raw", "--resize", "8x8"], {"encode": "raw", "resize_mode": "crop"}),
        (["--background", "#010203"], {"background": [1, 2, 3]}),
        (["--orient"], {"orient": True}),
        (["--check", "header"], {"check": "header"}),
    ],
    ids=" ".join,
)
def test_the_recipe_follows_the_options(
    folder: Path, tmp_path: Path, options: list[str], expected: dict[str, Any]
) -> None:
    recipe = made(folder, tmp_path / "out", *options).recipe
    assert expected.items() <= recipe.items()


def test_resized_images_have_their_size(folder: Path, tmp_path: Path) -> None:
    made(folder, tmp_path / "out", "--resize", "10x12", "--encode", "png")
    dataset = open_dataset(tmp_path / "out", decode="bytes")
    assert {opened(dataset[row][0]).size for row in range(6)} == {(12, 10)}


def test_transparent_pixels_show_the_background(tmp_path: Path) -> None:
    clear = encoded(picture(8, 8, mode="RGB").convert("RGBA"), "PNG")
    image = opened(clear)
    image.putalpha(0)
    source = make_tree(tmp_path / "photos", {"cat/a.png": encoded(image, "PNG")})
    options = ["--encode", "raw", "--resize", "8x8", "--background", "lime"]
    made(source, tmp_path / "out", *options)
    pixels = open_dataset(tmp_path / "out", decode="numpy")[0][0]
    assert (pixels == (0, 255, 0)).all()


def test_shards_are_limited_by_samples_or_by_size(folder: Path, tmp_path: Path) -> None:
    assert len(made(folder, tmp_path / "a", "--shard-samples", 2).shards) == 3
    assert len(made(folder, tmp_path / "b", "--shard-size", "1B").shards) == 6
    assert len(made(folder, tmp_path / "c", "--shard-size", "4.5KiB").shards) == 2


def test_the_order_follows_shuffle_and_seed(folder: Path, tmp_path: Path) -> None:
    orders = []
    for name, option in [("a", "--seed=0"), ("b", "--seed=1"), ("c", "--no-shuffle")]:
        made(folder, tmp_path / name, option)
        dataset = open_dataset(tmp_path / name, decode="bytes")
        orders.append(list(dataset.keys))
    assert orders[2] == sorted(orders[2])
    assert len({tuple(order) for order in orders}) == 3


def test_a_limit_is_applied(folder: Path, tmp_path: Path) -> None:
    assert made(folder, tmp_path / "out", "--limit", 2).rows == 2


def test_the_class_order_is_plain_natural_or_from_a_file(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "photos", ["c10", "c9"], each=1)
    (tmp_path / "order.txt").write_text("x\nc10\nc9\n")
    for name, order, classes in [
        ("a", "plain", ("c10", "c9")),
        ("b", "natural", ("c9", "c10")),
        ("c", tmp_path / "order.txt", ("x", "c10", "c9")),
    ]:
        assert made(source, tmp_path / name, "--class-order", order).classes == classes


def test_splits_can_be_forced_on_and_off(tmp_path: Path) -> None:
    make_folder(tmp_path / "photos/train")
    assert made(tmp_path / "photos", tmp_path / "a", "--no-splits").classes == ("train",)
    result = convert(tmp_path / "photos", tmp_path / "b", "--splits")
    assert result.exit_code == 0
    assert load_manifest(tmp_path / "b/train").classes == ("cat", "dog")


def test_force_replaces_a_dataset(folder: Path, tmp_path: Path) -> None:
    made(folder, tmp_path / "out")
    result = convert(folder, tmp_path / "out", "--limit", 1)
    assert isinstance(result.exception, UsageError)
    assert made(folder, tmp_path / "out", "--limit", 1, "--force").rows == 1


@pytest.mark.slow
def test_any_number_of_workers_writes_the_same_files(folder: Path, tmp_path: Path) -> None:
    for workers in (1, 3):
        options = ["--workers", workers, "--shard-samples", 2]
        made(folder, tmp_path / f"out {workers}", *options, to="hdf5")
    assert tree(tmp_path / "out 1") == tree(tmp_path / "out 3")


# What cannot be done as asked.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--resize", "big"], "--resize big is neither"),
        (["--resize", "0"], "--resize 0x0 is not from 1"),
        (["--resize", ""], "--resize"),
        (["--resize-mode", "pad"], "--resize-mode requires --resize"),
        (["--resizer", "torch"], "--resizer requires --resize"),
        (["--dct-scaling"], "--dct-scaling requires --resize"),
        (["--dct-scaling", "--resize", "8", "--resizer", "torch"], "with the resizer pillow"),
        (["--resizer", "torch", "--resize", "8", "--filter", "lanczos"], "has no filter lanczos"),
        (["--shard-size", "lots"], "--shard-size lots is not a size such as"),
        (["--shard-size", "0"], "shard size 0"),
        (["--shard-size", "1MB", "--shard-samples", "4"], "exclude each other"),
        (["--dry-run", "--plan-only"], "choose one"),
        (["--shard-size", "-1MB"], "--shard-size"),
        (["--shard-size", "1" * 400], "--shard-size"),
        (["--background", "transparentish"], "is not a color such as"),
        (["--background", "rgb(300,0,0)"], "background (300, 0, 0)"),
        (["--encode", "raw"], "requires images of one size"),
        (["--encode", "raw", "--resize", "8"], "requires images of one size"),
        (["--encode", "png", "--quality", "80"], "quality has no effect"),
        (["--quality", "0"], "quality 0 is not"),
        (["--class-order", "missing.txt"], "missing.txt"),
        (["--resize", "9" * 5000], "--resize 9999"),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else "",
)
def test_contradictory_options_are_usage_errors(
    folder: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    result = convert(folder, tmp_path / "out", *options)
    assert isinstance(result.exception, UsageError), repr(result.exception)[:200]
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)
    assert os.listdir(tmp_path) == ["photos"]


@pytest.mark.parametrize(
    "options",
    [
        ["--to", "zip"],
        ["--encode", "gif"],
        ["--filter", "nearest"],
        ["--resizer", "opencv"],
        ["--resize-mode", "cover"],
        ["--check", "all"],
        ["--on-error", "ignore"],
        ["--workers", "0"],
        ["--seed", "x"],
        ["--quality", "high"],
        ["--limit", "1.5"],
        ["--limit", "0"],
        ["--shard-samples", "0"],
    ],
    ids=" ".join,
)
def test_invalid_values_exit_with_2(folder: Path, tmp_path: Path, options: list[str]) -> None:
    result = convert(folder, tmp_path / "out", *options)
    assert result.exit_code == 2
    assert options[1] in result.stderr


def test_missing_arguments_exit_with_2(folder: Path) -> None:
    assert invoke("convert", "imagefolder").exit_code == 2
    assert invoke("convert", "imagefolder", folder).exit_code == 2
    assert invoke("convert", "imagefolder", folder, "out").exit_code == 2


def fails(*arguments: object, code: int) -> str:
    """Return the single line that the command prints before it exits with ``code``."""
    done = run_main("convert", "imagefolder", *arguments)
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("  bad: ")]
    assert line.startswith("shardkit: error: ")
    return line


def test_unusable_sources_exit_with_2_and_one_line(tmp_path: Path) -> None:
    (tmp_path / "file.jpg").write_bytes(jpeg())
    make_tree(tmp_path / "empty", {"notes.txt": b"x"})
    for name, words in [
        ("missing", "does not exist"),
        ("file.jpg", "is a file, not a folder"),
        ("empty", "there are no images in"),
    ]:
        line = fails(tmp_path / name, tmp_path / "out", "--to", "lmdb", code=2)
        assert words in line
        assert str(tmp_path / name) in line
    assert not (tmp_path / "out").exists()


def test_unusable_targets_exit_with_2_and_one_line(folder: Path, tmp_path: Path) -> None:
    made(folder, tmp_path / "dataset", "--seed", 1)
    make_tree(tmp_path / "other", {"thesis.txt": b"x"})
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "loop").symlink_to("loop")
    for target, words in [
        (tmp_path / "dataset", "--force"),
        (tmp_path / "other", "thesis.txt"),
        (tmp_path / "file", "file"),
        (tmp_path / "file" / "below", "file"),
        (tmp_path / "loop", "loop"),
        (folder / "out", "overlap"),
        (tmp_path / ("x" * 300), "xxx"),
        (Path("/proc/shardkit/out"), "/proc/shardkit"),
    ]:
        assert words in fails(folder, target, "--to", "webdataset", code=2)


@not_root
def test_a_target_without_permission_exits_with_2_and_one_line(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    assert "denied" in fails(folder, tmp_path / "locked/out", "--to", "lmdb", code=2)


def test_bad_images_exit_with_1(folder: Path, tmp_path: Path) -> None:
    (folder / "cat/bad.jpg").write_bytes(b"x")
    line = fails(folder, tmp_path / "out", "--to", "lmdb", code=1)
    assert "1 bad file" in line
    assert not (tmp_path / "out").exists()


def test_names_that_are_not_utf8_can_be_shown(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "photos \udcff")
    (source / "cat/bad \udcfe.jpg").write_bytes(b"x")
    (source / "dog \udcfd").mkdir()
    target = tmp_path / "out \udcff"
    fails(source, target, "--to", "lmdb", code=1)
    for options in (["--dry-run"], ["--on-error", "skip"], ["--on-error", "skip", "--force"]):
        done = run_main("convert", "imagefolder", source, target, "--to", "lmdb", *options)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr[-300:]
    assert load_manifest(target).rows == 6


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.slow
def test_names_that_the_terminal_cannot_show_are_escaped(tmp_path: Path, encoding: str) -> None:
    source = make_folder(tmp_path / "photos ★", ["größe ★", "cat"])
    (source / "größe ★/notes ★.txt").write_bytes(b"x")
    make_tree(source, {"leer ★": None})
    env = {"PYTHONIOENCODING": encoding}
    for options in (["--dry-run"], []):
        command = ["convert", "imagefolder", source, tmp_path / "out ★", "--to", "lmdb", *options]
        done = run(*command, env=env)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr[-300:]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("500000", 500_000),
        ("256MiB", 256 << 20),
        ("1GB", 10**9),
        ("1.5 kb", 1500),
        ("2tib", 2 << 40),
        ("7b", 7),
        (" 1 MB ", 10**6),
    ],
)
def test_valid_sizes_are_parsed(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text", ["", "MB", "1XB", "-1", "1e6", "1,5MB", "0x10", "1MB2", "nan", "inf"]
)
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size such as"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "color"),
    [
        ("white", (255, 255, 255)),
        ("#808080", (128, 128, 128)),
        ("#abc", (170, 187, 204)),
        ("rgb(124,116,104)", (124, 116, 104)),
        ("#01020304", (1, 2, 3)),
        ("hsl(120, 100%, 50%)", (0, 255, 0)),
    ],
)
def test_valid_colors_are_parsed(text: str, color: tuple[int, int, int]) -> None:
    assert parse_color(text) == color


# Interruptions.


def children_of(parent: int) -> list[int]:
    """Return the processes whose parent is ``parent``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                status = (entry / "stat").read_text()
                if int(status.rpartition(")")[2].split()[1]) == parent:
                    found.append(int(entry.name))
    return found


def is_alive(process: int) -> bool:
    """Return whether a process runs and is not a zombie."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")


CROWD = ["--shard-samples", "3", "--resize", "12"]


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder "photos" with many images, and "expected", the dataset of an uninterrupted run."""
    root = tmp_path_factory.mktemp("crowd")
    made(make_folder(root / "photos", each=150), root / "expected", *CROWD)
    return root


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="it needs /proc")
@pytest.mark.parametrize(
    ("number", "code", "group"),
    [
        (signal.SIGINT, 130, False),
        (signal.SIGINT, 130, True),  # as a terminal sends it: to all processes
        (signal.SIGTERM, 143, False),
        (signal.SIGHUP, 129, False),
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
    options = ["--to", "webdataset", "--workers", "2", *CROWD]
    command = shardkit_command("convert", "imagefolder", crowd / "photos", out, *options)
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    parts = out / WORK_NAME / "state" / "parts"
    try:
        wait_until(lambda: list(parts.glob("[0-9]*/result.json")), "the first shard")
        workers = children_of(process.pid)
        if group:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        stdout, stderr = process.communicate(timeout=DEADLINE)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == code
    assert stdout == ""
    assert "Traceback" not in stderr
    if number is not signal.SIGKILL:
        assert stderr.splitlines()[-1].startswith("shardkit: error: interrupted.")
    assert len(workers) >= 2
    wait_until(lambda: not any(map(is_alive, workers)), "the end of the workers")
    assert not (out / "shardkit.json").exists()
    done = run_main(*command[3:])
    assert done.returncode == 0, done.stderr
    assert "kept from an earlier run" in done.stdout
    assert tree(out) == tree(crowd / "expected")


def test_an_internal_error_is_not_hidden(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a mistake")

    monkeypatch.setattr("shardkit.cli.convert.convert", fail)
    result = convert(folder, tmp_path / "out")
    assert isinstance(result.exception, RuntimeError)
    assert not isinstance(result.exception, ShardkitError)


def test_mixed_image_types_are_stored_unchanged(tmp_path: Path) -> None:
    files: dict[str, bytes | None] = {
        "cat/a.jpg": jpeg(),
        "cat/b.png": png(),
        "cat/c.webp": encoded(kind="WEBP"),
        "cat/d.bmp": encoded(kind="BMP"),
        "cat/e.gif": encoded(kind="GIF"),
        "cat/f.tiff": encoded(kind="TIFF"),
        "cat/g.ppm": encoded(kind="PPM"),
    }
    source = make_tree(tmp_path / "photos", files)
    for to in FORMATS:
        made(source, tmp_path / to, "--no-shuffle", to=to)
        dataset = open_dataset(tmp_path / to, decode="bytes")
        assert [dataset[row][0] for row in range(7)] == list(files.values())


@pytest.mark.parametrize("options", [["--enlarge"], ["--filter", "lanczos"]])
def test_resize_options_are_refused_without_resize(
    folder: Path, tmp_path: Path, options: list[str]
) -> None:
    message = fails(folder, tmp_path / "out", "--to", "lmdb", *options, code=2)
    assert f"{options[0]} requires --resize" in message
    assert not (tmp_path / "out").exists()


def test_a_folder_in_place_of_the_source_type_suggests_the_command(folder: Path) -> None:
    meant = "shardkit convert imagefolder"
    for arguments, said in (
        (["out"], f"{meant} {folder} out --to lmdb"),
        ([], f"{meant} {folder} DST --to lmdb"),
        (["out", "--to", "hdf5"], f"{meant} {folder} out --to hdf5"),
    ):
        done = run_main("convert", folder, *arguments)
        assert done.returncode == 2
        assert said in done.stderr


def test_python_and_the_command_write_the_same_dataset(folder: Path, tmp_path: Path) -> None:
    from_python = shardkit.convert(
        str(folder),
        str(tmp_path / "python"),
        to="hdf5",
        resize=(9, 12),
        enlarge=True,
        background="#ff8000",
        shard_size="1 kB",
    )
    command = made(
        folder,
        tmp_path / "command",
        *("--resize", "9x12", "--enlarge", "--background", "#ff8000", "--shard-size", "1kB"),
        to="hdf5",
    )
    assert from_python.manifests[""].digest == command.digest
    plan = plan_conversion(folder, tmp_path / "new", to="hdf5", resize="9x12")
    assert not (tmp_path / "new").exists()
    assert plan.options.recipe.resize_mode == "crop"


@pytest.mark.parametrize("to", FORMATS)
def test_the_summary_counts_the_bytes_of_the_source(folder: Path, tmp_path: Path, to: str) -> None:
    result = convert(folder, tmp_path / "out", "--json", to=to)
    files = sum(path.stat().st_size for path in folder.rglob("*.*"))
    assert json.loads(result.stdout)["bytes_read"] == files
    assert "MB/s read" in convert(folder, tmp_path / "other", to=to).stdout


def test_a_dataset_is_not_the_source_of_another_kind(folder: Path, tmp_path: Path) -> None:
    dataset = make_dataset(folder, tmp_path / "dataset")
    for kind in ("lmdb", "hdf5", "webdataset"):
        result = invoke("convert", kind, dataset, tmp_path / "out", "--to", "lmdb")
        assert "use `shardkit convert dataset`" in str(result.exception)
    for kind, suffix in (("lmdb", "lmdb"), ("hdf5", "h5"), ("webdataset", "tar")):
        made = make_dataset(folder, tmp_path / kind, to=kind)
        for path in (made, made / f"shard-000000.{suffix}"):
            for command in (("convert", kind), ("attach", kind)):
                more = ("--to", "lmdb") if command[0] == "convert" else ()
                result = invoke(*command, path, tmp_path / "out", "--on-error", "skip", *more)
                assert isinstance(result.exception, UsageError)
                assert "use `shardkit convert dataset`" in str(result.exception)


def test_a_dataset_is_not_a_folder_of_images(folder: Path, tmp_path: Path) -> None:
    dataset = make_dataset(folder, tmp_path / "dataset")
    other = make_dataset(folder, tmp_path / "other", to="webdataset")
    for command in (
        ("convert", "imagefolder", other, tmp_path / "out", "--to", "lmdb"),
        ("append", dataset, "--from", other),
        ("verify", dataset, "--against", other),
    ):
        message = str(invoke(*command).exception)
        assert message.startswith(f"{other} is a shardkit dataset, not a folder of images: use ")
        assert "`shardkit convert dataset` or `shardkit merge`" in message


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_images_next_to_class_folders_have_a_line_with_the_remedy(
    tmp_path: Path, more: tuple[str, ...]
) -> None:
    files = {"cat/a.jpg": jpeg(), "b.jpg": jpeg(seed=1), "c.jpg": jpeg(seed=2), "d.txt": b"text"}
    source = make_tree(tmp_path / "photos", files)
    options = ("--to", "lmdb", "--workers", 1, *more)
    done = invoke("convert", "imagefolder", source, tmp_path / "made", *options)
    assert "loose     2 images next to the class folders, left out: move them" in done.stdout
