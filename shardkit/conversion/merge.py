"""Merge datasets into a new one (`shardkit merge`), by linking their shards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shardkit.conversion.assemble import save_manifests
from shardkit.conversion.combine import Piece, combine, common_schema, load_splits
from shardkit.conversion.disk import as_failure
from shardkit.conversion.fingerprint import ConversionFingerprint
from shardkit.conversion.staging import StagingDirectory, clear_trash, open_staging
from shardkit.dataset.manifest import Manifest
from shardkit.errors import CorruptDataset, ShardkitError, UsageError
from shardkit.system.files import as_name, overlap


def merge(
    datasets: Sequence[str | Path], target: str | Path, *, force: bool = False
) -> dict[str, Manifest]:
    """Merge datasets, or their splits of the same name, into one, without reading a record.

    Rows follow one another in the order of the datasets. Shards are hard links to those of the
    datasets, or copies where the file system cannot link. The datasets must have the same format,
    recipe and fields, no key in common, and the same classes; some may lack the last classes of the
    others. Repeating a finished call does nothing.

    Args:
        datasets: Two or more datasets.
        target: A directory that is new, empty, or (with ``force``) holds a dataset to replace.
        force: Replace a dataset in ``target``.

    Returns:
        The manifest of each split; "" without splits.

    Raises:
        UsageError: If a dataset or ``target`` cannot be used, or records cannot stay as they are.
        CorruptDataset: If a manifest or an index is damaged, or a shard has the wrong size.
        ConversionFailed: If writing fails.
    """
    places, target = [Path(each) for each in datasets], Path(target)
    if isinstance(datasets, str) or len(places) < 2:
        raise UsageError("merge requires a list of at least two datasets")
    _refuse_overlap(places, target)
    manifests = [load_splits(place) for place in places]
    for place, splits in zip(places, manifests, strict=True):
        if splits.keys() != manifests[0].keys():
            raise UsageError(
                f"{places[0]} has {_named(manifests[0])}, {place} has {_named(splits)}; merge "
                "datasets with the same splits, or single splits"
            )
    pieces = {
        split: [Piece(p / as_name(split), m[split]) for p, m in zip(places, manifests, strict=True)]
        for split in manifests[0]
    }
    common_schema([piece for each in pieces.values() for piece in each])
    digests = {piece.manifest.digest for each in pieces.values() for piece in each}
    if len(digests) < len(places) * len(pieces):
        raise UsageError("two of the datasets are the same")
    if not force and _is_merged(target, pieces):
        clear_trash(target)
        return load_splits(target)
    with open_staging(target, force=force) as staging:
        try:
            staging.start(_fingerprint(pieces), force=force)
            if not staging.is_ready:
                staging.prune(())
                made = {
                    split: combine(staging.dataset / as_name(split), each)
                    for split, each in pieces.items()
                }
                save_manifests(made, staging.dataset)
            staging.publish()
        except (UsageError, CorruptDataset):
            staging.discard()
            raise
        except OSError as error:
            raise as_failure(error, target) from error
    return load_splits(target)


def _named(splits: dict[str, Manifest]) -> str:
    return "no splits" if "" in splits else f"the splits {', '.join(splits)}"


def _refuse_overlap(places: Sequence[Path], target: Path) -> None:
    for place in places:
        if overlap(target, place):
            raise UsageError(f"{target} and {place} overlap; choose another directory")


def _is_merged(target: Path, pieces: dict[str, list[Piece]]) -> bool:
    """Return whether an earlier run has merged the same shards."""
    try:
        made = {} if StagingDirectory(target).is_ready else load_splits(target)
    except ShardkitError:
        return False
    return made.keys() == pieces.keys() and all(
        [shard.sha256 for shard in made[split].shards]
        == [shard.sha256 for piece in each for shard in piece.manifest.shards]
        for split, each in pieces.items()
    )


def _fingerprint(pieces: dict[str, list[Piece]]) -> ConversionFingerprint:
    merged = {
        f"the datasets{f' of {split}' if split else ''}": [p.manifest.digest for p in each]
        for split, each in pieces.items()
    }
    return ConversionFingerprint(settings=dict(merged), images={}, files={}, on_error="fail")
