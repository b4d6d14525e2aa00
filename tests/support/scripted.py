"""Scripts in processes that have imported the heavy libraries already."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path


def run_script(script: Path, output: Path, environment: Mapping[str, str]) -> None:
    """Make this process as good as ``python script > output 2>&1``, started in its folder."""
    with output.open("wb") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(script.parent)
    sys.argv = [str(script)]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
