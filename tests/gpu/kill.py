"""Three processes of a job work on one GPU. At each step of the protocol, one of them is killed or stopped, or the command that pauses
or resumes them is killed. The others end up all active or all paused, the message says which, all of them can be resumed, and their
memory is unharmed.

usage: kill.py VRAMCTL            prints a line `ok: …` or `FAILED: …` for each step
       kill.py --program MIB      a process of the job, which kill.py starts under `vramctl run`
"""

import ctypes
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

SIMULATED = bool(os.environ.get("SIMGPU_DIR"))
MIB = 16 if SIMULATED else 512
PART = 8 << 20
#: Jobs at a time. Most of the time they wait for a stopped process.
JOBS = 4 if SIMULATED else 6
EVENTS = ("rank killed", "rank stopped", "command killed")
STEPS = {"pause": ("hold", "drain", "prepare", "renew", "commit", "abort"), "resume": ("prepare", "renew", "commit", "abort")}
DONE = {"pause": "paused", "resume": "active"}


def program(mib):
    """Constantly writes some of its memory, and reports whether the rest is unchanged."""
    cuda = ctypes.CDLL("libcuda.so.1")
    context, memory, scratch = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_uint64()

    def call(name, *arguments):
        code = getattr(cuda, name)(*arguments)
        if code:
            sys.exit(f"{name}: CUDA error {code}")

    def address(of, offset=0):
        return ctypes.c_uint64(of.value + offset)

    call("cuInit", 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    call("cuCtxSetCurrent", context)
    call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(mib << 20))
    call("cuMemAlloc_v2", ctypes.byref(scratch), ctypes.c_size_t(PART))
    offsets = range(0, mib << 20, PART)
    for part, offset in enumerate(offsets):
        call("cuMemsetD8_v2", address(memory, offset), ctypes.c_ubyte(part % 251 + 1), ctypes.c_size_t(PART))
    call("cuCtxSynchronize")
    busy, over = threading.Lock(), threading.Event()

    def work():
        call("cuCtxSetCurrent", context)
        turn = 0
        while not over.is_set():
            with busy:
                turn += 1
                call("cuMemsetD8_v2", scratch, ctypes.c_ubyte(turn % 256), ctypes.c_size_t(PART))
                call("cuCtxSynchronize")
            time.sleep(0.001)

    threading.Thread(target=work, daemon=True).start()
    print("ready", flush=True)
    host = ctypes.create_string_buffer(PART)
    for _ in sys.stdin:
        with busy:
            wrong = 0
            for part, offset in enumerate(offsets):
                call("cuMemcpyDtoH_v2", host, address(memory, offset), ctypes.c_size_t(PART))
                wrong += host.raw != bytes([part % 251 + 1]) * PART
        print(f"{wrong} of {len(offsets)} parts are wrong", flush=True)
    over.set()


class Between:
    """Stands between the command and three processes, and passes on what they say. At one moment of the second process, once, it
    waits until `event` is done.
    """

    def __init__(self, pids, request, answered, event):
        self.folder = tempfile.TemporaryDirectory()
        os.chmod(self.folder.name, 0o700)
        self.moment, self.event = (request, answered), event
        self.passed, self.once = threading.Event(), threading.Lock()
        self.begun, self.listeners = False, []
        for place, pid in enumerate(pids):
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(f"{self.folder.name}/{pid}.sock")
            listener.listen(16)
            self.listeners.append(listener)
            threading.Thread(target=self.accept, args=(listener, place, pid), daemon=True).start()

    def close(self):
        for listener in self.listeners:
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        self.folder.cleanup()

    def accept(self, listener, place, pid):
        while True:
            try:
                command, _ = listener.accept()
            except OSError:
                return
            try:
                process = connect(pid)
            except OSError:
                command.close()
                continue
            asked = [""]
            for sides in ((command, process), (process, command)):
                threading.Thread(target=self.pass_on, args=(sides, sides[0] is command, place, asked), daemon=True).start()

    def pass_on(self, sides, is_request, place, asked):
        try:
            while True:
                line, files = line_with_files(sides[0])
                if not line:
                    break
                request = json.loads(line)["request"] if is_request else asked[0]
                if is_request and request != "renew":
                    asked[0] = request
                if not self.come_to(place, request, not is_request):
                    break
                socket.send_fds(sides[1], [line], files)
                for file in files:
                    os.close(file)
        except OSError:
            pass
        for side in sides:
            try:
                side.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def come_to(self, place, request, answered):
        if place == 1 and (request, answered) == self.moment:
            with self.once:
                if not self.begun:
                    self.begun = True
                    self.event()
            self.passed.set()
        if (place, request, answered) == (0, "prepare", True) and self.moment[0] == "renew":
            # Renew the leases of the others, which wait for this one.
            self.passed.wait(20)
        # One that cannot prepare, so that the others are asked to abort.
        return (place, request, answered) != (2, "prepare", True) or self.moment[0] != "abort"


def line_with_files(side):
    line, files = b"", []
    while not line.endswith(b"\n"):
        # One by one: what comes behind the line has files of its own.
        byte, more, _, _ = socket.recv_fds(side, 1, 4)
        files += more
        if not byte:
            return b"", files
        line += byte
    return line, files


def connect(pid):
    control = socket.socket(socket.AF_UNIX)
    control.connect(f"{os.environ['VRAMCTL_DIR']}/{pid}.sock")
    return control


def state(pid):
    with connect(pid) as control:
        control.settimeout(20)
        control.sendall(b'{"version":1,"request":"status"}\n')
        told = json.loads(control.makefile().readline())
    if told.get("code") == "busy":
        return "busy"
    return "/".join(sorted({tag["state"] for tag in told["tags"]}))


