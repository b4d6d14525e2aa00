"""Write the indexes by which other tools read tar archives, for an attached dataset."""

from __future__ import annotations

import hashlib
import sqlite3
import struct
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from shardkit.dataset.shardset import open_shards
from shardkit.errors import BadImage, UsageError
from shardkit.exporting.export import staged
from shardkit.exporting.output import OutputFolder
from shardkit.record import dump_json
from shardkit.registry import get_source
from shardkit.sources.tar_samples import SampleFile, sample_files
from shardkit.system.temporary import TemporaryFolder
from shardkit.system.text import quoted

_BLOCK = 512
_PIECE = 1 << 20
_HEADER = struct.Struct("100s 24x 12s 20x c 355x")
"""Name, size and type in the last block of a header, all that wids reads."""


class Archive(NamedTuple):
    """The samples of one archive, in order."""

    path: Path
    name: str
    """Its path below the folder of all archives."""
    samples: Sequence[Sequence[SampleFile]]
    end: int
    """Offset after the last member."""


def export_index(
    directory: str | Path, target: str | Path, tool: str, *, root: str | Path | None = None
) -> int:
    """Write the indexes of a tool for the archives of an attached dataset to a new folder.

    The files have the names that the tool expects next to the archives. They describe all samples,
    also those that `shardkit.attach` left out.

    Args:
        directory: The dataset.
        target: A folder that does not exist or is empty, or has exactly these files.
        tool: One of `TOOLS`.
        root: Folder of the archives; None means where `shardkit.attach` found them.

    Returns:
        The number of samples.

    Raises:
        UsageError: If the dataset is not attached, or the tool cannot read one of its archives.
        CorruptShard: If an archive was replaced.
        ConversionFailed: If writing fails.
    """
    directory, target = Path(directory), Path(target)
    if tool not in TOOLS:
        raise UsageError(f"the tool {tool!r} is unknown; choose from {', '.join(sorted(TOOLS))}")
    shards = open_shards(directory, root=root)
    if shards.manifest.archives is None:
        raise UsageError(f"{directory} is not attached: `shardkit attach` its archives first")
    attaching = get_source(shards.manifest.format).attaching
    if not (attaching and attaching.is_tar):
        raise UsageError(
            f"{directory} reads {shards.manifest.format} files; these indexes are of tar archives"
        )
    shards.require_shards()
    archives = [
        _read(shards.files.path(number), shard.name)
        for number, shard in enumerate(shards.manifest.shards)
    ]
    with staged(directory, target) as output:
        TOOLS[tool](archives, output)
    return sum(len(archive.samples) for archive in archives)


def _read(path: Path, name: str) -> Archive:
    try:
        parts = [part for part in sample_files(path) if part.key]
    except BadImage as error:
        raise UsageError(f"{path}: {error}") from error
    samples: list[list[SampleFile]] = []
    seen: set[str] = set()
    for part in parts:
        if part.offset < 0:
            raise UsageError(
                f"{path}: {quoted(part.name)} is a sparse file, which no index can locate"
            )
        if samples and samples[-1][0].key == part.key:
            samples[-1].append(part)
            continue
        if part.key in seen:
            raise UsageError(
                f"the members of {quoted(part.key)} in {path} are not adjacent, which other tools "
                "take for two samples: sort the archive, or use `shardkit convert`"
            )
        seen.add(part.key)
        samples.append([part])
    last = parts[-1].offset + parts[-1].size if parts else 0
    return Archive(path, name, samples, last + -last % _BLOCK)


def _write_energon(archives: Sequence[Archive], output: OutputFolder) -> None:
    """Write ``X.tar.idx``, the offset of each sample; and ``.nv-meta`` with all members."""
    keys: set[str] = set()
    for archive in archives:
        starts = [sample[0].start for sample in archive.samples]
        output.write(
            f"{archive.name}.idx", struct.pack(f"={len(starts) + 1}Q", *starts, archive.end)
        )
        for sample in archive.samples:
            if sample[0].key in keys:
                raise UsageError(f"energon requires distinct keys: {quoted(sample[0].key)} repeats")
            keys.add(sample[0].key)
    counts = {archive.name: len(archive.samples) for archive in archives}
    output.write(".nv-meta/.info.json", dump_json({"shard_counts": counts}))
    with TemporaryFolder() as folder:
        path = folder / "index.sqlite"
        with closing(sqlite3.connect(path)) as database:
            _fill(database, archives)
        output.write(".nv-meta/index.sqlite", path.read_bytes())


