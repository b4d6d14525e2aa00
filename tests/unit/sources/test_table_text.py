"""Tables of text as pandas, Excel and R write them: delimiters, encodings, quotes, names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import png, run_main
from refusals import refused
from table import for_each

from shardkit import open_source
from shardkit.errors import UsageError


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("root")
    (root / "sub").mkdir()
    for name in ("0.png", "1.png", "2.png", "sub/3.png", "é.png"):
        (root / name).write_bytes(png())
    return root


def scan(path: Path, root: Path, content: str | bytes, **options: Any) -> Any:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return open_source("table", path, root=root, **options).scan()


def texts(found: Any) -> list[Any]:
    assert found.problems == {"": []}
    records = found.splits[""].read(range(len(found.splits[""])))
    return [record.fields["txt"].decode() for record in records]


def kept(path: Path, root: Path, content: str | bytes, **options: Any) -> list[Any]:
    return texts(scan(path, root, content, keep="text:text", **options))


@for_each(
    ("name", "content", "note"),
    [
        ("a.csv", "file_name,text\n0.png,a;b\n1.png,c;d\n", ""),
        ("b.csv", "file_name;text\n0.png;a,b\n1.png;c,d,e\n", "b.csv: semicolons, UTF-8"),
        ("c.csv", "file_name\ttext\n0.png\ta\n1.png\tb\n", "c.csv: tabs, UTF-8"),
        ("d.tsv", "file_name,text\n0.png,a\n1.png,b\n", "d.tsv: commas, UTF-8"),
        ("e.csv", "file_name|text\n0.png|a\n1.png|b\n", "e.csv: bars, UTF-8"),
        ("f.csv", "sep=;\r\nfile_name;text\r\n0.png;a\r\n1.png;b\r\n", "f.csv: semicolons, UTF-8"),
        ("g.csv", "file_name;text;n\n0.png;a;1,5\n1.png;b;2,5\n", "g.csv: semicolons, UTF-8"),
    ],
)
def test_delimiters_are_detected(
    name: str, content: str, note: str, root: Path, tmp_path: Path
) -> None:
    found = scan(tmp_path / name, root, content, keep="text:text")
    assert list(found.notes) == ([note] if note else [])
    assert [entry.path for entry in found.splits[""].entries] == ["0.png", "1.png"]
    assert all(len(text) < 6 and text[0] in "abc" for text in texts(found))


TEXT = "file_name,text\r\né.png,“größer”\r\n0.png,ça\r\n"


@for_each("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "cp1252"])
def test_encodings_are_detected(encoding: str, root: Path, tmp_path: Path) -> None:
    found = scan(tmp_path / "t.csv", root, TEXT.encode(encoding), keep="text:text")
    assert [entry.path for entry in found.splits[""].entries] == ["é.png", "0.png"]
    assert texts(found) == ["“größer”", "ça"]
    assert list(found.notes) == ([] if "8" in encoding else [f"t.csv: commas, {encoding}"])


@for_each(
    ("encoding", "text"),
    [
        ("gbk", "小猫和小狗在桌子上"),
        ("cp1251", "кошка"),
        ("shift_jis", "ねこ"),
        ("mac_roman", "énorme"),
    ],
)
def test_other_encodings_must_be_stated(
    encoding: str, text: str, root: Path, tmp_path: Path
) -> None:
    data = f"file_name,text\n0.png,{text}\n".encode(encoding)
    with refused(UsageError, "t.csv", "encoding="):
        scan(tmp_path / "t.csv", root, data)
    assert kept(tmp_path / "t.csv", root, data, encoding=encoding) == [text]


def test_quotes_that_are_text_lose_no_row(root: Path, tmp_path: Path) -> None:
    captions = ['"Stop" says the sign', '"an open quote', 'it ends here" she said']
    rows = "".join(f"{n}.png\t{text}\n" for n, text in enumerate(captions))
    found = scan(tmp_path / "t.tsv", root, f"file_name\ttext\n{rows}", keep="text:text")
    assert texts(found) == captions
    assert list(found.notes) == ["t.tsv: tabs, UTF-8, quotation marks are text"]
    joined = 'file_name\ttext\n0.png\t"one\n1.png\ttwo"\n2.png\tthree\n'
    assert kept(tmp_path / "t.tsv", root, joined) == ['"one', 'two"', "three"]


def test_quotes_around_values_are_none_of_their_text(root: Path, tmp_path: Path) -> None:
    content = 'file_name,text\n0.png,"a, b"\n1.png,"two\nlines"\n2.png,"say ""hi"""\n'
    assert kept(tmp_path / "t.csv", root, content) == ["a, b", "two\nlines", 'say "hi"']
    plain = 'file_name\ttext\n0.png\t"a"\n'
    assert kept(tmp_path / "t.tsv", root, plain) == ["a"]
    assert kept(tmp_path / "t.tsv", root, plain, no_quotes=True) == ['"a"']


