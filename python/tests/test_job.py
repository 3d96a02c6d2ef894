"""Jobs, through the command line, on the simulated GPU."""

from __future__ import annotations

import _thread
import asyncio
import concurrent.futures
import contextlib
import json
import os
import pickle
import signal
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
import unittest
import unittest.mock
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import vramctl
from support import HOLDER, MIB, VRAMCTL, Program, eventually
from vramctl import errors


class Dying:
    """A rank that takes part in every step of a pause, and dies at the commit: it speaks the protocol, for a sleeping child."""

    def __init__(self, name: str, like: Program) -> None:
        self.child = subprocess.Popen(["sleep", "600"])
        self.path = Path(os.environ["VRAMCTL_DIR"], f"{self.child.pid}.sock")
        with vramctl.Client(like.pid) as client:
            status = {**client._question("status", "status"), "pid": self.child.pid, "name": name, "job": name}
        answers = {"hello": {**status, "reply": "hello"}, "status": status}
        answers["plan"] = {"reply": "plan", "tags": [], "host": {"needed_bytes": 0, "available_bytes": 0}}
        answers.update({"hold": {"reply": "held"}, "drain": {"reply": "drained"}, "prepare": {"reply": "prepared"}})
        dying = self

        class Conversation(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                for line in self.rfile:
                    request = json.loads(line)["request"]
                    if request == "commit":
                        return dying.die()
                    if request != "renew":
                        unknown = {"reply": "error", "code": "invalid", "message": request}
                        self.wfile.write(json.dumps(answers.get(request, unknown)).encode() + b"\n")

        self.server = socketserver.ThreadingUnixStreamServer(str(self.path), Conversation)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def die(self) -> None:
        self.path.unlink(missing_ok=True)
        self.child.kill()
        self.child.wait()

    def __enter__(self) -> Dying:
        return self

    def __exit__(self, *_: Any) -> None:
        self.die()
        self.server.shutdown()
        self.server.server_close()


#: Stands in for the command line: `say` has what the command says of the request.
STAND_IN = f"""#!{sys.executable} -ISE
import os, signal, subprocess, sys, threading, time
line = sys.stdin.readline()
verb = line.split('"operation": "')[1].split('"')[0]
def run():
    child = subprocess.Popen([{VRAMCTL!r}, "operate"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    child.stdin.write(line)
    child.stdin.flush()
    said = child.stdout.read()
    return said, child.wait()
"""

#: It is killed once a pause is done.
KILLED = """
said, status = run()
if verb == "pause":
    os.kill(os.getpid(), signal.SIGKILL)
sys.stdout.write(said)
"""

#: Says `VERB.begun` beside itself, and waits before the command's work while there is `VERB.before`, and after it while there is
#: `VERB.after`. If it is cancelled meanwhile, it says `VERB.told` and ends.
SLOW = """
at_work = threading.Lock()
def tell(what):
    open(f"{__file__}.{verb}.{what}", "w").close()
def stay(what):
    while os.path.exists(f"{__file__}.{verb}.{what}"):
        time.sleep(0.02)
def cancelled():
    if not sys.stdin.readline() and '"detached": true' in line:
        return
    with at_work:
        tell("told")
        os._exit(1)
threading.Thread(target=cancelled, daemon=True).start()
tell("begun")
stay("before")
with at_work:
    said, status = run()
tell("done")
stay("after")
sys.stdout.write(said)
sys.stdout.flush()
os._exit(status)
"""


def enter(paused: Any) -> None:
    with paused:
        raise AssertionError("it is paused")


def enter_async(paused: Any) -> None:
    async def work() -> None:
        async with paused:
            raise AssertionError("it is paused")

    asyncio.run(work())


class Jobs(unittest.TestCase):
    def setUp(self) -> None:
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        self.ranks = [stack.enter_context(Program("engine")) for _ in range(2)]
        self.job = vramctl.Job("engine")

    def states(self) -> set[str]:
        return {tag.state for status in self.job.status().values() for tag in status.tags}

    def test_all_processes_are_paused_and_resumed_as_one(self) -> None:
        report = self.job.pause()
        self.assertEqual(set(report.processes), {rank.pid for rank in self.ranks})
        self.assertEqual((report.bytes, report.attempts, self.states()), (24 * MIB, 1, {"paused"}))
        self.assertGreater(report.ms, 0)
        self.assertEqual(self.job.resume(timeout=None).bytes, 24 * MIB)
        self.assertEqual({rank.ask("check") for rank in self.ranks}, {"weights ok, cache zero"})
        self.assertEqual(self.job.pause("weights", hold=False, timeout=5, backup="host").bytes, 16 * MIB)
        self.assertEqual(self.job.resume(iter(["weights", "kv_cache"])).bytes, 16 * MIB)

    def test_two_jobs_change_places(self) -> None:
        with Program("trainer") as trainer:
            other = vramctl.Job("trainer")
            other.pause()
            left, came = vramctl.swap(self.job, other)
            self.assertEqual((left.bytes, came.bytes, set(came.processes)), (24 * MIB, 12 * MIB, {trainer.pid}))
            self.assertEqual((self.states(), trainer.ask("check")), ({"paused"}, "weights ok, cache zero"))
            left, came = vramctl.swap("trainer", "engine", out_tags="weights", in_tags=["weights"])
            self.assertEqual((left.bytes, came.bytes), (8 * MIB, 16 * MIB))
            with self.assertRaises(errors.Invalid):
                vramctl.swap("engine", "engine")

    def test_the_ledger_knows_whose_memory_is_in_use(self) -> None:
        def tags() -> dict[str | None, int]:
            gpu = vramctl.ledger()[0]
            self.assertEqual(sum(share.bytes for share in gpu.shares), gpu.used_bytes)
            own = [share for share in gpu.shares if share.pid == self.ranks[0].pid and share.what == "tag"]
            return {share.of: share.bytes for share in own}

        self.assertEqual(tags(), {"weights": 8 * MIB, "kv_cache": 4 * MIB})
        self.job.pause("weights")
        self.assertEqual(tags(), {"kv_cache": 4 * MIB})
        self.job.resume()
        for status in self.job.status().values():
            self.assertEqual([cycle.tags for cycle in status.cycles], [{"weights": 8 * MIB, "kv_cache": 4 * MIB}])
            self.assertEqual(status.growing, ())

    def test_it_leaves_the_gpu_and_comes_back(self) -> None:
        report = self.job.suspend(backup="host")
        self.assertEqual(set(report), {rank.pid for rank in self.ranks})
        self.assertEqual(set(report[self.ranks[0].pid].stages), {"pause", "quiesce", "lock", "checkpoint"})
        self.assertGreater(report[self.ranks[0].pid].bytes, 0)
        with self.assertRaises(errors.Suspended):
            vramctl.Client(self.ranks[0].pid).pause()
        self.assertEqual(self.job.resume().bytes, 24 * MIB)
        self.assertEqual(self.states(), {"active"})
        with self.assertRaises(errors.Error):
            self.job.move(7)
        self.assertEqual(len(asyncio.run(self.job.suspend_async())), 2)
        self.job.resume()

    def test_it_is_always_resumed(self) -> None:
        with self.assertRaises(KeyError), self.job.paused(iter(["weights"])) as report:
            self.assertEqual((report.bytes, self.states()), (16 * MIB, {"paused", "active"}))
            raise KeyError
        self.assertEqual(self.states(), {"active"})

    def test_what_a_program_has_paused_itself_stays_paused(self) -> None:
        asleep = HOLDER.replace('print("ready"', 'vramctl.pause("kv_cache")\nprint("ready"', 1)
        with Program("asleep", asleep) as program:
            job = vramctl.Job("asleep")

            def states() -> dict[str, str]:
                return {tag.tag: tag.state for tag in job.status()[program.pid].tags}

            for tags in (None, ["kv_cache", "weights"]):
                with self.subTest(tags=tags):
                    with job.paused(tags):
                        self.assertEqual(states(), {"weights": "paused", "kv_cache": "paused"})
                    self.assertEqual(states(), {"weights": "active", "kv_cache": "paused"})

    def all_run(self) -> None:
        self.assertEqual(self.states(), {"active"})
        # A held one would not answer.
        self.assertEqual({rank.ask("check") for rank in self.ranks}, {"weights ok, cache zero"})

    def test_those_that_are_left_are_resumed_if_one_dies_at_the_commit(self) -> None:
        with Dying("engine", self.ranks[0]) as dying, self.assertRaises(errors.Error) as died:
            self.job.pause()
        self.assertIs(died.exception.committed, True)
        self.assertIn("ended before it answered", str(died.exception))
        self.assertIs(pickle.loads(pickle.dumps(died.exception)).committed, True)
        self.assertEqual(self.states(), {"paused"})
        self.job.resume()
        for way in (enter, enter_async):
            with self.subTest(way), Dying("engine", self.ranks[0]) as dying:
                with self.assertRaises(errors.Error) as died:
                    way(vramctl.Job("engine", ranks=3).paused())
                self.assertIs(died.exception.committed, True)
                self.assertIn("ended before it answered", str(died.exception))
                self.assertIsNotNone(dying.child.returncode)
                self.all_run()

    def test_those_that_are_left_are_resumed_if_one_dies_meanwhile(self) -> None:
        with vramctl.Job("engine", ranks=2).paused():
            self.ranks[0].child.kill()
            self.ranks[0].child.wait()
        del self.ranks[0]
        self.all_run()

    def test_it_is_resumed_if_the_command_is_killed_after_the_commit(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            command = Path(folder, "vramctl")
            command.write_text(STAND_IN + KILLED)
            command.chmod(0o700)
            for way in (enter, enter_async):
                with self.subTest(way), unittest.mock.patch("vramctl.__main__.command", return_value=str(command)):
                    with self.assertRaisesRegex(errors.Internal, "signal 9") as killed:
                        way(self.job.paused())
                    self.assertIsNone(killed.exception.committed)
                    self.all_run()

    def test_a_pause_that_was_undone_is_not_resumed(self) -> None:
        self.job.pause("weights")
        with Program("engine", VRAMCTL_HOST_CAP="1M"):
            for way in (enter, enter_async):
                with self.subTest(way), self.assertRaises(errors.HostMemory) as short:
                    way(self.job.paused())
                self.assertIs(short.exception.committed, False)
                # As before.
                for rank in self.ranks:
                    tags = vramctl.Client(rank.pid).status().tags
                    self.assertEqual({tag.tag: tag.state for tag in tags}, {"weights": "paused", "kv_cache": "active"})

    def test_the_command_of_a_resume_that_is_not_needed_ends(self) -> None:
        """Although a child that was forked meanwhile keeps its stdin open."""
        children = []

        class Forking(vramctl.Job):
            def pause(self, *arguments: Any, **options: Any) -> vramctl.types.JobReport:
                if (pid := os.fork()) == 0:
                    signal.pause()
                children.append(pid)
                return super().pause(*arguments, **options)

        with Program("engine", VRAMCTL_HOST_CAP="1M"), self.assertRaises(errors.HostMemory):
            enter(Forking("engine").paused())
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self.assertEqual((len(children), self.states()), (1, {"active"}))

    def test_a_program_cannot_hold_its_own_job(self) -> None:
        source = HOLDER.replace(
            'print("ready", flush=True)',
            """import os
job = vramctl.Job("own")
held = [job.pause, job.suspend, lambda: job.move(1), job.paused().__enter__]
for hold in held:
    try:
        hold()
    except vramctl.errors.Invalid as error:
        assert "cannot hold itself" in str(error), error
    else:
        job.resume()
        sys.exit("it holds itself")
assert job.pause(hold=False).bytes == 12 * MIB
assert job.resume().bytes == 12 * MIB
vramctl.Job("engine").pause()  # others
print("ready", flush=True)""",
        )
        with Program("own", source) as own:
            self.assertEqual(self.states(), {"paused"})
            self.job.resume()
            # Of this process, it waits only for the answer.
            self.assertEqual(vramctl.Job("own").pause().bytes, 12 * MIB)
            vramctl.Job("own").resume()
            self.assertEqual(own.ask("check"), "weights ok, cache zero")

    def test_asyncio_has_the_same(self) -> None:
        async def work() -> None:
            self.assertEqual((await self.job.pause_async("weights")).bytes, 16 * MIB)
            self.assertEqual(len(await self.job.status_async()), 2)
            self.assertEqual((await self.job.resume_async()).bytes, 16 * MIB)
            async with self.job.paused() as report:
                self.assertEqual((report.bytes, self.states()), (24 * MIB, {"paused"}))
            self.assertEqual(self.states(), {"active"})

            async def hang() -> None:
                async with self.job.paused():
                    await asyncio.sleep(60)

            # Cancelled before, during and after the pause.
            for seconds in (0.0, 0.02, 0.5):
                task = asyncio.ensure_future(hang())
                await asyncio.sleep(seconds)
                task.cancel()
                with self.assertRaises(asyncio.CancelledError):
                    await task
                self.assertEqual(self.states(), {"active"}, seconds)

        asyncio.run(work())

    def test_the_reason_of_the_one_that_could_not_is_raised(self) -> None:
        with Program("engine", VRAMCTL_HOST_CAP="1M"):
            with self.assertRaises(errors.HostMemory) as short:
                self.job.pause()
            self.assertGreater(short.exception.numbers["needed"], short.exception.numbers["available"])
            self.assertEqual(self.states(), {"active"})
        with self.assertRaises(errors.UnknownTag) as unknown:
            self.job.pause(["wieghts"])
        self.assertEqual(unknown.exception.known_tags, ["kv_cache", "weights"])
        with self.assertRaisesRegex(errors.NoProcess, "2 of 3 processes are there"):
            vramctl.Job("engine", ranks=3).pause()
        for leave in (vramctl.Job("engine", ranks=3).suspend, lambda: vramctl.Job("engine", ranks=3).move(1)):
            with self.assertRaisesRegex(errors.NoProcess, "2 of 3 processes are there"):
                leave()
        with self.assertRaisesRegex(errors.NoProcess, "no managed process is named nobody; the processes are engine"):
            vramctl.Job("nobody").resume()
        with self.assertRaisesRegex(errors.NoProcess, "did you mean engine?"):
            vramctl.Job("engin").resume()
        for wrong, why in (
            (lambda: vramctl.Job(7), "a job has a name, a str, and not 7; for one process, use vramctl.Client"),
            (lambda: vramctl.Job("engine", ranks="2"), "ranks must be the number of the job's processes, or None, not '2'"),
            (lambda: self.job.pause(7), "tags must be a tag, several of them, or None for all, not 7"),
            (lambda: self.job.pause(["weights", 7]), "a tag must be a str or None, not 7"),
            (lambda: self.job.resume(timeout="soon"), "a timeout must be a number of seconds or None, not 'soon'"),
            (lambda: vramctl.Client(7.5), "a process is chosen by its id, its name or the path of its socket, not by 7.5"),
        ):
            with self.assertRaises(TypeError) as unfit:
                wrong()
            self.assertIn(why, str(unfit.exception))
        with self.assertRaises(errors.Invalid):
            self.job.pause(backup="tape")  # type: ignore[arg-type]
        with Program("trainer") as trainer, self.assertRaises(errors.SeveralProcesses) as several:
            vramctl.Job().pause()
        self.assertIn(
            "several jobs are managed: engine, trainer; choose one by its name: vramctl.Job('engine')", str(several.exception)
        )
        self.assertEqual(set(several.exception.pids), {trainer.pid, *(rank.pid for rank in self.ranks)})
        # Refused by the command, and before it.
        with self.assertRaisesRegex(errors.Invalid, "no GPU 7") as wrong_gpu:
            self.job.move(7)
        self.assertIs(wrong_gpu.exception.committed, False)
        with self.assertRaisesRegex(errors.Invalid, "is not one of 'refuse', 'keep', 'take'"):
            self.job.pause(registered="all")
        # The command line has one policy for all tags: a mapping would be taken for its keys.
        for wrong in (self.job.pause, lambda tags: self.job.paused(tags).__enter__()):
            with self.assertRaisesRegex(errors.Invalid, "one policy"):
                wrong({"weights": "discard"})
        self.assertEqual(self.states(), {"active"})


#: A program that pauses a job in a context, and says at which point it is.
PAUSING = """
import asyncio, sys
import vramctl, vramctl.__main__
vramctl.__main__.command = lambda: {command!r}
paused = vramctl.Job("engine").paused()

def in_turn():
    with paused:
        print("paused", flush=True)
        sys.stdin.readline()

async def at_once():
    async with paused:
        print("paused", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)

print("ready", flush=True)
in_turn() if {sync!r} else asyncio.run(at_once())
"""


#: Its task and its loop end while a resume is under way, and the interpreter does.
LEAVING = """
import asyncio, os, sys
import vramctl, vramctl.__main__
vramctl.__main__.command = lambda: {command!r}

async def main():
    resuming = asyncio.ensure_future(vramctl.Job("engine").resume_async())
    while not os.path.exists({begun!r}):
        await asyncio.sleep(0.01)
    resuming.cancel()

asyncio.run(main())
if (pid := os.fork()) == 0:
    sys.exit()
os.waitpid(pid, 0)
print("left", flush=True)
"""

#: Raises ^C at each step of the main thread in turn while it waits for a resume: once the thread of the resume is started, each call, line
#: and return of Python's is a step. Prints the number of steps, and ends with an error if ^C or the resume is lost.
AT_EVERY_STEP = """
import asyncio, inspect, itertools, sys, time, traceback
import vramctl.job

raised, lost, resumes, steps, wanted = False, False, [], 0, 0

def nobody_hears(unraisable):  # Python drops what is raised in what runs when an object goes, as asyncio has it for its tasks
    global lost
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(unraisable.exc_traceback)]
    lost = vramctl.job.__file__ not in files
    if not lost:
        sys.__unraisablehook__(unraisable)

sys.unraisablehook = nobody_hears

def run(operation):
    if operation._request["operation"] == "resume":
        limit = time.monotonic() + 0.02
        while not raised and time.monotonic() < limit:
            time.sleep(0.001)
        resumes.append(operation)
    return {{"processes": [], "jobs": []}}

vramctl.job._Operation._run_command = run

def step(frame, event, _):
    global raised, steps
    if steps == 0 and frame.f_code.co_name != "start":
        return step
    above = frame
    while above is not None and above.f_code.co_name not in ("in_turn", "at_once"):
        above = above.f_back
    if above is None:  # one of the loop's own: a ^C there loses tasks, whatever they run
        return None
    if event == "return" and frame.f_code.co_flags & inspect.CO_COROUTINE:  # nothing is raised where a coroutine is left
        return step
    steps += 1
    if steps == wanted:
        raised = True
        raise KeyboardInterrupt  # this also ends the trace
    return step

def in_turn():
    with vramctl.Job("engine").paused():
        sys.settrace(step)

async def at_once():
    async with vramctl.Job("engine").paused():
        sys.settrace(step)

def interrupted(at):
    global raised, lost, steps, wanted
    raised, lost, steps, wanted = False, False, 0, at
    resumes.clear()
    try:
        in_turn() if {sync!r} else asyncio.run(at_once())
        through = True
    except KeyboardInterrupt:
        through = False
    finally:
        sys.settrace(None)
    assert through == (not raised or lost), "^C is lost"
    assert len(resumes) == 1, f"it is resumed {{len(resumes)}} times"
    return raised

count = next(at for at in itertools.count(1) if not interrupted(at)) - 1
print(count)
"""

#: A coroutine is left in a context whose loop does not run any more, and an object's end resumes a job, when the interpreter ends.
ENDING = """
import asyncio, sys
import vramctl

class Turn:
    def __init__(self):
        self.job = vramctl.Job("engine")
        self.job.pause()

    def __del__(self):
        self.job.resume()

async def leave(stop):
    async with vramctl.Job("engine").paused():
        stop()
        await asyncio.sleep(100)

if {dropped!r}:
    loop = asyncio.new_event_loop()
    task = loop.create_task(leave(loop.stop))
    loop.run_forever()
else:
    sys.modules["kept until modules go"] = Turn()
print({{tag.state for status in vramctl.Job("engine").status().values() for tag in status.tags}}, flush=True)
"""

#: In a context at the limit of open files, and with no thread to be had.
AT_LIMITS = """
import _thread, contextlib, os, resource
import vramctl

def refuse(*_):
    raise RuntimeError("can't start new thread")

job = vramctl.Job("engine")
with contextlib.ExitStack() as stack:
    stack.enter_context(job.paused())
    print({tag.state for status in job.status().values() for tag in status.tags}, flush=True)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    _thread.start_new_thread = refuse
try:
    job.pause()
except vramctl.errors.Internal as error:
    assert error.committed is False and "Too many open files" in str(error), error
"""


class WhateverHappens(unittest.TestCase):
    """Cancellations and ^C, at every point of a pause in a context."""

    def setUp(self) -> None:
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        self.rank = stack.enter_context(Program("engine"))
        self.job = vramctl.Job("engine")
        self.command = Path(stack.enter_context(tempfile.TemporaryDirectory()), "vramctl")
        self.command.write_text(STAND_IN + SLOW)
        self.command.chmod(0o700)

    def place(self, what: str) -> Path:
        return Path(f"{self.command}.{what}")

    def is_as_before(self, cache: str = "zero") -> None:
        states = {tag.state for status in self.job.status().values() for tag in status.tags}
        self.assertEqual(states, {"active"})
        # A held one would not answer.
        self.assertEqual(self.rank.ask("check"), f"weights ok, cache {cache}")

    async def cancelled_at(self, place: str, said: str) -> None:
        """Cancels the task three times while the command waits at this place, and then lets it go on."""

        async def pause() -> None:
            async with self.job.paused():
                pass

        self.place(place).touch()
        task = asyncio.ensure_future(pause())
        while not self.place(said).exists():
            await asyncio.sleep(0.01)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.01)
        waits = not task.done()
        self.place(place).unlink()
        self.assertTrue(waits, "it does not wait until the job is resumed")
        with self.assertRaises(asyncio.CancelledError):
            await task

    def test_it_is_resumed_however_often_it_is_cancelled(self) -> None:
        for place, said in (
            ("pause.before", "pause.begun"),
            ("pause.after", "pause.done"),
            ("resume.before", "resume.begun"),
            ("resume.after", "resume.done"),
        ):
            with self.subTest(place), unittest.mock.patch("vramctl.__main__.command", return_value=str(self.command)):
                for file in self.command.parent.glob(f"{self.command.name}.*"):
                    file.unlink()
                asyncio.run(self.cancelled_at(place, said))
            self.is_as_before()

    def test_it_is_resumed_if_the_loop_ends_first(self) -> None:
        async def leave() -> None:
            async with self.job.paused():
                pass

        self.place("pause.after").touch()
        with unittest.mock.patch("vramctl.__main__.command", return_value=str(self.command)):
            loop = asyncio.new_event_loop()
            task = loop.create_task(leave())
            while not self.place("pause.done").exists():
                loop.run_until_complete(asyncio.sleep(0.01))
            # As the interpreter does with a task that is left.
            coroutine = task.get_coro()
            with contextlib.suppress(RuntimeError):
                coroutine.close()  # type: ignore[union-attr]
            task.cancel()
            with contextlib.suppress(RuntimeError, asyncio.CancelledError):
                loop.run_until_complete(task)
            loop.close()
            self.place("pause.after").unlink()
            eventually("it is resumed", self.place("resume.done").exists)
        self.is_as_before()

    def interrupted_at(self, place: str, said: str, *, sync: bool, times: int, told: str | None = None) -> int:
        """Sends ^C while the command waits at this place, to all processes of the terminal. Then, and once it has said what it is to be
        told, lets it go on.
        """
        self.place(place).touch()
        child = subprocess.Popen(
            [sys.executable, "-c", PAUSING.format(command=str(self.command), sync=sync)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={name: value for name, value in os.environ.items() if name != "LD_PRELOAD"},
            start_new_session=True,
        )
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
        eventually(said, self.place(said).exists)
        for _ in range(times):
            os.killpg(child.pid, signal.SIGINT)
            # Until it has taken it: pending signals are one.
            eventually("it takes ^C", lambda: not pending(child.pid, signal.SIGINT))
        if told is not None:
            eventually(told, lambda: self.place(told).exists() or child.poll() is not None)
        self.place(place).unlink()
        for _ in range(0 if sync else 9):
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(5)
                break
            # A second ^C that comes while asyncio wakes a task loses that task, whatever it runs. People press once more.
            child.send_signal(signal.SIGINT)
        _, text = child.communicate(timeout=100)
        self.assertRegex(text, "KeyboardInterrupt|^$")
        return child.returncode

    def test_it_is_resumed_however_often_it_is_interrupted(self) -> None:
        for sync in (True, False):
            for place, said in (("resume.before", "resume.begun"), ("resume.after", "resume.done")):
                with self.subTest(place, sync=sync):
                    for file in self.command.parent.glob(f"{self.command.name}.*"):
                        file.unlink()
                    ended = self.interrupted_at(place, said, sync=sync, times=1 if place == "resume.before" else 3)
                    self.assertEqual(ended, -signal.SIGINT)
                    self.assertFalse(self.place("resume.told").exists(), "^C has reached the resume")
                    self.is_as_before()

    def test_it_is_resumed_at_whatever_step_it_is_interrupted(self) -> None:
        for sync in (True, False):
            with self.subTest(sync=sync):
                code = AT_EVERY_STEP.format(sync=sync)
                child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
                self.assertEqual(child.returncode, 0, child.stderr)
                self.assertGreater(int(child.stdout), 20)

    def test_it_is_resumed_if_the_interpreter_ends_first(self) -> None:
        """And a process that is forked meanwhile ends without it."""
        self.job.pause()
        self.place("resume.before").touch()
        child = subprocess.Popen(
            [sys.executable, "-c", LEAVING.format(command=str(self.command), begun=str(self.place("resume.begun")))],
            stdout=subprocess.PIPE,
            text=True,
            env={name: value for name, value in os.environ.items() if name != "LD_PRELOAD"},
        )
        assert child.stdout is not None
        self.assertEqual(child.stdout.readline(), "left\n")
        with self.assertRaises(subprocess.TimeoutExpired):
            child.wait(0.5)
        self.place("resume.before").unlink()
        child.communicate(timeout=100)
        self.assertEqual(child.returncode, 0)
        self.is_as_before()

    def left_paused(self, source: str) -> None:
        """A program that ends in a context of a pause, without its command standing in the way."""
        environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        child = subprocess.run(
            [sys.executable, "-W", "error", "-c", source], stdout=subprocess.PIPE, env=environment, text=True, timeout=100
        )
        self.assertEqual((child.returncode, child.stdout), (0, "{'paused'}\n"))
        self.is_as_before()

    def test_it_is_resumed_by_what_runs_when_the_interpreter_ends(self) -> None:
        for dropped in (True, False):
            with self.subTest(dropped=dropped):
                self.left_paused(ENDING.format(dropped=dropped))

    def test_it_is_resumed_without_descriptors_and_threads(self) -> None:
        self.left_paused(AT_LIMITS)

    def test_it_is_resumed_if_its_coroutine_is_closed(self) -> None:
        """Without a loop, in a loop, and at the end of a generator, which may wait."""
        started = []

        def start(*arguments: Any) -> int:
            started.append(arguments)
            return start_thread(*arguments)

        def states() -> set[str]:
            return {tag.state for status in self.job.status().values() for tag in status.tags}

        async def leave(entered: Callable[[], Any]) -> None:
            async with self.job.paused():
                entered()
                await asyncio.sleep(100)

        async def generate() -> AsyncIterator[None]:
            async with self.job.paused():
                yield

        async def end(task: asyncio.Task[None]) -> None:
            task.cancel()
            with contextlib.suppress(RuntimeError, asyncio.CancelledError):
                await task

        async def close() -> None:
            entered = asyncio.Event()
            leaving = leave(entered.set)
            task = asyncio.ensure_future(leaving)
            await entered.wait()
            leaving.close()
            await end(task)
            await asyncio.to_thread(eventually, "it is resumed", lambda: states() == {"active"})
            generator = generate()
            await generator.__anext__()
            self.assertEqual(states(), {"paused"})
            await generator.aclose()  # type: ignore[attr-defined]
            self.assertEqual(states(), {"active"})

        start_thread = _thread.start_new_thread
        loop = asyncio.new_event_loop()
        self.addCleanup(loop.close)
        leaving = leave(loop.stop)
        task = loop.create_task(leaving)
        loop.run_forever()
        with unittest.mock.patch("_thread.start_new_thread", start):
            leaving.close()
        self.assertLess(len(started), 10)
        self.is_as_before()
        loop.run_until_complete(end(task))
        asyncio.run(close())
        self.is_as_before()

    def test_it_is_resumed_although_others_leave_no_connection_free(self) -> None:
        with contextlib.ExitStack() as stack, self.job.paused():
            crowd = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(16)]
            for client in crowd:
                client.connect(f"{os.environ['VRAMCTL_DIR']}/{self.rank.pid}.sock")
            # Longer than the command asks again without a limit of its own.
            leave = threading.Timer(2, lambda: [client.shutdown(socket.SHUT_RDWR) for client in crowd])
            leave.start()
            stack.callback(leave.join)
        self.is_as_before()

    def test_an_interrupted_pause_is_told_so(self) -> None:
        ended = self.interrupted_at("pause.before", "pause.begun", sync=True, times=1, told="pause.told")
        self.assertEqual(ended, -signal.SIGINT)
        self.assertTrue(self.place("pause.told").exists())
        self.is_as_before(cache="there")

    def test_those_that_wait_do_not_keep_others_from_starting(self) -> None:
        self.place("resume.before").touch()

        async def work() -> None:
            loop = asyncio.get_running_loop()
            with concurrent.futures.ThreadPoolExecutor(1) as threads:
                loop.set_default_executor(threads)
                waiting = [asyncio.ensure_future(self.job.resume_async(timeout=None)) for _ in range(8)]
                while not self.place("resume.begun").exists():
                    await asyncio.sleep(0.01)
                try:
                    everything = asyncio.gather(self.job.pause_async(), asyncio.to_thread(os.getpid))
                    report, _ = await asyncio.wait_for(everything, 60)
                    self.assertEqual(report.bytes, 12 * MIB)
                finally:
                    self.place("resume.before").unlink()
                await asyncio.gather(*waiting)

        with unittest.mock.patch("vramctl.__main__.command", return_value=str(self.command)):
            asyncio.run(work())
        self.is_as_before()


def pending(pid: int, wanted: int) -> bool:
    """Whether a signal waits to be taken. A process that has ended takes none, and its record shows those that it left until its parent
    asks for its exit code.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    if any(line.startswith("State:") and line.split()[1] in "ZX" for line in lines):
        return False
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd:", "ShdPnd:"))]
    return any(mask >> (wanted - 1) & 1 for mask in masks)


class Asked(unittest.TestCase):
    def test_the_command_is_asked_for_what_is_wanted_and_its_answer_is_read(self) -> None:
        """What it does then, its own tests show."""
        asked: list[dict[str, Any]] = []
        aside = {"owner": 7, "tag": "default", "bytes": 4, "paused_bytes": 4}
        report = {"bytes": 0, "ms": 1.0, "stages": {}, "missing": [aside]}
        made = {"id": "1", "rank": 0, "ranks": 2}
        process = {"pid": 1, "report": report, "borrowed": [aside], "communicators": [made]}

        def run(operation: Any) -> dict[str, Any]:
            asked.append(operation._request)
            return {"processes": [process], "jobs": []}

        job = vramctl.Job("trainer")
        with unittest.mock.patch("vramctl.job._Operation._run_command", run):
            paused = job.pause(shared=True, nccl=True, registered="take").processes[1]
            suspended = job.suspend(shared=True, registered="take")[1]
            status = job.status()[1]
        wanted = {"operation": "pause", "target": {"name": "trainer"}, "shared": True, "nccl": True, "registered": "take"}
        self.assertEqual(asked[0], {**asked[0], **wanted})
        wanted = {"operation": "suspend", "target": {"name": "trainer"}, "shared": True, "registered": "take"}
        self.assertEqual(asked[1], {**asked[1], **wanted})
        for found in (paused.missing, suspended.missing, status.borrowed):
            self.assertEqual([(one.owner, one.bytes, one.paused_bytes) for one in found], [(7, 4, 4)])
        self.assertEqual([(one.rank, one.ranks) for one in status.communicators], [(0, 2)])


if __name__ == "__main__":
    unittest.main()
