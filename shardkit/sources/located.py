"""Images that a library reads, and where their file has the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from shardkit.contracts import Entry, Located
from shardkit.errors import BadImage
from shardkit.record import FOREIGN_FIELD, Record
from shardkit.sources.inputs import reading

_CHUNK = 1000


def located_in(
    path: str,
    entries: Sequence[Entry],
    offsets: Callable[[Sequence[Entry]], list[int | None]],
    read: Callable[[Entry], Record],
) -> Iterator[Located | BadImage]:
    """Yield the record of each image of a file, after comparing it with the file's bytes.

    ``offsets`` returns where images are, None for one without an offset; ``read`` returns a record
    as the library reads it. BadImage is raised, not yielded, if the file cannot be read at all, or
    changed since the scan.
    """
    for start in range(0, len(entries), _CHUNK):
        chunk = entries[start : start + _CHUNK]
        starts = offsets(chunk)
        with reading(path, chunk[0].stamp) as view:
            for entry, offset in zip(chunk, starts, strict=True):
                try:
                    record = read(entry)
                    name = record.image_field or FOREIGN_FIELD
                    data = record.fields[name]
                    if offset is None or view.read(offset, len(data)) != data:
                        raise BadImage(
                            "its file does not contain its bytes unchanged, in one range"
                        )
                    yield Located(record, {name: offset})
                except BadImage as error:
                    yield error
