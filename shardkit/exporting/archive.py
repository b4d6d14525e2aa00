"""The layout of tar archives for WebDataset."""

from __future__ import annotations

from shardkit.contracts import ShardSpec
from shardkit.dataset.index_builder import open_records
from shardkit.exporting.output import OutputFolder
from shardkit.exporting.records import Exporting
from shardkit.kinds.field import describe_schema
from shardkit.registry import get_format


def write_archives(exporting: Exporting, output: OutputFolder) -> None:
    """Write one archive for each shard, with all fields of its records."""
    target = get_format("webdataset")
    manifest = exporting.shards.manifest
    for number in range(len(manifest.shards)):
        path = exporting.shards.files.path(number)
        with open_records(get_format(manifest.format), path) as records:
            meta = {**records.meta, "format": target.name, "raw_shape": None}
        meta |= {"classes": manifest.classes, "schema": describe_schema(manifest.fields_by_name)}
        name = f"{exporting.shards.dataset.split or 'data'}-{number:06d}{target.suffix}"
        writer = target.write(output.root / name, ShardSpec(meta=meta))
        try:
            for record in exporting.of_shard(number):
                writer.write(record)
            writer.close()
        except BaseException:
            writer.abort()
            raise
        output.count(name)
