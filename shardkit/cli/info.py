"""``shardkit info``: describe a dataset."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardkit.cli.options import Options, argument, command_option
from shardkit.cli.printing import ignored_counts, line, show_notes, some, table, wrapped
from shardkit.cli.run import Run, say
from shardkit.cli.runner import command
from shardkit.dataset.parts import sources_of
from shardkit.errors import NotPublished
from shardkit.kinds.field import field_in_words
from shardkit.record import IMAGE, LABEL, image_field, image_kind
from shardkit.reporting.describe import describe
from shardkit.system.text import amount, printable, shell, size
from shardkit.system.urls import as_url

_LISTED = 30
"""Maximum classes to show; --json prints all."""


@dataclass(frozen=True, kw_only=True)
class InfoOptions(Options):
    """Options of `shardkit info`."""

    buckets: str | None = command_option(
        None,
        help="Show how many images each bucket gets, and how much cropping removes. SIZES is "
        "512x512,448x576,... (height and width), or a side such as 512 for all sizes with up to "
        "its area.",
        metavar="SIZES",
    )


@command("info", argument("dataset"), options=(InfoOptions,))
def info_command(run: Run, options: InfoOptions, *, dataset: Path) -> None:
    """Show the format, sizes, classes and recipe of DATASET, a folder or URL.

    For a plan for jobs, info shows how many tasks are done, and the next command.

    \b
    Examples:
      shardkit info dataset
      shardkit info dataset --json
      shardkit info s3://bucket/dataset
      shardkit info dataset --buckets 512
    """
    try:
        datasets = describe(dataset, options.buckets)
    except NotPublished as error:
        done = error.done
        tasks = error.tasks
        run.report(
            lambda: {"datasets": {}, "plan": {"done": done, "tasks": tasks}},
            lambda: _show_plan(as_url(dataset) or str(dataset), done, tasks),
        )
        return
    run.report(lambda: {"datasets": datasets}, lambda: _show_all(dataset, datasets))


def _show_plan(path: str, done: int, tasks: int) -> None:
    say(path)
    line("plan", f"{done:,} of {tasks:,} tasks are done; no dataset is published")
    command = ["work", path, "--claim"] if done < tasks else ["commit", path]
    line("next", shell("shardkit", *command))


def _show_all(dataset: Path, datasets: dict[str, dict[str, Any]]) -> None:
    url = as_url(dataset)
    for name, described in datasets.items():
        _show(f"{url}/{name}".rstrip("/") if url else dataset / name, described)


def _show(path: Path | str, value: dict[str, Any]) -> None:
    say(f"{path}")
    line("format", f"{value['format']}, {amount(value['shards'], 'shard')}, {size(value['bytes'])}")
    images = ", ".join(
        f"{count:,} {image_kind(name)}"
        for name, count in value["fields"].items()
        if image_field([name])
    )
    line("images" if images else "rows", f"{value['rows']:,}" + (f" ({images})" if images else ""))
    _show_fields(value["schema"], value["rows"])
    _show_layers(value)
    for name in ("width", "height", "bytes"):
        if value["images"][name]:
            low, median, high = value["images"][name]
            line(name, f"{low:,} to {high:,}, median {median:,}")
    if "buckets" in value:
        _show_buckets(value["buckets"])
    for source in sources_of(value["source"]):
        seed = source.get("seed")
        order = "as found" if seed is None else f"shuffled with seed {seed}"
        line("source", f"{source['kind']} {printable(source['name'])}, {order}")
        if "where" in source:
            line("where", printable(str(source["where"])))
        if isinstance(division := source.get("division"), dict):
            line("divided", printable(_division(division)))
    if "folder" in value:
        line("attached", f"reads files in {printable(value['folder'])}")
    line("recipe", _recipe(value["recipe"]))
    line("made by", ", ".join(f"{name} {version}" for name, version in value["software"].items()))
    line("digest", value["digest"])
    line("content", value["content_digest"])
    if value["skipped"]:
        line("skipped", f"{amount(len(value['skipped']), 'bad file')}, listed in skipped.jsonl")
    if value["ignored"]:
        line("ignored", ignored_counts(value["ignored"]))
    show_notes(value["notes"], value["recipe"])
    if value["classes"] is None or (value["rows"] and not any(value["classes"].values())):
        line("classes", "none: the dataset has no labels")
        return
    line("classes", f"{len(value['classes']):,}")
    table([(printable(name), f"{n:,}") for name, n in value["classes"].items()], limit=_LISTED)


def _show_buckets(buckets: list[dict[str, Any]]) -> None:
    line("buckets", f"{len(buckets)}")
    table(
        [
            (
                "{}x{}".format(*bucket["size"]),
                amount(bucket["images"], "image"),
                f"{bucket['cropped']:.1%} of the pixels cropped" if bucket["images"] else "",
            )
            for bucket in buckets
        ]
    )


def _show_fields(schema: list[dict[str, Any]], rows: int) -> None:
    """Print the fields of a dataset that has others than RGB images and labels."""
    typed = any(field["name"] == IMAGE and field["dtype"] for field in schema)
    if {field["name"] for field in schema} <= {IMAGE, LABEL} and not typed:
        return
    line("fields", f"{len(schema)}")
    table(
        [
            (
                field["name"],
                field_in_words(
                    field["kind"], field["dtype"], field["shape"], len(field["classes"] or ())
                ),
                "all rows" if field["rows"] == rows else amount(field["rows"], "row"),
            )
            for field in schema
        ]
    )
    for field in schema:
        if field["classes"] and field["name"] != LABEL:
            names = f"    {printable(field['name'])}: "
            wrapped(some(field["classes"], _LISTED), " " * len(names), first=names)


def _show_layers(value: dict[str, Any]) -> None:
    """Print the changes of fields after the conversion."""
    for layer in value.get("layers", ()):
        verb = {"add": "added", "replace": "replaced", "remove": "removed"}[layer["operation"]]
        text = f"{printable(', '.join(layer['fields']))} {verb}"
        if layer["operation"] != "remove" and layer["bytes"]:
            kept = "" if layer["used"] else ", kept for `fields undo`"
            text += f", {size(layer['bytes'])} in layers/{layer['name']}{kept}"
        line("change", text)
    if any(layer["operation"] != "add" for layer in value.get("layers", ())):
        line("", "the shards keep replaced and removed values; `convert dataset` leaves them out")


def _division(division: dict[str, Any]) -> str:
    """Return the side of a dataset that was divided off, and the options that did it."""
    rule = {name: value for name, value in division.items() if value and name != "side"}
    options = [f"--{name}" + f" {value}" * (value is not True) for name, value in rule.items()]
    return f"{division.get('side')}, by {' '.join(options)}"


def _recipe(recipe: dict[str, Any]) -> str:
    if recipe.get("copy"):
        return "records unchanged"
    changes = []
    if recipe["resize"]:
        height, width = recipe["resize"]
        mode = recipe["resize_mode"]
        box = f"{height}x{width}"
        if height == width and mode in ("shorter", "longer"):
            box = str(height)
            mode = f"{mode} side"
        by = " with DCT scaling" if recipe.get("dct_scaling") else ""
        changes.append(f"resized to {box} ({mode}, {recipe['filter']}{by})")
    if recipe["orient"]:
        changes.append("EXIF orientation applied")
    if recipe["encode"] != "keep":
        changes.append(f"encoded as {recipe['encode']}")
    if recipe["quality"]:
        changes.append(f"quality {recipe['quality']}")
    return ", ".join([*(changes or ["bytes unchanged"]), f"checked: {recipe['check']}"])
