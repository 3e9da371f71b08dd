"""Hosts made by a program of the operator's, for whatever no other provider knows.

    PROGRAM create NAME     the host's settings are in its environment (ROQ_…); its card comes on standard input, if it has one
    PROGRAM list            a name a line on standard output; what comes behind a blank in a line is ignored
    PROGRAM destroy NAME    of one that does not exist, too, that is done

ROQ_FLEET_ID has the fleet's part of all names: roq-<id>-<number>. Exit code 0: done. 75 (EX_TEMPFAIL): there are no more to be
had now. Any other: failed; the last line on standard error says why. A call is over when the program and all that it started
have closed their output. What takes longer than `seconds` is ended with what it started; what went into a session of its own
lives on, and is not waited for.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress

from gcm.providers.provider import HostSpec, ProviderExhausted, ProviderFailed

EXHAUSTED = 75
ANSWER_BYTES_MAX = 4 * 1024 * 1024
WORDS_MAX = 300  # characters of its reason
ENDED_SECONDS = 2.0  # what was killed is over by then
PASSED_ON = ("PATH", "HOME", "LANG", "USER", "TMPDIR")  # of the GCM's environment; not its own settings and card


class CommandProvider:
    """program: and its first arguments. seconds: bound of one call. environment: variables for it, credentials among them."""

    def __init__(self, program: Sequence[str], seconds: float, environment: Mapping[str, str]) -> None:
        self._program, self._seconds = tuple(program), seconds
        self._environment = {**{key: os.environ[key] for key in PASSED_ON if key in os.environ}, **environment}

    def create(self, spec: HostSpec) -> None:
        """See HostProvider."""
        self._run(("create", spec.name), {**spec.environment, "ROQ_FLEET_ID": spec.fleet}, spec.card)

    def names(self, fleet: str) -> list[str]:
        """See HostProvider."""
        answer = self._run(("list",), {"ROQ_FLEET_ID": fleet})
        if len(answer) > ANSWER_BYTES_MAX:
            raise ProviderFailed(f"{self._program[0]} list: {len(answer)} bytes are no list of machines")
        lines = answer.decode(errors="replace").splitlines()
        return [line.split()[0] for line in lines if line.strip()]

    def destroy(self, name: str, fleet: str) -> None:
        """See HostProvider."""
        self._run(("destroy", name), {"ROQ_FLEET_ID": fleet})

    def _run(self, arguments: tuple[str, ...], environment: Mapping[str, str], stdin: bytes = b"") -> bytes:
        what = f"{self._program[0]} {arguments[0]}"
        try:
            process = subprocess.Popen(
                [*self._program, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**self._environment, **environment},
                start_new_session=True,  # it is ended with what it started
            )
        except OSError as error:
            raise ProviderFailed(f"{what}: {error.strerror}: {self._program[0]}") from error
        try:
            output, errors = process.communicate(stdin, self._seconds)
        except BaseException as error:
            _end(process)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            if process.poll() in (None, -signal.SIGKILL):
                raise ProviderFailed(f"{what} took longer than {self._seconds:g} s: it was ended") from None
            advice = f"what it started has kept its output open for {self._seconds:g} s: give that another one"
            raise ProviderFailed(f"{what}: {advice}") from None
        if process.returncode == 0:
            return output
        lines = errors.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        kind = ProviderExhausted if process.returncode == EXHAUSTED else ProviderFailed
        raise kind(f"{what}: exit code {process.returncode}: {lines[-1][:WORDS_MAX]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """With its session. Whoever left that may keep the pipes open for ever."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=ENDED_SECONDS)
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
