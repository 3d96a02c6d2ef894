#!/usr/bin/env python3
"""A small engine in Python that pauses and resumes itself by tag.

Uses only ctypes: the CUDA runtime for its memory, and vramctl's C ABI
(include/vramctl.h) for the regions "weights" (contents kept in host memory) and
"kv_cache" (contents discarded). Prints each check, and ends with `all checks passed`
and exit code 0, or with the first difference and exit code 1.

    vramctl run -- tests/apps/engine.py --weights-mib 64 --kv-mib 32 --cycles 3

Without vramctl it exits with 2.
"""

import argparse
import ctypes
import json
import random
import sys
import time

MIB = 1 << 20
HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2
BACKUP_DEFAULT, BACKUP_DISCARD, BACKUP_HOST = 0, 1, 2


class Failed(Exception):
    pass


def load_runtime():
    """The CUDA runtime, looked up in the global scope.

    That finds preloaded symbols first, as in a program that links to libcudart.
    A lookup on libcudart's own handle would bypass them.
    """
    tried = ["libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0", "libcudart.so"]
    for name in tried:
        try:
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
            break
        except OSError:
            continue
    else:
        raise Failed(f"no CUDA runtime ({', '.join(tried)}): put its folder on LD_LIBRARY_PATH")
    runtime = ctypes.CDLL(None)
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    for name, arguments in {
        "cudaSetDevice": [ctypes.c_int],
        "cudaMalloc": [ctypes.POINTER(pointer), size],
        "cudaFree": [pointer],
        "cudaMemcpy": [pointer, pointer, size, ctypes.c_int],
        "cudaMemGetInfo": [ctypes.POINTER(size), ctypes.POINTER(size)],
        "cudaDeviceSynchronize": [],
    }.items():
        function = getattr(runtime, name)
        function.argtypes, function.restype = arguments, ctypes.c_int
    runtime.cudaGetErrorName.argtypes = [ctypes.c_int]
    runtime.cudaGetErrorName.restype = ctypes.c_char_p
    return runtime


def load_vramctl():
    """vramctl's functions, if it is preloaded; else None."""
    library = ctypes.CDLL(None)
    text, code, size = ctypes.c_char_p, ctypes.c_int32, ctypes.c_size_t
    try:
        for name, result, arguments in [
            ("version", text, []),
            ("region_begin", code, [text, ctypes.c_int32]),
            ("region_end", code, []),
            ("current_tag", code, [text, size, ctypes.POINTER(size)]),
            ("pause", code, [text, ctypes.c_int64, ctypes.c_int32]),
            ("resume", code, [text, ctypes.c_int64]),
            ("status_json", code, [text, size, ctypes.POINTER(size)]),
            ("last_error", text, []),
            (
                "backup_pointer",
                code,
                [ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(size)],
            ),
        ]:
            function = getattr(library, f"vramctl_{name}")
            function.restype, function.argtypes = result, arguments
    except AttributeError:
        return None
    return library


