"""`examine`: from a dataset to what limits loading it, and what would help."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shardkit.conversion.recipe import Recipe
from shardkit.errors import MeasurementFailed, UsageError
from shardkit.measure.doctor.changes import Change, predict
from shardkit.measure.doctor.command import Made, classes_command, command_words
from shardkit.measure.doctor.facts import Facts, gather
from shardkit.measure.doctor.findings import Finding, ordered
from shardkit.measure.doctor.judgement import Diagnosis, diagnose
from shardkit.measure.doctor.measured import Measured
from shardkit.measure.doctor.place import Place, place_of
from shardkit.measure.doctor.profiling import Plan, Profile, profile
from shardkit.measure.doctor.remedies import GAIN, Remedy
from shardkit.measure.doctor.surroundings import check, fits_in_memory
from shardkit.measure.doctor.trial import Trial, try_out
from shardkit.measure.runner.material import choose_decode
from shardkit.measure.runner.process import MeasurementProcess
from shardkit.measure.runner.session import Opened, Session
from shardkit.measure.runner.spec import LoaderSpec, StepSpec, StopCondition, Subject
from shardkit.measure.runner.timing import Measurement
from shardkit.torch.engine.preflight import default_workers
from shardkit.torch.engine.processes import SPARE_SLOTS
from shardkit.torch.loader import FILES_PER_BATCH

Watch = Callable[[str], None]
"""Told what is done next."""

FOLDER_FORMAT = "lmdb"
"""What a folder is converted to, if nothing speaks for another format."""

SECONDS = 0.5
"""How long each look at a loader lasts."""

SAMPLE, SAMPLE_BYTES, BATCHES = 2000, 10**9, 8
"""Of data that fit in memory, loaders read so many images, that are in memory, and always the same:
fewer if they have more bytes, and for so many batches at the least."""

ROUNDS = 3
"""The loader and its alternatives are looked at so many times, in turn; medians count."""


@dataclass(frozen=True, kw_only=True)
class DoctorRequest:
    """What to examine."""

    subject: Subject | None = None
    """None examines the surroundings alone."""
    batch_size: int = 64
    workers: int | None = None
    """None takes as many as `make_loader` does."""
    step: StepSpec = field(default_factory=StepSpec)
    """The training step, if it is known."""
    rows: int = 256
    """Samples whose stages are timed, at the most."""
    trial: bool = False
    """Whether the best conversion is tried out."""


@dataclass(frozen=True, kw_only=True)
class DoctorReport:
    """Result of `doctor`."""

    request: DoctorRequest
    facts: Facts
    findings: list[Finding]
    """The worst first."""
    images: int = 0
    seen: Measurement | None = None
    """One look at the loader; None where nothing was read."""
    measured: Measured | None = None
    diagnosis: Diagnosis | None = None
    command: str = ""
    """The conversion that helps most, to be typed; empty if none does, or a trial disproved it."""
    source: str = ""
    """Name of the folder that SRC in the command stands for; empty if the command names it."""
    classes: str = ""
    """What writes the file of classes that CLASSES in the command stands for; empty without one."""
    trial: Trial | None = None
    trial_note: str = ""
    """Why there was no trial, if one was asked for."""


def doctor(  # noqa: PLR0913 - the options of the command
    dataset: str | Path | None = None,
    *,
    decode: str | None = None,
    transform: str | None = None,
    batch_size: int = 64,
    workers: int | None = None,
    step_ms: float | None = None,
    model: str | None = None,
    trial: bool = False,
    rows: int = 256,
    watch: Watch | None = None,
) -> DoctorReport:
    """Measure the stages of loading, find the bottleneck and rank remedies.

    Args:
        dataset: A dataset or a plain folder of images; None checks only the machine.
        decode: Image type, or an operation such as ``"CenterCrop(224)"``. None selects as the
            command does.
        transform: ``module:name`` of a transform for each image.
        batch_size: Samples per batch.
        workers: Workers that you plan to use; None uses as many as `make_loader` does.
        step_ms: Training step time per batch in ms, spent off the CPU.
        model: ``module:name`` of a model to train on each batch, or ``small``.
        trial: Try the most useful conversion on 1% of the images.
        rows: Maximum samples to time.
        watch: Called with a description of each step.

    Raises:
        UsageError: If ``dataset`` does not exist, or options are invalid or need it.
        MeasurementFailed: If the data cannot be loaded.
        ShardkitError: If the dataset is damaged.
    """
    step = StepSpec(milliseconds=step_ms or 0.0, model=model)
    if dataset is None:
        needs_data = {
            "--decode": decode,
            "--transform": transform,
            "--step-ms": step_ms,
            "--model": model,
            "--trial": trial,
        }
        for option, value in needs_data.items():
            if value:
                raise UsageError(f"{option} requires DATASET: a dataset or a folder of images")
        return examine(DoctorRequest(workers=workers), watch)
    path = str(dataset)
    subject = Subject(
        path=path, decode=choose_decode([path], decode, transform), transform=transform
    )
    return examine(
        DoctorRequest(
            subject=subject,
            batch_size=batch_size,
            workers=workers,
            step=step,
            rows=rows,
            trial=trial,
        ),
        watch,
    )


def examine(request: DoctorRequest, watch: Watch | None = None) -> DoctorReport:
    """Measure where the time of a sample goes, and judge it together with the surroundings.

    Raises:
        UsageError: If it cannot be done as it was asked.
        MeasurementFailed: If the data cannot be loaded.
        ShardkitError: If they are damaged.
    """
    watch = watch or (lambda _: None)
    watch("looking at the machine")
    facts = gather(request.workers)
    if request.subject is None:
        return DoctorReport(request=request, facts=facts, findings=ordered(check(facts)))
    watch("opening")
    with contextlib.ExitStack() as stack:
        examination = _Examination(request, request.subject, stack, watch)
        measured, place = examination.run(facts)
    facts = dataclasses.replace(facts, place=place)
    diagnosis = diagnose(measured, check(facts))
    best = next((each for each in diagnosis.remedies if each.change is not None), None)
    command = _command(request.subject.path, best, examination)
    classes = classes_command(examination.made) if command else ""
    trial, note = None, ""
    if request.trial and best is not None and best.change is not None:
        watch("trying it out")
        recipe = Recipe.restored(best.change.recipe)
        trial = try_out(request.subject, examination.loading, recipe, examination.made.format)
        if trial.gain < GAIN:
            command = classes = ""
    elif request.trial:
        note = "no conversion was found that would help"
    return DoctorReport(
        request=request,
        facts=facts,
        findings=diagnosis.findings,
        images=examination.images,
        seen=examination.seen,
        measured=measured,
        diagnosis=diagnosis,
        command=command,
        source=examination.source,
        classes=classes,
        trial=trial,
        trial_note=note,
    )


def _place(session: Session) -> dict[str, Any]:
    return place_of(session.dataset, session.files)


def _profile(session: Session, *, plan: Plan) -> Profile:
    return profile(session.dataset, plan)


def _predict(session: Session, *, crop: int | None) -> list[Change]:
    return predict(session.dataset, crop)


def _limit(session: Session, *, threads: int) -> int:
    """Let an operation of PyTorch use so many threads; return the previous number."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    return before


