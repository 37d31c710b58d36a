"""Contenders that live in processes of their own, and take turns with those in this.

A worker is a Python script that gets its contenders ready and calls `serve`. Between
its turns it waits for a line on its standard input and uses no processor. Both sides
exchange lines of JSON. Needs numpy only.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from measure import Contender

START_SECONDS = 300.0  # to import, to fill a table, to compile
ANSWER_SECONDS = 120.0  # for the calls of one turn, which are to take a second


class WorkerError(RuntimeError):
    """A worker that could not be started, died, or does not answer."""


class Worker:
    """A child process, and the lines to and from it.

    Args:
      command: the interpreter, the script and its arguments.
      whose: how errors begin: what the user has asked for.
      environment: variables of the child beside those of this process; None: unset.
    """

    def __init__(
        self,
        command: Sequence[str],
        whose: str,
        environment: Mapping[str, str | None] | None = None,
    ) -> None:
        self.whose = whose
        variables = {**os.environ, **(environment or {})}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
        self._rest = b""
        try:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env={k: v for k, v in variables.items() if v is not None},
            )
        except OSError as error:
            self._errors.close()
            raise WorkerError(f"{whose}: cannot be started: {error}") from None

    def ready(self, seconds: float = START_SECONDS) -> dict[str, Any]:
        """Waits until the worker serves; returns what it says about itself."""
        return self._answer(seconds)

    def ask(self, question: dict[str, Any], seconds: float = ANSWER_SECONDS) -> Any:
        """Sends one line and waits for the one that answers it."""
        if self._errors.closed:
            raise WorkerError(f"{self.whose}: the worker has been closed")
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            self._fail("has ended")
        return self._answer(seconds)

    def close(self) -> None:
        """Lets the worker end, which it does when its input ends."""
        if self._errors.closed:
            return
        with contextlib.suppress(OSError):  # it may have ended before it read all
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def _answer(self, seconds: float) -> Any:
        end = time.monotonic() + seconds
        while b"\n" not in self._rest:
            left = max(end - time.monotonic(), 0)
            if not select.select([self._process.stdout], [], [], left)[0]:
                self._process.kill()
                self._fail(f"has not answered for {seconds:g} s")
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            if not piece:
                self._fail("has ended")
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        try:
            return json.loads(line)
        except ValueError:
            self._process.kill()
            self._fail(f"has answered {line[:80]!r}")

    def _fail(self, what: str) -> None:
        """Raises, with the last line that the worker has written to its stderr."""
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        code = self._process.returncode
        last = lines[-1] if lines else f"no message, exit status {code}"
        self.close()
        raise WorkerError(f"{self.whose}: the worker {what}: {last}")


@dataclass
class Remote(Contender):
    """A contender of a worker. Its calls are timed there; the times come here."""

    worker: Worker | None = None

    def measure(self, round_number: int, calls: int, most_seconds: float) -> None:
        question = {"contender": self.name, "round": round_number}
        question |= {"calls": calls, "most_seconds": most_seconds}
        self.seconds[round_number] = self.worker.ask(question)

    def release(self) -> None:
        super().release()
        self.worker.close()


def serve(contenders: Mapping[str, Contender], about: dict[str, Any]) -> None:
    """The worker's side: says that it is ready, then takes turns until input ends."""
    # What else is printed here, by libraries too, is no answer.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.stdout.reconfigure(line_buffering=True)  # an error at the end comes last

    def say(answer: Any) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    say(about)
    for line in sys.stdin:
        question = json.loads(line)
        contender = contenders[question.pop("contender")]
        number = question.pop("round")
        contender.measure(number, **question)
        say(contender.seconds[number])
