"""``shardkit fields``: add, replace and remove fields of a dataset without rewriting its shards."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from shardkit.changes import fields
from shardkit.changes.fields import Changed, FieldOptions, ReplaceOptions
from shardkit.cli.options import Options, argument, click_options, command_option
from shardkit.cli.printing import line, progress_bar, some
from shardkit.cli.run import Run, say
from shardkit.cli.runner import command
from shardkit.conversion.build_all import Processes
from shardkit.system.text import amount, as_command, size


@click.group("fields")
def fields_command() -> None:
    """Add, replace and remove fields of a dataset; its shards do not change.

    New values are stored in separate shards, in DATASET/layers. Readers see the old dataset until
    the new one replaces it in one step.
    """


@dataclass(frozen=True, kw_only=True)
class CommandOptions(Options):
    """Options of the commands alone."""

    source: Path = command_option(
        help="A .csv, .tsv, .jsonl or .parquet table, or an .npy file in row order; with splits, "
        "a folder with one file per split, such as train.npy.",
        flags=("--from",),
        metavar="FILE",
    )


@command(
    "add", argument("dataset"), *click_options(FieldOptions, Processes), options=(CommandOptions,)
)
def add_command(run: Run, options: CommandOptions, *, dataset: Path, **words: Any) -> None:
    """Add fields to DATASET: captions, embeddings, latents, numbers, boxes.

    Rows of a table are matched by key or path, each at most once; one table serves all splits. The
    rows of an .npy file are in the order of DATASET or of a split. Lists in a table become arrays
    with `:array`. Rerun the same command to resume an interrupted run.

    \b
    Examples:
      shardkit fields add dataset --from captions.csv --key path --field caption --dry-run
      shardkit fields add dataset --from captions.csv --key path --field caption,age:int64
      shardkit fields add dataset --from latents.npy --field latent
      shardkit fields add dataset --from vectors.parquet --key path --field vector:array
    """
    _change(run, dataset, options.source, words, "added")


@command(
    "replace",
    argument("dataset"),
    *click_options(FieldOptions, ReplaceOptions, Processes),
    options=(CommandOptions,),
)
def replace_command(run: Run, options: CommandOptions, *, dataset: Path, **words: Any) -> None:
    """Replace fields of DATASET, such as its labels.

    Labels get the classes of the new values: existing classes keep their order, and new ones
    follow. Labels that are numbers are positions in the existing classes, all of which are kept.

    The shards keep the old values, so lmdb, h5py and tarfile return those. `convert dataset` makes
    a dataset without them.

    \b
    Examples:
      shardkit fields replace dataset --from labels.csv --key path --field label
      shardkit fields replace dataset --from captions.jsonl --field caption=text
    """
    _change(run, dataset, options.source, words, "replaced")


@command("remove", argument("dataset"), argument("names", nargs=-1, required=True, type=str))
def remove_command(run: Run, *, dataset: Path, names: tuple[str, ...]) -> None:
    """Remove the fields NAMES from DATASET. `convert dataset` makes a copy without their values.

    \b
    Example:
      shardkit fields remove dataset caption
    """
    changed = fields.remove(dataset, names)
    already = "" if changed.written else " already; nothing to do"
    _report(run, dataset, changed, f"{', '.join(names)} removed{already}")


@command("undo", argument("dataset"))
def undo_command(run: Run, *, dataset: Path) -> None:
    """Undo the last change to the fields of DATASET.

    \b
    Example:
      shardkit fields undo dataset
    """
    changed = fields.undo(dataset)
    text = "the last change was undone"
    if not changed.written:
        text = "nothing to undo: the last change was already undone, or there was none"
    _report(run, dataset, changed, text)


for _command in (add_command, replace_command, remove_command, undo_command):
    fields_command.add_command(_command)


def _change(run: Run, dataset: Path, source: Path, words: dict[str, Any], verb: str) -> None:
    words["field"] = words["field"] or ()
    change = {"added": fields.add, "replaced": fields.replace}[verb]
    with progress_bar(run, "adding" if verb == "added" else "replacing") as tally:
        changed = change(dataset, source, **words, on_progress=tally)
    text = f"{', '.join(changed.schema)} {verb}"
    if words["dry_run"]:
        text = "nothing was written (--dry-run)"
    elif not changed.written:
        text = f"{', '.join(changed.schema)}: already {verb}; nothing to do"
    _report(run, dataset, changed, text, missing="removed" if verb == "replaced" else "missing")


def _report(
    run: Run, dataset: Path, changed: Changed, text: str, *, missing: str = "missing"
) -> None:
    run.report(lambda: _as_json(changed), lambda: _show(dataset, changed, text, run, missing))


def _as_json(changed: Changed) -> dict[str, Any]:
    matched = changed.matched
    return {
        "written": changed.written,
        "fields": [field.describe(name) for name, field in changed.schema.items()],
        "new_classes": list(changed.new_classes),
        "lost_classes": list(changed.lost_classes),
        "matched": None if matched is None else matched._asdict(),
        "rows": {name: manifest.rows for name, manifest in changed.manifests.items()},
        "digests": {name: manifest.digest for name, manifest in changed.manifests.items()},
    }


def _show(dataset: Path, changed: Changed, text: str, run: Run, missing: str) -> None:
    say(f"{dataset}: {text} ({run.seconds:.1f} s)")
    for name, field in changed.schema.items():
        line("field", f"{name}: {field}")
    if changed.new_classes:
        line("classes", f"{len(changed.new_classes)} new: {some(changed.new_classes)}")
    if changed.lost_classes:
        text = f"{len(changed.lost_classes)} without a label left out: {some(changed.lost_classes)}"
        line("classes", f"{text} (--keep-classes keeps them)")
    if (matched := changed.matched) is not None:
        rows = sum(manifest.rows for manifest in changed.manifests.values())
        line("matched", f"{rows - matched.missing_count:,} of {amount(rows, 'row')}")
        for heading, names, count in (
            (missing, matched.missing, matched.missing_count),
            ("unknown", matched.unknown, matched.unknown_count),
        ):
            if count:
                what = f"values of {amount(count, 'row')}" if heading == "removed" else f"{count:,}"
                line(heading, f"{what}: {some(names)}{' ...' * (len(names) < count)}")
    stored = sum(layer.bytes for m in changed.manifests.values() for layer in m.layers)
    if changed.written and stored:
        line("layers", size(stored))
    if changed.written and any(m.can_undo for m in changed.manifests.values()):
        line("undo", as_command("fields", "undo", dataset))
