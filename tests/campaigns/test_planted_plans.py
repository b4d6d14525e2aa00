"""Attacks by the plan of jobs: `work` runs no code of its choice, and reads only the source."""

from __future__ import annotations

import json
import os
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from campaign import draw, points
from helpers import invoke, jpeg, limit_memory, make_folder, make_tree
from hostile.forging import WRONG, changed, leaves
from refusals import refused

from shardkit import ShardkitError, open_dataset, open_source
from shardkit.cluster.jobs import Jobs
from shardkit.cluster.ledger import Ledger
from shardkit.cluster.work import commit, plan_jobs
from shardkit.contracts import Source
from shardkit.errors import ConversionFailed, UsageError
from shardkit.record import load_json
from shardkit.sources import library_process
from shardkit.testing.tools import call_in

SECRET = jpeg(seed=77)


def plan(source: Source | Path, target: Path, **options: Any) -> Path:
    plan_jobs(source, target, **{"to": "webdataset", **options})
    return target


def forge(target: Path, change: Callable[[dict[str, Any]], object], name: str = "plan") -> None:
    """Change a file of the plan."""
    (path,) = target.rglob(f"jobs/{name}.json")
    value = load_json(path.read_bytes())
    change(value)
    path.write_text(json.dumps(value))


def rename(target: Path, name: str) -> None:
    """Let the first image have another name, and the size and time of the secret."""
    status = os.stat(target.parent / "private/holiday.jpg")

    def change(value: dict[str, Any]) -> None:
        entry = value["entries"][0]
        entry[0], entry[3], entry[4] = name, status.st_size, status.st_mtime_ns

    forge(target, change, "000000")


@pytest.fixture(autouse=True)
def private(tmp_path: Path) -> Path:
    make_tree(tmp_path / "private", {"holiday.jpg": SECRET})
    return tmp_path / "private"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "photos", each=2)


def environment(path: Path, values: dict[bytes, bytes]) -> Path:
    with lmdb.open(str(path)) as env, env.begin(write=True) as txn:
        for key, value in values.items():
            txn.put(key, value)
    return path


# --- code ---


def with_function(value: dict[str, Any], path: str) -> None:
    value["source"] = ["lmdb", path]
    for split in value["splits"]:
        split["source"] |= {"layout": "function"}


@pytest.mark.parametrize("place", ["{name}@{path}", "{path}", "/{name}@{path}", "./{name}@{path}"])
def test_a_plan_names_no_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    code = f"open({str(tmp_path / 'ran')!r}, 'w')".encode()
    path = environment(tmp_path / "lm", {code: SECRET})
    target = plan(open_source("lmdb", path, layout="images"), tmp_path / "out")
    named = place.format(name="cProfile:run", path=path)
    forge(target, lambda value: with_function(value, named))
    monkeypatch.chdir(tmp_path)
    for arguments in (("work", target, "--claim"), ("work", target, "--task", 0)):
        found = invoke(*arguments)
        assert isinstance(found.exception, UsageError)
    assert not (tmp_path / "ran").exists()


def test_the_user_of_work_names_the_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tree(tmp_path, {"ours.py": b"def image(key, value):\n    return bytes(reversed(value))\n"})
    monkeypatch.chdir(tmp_path)
    library_process.HELPER.end()  # the next one sees this folder
    path = environment(tmp_path / "lm", {b"a": SECRET[::-1]})
    target = plan(open_source("lmdb", path, layout="ours:image"), tmp_path / "out")
    found = invoke("work", target, "--claim")
    assert isinstance(found.exception, UsageError)
    assert f"MODULE:FUNCTION@{path}" in str(found.exception)
    assert f"shardkit work {target} --source" in str(found.exception)
    found = invoke("work", target, "--claim", "--source", f"ours:image@{path}")
    assert found.exit_code == 0, found.exception
    commit(target)  # which reads no image, and needs no function
    assert open_dataset(target, decode="bytes")[0][0] == SECRET


