"""A file system without locks: the kernel refuses them, whichever library asks."""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct

_NUMBERS = {"x86_64": (0xC000003E, 73, 72), "aarch64": (0xC00000B7, 32, 25)}
"""For each architecture, its number, and those of the calls flock and fcntl."""

_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06  # <linux/bpf_common.h>
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000  # <linux/seccomp.h>
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2  # <linux/prctl.h>


def can_refuse_locks() -> bool:
    """Return whether `refuse_locks` knows this system."""
    return os.uname().sysname == "Linux" and os.uname().machine in _NUMBERS


def refuse_locks(code: int) -> None:
    """Let all calls that lock fail with an error, in this process and its children, for ever."""
    machine, flock, control = _NUMBERS[os.uname().machine]
    commands = (fcntl.F_SETLK, fcntl.F_SETLKW, 37, 38)  # the last two are of open descriptions
    # Each step has a code, the steps to skip if equal and if not, and a value.
    steps = [
        (_LOAD, 0, 0, 4),  # architecture
        (_EQUAL, 0, 8, machine),
        (_LOAD, 0, 0, 0),  # number of the call
        (_EQUAL, 7, 0, flock),
        (_EQUAL, 0, 5, control),
        (_LOAD, 0, 0, 24),  # second argument
        *((_EQUAL, len(commands) - at, 0, command) for at, command in enumerate(commands)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ERROR | code),
    ]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    filter_ = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(steps), ctypes.addressof(program))
    )
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((_NO_NEW_PRIVILEGES, 1, 0, 0, 0), (_SECCOMP, _FILTER, filter_, 0, 0)):
        if libc.prctl(*arguments):
            raise OSError(ctypes.get_errno(), "this system has no filters of calls")
