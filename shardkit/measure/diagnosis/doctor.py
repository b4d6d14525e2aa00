"""`examine`: from a dataset to what limits loading it, and what would help."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardkit.errors import MeasurementFailed, UsageError
from shardkit.measure.diagnosis.changes import Change
from shardkit.measure.diagnosis.facts import Facts, gather
from shardkit.measure.diagnosis.findings import Finding, ordered
from shardkit.measure.diagnosis.judgement import Diagnosis, diagnose
from shardkit.measure.diagnosis.measured import Measured
from shardkit.measure.diagnosis.place import Place
from shardkit.measure.diagnosis.profiling import Plan, Profile
from shardkit.measure.diagnosis.remedies import GAIN, Remedy, command_words, kept_options
from shardkit.measure.diagnosis.surroundings import check
from shardkit.measure.diagnosis.trial import Trial, try_out
from shardkit.measure.served import Seen, Served
from shardkit.measure.spec import Loading, Subject
from shardkit.measure.steps import StepSpec
from shardkit.measure.timing import Span
from shardkit.recipe import Recipe
from shardkit.torch.loader import FILES_PER_BATCH
from shardkit.torch.preflight import default_workers
from shardkit.torch.processes import SPARE_SLOTS

Watch = Callable[[str], None]
"""Told what is done next."""

FOLDER_FORMAT = "lmdb"
"""What a folder is converted to, if nothing speaks for another format."""

SECONDS = 0.5
"""How long each look at a loader lasts."""

ROUNDS = 3
"""The loader and its alternatives are looked at so many times, in turn; medians count."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be examined, and how long it may take."""

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
class Report:
    """What was found."""

    facts: Facts
    findings: list[Finding]
    """The worst first."""
    images: int = 0
    seen: Seen | None = None
    """One look at the loader; None where nothing was read."""
    measured: Measured | None = None
    diagnosis: Diagnosis | None = None
    command: str = ""
    """The conversion that helps most, to be typed; empty if none does, or a trial disproved it."""
    source: str = ""
    """Name of the folder that SRC in the command stands for; empty if the command names it."""
    trial: Trial | None = None
    trial_note: str = ""
    """Why there was no trial, if one was asked for."""


def examine(request: Request, watch: Watch = lambda _: None) -> Report:
    """Measure where the time of a sample goes, and judge it together with the surroundings.

    Raises:
        UsageError: If it cannot be done as it was asked.
        MeasurementFailed: If the data cannot be loaded.
        ShardkitError: If they are damaged.
    """
    watch("looking at the machine")
    facts = gather(request.workers)
    if request.subject is None:
        return Report(facts=facts, findings=ordered(check(facts)))
    watch("opening")
    with Served(request.subject) as process:
        examination = _Examination(request, request.subject, process, watch)
        measured, place = examination.run(facts)
    facts = dataclasses.replace(facts, place=place)
    diagnosis = diagnose(measured, check(facts))
    best = next((each for each in diagnosis.remedies if each.change is not None), None)
    command = _command(request.subject.path, best, examination)
    trial, note = None, ""
    if request.trial and best is not None and best.change is not None:
        watch("trying it out")
        recipe = Recipe.restored(best.change.recipe)
        trial = try_out(request.subject, examination.loading, recipe, examination.format)
        if trial.gain < GAIN:
            command = ""
    elif request.trial:
        note = "no conversion was found that would help"
    return Report(
        facts=facts,
        findings=diagnosis.findings,
        images=examination.images,
        seen=examination.seen,
        measured=measured,
        diagnosis=diagnosis,
        command=command,
        source=examination.source,
        trial=trial,
        trial_note=note,
    )


