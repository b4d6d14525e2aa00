"""Fuzzing of everything that parses untrusted bytes; see scripts/fuzz.py."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tests/support"))  # whose files it damages
