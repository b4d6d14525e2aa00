"""``shardkit verify``: find every damaged byte."""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from shardkit.cli.console import emit, say
from shardkit.cli.options import one_or_all, quiet_option, workers_option
from shardkit.cli.show import amount, line, progress_bar, some
from shardkit.cli.url_source import cache_option, copied
from shardkit.dataset.manifest import MANIFEST_NAME, dataset_directories, load_manifest
from shardkit.errors import ShardkitError, UsageError
from shardkit.stores.urls import as_url
from shardkit.system.formatting import size
from shardkit.system.machine import usable_cpus
from shardkit.system.text import printable
from shardkit.verification.receipt import check_receipt as compare_receipt
from shardkit.verification.receipt import load_receipt, require_new, save_receipt
from shardkit.verification.shard_check import Finding
from shardkit.verification.source_comparison import SourceReport
from shardkit.verification.verify import LEVELS, Verification, verify

_BAD_IMAGE = (
    "stored as in the source, so `repair` cannot fix it; fix or remove the source file and "
    "convert again with --check decode"
)

_LISTED = 50
"""Maximum findings to show; --json prints all."""


@click.command("verify")
@click.argument("dataset", type=click.Path(path_type=Path))
@click.option(
    "--level",
    type=click.Choice(LEVELS),
    default="full",
    show_default=True,
    help="quick: check manifest, files, sizes and index. full: also each shard's and record's "
    "checksum. decode: also each image's pixels.",
)
@click.option(
    "--against",
    type=click.Path(path_type=Path),
    metavar="SRC",
    multiple=True,
    help="Also compare each record with its file in SRC. Repeat it for each part of a merged "
    "dataset, in order, unless all have the same source.",
)
@cache_option
@click.option(
    "--write-receipt",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the result of --against to FILE, as proof for later checks.",
)
@click.option(
    "--check-receipt",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Check that DATASET is still what the receipt in FILE describes.",
)
@click.option(
    "--root",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder of the archives of an attached dataset.  [default: where `attach` found them]",
)
@workers_option
@quiet_option
@click.option("--json", "as_json", is_flag=True, help="Print all findings as JSON.")
def verify_command(  # noqa: PLR0913 - Click passes each option by name
    *,
    dataset: Path,
    level: str,
    against: tuple[Path, ...],
    cache: Path | None,
    write_receipt: Path | None,
    check_receipt: Path | None,
    root: Path | None,
    workers: int | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Check every byte of DATASET, a folder or URL, against its manifest and index.

    Each damaged record is reported with its key, shard and source file. With --against SRC, verify
    also proves that the dataset contains each file of SRC once, no other file, and exactly what
    the conversion makes of it.

    \b
    Examples:
      shardkit verify dataset
      shardkit verify dataset --level quick
      shardkit verify dataset --level decode --json
      shardkit verify dataset --against photos --write-receipt receipt.json
      shardkit verify dataset --check-receipt receipt.json
      shardkit verify s3://bucket/dataset
    """
    started = time.monotonic()
    _check_options(level, one_or_all(against), write_receipt, check_receipt)
    known = None if check_receipt is None else load_receipt(check_receipt)
    if write_receipt is not None:
        require_new(write_receipt)
    source = one_or_all([copied(each, cache, quiet=quiet) for each in against])
    with progress_bar("verifying", quiet=quiet, total=_count(dataset)) as on_progress:
        result = verify(
            dataset,
            level,
            against=source,
            root=root,
            workers=workers or usable_cpus(),
            on_progress=on_progress,
        )
    if known and result.datasets:
        with contextlib.suppress(ShardkitError):  # a damaged manifest is already a finding
            result.findings += compare_receipt(known, dataset, result.manifests)
    seconds = time.monotonic() - started
    if as_json:
        report = {"ok": result.ok, "seconds": round(seconds, 3), **asdict(result)}
        emit({**report, "receipt": known and {"time": known["time"], "holds": result.ok}})
    elif not quiet:
        _show(as_url(dataset) or dataset, result, seconds)
    if write_receipt is not None and result.ok:
        save_receipt(write_receipt, dataset, result)  # after the report: the disk may be full
    if not quiet and not as_json:
        _show_receipts(write_receipt, known, result)
    sys.exit(0 if result.ok else 1)


def _check_options(
    level: str,
    against: Path | list[Path] | None,
    write_receipt: Path | None,
    check_receipt: Path | None,
) -> None:
    """Refuse options that have no effect together."""
    if write_receipt is not None and against is None:
        raise UsageError(
            "--write-receipt requires --against SRC; --check-receipt checks an existing receipt"
        )
    needs_records = {
        "--against": against,
        "--write-receipt": write_receipt,
        "--check-receipt": check_receipt,
    }
    for option, value in needs_records.items():
        if value is not None and level == "quick":
            raise UsageError(f"{option} needs --level full or decode: quick reads no shards")


def _count(dataset: Path) -> int:
    """Return the number of records to read, for the progress bar."""
    try:
        return sum(load_manifest(place).rows for place in dataset_directories(dataset).values())
    except ShardkitError:
        return 0  # verify reports the damage


def _show(dataset: Path | str, result: Verification, seconds: float) -> None:
    for finding in result.findings[:_LISTED]:
        say(f"  {_kind(finding)}: {_describe(finding)}", err=True)
    if len(result.findings) > _LISTED:
        more = len(result.findings) - _LISTED
        say(f"  ... and {more:,} more (--json prints all)", err=True)
    read = f", {amount(result.records, 'record')}" if result.level != "quick" else ""
    say(
        f"{dataset}: {'intact' if result.ok else amount(len(result.findings), 'finding')} "
        f"({result.level}: {amount(result.shards, 'shard')}{read}, {size(result.bytes)}, "
        f"{seconds:.1f} s)"
    )
    if result.extras:
        say(f"  not part of the dataset: {some(result.extras)}")
    if result.findings and all(finding.source for finding in result.findings):
        line("note", "the dataset is unchanged; its source has changed")
    elif isinstance(dataset, Path) and any(
        finding.file != MANIFEST_NAME and _kind(finding) == "damaged" for finding in result.findings
    ):
        again = "restore the archives, or run the same `shardkit attach` command again"
        repair = f"shardkit repair {shlex.quote(str(dataset))} --from SRC"
        line("next", again if result.attached else repair)
    if any(finding.as_stored for finding in result.findings):
        line("bad image", _BAD_IMAGE)
    if result.source:
        _show_source(result.source)


def _show_source(source: SourceReport) -> None:
    files = f"{amount(source.files, 'file')} of {printable(source.name)}, {size(source.bytes)}"
    if source.left_out:
        files += f", not counting {source.left_out:,} skipped, not selected or beyond --limit"
    if not source.alike:
        line("source", f"{files}: each present once, every byte matches")
        return
    line(
        "source",
        f"{files}: each present once; {source.same:,} match exactly, {source.alike:,} but for "
        f"library versions (PSNR at least {source.least_psnr:.1f} dB)",
    )


def _show_receipts(
    written: Path | None, known: dict[str, Any] | None, result: Verification
) -> None:
    if known:
        against = printable(known["source"]["name"])
        text = f", against {against}: holds" if result.ok else ": does not hold"
        line("receipt", f"of {_when(known)}{text}")
    if written is not None:
        line("receipt", f"written to {written}" if result.ok else "not written: see the findings")


def _when(receipt: dict[str, Any]) -> str:
    """Return the time of a receipt in UTC, to the minute."""
    return printable(f"{receipt['time'][:16].replace('T', ' ')} UTC")


def _kind(finding: Finding) -> str:
    """Return the kind of a finding; "bad image" is a fault of the source."""
    return "differs" if finding.source else "bad image" if finding.as_stored else "damaged"


def _describe(finding: Finding) -> str:
    file, reason = printable(finding.file), printable(finding.reason)
    if finding.row is None:
        return f"{file}: {reason}"
    if finding.key is None:
        return f"{file}: row {finding.row}: {reason}"
    source = printable(finding.path or "")
    return f"{file}: record {finding.key} (row {finding.row}, from {source}): {reason}"
