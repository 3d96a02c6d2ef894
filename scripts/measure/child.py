"""Programs that a measurement starts and that end with it, for gpu-check, gpu-engines and bench."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time


class Failed(Exception):
    """A failed check or a timeout."""

    #: What a command had printed until then.
    output = ""


class Deadline:
    """The time at which all waiting in a section ends."""

    def __init__(self, seconds):
        self.end = time.monotonic() + seconds

    def rest(self):
        """Seconds left; zero or negative afterwards."""
        return self.end - time.monotonic()

    def left(self, wanted):
        left = min(wanted, self.rest())
        if left <= 0:
            raise Failed("the section's time is used up")
        return left

    def late(self, what, seconds):
        """The failure of what got all the time that there was, and at most `seconds`."""
        if self.rest() <= 0:
            return Failed(f"{what} before the section's time was used up: a larger --limit may help")
        return Failed(f"{what} within {seconds:.0f} s")


#: Signals that end a measurement.
ENDING = {signal.SIGINT, signal.SIGTERM}


def end_once(error=SystemExit):
    """Lets SIGTERM and Ctrl-C end the measurement, once. A signal to the whole group arrives twice if `timeout` forwards it,
    and the second must not interrupt the cleanup.
    """

    def end(number, _frame):
        for each in ENDING:
            signal.signal(each, signal.SIG_IGN)
        raise error(128 + number)

    for each in ENDING:
        signal.signal(each, end)


@contextlib.contextmanager
def no_end():
    """Blocks the signals while a process is being started, or it would outlive us unnoticed."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def open_to_signals():
    """Unblocks the signals in a process started inside `no_end`."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


class Child:
    """A line-based request/response program. It and its children end with us. `owner` has the log and the deadline."""

    def __init__(self, owner, name, command, env):
        self.owner, self.name = owner, name
        command = [str(word) for word in command]
        owner.log(f"$ {' '.join(command)}")
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=owner.log_file,
            env=env,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=open_to_signals,
        )
        self.lines = queue.Queue()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.put(line.rstrip("\n"))
        self.lines.put(None)

    def hear(self, seconds):
        try:
            line = self.lines.get(timeout=self.owner.deadline.left(seconds))
        except queue.Empty:
            raise self.owner.deadline.late(f"{self.name} gave no answer", seconds) from None
        if line is None:
            self.process.wait(10)
            raise Failed(f"{self.name} has ended, with {self.process.returncode}")
        self.owner.log(f"{self.name}: {line[:500]}")
        return line

    def tell(self, question):
        with contextlib.suppress(BrokenPipeError):  # hear() reports how it ended
            self.process.stdin.write(question + "\n")
            self.process.stdin.flush()

    def ask(self, question, seconds=60):
        self.tell(question)
        return self.hear(seconds)

    def hear_json(self, question, seconds=60):
        reply = json.loads(self.hear(seconds))
        if "error" in reply:
            raise Failed(f"{question}: {reply['error']}")
        return reply

    def ask_json(self, question, seconds=60):
        self.tell(question)
        return self.hear_json(question, seconds)

    def has_answered(self):
        return not self.lines.empty()

    def finish(self, seconds=30):
        """Closes its stdin, waits for it, and returns the exit code."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            return self.process.wait(self.owner.deadline.left(seconds))
        except subprocess.TimeoutExpired:
            raise Failed(f"{self.name} does not end") from None

    def kill(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.reader.join(1)
        if not self.reader.is_alive():  # else a process that left the group holds the pipe
            self.process.stdout.close()


def kill(process):
    """Kills a process and its children, and returns its output so far."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        return process.communicate(timeout=10)[0]
    except subprocess.TimeoutExpired as error:
        # A process that left the group holds the pipe, or the driver holds the process.
        return f"{(error.output or b'').decode(errors='replace')}\n(not ended by SIGKILL)"


class Program(Child):
    """One that answers `ok …`, and measures."""

    slow = 1.0

    def ask(self, question, seconds=60):
        self.owner.log(f"{self.name}> {question}")
        word, _, rest = super().ask(question, seconds).partition(" ")
        if word != "ok":
            raise Failed(f"{self.name}: {question.split()[0]}: {rest}")
        return rest

    def timed(self, question, seconds=120):
        """When it began and ended, in seconds."""
        begin, end, slow = self.ask(question, seconds).split()
        # The slowdown of the CPU, relative to its best in that process.
        self.slow = float(slow)
        return int(begin) * 1e-9, int(end) * 1e-9

    def took(self, question, seconds=120):
        begin, end = self.timed(question, seconds)
        return end - begin

    def memory(self, what):
        """A line of its /proc status, in bytes."""
        with open(f"/proc/{self.process.pid}/status") as status:
            return next((int(line.split()[1]) << 10 for line in status if line.startswith(what + ":")), 0)

    def close(self):
        with contextlib.suppress(Failed):
            self.finish(20)
        self.kill()
