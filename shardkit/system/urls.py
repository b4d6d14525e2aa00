"""Paths and URLs: which text is a URL of an object store, and which a local path."""

from __future__ import annotations

import os
import re
from urllib.parse import unquote, urlsplit

from shardkit.errors import UsageError

WRITABLE = ("az://", "gs://", "s3://")
_SCHEMES = ("az", "gs", "https", "s3")
_TEST_SCHEMES = ("http",)
"""Read without encryption, so for servers on this machine only."""

STORES = (*_SCHEMES, *_TEST_SCHEMES)
"""The scheme of each URL that `as_url` returns: keys of tables that say who handles it."""


def as_url(path: str | os.PathLike[str]) -> str | None:
    """Return the URL that ``path`` states, without a slash at its end; None for a local path.

    A `Path` has lost one of the slashes after ``s3:``. UsageError if the path is empty, which
    `Path` would take for the current folder; the scheme is unknown; or the URL holds credentials,
    which would be logged.
    """
    if os.fspath(path) == "":
        raise UsageError("the path is empty", remedy="pass the path of a file or folder, or a URL")
    match = re.fullmatch(
        r"((?:\w+::)*)([A-Za-z][A-Za-z0-9+.-]+):/+(.*)", os.fspath(path), re.DOTALL
    )
    if match is None or match[2].lower() == "file":
        return None
    url = f"{match[2].lower()}://{match[3].rstrip('/')}"
    try:
        split = urlsplit(url)
        host = split.hostname
    except ValueError:
        raise UsageError("the URL is not valid: its host cannot be read", where="URL") from None
    if "@" in split.netloc or split.query or split.fragment:  # never repeated in a message
        raise UsageError(
            f"the {split.scheme}:// URL contains a user, a query or a fragment;",
            remedy=f"pass only {split.scheme}://BUCKET/PATH, and set credentials in the "
            "environment",
            where=f"{split.scheme}://",
        )
    local = host in ("127.0.0.1", "localhost", "::1") and split.scheme in _TEST_SCHEMES
    chained = match[1] or "::" in split.path
    if chained or not (split.scheme in _SCHEMES or local):
        raise UsageError(
            f"{match[1]}{url} cannot be used: shardkit reads "
            f"{', '.join(f'{scheme}://' for scheme in _SCHEMES)} and local paths",
            remedy="Download or mount other data.",
        )
    if not host:
        raise UsageError(f"{url} does not contain a bucket or host: {split.scheme}://BUCKET/PATH")
    return url


def scheme_and_path(path: str | os.PathLike[str]) -> tuple[str, str]:
    """Return the scheme of a URL, and the URL as `as_url` does; "" and the text of a local path."""
    url = as_url(path)
    return ("", os.fspath(path)) if url is None else (url.partition(":")[0], url)


def as_local(path: str | os.PathLike[str]) -> str:
    """Return the local path of a ``file://`` URL; other texts are returned as they are."""
    text = os.fspath(path)
    match = re.fullmatch(r"file:(?://(?:localhost)?)?(/.*)", text, re.IGNORECASE | re.DOTALL)
    return unquote(match[1]) if match else text
