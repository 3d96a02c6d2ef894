"""What the loop of an engine with several workers can rely on when it has them give up its KV cache, whatever becomes of them."""

import os
import pathlib
import socket
import subprocess
import sys
import threading
import unittest
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import support  # noqa: E402
from vramctl.engines import prefix_cache  # noqa: E402

#: Connects as a worker does. Then, each line of its input goes to the loop, and each of the loop's lines to its output.
WORKER = """
import socket, sys, threading
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1].replace("@", chr(0)))
def hear():
    for line in connection.makefile("r"):
        print(line, end="", flush=True)
threading.Thread(target=hear, daemon=True).start()
for line in sys.stdin:
    connection.sendall(line.encode())
"""

#: A worker that never reads. A child of its keeps its connection when it has ended, until its own input ends.
DEAF = """
import os, signal, socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1].replace("@", chr(0)))
connection.sendall(b"ask 1\\n")
if os.fork():
    signal.pause()
sys.stdin.read()
"""


class Loop(unittest.TestCase):
    """An engine of one process."""

    def answer(self, within, is_idle, reset):
        library = mock.Mock()
        with mock.patch.object(prefix_cache, "_WITHIN_S", within):
            request = prefix_cache.Request(library, 7)
        request.answer(lambda: is_idle, reset)
        return [call.args for call in library.call.mock_calls]

    def test_a_request_in_time_is_answered_as_the_engine_says(self):
        self.assertEqual(self.answer(1000, True, lambda: True), [("prefix_cache_answer", 7, 1)])
        self.assertEqual(self.answer(1000, True, lambda: False), [("prefix_cache_answer", 7, 0)])
        self.assertEqual(self.answer(1000, False, self.fail), [("prefix_cache_answer", 7, 0)])

    def test_a_request_that_is_too_late_leaves_the_engine_as_idle_as_it_is(self):
        self.assertEqual(self.answer(-1, True, self.fail), [("prefix_cache_answer", 7, 0), ("prefix_cache_idle", 1)])
        self.assertEqual(self.answer(-1, False, self.fail), [("prefix_cache_answer", 7, 0)])


class Workers(unittest.TestCase):
    def setUp(self):
        self.passed_on = threading.Semaphore(0)
        self.address = f"\0vramctl-test-{os.getpid()}-{id(self)}"
        before, prefix_cache._address = prefix_cache._address, lambda pid: self.address
        self.addCleanup(setattr, prefix_cache, "_address", before)
        self.workers = prefix_cache.Workers(lambda _: self.passed_on.release())

    def start(self, script):
        """Returns the process, and the lines of its output so far."""
        command = [sys.executable, "-c", script, self.address.replace("\0", "@")]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        heard = []
        reader = threading.Thread(target=lambda: heard.extend(iter(process.stdout.readline, "")), daemon=True)
        reader.start()
        for cleanup in (process.stdout.close, reader.join, process.wait, process.kill, process.stdin.close):
            self.addCleanup(cleanup)
        return process, heard

    def ends(self, work):
        """Begins it. Returns what waits for its end."""
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return lambda: support.eventually("it goes on", lambda: not thread.is_alive())

    def test_an_answer_to_an_earlier_request_is_none_to_this_one(self):
        worker, heard = self.start(WORKER)
        worker.stdin.write("ask 1\n")
        self.passed_on.acquire()
        self.workers.answer(lambda: True, lambda: False)
        # Its second request overtakes what it says to the first answer.
        worker.stdin.write("ask 2\n")
        self.passed_on.acquire()
        end = self.ends(lambda: self.workers.answer(lambda: True, lambda: True))
        support.eventually("it is told", lambda: "reset 2\n" in heard)
        worker.stdin.write("done 1\nask 3\n")
        support.eventually("the loop waits for the second answer", lambda: {"reset 3\n", "kept 3\n"} & {*heard})
        worker.stdin.write("done 2\ndone 3\n")
        end()
        self.assertEqual(heard[:3], ["busy\n", "kept 1\n", "reset 2\n"])

    def test_a_request_that_is_too_late_leaves_the_engine_as_idle_as_it_is(self):
        for is_idle, told in ((True, ["busy\n", "idle\n"]), (False, ["busy\n"])):
            worker, heard = self.start(WORKER)
            with mock.patch.object(prefix_cache, "_WITHIN_S", -1):
                worker.stdin.write("ask 1\n")
                self.passed_on.acquire()
                self.workers.answer(lambda is_idle=is_idle: is_idle, lambda: self.fail("it is of no use any more"))
            support.eventually("it is told", lambda heard=heard, told=told: heard == told)

    def test_a_worker_that_reads_nothing_does_not_hold_up_the_loop(self):
        self.start(DEAF)
        self.passed_on.acquire()
        self.ends(lambda: [self.workers.set_idle(step % 2 == 0) for step in range(5000)])()
        support.eventually("it is given up", lambda: not self.workers._there())

    def test_a_worker_that_has_ended_is_not_waited_for_though_its_child_has_its_connection(self):
        worker, _ = self.start(DEAF)
        self.passed_on.acquire()
        end = self.ends(lambda: self.workers.answer(lambda: True, lambda: True))
        worker.kill()
        end()

    def test_nobody_else_is_a_worker(self):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self.address)
            self.assertEqual(connection.recv(100), b"")
        self.assertEqual(self.workers._there(), {})


if __name__ == "__main__":
    unittest.main()
