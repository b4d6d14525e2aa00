"""``shardkit show``: see single records of a dataset."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from PIL.PngImagePlugin import PngInfo

from shardkit.cli.options import Options, argument, command_option
from shardkit.cli.printing import line, table
from shardkit.cli.run import Run, say
from shardkit.cli.runner import command
from shardkit.dataset.shardset import ShardSet, open_shards
from shardkit.errors import UsageError, setting
from shardkit.record import IMAGE
from shardkit.reporting.fields import sampled_rows
from shardkit.reporting.pictures import picture, sheet
from shardkit.reporting.records import describe_record, find_row, rows_of_class
from shardkit.system.text import amount
from shardkit.system.user_files import require_own_output, write_result

_MOST = 400
"""Maximum records to show at a time."""

_LISTED = 20

_SIDE = 512
"""Side of the picture of one record, in pixels."""

_MARK = "made by shardkit show"


@dataclass(frozen=True, kw_only=True)
class ShowOptions(Options):
    """Options of `shardkit show`."""

    class_name: str | None = command_option(
        None, help="Show records of this class.", flags=("--class",), metavar="NAME"
    )
    count: int | None = command_option(
        None,
        help="Show N records, drawn with --seed.",
        flags=("--random",),
        metavar="N",
        shown="16 without RECORD",
        type=click.IntRange(1, _MOST),
    )
    seed: int = command_option(0, help="Seed of --random.", metavar="N", minimum=0)
    output: Path | None = command_option(
        None,
        help="Write the pictures with masks and boxes to FILE, a PNG image.",
        flags=("-o", "--output"),
        metavar="FILE",
    )

    def __post_init__(self) -> None:
        if self.output is not None:
            if self.output.suffix.lower() != ".png":
                raise UsageError(
                    f"{setting('output')} {self.output}: the name of a picture must end in .png"
                )
            require_own_output(self.output, "--output", _MARK)


@command(
    "show",
    argument("dataset"),
    argument("record", required=False, type=str),
    options=(ShowOptions,),
)
def show_command(run: Run, options: ShowOptions, *, dataset: Path, record: str | None) -> None:
    """Show the RECORD of DATASET with the given row, key or path, or several records.

    A number is a row; "key:7" is the key "7".

    \b
    Examples:
      shardkit show dataset 0
      shardkit show dataset cat/tom
      shardkit show dataset --class cat --random 16 -o cats.png
    """
    if record is not None and (options.class_name is not None or options.count is not None):
        raise UsageError(
            "RECORD selects one record;", remedy="leave out --class and --random", where="RECORD"
        )
    shards = open_shards(dataset)
    if options.output is not None and IMAGE not in shards.schema:
        raise UsageError(f"{dataset} has no images;", remedy="leave out --output", where=dataset)
    rows = _chosen(shards, options) if record is None else [find_row(shards, record)]
    records = [describe_record(shards, row) for row in rows]
    run.report(
        lambda: {"records": records},
        lambda: _list(dataset, records) if record is None else _show(records[0]),
    )
    if options.output is not None:
        image = sheet(shards, records) if record is None else picture(shards, rows[0], _SIDE)
        mark = PngInfo()
        mark.add_text("Software", _MARK)
        buffer = io.BytesIO()
        image.save(buffer, "PNG", pnginfo=mark)
        write_result(options.output, buffer.getvalue())
        if run.is_text:
            line("written", f"{options.output}")


def _chosen(shards: ShardSet, options: ShowOptions) -> list[int]:
    """Return random rows, perhaps of one class."""
    count = options.count or 16
    if options.class_name is None:
        rows = sampled_rows(len(shards), count, options.seed)
    else:
        rows = rows_of_class(shards, options.class_name, count, options.seed)
    result: list[int] = rows.tolist()
    return result


def _list(dataset: Path, records: list[dict[str, Any]]) -> None:
    say(f"{dataset}: {amount(len(records), 'record')}")
    cells = [(str(record["row"]), record["key"], record["class"] or "-") for record in records]
    table([("row", "key", "class"), *cells], limit=_LISTED)


def _in_words(stored: dict[str, Any]) -> str:
    sides = f", {stored['width']} x {stored['height']}" if "width" in stored else ""
    return f"{stored['kind']}, {amount(stored['bytes'], 'byte')}{sides}"


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return round(value, 2) if isinstance(value, float) else value


def _show(described: dict[str, Any]) -> None:
    shown = [(name, described[name]) for name in ("path", "class") if described[name] is not None]
    for name, value in described["fields"].items():
        stored = isinstance(value, dict) and "bytes" in value
        shown.append((name, _in_words(value) if stored else _rounded(value)))
    for name, value in described.get("facts", {}).items():
        shown.append((name, "unknown" if value is None else value))
    say(f"row {described['row']}: {described['key']}")
    width = max(len(name) for name, _ in shown)
    for name, value in shown:
        say(f"  {name:<{width}}  {value}")
