"""An HTML page, parsed far enough to test it."""

from __future__ import annotations

from collections.abc import Sequence
from html.parser import HTMLParser

_LINKS = ("src", "href", "xlink:href", "srcset", "action", "poster", "data")


_VOID = ("meta", "link", "br", "img", "input", "hr")


class Parsed(HTMLParser):
    """The elements of a page, their links and their text; unclosed ones are an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in _VOID:
            self.open.append(tag)
        self.links += [value or "" for name, value in attrs if name in _LINKS]

    def handle_startendtag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in _LINKS]

    def handle_endtag(self, tag: str) -> None:
        if tag in ("p", "li", "dt", "dd") or self.open[-1] == tag:
            assert self.open.pop() == tag
        else:
            raise AssertionError(f"</{tag}> closes <{self.open[-1]}>")

    def handle_data(self, data: str) -> None:
        self.text += data
