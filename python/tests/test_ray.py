"""Jobs over the nodes of a Ray cluster: four nodes on this machine, each with a socket directory of its own, and eight ranks in collectives on
the simulated GPU.

The machine's processes die here. ``RAY_ROUNDS=100`` pauses and resumes that often, at random moments, and kills at every step.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import unittest.mock
from pathlib import Path
from typing import Any, Callable

from support import ROOT, VRAMCTL, eventually

#: The version that the tests run with.
RAY = "ray==2.60.0"
ROUNDS = int(os.environ.get("RAY_ROUNDS", "0"))
NODES, RANKS = 4, 8


def python_with_ray() -> str | None:
    """Of an environment in target/, with Ray if it can be installed."""
    folder = (
        Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
        / f"python-ray-{sys.version_info.major}.{sys.version_info.minor}"
    )
    done, python = folder / "installed", folder / "bin" / "python3"
    if not done.exists() or done.read_text() != RAY:
        plain = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "PYTHONPATH")}
        for command in ([sys.executable, "-m", "venv", "--clear", folder], [python, "-m", "pip", "install", "--quiet", RAY]):
            if subprocess.run(command, env=plain, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode != 0:
                return None
        done.write_text(RAY)
    return str(python)


try:
    import ray
    from ray.cluster_utils import Cluster

    import vramctl.ray
    from vramctl import errors
except ImportError:
    ray = None


#: The steps of a pause at which something may happen: what the coordinator is about to tell, for which time, to how many nodes before.
STEPS = [
    ("begin", 0, 0),
    ("begin", 0, 2),
    ("go", 0, 0),
    ("go", 1, 2),
    ("go", 2, 0),
    ("go", 2, 2),
    ("before the record", 0, 0),
    ("after the record", 0, 0),
    ("commit", 0, 2),
]


def arm(step: tuple[str, int, int], act: Callable[[], Any]) -> Callable[[], None]:
    """Has something happen once, at a step of the next operation of this process. Returns what disarms it."""
    say, put_once = vramctl.ray._Nodes.say, vramctl.ray._Store.put_once
    counts: dict[str, int] = {}
    acted: list[bool] = []

    def reach(word: str) -> None:
        count = counts[word] = counts.get(word, -1) + 1
        if (word, *divmod(count, NODES)) == step and not acted:
            acted.append(True)
            act()

    def watched_say(self: Any, said: Any, name: str, answered: Any) -> None:
        word = said["word"] or "begin"
        if word in ("begin", "go", "commit"):
            reach(word)
        say(self, said, name, answered)

    def watched_put_once(self: Any, key: str, value: bytes) -> bytes:
        reach("before the record")
        answer = put_once(self, key, value)
        reach("after the record")
        return answer

    def disarm() -> None:
        vramctl.ray._Nodes.say, vramctl.ray._Store.put_once = say, put_once

    vramctl.ray._Nodes.say, vramctl.ray._Store.put_once = watched_say, watched_put_once
    return disarm


#: A driver that is killed at a step.
DRIVER = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT / "python/tests")!r})
import test_ray, vramctl.ray
test_ray.arm(eval(sys.argv[2]), lambda: os.kill(os.getpid(), signal.SIGKILL))
job = vramctl.ray.Job("ring", ranks=test_ray.RANKS)
getattr(job, sys.argv[1])(**({{"hold_timeout": 300}} if sys.argv[1] == "pause" else {{}}))
"""


