"""What the helper process does for uploads and verification: list, compare and write objects."""

from __future__ import annotations

from pathlib import Path

from shardkit.stores.store import Exists, open_store


def sizes(url: str) -> dict[str, int]:
    """Return the size of each object below a URL, by name."""
    return open_store(url).sizes()


def digest(url: str, name: str) -> str:
    """Return the SHA-256 that was stored with an object, or ""."""
    return open_store(url).digest(name)


def put(url: str, name: str, file: Path, sha256: str) -> None:
    """Write a file as an object."""
    open_store(url).put(name, file, sha256)


def create(url: str, name: str, content: bytes) -> bool:
    """Write an object unless it exists with other content; return whether it has this content."""
    try:
        open_store(url).create(name, content)
    except Exists:
        return False
    return True


def delete(url: str, name: str) -> None:
    """Delete an object, if it exists."""
    open_store(url).delete(name)
