"""Every command prints one JSON object with ``--json``: also if it fails or is used wrongly."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import tarfile
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from buckets import BUCKET, Bucket
from helpers import (
    DEADLINE,
    make_folder,
    make_tree,
    run_main,
    shardkit_command,
    wait_until,
)
from repairing import flip

import shardkit
from shardkit import convert, fields, open_dataset

COMMON = ["exit_code", "seconds", "error"]
ALONE = "--workers 1"
CROP = "--decode CenterCrop(8)"


class Row(NamedTuple):
    """How a command succeeds and fails; IN is the folder of inputs, OUT is new."""

    success: str
    fields: str
    """The fields that it prints."""
    failure: str
    """Words with which it exits with 1."""
    fault: str = "CorruptDataset"
    """The error; "" if it finished, and found something."""
    mark: str = ""
    """That of the success."""


TABLE = {
    "convert imagefolder": Row(
        f"IN/photos OUT --to lmdb {ALONE}",
        "bytes_read reused_shards unchanged datasets",
        f"IN/broken OUT --to lmdb {ALONE}",
        "BadImages",
    ),
    "work": Row("IN/planned --claim", "tasks", "IN/planned-broken --claim", "BadImages"),
    "commit": Row(
        "IN/built",
        "bytes_read reused_shards unchanged datasets",
        "IN/unbuilt",
        "ConversionFailed",
    ),
    "attach": Row(
        f"IN/x.tar OUT {ALONE}",
        "path kept unchanged remembered rows",
        f"IN/broken.tar OUT {ALONE}",
        "BadImages",
    ),
    "upload": Row(f"IN/made s3://{BUCKET}/x", "url uploaded bytes", f"IN/bad s3://{BUCKET}/y"),
    "verify": Row(f"IN/made {ALONE}", "ok level findings", f"IN/damaged {ALONE}", ""),
    "repair": Row(
        f"IN/made --from IN/photos {ALONE}",
        "ok files intact findings",
        f"IN/repaired --from IN/lost {ALONE}",
        "",
    ),
    "index": Row("IN/made", "rows", "IN/damaged", "CorruptShard"),
    "diff": Row("IN/made IN/made", "equal splits", "IN/made IN/other", ""),
    "info": Row("IN/made", "datasets", "IN/bad"),
    "show": Row("IN/made 1", "records", "IN/damaged 1", "CorruptShard"),
    "report": Row(
        f"IN/made {ALONE}",
        "datasets findings normalize",
        f"IN/made --fail-on exact-duplicate {ALONE}",
        "",
    ),
    "append": Row(
        f"IN/grown --from IN/more {ALONE}",
        "images rows left_out",
        f"IN/other --from IN/broken {ALONE}",
        "BadImages",
    ),
    "fields add": Row(
        "IN/fielded --from IN/numbers.npy --field more",
        "written fields new_classes matched rows digests",
        "IN/bad --from IN/numbers.npy --field number",
    ),
    "fields remove": Row("IN/fielded number", "written fields rows", "IN/bad number"),
    "fields undo": Row("IN/fielded", "written fields rows", "IN/bad"),
    "merge": Row("IN/made IN/other OUT", "rows shards", "IN/made IN/bad OUT"),
    "split": Row("IN/made --val 0.4 --stratify --out OUT", "splits", "IN/bad --val 0.4 --out OUT"),
    "export": Row("IN/made OUT", "records files bytes left_out", "IN/damaged OUT", "CorruptShard"),
    "doctor": Row("", "findings diagnosis profile", "IN/bad"),
    "tune": Row(
        f"IN/made {CROP} --batch-size 2 --budget 1s", "ranking paste", "IN/bad", mark="measures"
    ),
    "bench": Row(
        f"IN/made {CROP} --rounds 1 --seconds 0.05 --cache warm",
        "shardkit_bench headline",
        "IN/bad",
        mark="slow",
    ),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("inputs")
    photos = make_folder(base / "photos", each=5)
    shutil.copy(photos / "cat/000.jpg", photos / "cat/copy.jpg")
    make_folder(base / "more", ["cat", "dog"], each=7)
    for path in (base / "more").glob("*/00[0-4].*"):
        path.unlink()
    make_tree(shutil.copytree(photos, base / "broken"), {"cat/bad.jpg": b"x"})
    (shutil.copytree(photos, base / "lost") / "cat/000.jpg").unlink()
    for name, source in (("made", photos), ("other", base / "more"), ("grown", photos)):
        convert(source, base / name, to="lmdb", shard_samples=4, workers=1)
    shutil.copytree(base / "grown", base / "fielded")
    np.save(base / "numbers.npy", np.arange(len(open_dataset(base / "fielded"))))
    fields.add(base / "fielded", base / "numbers.npy", field=["number"])
    for name in ("damaged", "bad"):
        shutil.copytree(base / "made", base / name)
    for path in (base / "damaged").glob("shard-*"):
        os.truncate(path, 9000)
    shutil.copytree(base / "damaged", base / "repaired")
    flip(base / "bad/shardkit.json")
    plans = {
        "planned": photos,
        "planned-broken": base / "broken",
        "built": photos,
        "unbuilt": photos,
    }
    for name, source in plans.items():
        run_main("convert", "imagefolder", source, base / name, "--to", "lmdb", "--plan-only")
    run_main("work", base / "built", "--claim")
    for name, members in (("x", ["000.jpg"]), ("broken", ["000.jpg", "bad.jpg"])):
        with tarfile.open(base / f"{name}.tar", "w") as tar:
            for member in members:
                tar.add(base / "broken/cat" / member, member)
    assert run_main("attach", base / "x.tar", base / "attached", *ALONE.split()).returncode == 0
    return base


def printed(name: str, words: str, inputs: Path, out: Path) -> dict[str, Any]:
    """Run a command; return the only object that it prints, with its exit code."""
    places = {"IN": str(inputs), "OUT": str(out)}
    given = [*name.split(), *words.split(), "--json"]
    for short, place in places.items():
        given = [word.replace(short, place) if word.startswith(short) else word for word in given]
    done = run_main(*given)
    value: dict[str, Any] = json.loads(done.stdout)
    assert list(value)[: len(COMMON)] == COMMON
    assert value["exit_code"] == done.returncode, done.stderr
    assert value["seconds"] >= 0
    return value


ROWS = [
    pytest.param(name, row, id=name, marks=[getattr(pytest.mark, row.mark)] if row.mark else [])
    for name, row in TABLE.items()
]


@pytest.mark.parametrize(("name", "row"), ROWS)
def test_success(name: str, row: Row, inputs: Path, tmp_path: Path, bucket: Bucket) -> None:
    value = printed(name, row.success, inputs, tmp_path / "out")
    assert (value["exit_code"], value["error"]) == (0, None)
    assert not set(row.fields.split()) - value.keys()


@pytest.mark.parametrize(("name", "row"), TABLE.items(), ids=TABLE)
def test_failure(name: str, row: Row, inputs: Path, tmp_path: Path, bucket: Bucket) -> None:
    value = printed(name, row.failure, inputs, tmp_path / "out")
    assert value["exit_code"] == 1
    error = value["error"]
    assert (error["type"] if error else "") == row.fault, error
    if error:
        assert list(error) == ["type", "what", "where", "remedy"]
    if row.fault == "BadImages":
        (bad,) = value["tasks"][0]["bad"] if name == "work" else value["bad"]
        assert bad["path"].endswith("bad.jpg")


def test_usage_errors(tmp_path: Path) -> None:
    for name in TABLE:
        value = printed(name, "--zzz", tmp_path, tmp_path)
        error = value["error"]
        assert (value["exit_code"], error["type"]) == (2, "NoSuchOption")
        assert error["where"] == "--zzz"
        assert f"{name} " in error["remedy"] or name == "attach"


def test_the_table_has_all_commands() -> None:
    names = re.findall(r"^  ([a-z]\S*) {2,}\S", run_main("--help").stdout, re.MULTILINE)
    assert {name.partition(" ")[0] for name in TABLE} == {*names} - {"completion"}


def test_the_version_is_an_object() -> None:
    for words in ("--version --json", "--json --version"):
        shown = json.loads(run_main(*words.split()).stdout)
        assert list(shown) == [*COMMON, "version", "compiled_module"]
        assert shown["version"] == shardkit.__version__


NEW_CLICK = tuple(map(int, version("click").split(".")[:2])) >= (8, 4)
"""Whether Click names options like a mistyped one in a sentence of its own."""


def test_where_and_remedy_are_told_apart(tmp_path: Path) -> None:
    for words, what, where, remedy in (
        ("verify nowhere", "nowhere is not a shardkit dataset: the dir", "nowhere", None),
        ("verfy x", "No such command 'verfy'", None, "Did you mean verify?"),
        (
            "convert nowhere b --to lmdb",
            "No such command 'nowhere'",
            None,
            "No file or folder has this name either: check the name.",
        ),
        (
            "convert s3://bucket/x-*.tar b --to lmdb",
            "No such command 's3://bucket/x-*.tar'",
            None,
            "Before a URL, state the type of source: shardkit convert webdataset URL DST.",
        ),
        ("upload a b", "b is not a URL", "b", "use az://, gs:// or s3://"),
        (
            "convert imagefolder a b --tto lmdb",
            "No such option",
            "--tto",
            "Did you mean one of: '--test', '--to'?"
            if NEW_CLICK
            else "Try 'shardkit convert imagefolder --help' for help.",
        ),
        ("convert imagefolder /a/b c --to lmdb", "the source folder /a/b does", "/a/b", None),
    ):
        error = printed(words, "", tmp_path, tmp_path / "out")["error"]
        assert error["what"].startswith(what)
        assert (error["where"], error["remedy"]) == (where, remedy)


def test_the_place_of_an_error_is_not_looked_for_in_its_message(
    inputs: Path, tmp_path: Path
) -> None:
    def convert_to(source: str, *options: str) -> tuple[str | Path, ...]:
        words = "convert", "imagefolder", inputs / source, tmp_path / "out", "--to", "lmdb"
        return (*words, *options)

    for words, where in (
        (("info", ""), "DATASET"),
        (("convert", "imagefolder", "", tmp_path / "out", "--to", "lmdb"), "SRC"),
        (("convert", "imagefolder", inputs / "photos", inputs / "made", "--to", "hdf5"), "made"),
        (("convert", "hdf5", inputs / "none.h5", tmp_path / "out", "--to", "lmdb"), "none.h5"),
        (("info", inputs / "bad"), "bad/shardkit.json"),
        (("show", inputs / "damaged", "1"), ".lmdb"),
        (("verify", inputs / "made", "--against", inputs / "none"), "/none"),
        (("verify", inputs / "made", "--check-receipt", inputs / "none.json"), "/none.json"),
        (("fields", "add", inputs / "made", "--from", inputs / "photos/x.txt"), "/x.txt"),
        (convert_to("broken", "--workers", "1"), "/broken"),  # "1 bad file" is no place
        (convert_to("photos", "--resize-mode", "pad"), "--resize-mode"),
        (convert_to("photos", "--exclude", "x", "--dry-run", "--plan-only"), "--dry-run"),
    ):
        error = json.loads(run_main(*words, "--json").stdout)["error"]
        assert error["where"].endswith(where), error


@pytest.mark.slow
def test_a_signal_is_an_error(inputs: Path, tmp_path: Path) -> None:
    started = tmp_path / "started"
    script = (
        f"import time; from pathlib import Path; Path({str(started)!r}).touch(); time.sleep(99)"
    )
    (tmp_path / "slow.py").write_text(f"def transform(image):\n    {script}\n    return image\n")
    words = ("bench", inputs / "made", "--transform", "slow:transform", "--json", "--quiet")
    command = shardkit_command(*words)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        wait_until(started.exists, "the measurement")
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=DEADLINE)
    value = json.loads(output)
    assert (value["exit_code"], process.returncode) == (143, 143)
    assert value["error"]["what"] == "interrupted"
