"""A trainer or an engine of an RL step without a framework: for scripts/bench rl-step.

Each line on standard input is a command, each answer `ok` with JSON, or `error` with a reason. Memory is paused through the C functions
of torch_memory_saver, which its Python package calls: the same program runs with either library preloaded, and needs no torch.
"""

import argparse
import concurrent.futures
import ctypes
import json
import mmap
import os
import random
import sys
import threading
import time
import zlib

MIB = 1 << 20
TO_DEVICE, TO_HOST, ON_DEVICE = 1, 2, 3
NON_BLOCKING, THREAD_LOCAL = 1, 1
# Patterns start at multiples of this.
STEP = 256
CHECKERS = 8
# The pieces that a rollout copies from the weights into the KV cache.
ROLLED = 8

P, N, INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
CALLS = {
    "cudaSetDevice": [INT],
    "cudaFree": [P],
    "cudaMalloc": [ctypes.POINTER(P), N],
    "cudaMallocHost": [ctypes.POINTER(P), N],
    "cudaMemGetInfo": [ctypes.POINTER(N), ctypes.POINTER(N)],
    "cudaMemcpyAsync": [P, P, N, INT, P],
    "cudaDeviceSynchronize": [],
    "cudaStreamCreateWithFlags": [ctypes.POINTER(P), INT],
    "cudaStreamSynchronize": [P],
    "cudaStreamBeginCapture": [P, INT],
    "cudaStreamEndCapture": [P, ctypes.POINTER(P)],
    "cudaGraphInstantiateWithFlags": [ctypes.POINTER(P), P, ctypes.c_ulonglong],
    "cudaGraphLaunch": [P, P],
    "cudaIpcCloseMemHandle": [P],
}


class IpcHandle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_byte * 64)]


class Cuda:
    """The runtime's functions, as a linked program would call them: a preloaded library answers first."""

    def __init__(self):
        for name in ("libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0", "libcudart.so"):
            try:
                ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
                break
            except OSError as error:
                missing = error
        else:
            raise SystemExit(f"rl_program: {missing}")
        self.names = ctypes.CDLL(None)
        for name, arguments in CALLS.items():
            getattr(self.names, name).argtypes = arguments
        self.names.cudaIpcGetMemHandle.argtypes = [ctypes.POINTER(IpcHandle), P]
        self.names.cudaIpcOpenMemHandle.argtypes = [ctypes.POINTER(P), IpcHandle, ctypes.c_uint]
        self("cudaSetDevice", 0)
        self("cudaFree", None)  # makes the context

    def __call__(self, name, *arguments):
        code = getattr(self.names, name)(*arguments)
        if code != 0:
            raise RuntimeError(f"{name} failed with {code}")

    def out(self, name, *arguments):
        """Calls what writes a pointer through its first parameter."""
        found = P()
        self(name, ctypes.byref(found), *arguments)
        return found.value

    def copy(self, to, source, size, kind, stream=None):
        self("cudaMemcpyAsync", to, source, size, kind, stream)


class Pattern:
    """Random bytes in pinned memory, the same in each process, of which each piece of memory holds a part of its own."""

    def __init__(self, cuda, piece):
        self.piece = piece
        data = random.Random(11).randbytes(4 * piece)
        self.base = cuda.out("cudaMallocHost", len(data))
        ctypes.memmove(self.base, data, len(data))
        self.places = 3 * piece // STEP

    def of(self, tag, number, offset, version):
        """Where the contents of this piece begin."""
        return self.base + zlib.crc32(f"{tag} {number} {offset} {version}".encode()) % self.places * STEP


class Saver:
    """The C functions of torch_memory_saver, which the preloaded library has."""

    def __init__(self, cuda, options):
        self.names = cuda.names
        self.names.tms_get_cpu_backup_pointer.argtypes = [P, N]
        self.names.tms_get_cpu_backup_pointer.restype = P
        if options.retain:
            self.names.tms_set_retain_cpu_backup(True)
        if options.backend:
            self.names.tms_set_cpu_backup_backend(options.backend.encode())

    def region(self, tag, keep):
        self.names.tms_set_current_tag(tag.encode())
        self.names.tms_set_enable_cpu_backup(keep)
        self.names.tms_set_interesting_region(True)

    def outside(self):
        self.names.tms_set_interesting_region(False)

    def timed(self, name, tag):
        begun = time.perf_counter()
        code = getattr(self.names, name)(tag.encode() if tag else None)
        took = time.perf_counter() - begun
        if code != 0:
            raise RuntimeError(f"{name} failed with {code}")
        return took


