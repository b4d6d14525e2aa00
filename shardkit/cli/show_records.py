"""``shardkit show``: see single records of a dataset."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import click
import numpy as np
from PIL.PngImagePlugin import PngInfo

from shardkit.cli.console import emit, say
from shardkit.cli.show import amount, line, table
from shardkit.dataset.shardset import ShardSet
from shardkit.errors import UsageError
from shardkit.record import IMAGE
from shardkit.reporting.fields import sampled_rows
from shardkit.reporting.pictures import picture, sheet
from shardkit.reporting.records import describe_record, find_row, rows_of_class
from shardkit.system.files import require_own_output, write_result

_MOST = 400
"""Maximum records to show at a time."""

_LISTED = 20

_SIDE = 512
"""Side of the picture of one record, in pixels."""

_MARK = "made by shardkit show"


@click.command("show")
@click.argument("dataset", type=click.Path(path_type=Path))
@click.argument("record", required=False)
@click.option("--class", "class_name", metavar="NAME", help="Show records of this class.")
@click.option(
    "--random",
    "count",
    type=click.IntRange(1, _MOST),
    metavar="N",
    help="Show N records, drawn with --seed.  [default: 16 without RECORD]",
)
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    metavar="N",
    help="Seed of --random.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the pictures with masks and boxes to FILE, a PNG image.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the records as JSON.")
def show_command(  # noqa: PLR0913 - Click passes each option by name
    *,
    dataset: Path,
    record: str | None,
    class_name: str | None,
    count: int | None,
    seed: int,
    output: Path | None,
    as_json: bool,
) -> None:
    """Show the RECORD of DATASET with the given row, key or path, or several records.

    A number is a row; "key:7" is the key "7".

    \b
    Examples:
      shardkit show dataset 0
      shardkit show dataset cat/tom
      shardkit show dataset --class cat --random 16 -o cats.png
    """
    if output is not None:
        if output.suffix.lower() != ".png":
            raise UsageError(f"--output {output}: a picture is a file named *.png")
        require_own_output(output, "--output", _MARK)
    if record is not None and (class_name is not None or count is not None):
        raise UsageError("RECORD names one record; leave out --class and --random")
    shards = ShardSet(dataset)
    if output is not None and IMAGE not in shards.schema:
        raise UsageError(f"{dataset} has no images; leave out --output")
    if record is not None:
        rows = [find_row(shards, record)]
    else:
        every = np.arange(len(shards)) if class_name is None else rows_of_class(shards, class_name)
        rows = every[sampled_rows(len(every), count or 16, seed)].tolist()
    described = [describe_record(shards, row) for row in rows]
    if as_json:
        emit(described[0] if record is not None else described)
    elif record is not None:
        _show(described[0])
    else:
        say(f"{dataset}: {amount(len(rows), 'record')}")
        table(
            [("row", "key", "class")]
            + [(str(each["row"]), each["key"], each["class"] or "-") for each in described],
            limit=_LISTED,
        )
    if output is not None:
        image = sheet(shards, rows) if record is None else picture(shards, rows[0], _SIDE)
        mark = PngInfo()
        mark.add_text("Software", _MARK)
        buffer = io.BytesIO()
        image.save(buffer, "PNG", pnginfo=mark)
        write_result(output, buffer.getvalue())
        if not as_json:
            line("written", f"{output}")


def _in_words(stored: dict[str, Any]) -> str:
    sides = f", {stored['width']} x {stored['height']}" if "width" in stored else ""
    return f"{stored['kind']}, {amount(stored['bytes'], 'byte')}{sides}"


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(each) for each in value]
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
