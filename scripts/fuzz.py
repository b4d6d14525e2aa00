"""Fuzz everything that parses untrusted bytes; called by scripts/fuzz.

    scripts/fuzz --seconds 3600              all targets, one hour in total
    scripts/fuzz --seconds 60 --target lmdb  one of them

For each target it prints the number of inputs and their outcomes. An input that breaks a promise is
minimized and saved in tests/fuzz_corpus, and the exit code is 1. It needs atheris, which has no
wheels for some systems. tests/campaigns/test_fuzz.py replays the corpus without it.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.fuzzing.targets import TARGETS  # noqa: E402
from scripts.fuzzing.watch import Summary, fuzz, replay  # noqa: E402

CORPUS = ROOT / "tests" / "fuzz_corpus"


def main(arguments: list[str]) -> int:
    options = _options(arguments)
    names = options.target or list(TARGETS)
    if find_spec("atheris") is None:
        sys.exit("scripts/fuzz: atheris is not installed: it has no wheel for this Python")
    print(f"{len(names)} targets, seed {options.seed}", flush=True)

    def one(name: str) -> Summary:
        share = options.seconds * options.jobs / len(names)
        summary = fuzz(name, seconds=share, count=options.count, seed=options.seed)
        _report(summary, _save(summary, options.corpus))
        return summary

    with ThreadPoolExecutor(options.jobs) as pool:
        summaries = list(pool.map(one, names))
    findings = sum(len(summary.found) for summary in summaries)
    print(f"{sum(one.executions for one in summaries)} inputs in all, {findings} findings")
    return 1 if findings else 0


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/fuzz", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--seconds", type=float, default=60, help="time for all targets together")
    parser.add_argument("--count", type=int, default=1 << 62, help="inputs for each target at most")
    parser.add_argument("--target", action="append", help="one of them; again for more")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="targets at the same time")
    parser.add_argument("--corpus", type=Path, default=CORPUS, help="where findings are saved")
    options = parser.parse_args(arguments)
    for name in options.target or ():
        if name not in TARGETS and ":" not in name:
            parser.error(f"--target {name!r} is unknown; choose from {', '.join(TARGETS)}")
    return options


def _save(summary: Summary, corpus: Path) -> list[str]:
    """Make the inputs of all findings smaller, and save them; return where."""
    if not summary.found:
        return []
    jobs = [
        {"target": summary.target, "data": data.hex(), "signature": signature}
        for signature, (_, data) in summary.found.items()
    ]
    with tempfile.TemporaryDirectory() as folder:
        smaller = [bytes.fromhex(result["data"]) for result in replay(jobs, Path(folder))]
    saved = []
    for data in smaller:
        path = corpus / summary.target.rpartition(":")[2] / hashlib.sha256(data).hexdigest()[:16]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        saved.append(str(path.relative_to(corpus)))
    return saved


def _report(summary: Summary, saved: list[str]) -> None:
    """Print what came of a target."""
    rate = summary.executions / max(summary.seconds, 1e-9)
    print(
        f"\n{summary.target}: {summary.executions} inputs in {summary.seconds:.0f} s "
        f"({rate:.0f}/s), slowest {summary.slowest:.2f} s, "
        f"{summary.restarts} restarts"
    )
    print("  " + ", ".join(f"{name} {times}" for name, times in summary.outcomes.most_common()))
    for (found, _), place in zip(summary.found.values(), saved, strict=True):
        times = summary.times[found.signature]
        print(f"  FOUND {times} times: {found.kind}: {found.signature}: {place}")
        print("    " + found.detail.strip().replace("\n", "\n    ")[-1500:], flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
