"""Texts: printable names, readable numbers, equal ones, and URLs without credentials."""

from __future__ import annotations

import os
import subprocess
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest
from bench_reports import HOSTILE
from table import for_each

from shardkit.errors import UsageError
from shardkit.system import text_hashes
from shardkit.system.numbers import significant
from shardkit.system.text import (
    amount,
    as_command,
    fault,
    name_list,
    printable,
    quoted,
    shell,
    shortened,
    size,
)
from shardkit.system.text_hashes import TextHashes
from shardkit.system.urls import as_local, as_url


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a/b.jpg", "'a/b.jpg'"),
        (b"\x1b[31m", r"b'\x1b[31m'"),
        ("\x1b]0;owned\x07\n", r"'\x1b]0;owned\x07\n'"),
        ("\udcff", r"'\udcff'"),
        (["a", 1], "['a', 1]"),
    ],
)
def test_a_name_is_quoted(value: object, expected: str) -> None:
    assert quoted(value) == expected


def test_a_long_name_shows_its_start_and_end() -> None:
    text = quoted("begin" + "x" * 1000 + "end")

    assert text.startswith("'begin")
    assert text.endswith("end'")
    assert len(text) == 80


def test_an_integer_too_large_for_text_is_quoted_by_its_type() -> None:
    assert quoted(10**5000) == "<int of too many digits>"
    assert quoted([10**5000]) == "<list of too many digits>"


def test_quoting_a_giant_name_takes_little_memory() -> None:
    giant = b"\0" * (8 << 20)
    tracemalloc.start()
    try:
        assert len(quoted(giant)) == 80
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_list_of_very_many_names_is_short() -> None:
    assert name_list(["a", 1, "\x1b"]) == r"a, 1, \x1b"
    assert name_list(map(str, range(30))).endswith(", 28, 29")
    assert name_list(map(str, range(15_030))).endswith(", 28, 29 and 15,000 more")
    assert len(name_list(["x" * 5000] * 40)) < 3000


# Readable numbers and names.


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("width", [10, 40, 1000])
def test_a_name_fits_its_line_and_width(name: str, width: int) -> None:
    text = shortened(name, width)

    assert text.isprintable()
    assert len(text) <= width
    text.encode("utf-8")


def test_a_shortened_name_keeps_both_ends() -> None:
    text = shortened("beginning/of/a/long/path/to/the/end", 20)

    assert len(text) == 20
    assert text.startswith("begin")
    assert text.endswith("/to/the/end")
    assert shortened("short", 5) == "short"


@pytest.mark.parametrize(
    ("value", "text"), [(0.0412, "0.04"), (1.234, "1.23"), (12.34, "12.3"), (1234.5, "1,234")]
)
def test_numbers_have_only_significant_digits(value: float, text: str) -> None:
    assert significant(value) == text


def test_sizes_and_counts() -> None:
    for count, text in {
        0: "0 bytes",
        1023: "1023 bytes",
        1024: "1.0 KiB",
        5 << 20: "5.0 MiB",
        3 << 29: "1.5 GiB",
        1 << 40: "1.0 TiB",
        2.5 * 2**40: "2.5 TiB",
        1 << 50: "1024.0 TiB",
    }.items():
        assert size(count) == text
    for number, noun, text in (
        *((1, "image", "1 image"), (0, "image", "0 images"), (2000, "image", "2,000 images")),
        *((2, "class", "2 classes"), (2, "entry", "2 entries"), (2, "bad file", "2 bad files")),
    ):
        assert amount(number, noun) == text


def test_texts_are_printable_and_commands_can_be_copied() -> None:
    assert printable("größe ★") == "größe ★"
    assert printable("a\nb\tc\x1b[31m\udcff") == "a\\nb\\tc\\x1b[31m\\udcff"
    assert as_command("work", Path("my data"), "--claim") == "`shardkit work 'my data' --claim`"
    for word in ("a\nb", "it's\t\\n", "\x9b1é\n", "b\udcff x", "\n9a", "$(x) `y`\r", "", "a b'c"):
        command = shell("printf", "%s", word)
        assert command.isprintable()
        shown = subprocess.run(["bash", "-c", command], capture_output=True, check=True)
        assert shown.stdout == os.fsencode(word)
    assert printable("a" * 600 + "b" * 600) == "a" * 500 + " ... " + "b" * 500


# Equal texts are found, however few are compared at a time.


@pytest.mark.parametrize(("buffered", "at_once"), [(1 << 16, 1 << 19), (8, 5), (3, 100)])
@pytest.mark.parametrize("count", [0, 1, 7, 300])
def test_hashes_of_repeated_and_single_texts(
    monkeypatch: pytest.MonkeyPatch, buffered: int, at_once: int, count: int
) -> None:
    monkeypatch.setattr(text_hashes, "_BUFFERED", buffered)
    monkeypatch.setattr(text_hashes, "_AT_ONCE", at_once)
    texts = [str(number * 7919 % max(1, count * 2 // 3)) for number in range(count)]
    hashes = TextHashes()
    for text in texts:
        hashes.add(text)
    for _ in range(2):  # more texts may follow
        counts = Counter(texts)
        assert hashes.repeated() == {hash(text) for text in texts if counts[text] > 1}
        assert hashes.single() == {hash(text) for text in texts if counts[text] == 1}
        hashes.add("new")
        texts.append("new")


# URLs and local paths are told apart, and credentials in a URL are refused unseen.


@for_each(
    ("path", "url"),
    [
        ("s3://bucket/data/", "s3://bucket/data"),
        (Path("s3://bucket/data"), "s3://bucket/data"),
        ("GS://bucket", "gs://bucket"),
        ("https://host/data", "https://host/data"),
        ("http://127.0.0.1:80/data", "http://127.0.0.1:80/data"),
        ("file:///data", None),
        ("data", None),
        ("/data/s3:/x", None),
    ],
)
def test_urls_are_recognized(path: str | Path, url: str | None) -> None:
    assert as_url(path) == url


@for_each("url", ["ftp://host/x", "http://host/x", "s3://", "https://[1/x", "hf://datasets/x"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(UsageError):
        as_url(url)


@for_each("rest", ["me:word@host/x", "host/x?signature=word", "host/x#word"])
def test_a_url_with_credentials_is_refused_without_repeating_it(rest: str) -> None:
    with pytest.raises(UsageError, match="credentials") as refused:
        as_url(f"https://{rest}")

    assert "word" not in str(refused.value)


def test_file_urls_are_local_paths() -> None:
    assert as_local("file:///a%20b/c") == "/a b/c"
    assert as_local("file:/data") == "/data"
    assert as_local("file:name") == "file:name"


def test_a_fault_in_a_file_is_a_sentence() -> None:
    assert fault(KeyError("width")) == "'width' is missing"
    assert fault(FileNotFoundError(2, "No such file or directory", "x")) == (
        "No such file or directory"
    )
    assert fault(ValueError("it is not a JSON object")) == "it is not a JSON object"