class Engine:
    def __init__(self, runtime, vramctl, options):
        self.runtime, self.vramctl = runtime, vramctl
        self.cuda("cudaSetDevice", options.device)
        random.seed(options.seed)
        # Odd sizes: 1/2, 1/3 and the rest.
        total = options.weights_mib * MIB
        sizes = [total // 2, total // 3]
        sizes.append(total - sum(sizes))
        with Region(self, b"weights", BACKUP_HOST):
            self.weights = [(self.malloc(n), random_bytes(n)) for n in sizes]
        with Region(self, b"kv_cache", BACKUP_DISCARD):
            half = options.kv_mib * MIB // 2
            self.kv = [(self.malloc(half), random_bytes(half)) for _ in range(2)]
        for tensor in self.weights + self.kv:
            self.write(*tensor)

    def cuda(self, name, *arguments):
        code = getattr(self.runtime, name)(*arguments)
        if code != 0:
            error = self.runtime.cudaGetErrorName(code).decode()
            raise Failed(f"{name}: {error}")

    def abi(self, name, *arguments):
        code = getattr(self.vramctl, f"vramctl_{name}")(*arguments)
        if code != 0:
            message = self.vramctl.vramctl_last_error() or b"no message"
            raise Failed(f"vramctl_{name}: code {code}: {message.decode()}")

    def malloc(self, size):
        pointer = ctypes.c_void_p()
        self.cuda("cudaMalloc", ctypes.byref(pointer), size)
        return pointer.value

    def write(self, device, contents):
        self.cuda("cudaMemcpy", device, contents, len(contents), HOST_TO_DEVICE)

    def read(self, device, size):
        buffer = ctypes.create_string_buffer(size)
        self.cuda("cudaMemcpy", buffer, device, size, DEVICE_TO_HOST)
        return buffer.raw

    def free_memory(self):
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.cuda("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def status(self):
        needed, capacity = ctypes.c_size_t(), 4096
        while True:
            buffer = ctypes.create_string_buffer(capacity)
            code = self.vramctl.vramctl_status_json(buffer, capacity, ctypes.byref(needed))
            if code == 0:
                return json.loads(buffer.value)
            if needed.value <= capacity:
                self.abi("status_json", buffer, capacity, ctypes.byref(needed))
            capacity = needed.value + 4096

    def backup_of(self, device):
        """The host copy of a paused allocation, as bytes."""
        pointer, size = ctypes.c_void_p(), ctypes.c_size_t()
        self.abi("backup_pointer", device, ctypes.byref(pointer), ctypes.byref(size))
        return ctypes.string_at(pointer.value, size.value)

    def expect(self, what, tensors, contents_of=lambda contents: contents):
        for device, contents in tensors:
            if self.read(device, len(contents)) != contents_of(contents):
                raise Failed(f"{what}: the {len(contents)} bytes at {device:#x} differ")
        print(f"  ok: {what}", flush=True)


class Region:
    def __init__(self, engine, tag, backup):
        self.engine, self.tag, self.backup = engine, tag, backup

    def __enter__(self):
        self.engine.abi("region_begin", self.tag, self.backup)
        buffer, needed = ctypes.create_string_buffer(64), ctypes.c_size_t()
        self.engine.abi("current_tag", buffer, 64, ctypes.byref(needed))
        if buffer.value != self.tag:
            raise Failed(f"in the region {self.tag} the current tag is {buffer.value}")

    def __exit__(self, *exception):
        self.engine.abi("region_end")


def random_bytes(size):
    return b"".join(random.randbytes(min(MIB, size - at)) for at in range(0, size, MIB))


def timed(work, *arguments):
    start = time.perf_counter()
    work(*arguments)
    return (time.perf_counter() - start) * 1000


def cycle(engine, options):
    sizes = {
        b"weights": sum(len(contents) for _, contents in engine.weights),
        b"kv_cache": sum(len(contents) for _, contents in engine.kv),
    }
    for tag in [b"weights", b"kv_cache"]:
        before = engine.free_memory()
        ms = timed(engine.abi, "pause", tag, options.timeout_ms, BACKUP_DEFAULT)
        given = engine.free_memory() - before
        print(f"  paused {tag.decode()}: {given} bytes more are free, {ms:.1f} ms")
        if given < sizes[tag]:
            raise Failed(f"{tag.decode()} has {sizes[tag]} bytes, only {given} came free")
    device, contents = engine.weights[0]
    if engine.backup_of(device)[: len(contents)] != contents:
        raise Failed("the host backup of the first weights differs from what was there")
    print("  ok: the backup can be read while paused")
    engine.abi("pause", None, options.timeout_ms, BACKUP_DEFAULT)
    engine.abi("resume", b"weights", options.timeout_ms)
    engine.expect("weights are back while kv_cache is still paused", engine.weights)
    ms = timed(engine.abi, "resume", None, options.timeout_ms)
    print(f"  resumed the rest, {ms:.1f} ms")
    engine.expect("weights as before", engine.weights)
    engine.expect("kv_cache reads as zero", engine.kv, lambda contents: bytes(len(contents)))
    for tensor in engine.kv:
        engine.write(*tensor)
    engine.expect("kv_cache takes new contents", engine.kv)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights-mib", type=int, default=64)
    parser.add_argument("--kv-mib", type=int, default=32)
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cycles", type=int, default=2)
    parser.add_argument("--timeout-ms", type=int, default=60000)
    options = parser.parse_args()
    if options.weights_mib < 8 or options.kv_mib < 4:
        parser.error("give at least 8 MiB of weights and 4 MiB of KV cache")
    vramctl = load_vramctl()
    if vramctl is None:
        print("engine.py: vramctl is not loaded: start me with `vramctl run -- …`", file=sys.stderr)
        return 2
    try:
        engine = Engine(load_runtime(), vramctl, options)
        print(f"vramctl {vramctl.vramctl_version().decode()}")
        engine.expect("weights and kv_cache as written", engine.weights + engine.kv)
        for number in range(1, options.cycles + 1):
            print(f"cycle {number} of {options.cycles}")
            cycle(engine, options)
        print("status " + json.dumps(engine.status()))
        for device, _ in engine.weights + engine.kv:
            engine.cuda("cudaFree", device)
    except Failed as failure:
        print(f"engine.py: {failure}", file=sys.stderr)
        return 1
    print("all checks passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
