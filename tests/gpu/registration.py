"""The rule about registered memory, on two GPUs: NCCL registers managed memory with the program's communicator, and a pause that
would give it other pages is refused. Also shows, in separate processes, what would happen otherwise.

usage: registration.py VRAMCTL               prints a line `ok: …` or `FAILED: …` for each check, and `note: …` for the rest
       registration.py --rank N RANKS PORT   the program, which registration.py starts under `vramctl run`

Each rank has three buffers: `plain`, from PyTorch's cudaMalloc, and `virtual` and `gathered`, which it creates with cuMemCreate so that
other processes can open them. The first two are summed in place, for which NCCL's ring copies through its own buffers. The ranks gather
into the third, which the other rank writes directly.
"""

import ctypes
import json
import os
import re
import sys

from common import MIB, Job, answer, check, free_port, used_mib

BUFFER = 64 * MIB
BALLAST = 2048 * MIB
KINDS = ("plain", "virtual", "gathered")
# After this many seconds, a collective counts as hung.
PATIENCE_S = 10


class OfAddress:
    """The program's own memory, for `torch.as_tensor`."""

    def __init__(self, address, count):
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (count,), "typestr": "<f4", "version": 2}


def virtual_memory(device, size):
    """The address of new memory of `cuMemCreate`, which another process can open by a file descriptor."""
    cuda = ctypes.CDLL("libcuda.so.1")
    handle, address = ctypes.c_ulonglong(), ctypes.c_ulonglong()
    # CUmemAllocationProp: pinned, shared by descriptor, on this device. CUmemAccessDesc: this device, reads and writes.
    wanted = (ctypes.c_uint * 8)(1, 1, 1, device)
    access = (ctypes.c_uint * 3)(1, device, 3)
    size = ctypes.c_size_t(size)
    for code in (
        cuda.cuMemCreate(ctypes.byref(handle), size, wanted, ctypes.c_ulonglong(0)),
        cuda.cuMemAddressReserve(ctypes.byref(address), size, ctypes.c_size_t(0), ctypes.c_ulonglong(0), ctypes.c_ulonglong(0)),
        cuda.cuMemMap(address, size, ctypes.c_size_t(0), handle, ctypes.c_ulonglong(0)),
        cuda.cuMemSetAccess(address, size, access, ctypes.c_size_t(1)),
    ):
        if code:
            raise RuntimeError(f"the driver answers {code}")
    return address.value


class Nccl:
    """The NCCL that PyTorch has loaded, and a communicator: PyTorch's, or our own if PyTorch does not expose its."""

    def __init__(self, torch, distributed, number, ranks):
        with open("/proc/self/maps", encoding="utf-8") as maps:
            paths = [line.split(maxsplit=5)[5].strip() for line in maps if "libnccl.so" in line]
        self.library = ctypes.CDLL(paths[0] if paths else None)
        backend = distributed.group.WORLD._get_backend(torch.device("cuda", number))
        self.reduce, self.gather = distributed.all_reduce, distributed.all_gather_into_tensor
        self.whose = "PyTorch's"
        if hasattr(backend, "_comm_ptr"):
            self.communicator = ctypes.c_void_p(backend._comm_ptr())
            return

        class UniqueId(ctypes.Structure):
            _fields_ = [("bytes", ctypes.c_ubyte * 128)]

        name, self.communicator, self.whose = UniqueId(), ctypes.c_void_p(), "our own"
        if number == 0:
            self.check(self.library.ncclGetUniqueId(ctypes.byref(name)))
        told = [bytes(name)]
        distributed.broadcast_object_list(told, src=0)
        name = UniqueId.from_buffer_copy(told[0])
        self.check(self.library.ncclCommInitRank(ctypes.byref(self.communicator), ranks, name, number))

        def reduce(tensor):
            place, stream = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            # 7: ncclFloat32. 0: ncclSum.
            self.check(self.library.ncclAllReduce(place, place, ctypes.c_size_t(tensor.numel()), 7, 0, self.communicator, stream))

        def gather(result, part):
            places = ctypes.c_void_p(part.data_ptr()), ctypes.c_void_p(result.data_ptr())
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            self.check(self.library.ncclAllGather(*places, ctypes.c_size_t(part.numel()), 7, self.communicator, stream))

        self.reduce, self.gather = reduce, gather

    @staticmethod
    def check(code):
        if code:
            raise RuntimeError(f"NCCL answers {code}")

    def register(self, tensor):
        handle = ctypes.c_void_p()
        place, size = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.numel() * tensor.element_size())
        self.check(self.library.ncclCommRegister(self.communicator, place, size, ctypes.byref(handle)))
        return handle

    def deregister(self, handle):
        self.check(self.library.ncclCommDeregister(self.communicator, handle))


