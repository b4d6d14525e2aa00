"""Add, replace and remove fields of a dataset without rewriting its shards (`shardkit fields`).

Each change is a layer: see `shardkit.dataset.manifest.Layer`. The dataset is replaced as by
`append`: its files are linked into the new one, which is published in one step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from shardkit.changes.combine import manifests_of
from shardkit.changes.field_source import LayerSource, Samples
from shardkit.changes.field_table import Matched, TableValues, is_table
from shardkit.changes.field_values import FieldValues, FileValues, FunctionValues, SequenceValues
from shardkit.changes.layers import (
    Publication,
    as_layer,
    change_request,
    is_last_change,
    next_name,
    plan_layers,
    require_same_rows,
    with_layer,
)
from shardkit.conversion.build_all import Builder, Processes
from shardkit.conversion.disk import as_failure
from shardkit.conversion.engine import assembly, build, prepare
from shardkit.conversion.fingerprint import ConversionFingerprint
from shardkit.conversion.plan import ConvertOptions, Plan
from shardkit.conversion.staging import StagingDirectory, check_target, finish_interrupted
from shardkit.dataset.manifest import ADD, LAYERS, REMOVE, REPLACE, Layer, Manifest, save_manifest
from shardkit.dataset.opened import OpenedDataset, OpenedDirectory
from shardkit.errors import UsageError, located, setting
from shardkit.kinds.field import Field
from shardkit.options import option, require_valid, takes
from shardkit.record import IMAGE, LABEL
from shardkit.registry import DEFAULT_ATTACHED, format_names
from shardkit.system.temporary import full_disk_named
from shardkit.system.text import name_list, quoted


@dataclass(frozen=True, kw_only=True)
class Changed:
    """The result of a change of fields."""

    manifests: dict[str, Manifest]
    """Split name, or "" without splits, to the manifest of its dataset."""
    schema: Mapping[str, Field] = field(default_factory=dict)
    """The fields that were added or replaced."""
    new_classes: tuple[str, ...] = ()
    """Classes of the label that the dataset did not have."""
    matched: Matched | None = None
    """How the rows of a table match those of the dataset."""
    lost_classes: tuple[str, ...] = ()
    """Classes of the dataset that no new label has."""
    written: bool = True
    """Whether the dataset was changed. It is not by a dry run, or if it already had the change."""


@dataclass(frozen=True, kw_only=True)
class FieldOptions:
    """The options of `add` and `replace`."""

    key: str | None = option(
        None,
        help="Table column with the key or path of each row; with splits, these may start with "
        "the split and a slash.",
        metavar="COLUMN",
        shown="key or path",
    )
    field: Sequence[str] = option(
        (),
        help=f"Field to create from a table column, as for {setting('keep')} of `convert table`; "
        "for an .npy file, the field's name. Repeatable.",
        metavar="NAME[=COLUMN][:KIND][?]",
        is_repeated=True,
    )
    schema: Mapping[str, Field | str] | None = option(
        None,
        help="Fields of Python values by name, each a `shardkit.Field` or a kind; others are "
        "inferred from the first value.",
        is_keyword_only=True,
    )
    missing: str = option(
        "fail",
        help="fail: write nothing if the table lacks rows of DATASET. skip: leave these rows "
        "without the field, or remove the values that they had.",
        choices=("fail", "skip"),
    )
    unknown: str = option(
        "fail",
        help="fail: write nothing if DATASET lacks rows of the table. skip: ignore these rows.",
        choices=("fail", "skip"),
    )
    dry_run: bool = option(False, help="Show fields, classes and unmatched keys; write nothing.")
    force: bool = option(False, help="Discard the work of a different unfinished run.")

    def __post_init__(self) -> None:
        require_valid(self)


@dataclass(frozen=True, kw_only=True)
class ReplaceOptions:
    """The options of `replace` alone."""

    keep_classes: bool = option(False, help="Keep classes that no new label has.")


@takes(FieldOptions, Processes)
def add(options: FieldOptions, processes: Processes, directory: str | Path, values: Any) -> Changed:
    """Add fields to a dataset without rewriting its shards.

    The values are stored in shards of their own, in ``layers`` of the dataset's directory. Readers
    see the old dataset until the new one replaces it in one step. Repeat an interrupted call to
    resume it. `undo` reverts the change.

    Args:
        directory: The dataset, perhaps of splits.
        values: A table (.csv, .tsv, .jsonl, .parquet), or an .npy file in row order; with splits, a
            folder with a file for each, such as train.npy. Or a dict with the values of each field:
            an array, sequence or iterable in row order, or a function that maps a dict with a
            sample's fields to the value.

    Raises:
        UsageError: If there is no dataset, it has a field of that name, or values do not match.
        BadImages: If a value does not fit its field, or a function raises an exception.
        CorruptDataset: If a manifest or an index is damaged.
        ConversionFailed: If writing fails.
    """
    return _change(options, processes, directory, values, None)


@takes(FieldOptions, ReplaceOptions, Processes)
def replace(
    options: FieldOptions,
    labels: ReplaceOptions,
    processes: Processes,
    directory: str | Path,
    values: Any,
) -> Changed:
    """Replace fields of a dataset, such as its labels, without rewriting its shards.

    The shards keep the old values; ``convert dataset`` makes a dataset without them. Labels that
    are names get the classes of the new values: existing ones in their order, then new ones. Labels
    that are numbers are positions in the existing classes. Everything else is as for `add`.

    Args:
        directory: The dataset, perhaps of splits.
        values: The values, as for `add`.

    Raises:
        UsageError: If there is no dataset or no such field, or values do not match.
        BadImages: If a value does not fit its field, or a function raises an exception.
        CorruptDataset: If a manifest or an index is damaged.
        ConversionFailed: If writing fails.
    """
    return _change(options, processes, directory, values, labels)


def remove(directory: str | Path, names: Sequence[str]) -> Changed:
    """Remove fields from a dataset. Its shards keep their values, but a copy of it does not.

    Args:
        directory: The dataset, perhaps of splits.
        names: Names of the fields.

    Raises:
        UsageError: If there is no dataset or no such field, or no field would remain.
        CorruptDataset: If a manifest or an index is damaged.
        ConversionFailed: If writing fails.
    """
    directory = Path(directory)
    names = (names,) if isinstance(names, str) else tuple(names)
    with _opened(directory) as datasets:
        if all(is_last_change(dataset.manifest, REMOVE, names) for dataset in datasets.values()):
            return Changed(manifests=manifests_of(datasets), written=False)
        for dataset in datasets.values():
            manifest = dataset.manifest
            for name in names:
                if name not in manifest.fields_by_name:
                    raise UsageError(f"{directory} has no field {quoted(name)}; {_has(manifest)}")
            next_name(manifest)  # before any work, if there is none
            if IMAGE in names or set(names) >= manifest.fields_by_name.keys():
                raise UsageError("the image, or the last field, cannot be removed")
        request = change_request(datasets, REMOVE, names)

        def layers_of(split: str, manifest: Manifest) -> tuple[Sequence[Layer], int]:
            layer = Layer(
                name=next_name(manifest),
                operation=REMOVE,
                fields=names,
                digest="",
                files=(),
                request="",
            )
            return with_layer(manifest, layer)

        return Changed(manifests=Publication(directory, datasets, request).run_layers(layers_of))


def undo(directory: str | Path) -> Changed:
    """Undo the last change to the fields of a dataset. Repeating the call does nothing.

    Args:
        directory: The dataset, perhaps of splits.

    Raises:
        UsageError: If there is no dataset.
        CorruptDataset: If a manifest or an index is damaged.
        ConversionFailed: If writing fails.
    """
    directory = Path(directory)
    with _opened(directory) as datasets:
        if not any(dataset.manifest.can_undo for dataset in datasets.values()):
            return Changed(manifests=manifests_of(datasets), written=False)
        request = change_request(datasets, "undo", ())

        def layers_of(split: str, manifest: Manifest) -> tuple[Sequence[Layer], int]:
            layering = manifest.layering
            assert layering is not None  # all splits have the same changes
            return layering.layers[: layering.before], layering.before

        return Changed(manifests=Publication(directory, datasets, request).run_layers(layers_of))


def _change(
    options: FieldOptions,
    processes: Processes,
    directory: str | Path,
    values: Any,
    replacing: ReplaceOptions | None,
) -> Changed:
    directory = Path(directory)
    operation = ADD if replacing is None else REPLACE
    keep_classes = replacing is not None and replacing.keep_classes
    with _opened(directory) as datasets, full_disk_named():
        providers = _providers(options, values, datasets, keep_classes)
        schema = {name: kind for provider in providers for name, kind in provider.schema.items()}
        matched = next((v.matched for v in providers if isinstance(v, TableValues)), None)
        if matched is not None:
            _require_matched(directory, options, matched, is_new=operation == ADD)
        before = next(iter(datasets.values())).manifest.classes or ()
        after = (schema[LABEL].classes or ()) if LABEL in schema else before
        result = Changed(
            manifests=manifests_of(datasets),
            schema=schema,
            new_classes=tuple(name for name in after if name not in set(before)),
            lost_classes=tuple(name for name in before if name not in set(after)),
            matched=matched,
            written=False,
        )
        change = _Change(directory, datasets, operation, providers, Builder(**vars(processes)))
        if change.is_done():
            return result
        for dataset in datasets.values():
            _require_names(directory, dataset.manifest, schema, operation)
        if options.dry_run:
            return result
        return dataclasses.replace(result, manifests=change.run(force=options.force), written=True)


class _Planned(NamedTuple):
    """A plan for the layers of all splits, and everything that determines the result."""

    plan: Plan
    request: ConversionFingerprint


@dataclass(frozen=True)
class _Change:
    """Fields to add or replace."""

    directory: Path
    datasets: Mapping[str, OpenedDataset]
    operation: str
    values: Sequence[FieldValues]
    builder: Builder

    def is_done(self) -> bool:
        """Return whether the last change was this one: an earlier run has finished it."""
        fields = tuple(name for values in self.values for name in values.schema)
        manifests = [dataset.manifest for dataset in self.datasets.values()]
        if not all(is_last_change(manifest, self.operation, fields) for manifest in manifests):
            return False
        request = self._planned(again=True).request.digest
        return all(manifest.layers[-1].request == request for manifest in manifests)

    def run(self, *, force: bool) -> dict[str, Manifest]:
        """Build the layer of each split, and publish the dataset with it."""
        plan, request = self._planned(again=False)
        self.builder.expect(sum(len(split.source) for split in plan.splits))
        layers: dict[str, Layer] = {}

        def make(staging: StagingDirectory) -> None:
            layers.update(self._build(plan, staging, request.digest))

        def layers_of(split: str, manifest: Manifest) -> tuple[Sequence[Layer], int]:
            return with_layer(manifest, layers[split])

        return Publication(self.directory, self.datasets, request, force).run_layers(
            layers_of, make
        )

    def _planned(self, *, again: bool) -> _Planned:
        """Return the plan; ``again`` is for the dataset before its last change."""
        splits = {
            f"{dataset.prefix}{LAYERS}/{_name(dataset.manifest, again=again)}": dataset
            for dataset in self.datasets.values()
        }
        scan = LayerSource(splits, self.values).scan()
        to = next(iter(self.datasets.values())).manifest.format
        to = to if to in format_names() else DEFAULT_ATTACHED
        plan = plan_layers(scan, ConvertOptions(to=to))
        planned = plan.fingerprint()
        change = change_request(self.datasets, self.operation, tuple(scan.schema), again=again)
        settings = {**planned.settings, **change.settings}
        return _Planned(plan, dataclasses.replace(planned, settings=settings))

    def _build(self, plan: Plan, staging: StagingDirectory, request: str) -> dict[str, Layer]:
        """Build the shards of the layer of each split, and return it."""
        works = [prepare(split, plan, staging) for split in plan.splits]
        build(works, plan, staging, self.builder)
        layers = {}
        for (split, dataset), work in zip(self.datasets.items(), works, strict=True):
            manifest = assembly(work, plan).finish([work.group()])
            require_same_rows(dataset.manifest, manifest)
            save_manifest(manifest, work.folder)
            layer = as_layer(manifest, work.folder, self.operation)
            layers[split] = dataclasses.replace(layer, request=request)
        return layers


def _name(manifest: Manifest, *, again: bool) -> str:
    return manifest.layers[-1].name if again else next_name(manifest)


@contextmanager
def _opened(directory: Path) -> Iterator[dict[str, OpenedDataset]]:
    """Open the dataset of each split, after an interrupted change was finished."""
    with located(directory):
        try:
            finish_interrupted(directory)
            datasets = OpenedDirectory(directory)
            datasets.manifests()
            check_target(directory, force=True)
            yield datasets.splits
        except OSError as error:
            raise as_failure(error, directory) from error


def _providers(
    options: FieldOptions,
    given: Any,
    datasets: Mapping[str, OpenedDataset],
    keep_classes: bool,
) -> Sequence[FieldValues]:
    """Return the providers of the new values; `ReplaceOptions` has ``keep_classes``."""
    opened = list(datasets.values())
    if isinstance(given, Mapping):
        if options.field or options.key:
            raise UsageError(
                f"{setting('key')} and {setting('field')} are only for files",
                remedy="leave them out",
            )
        if not given:
            raise UsageError("there are no fields", remedy="pass a dict of values by field")
        try:
            schema = {
                name: Field(kind) if isinstance(kind, str) else kind
                for name, kind in (options.schema or {}).items()
            }
        except ValueError as error:
            raise UsageError(f"{setting('schema')}: {error}") from error
        samples = Samples(opened)
        return [
            FunctionValues(name, value, samples, schema.get(name), opened[0])
            if callable(value)
            else SequenceValues(name, value, opened, schema.get(name), keep_classes=keep_classes)
            for name, value in given.items()
        ]
    if not isinstance(given, (str, Path)):
        raise UsageError(
            f"{type(given).__name__} values have no field names",
            remedy='pass a dict, as in {"caption": values}',
        )
    path = Path(given)
    if path.is_dir() and any(map(is_table, path.iterdir())):
        raise UsageError(
            f"{path} is a folder of tables",
            remedy="pass one table for all splits, whose keys or paths may start with the split "
            "and a slash",
        )
    if path.suffix == ".npy" or path.is_dir():
        if len(options.field) != 1 or options.key:
            raise UsageError(
                f"{path} contains one field in row order",
                remedy=f"name it with {setting('field', 'NAME')} alone",
            )
        return [FileValues(path, options.field[0], opened)]
    if not is_table(path):
        raise UsageError(
            f"{path} must be a table (.csv, .tsv, .jsonl, .parquet) or an .npy file", where=path
        )
    fields = list(options.field)
    with located(path):
        return [TableValues(path, opened, options.key, fields, keep_classes=keep_classes)]


def _require_matched(
    directory: Path, options: FieldOptions, matched: Matched, *, is_new: bool
) -> None:
    """Refuse a table that does not fit, unless the options or a dry run accept that."""
    if options.dry_run:
        return
    if matched.unknown_count and options.unknown == "fail":
        raise UsageError(
            f"{directory} lacks {matched.unknown_count:,} of the {matched.rows:,} rows of the "
            f"table ({_some(matched.unknown, matched.unknown_count)})",
            remedy=f"{setting('unknown', 'skip')} leaves them out",
        )
    if matched.missing_count and options.missing == "fail":
        raise UsageError(
            f"the table lacks {matched.missing_count:,} of the rows of {directory} "
            f"({_some(matched.missing, matched.missing_count)})",
            remedy=f"add these rows to the table, or pass {setting('missing', 'skip')} "
            + ("to store no value" if is_new else "to remove their values"),
        )


def _some(names: Sequence[str], count: int) -> str:
    more = " ..." if count > len(names) else ""
    return ", ".join(quoted(name) for name in names) + more


def _require_names(
    directory: Path, manifest: Manifest, schema: Mapping[str, Field], operation: str
) -> None:
    """Refuse to add a field that is there, or to replace one that is not."""
    for name in schema:
        there = name in manifest.fields_by_name
        if there and operation == ADD:
            raise UsageError(
                f"{directory} already has the field {quoted(name)}",
                remedy="use `shardkit fields replace` with a table of all rows",
            )
        if not there and operation == REPLACE:
            raise UsageError(
                f"{directory} has no field {quoted(name)} to replace; {_has(manifest)}"
            )


def _has(manifest: Manifest) -> str:
    return f"it has {name_list(manifest.fields_by_name)}"
