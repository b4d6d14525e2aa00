"""``shardkit verify``: find every damaged byte."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardkit.cli.options import Options, Workers, argument, command_option, one_or_all
from shardkit.cli.printing import line, more_lines, progress_bar, some
from shardkit.cli.run import Run, say
from shardkit.cli.runner import command
from shardkit.cli.url_source import Copies, copied
from shardkit.errors import ShardkitError, UsageError, located, setting
from shardkit.options import same_option
from shardkit.system.text import amount, name_list, printable, shell, size
from shardkit.system.urls import as_url
from shardkit.verification.receipt import check_receipt as compare_receipt
from shardkit.verification.receipt import load_receipt, require_new, save_receipt
from shardkit.verification.source_comparison import SourceReport
from shardkit.verification.verify import Verification, VerifyOptions, verify

_BAD_IMAGE = (
    "stored as in the source, so `repair` cannot fix it; fix or remove the source file and "
    "convert again with --check decode"
)

_LISTED = 50
"""Maximum findings to show; --json prints all."""


@dataclass(frozen=True, kw_only=True)
class CommandOptions(Options):
    """Options of `shardkit verify`."""

    level: str = same_option(VerifyOptions, "level")
    against: tuple[Path, ...] = same_option(VerifyOptions, "against", default=())
    write_receipt: Path | None = command_option(
        None,
        help="Write the result of --against to FILE, as proof for later checks.",
        metavar="FILE",
    )
    check_receipt: Path | None = command_option(
        None,
        help="Check that DATASET is still what the receipt in FILE describes.",
        metavar="FILE",
    )
    root: Path | None = same_option(VerifyOptions, "root")

    def __post_init__(self) -> None:
        if self.write_receipt is not None and not self.against:
            raise UsageError(
                f"{setting('write_receipt')} requires --against SRC;",
                remedy="--check-receipt checks an existing receipt",
            )
        for name in ("against", "write_receipt", "check_receipt"):
            if getattr(self, name) and self.level == "quick":
                needs = "requires --level full or decode: quick reads no shards"
                raise UsageError(f"{setting(name)} {needs}")


@command("verify", argument("dataset"), options=(CommandOptions, Workers, Copies))
def verify_command(
    run: Run, options: CommandOptions, workers: Workers, copies: Copies, *, dataset: Path
) -> int:
    """Check every byte of DATASET, a folder or URL, against its manifest and index.

    Each damaged record is reported with its key, shard and source file. With --against SRC, verify
    also proves that the dataset contains each file of SRC exactly once, as the conversion stores
    it, and no other file.

    \b
    Examples:
      shardkit verify dataset
      shardkit verify dataset --level quick
      shardkit verify dataset --level decode --json
      shardkit verify dataset --against photos --write-receipt receipt.json
      shardkit verify dataset --check-receipt receipt.json
      shardkit verify s3://bucket/dataset
    """
    written = options.write_receipt
    receipt = None
    if options.check_receipt is not None:
        with located(options.check_receipt):
            receipt = load_receipt(options.check_receipt)
    if written is not None:
        require_new(written, dataset)
    sources = one_or_all([copied(run, source, copies, dataset) for source in options.against])
    with progress_bar(run, "verifying") as tally:
        result = verify(
            dataset,
            options.level,
            against=sources,
            root=options.root,
            workers=workers.workers,
            on_progress=tally,
        )
    if receipt and result.datasets:
        with contextlib.suppress(ShardkitError):  # a damaged manifest is already a finding
            result.findings += compare_receipt(receipt, dataset, result.manifests)
    checked = receipt and {"time": receipt["time"], "holds": result.ok}
    run.report(
        lambda: {"ok": result.ok, **asdict(result), "receipt": checked},
        lambda: _show(as_url(dataset) or dataset, result, run.seconds),
    )
    if written is not None and result.ok:
        save_receipt(written, dataset, result)  # after the report: the disk may be full
    if run.is_text:
        _show_receipts(written, receipt, result)
    return 0 if result.ok else 1


def _show(dataset: Path | str, result: Verification, seconds: float) -> None:
    findings = [f"{finding.kind}: {finding}" for finding in result.findings[:_LISTED]]
    for text in [*findings, *more_lines(result.findings, _LISTED)]:
        say(f"  {text}", err=True)
    read = f", {amount(result.records, 'record')}" if result.level != "quick" else ""
    say(
        f"{dataset}: {'intact' if result.ok else amount(len(result.findings), 'finding')} "
        f"({result.level}: {amount(result.shards, 'shard')}{read}, {size(result.bytes)}, "
        f"{seconds:.1f} s)"
    )
    if result.extras:
        say(f"  not part of the dataset: {some(result.extras)}")
    changed = all(finding.source for finding in result.findings)
    if result.findings and changed and not result.attached:
        line("note", "the dataset is unchanged; its source has changed")
    elif isinstance(dataset, Path) and result.can_restore:
        again = "restore the files, or run the same `shardkit attach` command again"
        repair = f"{shell('shardkit', 'repair', dataset)} --from SRC"
        line("next", again if result.attached else repair)
    if any(finding.as_stored for finding in result.findings):
        line("bad image", _BAD_IMAGE)
    if result.source:
        _show_source(result.source, result)


def _show_source(source: SourceReport, result: Verification) -> None:
    files = f"{amount(source.files, 'file')} of {printable(source.name)}, {size(source.bytes)}"
    if source.left_out:
        verb = "was" if source.left_out == 1 else "were"
        others = f"{source.left_out:,} other{'s' * (source.left_out != 1)} {verb}"
        files += f" ({others} skipped, not selected or beyond --limit)"
    if not source.alike:
        equal = "every record equals its converted file"
        if not result.converted:
            equal = "every byte matches"
        if result.replaced:
            equal += f", except for the later replacements of {name_list(result.replaced)}"
        line("source", f"{files}: each present once, {equal}")
        return
    line(
        "source",
        f"{files}: each present once; {source.same:,} match exactly, and {source.alike:,} except "
        f"for library versions (PSNR at least {source.least_psnr:.1f} dB)",
    )


def _show_receipts(
    written: Path | None, receipt: dict[str, Any] | None, result: Verification
) -> None:
    if receipt:
        against = printable(receipt["source"]["name"])
        text = f", against {against}: holds" if result.ok else ": does not hold"
        line("receipt", f"of {_when(receipt)}{text}")
    if written is not None:
        line("receipt", f"written to {written}" if result.ok else "not written: see the findings")


def _when(receipt: dict[str, Any]) -> str:
    """Return the time of a receipt in UTC, to the minute."""
    return printable(f"{receipt['time'][:16].replace('T', ' ')} UTC")