class Program:
    def __init__(self, options):
        self.cuda = Cuda()
        self.saver = Saver(self.cuda, options)
        self.pattern = Pattern(self.cuda, options.piece_mib * MIB)
        self.keep = options.role == "trainer"
        self.tensors = {}  # tag: [(address, bytes)]
        self.streams = threading.local()
        self.checkers = concurrent.futures.ThreadPoolExecutor(CHECKERS)
        self.buckets, self.opened, self.plan = [], [], []
        self.bucket_bytes, self.managed_buckets = options.bucket_mib * MIB, options.managed_buckets
        self.graph = None

    # ---- memory and its contents ----

    def alloc(self, tag, path):
        # All of a trainer's memory has one tag, which is paused as a whole.
        self.saver.region(tag if not self.keep else "default", self.keep)
        with open(path) as sizes:
            self.tensors[tag] = [(self.cuda.out("cudaMalloc", int(size)), int(size)) for size in sizes]
        self.saver.outside()
        if tag == "weights":
            self.plan = self.buckets_of(self.tensors[tag])
        return sum(size for _, size in self.tensors[tag])

    def pieces(self, tag):
        for number, (address, size) in enumerate(self.tensors[tag]):
            for offset in range(0, size, self.pattern.piece):
                yield number, offset, address + offset, min(self.pattern.piece, size - offset)

    def fill(self, tag, version):
        for number, offset, address, size in self.pieces(tag):
            self.cuda.copy(address, self.pattern.of(tag, number, offset, version), size, TO_DEVICE)
        self.cuda("cudaDeviceSynchronize")

    def same(self, address, wanted, size):
        """Compares device memory with what it should hold, bit for bit."""
        own = self.streams
        if not hasattr(own, "stream"):
            self.cuda("cudaSetDevice", 0)
            own.stream = self.cuda.out("cudaStreamCreateWithFlags", NON_BLOCKING)
            own.staging = self.cuda.out("cudaMallocHost", self.pattern.piece)
        self.cuda.copy(own.staging, address, size, TO_HOST, own.stream)
        self.cuda("cudaStreamSynchronize", own.stream)
        return LIBC.memcmp(own.staging, wanted, size) == 0

    def check(self, tag, version):
        checks = {
            (number, offset): self.checkers.submit(self.same, address, self.pattern.of(tag, number, offset, version), size)
            for number, offset, address, size in self.pieces(tag)
        }
        wrong = [place for place, check in checks.items() if not check.result()]
        if wrong:
            raise ValueError(f"{tag}: {len(wrong)} of {len(checks)} pieces have changed, first {wrong[0]}")
        return sum(size for _, size in self.tensors[tag])

    def memory(self):
        """Bytes of the device in use, by all processes."""
        free, total = N(), N()
        self.cuda("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        return total.value - free.value

    # ---- weights, in buckets, from the trainer's host memory to the engine's GPU memory ----

    def buckets_of(self, tensors):
        """Which part of which allocation goes with which bucket, and where in it."""
        plan, room = [], 0
        for address, size in tensors:
            offset = 0
            while offset < size:
                if room == 0:
                    plan.append([])
                    room = self.bucket_bytes
                part = min(room, size - offset)
                plan[-1].append((address + offset, self.bucket_bytes - room, part))
                room, offset = room - part, offset + part
        return plan

    def offer(self):
        """Two buckets, outside the regions unless `--managed-buckets`: others cannot open memory of torch_memory_saver's regions."""
        if self.managed_buckets:
            self.saver.region("buckets", False)
        self.buckets = [self.cuda.out("cudaMalloc", self.bucket_bytes) for _ in range(min(2, len(self.plan)))]
        self.saver.outside()
        handles = []
        for bucket in self.buckets:
            handle = IpcHandle()
            self.cuda("cudaIpcGetMemHandle", ctypes.byref(handle), bucket)
            handles.append(bytes(handle).hex())
        return {"handles": handles, "buckets": len(self.plan)}

    def load(self, number):
        """Fills a bucket from the host memory in which the pause has kept the weights."""
        for address, offset, size in self.plan[number]:
            kept = self.saver.names.tms_get_cpu_backup_pointer(address, size)
            if not kept:
                raise RuntimeError("the paused weights have no copy in host memory")
            self.cuda.copy(self.buckets[number % 2] + offset, kept, size, TO_DEVICE)
        self.cuda("cudaDeviceSynchronize")

    def withdraw(self):
        for bucket in self.buckets:
            self.cuda("cudaFree", bucket)
        self.buckets = []

    def open(self, *handles):
        one = 1  # cudaIpcMemLazyEnablePeerAccess
        self.opened = [
            self.cuda.out("cudaIpcOpenMemHandle", IpcHandle.from_buffer_copy(bytes.fromhex(handle)), one) for handle in handles
        ]

    def store(self, number):
        for address, offset, size in self.plan[number]:
            self.cuda.copy(address, self.opened[number % 2] + offset, size, ON_DEVICE)
        self.cuda("cudaDeviceSynchronize")

    def close(self):
        for bucket in self.opened:
            self.cuda("cudaIpcCloseMemHandle", bucket)
        self.opened = []

    # ---- the engine's work: a graph, captured once, that reads the weights and writes the KV cache ----

    def rolled(self):
        cache, room = self.tensors["kv_cache"][0]
        size = min(self.pattern.piece, room // ROLLED)
        for number, (address, has) in enumerate(self.tensors["weights"][:ROLLED]):
            yield number, address, cache + number * size, min(size, has)

    def capture(self):
        self.stream = self.cuda.out("cudaStreamCreateWithFlags", NON_BLOCKING)
        self.cuda("cudaStreamBeginCapture", self.stream, THREAD_LOCAL)
        for _, weights, cache, size in self.rolled():
            self.cuda.copy(cache, weights, size, ON_DEVICE, self.stream)
        graph = P()
        self.cuda("cudaStreamEndCapture", self.stream, ctypes.byref(graph))
        self.graph = self.cuda.out("cudaGraphInstantiateWithFlags", graph, 0)

    def rollout(self, version):
        if not self.graph:
            self.capture()
        self.cuda("cudaGraphLaunch", self.graph, self.stream)
        self.cuda("cudaStreamSynchronize", self.stream)
        for number, _, cache, size in self.rolled():
            if not self.same(cache, self.pattern.of("weights", number, 0, version), size):
                raise ValueError(f"the rollout computed something else from allocation {number}")

    # ---- commands ----

    def commands(self):
        return {
            "alloc": self.alloc,
            "fill": lambda tag, version: self.fill(tag, version),
            "check": lambda tag, version: self.check(tag, version),
            "pause": lambda tag="": self.saver.timed("tms_pause", tag),
            "resume": lambda tag="": self.saver.timed("tms_resume", tag),
            "offer": self.offer,
            "load": lambda number: self.load(int(number)),
            "withdraw": self.withdraw,
            "open": self.open,
            "store": lambda number: self.store(int(number)),
            "close": self.close,
            "rollout": self.rollout,
            "memory": self.memory,
        }


LIBC = ctypes.CDLL(None)
LIBC.memcmp.argtypes = [P, P, N]


def touch(size):
    """Touches host memory: a virtual machine may get its memory only then, at a tenth of the speed."""
    block = 256 * MIB
    with concurrent.futures.ThreadPoolExecutor(CHECKERS) as pool:
        blocks = [mmap.mmap(-1, block) for _ in range(size // block)]
        list(pool.map(lambda one: ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(one)), 1, block), blocks))


def link(options):
    """Seconds for copies of `--piece-mib` between pinned host memory and the GPU, in each direction."""
    touch(options.touch_mib * MIB)
    cuda = Cuda()
    size = options.piece_mib * MIB
    device, host = cuda.out("cudaMalloc", size), cuda.out("cudaMallocHost", size)
    ctypes.memset(host, 1, size)
    took = {"out": [], "in": []}
    for number in range(8):
        for way, arguments in (("in", (device, host, size, TO_DEVICE)), ("out", (host, device, size, TO_HOST))):
            begun = time.perf_counter()
            cuda.copy(*arguments)
            cuda("cudaDeviceSynchronize")
            if number:
                took[way].append(time.perf_counter() - begun)
    print("ok", json.dumps({"bytes": size, **took}), flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("trainer", "engine", "link"))
    parser.add_argument("--piece-mib", type=int, default=32)
    parser.add_argument("--bucket-mib", type=int, default=512)
    parser.add_argument("--touch-mib", type=int, default=0)
    parser.add_argument("--managed-buckets", action="store_true")
    parser.add_argument("--retain", action="store_true")
    parser.add_argument("--backend", default="")
    options = parser.parse_args()
    # Keep what libraries print from mixing with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if options.role == "link":
        sys.stdout = answers
        return link(options)
    commands = Program(options).commands()
    print("ok", file=answers, flush=True)
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "quit":
            break
        try:
            print("ok", json.dumps(commands[command](*arguments)), file=answers, flush=True)
        except Exception as error:  # whatever it is, it goes into the report
            print("error", " ".join(f"{type(error).__name__}: {error}".split())[:300], file=answers, flush=True)
    # Without the libraries' exit handlers, which torch_memory_saver's may not survive.
    os._exit(0)


if __name__ == "__main__":
    main()
