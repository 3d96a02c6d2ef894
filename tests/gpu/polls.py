"""What a program asks the driver at any moment, in a thread of its own: it goes on over suspends, and, with CRIU, in an image of it that is loaded.

The driver blocks the calls of a process that is suspended. Whether it blocks each of them, and does so in a process that CRIU has restored and that
runs before the driver has brought it back, is what this shows.

usage: polls.py VRAMCTL PROGRAM [--images DIR] [CALL...]    PROGRAM is tests/apps/polls.c, built
"""

import argparse
import concurrent.futures
import os
import subprocess
import time

from common import check


class Polls:
    """A program that makes one call all the time."""

    def __init__(self, command):
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def counts(self):
        """How often it has made the call, and how many failed; None if it has ended."""
        try:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
            return tuple(map(int, self.process.stdout.readline().split())) or None
        except OSError:
            return None

    def goes_on(self, since):
        """Waits until it makes calls again. The counts, None if it has ended or stands still."""
        until = time.monotonic() + 20
        while time.monotonic() < until and (now := self.counts()):
            if now[0] > since + 5:
                return now
            time.sleep(0.05)
        return None

    def end(self):
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass
        try:
            return self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


def ask_at_once(options, call, lines):
    """Whether a program that makes the call only when it is asked, and is asked at the moment of its load, goes on."""
    name = f"asked-{call}"
    image = os.path.join(options.images, name)
    program = Polls([options.vramctl, "run", "--image", "--name", name, "--", options.program, call, "asked"])
    if program.process.stdout.readline() != "ready\n" or program.counts() != (10, 0):
        lines.append("asked: does not start")
        return False
    saved = subprocess.run([options.vramctl, "save", name, image], capture_output=True, text=True, timeout=100)
    program.process.wait(20)
    program = Polls([options.vramctl, "load", image, "--name", name])
    counts, code = program.counts(), program.end()
    lines.append(f"asked while it is loaded: {counts}, exit {code}")
    if counts != (20, 0):
        lines.append(f"{saved.stderr.strip()[-200:]} {program.process.stderr.read().strip()[-300:]}")
    return counts == (20, 0)


def run(options, call):
    """What became of a program: lines of the table."""
    name, lines = f"polls-{call}", []

    def vramctl(*words):
        done = subprocess.run([options.vramctl, *words], capture_output=True, text=True, timeout=100)
        if done.returncode != 0:
            lines.append(f"{words[0]}: exit {done.returncode}: {done.stderr.strip()[-300:]}")
        return done.returncode == 0

    program = Polls([options.vramctl, "run", *(["--image"] if options.images else []), "--name", name, "--", options.program, call])
    fine = program.process.stdout.readline() == "ready\n" and program.goes_on(0)
    for _ in range(2):
        fine = fine and vramctl("suspend", name)
        time.sleep(0.2)
        before = program.counts()
        time.sleep(0.3)
        during = program.counts()
        lines.append(f"suspended: {during[0] - before[0] if before and during else 'it has ended,'} calls in 0.3 s")
        fine = fine and during and vramctl("resume", name) and program.goes_on(during[0])
    if fine and options.images:
        fine = ask_at_once(options, call, lines)
    if fine and options.images:
        image = os.path.join(options.images, name)
        since = program.counts()[0]
        fine = vramctl("save", name, image) and program.process.wait(20) is not None
        for _ in range(2 if fine else 0):
            program = Polls([options.vramctl, "load", image, "--name", name])
            loaded = program.goes_on(since)
            lines.append(f"loaded: {'goes on' if loaded else 'it has ended or stands still'}")
            fine = fine and loaded
            code = program.end()
            if not loaded:
                lines.append(f"exit {code}: {program.process.stderr.read().strip()[-300:]}")
    failed = fine[1] if fine else 0
    lines.append(f"{failed} calls have failed")
    program.end()
    return call, bool(fine and not failed), "; ".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vramctl")
    parser.add_argument("program")
    parser.add_argument("--images", metavar="DIR")
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("calls", nargs="*", metavar="CALL")
    options = parser.parse_args()
    calls = options.calls or subprocess.run([options.program], stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    with concurrent.futures.ThreadPoolExecutor(options.at_once) as pool:
        for call, fine, what in pool.map(lambda call: run(options, call), calls):
            check(f"{call} goes on", fine, what)


if __name__ == "__main__":
    main()
    # What has failed is printed above.
    import sys

    from common import failures

    sys.exit(bool(failures))