class _Examination:
    """Asks a measuring process one thing after the other."""

    def __init__(self, request: Request, subject: Subject, process: Served, watch: Watch) -> None:
        self._request = request
        self._subject = subject
        self._process = process
        self._watch = watch
        options = {} if request.workers is None else {"workers": request.workers}
        self.loading = Loading(batch_size=request.batch_size, options=options)
        self.images = 0
        self.format = FOLDER_FORMAT
        self.folder = False
        self.recipe: dict[str, Any] = {}
        self.source = ""
        self.seen: Seen | None = None

    def run(self, facts: Facts) -> tuple[Measured, Place]:
        """Return what was measured, and what was seen of the data's place."""
        request, process = self._request, self._process
        opened = process.open()
        self.images = opened["images"]
        if not self.images:
            raise UsageError(f"there is no image in {self._subject.path}")
        placed = process.ask("place")
        self.folder = not placed["format"]
        self.recipe, self.source = placed["recipe"], placed["source"]
        self.format = placed["format"] or FOLDER_FORMAT
        self._watch("loading")
        self.seen = seen = self._look(self.loading)  # and so all is in memory, and known to work
        place = self._place(opened, placed, seen)
        step = self._step()  # early: a model may be misnamed
        threads = process.ask("limit", threads=1)["before"]
        self._watch("loading with one thread")
        single = self._look(
            Loading(engine="thread", batch_size=request.batch_size, options={"workers": 1})
        )
        process.ask("limit", threads=threads)
        self._watch("timing the stages of a sample")
        profile = self._profile(processes=seen.engine == "process")
        self._watch("re-encoding some images")
        changes = process.ask("predict", crop=_crop(profile))["changes"]
        self._watch("comparing loaders")
        fits = facts.shared_memory is None or place.shared_needed <= facts.shared_memory[1]
        rates, alternatives = self._compare(seen, threads, processes=fits)
        measured = Measured(
            folder=self.folder,
            images=self.images,
            bytes=opened["bytes"],
            memory=facts.memory,
            batch_size=request.batch_size,
            decode=self._subject.decode,
            transform=self._subject.transform or "",
            profile=profile,
            single=single.look.rate,
            rates=rates,
            engine=seen.engine,
            workers=seen.workers,
            alternatives=alternatives,
            step=step,
            changes=[Change(**each) for each in changes],
        )
        return measured, place

    def _look(self, loading: Loading) -> Seen:
        return self._process.look(loading, Span(seconds=SECONDS))

    def _place(self, opened: dict[str, Any], placed: dict[str, Any], seen: Seen) -> Place:
        options = self.loading.loader_options()
        settings = options.resolved(default_workers(), pinned=False)
        under_way = settings.process_prefetch + SPARE_SLOTS * settings.workers
        return Place(
            path=self._subject.path,
            filesystem=placed["filesystem"],
            mount=placed["mount"],
            bytes=opened["bytes"],
            resident=placed["resident"],
            engine=seen.engine,
            wanted="process" if placed["processes"] else "thread",
            shared_needed=under_way * seen.look.batch_bytes if settings.workers else 0,
            files_needed=under_way * FILES_PER_BATCH if settings.workers else 0,
            worker_peak=seen.look.worker_peak,
            start=placed["start"],
            threads=placed["threads"],
            cuda_begun=placed["cuda_begun"],
            opencv=placed["opencv"],
        )

    def _profile(self, *, processes: bool) -> Profile:
        plan = Plan(
            rows=self._request.rows, batch_size=self._request.batch_size, processes=processes
        )
        answer = self._process.ask("profile", plan=dataclasses.asdict(plan))
        found = answer["profile"]
        return Profile(**{**found, "sample": tuple(found["sample"])})

    def _step(self) -> float | None:
        step = self._request.step
        if step.model is None:
            return step.milliseconds / 1000 or None
        self._watch("timing the step")
        return self._process.step_seconds(self.loading, step)

    def _compare(
        self, seen: Seen, threads: int, *, processes: bool
    ) -> tuple[list[float], dict[str, list[float]]]:
        """Return the rates of the loader, and those of alternatives, measured in turn."""
        ways: dict[str, Loading] = {"": self.loading}
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
                    self._process.ask("limit", threads=1)
                try:
                    rates[name].append(self._look(ways[name]).look.rate)
                except MeasurementFailed:
                    if not name:
                        raise
                    del rates[name]  # it is no alternative
                    self._process.restart_if_ended()
                if name == "one torch thread":
                    self._process.ask("limit", threads=threads)
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
    target = f"{Path(path) if Path(path).name else 'dataset'}-{suffix}"
    words = command_words(remedy.change, source, target, examination.format)
    return shlex.join([*words, *kept_options(examination.recipe)])