class RayCluster:
    """Four nodes, and a job of eight ranks on them."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="vramctl-ray-")
        self.places = [Path(self.folder.name, f"node-{place}") for place in range(NODES)]
        # Where Rust's tests have them, too.
        apps = Path(VRAMCTL).parent / "apps"
        libraries = os.environ["LD_LIBRARY_PATH"].split(":")[0]
        subprocess.run([ROOT / "tests/apps/build.sh", apps, libraries], check=True, capture_output=True)
        self.torture = apps / "torture"
        for place in self.places:
            place.mkdir(mode=0o700)
        self.cluster = Cluster()
        self.nodes = [self.start(place) for place in range(NODES)]
        self.cluster.wait_for_nodes()
        self.ranks: list[Any] = []

    def start(self, place: int) -> Any:
        node = self.cluster.add_node(
            num_cpus=1,
            object_store_memory=80 << 20,
            env_vars={"VRAMCTL_DIR": str(self.places[place])},
            **({"include_dashboard": False} if place == 0 else {}),
        )
        return node

    def start_ranks(self, communicator: int) -> None:
        self.stop_ranks()
        for rank in range(RANKS):
            place = rank * NODES // RANKS
            command = [VRAMCTL, "run", "--name", "ring", "--no-python", "--", self.torture, "rank"]
            child = subprocess.Popen(
                [*command, str(communicator), str(rank), str(RANKS)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env={**os.environ, "VRAMCTL_DIR": str(self.places[place]), "VRAMCTL_JOB": "ring", "SIMGPU_OP_DELAY_MS": "50"},
            )
            assert child.stdout is not None and child.stdout.readline().startswith("ready")
            self.ranks.append(child)

    def stop_ranks(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.communicate()
        self.ranks = []

    def ask(self, rank: int, line: str) -> str:
        child = self.ranks[rank]
        child.stdin.write(line + "\n")
        child.stdin.flush()
        return str(child.stdout.readline()).strip()

    def rounds(self) -> list[int]:
        return [int(self.ask(rank, "progress").split()[0]) for rank in range(len(self.ranks))]

    def states(self) -> list[str]:
        """Of all ranks, without Ray."""
        states = []
        for place in self.places:
            ran = subprocess.run(
                [VRAMCTL, "status", "--json"], env={**os.environ, "VRAMCTL_DIR": str(place)}, capture_output=True, text=True
            )
            if ran.returncode != 0:
                continue
            for process in json.loads(ran.stdout)["processes"]:
                tags = {tag["state"] for tag in process.get("tags", [])}
                states.append(f"{'/'.join(sorted(tags))}{', held' if process.get('held') else ''}")
        return states

    def settled(self, ranks: int = RANKS) -> str:
        """The state that all have in the end."""
        found: list[str] = []

        def are_one() -> bool:
            found[:] = self.states()
            return len(found) == ranks and set(found) in ({"active"}, {"paused, held"})

        try:
            eventually("all ranks in one state", are_one)
        except AssertionError as error:
            raise AssertionError(f"{error}: {found}") from None
        return found[0]

    def go_on(self) -> None:
        """All ranks compute, together."""
        before = self.rounds()
        eventually("all ranks go on", lambda: all(now > then for now, then in zip(self.rounds(), before)))

    def processes(self, place: int, *words: str) -> list[int]:
        """Of a node, those whose command line has these words."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                there = f"VRAMCTL_DIR={self.places[place]}".encode() in (folder / "environ").read_bytes().split(b"\0")
                if there and all(word in line for word in words):
                    found.append(int(folder.name))
        return found

    def signal(self, number: int, place: int, *words: str) -> None:
        for pid in self.processes(place, *words):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def close(self) -> None:
        self.stop_ranks()
        with contextlib.suppress(Exception):
            ray.shutdown()
        self.cluster.shutdown()
        self.folder.cleanup()


