"""Indexes of other tools, compared with the archives that they describe."""

from __future__ import annotations

import io
import json
import sqlite3
import struct
import tarfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from helpers import invoke, jpeg

from shardkit import UsageError, attach, open_dataset
from shardkit.conversion import trusted
from shardkit.conversion.trusted import Trust
from shardkit.errors import BadImages
from shardkit.exporting.tar_index import export_index

TOOLS = ("dali", "energon", "webshart")
LABELS = 2
"""Bytes of each label."""


@pytest.fixture
def tars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Archives of two samples each, with the indexes of all tools in folders beside theirs."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = tmp_path / "tars"
    folder.mkdir()
    for number in range(2):
        with tarfile.open(folder / f"x-{number}.tar", "w") as archive:
            for row in range(2):
                for suffix, data in (("jpg", jpeg(8, 8, row)), ("cls", b"%d\n" % row)):
                    info = tarfile.TarInfo(f"d/s{number}{row}.{suffix}")
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))
    attach(folder, tmp_path / "index")
    for tool in TOOLS:
        export_index(tmp_path / "index", tmp_path / tool, tool)
    return folder


def offset_of(path: Path, name: str) -> int:
    with tarfile.open(path) as archive:
        return archive.getmember(name).offset_data


def compared(tars: Path, tool: str) -> dict[str, str]:
    """Return the findings in the archives, by path."""
    trust = Trust.parse(f"{tool}={tars.parent / tool}")
    return {each.path: each.reason for each in trust.compare(sorted(tars.iterdir()))}


def change_json(path: Path, change: Callable[[dict[str, dict[str, int]]], object]) -> None:
    value = json.loads(path.read_text())
    change(value["files"])
    path.write_text(json.dumps(value))


def change_database(folder: Path, *statements: str) -> None:
    with closing(sqlite3.connect(folder / ".nv-meta" / "index.sqlite")) as database:
        for statement in statements:
            database.execute(statement)
        database.commit()


@pytest.mark.parametrize("tool", TOOLS)
def test_an_index_that_fits_has_no_findings(tars: Path, tool: str) -> None:
    again = attach(tars, tars.parent / "index", trust=f"{tool}={tars.parent / tool}")
    assert again.unchanged
    for name in ("x-1.idx", "x-1.tar.idx", "x-1.json"):
        (tars.parent / tool / name).unlink(missing_ok=True)
    (finding,) = compared(tars, tool)
    assert finding == f"x-1.tar ({tool})"


def test_each_difference_is_named(tars: Path) -> None:
    start = offset_of(tars / "x-1.tar", "d/s11.jpg")

    def move(files: dict[str, dict[str, int]]) -> None:
        files["d/s10.jpg"]["offset"] += 1
        files["d/s10.cls"]["length"] += 1
        files["d/new.jpg"] = {"offset": start, "length": 3}
        del files["d/s11.cls"]

    change_json(tars.parent / "webshart" / "x-1.json", move)
    first = offset_of(tars / "x-1.tar", "d/s10.jpg") + 1
    assert compared(tars, "webshart") == {
        "x-1.tar:d/s10.jpg (webshart)": f"x-1.json has it at byte {first}, where the archive has "
        "no content of a file",
        "x-1.tar:d/s10.cls (webshart)": "x-1.json has 3 bytes of it, the archive 2",
        "x-1.tar:d/new.jpg (webshart)": f"x-1.json has it at byte {start}, where the archive has "
        "'d/s11.jpg'",
        "x-1.tar:d/s11.cls (webshart)": "x-1.json lacks it",
    }


def test_dali_with_and_without_names(tars: Path) -> None:
    path = tars.parent / "dali" / "x-0.idx"
    lines = path.read_text().splitlines()
    words = [line.split(" ") for line in lines[1:]]
    old = [[word for place, word in enumerate(line) if place % 4 != 3] for line in words]
    path.write_text("".join(f"{line}\n" for line in ["v1.1 2", *map(" ".join, old)]))
    assert compared(tars, "dali") == {}
    old[1][4] = "7"  # the offset of the second member
    path.write_text("".join(f"{line}\n" for line in ["v1.1 2", *map(" ".join, old)]))
    assert compared(tars, "dali") == {
        "x-0.tar:byte 7 (dali)": "x-0.idx has it at byte 7, where the archive has no content of a "
        "file",
        "x-0.tar:d/s01.cls (dali)": "x-0.idx lacks it",
    }
    path.write_text("\n".join([*lines, lines[1]]).replace("v1.2 2", "v1.2 3") + "\n")
    assert set(compared(tars, "dali").values()) == {"x-0.idx has it twice"}
    for text, reason in (
        ("v2 1\n", "does not start with v1.1 or v1.2"),
        ("v1.2 3\n" + "\n".join(lines[1:]) + "\n", "does not have the 3 lines it states"),
        ("v1.2 1\njpg 512 9 d/s 00.jpg\n", "line 2: a name has a space"),
        ("v1.2 1\njpg x 9 d/s00.jpg\n", "invalid literal"),
    ):
        path.write_text(text)
        assert reason in compared(tars, "dali")["x-0.tar (dali)"]


