"""`doctor`: measure a loader, find out why the GPU waits, and measure what helps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from shardkit.errors import UsageError, setting
from shardkit.measure.doctor.checks import Plan, run_checks
from shardkit.measure.doctor.examination import Examination, Watch
from shardkit.measure.doctor.pipeline import Loading
from shardkit.measure.doctor.report import DoctorReport
from shardkit.measure.runner.other_load import CpuMeter
from shardkit.measure.runner.process import MeasurementProcess
from shardkit.measure.runner.spec import Subject
from shardkit.measure.runner.workload import Workload
from shardkit.options import option, same_option, takes
from shardkit.system.temporary import TemporaryFolder


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(Workload):
    """The options of `doctor`."""

    loader: str | None = option(
        None,
        help="Function that returns your DataLoader or shardkit loader, instead of DATASET.",
        metavar="MODULE:NAME",
    )
    batch_size: int = same_option(
        Workload, "batch_size", help=f"Samples per batch; {setting('loader')} uses its own."
    )
    workers: int | None = option(
        None,
        help="Number of workers that you plan to use.",
        metavar="N",
        minimum=0,
        shown="as in make_loader",
    )
    budget: float = option(12.0, help="Approximate duration in seconds.", is_positive=True)
    watch: Watch | None = option(
        None, help="Called with a description of each step.", is_keyword_only=True
    )


@takes(DoctorOptions)
def doctor(options: DoctorOptions, dataset: str | Path | None = None) -> DoctorReport:
    """Find out whether the GPU waits for data and why, and measure what helps.

    Args:
        dataset: A dataset or a plain folder of images. None, without ``loader``, checks only the
            machine.

    Raises:
        UsageError: If ``dataset`` does not exist, or options are invalid or need it.
        MeasurementFailed: If the data cannot be loaded.
        ShardkitError: If the dataset is damaged.
    """
    step = options.step
    loader = options.loader
    workers = options.workers
    samples = options.decode or options.transform
    if loader is None and dataset is None:
        if samples or options.step_ms or options.model:
            raise UsageError(
                f"{setting('decode')}, {setting('transform')}, {setting('step_ms')} and "
                f"{setting('model')} require a dataset"
            )
        plan = Plan() if workers is None else Plan(workers=workers)
        return DoctorReport(subject=None, findings=run_checks(plan))
    if loader is not None and (dataset or samples or workers is not None):
        raise UsageError(
            f"{setting('loader')} excludes a dataset, {setting('decode')}, "
            f"{setting('transform')} and {setting('workers')}"
        )
    subject = Subject(loader=loader)
    if dataset is not None:
        (subject,) = options.subjects([str(dataset)])
    meter = CpuMeter()
    with (
        MeasurementProcess(subject) as process,
        TemporaryFolder() as scratch,
    ):
        loading = Loading(batch_size=1 << 30 if loader else options.batch_size, workers=workers)
        examination = Examination(process, loading, scratch, options.watch or (lambda _: None))
        report = examination.run(step, options.budget)
    return replace(report, load=meter.other_load())
