"""``shardkit ablation``: what the command accepts and prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import invoke, make_folder

from shardkit.errors import UsageError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere does not exist"),
        (["--decode", "pil", "."], "decode pil requires a transform"),
    ],
)
def test_invalid_requests_are_refused(arguments: list[str], message: str) -> None:
    result = invoke("ablation", *arguments)

    assert isinstance(result.exception, UsageError)
    assert message in str(result.exception)


@pytest.mark.slow
def test_a_folder_is_measured(tmp_path: Path) -> None:
    make_folder(tmp_path / "photos", each=40)
    given = ["--rounds", "1", "--seconds", "0.05", "--workers", "1", "--batch-size", "4"]

    result = invoke("ablation", tmp_path / "photos", *given, "--json", "--decode", "CenterCrop(8)")

    report = json.loads(result.stdout)
    assert result.exit_code == 0
    assert 8 <= report["sources"][0]["images"] <= report["sources"][0]["total"] == 80
    first, *_, last = report["lines"]
    assert (first["loader"], first["baseline"]) == ("no workers", True)
    assert last["measured"]["engine"] == "process"
    assert last["measured"]["speedup"]["rounds"] == 1
