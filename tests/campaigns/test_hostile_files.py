"""Unreadable files: bad files are told from failures of the machine."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import jpeg, make_tree, png, python
from refusals import refused

from shardkit import convert
from shardkit.errors import BadImage, ConversionFailed, UsageError
from shardkit.sources.imagefolder import scan_imagefolder


def failing_open(number: int) -> Callable[..., int]:
    def failing(path: str, *_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number), path)

    return failing


OF_THE_MACHINE = (errno.EMFILE, errno.ENFILE, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN)


@pytest.mark.parametrize("number", OF_THE_MACHINE)
def test_an_error_of_the_machine_is_no_fault_of_an_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    source = scan_imagefolder(make_tree(tmp_path, {"a/1.jpg": jpeg()})).splits[""]
    make_tree(tmp_path, {"a/2": jpeg()})
    monkeypatch.setattr(os, "open", failing_open(number))
    with pytest.raises(OSError, match=os.strerror(number)):
        source.read([0])
    with pytest.raises(OSError, match=os.strerror(number)):
        scan_imagefolder(tmp_path)


@pytest.mark.parametrize("number", OF_THE_MACHINE)
@pytest.mark.parametrize("name", ["stat", "listdir"])
def test_an_error_of_the_machine_leaves_out_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, name: str
) -> None:
    make_tree(tmp_path, {"a/1.jpg": jpeg(), "b/1.jpg": jpeg()})
    function = getattr(os, name)

    def failing(path: Any, *more: Any, **options: Any) -> Any:
        if str(path).endswith("/b"):
            raise OSError(number, os.strerror(number))
        return function(path, *more, **options)

    monkeypatch.setattr(os, name, failing)
    with pytest.raises((OSError, UsageError), match=os.strerror(number)):
        scan_imagefolder(tmp_path)


@pytest.mark.parametrize("number", OF_THE_MACHINE)
def test_an_error_of_the_machine_ends_a_conversion_that_skips_bad_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    make_tree(tmp_path / "photos", {f"a/{name}.jpg": jpeg() for name in range(3)})
    function = os.open
    options: dict[str, Any] = {"to": "lmdb", "resize": 16, "on_error": "skip"}

    def failing(path: Any, *more: Any, **named: Any) -> int:
        if str(path).endswith("/1.jpg"):
            raise OSError(number, os.strerror(number), path)
        return function(path, *more, **named)

    with monkeypatch.context() as patches:
        patches.setattr(os, "open", failing)
        expected = rf"{os.strerror(number)}|too many files are open"
        with pytest.raises((OSError, ConversionFailed), match=expected) as caught:
            convert(tmp_path / "photos", tmp_path / "out", **options)
    assert "a/1.jpg" in str(caught.value)
    made = convert(tmp_path / "photos", tmp_path / "out", **options)
    assert made.manifests[""].rows == 3


def test_a_kernel_without_memory_is_no_fault_of_an_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = scan_imagefolder(make_tree(tmp_path, {"a/1.jpg": jpeg()})).splits[""]
    monkeypatch.setattr(os, "open", failing_open(errno.ENOMEM))
    with pytest.raises(MemoryError):
        source.read([0])


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ENXIO])
def test_a_file_that_cannot_be_read_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    source = scan_imagefolder(make_tree(tmp_path, {"a/1.jpg": jpeg()})).splits[""]
    monkeypatch.setattr(os, "open", failing_open(number))
    with refused(BadImage, os.strerror(number)):
        source.read([0])


UNREADABLE = """
import os, sys
from shardkit.errors import BadImage
from shardkit.sources.imagefolder import scan_imagefolder
from shardkit.sources.recognize import recognized
recognized(".")  # loads what Python could not read afterwards
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
scan = scan_imagefolder(sys.argv[1])
source = scan.splits[""]
for row, entry in enumerate(source.entries):
    try:
        source.read([row])
        print(entry.path, "is read")
    except BadImage as error:
        print(entry.path, "is bad:", error)
for what, problems in (("is bad:", scan.problems[""]), ("is left out:", scan.ignored[""])):
    for problem in problems:
        print(problem.path, what, problem.reason)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_files_and_folders_that_may_not_be_read_are_named(reachable: Path) -> None:
    source = make_tree(
        reachable / "photos",
        {
            "a/1.jpg": jpeg(),
            "a/2": jpeg(),
            "b/3.jpg": jpeg(),
            "c/x/4.jpg": jpeg(),
            "d/5.jpg": png(),
        },
    )
    for closed in ("a/1.jpg", "a/2", "b", "c/x"):
        (source / closed).chmod(0)
    done = python(UNREADABLE, source)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "a/1.jpg is bad: it cannot be read: Permission denied",
        "d/5.jpg is read",
        "b is bad: the folder cannot be read: Permission denied",
        "c/x is bad: the folder cannot be read: Permission denied",
        "a/2 is left out: cannot be read: Permission denied",
    ]
