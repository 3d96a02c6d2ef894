"""The client, against real processes on the simulated GPU and against misbehaving ones."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from pathlib import Path
from typing import Any, Callable
from unittest import mock

import vramctl
from support import HOLDER, MIB, VRAMCTL, Cuda, Program, bare
from vramctl import _request, errors

#: The socket directory of the tests; their programs inherit it.
SOCKETS = Path(os.environ["VRAMCTL_DIR"])


class Real(unittest.TestCase):
    def test_another_process_is_paused_and_resumed(self) -> None:
        with Program("engine") as engine, vramctl.Client("engine") as client:
            self.assertEqual((client.hello().name, client.hello().pid), ("engine", engine.pid))
            seen: list[vramctl.types.Progress] = []
            report = client.pause(["weights", "kv_cache"], progress=seen.append)
            self.assertEqual((report.bytes, report.kept_bytes, report.discarded_bytes), (12 * MIB, 8 * MIB, 4 * MIB))
            self.assertEqual((seen[-1].stage, seen[-1].done), ("save", seen[-1].total))
            status = client.status()
            self.assertEqual([(tag.tag, tag.state) for tag in status.tags], [("kv_cache", "paused"), ("weights", "paused")])
            self.assertEqual(client.pause("weights").unchanged, 1)
            self.assertEqual(client.resume("weights").bytes, 8 * MIB)
            self.assertEqual(client.resume(timeout=None).bytes, 4 * MIB)
            self.assertEqual(client.resume(timeout=float("inf")).unchanged, 2)
            self.assertEqual(engine.ask("check"), "weights ok, cache zero")

    def test_a_process_tells_what_has_happened_to_its_memory(self) -> None:
        with Program("engine", VRAMCTL_TRACE="1") as engine, vramctl.Client("engine") as client:
            client.pause()
            told = client.events()
            self.assertEqual([event["number"] for event in told["events"]], list(range(told["next"])))
            self.assertEqual({owner["tag"]: owner["in_use"] for owner in told["owners"]}, {"weights": 0, "kv_cache": 0})
            self.assertEqual(client.events(told["next"])["events"], [])
            client.resume()
            kinds = [event["event"] for event in client.events(told["next"])["events"]]
            self.assertEqual((kinds[0], kinds[-1], kinds.count("resumed")), ("began", "ended", 2))
            self.assertEqual(engine.ask("check"), "weights ok, cache zero")
        with Program("engine"), vramctl.Client("engine") as client:
            self.assertFalse(client.events()["on"])
            self.assertEqual((client.record(), client.record()), (True, False))
            self.assertTrue(client.events()["on"])

    def test_a_process_cannot_hold_itself(self) -> None:
        source = HOLDER.replace(
            'print("ready", flush=True)',
            """try:
    vramctl.Client(__import__("os").getpid()).pause()
