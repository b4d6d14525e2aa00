"""Interrupt a function at each point at which a signal handler could raise."""

from __future__ import annotations

import dis
import functools
import itertools
import sys
from collections.abc import Callable
from types import CodeType, FrameType, ModuleType
from typing import Any


def interrupt_everywhere(function: Callable[[], object], *modules: ModuleType) -> int:
    """Call ``function`` until it returns, each time interrupted one point later.

    Args:
        function: The function.
        modules: Only points in these modules count.

    Returns:
        The number of interrupted calls.

    Raises:
        Exception: What took the place of an interruption.
    """
    files = {module.__file__ for module in modules}
    return next(point for point in itertools.count() if not _is_interrupted(function, files, point))


def _is_interrupted(function: Callable[[], object], files: set[str | None], point: int) -> bool:
    """Call ``function``; return whether it came as far as ``point``, and was interrupted there."""
    left = point

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_lasti in _points(frame.f_code):
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # or Python 3.12 would trace none
    sys.settrace(trace)
    try:
        function()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@functools.cache
def _points(code: CodeType) -> frozenset[int]:
    """Return the opcodes before which Python calls signal handlers.

    They follow calls, jumps backward, and a function's start (CHECK_EVAL_BREAKER in ceval.c).
    """
    pairs = itertools.pairwise(dis.get_instructions(code))
    return frozenset(
        after.offset
        for before, after in pairs
        if before.opname.startswith("CALL") or before.opname in ("RESUME", "JUMP_BACKWARD")
    )
