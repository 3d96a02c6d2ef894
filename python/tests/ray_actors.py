"""A program on Ray, as those of verl are: a driver whose work is done by actors in a placement group, one for each GPU.

Run by test_ray.py, since a process chooses once whether it has a token. It starts its own nodes as docs/many-nodes.md says, with Ray's token
authentication. Then actors start again, nodes come and go, and another job is on the same nodes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))

import ray  # type: ignore[import-not-found]  # noqa: E402
from ray.util.placement_group import placement_group  # type: ignore[import-not-found]  # noqa: E402
from ray.util.scheduling_strategies import (  # type: ignore[import-not-found]  # noqa: E402
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

import vramctl.ray  # noqa: E402
from support import VRAMCTL, eventually, free_ports  # noqa: E402
from vramctl import errors  # noqa: E402

BYTES = 4 << 20


class Worker:
    """Has memory on a GPU."""

    def __init__(self) -> None:
        ctypes.CDLL("libcudart.so.13", mode=ctypes.RTLD_GLOBAL)
        self._cuda, self._at = ctypes.CDLL(None), ctypes.c_void_p()
        assert self._cuda.cudaMalloc(ctypes.byref(self._at), ctypes.c_size_t(BYTES)) == 0
        assert self._cuda.cudaMemset(self._at, 7, ctypes.c_size_t(BYTES)) == 0

    def pid(self) -> int:
        return os.getpid()

    def is_intact(self) -> bool:
        found = ctypes.create_string_buffer(BYTES)
        return self._cuda.cudaMemcpy(found, self._at, ctypes.c_size_t(BYTES), 2) == 0 and found.raw == b"\7" * BYTES


class Nodes:
    """Of the cluster."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (port,) = free_ports(1)
        self.address = f"127.0.0.1:{port}"
        self._started: list[subprocess.Popen[bytes]] = []
        self.start("--head", f"--port={port}", "--include-dashboard=false")
        eventually("the head is there", self._connect)

    def start(self, *arguments: str, under: tuple[str, ...] = (VRAMCTL, "run", "--name", "engine", "--")) -> int:
        """Returns the number of nodes then."""
        count = len(self._started) + 1
        sockets = self._folder / f"node-{count}"
        sockets.mkdir(mode=0o700)
        start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
        more = ["--node-ip-address=127.0.0.1", "--num-cpus=1", "--num-gpus=2", "--object-store-memory=80000000"]
        environment = {**os.environ, "VRAMCTL_DIR": str(sockets)}
        with open(self._folder / f"node-{count}.log", "w") as log:
            command = [*under, *start, *more, *(arguments or [f"--address={self.address}"])]
            self._started.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment))
        return count

    def _connect(self) -> bool:
        with contextlib.suppress(ConnectionError, RuntimeError):
            ray.init(address=self.address, log_to_driver=False, logging_level="ERROR")
        return bool(ray.is_initialized())

    def alive(self) -> list[str]:
        return [node["NodeID"] for node in ray.nodes() if node["Alive"]]

    def stop_last(self) -> None:
        node = self._started.pop()
        node.terminate()
        node.wait()

    def close(self) -> None:
        with contextlib.suppress(Exception):
            ray.shutdown()
        while self._started:
            self.stop_last()


def refused(job: Any, *words: str) -> None:
    """Nothing is paused, and the ranks are named."""
    try:
        job.pause()
    except errors.NoProcess as error:
        assert all(word in str(error) for word in words) and error.committed is False, error
        print("refused:", error, flush=True)
        assert {tag.state for status in job.status().values() for tag in status.tags} == {"active"}
        return
    raise AssertionError("it was paused")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="vramctl-actors-") as name, contextlib.ExitStack() as stack:
        nodes = Nodes(Path(name))
        stack.callback(nodes.close)
        count = nodes.start()
        eventually("two nodes", lambda: len(nodes.alive()) == count)
        first, second = nodes.alive()
        actor = ray.remote(Worker)

        group = placement_group([{"GPU": 1}] * 2, strategy="STRICT_SPREAD")
        ray.get(group.ready())
        workers = [
            actor.options(
                num_cpus=0,
                num_gpus=1,
                max_restarts=-1,
                max_task_retries=-1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, place),
            ).remote()
            for place in range(2)
        ]
        # Another job on the same nodes.
        critic = actor.options(num_cpus=0, num_gpus=1, runtime_env={"env_vars": {"VRAMCTL_NAME": "critic"}}).remote()
        ray.get([worker.pid.remote() for worker in [*workers, critic]])

        job, other = vramctl.ray.Job("engine"), vramctl.ray.Job("critic")
        with job.paused() as report:
            assert {rank.node for rank in report.processes} == {first, second} and len(report.processes) == 2, report
            assert ray.get(critic.is_intact.remote())
            with other.paused() as beside:
                assert len(beside.processes) == 1, beside
        assert all(ray.get([worker.is_intact.remote() for worker in [*workers, critic]]))
        print("a placement group's actors are paused and resumed, beside another job", flush=True)

        before = ray.get(workers[0].pid.remote())
        os.kill(before, signal.SIGKILL)
        after = ray.get(workers[0].pid.remote())
        refused(job, f"missing: process {before}", f"new: process {after}")
        with vramctl.ray.Job("engine", ranks=2).paused():
            pass
        with job.paused() as report:
            assert len(report.processes) == 2
        print("an actor has started again", flush=True)

        # A node without vramctl comes. Its actor brings the library itself.
        count = nodes.start(under=())
        eventually("three nodes", lambda: len(nodes.alive()) == count)
        (third,) = set(nodes.alive()) - {first, second}
        library = {"LD_PRELOAD": os.environ["VRAMCTL_LIB"], "VRAMCTL_NAME": "engine"}
        late = actor.options(
            num_cpus=0,
            num_gpus=1,
            runtime_env={"env_vars": library},
            scheduling_strategy=NodeAffinitySchedulingStrategy(third, soft=False),
        ).remote()
        refused(job, f"new: process {ray.get(late.pid.remote())} of node {third}")
        with vramctl.ray.Job("engine", ranks=3).paused() as report:
            assert len(report.processes) == 3, report
        assert ray.get(late.is_intact.remote())
        pid = ray.get(late.pid.remote())
        nodes.stop_last()
        eventually("the node is gone", lambda: len(nodes.alive()) == count - 1)
        refused(job, f"missing: process {pid} of node {third}")
        with vramctl.ray.Job("engine", ranks=2).paused():
            time.sleep(0.1)
        assert all(ray.get([worker.is_intact.remote() for worker in workers]))
        print("nodes have come and gone", flush=True)


if __name__ == "__main__":
    main()
