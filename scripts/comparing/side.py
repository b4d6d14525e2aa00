"""Runs scenarios with one commit: ``python side.py TREE FOLDER CORE``.

The process forks for each step, and imports what a step had to import before the next one. So a
step is a process, as the command is, without the second that its imports take.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

SECONDS = 120
"""Time limit of a step; the longest takes a tenth of it."""

_CHANGING = (
    (r"\d+(\.\d+)? s\b", "# s"),
    (r"[\d.,]+ (images|[kMG]?B)/s\b", r"# \1/s"),
    (r'("\w*(seconds|per_second|elapsed)\w*": )[-\d.e]+', r"\1#"),
    (r"\b0x[0-9a-f]+\b", "0x#"),
    (r"\b20\d\d-\d\d-\d\d[T ][\d:]+Z?", "TIME"),
)
"""What differs from run to run."""

_TASK = r"(?m)^task \d+ of .*$"


def run(scenario: dict[str, Any], folder: Path, tree: Path) -> dict[str, Any]:
    """Take all steps of a scenario in the working directory; return what they did."""
    name = scenario["name"]
    steps = [take(step, scenario.get("out", name), folder, tree) for step in scenario["steps"]]
    return {"steps": steps, "files": dict(digests(scenario.get("out", name), folder, tree))}


def take(step: str, out: str, folder: Path, tree: Path) -> dict[str, Any]:
    """Run a step in a process of its own; return its command, exit code and output."""
    words = [
        re.sub(r"\bOUT\b", out, re.sub(r"^((?:\w+=)?)IN\b", r"\1../inputs", word)).replace(
            "BUCKET", f"s3://{folder.name}"
        )
        for word in shlex.split(step)
    ]
    with open(".output", "wb") as file:
        child = os.fork()
        if child == 0:
            os.setsid()
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            try:
                act(words)
            finally:
                Path(".modules").write_text(" ".join(sys.modules))
    code = wait(child)
    for module in Path(".modules").read_text().split():
        if module.startswith("shardkit.") and module != "shardkit.__main__":
            importlib.import_module(module)
    text = Path(".output").read_text("utf-8", "backslashreplace")
    return {"step": step, "exit": code, "output": normal(text, folder, tree)}


def act(words: Sequence[str]) -> None:
    """Do what a step says, and exit."""
    sys.argv = ["shardkit", *words]
    if words[0] in ACTIONS:
        ACTIONS[words[0]](*words[1:])
        sys.exit()
    if words[0] == "python":
        runpy.run_path(str(Path(__file__).with_name("python_steps.py")))[words[1]](*words[2:])
        sys.exit()
    runpy.run_module("shardkit", run_name="__main__", alter_sys=True)


def wait(child: int) -> int | str:
    """Return the exit code of a child, the number of its signal, or that it took too long."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "time limit"


def normal(text: str, folder: Path, tree: Path) -> str:
    """Return the output without what differs from run to run, and without places."""
    places = (
        (Path(sys.prefix), "ENV"),
        (folder, "HERE"),
        (folder.parent, "BASE"),
        (tree, "TREE"),
    )
    for place, name in places:
        text = text.replace(str(place), name)
    text = text.replace("-handed", "").replace(f"s3://{folder.name}", "s3://BUCKET")
    for pattern, replacement in _CHANGING:
        text = re.sub(pattern, replacement, text)
    tasks = iter(sorted(re.findall(_TASK, text)))  # jobs claim them in random order
    return re.sub(_TASK, lambda _: next(tasks), text)


def digests(out: str, folder: Path, tree: Path) -> Iterator[tuple[str, str]]:
    """Yield name and SHA-256 of each file below OUT and OUT.x; of a link, where it leads."""
    for top in sorted([Path(out), *Path().glob(f"{out}.*")]):
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            name = "OUT" + str(path).removeprefix(out)
            if path.is_symlink():
                yield name, f"link to {os.readlink(path)}"
            elif path.is_file():
                content = path.read_bytes()
                if path == top and path.suffix == ".json":  # a receipt's digest covers its time
                    text = normal(content.decode(), folder, tree)
                    content = re.sub(r'(?m)^ "digest": .*$', "", text).encode()
                yield name, hashlib.sha256(content).hexdigest()


def copy(source: str, target: str) -> None:
    shutil.copytree(source, target)


def remove(path: str) -> None:
    shutil.rmtree(path)


def objects(target: str) -> None:
    """Copy all objects of the bucket."""
    for name in re.findall("<Key>([^<]*)</Key>", _ask("?list-type=2").decode()):
        path = Path(target, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_ask(f"/{name}"))


def _ask(rest: str) -> bytes:
    """Return the answer of the bucket; moto checks no signature."""
    signed = "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request, Signature=0"
    address = f"{os.environ['AWS_ENDPOINT_URL']}/{Path.cwd().name}{rest}"
    request = urllib.request.Request(address, headers={"Authorization": signed})
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        content: bytes = answer.read()
    return content


ACTIONS: dict[str, Callable[..., None]] = {"copy": copy, "remove": remove, "objects": objects}


def main(tree: Path, folder: Path, core: int) -> None:
    """Run the scenarios of standard input, and print one line of JSON for each."""
    work = json.load(sys.stdin)
    spec = importlib.util.find_spec("shardkit")
    if spec is None or not Path(str(spec.origin)).is_relative_to(tree):
        raise SystemExit(f"this Python imports another shardkit than that of {tree}: {spec}")
    os.chdir(folder)
    Path(".modules").write_text("")
    if hasattr(os, "sched_setaffinity"):  # a core for each commit, so one worker is the default
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[core % len(cores)]})
    for scenario in work:
        begin = time.monotonic()
        result = run(scenario, folder, tree)
        seconds = round(time.monotonic() - begin, 2)
        print(json.dumps({"name": scenario["name"], "seconds": seconds, **result}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
