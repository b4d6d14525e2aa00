"""Worker processes that answer messages, each through a socket of its own.

They take turns, and each answers in order. So the next answer always comes from a known socket,
often without waiting.
"""

from __future__ import annotations

import contextlib
import marshal
import multiprocessing
import os
import queue
import select
import socket
import threading
from collections.abc import Callable
from typing import Any

import torch

from shardkit.torch import _compat
from shardkit.torch.data.memory import pin
from shardkit.torch.engine import workers

_SIZE_BYTES = 8
"""Bytes of the size before a message."""

_WAKE_SECONDS = 0.5
"""Interval at which a thread that pins batches checks whether it is to end."""


Answer = Callable[[Any, int], bytes]
"""Returns the answer to a message, given the number of this worker; picklable."""

Unpack = Callable[[bytearray], Any]
"""Returns what an answer stands for."""


class Crew:
    """Worker processes. Message n goes to worker n modulo their number."""

    timeout = 0.0
    """Maximum seconds to wait for memory that an answer announces; 0 for no limit."""

    def __init__(
        self, answer: Answer, unpack: Unpack, setup: workers.Setup, count: int, method: str
    ) -> None:
        """Start ``count`` workers."""
        self.processes: list[Any] = []
        self._unpack = unpack
        self._lines: list[_Line] = []
        self._asked = 0
        self._taken = 0
        self._owner = os.getpid()
        context: Any = multiprocessing.get_context(method)
        try:
            for worker in range(count):
                here, there = socket.socketpair()
                self._lines.append(_Line(here))
                with there:
                    given = there, answer, setup, worker, count
                    process = context.Process(target=_work, args=given, daemon=True)
                    process.start()
                self.processes.append(process)
        except BaseException:
            self.stop()
            raise

    def ask(self, message: Any) -> None:
        """Send a message of types that ``marshal`` knows, without waiting for its worker."""
        self._lines[self._asked % len(self._lines)].send(marshal.dumps(message))
        self._asked += 1

    def wait(self, seconds: float) -> bool:
        """Wait for the next answer, and return whether it is here, or its worker is not."""
        return self._lines[self._taken % len(self._lines)].wait(seconds)

    def take(self) -> Any:
        """Return the next answer.

        Raises EOFError or ConnectionError if its worker has died, BlockingIOError at a timeout.
        """
        packed = self._lines[self._taken % len(self._lines)].receive()
        self._taken += 1
        return _compat.call_within(self.timeout, self._unpack, packed)

    def stop(self) -> None:
        """Stop the workers, whatever they are doing; a fork of this process does not own them."""
        if os.getpid() == self._owner:
            workers.end(self.processes)
        for line in self._lines:
            line.socket.close()


class PinningCrew(Crew):
    """A crew whose answers are taken and pinned by a thread of this process."""

    def __init__(self, *given: Any, **options: Any) -> None:
        """Start the workers and the thread."""
        super().__init__(*given, **options)
        self._expected: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """True for each answer to come, False to end the thread."""
        self._pinned: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._next: tuple[Any, BaseException | None] = (None, None)
        self._is_stopped = False
        self._device = torch.cuda.current_device()
        self._thread = threading.Thread(target=self._pin, name="shardkit-pin", daemon=True)
        self._thread.start()

    def ask(self, message: Any) -> None:
        """Send a message, without waiting for its worker."""
        super().ask(message)
        self._expected.put(True)

    def wait(self, seconds: float) -> bool:
        """Wait for the next answer, and return whether it is here, or its worker is not."""
        try:
            self._next = self._pinned.get(timeout=seconds)
        except queue.Empty:
            return False
        return True

    def take(self) -> Any:
        """Return the answer for which `wait` has waited."""
        answer, error = self._next
        self._next = None, None
        if error is not None:
            raise error
        return answer

    def stop(self) -> None:
        """Stop the thread and the workers."""
        self._is_stopped = True
        self._expected.put(False)
        super().stop()
        self._thread.join(workers.STOP_SECONDS)

    def _pin(self) -> None:
        torch.cuda.set_device(self._device)  # PyTorch's current device is that of a thread
        while self._expected.get():
            try:
                while not super().wait(_WAKE_SECONDS):
                    if self._is_stopped:
                        return
                self._pinned.put((pin(super().take()), None))
            except BaseException as error:  # raised again where the answer is awaited
                self._pinned.put((None, error))


class _Line:
    """One end of a socket, which carries messages after their sizes."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._unsent = bytearray()
        self._sending = threading.Lock()
        self._readable = select.poll()
        self._readable.register(end, select.POLLIN)
        self._usable = select.poll()
        self._usable.register(end, select.POLLIN | select.POLLOUT)

    def send(self, message: bytes) -> None:
        """Send a message; what the other end has no room for is sent later, in `wait`.

        It may be sending too, and would not read then.
        """
        with self._sending:
            self._unsent += len(message).to_bytes(_SIZE_BYTES, "little")
            self._unsent += message
        self._send_some()

    def wait(self, seconds: float) -> bool:
        """Wait for a message or the end of the other process, and return whether it is here."""
        if not self._unsent:
            return bool(self._readable.poll(1000 * seconds))
        event = sum(event for _, event in self._usable.poll(1000 * seconds))
        if event & select.POLLOUT:
            self._send_some()
        return bool(event & ~select.POLLOUT)

    def receive(self) -> bytearray:
        """Return the next message; EOFError if the other process has ended."""
        return self._read(int.from_bytes(self._read(_SIZE_BYTES), "little"))

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        rest = memoryview(data)
        while rest:
            count = self.socket.recv_into(rest)
            if not count:
                raise EOFError
            rest = rest[count:]
        return data

    def _send_some(self) -> None:
        with self._sending, contextlib.suppress(BlockingIOError):
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent, socket.MSG_DONTWAIT)]


def _work(
    end: socket.socket, answer: Answer, setup: workers.Setup, worker: int, count: int
) -> None:
    """Answer messages until the main process ends; runs in a worker."""
    setup.begin(worker, count)
    line = _Line(end)
    answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_send_all, args=(end, answers), daemon=True).start()
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            message = marshal.loads(line.receive())  # noqa: S302 - from the process that started us
            answers.put(answer(message, worker))


def _send_all(end: socket.socket, answers: queue.SimpleQueue[bytes]) -> None:
    """Send answers; runs in a thread of a worker, which reads ahead meanwhile.

    Linux lets the receiver wait for the CPU of the sender, which it expects to sleep soon. So if
    the thread that computes sent its answers, batches would arrive late on a busy machine.
    """
    with contextlib.suppress(OSError):  # the main process has ended
        while True:
            message = answers.get()
            end.sendall(len(message).to_bytes(_SIZE_BYTES, "little") + message)