except vramctl.errors.Invalid as error:
    assert "cannot hold itself" in str(error), error
    assert vramctl.Client(__import__("os").getpid()).pause(hold=False).allocations == 2
    print("ready", flush=True)""",
        )
        with Program("own", source) as own, vramctl.Client(own.pid) as client:
            # It has paused itself.
            self.assertEqual(client.resume().allocations, 0)
            self.assertEqual(client.resume([tag.tag for tag in client.status().tags]).allocations, 2)
            self.assertEqual(own.ask("check"), "weights ok, cache zero")

    def test_the_shell_and_python_do_the_same(self) -> None:
        with Program("engine") as engine, vramctl.Client(engine.pid) as client:
            subprocess.run([VRAMCTL, "pause", "weights", "--name", "engine"], check=True, stdout=subprocess.DEVNULL)
            tag = client.status().tag("weights")
            assert tag is not None
            self.assertEqual(tag.state, "paused")
            client.resume()
            shown = subprocess.run([VRAMCTL, "status", "engine", "--json"], check=True, capture_output=True).stdout
            self.assertEqual({tag["state"] for tag in json.loads(shown)["processes"][0]["tags"]}, {"active"})

    def test_errors_of_the_process_carry_its_numbers(self) -> None:
        cuda = Cuda()
        with Program("engine") as engine, vramctl.Client("engine") as client:
            with self.assertRaises(errors.UnknownTag) as unknown:
                client.pause(["weights", "wieghts"])
            self.assertEqual(unknown.exception.known_tags, ["kv_cache", "weights"])
            client.pause()
            with vramctl.unmanaged():
                hog = cuda.malloc(cuda.free_memory() - 6 * MIB)
            try:
                start = time.monotonic()
                with self.assertRaises(errors.DeviceMemory) as short:
                    client.resume("weights", timeout=0.2)
                self.assertGreater(time.monotonic() - start, 0.15, "it waited")
                self.assertEqual(short.exception.needed, 8 * MIB)
                self.assertIn(os.getpid(), [holder["pid"] for holder in short.exception.holders])
            finally:
                cuda.free(hog)
            client.resume()
            self.assertEqual(engine.ask("check"), "weights ok, cache zero")

    def test_a_progress_callback_may_ask_for_anything(self) -> None:
        with Program("engine") as engine, vramctl.Client("engine") as client:
            states: list[list[str]] = []
            reports: list[vramctl.types.Report] = []

            def look(_: vramctl.types.Progress) -> None:
                client.status()
                if not reports:
                    # The process starts this one only after the outer pause has ended.
                    reports.append(client.pause("weights"))
                states.append([tag.state for tag in client.status().tags])

            client.pause("weights", progress=look)
            self.assertEqual(states[-1], ["active", "paused"])
            self.assertEqual(reports[0].unchanged, 1)
            client.resume()
            self.assertEqual(engine.ask("check"), "weights ok, cache there")

    def test_tags_have_policies_of_their_own(self) -> None:
        with Program("engine") as engine, vramctl.Client("engine") as client:
            report = client.pause({"kv_cache": "host", "weights": "default"})
            self.assertEqual((report.kept_bytes, report.discarded_bytes), (12 * MIB, 0))
            client.resume()
            self.assertEqual(engine.ask("check"), "weights ok, cache there")
            report = client.pause({"weights": "host", None: "discard"})
            self.assertEqual((report.kept_bytes, report.discarded_bytes), (8 * MIB, 4 * MIB))
            client.resume()
            self.assertEqual(engine.ask("check"), "weights ok, cache zero")
            with self.assertRaises(errors.UnknownTag):
                client.pause({"wieghts": "host"})
            with self.assertRaises(errors.Invalid):
                client._question("resume", "done", backups={"weights": "host"})
            # With None for all others, an unknown tag is not an error.
            self.assertEqual(client.pause({"lora": "host", None: "default"}).allocations, 2)

    def test_the_process_tag_is_set(self) -> None:
        with Program("engine"), vramctl.Client("engine") as client:
            self.assertEqual(client.set_tag("later"), "later")
            self.assertEqual(client.status().process_tag, "later")
            self.assertIsNone(client.set_tag(None))
            with self.assertRaises(errors.Invalid):
                client.set_tag("a,b")

    def test_processes_are_found_by_id_name_and_path(self) -> None:
        with Program("one") as one, Program("two") as two, Program("two") as again:
            self.assertEqual(
                {process.pid: process.name for process in vramctl.processes() if process.pid != os.getpid()},
                {one.pid: "one", two.pid: "two", again.pid: "two"},
            )
            for target in (one.pid, str(one.pid), "one", str(SOCKETS / f"{one.pid}.sock"), SOCKETS / f"{one.pid}.sock"):
                with vramctl.Client(target) as client:
                    self.assertEqual(client.hello().pid, one.pid)
            with self.assertRaises(errors.SeveralProcesses) as several:
                vramctl.Client("two")
            self.assertEqual(sorted(several.exception.pids), sorted([two.pid, again.pid]))
            with self.assertRaises(errors.SeveralProcesses):
                vramctl.Client()
            with self.assertRaises(errors.NoProcess) as none:
                vramctl.Client("three")
            self.assertIn(f"one (pid {one.pid})", str(none.exception))

    def test_a_name_may_have_a_slash(self) -> None:
        with Program("org/model") as model, vramctl.Client("org/model") as client:
            self.assertEqual(client.hello().pid, model.pid)
            with self.assertRaisesRegex(errors.NoProcess, "nothing listens at .*no/model"):
                vramctl.Client("no/model")

    def test_a_process_that_is_killed_leaves_a_socket_that_is_removed(self) -> None:
        with Program("engine") as engine:
            client = vramctl.Client(engine.pid)
            pid = engine.pid
        self.assertTrue((SOCKETS / f"{pid}.sock").exists())
        with self.assertRaises(errors.Disconnected):
            client.status()
        with self.assertRaises(errors.Disconnected):
            client.status()
        with self.assertRaises(errors.NoProcess) as gone:
            vramctl.Client(pid)
        self.assertIn(f"there is no process {pid}", str(gone.exception))
        self.assertNotIn(pid, [process.pid for process in vramctl.processes()])
        self.assertFalse((SOCKETS / f"{pid}.sock").exists())

    def test_a_stopped_process_does_not_keep_the_others_from_being_seen(self) -> None:
        with Program("awake") as awake, Program("asleep") as asleep:
            with asleep.stopped():
                found = {process.pid: process for process in vramctl.processes(patience=3)}
                self.assertEqual((found[awake.pid].name, found[awake.pid].error), ("awake", None))
                self.assertIsInstance(found[asleep.pid].error, TimeoutError)
                with vramctl.Client(asleep.pid, patience=0.3) as client, self.assertRaises(errors.Busy):
                    client.status()

    def test_a_name_is_not_looked_for_past_a_process_that_does_not_answer(self) -> None:
        """Otherwise, if an engine has several processes, those that answer would pass for the whole engine."""
        with Program("engine") as awake, Program("engine") as asleep:
            with asleep.stopped():
                with self.assertRaises(errors.Busy) as silent:
                    vramctl.Client("engine", patience=2)
                self.assertIn(f"process {asleep.pid} ", str(silent.exception))
                self.assertEqual(silent.exception.numbers, {"pids": [asleep.pid]})
                # The silent process is known to have another name.
                with self.assertRaises(errors.NoProcess):
                    vramctl.Client("other", patience=0.3)
                # An id is unambiguous.
                vramctl.Client(awake.pid).close()

    def test_a_stopped_process_without_a_name_has_that_of_its_program(self) -> None:
        with Program("engine") as engine, Program(None) as unnamed:
            program = Path(f"/proc/{unnamed.pid}/comm").read_text().strip()
            with unnamed.stopped():
                with vramctl.Client("engine", patience=2) as client:
                    self.assertEqual(client.hello().pid, engine.pid)
                with self.assertRaises(errors.Busy) as silent:
                    vramctl.Client(program, patience=0.3)
                self.assertIn(f"process {unnamed.pid} ", str(silent.exception))

    def test_a_process_whose_name_cannot_be_known_may_be_the_one_that_is_meant(self) -> None:
        # The address of its socket does not have the name, as if the name were too long.
        source = """
