"""LMDB environments of other programs: layouts, missing keys, and damage."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from foreign import problems, write_lmdb
from forked import end_helpers
from helpers import png, run_main
from refusals import refused

from shardkit import attach, convert, open_dataset, open_source, repair, verify
from shardkit.errors import BadImage, BadImages, UsageError

A, B, C = (png(8, 6, seed) for seed in range(3))


def scan(path: Path, **options: Any) -> Any:
    return open_source("lmdb", path, **options).scan()


def ocr(path: Path, **more: bytes) -> Path:
    values = {b"num-samples": b"3"}
    for number, data in enumerate((A, B, C), 1):
        values[b"image-%09d" % number] = data
        values[b"label-%09d" % number] = f"wört {number}".encode()
    values |= {name.encode(): value for name, value in more.items()}
    return write_lmdb(path, values)


def test_the_texts_of_the_layout_ocr_are_stored(tmp_path: Path) -> None:
    path = ocr(tmp_path / "source")
    found = scan(path)
    assert found.understood["layout"] == "ocr"
    records = found.splits[""].read(range(3))
    assert [record.fields["png"] for record in records] == [A, B, C]
    assert [record.fields["txt"].decode() for record in records] == ["wört 1", "wört 2", "wört 3"]
    convert(found.source, tmp_path / "made", to="webdataset", shard_samples=2)
    assert verify(tmp_path / "made", against=path).findings == []
    shards = open_dataset(tmp_path / "made")
    assert sorted(shards.column("text").tolist()) == ["wört 1", "wört 2", "wört 3"]
    shard = tmp_path / "made" / "shard-000000.tar"
    before = shard.read_bytes()
    shard.unlink()
    assert repair(tmp_path / "made", path).findings == []
    assert shard.read_bytes() == before


def test_a_text_that_is_not_utf8_is_one_bad_sample(tmp_path: Path) -> None:
    path = ocr(tmp_path / "source", **{"label-000000002": b"caf\xe9"})
    reason = "its text, at key label-000000002, is not UTF-8"
    with pytest.raises(BadImages) as caught:
        convert(scan(path).source, tmp_path / "made", to="lmdb")
    assert [problem.reason for problem in caught.value.problems] == [reason]
    convert(scan(path).source, tmp_path / "made", to="lmdb", on_error="skip")
    attach(scan(path).source, tmp_path / "attached", on_error="skip")
    for name in ("made", "attached"):
        assert [problem.reason for problem in open_dataset(tmp_path / name).manifest.skipped] == [
            reason
        ]
        texts = open_dataset(tmp_path / name).column("text").tolist()
        assert sorted(texts) == ["wört 1", "wört 3"]


def test_missing_and_other_keys_are_named(tmp_path: Path) -> None:
    path = ocr(tmp_path / "source", **{"num-samples": b"5", "label-000000004": b"x", "other": b""})
    found = scan(path)
    assert problems(found) == {
        "image-000000004": "the key image-000000004 is missing",
        "image-000000005": "the key image-000000005 is missing",
    }
    (other,) = found.ignored[""]
    assert other.reason == "1 keys outside the layout"
    with refused(UsageError):
        scan(write_lmdb(tmp_path / "plain", {b"a": A}), layout="ocr")
    huge = write_lmdb(tmp_path / "huge", {b"num-samples": b"99999999999"})
    assert len(problems(scan(huge))) == 1


def test_names_of_basicsr_come_from_its_list(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "x", {b"b 1": A, b"a": B, b"other": C})
    (path / "meta_info.txt").write_text(
        "b 1.png (6,8,3) 1\na.png (6,8,3) 1\nlost.png (6,8,3) 1\n?\n"
    )
    found = scan(path)
    assert [entry.path for entry in found.splits[""].entries] == ["b 1.png", "a.png"]
    assert [record.fields["png"] for record in found.splits[""].read([0, 1])] == [A, B]
    assert problems(found) == {
        "meta_info.txt:4": "this line does not have the form NAME.SUFFIX (H,W,C) LEVEL",
        "lost.png": "its key is missing, although meta_info.txt lists it",
    }
    assert [problem.reason for problem in found.ignored[""]] == ["1 keys outside the layout"]


MODULE = """
import json
def decode(key, value):
    if key == b"skip":
        return None
    if key == b"wrong":
        return 7
    if key == b"fails":
        raise KeyError(key)
    return value[1:], value[0]
