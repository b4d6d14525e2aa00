"""Files with odd names, of odd types, or that change."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from helpers import jpeg, png

from hostile.cases import Case, Ignored, Outcome, Problem, Rejected, Stored, pillow, simple

_named = functools.partial(simple, "name and content")

JPEG = jpeg(22, 20, 100)
PNG = png(22, 20, 101)
NO_IMAGE = Rejected(words="its content is not an image")
NOT_AN_IMAGE = Ignored(words="not an image")
CHANGED = Rejected(words="it changed since the scan")
EMPTY = Rejected(words="it is empty")


def good(data: bytes = JPEG, kind: str = "jpg") -> Stored:
    return Stored(kind=kind, pixels=pillow(lambda: data))


def name_cases() -> Iterator[Case]:
    yield _named("a PNG named .jpg", lambda: PNG, good(PNG, "png"))
    yield _named("a JPEG named .png", lambda: JPEG, good(), file="odd.png")
    yield _named("a JPEG without a suffix", lambda: JPEG, good(), file="odd")
    yield _named("a JPEG with a suffix in capitals", lambda: JPEG, good(), file="ODD.JPEG")
    yield _named("a JPEG named .txt", lambda: JPEG, good(), file="odd.txt")
    yield _named("a file of no bytes named .jpg", lambda: b"", EMPTY)
    yield _named("a text named .jpg", lambda: b"This is a text.\n" * 9, NO_IMAGE)
    yield _named("an error page named .jpg", lambda: b"<!DOCTYPE html><title>404</title>", NO_IMAGE)
    yield _named("a text", lambda: b"This is a text.\n" * 9, NOT_AN_IMAGE, file="readme.txt")
    yield _named("a file of no bytes", lambda: b"", NOT_AN_IMAGE, file="odd")
    yield _named("a hidden image", lambda: JPEG, Ignored(words="hidden"), file=".odd.jpg")
    with_extra = {  # the development set-up has that for HEIC
        "an HEIC image": (
            b"\0\0\0\x18ftypheic\0\0\0\0mif1heic",
            "the library that reads it failed",
        ),
        "a JPEG XL image": (b"\xff\x0a\xfa\x1f\x01\x90", "which needs an extra"),
    }
    others = {
        "an icon (ICO)": b"\0\0\1\0\1\0\x10\x10",
        "a JPEG 2000 image": b"\0\0\0\x0cjP  \r\n\x87\n",
        "a Photoshop document": b"8BPS\0\1\0\0\0\0\0\0\0\3",
        "a PDF document": b"%PDF-1.7\n",
    }
    unread = {
        "a drawing (SVG)": b'<svg xmlns="http://www.w3.org/2000/svg"/>',
        "an AVIF image": b"\0\0\0\x1cftypavif\0\0\0\0avifmif1",
        "a camera's raw image (CR2)": b"II*\0\x10\0\0\0CR\2\0",
    }
    for said, data in others.items():
        yield _named(f"{said} named .jpg", lambda d=data: d + bytes(99), NO_IMAGE)  # type: ignore[misc]
    unread |= {said: data for said, (data, _) in with_extra.items()}
    for said, data in unread.items():
        words = with_extra[said][1] if said in with_extra else "which shardkit does not read"
        reason = Rejected(words=words)
        for file in ("odd.jpg", "odd"):
            yield _named(f"{said} named {file}", lambda d=data: d + bytes(99), reason, file=file)  # type: ignore[misc]
    odd_names = {
        "a line break": "a\nb.jpg",
        "bytes that are no UTF-8": os.fsdecode(b"\xff\xfe\x80.jpg"),
        "255 bytes": "n" * 251 + ".jpg",
        "a dash in front": "-rf.jpg",
        "many dots": "a.b..c.jpg",
        "a space at its end": "a.jpg ",
        "a picture character": "\N{CAT FACE}.jpg",
        "two underscores in front": "__init__.jpg",
        "percent signs": "a%2Eb%00.jpg",
    }
    for said, name in odd_names.items():
        yield _named(f"a name with {said}", lambda: JPEG, good(), file=name)
    yield several("names that differ in case alone", {"a.jpg": JPEG, "A.jpg": PNG, "a.JPG": JPEG})
    yield several("names that differ in suffix alone", {"a.jpg": JPEG, "a.png": PNG, "a": JPEG})
    yield several(
        "names that look like the keys of others",
        {"a.jpg": JPEG, "a.jpg.png": PNG, "a%2Ejpg.png": PNG, "a.jpg.jpg": JPEG},
    )


def several(name: str, files: Mapping[str, bytes]) -> Case:
    """Return a case of healthy files with troublesome names."""

    def make(folder: Path) -> None:
        for file, data in files.items():
            (folder / file).write_bytes(data)

    outcomes = {file: good(data, "png" if data is PNG else "jpg") for file, data in files.items()}
    return Case(name=name, group="name and content", make=make, outcomes=outcomes)


def special(
    name: str,
    make: Callable[[Path], None],
    outcomes: Outcome | Mapping[str, Outcome],
    later: Callable[[Path], None] | None = None,
) -> Case:
    """Return a case whose function receives the path of ``odd.jpg``."""

    def make_in(folder: Path) -> None:
        make(folder / "odd.jpg")

    def later_in(folder: Path) -> None:
        assert later is not None
        later(folder / "odd.jpg")

    return Case(
        name=name,
        group="file system",
        make=make_in,
        later=later_in if later else None,
        outcomes=outcomes if isinstance(outcomes, Mapping) else {"odd.jpg": outcomes},
    )


def _socket(path: Path) -> None:
    """Make a socket; its full path may be longer than a socket's may be."""
    here = os.open(path.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(f"/proc/self/fd/{here}/{path.name}")
    finally:
        os.close(here)


def _folder(path: Path) -> None:
    path.mkdir()
    (path / "inner.jpg").write_bytes(JPEG)


def _file(path: Path) -> None:
    path.write_bytes(JPEG)


def _sparse(size: int, head: bytes = b"") -> Callable[[Path], None]:
    def make(path: Path) -> None:
        with path.open("wb") as file:
            file.write(head)
            file.truncate(size)

    return make


def _link_to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def _outside(path: Path) -> None:
    """Link to a file next to the source."""
    outside = path.parents[2].with_name("outside.jpg")
    outside.write_bytes(JPEG)
    path.symlink_to(outside)


def _hard(path: Path) -> None:
    _file(path)
    path.with_name("twin.jpg").hardlink_to(path)


def _circle(path: Path) -> None:
    path.symlink_to("other.jpg")
    path.with_name("other.jpg").symlink_to(path.name)


def _nested(path: Path) -> None:
    """Make a folder that contains a link to itself."""
    _file(path)
    path.with_name("again").symlink_to(".")


def _replace(make: Callable[[Path], None]) -> Callable[[Path], None]:
    def later(path: Path) -> None:
        path.unlink()
        make(path)

    return later


def _rewrite(data: bytes) -> Callable[[Path], None]:
    """Return a function that replaces content and keeps the time of the last change."""

    def later(path: Path) -> None:
        before = path.stat().st_mtime_ns
        path.write_bytes(data)
        os.utime(path, ns=(before, before))

    return later


def _turn_round(path: Path) -> None:
    path.write_bytes(JPEG[::-1])


def special_cases() -> Iterator[Case]:
    neither = Problem(words="neither a file nor a folder")
    yield special("a pipe (FIFO)", os.mkfifo, neither)
    yield special("a link to /dev/zero", _link_to("/dev/zero"), neither)
    yield special("a link to /dev/null", _link_to("/dev/null"), neither)
    yield special("a socket", _socket, neither)
    yield special("a folder named .jpg", _folder, {"odd.jpg/inner.jpg": good()})
    yield special("a broken link", _link_to("nowhere.jpg"), Problem(words="a broken link"))
    links = Problem(words="Too many levels of symbolic links")
    yield special("links in a circle", _circle, {"odd.jpg": links, "other.jpg": links})
    yield special(
        "a folder that holds itself by a link",
        _nested,
        {"odd.jpg": good(), "again": Ignored(words="was already read")},
    )
    yield special("a link to a file outside of the source", _outside, good())
    yield special("two names of one file", _hard, {"odd.jpg": good(), "twin.jpg": good()})
    yield special(
        "a file that reading fails on",
        _link_to("/proc/self/mem"),
        Rejected(words="it cannot be read: "),
    )
    yield special(
        "a file of 8 GB that holds nothing",
        _sparse(8 << 30),
        Rejected(words="larger than the limit of 2,147,479,552 bytes"),
    )
    yield special("a file of 1 GB that holds nothing", _sparse(1 << 30), NO_IMAGE)
    yield special("a file that grew since the scan", _file, CHANGED, _rewrite(JPEG + b"x"))
    yield special("a file that grew to 8 GB since the scan", _file, CHANGED, _sparse(8 << 30, JPEG))
    yield special("a file that shrank since the scan", _file, CHANGED, _rewrite(JPEG[:-1]))
    yield special("a file that was emptied since the scan", _file, CHANGED, _rewrite(b""))
    yield special(
        "a file that was removed since the scan, and not the others of its folder",
        _hard,
        {"odd.jpg": Rejected(words="it cannot be read: No such file"), "twin.jpg": good()},
        Path.unlink,
    )
    yield special("a file that became a pipe since the scan", _file, CHANGED, _replace(os.mkfifo))
    yield special(
        "a file that became /dev/zero since the scan",
        _file,
        CHANGED,
        _replace(_link_to("/dev/zero")),
    )
    yield special(
        "a file that became a folder since the scan",
        _file,
        Rejected(words="it cannot be read: Is a directory"),
        _replace(Path.mkdir),
    )
    yield special(
        "a file that became another image of its size since the scan", _file, CHANGED, _turn_round
    )


CASES = (*name_cases(), *special_cases())