@unittest.skipIf(ray is None, "Ray is not there")
class ManyNodes(unittest.TestCase):
    cluster: RayCluster

    @classmethod
    def setUpClass(cls) -> None:
        try:
            cls.cluster = RayCluster()
            ray.init(address=cls.cluster.cluster.address, log_to_driver=False, logging_level="ERROR")
        except (RuntimeError, TimeoutError, ConnectionError, OSError) as error:
            # A machine that has no room or ports for it.
            raise unittest.SkipTest(f"not run: Ray does not start four nodes here: {error}") from None

    @classmethod
    def tearDownClass(cls) -> None:
        cls.cluster.close()

    def setUp(self) -> None:
        self.cluster.start_ranks(random.randrange(1, 1 << 30))
        self.job = vramctl.ray.Job("ring", ranks=RANKS)

    def test_a_job_is_paused_and_resumed_as_one(self) -> None:
        attempts, times = [], []
        for _ in range(ROUNDS or 2):
            time.sleep(random.uniform(0, 0.3))
            paused = self.job.pause(hold_timeout=300)
            self.assertEqual(len(paused.processes), RANKS)
            self.assertEqual(len({rank.node for rank in paused.processes}), NODES)
            attempts.append(paused.attempts)
            times.append(paused.ms)
            self.assertEqual(set(self.cluster.states()), {"paused, held"})
            self.job.resume(timeout=30)
            self.assertEqual(set(self.cluster.states()), {"active"})
        self.cluster.go_on()
        for rank in range(RANKS):
            self.assertIn("ok", self.cluster.ask(rank, "verify"))
        print(
            f"{len(times)} pauses of {RANKS} ranks on {NODES} nodes: attempts {sorted(attempts)}, ms {[round(ms) for ms in sorted(times)]}"
        )

    def all_or_none(self, what: Any, *expected: str) -> None:
        """After a fault: all ranks are in one state, and come back."""
        with self.subTest(what):
            state = self.cluster.settled()
            if expected:
                self.assertIn(state, expected)
            eventually("they are resumed", self.is_resumed)
            self.assertEqual(self.cluster.settled(), "active")
            self.cluster.go_on()

    def is_resumed(self) -> bool:
        with contextlib.suppress(errors.Error):
            self.job.resume(timeout=30)
            return True
        return False

    def during(self, operation: str, step: tuple[str, int, int], act: Callable[[], Any]) -> str:
        """An operation, at a step of which something happens."""
        disarm = arm(step, act)
        try:
            self.job.pause(hold_timeout=300) if operation == "pause" else self.job.resume(timeout=30)
            return "done"
        except errors.Error as error:
            return f"{error.code}, {error.committed}"
        finally:
            disarm()

    def chosen(self, few: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
        return STEPS if ROUNDS else few

    def test_the_driver_dies_at_every_step(self) -> None:
        for step in self.chosen([("after the record", 0, 0)]):
            command = [sys.executable, "-c", DRIVER, "pause", repr(step)]
            driver = subprocess.run(
                command, env={**os.environ, "RAY_ADDRESS": self.cluster.cluster.address}, capture_output=True
            )
            self.assertEqual(driver.returncode, -signal.SIGKILL, driver.stderr.decode())
            is_decided = step[0] in ("after the record", "commit")
            self.all_or_none(step, "paused, held" if is_decided else "active")

    def test_an_agent_or_participant_dies_at_every_step(self) -> None:
        for words in (["ray::_Agent"], ["operate"]):
            for step in self.chosen([("go", 1, 2)] if words == ["operate"] else [("after the record", 0, 0)]):
                said = self.during("pause", step, lambda words=words: self.cluster.signal(signal.SIGKILL, 1, *words))
                self.all_or_none((words, step, said))

    def test_two_operations_at_once_do_not_split_it(self) -> None:
        for _ in range(ROUNDS // 10 or 1):
            said: list[Any] = []

            def pause(said: list[Any] = said) -> None:
                try:
                    said.append(vramctl.ray.Job("ring", ranks=RANKS).pause(hold_timeout=300).attempts)
                except errors.Error as error:
                    said.append(error.code)

            both = [threading.Thread(target=pause) for _ in range(2)]
            for thread in both:
                thread.start()
            for thread in both:
                thread.join()
            self.all_or_none(said, "paused, held")

    def test_a_rank_that_is_missing_is_named_and_nothing_is_paused(self) -> None:
        job = vramctl.ray.Job("ring")
        job.pause(hold_timeout=300)
        job.resume(timeout=30)
        self.cluster.ranks[5].kill()
        self.cluster.ranks[5].wait()
        with self.assertRaisesRegex(errors.NoProcess, f"missing: process {self.cluster.ranks[5].pid} of node") as raised:
            job.pause(hold_timeout=1)
        self.assertIs(raised.exception.committed, False)
        self.assertEqual(self.cluster.settled(RANKS - 1), "active")

    def test_it_leaves_its_gpus_and_comes_back(self) -> None:
        for change in (lambda: self.job.suspend(hold_timeout=300), lambda: self.job.move([1], hold_timeout=300)):
            reports = change()
            self.assertTrue(all("checkpoint" in report.stages for report in reports.values()), reports)
            self.assertEqual((len(reports), len({rank.node for rank in reports})), (RANKS, NODES))
            self.job.resume(timeout=30)
            self.assertEqual(self.cluster.settled(), "active")
            self.cluster.go_on()
        for rank in range(RANKS):
            self.assertIn("ok", self.cluster.ask(rank, "verify"))

    def test_a_suspend_is_done_once(self) -> None:
        for _ in range(2):
            self.assertEqual(len(self.job.suspend(hold_timeout=300)), RANKS)
        self.job.resume(timeout=30)
        self.assertEqual(self.cluster.settled(), "active")
        with self.assertRaises(errors.Unsupported):
            vramctl.swap(self.job, vramctl.ray.Job("other"))

    def test_a_move_that_cannot_be_done_leaves_the_job_running(self) -> None:
        ask_all = vramctl.ray._Nodes.ask_all

        def too_late(nodes: Any, request: Any) -> Any:
            """What a dry run does not see."""
            is_real = request["operation"] == "move" and not request.get("dry_run")
            return ask_all(nodes, {**request, "to": ["9"]} if is_real else request)

        for change, to, said in (
            (ask_all, 9, "no GPU 9"),
            (ask_all, 0, "GPU 0 already"),
            (too_late, 1, "no GPU 9.*All of them run"),
        ):
            with self.subTest(to=to), unittest.mock.patch.object(vramctl.ray._Nodes, "ask_all", change):
                with self.assertRaisesRegex(errors.Error, said) as refused:
                    self.job.move(to, hold_timeout=300)
                self.assertIs(refused.exception.committed, False)
                self.assertEqual(self.cluster.settled(), "active")
        self.cluster.go_on()

    def test_from_the_shell_of_a_node(self) -> None:
        def shell(*words: str) -> Any:
            # Its Python comes first on PATH, as in an environment that is active.
            path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            command = [VRAMCTL, "ray", *words]
            environment = {**os.environ, "RAY_ADDRESS": self.cluster.cluster.address, "PATH": path}
            return subprocess.run(command, env=environment, capture_output=True, text=True)

        ran = shell("pause", "ring", "--hold-timeout", "300", "--json")
        told = json.loads(ran.stdout)
        self.assertEqual(len({(one["node"], one["pid"]) for one in told["processes"]}), RANKS, ran.stderr)
        self.assertTrue(all(one["name"] == "ring" and one["report"]["bytes"] > 0 for one in told["processes"]), told)
        self.assertEqual([(job["job"], job["committed"]) for job in told["jobs"]], [("ring", True)])
        told = json.loads(shell("status", "ring", "--json").stdout)
        self.assertEqual({tag["state"] for one in told["processes"] for tag in one["tags"]}, {"paused"})
        self.assertIn("paused", shell("status", "ring").stdout)
        self.assertIn("checkpoint", shell("suspend", "ring").stdout)
        self.assertEqual(shell("status", "ring").stdout.count("suspended"), RANKS)
        self.job.resume(timeout=30)
        nobody = shell("pause", "nobody")
        self.assertEqual((nobody.returncode, "no process of the job" in nobody.stderr), (3, True), nobody.stderr)
        nobody = shell("pause", "nobody", "--json")
        told = json.loads(nobody.stdout)
        self.assertEqual((nobody.returncode, told["processes"], told["error"]["code"]), (3, [], "no_process"), nobody.stderr)

    def test_records_of_failed_operations_expire(self) -> None:
        store, key = vramctl.ray._Store(), f"{os.getuid()}/ring/record-"
        old, new = (f"{key}{int(time.time()) - ago}-0/1" for ago in (3600, 60))
        for record in (old, new):
            store.put_once(record, b"abort")
        self.job.pause(hold_timeout=300)
        self.job.resume(timeout=30)
        self.assertIsNone(store.get(old))
        self.assertEqual(store.get(new), b"abort")
        store.delete(new)


@unittest.skipIf(ray is None, "Ray is not there")
@unittest.skipUnless(ROUNDS, "RAY_ROUNDS: it takes a while")
class Lost(unittest.TestCase):
    """A raylet, a node or the head dies. The ranks of these tests are not Ray's, and outlive their raylet."""

    def setUp(self) -> None:
        self.cluster = RayCluster()
        ray.init(address=self.cluster.cluster.address, log_to_driver=False, logging_level="ERROR")
        self.cluster.start_ranks(random.randrange(1, 1 << 30))

    def tearDown(self) -> None:
        self.cluster.close()

    def lose(self, step: tuple[str, int, int], lost: Callable[[], None]) -> tuple[str, bool | None]:
        """A node dies at a step of a pause. Returns what the pause says, and whether the job is paused by that."""
        disarm = arm(step, lost)
        try:
            said = f"attempts: {vramctl.ray.Job('ring').pause(hold_timeout=30).attempts}"
            # The node's agent has answered in its last moments.
            return said, True
        except errors.Error as error:
            return f"{error.code}, {error.committed}: {error}", error.committed
        finally:
            disarm()

    def test_a_raylet_is_lost(self) -> None:
        for step, is_decided in ((("go", 2, 2), False), (("after the record", 0, 0), True)):
            with self.subTest(step):
                node = self.cluster.nodes[1]
                said, paused = self.lose(step, lambda node=node: self.cluster.cluster.remove_node(node, allow_graceful=False))
                print(step, "a raylet was lost:", said, self.cluster.states())
                # The node's participant outlives the agent, and reads the record.
                self.assertEqual(self.cluster.settled(), "paused, held" if paused else "active", said)
                self.assertTrue(paused or not is_decided, said)
                self.cluster.nodes[1] = self.cluster.start(1)
                self.cluster.cluster.wait_for_nodes()
                job = vramctl.ray.Job("ring", ranks=RANKS)
                job.resume(timeout=30)
                self.assertEqual(self.cluster.settled(), "active")
                self.cluster.go_on()

    def test_a_node_is_lost_with_its_ranks(self) -> None:
        left = RANKS - RANKS // NODES

        def lose(node: Any) -> None:
            for rank in self.cluster.ranks[RANKS // NODES : 2 * RANKS // NODES]:
                rank.kill()
            self.cluster.signal(signal.SIGKILL, 1, "operate")
            self.cluster.cluster.remove_node(node, allow_graceful=False)

        for step, is_decided in ((("go", 2, 2), False), (("after the record", 0, 0), True)):
            with self.subTest(step):
                lost = self.cluster.nodes[1]
                said, paused = self.lose(step, lambda lost=lost: lose(lost))
                print(step, "a node was lost:", said, self.cluster.states())
                self.assertIs(paused, is_decided, said)
                self.assertIn(lost.node_id, said)
                self.assertEqual(self.cluster.settled(left), "paused, held" if paused else "active", said)
                job = vramctl.ray.Job("ring", ranks=left)
                job.resume(timeout=30)
                self.assertEqual(self.cluster.settled(left), "active")
                self.cluster.nodes[1] = self.cluster.start(1)
                self.cluster.cluster.wait_for_nodes()
                self.cluster.start_ranks(random.randrange(1, 1 << 30))

    def test_the_head_is_lost(self) -> None:
        # Ray ends a program whose head has been lost for a minute.
        ray.shutdown()
        command = [
            sys.executable,
            "-c",
            HEADLESS.format(gcs=[self.cluster.nodes[0].all_processes["gcs_server"][0].process.pid]),
        ]
        environment = {**os.environ, "RAY_ADDRESS": self.cluster.cluster.address}
        driver = subprocess.run(command, env=environment, capture_output=True, text=True)
        print("the head was lost:", driver.returncode, driver.stdout, driver.stderr[-500:])
        self.assertEqual(self.cluster.settled(), "active")
        self.cluster.go_on()


@unittest.skipIf(ray is None, "Ray is not there")
class Behind(unittest.TestCase):
    """A node could not do what was decided."""

    def settle(self, operation: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """What comes of it if a node is behind at the first attempt, and what the nodes were asked."""
        behind = {"committed": True, "behind": ["a node"], "error": {"message": "one is late"}}
        coordinate = unittest.mock.Mock(side_effect=[behind, {"committed": True}])
        request = {"operation": operation, "target": {"name": "ring"}, "tags": ["weights"]}
        outcome = vramctl.ray._Operation._settle(unittest.mock.Mock(_coordinate=coordinate), unittest.mock.Mock(), request)
        return outcome, [call.args[1] for call in coordinate.call_args_list]

    def test_a_pause_is_undone_but_for_what_the_job_had_paused_itself(self) -> None:
        outcome, (_, back) = self.settle("pause")
        self.assertEqual((back["operation"], back["tags"], back["self_paused"]), ("resume", ["weights"], False))
        self.assertIs(outcome["committed"], False)
        self.assertEqual(outcome["error"]["message"], "one is late. So all of them were resumed")

    def test_a_resume_is_asked_for_again_as_it_was(self) -> None:
        outcome, (_, again) = self.settle("resume")
        self.assertEqual((again["operation"], again["tags"]), ("resume", ["weights"]))
        self.assertNotIn("self_paused", again)
        self.assertEqual(outcome, {"committed": True})


@unittest.skipIf(ray is None, "Ray is not there")
@unittest.skipUnless(ROUNDS, "RAY_ROUNDS: it takes a while")
class Actors(unittest.TestCase):
    """Ranks that Ray itself starts."""

    def test_they_start_again_and_nodes_come_and_go(self) -> None:
        ran = subprocess.run([sys.executable, ROOT / "python/tests/ray_actors.py"], capture_output=True, text=True)
        print(ran.stdout)
        self.assertEqual(ran.returncode, 0, ran.stderr[-3000:])


#: A driver whose head dies before the record is set.
HEADLESS = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT / "python/tests")!r})
import test_ray, vramctl.ray
test_ray.arm(("before the record", 0, 0), lambda: [os.kill(pid, signal.SIGKILL) for pid in {{gcs}}])
try:
    print(vramctl.ray.Job("ring", ranks=test_ray.RANKS).pause(hold_timeout=300))
except vramctl.errors.Error as error:
    print(error.code, error.committed, error)
"""


if __name__ == "__main__":
    if ray is None and "RAY_IS_HERE" not in os.environ:
        python = python_with_ray()
        if python is None:
            print(f"not run: jobs over the nodes of a Ray cluster, because {RAY} cannot be installed", file=sys.stderr)
        else:
            # The tests' own process needs no library.
            os.environ.pop("LD_PRELOAD", None)
            os.environ["RAY_IS_HERE"] = "1"
            os.execv(python, [python, *sys.argv])
    unittest.main()
