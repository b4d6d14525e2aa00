"""Labels of files, in a table in their folder."""

from __future__ import annotations

from pathlib import Path

from shardkit.errors import UsageError, setting
from shardkit.sources.inputs import refusing
from shardkit.sources.labels import Value, label_of
from shardkit.sources.table_rows import columns_of, rows_of
from shardkit.system import safe_paths
from shardkit.system.text import quoted

_FILE = "file_name"
_LABEL = "label"
"""Columns of a table of labels."""


def find_table(root: Path, name: str) -> Path:
    """Return the path of a table of labels, which must be in the folder: manifests name it."""
    try:
        safe_paths.status_of(root, name)
    except FileNotFoundError as error:
        raise UsageError(
            f"{root} contains no {name};",
            remedy=f"{setting('labels')} must be a table in that folder",
        ) from error
    except (OSError, ValueError) as error:
        raise UsageError(f"{setting('labels', name)} is not a table in {root}: {error}") from error
    path = root / name
    columns = columns_of(str(path))
    if missing := [name for name in (_FILE, _LABEL) if name not in columns]:
        raise UsageError(
            f"{path} has no column {missing[0]};",
            remedy=f"for a folder, {setting('labels')} must be a table with the columns {_FILE} "
            f"and {_LABEL}",
        )
    return path


def read_table(path: str) -> dict[str, Value]:
    """Return the label of each file that a table names."""
    labels: dict[str, Value] = {}
    for line, row in rows_of(path, (_FILE, _LABEL)):
        if isinstance(row, str):
            raise UsageError(f"{path}:{line}: {row}")
        name = row.get(_FILE)
        if not isinstance(name, str) or name in labels:
            raise UsageError(f"{path}:{line}: {_FILE} is {quoted(name)}, not a new file name")
        with refusing(f"{path}:{line}"):
            labels[name] = label_of(row.get(_LABEL), _LABEL)
    return labels
