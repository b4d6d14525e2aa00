"""``shardkit ablation``: the speedup of each improvement to data loading."""

from __future__ import annotations

from shardkit.cli.options import LocalOrUrl, argument
from shardkit.cli.printing import measuring_bar, show_text
from shardkit.cli.run import Run
from shardkit.cli.runner import command
from shardkit.measure.bench.ablation import AblationOptions, ablation


@command("ablation", argument("dataset", type=LocalOrUrl()), options=(AblationOptions,))
def ablation_command(run: Run, options: AblationOptions, *, dataset: str) -> int:
    """Measure the speedup of each improvement to data loading, one after the other.

    DATASET is a dataset or a plain folder of images. The first row is PyTorch's loader without
    workers; each further row adds one improvement, for loading alone or for training a model.
    Exits with 1 if a row could not be measured.

    \b
    Examples:
      shardkit ablation dataset
      shardkit ablation photos --transform augment:train --model small
    """
    with measuring_bar(run) as watch:
        report = ablation(dataset, **{**vars(options), "watch": watch})
    run.report(report.as_dict, lambda: show_text(report.describe()))
    return 130 if report.interrupted else int(report.failed)