def test_energon_samples_and_members(tars: Path) -> None:
    folder = tars.parent / "energon"
    path = folder / "x-0.tar.idx"
    first, second, end = struct.unpack("3Q", path.read_bytes())
    path.write_bytes(struct.pack("3Q", first, second + 512, end - 600))
    last = offset_of(tars / "x-0.tar", "d/s01.cls") + LABELS
    assert compared(tars, "energon") == {
        f"x-0.tar:byte {second + 512} (energon)": "x-0.tar.idx starts a sample there, the archive "
        "does not",
        "x-0.tar:d/s01.jpg (energon)": f"x-0.tar.idx starts no sample at byte {second}",
        "x-0.tar (energon)": f"x-0.tar.idx ends the samples at byte {end - 600}; they end at byte "
        f"{last}",
    }
    path.write_bytes(struct.pack("3Q", second, first, end))
    assert "in another order" in compared(tars, "energon")["x-0.tar (energon)"]
    path.write_bytes(struct.pack("3Q", first, second, end))
    change_database(folder, "UPDATE samples SET byte_offset = 1 WHERE sample_key = 'd/s11'")
    assert sorted(compared(tars, "energon")) == [
        "x-1.tar:byte 1 (energon)",
        "x-1.tar:d/s11.jpg (energon)",
    ]
    change_database(folder, "UPDATE samples SET sample_key = 'e' WHERE sample_key = 'd/s11'")
    assert "x-1.tar:e.jpg (energon)" in compared(tars, "energon")
    loop = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i FROM n) SELECT i AS tar_file_id"
    change_database(folder, "DROP TABLE sample_parts", f"CREATE VIEW sample_parts AS {loop} FROM n")
    assert "lacks the table sample_parts" in compared(tars, "energon")["x-0.tar (energon)"]
    (folder / ".nv-meta" / "index.sqlite").write_bytes(b"no database")
    assert "its index is damaged" in compared(tars, "energon")["x-0.tar (energon)"]
    (folder / ".nv-meta" / "index.sqlite").unlink()  # older versions write none
    assert compared(tars, "energon") == {}


@pytest.mark.parametrize(
    ("statements", "reason"),
    [
        (
            ("ALTER TABLE samples ADD x AS (zeroblob(1000000000))",),
            "hidden or generated columns in samples",
        ),
        (
            (
                "DROP TABLE samples",
                "CREATE TABLE samples (tar_file_id, sample_index, byte_offset, "
                "sample_key AS (hex(zeroblob(40000000))))",
                "INSERT INTO samples VALUES (0, 0, 0)",
            ),
            "hidden or generated columns in samples",
        ),
        (
            (
                "DROP TABLE sample_parts",
                "CREATE TABLE sample_parts (tar_file_id, sample_index, content_byte_offset, "
                "content_byte_size)",
                *["INSERT INTO sample_parts VALUES (0, 0, 0, 0)"] * 4,
                f"ALTER TABLE sample_parts ADD part_name DEFAULT '{'x' * 30_000}'",
            ),
            "far longer names",
        ),
        (("UPDATE samples SET sample_key = zeroblob(100000) WHERE rowid = 1",), "too big"),
        (
            ("UPDATE samples SET sample_key = printf('%.*c', 60000, 'x') WHERE rowid = 1",),
            "far longer",
        ),
        (("UPDATE samples SET byte_offset = 9e999",), "infinity"),
        (("UPDATE sample_parts SET content_byte_size = x'00'",), "invalid literal"),
        (("DROP TABLE samples", "CREATE VIRTUAL TABLE samples USING fts5(x)"), "lacks the table"),
    ],
)
def test_a_hostile_database_is_damaged(
    tars: Path, statements: tuple[str, ...], reason: str
) -> None:
    change_database(tars.parent / "energon", *statements)
    assert reason in compared(tars, "energon")["x-0.tar (energon)"]


def test_a_query_that_never_ends_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trusted, "_STEPS", 1000)
    rows = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n LIMIT"
    with closing(sqlite3.connect(":memory:")) as database:
        trusted._limit(database, 100_000)
        assert len(database.execute(f"{rows} 1000").fetchall()) == 1000
        with pytest.raises(sqlite3.OperationalError, match="interrupted"):
            database.execute(f"{rows} 100000").fetchall()


def test_findings_follow_the_policy(tars: Path, tmp_path: Path) -> None:
    folder = tars.parent / "webshart"
    change_json(folder / "x-0.json", lambda files: files.pop("d/s00.jpg"))
    (folder / "x-1.json").write_text('{"files": [1]}')
    trust = f"webshart={folder}"
    with pytest.raises(BadImages, match="2 findings") as caught:
        attach(tars, tmp_path / "new", trust=trust)
    assert [each.path for each in caught.value.problems] == [
        "x-0.tar:d/s00.jpg (webshart)",
        "x-1.tar (webshart)",
    ]
    assert "damaged" in caught.value.problems[1].reason
    made = attach(tars, tmp_path / "new", trust=trust, on_error="skip", workers=2)
    assert made.manifest.skipped == caught.value.problems
    assert len(open_dataset(tmp_path / "new")[:]) == 4  # the archives themselves are intact
    done = invoke("attach", tars, tmp_path / "new", "--trust", trust)
    assert done.exit_code != 0
    assert "x-0.tar:d/s00.jpg (webshart): x-0.json lacks it" in done.output


def test_looks_next_to_the_archives(tars: Path) -> None:
    for path in (tars.parent / "webshart").iterdir():
        path.rename(tars / path.name)
    archives = sorted(tars.glob("*.tar"))
    assert Trust.parse("webshart").compare(archives) == []
    secret = tars.parent / "secret.json"
    (tars / "x-0.json").rename(secret)
    (tars / "x-0.json").symlink_to(secret)
    (finding,) = Trust.parse("webshart").compare(archives)
    assert "cannot be read" in finding.reason


def test_wrong_uses_are_explained(tars: Path, tmp_path: Path) -> None:
    for text, message in (
        *(
            (each, rf"no archive has an index of {each}, .*{each}=DIR', or omit trust=")
            for each in TOOLS
        ),
        ("wids", "choose from dali, energon, webshart"),
        (f"dali={tmp_path / 'none'}", "is not a folder"),
    ):
        with pytest.raises(UsageError, match=message):
            attach(tars, tmp_path / "new", trust=text)