class _Measuring:
    """A measuring process, begun anew if a transform ended it."""

    def __init__(self, subject: Subject, stack: contextlib.ExitStack) -> None:
        self._served = stack.enter_context(MeasurementProcess(subject))
        self.opened = self._served.open()

    @property
    def process(self) -> MeasurementProcess:
        """One that answers."""
        self._served.restart_if_ended()
        return self._served


class _Examination:
    """Asks measuring processes one thing after the other."""

    def __init__(
        self, request: DoctorRequest, subject: Subject, stack: contextlib.ExitStack, watch: Watch
    ) -> None:
        self._request = request
        self._subject = subject
        self._stack = stack
        self._whole = self._looked_at = _Measuring(subject, stack)
        self._watch = watch
        options = {} if request.workers is None else {"num_workers": request.workers}
        self.loading = LoaderSpec(batch_size=request.batch_size, options=options)
        self.images = 0
        self.made = Made(path=subject.path, format=FOLDER_FORMAT)
        self.folder = False
        self.source = ""
        self.seen: Measurement | None = None

    def run(self, facts: Facts) -> tuple[Measured, Place]:
        """Return what was measured, and what was seen of the data's place."""
        request, process, opened = self._request, self._whole.process, self._whole.opened
        self.images = opened.images
        if not self.images:
            raise UsageError(f"there is no image in {self._subject.path}")
        placed = process.call(_place)
        self.folder = placed["made"] is None
        if not self.folder:
            self.made = made = Made(**placed["made"])
            name = str(made.source.get("name", ""))
            self.source = f"the one that holds {name}" if made.splits else name
        if fits_in_memory(opened.bytes, facts.memory):
            self._watch("reading into memory")
            self._warm(opened.mean_bytes)
        self._watch("loading")
        self.seen = seen = self._look(self.loading)  # and so it is known to work
        place = self._place(opened, placed, seen)
        step = self._step()  # early: a model may be misnamed
        self._watch("loading with one worker")
        single, threads = self._single(seen)
        self._watch("timing the stages of a sample")
        profile = self._profile(processes=seen.engine == "process")
        self._watch("re-encoding some images")
        changes = self._whole.process.call(_predict, crop=_crop(profile))
        self._watch("comparing loaders")
        fits = facts.shared_memory is None or place.shared_needed <= facts.shared_memory[1]
        rates, alternatives = self._compare(seen, threads, processes=fits)
        measured = Measured(
            folder=self.folder,
            images=self.images,
            bytes=opened.bytes,
            memory=facts.memory,
            batch_size=request.batch_size,
            decode=self._subject.decode,
            transform=self._subject.transform or "",
            profile=profile,
            single=single,
            rates=rates,
            engine=seen.engine,
            workers=seen.workers,
            alternatives=alternatives,
            step=step,
            repeats=self._subject.transform is None or not opened.processes,
            changes=changes,
        )
        return measured, place

    def _look(self, loading: LoaderSpec) -> Measurement:
        return self._looked_at.process.measure(loading, StopCondition(seconds=SECONDS))

    def _warm(self, mean_bytes: float) -> None:
        """Have in memory all that loaders read: else stages are warm, and rates are cold."""
        most = min(SAMPLE, int(SAMPLE_BYTES / max(1.0, mean_bytes)))
        limit = max(most, BATCHES * self._request.batch_size)
        if limit < self.images:
            sample = dataclasses.replace(self._subject, limit=limit)
            self._looked_at = _Measuring(sample, self._stack)
        self._looked_at.process.warm()

    def _single(self, seen: Measurement) -> tuple[float | None, int]:
        """Return the rate of one worker, and the threads that PyTorch takes for an operation.

        The worker is of the kind that is known to work: a thread may not bear the transform.
        """
        engine = "process" if seen.engine == "process" else "thread"
        threads = int(self._looked_at.process.call(_limit, threads=1))
        one = LoaderSpec(
            engine=engine, batch_size=self._request.batch_size, options={"num_workers": 1}
        )
        try:
            rate = self._look(one).rate
        except MeasurementFailed:
            rate = None
        self._looked_at.process.call(_limit, threads=threads)
        return rate, threads

    def _place(self, opened: Opened, placed: dict[str, Any], seen: Measurement) -> Place:
        options = self.loading.loader_options()
        settings = options.resolved(default_workers(), pinned=False)
        under_way = settings.process_prefetch + SPARE_SLOTS * settings.num_workers
        return Place(
            path=self._subject.path,
            filesystem=placed["filesystem"],
            mount=placed["mount"],
            bytes=opened.bytes,
            resident=placed["resident"],
            engine=seen.engine,
            wanted="process" if opened.processes else "thread",
            shared_needed=under_way * seen.batch_bytes if settings.num_workers else 0,
            files_needed=under_way * FILES_PER_BATCH if settings.num_workers else 0,
            worker_unique=seen.worker_memory,
            start=placed["start"],
            threads=placed["threads"],
            cuda_begun=placed["cuda_begun"],
            opencv_threads=placed["opencv_threads"],
        )

    def _profile(self, *, processes: bool) -> Profile:
        plan = Plan(
            rows=self._request.rows, batch_size=self._request.batch_size, processes=processes
        )
        found: Profile = self._whole.process.call(_profile, plan=plan)
        return found

    def _step(self) -> float | None:
        step = self._request.step
        if step.model is None:
            return step.milliseconds / 1000 or None
        self._watch("timing the step")
        return self._whole.process.step_seconds(self.loading, step)

    def _compare(
        self, seen: Measurement, threads: int, *, processes: bool
    ) -> tuple[list[float], dict[str, list[float]]]:
        """Return the rates of the loader, and those of alternatives, measured in turn."""
        ways: dict[str, LoaderSpec] = {"": self.loading}
        if seen.workers and self._subject.transform is not None:
            other = "thread" if seen.engine == "process" else "process"
            if other == "thread" or processes:
                ways[other] = dataclasses.replace(self.loading, engine=other)
        if seen.workers and seen.engine == "thread" and threads > 1:
            ways["one torch thread"] = self.loading
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name in list(rates):
                if name == "one torch thread":
                    self._looked_at.process.call(_limit, threads=1)
                try:
                    rates[name].append(self._look(ways[name]).rate)
                except MeasurementFailed:
                    if not name:
                        raise
                    del rates[name]  # it is no alternative
                if name == "one torch thread":
                    self._looked_at.process.call(_limit, threads=threads)
        return rates.pop(""), rates


def _crop(profile: Profile) -> int | None:
    """Return the shorter side of a sample; None if it is no image that is smaller than stored."""
    sides = [side for side in profile.sample if side > 4]  # but not its channels
    return min(sides) if len(profile.sample) == 3 and len(sides) == 2 else None


def _command(path: str, remedy: Remedy | None, examination: _Examination) -> str:
    if remedy is None or remedy.change is None:
        return ""
    source = path if examination.folder else "SRC"
    size = remedy.change.recipe.get("resize")
    suffix = {"raw": "raw", "jpeg": "jpeg", "convert": "shards"}.get(remedy.name, "")
    suffix += str(size[0]) if size else ""
    made, place = examination.made, Path(path)
    if made.splits and place.resolve() == Path(made.path).resolve():  # one split was named
        place = place.resolve().parent
    target = f"{place if place.name else 'dataset'}-{suffix}"
    return shlex.join(command_words(remedy.change.recipe, source, target, made))
