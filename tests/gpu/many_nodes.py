"""On two GPUs, a Ray cluster of two nodes on this host with one GPU each, and DistributedDataParallel over both, whose ranks reach each other by
sockets as on two hosts: paused through vramctl.ray in the middle of its work, and suspended. Its losses are those of an undisturbed run, bit for
bit.

usage: many_nodes.py VRAMCTL [PAUSES [SUSPENDS]]   10 pauses and 3 suspends. $GPU_CHECK_RAY_DIR: a folder with Ray, if Python does not find it
"""

import contextlib
import json
import os
import pathlib
import random
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

from common import check, free_port, used_mib

ROOT = pathlib.Path(__file__).resolve().parents[2]
#: Seconds of undisturbed work in one run.
WORK = 3
#: Of contexts, NCCL and Ray's own, when all tags are paused, at most; and beside a suspended job.
PAUSED_MIB, IDLE_MIB = 4096, 8
#: How long the cluster and the ranks may take to start.
START_WITHIN = 60
SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo", "NCCL_NVLS_ENABLE": "0"}


def installed(folder, vramctl):
    """The package beside the command line that is being checked, as an installation has them."""
    (folder / "bin").symlink_to(pathlib.Path(vramctl).resolve().parent)
    shutil.copytree(ROOT / "python/vramctl", folder / "vramctl", ignore=shutil.ignore_patterns("dropin", "__pycache__"))
    ray = os.environ.get("GPU_CHECK_RAY_DIR")
    return [str(folder), *([str(pathlib.Path(ray).resolve(strict=True))] if ray else [])]


