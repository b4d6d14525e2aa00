"""Append the images of a source to a dataset (`shardkit append`), in one step for readers."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from shardkit.contracts import Images, Scan, Source
from shardkit.conversion.assemble import save_manifests
from shardkit.conversion.build_all import Builder, build, prepare
from shardkit.conversion.combine import Piece, combine, load_splits, other_fields
from shardkit.conversion.disk import as_failure
from shardkit.conversion.fingerprint import ConversionFingerprint
from shardkit.conversion.manifests import make_manifest
from shardkit.conversion.options import parse_bytes
from shardkit.conversion.plan import DEFAULT_SHARD_BYTES, ConvertOptions, Plan, make_plan
from shardkit.conversion.recipe import Recipe
from shardkit.conversion.staging import (
    StagingDirectory,
    check_target,
    clear_trash,
    open_staging,
    refuse_overlap,
)
from shardkit.dataset.index import Index
from shardkit.dataset.manifest import Manifest
from shardkit.dataset.parts import parts_of
from shardkit.dataset.reports import excluded_paths
from shardkit.errors import UsageError
from shardkit.record import LABEL
from shardkit.registry import get_source
from shardkit.sources.divided import Divided, is_divided, reopen
from shardkit.system.files import as_name
from shardkit.system.pool import Progress, Report
from shardkit.system.text import quoted

_NAMED = 3
"""Maximum images that a message names; it counts all."""


@dataclass(frozen=True, kw_only=True)
class Appended:
    """The result of `append`."""

    manifests: dict[str, Manifest]
    """Split name, or "" without splits, to the manifest of its dataset."""
    images: int
    """Number of images appended."""
    left_out: list[str]
    """Paths of images that the dataset had already; with splits, each starts with its split."""


def append(  # noqa: PLR0913 - the options of the command, each with its own meaning
    directory: str | Path,
    source: str | Path | Source,
    *,
    skip_existing: bool = False,
    on_error: str = "fail",
    shard_size: int | str = DEFAULT_SHARD_BYTES,
    shard_samples: int | None = None,
    force: bool = False,
    workers: int = 1,
    on_progress: Report | None = None,
) -> Appended:
    """Append images to a dataset, as new shards, with the recipe of the dataset.

    Existing rows keep their numbers and shards. The labels of new classes follow the existing ones.
    If the dataset was divided by ``val`` or ``test``, the same rule divides the new images.
    Readers see the old dataset until the new one replaces it in one step; loaders that have it open
    continue with the old one or report that it was replaced. Repeat an interrupted call to resume
    it. Repeating a finished call does nothing.

    Args:
        directory: The dataset, perhaps of splits.
        source: A path of the same kind as that of the dataset, read with the same options; or a
            source of any kind, with the splits of the dataset.
        skip_existing: Leave out images whose path or key the dataset has already, or which its
            conversion left out; otherwise they are an error. Content is not compared, except for
            sizes if the dataset stores images unchanged.
        on_error: ``fail`` writes nothing if any image is bad; ``skip`` leaves bad images out.
        shard_size: Approximate bytes of images in a shard, as a number or as ``"256MiB"``.
        shard_samples: Images in a shard, instead of ``shard_size``.
        force: Discard the work of another unfinished run.
        workers: Number of processes.
        on_progress: Called with the work done since the last call.

    Raises:
        UsageError: If there is no dataset, or ``source`` does not go with it.
        BadImages: If images are bad and ``on_error`` is ``fail``.
        CorruptDataset: If a manifest or an index is damaged, or a shard has the wrong size.
        ConversionFailed: If writing fails.
    """
    directory = Path(directory)
    try:
        _finish_interrupted(directory)
        manifests = load_splits(directory)
        check_target(directory, force=True)
        opened = _open(directory, source, manifests)
        refuse_overlap(opened, directory)
        new = _new_images(directory, manifests, opened, skip_existing=skip_existing)
        if new.images or any(new.scan.problems.values()):
            first = next(iter(manifests.values()))
            options = ConvertOptions(
                to=first.format,
                recipe=Recipe.restored(first.recipe),
                shard_bytes=parse_bytes(shard_size),
                shard_samples=shard_samples,
                on_error=on_error,
                **_order(first),
            )
            plan = _without_empty_shards(make_plan(new.scan, options))
            if on_progress:
                on_progress(Progress(total=new.images))
            with open_staging(directory, force=True) as staging:
                staging.start(_fingerprint(plan, manifests), force=force)
                _carry_out(directory, manifests, plan, staging, (workers, on_progress))
    except OSError as error:
        raise as_failure(error, directory) from error
    after = load_splits(directory)
    rows = [sum(manifest.rows for manifest in each.values()) for each in (manifests, after)]
    return Appended(manifests=after, images=rows[1] - rows[0], left_out=sorted(new.left_out))


def _finish_interrupted(directory: Path) -> None:
    """Complete the publication of an earlier run, and remove what a killed one left."""
    clear_trash(directory)
    if StagingDirectory(directory).is_ready:
        with open_staging(directory, force=True) as staging:
            if staging.is_ready:
                staging.finish()


def _without_empty_shards(plan: Plan) -> Plan:
    """Return a plan without shards for splits that get no images."""
    return replace(
        plan,
        splits=tuple(
            each if len(each.source) else replace(each, cuts=(0,), shard_bytes=())
            for each in plan.splits
        ),
    )


def _open(
    directory: Path, source: str | Path | Source, manifests: Mapping[str, Manifest]
) -> Source:
    """Open a path as the source that the dataset was first made from.

    If that was divided into splits, so is this one, unless it has folders for these splits.
    """
    if not isinstance(source, (str, Path)):
        return source
    described = _first_sources(manifests)
    kind = {str(each.get("kind")) for each in described.values()}.pop()
    find = partial(get_source(kind).find, Path(source))
    try:
        opened = reopen(find, described)
        if isinstance(opened, Divided) and (opened.stratified or _has_folders(source, manifests)):
            return find(described)  # a stratified division could move images of the dataset
    except UsageError as error:
        raise UsageError(f"{directory} was made with `convert {kind}`, and {error}") from error
    return opened


def _has_folders(source: str | Path, names: Collection[str]) -> bool:
    """Return whether all folders in a folder have some of these names."""
    found = {each.name for each in Path(source).glob("*") if each.is_dir()}
    return bool(found) and found <= set(names)


def _order(manifest: Manifest) -> dict[str, Any]:
    """Return the order of rows in the dataset, as options."""
    seed = parts_of(manifest)[0].manifest.source.get("seed")
    return {"shuffle": seed is not None, "seed": seed or 0}


@dataclass(frozen=True)
class _New:
    """The images of a source that a dataset lacks."""

    scan: Scan
    left_out: list[str]

    @property
    def images(self) -> int:
        return sum(map(len, self.scan.splits.values()))


def _new_images(
    directory: Path, manifests: Mapping[str, Manifest], source: Source, *, skip_existing: bool
) -> _New:
    """Scan the source, and divide its images into new and existing ones.

    Raises:
        UsageError: If it does not go with the dataset, or existing images may not be left out.
    """
    classes = next(iter(manifests.values())).classes
    scan = source.scan(classes)
    _require_alike(directory, manifests, scan)
    splits, left_out, changed = dict[str, Images](), list[str](), list[str]()
    problems, ignored = dict(scan.problems), dict(scan.ignored)
    known = _known(directory, manifests)
    for split, manifest in manifests.items():
        images, prefix = scan.splits.get(split, Images(source, split, ())), _prefix(split)
        sizes, keys = known[split]
        bad = {problem.path for problem in manifest.skipped}
        bad |= excluded_paths(directory / as_name(split), manifest.files) or set()
        exact = scan.exact_sizes and Recipe.restored(manifest.recipe).keeps_bytes
        rows = []
        for row, entry in enumerate(images.entries):
            if entry.path not in sizes and entry.key not in keys and entry.path not in bad:
                rows.append(row)
                continue
            left_out.append(prefix + entry.path)
            if exact and sizes.get(entry.path, entry.bytes) != entry.bytes:
                changed.append(prefix + entry.path)
        splits[split] = images.take(rows)
        if skip_existing:
            problems[split] = [each for each in problems.get(split, ()) if each.path not in bad]
            ignored[split] = []  # most are those that the dataset lists already
    new = _New(replace(scan, splits=splits, problems=problems, ignored=ignored), left_out)
    if changed:
        raise UsageError(
            f"{len(changed)} images of {source} have the names of images in {directory} and other "
            f"content ({_some(changed)}): rename them, or convert everything again"
        )
    if left_out and not skip_existing and (new.images or not _is_last(manifests, left_out, source)):
        raise UsageError(
            f"{directory} already has {len(left_out)} of the images of {source} by path or key "
            f"({_some(left_out)}): --skip-existing leaves these out"
        )
    return new


def _known(
    directory: Path, manifests: Mapping[str, Manifest]
) -> dict[str, tuple[Mapping[str, int], Set[str]]]:
    """Return the sizes of the images of each split by path, and their keys.

    If the dataset was divided, an image on any side is one of each: it must not be on two.
    """
    indexes = [Index(directory / as_name(split), each.rows) for split, each in manifests.items()]
    sizes = [
        dict(zip(each.paths(), each.rows()["length"].tolist(), strict=True)) for each in indexes
    ]
    keys = [set(each.keys()) for each in indexes]
    if is_divided(_first_sources(manifests)):
        sizes = [dict(ChainMap(*sizes))] * len(sizes)
        keys = [set().union(*keys)] * len(keys)
    return dict(zip(manifests, zip(sizes, keys, strict=True), strict=True))


def _first_sources(manifests: Mapping[str, Manifest]) -> dict[str, dict[str, Any]]:
    """Return what the manifests state about the source that the dataset was first made from."""
    return {split: parts_of(each)[0].manifest.source for split, each in manifests.items()}


def _is_last(manifests: Mapping[str, Manifest], left_out: list[str], source: Source) -> bool:
    """Return whether an earlier run has appended exactly these images."""
    count = 0
    for split, manifest in manifests.items():
        last = parts_of(manifest)[-1].manifest
        count += last.rows + len(last.skipped)
        described = {**source.describe(split), "kind": source.kind}
        if any(last.source.get(name) != value for name, value in described.items()):
            return False
    return count == len(left_out)


def _require_alike(directory: Path, manifests: Mapping[str, Manifest], scan: Scan) -> None:
    unknown = sorted(scan.splits.keys() - manifests.keys())
    if unknown:
        raise UsageError(
            f"{scan.source} has {_splits(scan.splits)}, and {directory} has {_splits(manifests)}; "
            "append a source with folders or splits of these names"
        )
    schema = next(iter(manifests.values())).fields_by_name
    if other_fields(schema) != other_fields(scan.schema) or (
        any(map(len, scan.splits.values())) and (LABEL in schema) != (LABEL in scan.schema)
    ):
        stated, found = (
            ", ".join(f"{name} ({field})" for name, field in each.items())
            for each in (schema, scan.schema)
        )
        raise UsageError(
            f"{scan.source} has the fields {found}, and {directory} has {stated}: the fields of "
            "all records must be the same"
        )


def _prefix(split: str) -> str:
    return f"{split}/" if split else ""


def _splits(names: Mapping[str, Any]) -> str:
    return "no splits" if "" in names else f"the splits {', '.join(names)}"


def _carry_out(
    directory: Path,
    manifests: Mapping[str, Manifest],
    plan: Plan,
    staging: StagingDirectory,
    how: tuple[int, Report | None],
) -> None:
    """Build the new shards, combine them with the dataset, and publish the result."""
    if load_splits(directory) != manifests:
        raise UsageError(f"another process has changed {directory}: rerun the command")
    workers, report = how
    above = staging.state / "new"
    works = [
        prepare(split, plan, staging, above, first=len(manifests[split.name].shards))
        for split in plan.splits
    ]
    build(works, plan, staging, Builder(workers, None, report))
    made = {}
    for work in works:
        name = work.plan.name
        old = Piece(directory / as_name(name), manifests[name])
        new = Piece(work.folder, make_manifest(work, plan), work.first)
        made[name] = combine(staging.dataset / as_name(name), [old, new])
    save_manifests(made, staging.dataset)
    staging.publish()


def _fingerprint(plan: Plan, manifests: Mapping[str, Manifest]) -> ConversionFingerprint:
    """Return everything that determines the result: also the dataset to append to."""
    found = plan.fingerprint()
    dataset = [manifest.digest for manifest in manifests.values()]
    return replace(found, settings={**found.settings, "the dataset": dataset})


def _some(names: list[str]) -> str:
    more = " ..." if len(names) > _NAMED else ""
    return ", ".join(quoted(name) for name in names[:_NAMED]) + more
