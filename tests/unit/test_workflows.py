"""The workflows of a public host: what they run is here, what they use is pinned."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from helpers import execute

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def jobs(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text("utf-8"))["jobs"]
    return found


def steps() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in WORKFLOWS:
        for name, job in jobs(path).items():
            for step in job.get("steps", ()):
                yield f"{path.name}: {name}", step


def test_actions_are_pinned_by_hash() -> None:
    used = [step["uses"] for _, step in steps() if "uses" in step]
    assert used
    assert [action for action in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action)] == []


def test_every_hash_has_one_version() -> None:
    """A hash says nothing to a reader, so a comment gives the version; the two must not drift."""
    named: dict[str, set[str]] = {}
    for path in WORKFLOWS:
        for line in path.read_text("utf-8").splitlines():
            if match := re.search(r"uses: ([^@]+)@(\w{40})(.*)", line):
                assert re.fullmatch(r" # v\d+\.\d+\.\d+", match[3]), line
                named.setdefault(match[1], set()).add(match[2] + match[3])
    assert all(len(versions) == 1 for versions in named.values())


def test_workflows_ask_for_few_permissions() -> None:
    for path in WORKFLOWS:
        workflow = yaml.safe_load(path.read_text("utf-8"))
        assert workflow["permissions"] in ({}, {"contents": "read"}), path
        written = {
            name
            for name, job in workflow["jobs"].items()
            if "write" in (job.get("permissions") or {}).values()
        }
        assert written == {"publish.yml": {"publish"}, "docs.yml": {"deploy"}}.get(path.name, set())


def test_checkouts_keep_no_credentials() -> None:
    for where, step in steps():
        if "checkout" in step.get("uses", ""):
            assert step["with"]["persist-credentials"] is False, where


def test_every_job_has_a_deadline() -> None:
    for path in WORKFLOWS:
        for name, job in jobs(path).items():
            assert "uses" in job or job["timeout-minutes"] <= 180, f"{path.name}: {name}"


def test_the_scripts_that_workflows_run_are_here() -> None:
    scripts = [
        word
        for _, step in steps()
        for word in re.findall(r"(?<!\S)scripts/\S+", step.get("run", ""))
    ]
    known = ("demo", "test", "campaigns", "fuzz", "wheels", "matrix")
    assert {f"scripts/{name}" for name in known} <= {*scripts}
    for script in scripts:
        path = ROOT / script
        assert path.is_file(), script
        assert script.endswith(".py") or os.access(path, os.X_OK), script


def release(folder: Path, *, placeholder: bool = False, dated: bool = True) -> Path:
    """Make a checkout that is ready, but for what the arguments say."""
    texts = {
        "scripts/check_release": (ROOT / "scripts" / "check_release").read_text("utf-8"),
        "shardkit/_version.py": '__version__ = "1.2.3"\n',
        "CHANGELOG.md": f"## [1.2.3] - {'2026-12-01' if dated else 'unreleased'}\n",
        "SECURITY.md": "security@placeholder.invalid" if placeholder else "security@example.org",
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, "utf-8")
    (folder / "scripts" / "check_release").chmod(0o755)
    subprocess.run(["git", "init", "-q", folder], check=True)
    subprocess.run(["git", "-C", folder, "add", "."], check=True)
    return folder


@pytest.mark.parametrize(
    ("changed", "tag", "message"),
    [
        ({}, "v1.2.3", ""),
        ({}, "v1.2.4", "the tag is v1.2.4, but shardkit/_version.py has 1.2.3"),
        ({"dated": False}, "v1.2.3", "CHANGELOG.md has no date for 1.2.3"),
        ({"placeholder": True}, "v1.2.3", "SECURITY.md:1:security@placeholder.invalid"),
    ],
)
def test_a_release_is_checked(
    changed: dict[str, bool], tag: str, message: str, tmp_path: Path
) -> None:
    script = release(tmp_path, **changed) / "scripts" / "check_release"
    done = execute(script, tag)
    assert (done.returncode == 0) == (not message)
    assert message in done.stderr