import os, signal, socket
listener = socket.socket(socket.AF_UNIX)
listener.bind(f"{os.environ['VRAMCTL_DIR']}/{os.getpid()}.sock")
listener.listen()
print("ready", flush=True)
signal.pause()
"""
        command = [sys.executable, "-c", source]
        with Program("engine"), subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as unnamed:
            try:
                assert unnamed.stdout is not None
                self.assertEqual(unnamed.stdout.readline(), "ready\n")
                with self.assertRaises(errors.Busy) as silent:
                    vramctl.Client("engine", patience=0.3)
                self.assertIn(f"process {unnamed.pid} ", str(silent.exception))
            finally:
                unnamed.kill()
                unnamed.wait()
                (SOCKETS / f"{unnamed.pid}.sock").unlink()

    def test_a_socket_may_be_named_by_its_pid_namespace(self) -> None:
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.dict(os.environ, VRAMCTL_DIR=folder),
            contextlib.ExitStack() as open_,
        ):
            for name in ("7-123.sock", "8.sock", "8-123.sock", "x-1.sock"):
                listener = open_.enter_context(socket.socket(socket.AF_UNIX))
                listener.bind(f"{folder}/{name}")
                listener.listen()
            self.assertEqual([process.pid for process in vramctl.processes(patience=0.1)], [7, 8])
            files = [vramctl.client._Place.of(pid).file for pid in (7, 8, 9)]
            self.assertEqual(files, ["7-123.sock", "8.sock", "9.sock"])

    def test_many_stale_sockets_cost_one_wait(self) -> None:
        stale = [SOCKETS / f"{number}.sock" for number in range(900_000_000, 900_000_200)]
        for path in stale:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(path))
        with mock.patch("time.sleep", wraps=time.sleep) as sleep:
            vramctl.processes()
        self.assertEqual(sleep.call_count, 1)
        self.assertFalse(any(path.exists() for path in stale))

    def test_threads_may_share_a_client(self) -> None:
        with Program("engine"), vramctl.Client("engine") as client:
            answers: list[str] = []
            threads = [
                threading.Thread(target=lambda: answers.extend(client.hello().name for _ in range(20))) for _ in range(4)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            self.assertEqual(answers, ["engine"] * 80)


#: A `hello` reply.
HELLO = {"protocol": 1, "library": "0", "pid": 1, "name": "pretended"}


class Pretended(unittest.TestCase):
    """Fake processes with scripted replies."""

    def serve(self, answer: Callable[[socket.socket, bytes], None]) -> Path:
        folder = tempfile.mkdtemp()
        self.addCleanup(os.rmdir, folder)
        os.chmod(folder, 0o700)
        path = Path(folder) / "1.sock"
        server = socket.socket(socket.AF_UNIX)
        server.bind(str(path))
        self.addCleanup(path.unlink)
        server.listen()
        self.addCleanup(server.close)

        def talk(connection: socket.socket) -> None:
            with connection, connection.makefile("rb") as lines:
                # A new client connects once without a request, to check that someone is listening.
                if line := lines.readline():
                    answer(connection, line)

        def work() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=talk, args=[server.accept()[0]], daemon=True).start()

        threading.Thread(target=work, daemon=True).start()
        return path

    def test_a_reply_without_an_end_is_refused(self) -> None:
        def answer(connection: socket.socket, line: bytes) -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection.sendall(b"a" * (1 << 20))

        with vramctl.Client(self.serve(answer), patience=None) as client:
            with self.assertRaisesRegex(errors.Internal, "it does not end"):
                client.hello()

    def test_what_it_asks_is_the_protocol(self) -> None:
        asked: list[Any] = []

        def answer(connection: socket.socket, line: bytes) -> None:
            asked.append(json.loads(line))
            connection.sendall(b'{"reply":"done","bytes":5,"later":"unknown fields are ignored"}\n')

        with vramctl.Client(self.serve(answer)) as client:
            for pause, wanted in [
                (lambda: client.pause(), {"hold_ms": 10000}),
                (lambda: client.pause(hold=False), {}),
                (lambda: client.pause(hold_timeout=0.5, timeout=9), {"timeout_ms": 9000, "hold_ms": 500}),
                (
                    lambda: client.pause("kv_cache", backup="discard", timeout=2.4999),
                    {"tags": ["kv_cache"], "backup": "discard", "timeout_ms": 2500, "hold_ms": 2500},
                ),
                (lambda: client.pause((tag for tag in "ab"), hold=False), {"tags": ["a", "b"]}),
                (lambda: client.pause("kv_cache", force=True, hold=False), {"tags": ["kv_cache"], "force": True}),
                (lambda: client.pause("kv_cache", guard=True, hold=False), {"tags": ["kv_cache"], "guard": True}),
                (
                    lambda: client.pause({"a": "host", "b": "default"}, hold=False),
                    {"tags": ["a", "b"], "backups": {"a": "host", "b": None}},
                ),
                (
                    lambda: client.pause({"a": "disk", None: "discard"}, hold=False),
                    {"backup": "discard", "backups": {"a": "disk"}},
                ),
                (lambda: client.pause(progress=lambda _: None, hold=False), {"progress": True}),
            ]:
                asked.clear()
                self.assertEqual(pause().bytes, 5)
                self.assertEqual(asked, [{"version": 1, "request": "pause", **wanted}])

    def test_the_refusal_to_drop_a_described_cache_is_an_error_of_its_own(self) -> None:
        refusal = b'{"reply":"error","code":"prefix_cache","message":"vllm still describes it"}\n'
        with vramctl.Client(self.serve(lambda connection, _: connection.sendall(refusal))) as client:
            with self.assertRaises(errors.PrefixCache) as refused:
                client.pause("kv_cache", backup="discard")
            self.assertEqual((refused.exception.number, str(refused.exception)), (14, "vllm still describes it"))

    def test_a_status_says_how_far_a_pause_is(self) -> None:
        saving = {"tag": "weights", "state": "pausing", "progress": {"stage": "save", "done": 1, "total": 2}}
        tags = [saving, {"tag": "kv_cache", "state": "active"}]
        reply = {"reply": "status", **HELLO, "tags": tags, "devices": [{"device": 0, "uuid": "GPU-1"}]}
        with vramctl.Client(self.serve(lambda it, _: it.sendall(json.dumps(reply).encode() + b"\n"))) as client:
            status = client.status()
        self.assertEqual([tag.progress for tag in status.tags], [vramctl.types.Progress("save", 1, 2), None])
        self.assertEqual([device.uuid for device in status.devices], ["GPU-1"])

    def test_a_process_that_takes_no_connections_is_busy(self) -> None:
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as waiting:
            path = Path(folder) / "1.sock"
            server = waiting.enter_context(socket.socket(socket.AF_UNIX))
            server.bind(str(path))
            server.listen(0)
            waiting.enter_context(socket.socket(socket.AF_UNIX)).connect(str(path))
            with self.assertRaises(errors.Busy):
                vramctl.Client(path)

    def test_nonsense_is_an_error(self) -> None:
        for reply, kind in [
            (b"[1]\n", errors.Internal),
            (b"\xff\n", errors.Internal),
            (b'{"reply":"tag"}\n', errors.Internal),
            (b'{"reply":"status"', errors.Disconnected),
            (b"", errors.Disconnected),
            (b'{"reply":"error","code":"of_the_future","message":"later"}\n', errors.Error),
        ]:
            with (
                self.subTest(reply),
                vramctl.Client(self.serve(lambda connection, _, reply=reply: connection.sendall(reply))) as client,
            ):
                with self.assertRaises(kind) as caught:
                    client.status()
                if kind is errors.Error:
                    self.assertEqual((caught.exception.code, str(caught.exception)), ("of_the_future", "later"))

    def test_a_late_answer_is_not_taken_for_the_next_one(self) -> None:
        late = threading.Event()
        self.addCleanup(late.set)

        def answer(connection: socket.socket, line: bytes) -> None:
            if b"status" in line:
                late.wait(10)
            with contextlib.suppress(OSError):
                connection.sendall(json.dumps({"reply": json.loads(line)["request"], **HELLO}).encode() + b"\n")

        with vramctl.Client(self.serve(answer), patience=1) as client:
            with self.assertRaises(errors.Busy):
                client.status()
            late.set()
            self.assertEqual(client.hello().name, "pretended")

    def test_an_answer_that_comes_just_before_the_end_is_an_answer(self) -> None:
        waits: list[socket.socket] = []
        end = threading.Event()
        self.addCleanup(end.set)

        def answer(connection: socket.socket, _: bytes) -> None:
            waits.append(connection)
            end.wait(60)

        def answers_and_ends(path: str) -> bool:
            if path != f"/proc/{os.getpid()}" or not waits:
                return os.path.lexists(path)
            waits.pop().sendall(json.dumps({"reply": "hello", **HELLO}).encode() + b"\n")
            return False

        with (
            vramctl.Client(self.serve(answer), patience=None) as client,
            mock.patch("vramctl.client._LOOK_AFTER", 0.1),
            mock.patch("os.path.exists", answers_and_ends),
        ):
            self.assertEqual(client.hello().name, "pretended")

    def test_a_process_may_hang_up_between_two_requests(self) -> None:
        """As it does to a client that is silent for 30 seconds."""

        def answer(connection: socket.socket, _: bytes) -> None:
            connection.sendall(json.dumps({"reply": "hello", **HELLO}).encode() + b"\n")

        with vramctl.Client(self.serve(answer)) as client:
            self.assertEqual([client.hello().name for _ in range(3)], ["pretended"] * 3)

    def test_an_exception_in_the_progress_callback_ends_its_connection_alone(self) -> None:
        hung_up = threading.Event()

        def answer(connection: socket.socket, line: bytes) -> None:
            if b"pause" in line:
                connection.sendall(b'{"reply":"progress","stage":"save","done":1,"total":2}\n')
                if connection.recv(1) == b"":
                    hung_up.set()
            else:
                connection.sendall(json.dumps({"reply": "status", **HELLO}).encode() + b"\n")

        def fail(now: vramctl.types.Progress) -> None:
            raise KeyError(now.stage)

        with vramctl.Client(self.serve(answer)) as client:
            with self.assertRaises(KeyError):
                client.pause(progress=fail)
            self.assertTrue(hung_up.wait(60))
            self.assertEqual(client.status().tags, ())

    def test_close_ends_what_is_under_way_and_what_comes_after(self) -> None:
        asked, end = threading.Event(), threading.Event()
        self.addCleanup(end.set)

        def answer(connection: socket.socket, _: bytes) -> None:
            asked.set()
            end.wait(60)

        client = vramctl.Client(self.serve(answer))
        ended: list[errors.Error] = []

        def resume() -> None:
            try:
                client.resume(timeout=None)
            except errors.Disconnected as error:
                ended.append(error)

        thread = threading.Thread(target=resume)
        thread.start()
        self.assertTrue(asked.wait(60))
        client.close()
        thread.join(60)
        self.assertEqual(len(ended), 1)
        with self.assertRaises(errors.Disconnected):
            client.hello()

    def test_another_process_that_got_the_id_is_not_taken_for_the_one_that_had_it(self) -> None:
        with vramctl.Client(self.serve(lambda *_: None)) as client:
            with mock.patch("vramctl.client._started", return_value="later"), self.assertRaises(errors.Disconnected):
                client.hello()

    def test_what_makes_no_sense_is_not_asked(self) -> None:
        with vramctl.Client(self.serve(lambda *_: None)) as client:
            for call in (
                lambda: client.pause([]),
                lambda: client.pause({}),
                lambda: client.pause({"weights": "host"}, backup="discard"),
                lambda: client.pause(timeout=-1),
                lambda: client.pause(registered="all"),
                lambda: client.resume(timeout=float("nan")),
            ):
                with self.assertRaises(errors.Invalid):
                    call()
            for call in (
                lambda: client.pause(backup="tape"),  # type: ignore[arg-type]
                lambda: client.pause({"weights": "tape"}),  # type: ignore[dict-item]
            ):
                with self.assertRaises(errors.Invalid) as wrong:
                    call()
                for policy in ("tape", "host", "disk", "discard"):
                    self.assertIn(repr(policy), str(wrong.exception))


class Places(unittest.TestCase):
    def setUp(self) -> None:
        place = tempfile.TemporaryDirectory()
        self.addCleanup(place.cleanup)
        self.place = Path(place.name)

    def look(self, **environment: str | None) -> Any:
        """Looks for processes with only these variables set."""
        without = {name: value for name, value in os.environ.items() if name not in ("VRAMCTL_DIR", "XDG_RUNTIME_DIR")}
        with mock.patch.dict(os.environ, {**without, **{k: v for k, v in environment.items() if v is not None}}, clear=True):
            return vramctl.processes()

    def test_an_unsafe_directory_is_refused(self) -> None:
        open_to_all = self.place / "open"
        open_to_all.mkdir()
        open_to_all.chmod(0o755)
        link = self.place / "link"
        link.symlink_to(SOCKETS)
        file = self.place / "file"
        file.touch()
        for path, why in [(open_to_all, "chmod 700"), (link, "symbolic link"), (file, "cannot be used")]:
            with self.assertRaises(errors.Invalid) as caught:
                self.look(VRAMCTL_DIR=str(path))
            self.assertIn(why, str(caught.exception))
        if os.geteuid() == 0:
            return  # root may use anyone's
        with self.assertRaises(errors.Invalid):
            self.look(VRAMCTL_DIR="/root")

    def test_another_user_s_directory_is_for_root_alone(self) -> None:
        with mock.patch("os.geteuid", return_value=os.geteuid() + 1):
            with self.assertRaises(errors.Invalid) as caught:
                self.look(VRAMCTL_DIR=str(SOCKETS))
        self.assertIn("not by you", str(caught.exception))

    @unittest.skipUnless(os.geteuid() == 0, "not run: only root can start a process of another user")
    def test_a_socket_of_another_user_in_it_is_not_talked_to(self) -> None:
        os.chmod(self.place, 0o700)
        source = f"""
