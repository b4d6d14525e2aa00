"""The process that fuzzes one target; it may crash or hang, which `watch.py` sees.

    python -m scripts.fuzzing.child FOLDER '{"target": ..., "seed": ..., ...}'

In FOLDER it leaves ``progress`` (see `shared.py`), ``stats.json``, and ``found/*.json``.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scripts.fuzzing.target import Target

_INSTRUMENTED = {"image": ["shardkit", "PIL"], "tar": ["shardkit", "tarfile"]}
"""The modules whose branches guide the fuzzer, where they are more than shardkit."""

_POOL = 4000
"""Inputs that are kept for having led somewhere new."""

_SAME = 3
"""As many of the findings that look the same are kept."""


class Run:
    """Tries inputs, one after the other, and keeps account."""

    def __init__(self, folder: Path, target: Target, seconds: float, count: int) -> None:
        from scripts.fuzzing.shared import Progress

        self.target = target
        self.new = False
        """Whether the last input led somewhere new."""
        self._folder = folder
        self._found = folder / "found"
        self._found.mkdir(exist_ok=True)
        self._progress = Progress(folder / "progress")
        self._outcomes: Counter[str] = Counter()
        self._sites: set[str] = set()
        self._same: Counter[str] = Counter()
        self._slowest = 0.0
        self._count = count
        self._end = time.monotonic() + seconds
        self._saved = 0.0

    def attempt(self, data: bytes) -> None:
        """Try one input; the last one does not return."""
        from scripts.fuzzing.guard import attempt

        self._progress.begin(data)
        result = attempt(self.target, data)
        self._progress.end()
        self.new = result.site not in self._sites
        self._sites.add(result.site)
        self._outcomes[result.outcome] += 1
        self._slowest = max(self._slowest, result.seconds)
        if result.finding is not None:
            self._note(result.finding, data)
        now = time.monotonic()
        done = now >= self._end or self._progress.executions >= self._count
        if done or now > self._saved + 0.5:
            self._saved = now
            self._save()
        if done:
            sys.stderr.flush()
            os._exit(0)  # libFuzzer would not return either

    def _note(self, finding: Any, data: bytes) -> None:
        self._same[finding.signature] += 1
        if self._same[finding.signature] <= _SAME:
            value = {**finding._asdict(), "data": data.hex()}
            (self._found / f"{os.getpid()}-{self._progress.executions}.json").write_text(
                json.dumps(value)
            )

    def _save(self) -> None:
        stats = {
            "executions": self._progress.executions,
            "outcomes": dict(self._outcomes),
            "sites": len(self._sites),
            "slowest": round(self._slowest, 3),
            "findings": dict(self._same),
        }
        beside = self._folder / "stats.new"
        beside.write_text(json.dumps(stats))
        beside.replace(self._folder / "stats.json")


def main(folder: Path, options: dict[str, Any]) -> None:
    """Fuzz until time or number of inputs is up, or the process dies of it."""
    faulthandler.enable()
    warnings.simplefilter("ignore")
    context: Any = nullcontext()
    if options["engine"] == "atheris":
        import atheris  # type: ignore[import-untyped, unused-ignore]

        names = _INSTRUMENTED.get(options["target"], ["shardkit"])
        context = atheris.instrument_imports(include=names)
    with context:
        from scripts.fuzzing.guard import limit_memory
        from scripts.fuzzing.targets import make
    place = folder / "work" / "place"
    place.mkdir(parents=True, exist_ok=True)
    target = make(options["target"], place)
    limit_memory()
    run = Run(folder, target, options["seconds"], options["count"])
    begin = _with_atheris if options["engine"] == "atheris" else _alone
    begin(run, options["seed"], folder)


def _alone(run: Run, seed: int, folder: Path) -> None:
    """Change what led somewhere new, without knowing of branches."""
    rng = random.Random(seed)
    pool: list[bytes] = []
    for data in run.target.seeds:
        run.attempt(data)
        pool.append(data)
    while True:
        newer = len(pool) > 50 and rng.random() < 0.4
        data = run.target.mutate(rng.choice(pool[-50:] if newer else pool), rng)
        run.attempt(data)
        if run.new and len(pool) < _POOL:
            pool.append(data)


def _with_atheris(run: Run, seed: int, folder: Path) -> None:
    """Have libFuzzer choose what to change, by the branches that it led to."""
    import atheris  # type: ignore[import-untyped, unused-ignore]

    from scripts.fuzzing.mutate import MAX_BYTES

    corpus = folder / "corpus"
    corpus.mkdir(exist_ok=True)
    for number, data in enumerate(run.target.seeds):
        (corpus / f"seed-{number:03d}").write_bytes(data)

    def mutate(data: bytes, longest: int, number: int) -> bytes:
        rng = random.Random(number)
        if rng.random() < 0.3:
            return run.target.mend(atheris.Mutate(data, longest), rng)[:longest]
        return run.target.mutate(data, rng)[:longest]

    signals = ("abrt", "segv", "bus", "fpe", "ill", "int", "term")
    quiet = [f"-handle_{name}=0" for name in signals]
    limits = ["-timeout=100000", "-rss_limit_mb=0", "-malloc_limit_mb=0", f"-max_len={MAX_BYTES}"]
    more = [f"-seed={seed + 1}", "-print_final_stats=0", "-verbosity=0", "-len_control=0"]
    attempt: Callable[[bytes], None] = run.attempt
    atheris.Setup(
        [sys.argv[0], str(corpus), *quiet, *limits, *more], attempt, custom_mutator=mutate
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
