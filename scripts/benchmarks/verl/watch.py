"""Looks at the machine while the job of scripts/bench verl runs."""

import ctypes
import json
import os
import subprocess
import threading
import time

from measure import growth


def of_job(gpus):
    """The indexes of the GPUs that the job uses: the first that CUDA_VISIBLE_DEVICES lists, or that there are."""
    listed = [int(index) for index in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if index.isdigit()]
    return (listed or list(range(gpus)))[:gpus]


class Watch(threading.Thread):
    """Samples the GPUs' memory in use (the fullest counts), ten times a second."""

    def __init__(self, gpus):
        super().__init__(daemon=True)
        self.samples, self.done, self.gpus = [], threading.Event(), gpus
        self.nvml = self.handles = None
        try:
            self.nvml = ctypes.CDLL("libnvidia-ml.so.1")
            assert self.nvml.nvmlInit_v2() == 0
            indexes = of_job(gpus)
            self.handles = [ctypes.c_void_p() for _ in indexes]
            for index, handle in zip(indexes, self.handles):
                assert self.nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0
        except (OSError, AssertionError):
            self.handles = None

    def gpu_used(self):
        if self.handles is None:
            return None
        most = 0
        for handle in self.handles:
            memory = (ctypes.c_uint64 * 3)()  # total, free, used
            if self.nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) != 0:
                return None
            most = max(most, memory[2])
        return most

    def run(self):
        while not self.done.wait(0.1):
            self.samples.append((time.time(), self.gpu_used()))


class Looks(threading.Thread):
    """Writes down the ledger of the job's fullest GPU and the host memory of the job's processes, a few times a second, a line of JSON each."""

    def __init__(self, gpus, vramctl, env, pids, path):
        super().__init__(daemon=True)
        self.gpus, self.vramctl, self.env, self.pids, self.path, self.done = gpus, vramctl, env, pids, path, threading.Event()

    def run(self):
        while not self.done.wait(0.2):
            look = {"began": time.time(), "shares": self.shares(), "host": sum(growth.Process("", pid).host_bytes() for pid in self.pids())}
            with open(self.path, "a") as file:
                file.write(json.dumps({**look, "ended": time.time()}) + "\n")

    def shares(self):
        try:
            done = subprocess.run([self.vramctl, "gpus", "--json"], env=self.env, capture_output=True, text=True, timeout=10)
            gpus = [gpu for gpu in json.loads(done.stdout)["gpus"] if gpu["index"] in of_job(self.gpus)]
            fullest = max(gpus, key=lambda gpu: gpu["used_bytes"])
        except (OSError, subprocess.TimeoutExpired, ValueError, KeyError):
            return []
        return [[share.get("pid"), share["what"], share.get("of", ""), share["bytes"]] for share in fullest["shares"]]