def start_node(vramctl, folder, place, paths, *arguments):
    """One of Ray's nodes, with a GPU and a socket directory of its own."""
    sockets = folder / f"node-{place}"
    sockets.mkdir(mode=0o700)
    environment = {
        **os.environ,
        **SOCKETS,
        "VRAMCTL_DIR": str(sockets),
        "CUDA_VISIBLE_DEVICES": str(place),
        "PYTHONPATH": os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "RAY_memory_monitor_refresh_ms": "0",
    }
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", "--node-ip-address=127.0.0.1"]
    log = open(folder / f"node-{place}.log", "w")
    return subprocess.Popen(
        [vramctl, "run", "--name", "many", "--", *ray, "--num-cpus=2", "--num-gpus=1", "--object-store-memory=100000000", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment,
    )


class Rank:
    """An actor of Ray's with one GPU."""

    def __init__(self, number, port, folder):
        # Last: some of its modules have names of Python's own.
        sys.path.append(folder)
        from two import Trainer

        self.trainer = Trainer(number, port, device=0)

    def work(self, steps):
        return self.trainer.work(steps)


class Cluster:
    """Two nodes, and a rank on each."""

    def __init__(self):
        import ray

        self.ray, self.nodes, self.ranks = ray, [], []

    def start(self, vramctl, folder, paths):
        port = free_port()
        address = f"127.0.0.1:{port}"
        self.nodes.append(start_node(vramctl, folder, 0, paths, "--head", f"--port={port}", "--include-dashboard=false"))
        self.join(address, 1)
        self.nodes.append(start_node(vramctl, folder, 1, paths, f"--address={address}"))
        self.join(address, 2)
        self.start_ranks()

    def join(self, address, nodes):
        """Waits until the cluster has so many nodes."""
        until = time.monotonic() + START_WITHIN
        while True:
            try:
                if not self.ray.is_initialized():
                    self.ray.init(address=address, namespace="gpu-check", log_to_driver=False, logging_level="ERROR")
                if sum(node["Alive"] for node in self.ray.nodes()) == nodes:
                    return
            except (ConnectionError, RuntimeError, ValueError):
                if time.monotonic() > until:
                    raise
            if time.monotonic() > until or any(node.poll() is not None for node in self.nodes):
                raise RuntimeError(f"not {nodes} nodes within {START_WITHIN} s, or one has ended")
            time.sleep(0.3)

    def start_ranks(self):
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        actor, port, folder = self.ray.remote(Rank), free_port(), str(pathlib.Path(__file__).resolve().parent)
        for number, node in enumerate(self.ray.nodes()):
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            self.ranks.append(actor.options(num_gpus=1, scheduling_strategy=there).remote(number, port, folder))

    def begin(self, steps):
        return [rank.work.remote(steps) for rank in self.ranks]

    def result(self, begun):
        """What both ranks say: without how long it took."""
        said = self.ray.get(begun, timeout=START_WITHIN)
        return [(one["digest"], one["same"]) for one in said], max(one["s"] for one in said)

    def end(self):
        with contextlib.suppress(Exception):
            self.ray.shutdown()
        for node in self.nodes:
            node.terminate()
        for node in self.nodes:
            try:
                node.wait(20)
            except subprocess.TimeoutExpired:
                node.kill()


def disturb(cluster, job, pauses, suspends, idle, chance):
    """Pauses and suspends in the middle of work. Returns what went wrong, and rows of figures."""
    cluster.result(cluster.begin(8))
    _, took = cluster.result(cluster.begin(8))
    steps = max(8, round(WORK / took * 8))
    undisturbed, took = cluster.result(cluster.begin(steps))
    if not all(same for _, same in undisturbed):
        return f"undisturbed: {undisturbed}", []
    print(f"note: {steps} steps of a run take {took:.1f} s undisturbed", flush=True)
    rows, done = [], 0
    plan = ["pause"] * pauses + ["suspend"] * suspends
    while plan:
        begun = cluster.begin(steps)
        # Two pauses in a run; a suspend takes longer.
        for what in (plan[:2] if plan[0] == "pause" else plan[:1]):
            time.sleep(chance.uniform(0.1, 0.4) * took)
            began = time.monotonic()
            report = job.pause(hold_timeout=30) if what == "pause" else job.suspend(hold_timeout=30)
            gone = time.monotonic()
            rest = [used - most for used, most in zip(used_mib(), idle)]
            in_between = not cluster.ray.wait(begun, num_returns=1, timeout=0)[0]
            back = time.monotonic()
            job.resume(timeout=60)
            rows.append(
                {
                    "what": what,
                    "attempts": getattr(report, "attempts", "-"),
                    "ms": 1e3 * (gone - began),
                    "back ms": 1e3 * (time.monotonic() - back),
                    "rest": max(rest),
                    "in the middle": in_between,
                }
            )
            plan.pop(0)
            done += 1
            if max(rest) > (PAUSED_MIB if what == "pause" else IDLE_MIB):
                return f"{what} {done}: {rest} MiB more than on idle GPUs", rows
        if (found := cluster.result(begun)[0]) != undisturbed:
            return f"after {what} {done}: {found} instead of {undisturbed}", rows
    return "", rows


def main():
    command, *counts = sys.argv[1:]
    pauses, suspends = (int(count) for count in (counts + ["10", "3"][len(counts) :]))
    # Of the two that the ranks use: others may be busy.
    idle = used_mib()[:2]
    if not check("there are two GPUs", len(idle) > 1, f"{len(idle)}"):
        return
    with tempfile.TemporaryDirectory(prefix="many-nodes-", ignore_cleanup_errors=True) as name, contextlib.ExitStack() as stack:
        folder = pathlib.Path(name)
        paths = installed(folder, command)
        # Whether this user has a token or not: Ray's nodes and programs have to agree.
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
        sys.path[1:1] = paths
        try:
            from vramctl.ray import Job
        except ImportError as error:
            check("Python finds Ray", False, f"{error}; install it, or give --ray-dir")
            return
        from vramctl import errors

        cluster, wrong, rows, began = Cluster(), "", [], time.monotonic()
        stack.callback(cluster.end)
        try:
            cluster.start(command, folder, paths)
            cluster.result(cluster.begin(1))
            print(f"note: two nodes and two ranks have started after {time.monotonic() - began:.0f} s", flush=True)
            wrong, rows = disturb(cluster, Job("many", ranks=2), pauses, suspends, idle, random.Random(17))
        except errors.Error as error:
            wrong = f"{error.code}, committed {error.committed}: {error}"
        except Exception as error:
            logs = {path.name: path.read_text()[-400:] for path in folder.glob("*.log")}
            wrong = f"{type(error).__name__}: {error} {json.dumps(logs)}"
        done = {what: [row for row in rows if row["what"] == what] for what in ("pause", "suspend")}
        for what, wanted in (("pause", pauses), ("suspend", suspends)):
            count = len(done[what])
            good = count == wanted and (not wrong or what == "pause" and bool(done["suspend"]))
            check(f"a job over two nodes of Ray: {what} {count} of {wanted} times, every loss equal", good, "" if good else wrong[:1500])
        print("| a job over two nodes of Ray, 4 GiB and NCCL over sockets on each | times | in the middle of work | attempts | ms | at most | back, ms | rest, MiB |")
        print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
        for what, some in done.items():
            if some:
                ms, attempts = [row["ms"] for row in some], sorted(row["attempts"] for row in some)
                print(
                    f"| {what} | {len(some)} | {sum(row['in the middle'] for row in some)} | {attempts} | {statistics.median(ms):.0f} | {max(ms):.0f} "
                    f"| {statistics.median(row['back ms'] for row in some):.0f} | {max(row['rest'] for row in some)} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
