"""Whether the library ever holds up a program's launches and event records: during a pause that gives up, while host memory is unpinned, and
while a kernel is loaded. With work in flight that ends only after the program's next launches, as between the stages of a pipeline,
between two streams whose work waits for each other, and with a kernel that runs until it is told to end.

usage: stalls.py VRAMCTL            prints a line `ok: …` or `FAILED: …` for each check, and a table
       stalls.py --program KIND MIB the program, which stalls.py starts under `vramctl run`; needs no PyTorch
"""

import ctypes
import json
import os
import subprocess
import sys
import threading
import time

from common import check, failures

#: Host memory to be unpinned.
MIB = 512
#: How much longer the longest call may take than without the library at work, in ms.
MORE = 1.0
KINDS = ["busy", "pipeline", "crossed", "persistent"]
#: Seconds from one turn of a pipeline to the next: longer than a pause that gives up waits.
PERIOD = 2.5
#: Seconds that unused host memory stays pinned.
KEEP = 2
PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry nothing() { ret; }
.visible .entry simgpu_persistent(.param .u64 word, .param .u64 memory, .param .u64 bytes) {
	.reg .u64 %a;
	.reg .u32 %v;
	.reg .pred %q;
	ld.param.u64 %a, [word];
again:
	ld.volatile.global.u32 %v, [%a];
	setp.eq.u32 %q, %v, 0;
	@%q bra again;
	ret;
}
"""


class Program:
    """Launches on one stream, while work on others waits for something."""

    def __init__(self, kind, mib):
        self.kind, self.cuda, self.hooked = kind, ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(None)
        context, module = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.call("cuCtxSetCurrent", context)
        self.call("cuModuleLoadData", ctypes.byref(module), PTX)
        self.nothing, self.persistent = (ctypes.c_void_p() for _ in range(2))
        self.call("cuModuleGetFunction", ctypes.byref(self.nothing), module, b"nothing")
        self.call("cuModuleGetFunction", ctypes.byref(self.persistent), module, b"simgpu_persistent")
        self.streams = [ctypes.c_void_p() for _ in range(3)]
        for stream in self.streams:
            self.call("cuStreamCreate", ctypes.byref(stream), 1)
        self.event, page, self.memory = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuEventCreate", ctypes.byref(self.event), 2)
        self.call("cuMemHostAlloc", ctypes.byref(page), ctypes.c_size_t(4096), 0)
        self.words = [ctypes.c_uint32.from_address(page.value + 64 * place) for place in range(2)]
        self.bytes = ctypes.c_size_t(mib << 20)
        self.call("cuMemAlloc_v2", ctypes.byref(self.memory), self.bytes)
        self.call("cuMemsetD8_v2", self.memory, ctypes.c_ubyte(7), self.bytes)
        self.turn, self.is_working, self.next_turn = 0, False, 0.0

    def call(self, name, *arguments):
        code = getattr(self.cuda, name)(*arguments)
        if code != 0:
            raise RuntimeError(f"{name} answered {code}")

    def launch(self, function, stream, *arguments):
        values = (ctypes.c_void_p * max(1, len(arguments)))(*(ctypes.addressof(one) for one in arguments))
        self.call("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, stream, values, None)

    def wait_for(self, stream, word, value):
        """Later work of the stream waits until the word is at least this."""
        self.call("cuStreamWaitValue32_v2", self.streams[stream], ctypes.c_void_p(ctypes.addressof(self.words[word])), value, 0)

    def work(self):
        """Puts work in flight that ends only after later launches of this thread."""
        if self.kind == "persistent":
            self.words[0].value = 0
            word = ctypes.c_void_p(ctypes.addressof(self.words[0]))
            self.launch(self.persistent, self.streams[1], word, self.memory, self.bytes)
        elif self.kind != "busy":
            self.turn += 1
            self.wait_for(1, 0, self.turn)
            self.launch(self.nothing, self.streams[1])
            if self.kind == "crossed":
                self.wait_for(2, 1, self.turn)
                self.launch(self.nothing, self.streams[2])
        self.is_working = True

    def go_on(self):
        """What a launch brings about: the work in flight ends, and other work is there before it has."""
        now = time.perf_counter()
        if self.kind in ("pipeline", "crossed") and now >= self.next_turn:
            before = self.turn
            self.work()
            self.words[0].value = before
            self.words[1].value = before
            self.next_turn = now + PERIOD

    def end_work(self):
        for word in self.words:
            word.value = max(1, self.turn)
        for stream in self.streams:
            self.call("cuStreamSynchronize", stream)
        self.is_working = False

    def measure(self, seconds):
        """The longest launch and the longest event record, in ms."""
        if not self.is_working:
            self.work()
        longest, count, end = [0.0, 0.0], 0, time.perf_counter() + seconds
        while time.perf_counter() < end:
            moments = [time.perf_counter()]
            self.launch(self.nothing, self.streams[0])
            moments.append(time.perf_counter())
            self.call("cuEventRecord", self.event, self.streams[0])
            moments.append(time.perf_counter())
            longest = [max(most, after - before) for most, before, after in zip(longest, moments, moments[1:])]
            count += 1
            self.go_on()
            while self.cuda.cuEventQuery(self.event) == 600:
                pass
            time.sleep(0.0002)
        return {"launch": longest[0] * 1e3, "record": longest[1] * 1e3, "count": count}

    def retain(self):
        code = self.hooked.vramctl_set_retain(None, 1)
        return {"code": code}


def program(kind, mib):
    program = Program(kind, mib)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        what, *numbers = line.split()
        answer = getattr(program, what)(*map(float, numbers)) or {}
        print(json.dumps(answer), flush=True)




class Measured:
    """One program of a kind, and what was measured without the library at work."""

    def __init__(self, vramctl, kind):
        self.vramctl, self.kind, self.name = vramctl, kind, f"stalls-{kind}"
        command = [vramctl, "run", "--name", self.name, sys.executable, __file__, "--program", kind, str(MIB)]
        environment = {**os.environ, "VRAMCTL_HOST_KEEP": str(KEEP)}
        self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        self.hear(120)
        self.ask("work")
        self.ask("end_work")
        self.plain = {"launch": 0, "record": 0}
        for _ in range(3):
            seen = self.ask("measure", 1)
            self.plain = {what: max(self.plain[what], seen[what]) for what in self.plain}

    def hear(self, seconds):
        timer = threading.Timer(seconds, self.child.kill)
        timer.start()
        line = self.child.stdout.readline()
        timer.cancel()
        if not line:
            raise RuntimeError(f"{self.name} did not answer within {seconds} s")
        return json.loads(line)

    def tell(self, *words):
        self.child.stdin.write(" ".join(map(str, words)) + "\n")
        self.child.stdin.flush()

    def ask(self, *words, seconds=60):
        self.tell(*words)
        return self.hear(seconds)

    def run(self, *arguments):
        done = subprocess.run([self.vramctl, *arguments, "--name", self.name], capture_output=True, text=True, timeout=60, check=False)
        return done.returncode, done.stdout + done.stderr

    def pinned(self):
        _, text = self.run("status", "--json")
        return sum(process["host"]["pinned_bytes"] for process in json.loads(text)["processes"])

    def row(self, what, seen, allowed=0.0):
        print(
            f"| {self.kind} | {what} | {self.plain['launch']:.3f} | {seen['launch']:.3f} | {self.plain['record']:.3f} "
            f"| {seen['record']:.3f} | {seen['count']} |",
            flush=True,
        )
        limit = MORE + allowed
        late = [f"{call} {seen[call]:.2f} ms" for call in ("launch", "record") if seen[call] > self.plain[call] + limit]
        check(f"{self.kind}, {what}: launches and event records go on", not late, ", ".join(late))

    def give_up(self):
        """A pause without hold waits for the work while the program runs on, and then gives up."""
        self.tell("measure", 2.5)
        time.sleep(0.3)
        code, text = self.run("pause", "--no-hold", "--timeout", "1")
        seen = self.hear(30)
        check(f"{self.kind}: a pause without hold gives up", code == 5, f"{code}: {text}")
        self.row("a pause that gives up", seen)
        # One with hold keeps launches waiting for as long as it was told to, and then lets them go.
        self.tell("measure", 3.5)
        time.sleep(0.3)
        code, text = self.run("pause", "--hold-timeout", "1")
        seen = self.hear(30)
        if code == 0:
            self.run("resume")
        self.row("a held pause of at most 1 s", seen, 1000 if code == 5 else 4000)
        self.row("after it", self.ask("measure", 1))

    def unpin(self):
        code, text = self.run("pause")
        check(f"{self.kind}: paused while nothing is in flight", code == 0, text)
        code, text = self.run("resume")
        check(f"{self.kind}: resumed", code == 0, text)
        self.row("host memory is due to be unpinned", self.ask("measure", KEEP + 3))
        if self.kind != "busy":
            check(f"{self.kind}: no host memory is unpinned under the work", self.pinned() >= MIB << 20, f"{self.pinned()} bytes")
        self.ask("end_work")
        end = time.monotonic() + 15
        while self.pinned() > 0 and time.monotonic() < end:
            time.sleep(0.1)
        check(f"{self.kind}: it is once the program is idle", self.pinned() == 0, f"{self.pinned()} bytes")

    def load(self):
        self.tell("retain")
        self.hear(30)
        self.row("a kernel is loaded", self.ask("measure", 2))
        self.ask("end_work")

    def end(self):
        self.child.stdin.close()
        try:
            check(f"{self.kind}: the program ends well", self.child.wait(30) == 0)
        finally:
            self.child.kill()


def main(vramctl):
    print("| program | what | longest launch, ms: without | with | event record: without | with | launches |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for kind in KINDS:
        measured = Measured(vramctl, kind)
        try:
            measured.ask("end_work")
            measured.unpin()
            measured.ask("work")
            measured.load()
            measured.ask("work")
            if kind != "busy":
                measured.give_up()
            measured.ask("end_work")
        finally:
            measured.end()
    return bool(failures)


if __name__ == "__main__":
    if sys.argv[1] == "--program":
        program(sys.argv[2], int(sys.argv[3]))
    else:
        sys.exit(main(sys.argv[1]))
