"""``shardkit upload``: a dataset into an object store."""

from __future__ import annotations

import time
from pathlib import Path

import click

from shardkit.cli.console import emit, say
from shardkit.cli.options import quiet_option
from shardkit.cli.show import progress_bar
from shardkit.conversion.upload import upload
from shardkit.system.formatting import size


@click.command("upload")
@click.argument("dataset", type=click.Path(path_type=Path))
@click.argument("url")
@quiet_option
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def upload_command(*, dataset: Path, url: str, quiet: bool, as_json: bool) -> None:
    """Upload DATASET to URL: s3://BUCKET/PATH, gs:// or az://.

    Each file is compared with the manifest, and sent with its checksum. The manifest comes last, so
    readers see the dataset only once it is complete. Rerun the command to resume. URL must not hold
    another dataset.

    \b
    Examples:
      shardkit upload dataset s3://bucket/dataset
    """
    started = time.monotonic()
    with progress_bar("uploading", quiet=quiet) as tally:
        sent = upload(dataset, url, on_progress=tally)
    seconds = time.monotonic() - started
    if as_json:
        emit({"url": url, "uploaded": sent, "bytes": tally.bytes, "seconds": round(seconds, 3)})
    elif not quiet:
        what = f"uploaded {size(tally.bytes)} in {seconds:.1f} s" if sent else "unchanged"
        say(f"{url}: {what}")
