"""Layouts of image files: class folders, and a folder of images with a table of other fields."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import Any

from shardkit.errors import UsageError
from shardkit.exporting.output import OutputFolder
from shardkit.exporting.records import Exporting
from shardkit.kinds.field import Field
from shardkit.record import IMAGE, LABEL, Record, dump_json
from shardkit.system.npy import npy_header
from shardkit.system.text import name_list

TABLE = "metadata.csv"
"""Name of the table; Hugging Face's ``imagefolder`` reads the columns ``file_name`` and
``*_file_name``."""


def write_imagefolder(exporting: Exporting, output: OutputFolder) -> None:
    """Write each image under its source path, below a folder of its class.

    UsageError if records have more fields than image and label, or a name cannot be a file's.
    """
    if exporting.others or IMAGE not in exporting.shards.schema:
        raise UsageError(
            f"{exporting.shards.directory} has the fields {name_list(exporting.shards.schema)}, "
            "but a folder of images stores only image and label;",
            remedy="use the csv, parquet or webdataset layout",
        )
    prefix = exporting.shards.dataset.prefix
    in_folders = _in_class_folders(exporting)
    for record in exporting.records():
        image = exporting.stored_bytes(record, IMAGE)
        if image is not None:
            stored, content = image
            name = exporting.file_name(record, stored)
            label = exporting.class_name(record)
            folder = "" if in_folders or label is None else f"{label}/"
            output.write(prefix + folder + name, content)


def _in_class_folders(exporting: Exporting) -> bool:
    """Return whether each labeled image is already in a folder that is called like its class."""
    classes = exporting.classes
    labels = exporting.shards.labels.tolist()
    return all(
        label < 0 or path.startswith(f"{classes[label]}/")
        for path, label in zip(exporting.shards.paths, labels, strict=True)
    )


def write_csv(exporting: Exporting, output: OutputFolder) -> None:
    """Write ``metadata.csv`` and the files that it names.

    Images keep their paths, and so their keys, unless other fields are files, too: then each field
    has a folder.
    """
    prefix = exporting.shards.dataset.prefix
    schema = exporting.shards.schema
    file = output.create(prefix + TABLE)
    text = io.TextIOWrapper(file, "utf-8", "surrogateescape", newline="")
    with text:
        table = csv.writer(text, lineterminator="\n")
        table.writerow(_column(name, field) for name, field in schema.items())
        for record in exporting.records():
            table.writerow(_cells(exporting, output, prefix, record))
    output.count(prefix + TABLE)


def _column(name: str, field: Field) -> str:
    if name == IMAGE:
        return "file_name"
    return f"{name}_file_name" if field.type.stored_apart else name


def _cells(
    exporting: Exporting, output: OutputFolder, prefix: str, record: Record
) -> Iterable[str]:
    schema = exporting.shards.schema
    only = [name for name in schema if schema[name].type.stored_apart] == [IMAGE]
    for name, field in schema.items():
        if name == LABEL:
            yield exporting.class_name(record) or ""
        elif field.type.stored_apart:
            value_bytes = exporting.stored_bytes(record, name)
            if value_bytes is None:
                yield ""
                continue
            stored, content = value_bytes
            folder = "" if only else f"{name}/"
            file = folder + exporting.file_name(record, stored)
            output.write(prefix + file, as_file(field, content))
            yield file
        else:
            yield _as_text(exporting.value(record, name))


def as_file(field: Field, content: bytes) -> bytes:
    """Return the bytes of a field as a file: arrays of one shape are stored without a header."""
    if field.is_uniform:
        return npy_header(field.shape or (), field.values) + content
    return content


def _as_text(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return dump_json(value).decode() if isinstance(value, (list, dict, bool)) else repr(value)