def test_long_fields_are_read(root: Path, tmp_path: Path) -> None:
    content = f"file_name,text,polygon\n0.png,a,{'1 2 ' * 50_000}\n1.png,b,3 4\n"
    assert kept(tmp_path / "t.csv", root, content) == ["a", "b"]


def test_columns_without_a_name_are_not_used(root: Path, tmp_path: Path) -> None:
    found = scan(tmp_path / "t.csv", root, ",file_name , text,\n0,0.png,a,\n1,1.png,b,\n")
    assert found.understood["unused"] == "unnamed_0, text, unnamed_3"
    assert [entry.path for entry in found.splits[""].entries] == ["0.png", "1.png"]


def test_a_header_may_lack_the_name_of_the_index(root: Path, tmp_path: Path) -> None:
    index = "file_name,text\na,0.png,b\nc,1.png,d\n"
    assert kept(tmp_path / "t.csv", root, index) == ["b", "d"]
    assert kept(tmp_path / "t.csv", root, "file_name,text\n0.png,a,\n1.png,b,\n") == ["a", "b"]
    found = scan(tmp_path / "t.csv", root, "file_name,text\n0.png,a,b\n1.png,c\n")
    assert [problem.path for problem in found.problems[""]] == ["t.csv:2"]


def test_names_from_other_systems_lead_to_files(root: Path, tmp_path: Path) -> None:
    names = [f"{root}/0.png", "sub\\3.png", ".\\1.png", "./2.png"]
    found = scan(tmp_path / "t.csv", root, "file_name\n" + "".join(f"{name}\n" for name in names))
    assert found.problems == {"": []}
    entries = found.splits[""].entries
    assert [entry.path for entry in entries] == ["0.png", "sub/3.png", "1.png", "2.png"]
    leading = scan(tmp_path / "t.csv", root, f"file_name\n..\\0.png\n{root}/../x.png\n0.png\n")
    assert len(leading.problems[""]) == 2


def test_a_suffix_is_added(root: Path, tmp_path: Path) -> None:
    content = "file_name,text\n0,a\nsub/3,b\n1.png,c\n"
    with refused(UsageError, "t.csv", "'0.png'", "suffix='.png'"):
        scan(tmp_path / "t.csv", root, content)
    assert kept(tmp_path / "t.csv", root, content, suffix=".png") == ["a", "b", "c"]
    lines = '{"file_name": 0, "text": "a"}\n{"file_name": 2, "text": "b"}\n'
    assert kept(tmp_path / "t.jsonl", root, lines, suffix=".png") == ["a", "b"]


@for_each(
    "options", [{"delimiter": ";;"}, {"delimiter": '"'}, {"encoding": "utf-9"}, {"encoding": "hex"}]
)
def test_what_is_no_delimiter_or_encoding_is_refused(
    options: dict[str, str], root: Path, tmp_path: Path
) -> None:
    with refused(UsageError, *(f"{name}={value!r}" for name, value in options.items())):
        scan(tmp_path / "t.csv", root, "file_name\n0.png\n", **options)


def test_a_file_in_another_encoding_than_stated_is_refused(root: Path, tmp_path: Path) -> None:
    with refused(UsageError, "t.csv:", "encoding="):
        scan(tmp_path / "t.csv", root, b"file_name\n\xff.png\n", encoding="ascii")


def test_the_command_states_what_is_unusual(root: Path, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("file_name#text\n0.png#a\n")
    command = ("convert", "table", tmp_path / "t.csv", tmp_path / "made", "--to", "lmdb")
    done = run_main(*command, "--root", root, "--delimiter", "#", "--dry-run")
    assert "  noted     t.csv: '#', UTF-8\n" in done.stdout
