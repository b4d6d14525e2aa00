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

from shardkit.cli.options import quiet_option, workers_option
from shardkit.cli.show import amount, emit, line, progress_bar, some
from shardkit.errors import ShardkitError, UsageError
from shardkit.examine import Finding
from shardkit.machine import processors
from shardkit.manifest import MANIFEST_NAME, dataset_directories, load_manifest
from shardkit.measure.words import printable, size
from shardkit.verbs.against import SourceReport
from shardkit.verbs.receipt import check_receipt, load_receipt, require_new, save_receipt
from shardkit.verbs.verify import LEVELS, Verification, verify

_LISTED = 50
"""Findings that are shown; --json gives all."""


@click.command("verify")
@click.argument("dst", type=click.Path(path_type=Path))
@click.option(
    "--level",
    type=click.Choice(LEVELS),
    default="full",
    show_default=True,
    help="quick: manifest, files, sizes, index. full: also every shard's and record's checksum. "
    "decode: also every image's pixels.",
)
@click.option(
    "--against",
    type=click.Path(path_type=Path),
    metavar="SRC",
    help="Also compare every record with the file in SRC that it was made from.",
)
@click.option(
    "--receipt",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="With --against: write what was proved to FILE. Without: check that DST still is what "
    "FILE says.",
)
@workers_option
@quiet_option
@click.option("--json", "as_json", is_flag=True, help="Print all findings as JSON.")
def verify_command(dst: Path, level: str, against: Path | None, **given: Any) -> None:
    """Check the dataset in DST against its manifest and its index, byte for byte.

    Exits with 0 if all is as it was written, with 1 if anything is damaged: each damaged record is
    named by key, shard and source file. --against SRC closes the chain: every file in SRC is there
    once, and no other, and each record is what the conversion makes of its file.

    \b
    Examples:
      shardkit verify dataset
      shardkit verify dataset --level quick
      shardkit verify dataset --level decode --json
      shardkit verify dataset --against photos --receipt dataset-receipt.json
      shardkit verify dataset --receipt dataset-receipt.json
    """
    begun = time.monotonic()
    quiet, receipt = given["quiet"], given["receipt"]
    known = None
    if receipt is not None and level == "quick":
        raise UsageError(
            "the level quick reads no shard, so that no receipt can be held against it"
        )
    if receipt is not None and against is not None:
        require_new(receipt)
    elif receipt is not None:
        known = load_receipt(receipt)
    with progress_bar(_count(dst), "verifying", quiet=quiet) as on_progress:
        result = verify(
            dst,
            level,
            against=against,
            workers=given["workers"] or processors(),
            on_progress=on_progress,
        )
    if known and result.datasets:
        with contextlib.suppress(ShardkitError):  # a damaged manifest is a finding already
            result.findings += check_receipt(known, dst, result.manifests)
    seconds = time.monotonic() - begun
    if given["as_json"]:
        told = {"ok": result.ok, "seconds": round(seconds, 3), **asdict(result)}
        emit({**told, "receipt": known and {"time": known["time"], "holds": result.ok}})
    elif not quiet:
        _show(dst, result, seconds)
    if receipt is not None and result.source is not None:
        save_receipt(receipt, dst, result)  # after all was told: the disk may be full
    if not quiet and not given["as_json"]:
        _show_receipt(receipt, known, result)
    sys.exit(0 if result.ok else 1)


def _count(dst: Path) -> int:
    """Return the number of records to read, for the bar alone."""
    try:
        return sum(load_manifest(place).rows for place in dataset_directories(dst).values())
    except ShardkitError:
        return 0  # verify tells what is wrong


def _show(dst: Path, result: Verification, seconds: float) -> None:
    for finding in result.findings[:_LISTED]:
        kind = "differs" if finding.source else "damaged"
        click.echo(f"  {kind}: {_describe(finding)}", err=True)
    if len(result.findings) > _LISTED:
        more = len(result.findings) - _LISTED
        click.echo(f"  ... and {more:,} more (--json gives all)", err=True)
    read = f", {amount(result.records, 'record')}" if result.level != "quick" else ""
    click.echo(
        f"{dst}: {'sound' if result.ok else amount(len(result.findings), 'finding')} "
        f"({result.level}: {amount(result.shards, 'shard')}{read}, {size(result.bytes)}, "
        f"{seconds:.1f} s)"
    )
    if result.extras:
        click.echo(f"  not part of the dataset: {some(result.extras)}")
    if result.findings and all(finding.source for finding in result.findings):
        line("note", "the dataset itself is as it was written; the source is not what it was")
    elif any(finding.file != MANIFEST_NAME and not finding.source for finding in result.findings):
        line("next", f"shardkit repair {shlex.quote(str(dst))} --from SRC")
    if result.source:
        _show_source(result.source)


def _show_source(source: SourceReport) -> None:
    files = f"{amount(source.files, 'file')} of {printable(source.name)}, {size(source.bytes)}"
    if source.left_out:
        files += f", without {source.left_out:,} that were skipped or are beyond the limit"
    if not source.alike:
        line("source", f"{files}: each is there once, and every byte is what it makes")
        return
    line(
        "source",
        f"{files}: each is there once; {source.same:,} exactly, {source.alike:,} but for other "
        f"versions of libraries (PSNR {source.least_psnr:.1f} dB and more)",
    )


def _show_receipt(receipt: Path | None, known: dict[str, Any] | None, result: Verification) -> None:
    if known and result.ok:
        against = printable(known["source"]["name"])
        line("receipt", f"of {_when(known)}, against {against}: holds")
    elif known:
        line("receipt", f"of {_when(known)}: does not hold")
    elif receipt is not None:
        line("receipt", f"written to {receipt}" if result.ok else "none: there are findings")


def _when(receipt: dict[str, Any]) -> str:
    """Return the time of a receipt, which is UTC, to the minute."""
    return printable(f"{receipt['time'][:16].replace('T', ' ')} UTC")


def _describe(finding: Finding) -> str:
    file, reason = printable(finding.file), printable(finding.reason)
    if finding.row is None:
        return f"{file}: {reason}"
    if finding.key is None:
        return f"{file}: row {finding.row}: {reason}"
    source = printable(finding.path or "")
    return f"{file}: record {finding.key} (row {finding.row}, from {source}): {reason}"
