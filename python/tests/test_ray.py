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
from pathlib import Path
from typing import Any, Callable

from support import ROOT, VRAMCTL, eventually

#: The version that the tests run with.
RAY = "ray==2.60.0"
ROUNDS = int(os.environ.get("RAY_ROUNDS", "0"))
NODES, RANKS = 4, 8


def python_with_ray() -> str | None:
    """Of an environment in target/, with Ray if it can be installed."""
    folder = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "python-ray"
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


class RayCluster:
    """Four nodes, and a job of eight ranks on them."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="vramctl-ray-")
        self.places = [Path(self.folder.name, f"node-{place}") for place in range(NODES)]
        apps = Path(self.folder.name, "apps")
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
                env={**os.environ, "VRAMCTL_DIR": str(self.places[place]), "VRAMCTL_JOB": "ring", "SIMGPU_OP_DELAY_MS": "20"},
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
        cls.cluster = RayCluster()
        ray.init(address=cls.cluster.cluster.address, log_to_driver=False, logging_level="ERROR")

    @classmethod
    def tearDownClass(cls) -> None:
        cls.cluster.close()

    def setUp(self) -> None:
        self.cluster.start_ranks(random.randrange(1, 1 << 30))
        self.job = vramctl.ray.Job("ring", ranks=RANKS)

    def test_a_job_is_paused_and_resumed_as_one(self) -> None:
        attempts, times = [], []
        for _ in range(ROUNDS or 3):
            time.sleep(random.uniform(0, 0.3))
            paused = self.job.pause(hold=60)
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
        print(f"{len(times)} pauses of {RANKS} ranks on {NODES} nodes: attempts {sorted(attempts)}, ms {[round(ms) for ms in sorted(times)]}")


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