import os, socket, time
server = socket.socket(socket.AF_UNIX)
server.bind({str(self.place / "7.sock")!r})
os.setuid(65534)
server.listen()
print("ready", flush=True)
time.sleep(60)
"""
        with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True) as other:
            try:
                assert other.stdout is not None
                self.assertEqual(other.stdout.readline(), "ready\n")
                with self.assertRaises(errors.Invalid) as caught:
                    vramctl.Client(self.place / "7.sock")
                self.assertIn("user 65534 answers there", str(caught.exception))
            finally:
                other.kill()

    def test_where_it_looks_is_where_the_library_listens(self) -> None:
        self.assertEqual(self.look(VRAMCTL_DIR=str(self.place / "nowhere")), [])
        runtime = self.place / "runtime"
        (runtime / "vramctl").mkdir(parents=True)
        (runtime / "vramctl").chmod(0o700)
        with Program("engine", VRAMCTL_DIR="", XDG_RUNTIME_DIR=str(runtime)) as engine:
            found = self.look(VRAMCTL_DIR="", XDG_RUNTIME_DIR=str(runtime))
            self.assertEqual([process.pid for process in found], [engine.pid])

    def test_the_path_of_the_directory_may_be_long(self) -> None:
        deep = self.place / ("d" * 100) / ("e" * 100)
        deep.mkdir(parents=True)
        deep.chmod(0o700)
        with Program("engine", VRAMCTL_DIR=str(deep)) as engine, vramctl.Client(deep / f"{engine.pid}.sock") as client:
            self.assertEqual(client.hello().name, "engine")

    def test_hold_is_true_or_false(self) -> None:
        for wrong in (None, 2.5, "yes"):
            with self.assertRaisesRegex(errors.Invalid, "hold_timeout is a number of seconds"):
                _request.held(wrong)

    def test_the_way_out_is_said_where_nothing_is_managed(self) -> None:
        source = "import vramctl; vramctl.Client()"
        ran = bare(
            [sys.executable, "-c", source], PYTHONPATH=str(Path(vramctl.__file__).parents[1]), VRAMCTL_DIR=str(self.place / "x")
        )
        self.assertIn("vramctl run -- COMMAND", ran.stderr)


if __name__ == "__main__":
    unittest.main()