def rank(number, ranks, port):
    import torch
    import torch.distributed as distributed

    torch.cuda.set_device(number)
    device = torch.device("cuda", number)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    distributed.init_process_group("nccl", rank=number, world_size=ranks, device_id=device)
    ballast = torch.full((BALLAST,), number + 1, dtype=torch.uint8, device=device)
    buffers = {
        "plain": torch.zeros(BUFFER // 4, device=device),
        **{
            kind: torch.as_tensor(OfAddress(virtual_memory(number, BUFFER), BUFFER // 4), device=device)
            for kind in ("virtual", "gathered")
        },
    }
    source = torch.zeros(BUFFER // 4, device=device)
    distributed.all_reduce(source)
    torch.cuda.synchronize()
    nccl = Nccl(torch, distributed, number, ranks)
    handles, graphs = [], {}

    def collective(kind, buffer):
        if kind == "gathered":
            buffer.zero_()
            nccl.gather(buffer, source[: source.numel() // ranks])
        else:
            buffer.copy_(source)
            nccl.reduce(buffer)

    def capture(kind, buffer):
        # Warm up outside the capture.
        collective(kind, buffer)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            collective(kind, buffer)
            result = buffer + 1
        return graph, result

    def step(base, kind, graph):
        """Whether the collective's result is correct."""
        source.fill_(float(base + number))
        if graph:
            graphs[kind][0].replay()
            seen = graphs[kind][1] - 1
        else:
            seen = buffers[kind]
            collective(kind, seen)
        torch.cuda.synchronize()
        all_of_it = [float(base + each) for each in range(ranks)]
        if kind == "gathered":
            right = all(bool((part == one).all()) for part, one in zip(seen.chunk(ranks), all_of_it))
        else:
            right = bool((seen == sum(all_of_it)).all())
        return right and bool((ballast == number + 1).all())

    answer(ready=True, whose=nccl.whose, version=".".join(map(str, torch.cuda.nccl.version())))
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "register":
            handles = [nccl.register(buffer) for buffer in buffers.values()]
            graphs.update({kind: capture(kind, buffer) for kind, buffer in buffers.items()})
            torch.cuda.synchronize()
            answer(done=all(handle.value for handle in handles))
        elif request["do"] == "deregister":
            for handle in handles:
                nccl.deregister(handle)
            answer(done=True)
        elif request["do"] == "pool":
            # PyTorch registers the pool's memory itself. The memory is managed, because the pool does not use NCCL's allocator.
            backend, pool = distributed.group.WORLD._get_backend(device), torch.cuda.MemPool()
            with torch.cuda.use_mem_pool(pool):
                pooled = torch.ones(BUFFER // 4, device=device)
            backend.register_mem_pool(pool)
            distributed.all_reduce(pooled)
            torch.cuda.synchronize()
            answer(done=float(pooled[0]) == ranks)
        else:
            answer(right=step(request["base"], request["kind"], request["graph"]))
    os._exit(0)


class Ranks(Job):
    def __init__(self, vramctl, name, count):
        port = free_port()
        # A ring, as between GPUs without NVLink multicast.
        options = (("--rank", number, count, port) for number in range(count))
        super().__init__(vramctl, name, __file__, *options, NCCL_LOCAL_REGISTER="1", NCCL_ALGO="Ring")

    def works(self, base):
        """Whether all collectives gave correct results."""
        heard = [self.ask(60, do="step", base=base, kind=kind, graph=graph) for kind in KINDS for graph in (False, True)]
        return all(self.all("right", each) for each in heard), heard

    def does(self, what):
        heard = self.ask(60, do=what)
        return self.all("done", heard), heard

    def pause_or_resume(self, what, *arguments):
        return self.command(what, "--name", self.name, *arguments)

    def end(self):
        # Some hang in a collective.
        for child in self.ranks:
            child.kill()
        for child in self.ranks:
            child.wait(20)


def refused_for_nccl(ranks):
    """Whether a pause is refused because of NCCL, and its message."""
    code, text = ranks.pause_or_resume("pause")
    return code != 0 and re.search(r"[\d.]+ [KMG]iB of default \(NCCL: ncclComm", text) is not None, text


def rule(ranks, name):
    before = used_mib()
    registered, heard = ranks.does("register")
    check(f"{name}: NCCL registers managed memory", registered, heard)
    check(f"{name}: collectives on it, eager and in a graph", *ranks.works(1))
    refused, text = refused_for_nccl(ranks)
    check(f"{name}: a pause is refused, and names the tag, the bytes and NCCL", refused, text)
    check(f"{name}: nothing has changed by that", *ranks.works(2))
    code, text = ranks.pause_or_resume("pause", "--registered", "keep")
    freed = [there - now for there, now in zip(before, used_mib())]
    enough = min(freed[: len(ranks.ranks)]) > BALLAST / MIB * 0.9
    check(f"{name}: --registered keep pauses the rest", code == 0 and enough, f"{freed} MiB less in use; {text}")
    code, text = ranks.pause_or_resume("resume")
    check(f"{name}: resumed", code == 0, text)
    check(f"{name}: collectives after that, eager and in the graphs of before", *ranks.works(3))
    check(f"{name}: deregistered", *ranks.does("deregister"))
    refused, text = refused_for_nccl(ranks)
    check(f"{name}: then NCCL is not in the way", not refused, text)
    # Still refused if NCCL has exported the virtual memory, which cannot be undone.
    ranks.pause_or_resume("resume")
    check(f"{name}: a pool that PyTorch registers", *ranks.does("pool"))
    refused, text = refused_for_nccl(ranks)
    check(f"{name}: a pause is refused because of that, too", refused, text)


def without_the_rule(ranks):
    """What happens if a pause takes registered memory. Not a check: it shows the reason for the rule."""
    ranks.does("register")
    ranks.works(1)
    code, text = ranks.pause_or_resume("pause", "--registered", "take")
    print(f"note: taken: exit code {code}: {text}", flush=True)
    code, text = ranks.pause_or_resume("resume")
    print(f"note: taken: resumed, exit code {code}: {text}", flush=True)
    for kind in KINDS:
        for graph in (True, False):
            heard = ranks.ask(PATIENCE_S, do="step", base=2, kind=kind, graph=graph)
            said = ["hangs" if one is None else "ended" if "ended" in one else "right" if one["right"] else "WRONG" for one in heard]
            print(f"note: taken: {kind}, {'replay of the graph' if graph else 'eager'}: {', '.join(said)}", flush=True)
            if "hangs" in said or "ended" in said:
                return


def main():
    vramctl, count = sys.argv[1], len(used_mib())
    check("there are two GPUs", count > 1, f"{count}")
    # All at once, because most of the time is spent starting them.
    jobs = {"registration-one": 1, **({"registration-two": 2, "registration-taken": 2} if count > 1 else {})}
    started = {name: Ranks(vramctl, name, ranks) for name, ranks in jobs.items()}
    try:
        for name, ranks in started.items():
            heard = ranks.hear(90)
            check(f"{name}: started", ranks.all("ready", heard), heard)
        for name, ranks in started.items():
            try:
                if name == "registration-taken":
                    without_the_rule(ranks)
                else:
                    rule(ranks, name)
            except Exception as error:
                check(f"{name}: runs to its end", False, f"{type(error).__name__}: {error}")
            ranks.end()
    finally:
        for ranks in started.values():
            ranks.end()


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        rank(*map(int, sys.argv[2:5]))
    else:
        main()
