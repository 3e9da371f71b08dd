"""Standard input and output at full speed without ever blocking the event loop: big blocks, raw bytes.

The loop must go on while a pipe is full or empty, or the Monitor takes us for dead. Pipes and terminals are waited for
through the loop; regular files are always ready. Sockets as standard output are written to blocking.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import select
import stat
from collections.abc import AsyncIterator, Callable

from roq.errors import PayloadTooLarge

BLOCK_BYTES = 1024 * 1024  # read at once
PIPE_BYTES = 1024 * 1024  # asked of the kernel for a pipe; its default of 64 KiB costs a wake-up per 64 KiB


def _enlarge(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # over the user's pipe quota: slower, not wrong
        fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, PIPE_BYTES)


async def read_lines(descriptor: int, line_bytes_max: int) -> AsyncIterator[list[bytes]]:
    """Lists of whole lines without their newline, as they come; a last line without newline counts too.

    Raises PayloadTooLarge for a line longer than `line_bytes_max`.
    """
    rest = b""
    async for block in _blocks(descriptor):
        lines = (rest + block if rest else block).split(b"\n")
        rest = lines.pop()
        if len(rest) > line_bytes_max:
            raise PayloadTooLarge(f"a line of more than {line_bytes_max} bytes")
        if lines:
            yield lines
    if rest:
        yield [rest]


async def _blocks(descriptor: int) -> AsyncIterator[bytes]:
    waits = _can_be_waited_for(descriptor)
    if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        _enlarge(descriptor)
    loop = asyncio.get_running_loop()
    while True:
        if waits:
            await _ready(descriptor, loop.add_reader, loop.remove_reader)
        else:
            await asyncio.sleep(0)
        block = os.read(descriptor, BLOCK_BYTES)
        if not block:
            return
        yield block


def _can_be_waited_for(descriptor: int) -> bool:
    with select.epoll() as probe:
        try:
            probe.register(descriptor, select.EPOLLIN)
        except PermissionError:  # a regular file, /dev/null: always ready
            return False
    return True


async def _ready(descriptor: int, add: Callable[..., object], remove: Callable[[int], object]) -> None:
    """Wait until the descriptor can be read or written, or has failed."""
    event = asyncio.Event()
    add(descriptor, event.set)
    try:
        await event.wait()
    finally:
        remove(descriptor)


class Output:
    """Raw bytes to standard output. `write` returns when the kernel has all of them; raises BrokenPipeError."""

    def __init__(self, descriptor: int) -> None:
        self._original = self._descriptor = descriptor
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISFIFO(mode):
            _enlarge(descriptor)
        if stat.S_ISFIFO(mode) or os.isatty(descriptor):
            # An open file description of our own: O_NONBLOCK on the given one would reach the other programs that share it.
            with contextlib.suppress(OSError):  # another user's pipe: blocking then
                self._descriptor = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK)

    async def write(self, data: bytes) -> None:
        """All of `data`."""
        loop = asyncio.get_running_loop()
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._descriptor, view) :]
            except BlockingIOError:
                await _ready(self._descriptor, loop.add_writer, loop.remove_writer)

    async def reader_gone(self) -> None:
        """Returns when the other end of the pipe was closed; never for anything else."""
        if self._descriptor == self._original or os.isatty(self._descriptor):
            await asyncio.Event().wait()
        watch = os.dup(self._descriptor)  # the loop takes one reader and one writer per descriptor
        try:
            loop = asyncio.get_running_loop()
            await _ready(watch, loop.add_reader, loop.remove_reader)
        finally:
            os.close(watch)

    def close(self) -> None:
        """Close our own description; standard output itself stays open."""
        if self._descriptor != self._original:
            os.close(self._descriptor)
            self._descriptor = self._original