def _fill(database: sqlite3.Connection, archives: Sequence[Archive]) -> None:
    """Create the tables of energon, as its own preparation does."""
    database.executescript(_ENERGON_SCHEMA)
    for number, archive in enumerate(archives):
        starts = [sample[0].start for sample in archive.samples]
        ends = [*starts[1:], archive.end]
        for row, (sample, start, end) in enumerate(zip(archive.samples, starts, ends, strict=True)):
            values = (number, sample[0].key, row, start, end - start)
            database.execute("INSERT INTO samples VALUES (?, ?, ?, ?, ?)", values)
            database.executemany(
                "INSERT INTO sample_parts VALUES (?, ?, ?, ?, ?)",
                [(number, row, part.suffix, part.offset, part.size) for part in sample],
            )
    database.executescript(_ENERGON_INDEXES)
    database.commit()


_ENERGON_SCHEMA = """
CREATE TABLE samples (tar_file_id INTEGER NOT NULL, sample_key TEXT NOT NULL UNIQUE,
  sample_index INTEGER NOT NULL, byte_offset INTEGER, byte_size INTEGER);
CREATE TABLE sample_parts (tar_file_id INTEGER, sample_index INTEGER, part_name TEXT,
  content_byte_offset INTEGER, content_byte_size INTEGER);
"""

_ENERGON_INDEXES = """
CREATE INDEX idx_samples_by_tar_and_idx ON samples(tar_file_id, sample_index);
CREATE INDEX idx_sample_parts_seq
  ON sample_parts(tar_file_id, sample_index, content_byte_offset);
CREATE INDEX idx_sample_parts_full ON sample_parts(tar_file_id, sample_index, part_name,
  content_byte_offset, content_byte_size);
"""


def _write_dali(archives: Sequence[Archive], output: OutputFolder) -> None:
    """Write ``X.idx``: a line for each sample with suffix, offset, size and name of each member."""
    for archive in archives:
        lines = [f"v1.2 {len(archive.samples)}"]
        for sample in archive.samples:
            for part in sample:
                if part.name.split() != [part.name]:
                    raise UsageError(
                        f"DALI's index has no place for spaces: {quoted(part.name)} in "
                        f"{archive.path}"
                    )
            texts = (f"{part.suffix} {part.offset} {part.size} {part.name}" for part in sample)
            lines.append(" ".join(texts))
        content = "".join(f"{line}\n" for line in lines)
        name = f"{archive.name.removesuffix('.tar')}.idx"
        output.write(name, content.encode("utf-8", "surrogateescape"))


def _write_wids(archives: Sequence[Archive], output: OutputFolder) -> None:
    """Write ``index.json``: the archives with their MD5 and number of samples."""
    listed = []
    for archive in archives:
        digest = hashlib.md5(usedforsecurity=False)  # as wids compares it
        with archive.path.open("rb") as file:
            for part in (part for sample in archive.samples for part in sample):
                file.seek(part.offset - _BLOCK)
                if not _is_read_by_wids(part, file.read(_BLOCK)):
                    raise UsageError(
                        f"wids ignores extended headers, which state the name or size of "
                        f"{quoted(part.name)} in {archive.path}: give it a name in ASCII of at "
                        "most 100 bytes, or use `shardkit convert`"
                    )
            file.seek(0)
            while piece := file.read(_PIECE):
                digest.update(piece)
            size = file.tell()
        listed.append(
            {
                "url": str(archive.path),
                "md5sum": digest.hexdigest(),
                "nsamples": len(archive.samples),
                "filesize": size,
            }
        )
    value = {"__kind__": "wids-shard-index-v1", "wids_version": 1, "shardlist": listed}
    output.write("index.json", dump_json(value))


def _is_read_by_wids(part: SampleFile, header: bytes) -> bool:
    """Return whether wids reads a member's name and size, given the block before its content."""
    name, size, kind = _HEADER.unpack(header)
    is_right = name.rstrip(b"\0") == part.name.encode("utf-8", "replace") and kind in (b"0", b"\0")
    return is_right and size[:-1].strip(b" \0") in (b"%o" % part.size, b"%011o" % part.size)


def _write_webshart(archives: Sequence[Archive], output: OutputFolder) -> None:
    """Write ``X.json``: offset and length of each member, by name."""
    for archive in archives:
        parts = (part for sample in archive.samples for part in sample)
        files = {part.name: {"offset": part.offset, "length": part.size} for part in parts}
        size = archive.path.stat().st_size
        value = {"path": Path(archive.name).name, "filesize": size, "files": files}
        output.write(f"{archive.name.removesuffix('.tar')}.json", dump_json(value))


TOOLS: dict[str, Callable[[Sequence[Archive], OutputFolder], None]] = {
    "dali": _write_dali,
    "energon": _write_energon,
    "webshart": _write_webshart,
    "wids": _write_wids,
}
"""The tools, and the function that writes the indexes of each."""
