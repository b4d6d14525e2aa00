"""Leave out the images that lists name: one rule for every kind of source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from shardkit.contracts import Scan
from shardkit.dataset.reports import EXCLUDED
from shardkit.dataset.selection import Listed, read_list
from shardkit.errors import Problem, UsageError


def exclude_listed(scan: Scan, lists: Sequence[str | Path]) -> Scan:
    """Return a scan without the images that text files list; it counts them as ignored.

    A line is a key or, if no image has this key, a path. For a dataset, it may also be a row: see
    `shardkit.dataset.selection.read_list`.

    Args:
        scan: The images of any source.
        lists: The files. If the source has splits, the name of one and ``=`` precede each file, as
            in ``train=leak.txt``.

    Raises:
        UsageError: If a file cannot be read, names an image that the source lacks, or names all
            images of a split.
    """
    chosen: dict[str, set[int]] = {}
    for each in lists:
        split, path = _split_of(scan, str(each))
        found = _rows(scan, split, read_list(path, "--exclude"))
        chosen.setdefault(split, set()).update(found)
    splits, ignored = dict(scan.splits), dict(scan.ignored)
    for split, rows in chosen.items():
        images = splits[split]
        if len(rows) == len(images):
            raise UsageError(f"--exclude leaves no image of {_place(scan, split)}")
        paths = images.paths()
        left_out = [Problem(path=paths[row], reason=EXCLUDED) for row in sorted(rows)]
        ignored[split] = [*ignored.get(split, ()), *left_out]
        splits[split] = images.take(row for row in range(len(images)) if row not in rows)
    return replace(scan, splits=splits, ignored=ignored)


def _split_of(scan: Scan, text: str) -> tuple[str, str]:
    """Return the split and the file that an option names."""
    if "" in scan.splits:
        return "", text
    split, mark, path = text.partition("=")
    if not mark or split not in scan.splits:
        raise UsageError(
            f"--exclude {text}: {scan.source} has the splits {', '.join(scan.splits)}; name that "
            f"of the list: --exclude {next(iter(scan.splits))}=FILE"
        )
    return split, path


def _place(scan: Scan, split: str) -> str:
    return f"{scan.source}, {split}" if split else str(scan.source)


def _rows(scan: Scan, split: str, listed: Listed) -> set[int]:
    """Return the positions of the listed images in a split."""
    entries = scan.splits[split].entries
    wanted = set(listed.names)
    if listed.are_rows and scan.records:
        listed.require_digest(scan.source.describe(split).get("content_digest"))
        found = {str(entry.place): row for row, entry in enumerate(entries)}
    elif listed.are_rows and listed.digest is not None:
        raise UsageError(
            f"{listed.where} lists rows of a dataset; only `shardkit convert dataset` accepts it"
        )
    else:
        found = {entry.path: row for row, entry in enumerate(entries) if entry.path in wanted}
        found |= {entry.key: row for row, entry in enumerate(entries) if entry.key in wanted}
    listed.require_known(found, _place(scan, split))
    return {found[name] for name in wanted}