"""


def test_a_function_converts_keys_and_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mymodule.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    path = write_lmdb(
        tmp_path / "x",
        {b"a": b"\1" + A, b"b": b"\0" + B, b"skip": b"", b"wrong": b"", b"fails": b""},
    )
    end_helpers()
    found = scan(path, layout="mymodule:decode")
    assert found.classes == ("0", "1")
    assert [(r.fields["png"], r.label) for r in found.splits[""].read([0, 1])] == [(A, 1), (B, 0)]
    assert problems(found) == {
        "fails": "the layout's function raised KeyError: b'fails'",
        "wrong": "the layout's function returned int, not bytes",
    }
    assert [p.path for p in found.ignored[""]] == ["skip"]
    convert(found.source, tmp_path / "made", to="lmdb", on_error="skip")
    manifest = json.loads((tmp_path / "made" / "shardkit.json").read_text())
    assert "mymodule" not in json.dumps(manifest)
    with pytest.raises(UsageError, match="MODULE:FUNCTION@"):
        verify(tmp_path / "made", against=path)
    assert verify(tmp_path / "made", against=f"mymodule:decode@{path}").findings == []
    with refused(UsageError):
        scan(path, layout="mymodule:missing")


def test_a_damaged_environment_crashes_only_the_child(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "x", {b"%03d" % n: bytes([n]) * 9000 for n in range(100)})
    data = (path / "data.mdb").read_bytes()
    (path / "data.mdb").write_bytes(data[: 4096 * 20])
    with pytest.raises((UsageError, BadImage)):
        scan(path).splits[""].read(range(100))
    (path / "data.mdb").write_bytes(data)
    assert len(scan(path).splits[""]) == 100
    (path / "data.mdb").write_bytes(b"not lmdb" * 5000)
    with refused(UsageError, "LMDB"):
        scan(path)


def test_values_that_are_not_images_need_a_function(tmp_path: Path) -> None:
    values = {b"a": A, b"b": pickle.dumps((A, 1)), b"c": b"text", b"d": b""}
    found = scan(write_lmdb(tmp_path / "x", values))
    with pytest.raises(BadImages) as caught:
        convert(found.source, tmp_path / "made", to="lmdb")
    remedy = "unpack values with a function: the option layout=MODULE:FUNCTION"
    assert {problem.path: problem.reason for problem in caught.value.problems} == {
        "b": f"its value is pickled: {remedy}",
        "c": f"its value is not an encoded image: {remedy}",
        "d": "it is empty",
    }


def test_wrong_options_are_usage_errors(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "x", {b"a": A})
    for options in ({"layout": "other"}, {"label": "cls"}):
        with pytest.raises(UsageError, match="is unknown; choose from"):
            scan(path, **options)
    assert problems(scan(path, label="folder")) == {"a": "its key has no folder"}
    done = run_main("convert", "lmdb", tmp_path / "none", tmp_path / "made", "--to", "lmdb")
    assert done.returncode == 2
    done = run_main("convert", "lmdb", path, tmp_path / "made", "--to", "lmdb", "--dry-run")
    assert done.returncode == 0
    assert "  layout    images" in done.stdout.splitlines()


def test_nothing_is_imported_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_lmdb(tmp_path / "x", {b"a": A})
    for name in ("lmdb", "json", "pickle"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    end_helpers()
    assert len(scan(path).splits[""]) == 1