def settled(pids):
    """The state of all of them, once no transition is in progress."""
    limit = time.monotonic() + 15
    while True:
        states = [state(pid) for pid in pids]
        if len(set(states)) == 1 and states[0] in ("active", "paused"):
            return states[0]
        if time.monotonic() > limit:
            return f"split: {states}"
        time.sleep(0.01)


class Job:
    def __init__(self, vramctl, number):
        self.vramctl, self.name = vramctl, f"kill-{number}"
        self.ranks = [self.start() for _ in range(3)]
        for rank in self.ranks:
            self.ready(rank)

    def start(self):
        own = [sys.executable, os.path.abspath(__file__), "--program", str(MIB)]
        command = [self.vramctl, "run", "--name", self.name, "--no-python", "--", *own]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ready(self, rank):
        if rank.stdout.readline().strip() != "ready":
            raise SystemExit("kill.py: a process did not start")

    def command(self, verb, **environment):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen([self.vramctl, verb, "--name", self.name], env={**os.environ, **environment}, **pipes)

    def run(self, verb):
        command = self.command(verb)
        out, err = command.communicate(timeout=60)
        return "" if command.returncode == 0 else f"vramctl {verb}: {out}{err}"

    def happens(self, verb, request, answered, event):
        """What is wrong, if anything; the state that the others end up in; what the message says."""
        faults = [self.run("pause") if verb == "resume" else ""]
        pids, command, started = [rank.pid for rank in self.ranks], None, threading.Event()

        def now():
            started.wait(20)
            if event == "command killed":
                command.kill()
            else:
                os.kill(pids[1], signal.SIGKILL if event == "rank killed" else signal.SIGSTOP)
                # A stopped process keeps running until all of its threads have noticed.
                os.waitid(os.P_PID, pids[1], os.WEXITED | os.WSTOPPED | os.WNOWAIT)

        between = Between(pids, request, answered, now)
        try:
            command = self.command(verb, VRAMCTL_DIR=between.folder.name)
            started.set()
            out, err = command.communicate(timeout=60)
        finally:
            between.close()
        if not between.passed.wait(20):
            faults.append(f"the moment did not come: {out}{err}")
        survivors = [pid for pid in pids if event == "command killed" or pid != pids[1]]
        end = settled(survivors)
        if event != "command killed":
            says_done = f"{verb}d job {self.name}" in out
            says_not = f"nothing was {verb}d" in err
            if (says_done, says_not) != ((True, False) if end == DONE[verb] else (False, True)):
                faults.append(f"they are {end}, and the message is {out}{err}")
            all_well = (request, answered) == ("commit", True)
            if (command.returncode == 0) != all_well or not (all_well or str(pids[1 if request != "abort" else 2]) in err):
                faults.append(f"exit code {command.returncode}: {out}{err}")
        if request == "commit" and end != DONE[verb]:
            faults.append(f"it was committed, and they are {end}")
        if event == "rank stopped":
            os.kill(pids[1], signal.SIGCONT)
            if settled(pids) != end:
                faults.append(f"when it goes on: {settled(pids)}, and the others {end}")
        faults.append(self.run("resume"))
        if event == "rank killed":
            self.ranks[1].wait()
            self.ranks[1] = self.start()
        for rank in self.ranks:
            if rank.pid in survivors or event == "rank stopped":
                rank.stdin.write("verify\n")
                rank.stdin.flush()
                told = rank.stdout.readline().strip()
                if not told.startswith("0 of "):
                    faults.append(f"process {rank.pid}: {told or 'has ended'}")
        if event == "rank killed":
            self.ready(self.ranks[1])
        return "; ".join(fault for fault in faults if fault), end

    def end(self):
        for rank in self.ranks:
            rank.kill()
            rank.wait()


def main():
    with tempfile.TemporaryDirectory(prefix="vramctl-kill.") as sockets:
        # In a socket directory of their own, because the steps are taken here and not by the command.
        os.environ["VRAMCTL_DIR"] = sockets
        try_all(sys.argv[1])


def try_all(vramctl):
    begun = time.monotonic()
    cases, seen, lock = queue.SimpleQueue(), {}, threading.Lock()
    places = [(verb, request, answered) for verb in STEPS for request in STEPS[verb] for answered in (False, True)]
    places = [place for place in places if place[1:] != ("renew", True)]  # nobody answers that
    for event in sorted(EVENTS, key=lambda event: event != "rank stopped"):  # the longest first
        for place in places:
            cases.put((place, event))

    def in_turn(number):
        job = Job(vramctl, number)
        try:
            while True:
                try:
                    place, event = cases.get_nowait()
                except queue.Empty:
                    return
                try:
                    found = job.happens(*place, event)
                except Exception as error:
                    with lock:
                        seen[place, event] = (f"{type(error).__name__}: {error}", "?")
                    return
                with lock:
                    seen[place, event] = found
        finally:
            job.end()

    threads = [threading.Thread(target=in_turn, args=(number,)) for number in range(JOBS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for event in EVENTS:
        for verb in STEPS:
            of = [(place, *seen.get((place, event), ("not tried", "?"))) for place in places if place[0] == verb]
            faults = [f"{request}{' answered' if answered else ''}: {fault}" for (_, request, answered), fault, _ in of if fault]
            ends = ", ".join(f"{request}{' answered' if answered else ''} {end}" for (_, request, answered), _, end in of)
            what = f"{verb}: {event} at each step, and the rest are in one state, resumable and unharmed"
            print(f"{'FAILED' if faults else 'ok'}: {what}: {'; '.join(faults)[:1500] or ends}", flush=True)
    print(f"{len(seen)} moments in {time.monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--program"]:
        program(int(sys.argv[2]))
    else:
        main()
