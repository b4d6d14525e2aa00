"""``shardkit upload``: a dataset into an object store."""

from __future__ import annotations

from pathlib import Path

from shardkit.cli.options import LocalOrUrl, argument
from shardkit.cli.printing import progress_bar
from shardkit.cli.run import Run, say
from shardkit.cli.runner import command
from shardkit.remote.upload import upload
from shardkit.system.text import size


@command("upload", argument("dataset"), argument("url", type=LocalOrUrl()))
def upload_command(run: Run, *, dataset: Path, url: str) -> None:
    """Upload DATASET to URL: s3://BUCKET/PATH, gs:// or az://.

    Each file is compared with the manifest, and sent with its checksum. The manifest comes last, so
    readers see the dataset only once it is complete. Rerun the command to resume. URL must not
    contain another dataset.

    \b
    Example:
      shardkit upload dataset s3://bucket/dataset
    """
    with progress_bar(run, "uploading") as tally:
        is_new = upload(dataset, url, on_progress=tally)
    text = f"uploaded {size(tally.bytes)} in {run.seconds:.1f} s" if is_new else "unchanged"
    run.report(
        lambda: {"url": url, "uploaded": is_new, "bytes": tally.bytes},
        lambda: say(f"{url}: {text}"),
    )