def test_a_plan_chooses_no_source_of_another_package(
    tmp_path: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = plan(photos, tmp_path / "out")
    opened: list[str] = []
    monkeypatch.setattr("shardkit.cluster.plan_files.get_source", opened.append)
    forge(target, lambda value: value.update(source=["theirs", str(photos)]))
    found = invoke("work", target, "--claim")
    assert isinstance(found.exception, UsageError)
    assert "kind='theirs'" in str(found.exception)
    assert not opened
    invoke("work", target, "--claim", "--kind", "theirs")
    assert opened == ["theirs"]


def test_the_source_is_named_before_it_is_read(tmp_path: Path, photos: Path) -> None:
    target = plan(photos, tmp_path / "out")
    forge(target, lambda value: value.update(source=["lmdb", "/nowhere/a\n@b"]))
    found = invoke("work", target, "--claim")
    assert found.exit_code
    assert "reading lmdb /nowhere/a\\n@b\n" in found.stderr
    forge(target, lambda value: value.update(source=["imagefolder", "photos"]))
    with pytest.raises(UsageError, match="damaged"):
        Jobs(Ledger(target))


# --- files outside of the source ---

OUTSIDE = ["../private/holiday.jpg", "{private}/holiday.jpg", "cat/../../private/holiday.jpg"]


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("options", [{}, {"resize": 16}, {"on_error": "skip"}])
def test_images_outside_of_a_folder_are_not_read(
    tmp_path: Path, photos: Path, private: Path, name: str, options: dict[str, Any]
) -> None:
    target = plan(photos, tmp_path / "out", **options)
    rename(target, name.format(private=private))
    built = Jobs(Ledger(target), photos).build(0).result
    assert [each.reason for each in built.bad] == ["its name is not a plain path inside the source"]
    assert SECRET not in b"".join(path.read_bytes() for path in target.rglob("*.tar"))


@pytest.mark.parametrize("name", [*OUTSIDE, "link.jpg", "folder/holiday.jpg"])
def test_images_outside_of_the_root_of_a_table_are_not_read(
    tmp_path: Path, photos: Path, private: Path, name: str
) -> None:
    (photos / "list.csv").write_text("file_name\ncat/000.jpg\ndog/000.jpg\n")
    (photos / "link.jpg").symlink_to(private / "holiday.jpg")
    (photos / "folder").symlink_to(private)
    target = plan(open_source("table", photos / "list.csv"), tmp_path / "out", on_error="skip")
    rename(target, name.format(private=private))
    built = Jobs(Ledger(target)).build(0).result
    assert len(built.bad) == 1
    assert "root folder" in built.bad[0].reason
    assert SECRET not in b"".join(path.read_bytes() for path in target.rglob("*.tar"))


@pytest.mark.parametrize("name", [*OUTSIDE, "link.jpg", "folder/holiday.jpg"])
def test_values_outside_of_the_root_of_a_table_are_not_read(
    tmp_path: Path, photos: Path, private: Path, name: str
) -> None:
    (photos / "list.csv").write_text("file_name,more\ncat/000.jpg,cat/001.jpg\n")
    (photos / "link.jpg").symlink_to(private / "holiday.jpg")
    (photos / "folder").symlink_to(private)
    source = open_source("table", photos / "list.csv", file="more=more:bytes")
    target = plan(source, tmp_path / "out", on_error="skip")
    status = os.stat(private / "holiday.jpg")
    stated = [name.format(private=private), status.st_size, status.st_mtime_ns]

    def change(value: dict[str, Any]) -> None:
        value["entries"][0][6] = json.dumps({"more": stated})

    forge(target, change, "000000")
    built = Jobs(Ledger(target)).build(0).result
    assert len(built.bad) == 1
    assert "root folder" in built.bad[0].reason


def test_arrays_outside_of_a_folder_are_not_read(tmp_path: Path, private: Path) -> None:
    pixels = np.zeros((8, 8, 3), np.uint8)
    (tmp_path / "arrays/cat").mkdir(parents=True)
    for path in (tmp_path / "arrays/cat/a.npy", private / "x.npy"):
        np.save(path, pixels)
    target = plan(open_source("npy", tmp_path / "arrays"), tmp_path / "out", on_error="skip")
    rename(target, "../private/x.npy")
    built = Jobs(Ledger(target)).build(0).result
    assert [each.reason for each in built.bad] == ["its name is not a plain path inside the source"]


def test_a_commit_reads_nothing_of_the_source(tmp_path: Path, photos: Path) -> None:
    target = plan(photos, tmp_path / "out")
    for number in range(len(Jobs(Ledger(target)))):
        Jobs(Ledger(target)).build(number)
    forge(target, lambda value: value.update(source=["hdf5", "/nowhere"]))
    assert commit(target).manifests[""].rows == 4


# --- values ---


def no_cuts(value: dict[str, Any]) -> None:
    value["splits"][0]["cuts"] = []


def huge_cuts(value: dict[str, Any]) -> None:
    value["splits"][0]["cuts"] = [0, 10**18]


def another_field(value: dict[str, Any]) -> None:
    more = {"name": "more", "kind": "text", "dtype": None, "shape": None, "classes": None}
    value["schema"].append(more)


@pytest.mark.parametrize("change", [no_cuts, huge_cuts, another_field])
def test_a_plan_that_contradicts_itself_is_an_error(
    tmp_path: Path, photos: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    ready = plan(photos, tmp_path / "ready")
    Jobs(Ledger(ready)).build(0)
    forge(ready, change)
    for arguments in (("info",), ("work", "--claim", "--take-over"), ("commit",)):
        found = invoke(arguments[0], ready, *arguments[1:])
        assert isinstance(found.exception, ShardkitError | SystemExit | None), found.exception


@pytest.mark.parametrize(
    "change", [{"notes": [[[]]]}, {"entry": {"rows": -1}}, {"notes": {"orientation": "4"}}]
)
def test_a_damaged_result_counts_as_not_done(
    tmp_path: Path, photos: Path, change: dict[str, Any]
) -> None:
    ready = plan(photos, tmp_path / "ready")
    Jobs(Ledger(ready)).build(0)
    (path,) = ready.rglob("result.json")
    value = json.loads(path.read_bytes())
    for name, new in change.items():
        value[name] = {**value[name], **new} if isinstance(new, dict) else new
    path.write_text(json.dumps(value))
    with refused(ConversionFailed, "1"):
        commit(ready)
    assert not Jobs(Ledger(ready)).build(0).kept
    assert commit(ready).manifests[""].rows == 4


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["plan.json", "000000.json", "result.json"])
def test_a_wrong_value_is_an_error_and_takes_no_memory(
    tmp_path: Path, photos: Path, name: str
) -> None:
    ready = plan(photos, tmp_path / "ready", shard_samples=3)
    for number in range(2):
        Jobs(Ledger(ready)).build(number)
    files = [path for path in ready.rglob(name) if "claims" not in path.parts]
    (path,) = [each for each in files if each.parent.name in ("jobs", "000000")]
    value = json.loads(path.read_bytes())
    cases = [(at, new) for at in leaves(value) for new in WRONG]
    cases = draw(name).sample(cases, min(len(cases), points(80, 3000)))
    target = tmp_path / "target"
    assert call_in("fork", carried_out, (ready, path.relative_to(ready), target, cases)) == []


def carried_out(work: tuple[Path, Path, Path, list[tuple[tuple[Any, ...], Any]]]) -> list[str]:
    """Carry out plans with one wrong value each; return errors that nobody expects."""
    ready, name, target, cases = work
    limit_memory(3 << 30)
    wrong = []
    for at, new in cases:
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(ready, target)
        value = json.loads((target / name).read_bytes())
        (target / name).write_text(json.dumps(changed(value, at, new)))
        try:
            jobs = Jobs(Ledger(target))
            for number in range(len(jobs)):
                jobs.build(number)
            commit(target)
        except ShardkitError:
            pass
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            wrong.append(f"{at} = {new!r}: {error!r} at {place.filename}:{place.lineno}")
    return wrong
