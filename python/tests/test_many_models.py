"""examples/many_models.py on the simulated GPU: engines take turns, and nobody's answer changes. The engines are stand-ins with HTTP."""

import asyncio
import concurrent.futures
import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.error
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import support  # noqa: E402
import vramctl  # noqa: E402

#: An engine: each token depends on its weights, and on what the tokens before it have left in the KV cache.
ENGINE = """
import http.server, json, sys, threading, time, zlib
sys.path.insert(0, {tests!r})
from support import Cuda, MIB, pattern
import vramctl
from vramctl import engines
name, port = sys.argv[1], int(sys.argv[2])
cuda, lock, running, resets = Cuda(), threading.Lock(), [], []
with vramctl.region("weights"):
    weights = cuda.malloc(8 * MIB)
with vramctl.region("kv_cache"):
    cache = cuda.malloc(4 * MIB)
cuda.write(weights, pattern(len(name), 8 * MIB))
engines.announce("vllm", tags_cache=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, text):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())
    def do_GET(self):
        self.answer(f"vllm:num_requests_running {{len(running)}}\\nvllm:num_requests_waiting 0\\n")
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or b"{{}}")
        if self.path == "/reset_prefix_cache":
            resets.append(1)
            return self.answer("{{}}")
        with lock:
            running.append(1)
            cuda.write(cache, zlib.crc32(cuda.read(weights, 8 * MIB)).to_bytes(4, "little"))
            tokens = []
            self.send_response(200)
            self.end_headers()
            for _ in range(body["max_tokens"]):
                tokens.append(zlib.crc32(cuda.read(weights, 4096), zlib.crc32(cuda.read(cache, 4))))
                cuda.write(cache, tokens[-1].to_bytes(4, "little"))
                self.wfile.write(b"%d " % tokens[-1])
                self.wfile.flush()
                time.sleep(0.005)
            running.pop()
        self.wfile.write(b"after %d resets" % len(resets))
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
""".format(tests=str(pathlib.Path(__file__).resolve().parent))


class ManyModels(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        engine = pathlib.Path(folder.name) / "engine.py"
        engine.write_text(ENGINE)
        without = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        command = [
            sys.executable,
            support.ROOT / "examples/many_models.py",
            "--port",
            "0",
            "--patience",
            "0.1",
            "some/one",
            "another",
        ]
        self.router = subprocess.Popen(
            [*map(str, command), "--", sys.executable, str(engine), "{name}", "{port}"],
            stdout=subprocess.PIPE,
            text=True,
            env={**without, "PYTHONPATH": str(support.ROOT / "python"), "SIMGPU_CONTEXT_BYTES": str(16 << 20)},
        )
        self.addCleanup(self.end)
        lines = [self.router.stdout.readline() for _ in range(3)]
        self.assertIn("one has started and is suspended", lines[0])
        self.assertIn("serving one, another on 127.0.0.1:", lines[2])
        self.port = int(lines[2].rpartition(":")[2])

    def end(self):
        self.router.terminate()
        self.router.communicate(timeout=60)

    def ask(self, model, tokens=3):
        """The tokens, and how often the engine has reset its prefix cache."""
        body = json.dumps({"model": model, "max_tokens": tokens}).encode()
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=120) as answer:
            told, _, resets = answer.read().decode().partition("after ")
            return told.split(), int(resets.split()[0])

    def on_the_gpu(self):
        """The names of the engines with memory on the GPU."""
        told = json.loads(subprocess.check_output(["simgpu-smi", "--json"]))
        pids = {one["pid"] for device in told["devices"] for one in device["processes"]}
        return sorted(process.name for process in vramctl.processes() if process.pid in pids)

    def wait_until_on_the_gpu(self, *names):
        support.eventually(f"{names} on the GPU", lambda: self.on_the_gpu() == sorted(names))

    def test_engines_take_turns(self):
        self.assertEqual(self.on_the_gpu(), [], "both are suspended")
        first = {name: self.ask(name)[0] for name in ("one", "another")}
        self.assertNotEqual(first["one"], first["another"])
        for turn in range(2):
            for name in first:
                tokens, resets = self.ask(name)
                self.assertEqual(tokens, first[name], f"turn {turn}")
                # Once when it had started, and each time it has left since.
                # Each time before the pause, and once more when the engine is held: a request in between fills the cache again.
                self.assertEqual(resets, 2 * (turn + 2), "its prefix cache described a KV cache that was dropped")
                self.wait_until_on_the_gpu(name)

    def test_requests_in_flight_go_on_when_it_is_their_turn_again(self):
        # The more tokens, the slower may the machine be.
        for tokens in (600, 3000, 12000):
            alone, resets = self.ask("one", tokens)
            with concurrent.futures.ThreadPoolExecutor() as threads:
                long = threads.submit(self.ask, "one", tokens)
                time.sleep(0.3)
                short = [threads.submit(self.ask, "another") for _ in range(3)]
                concurrent.futures.wait(short, return_when=concurrent.futures.FIRST_COMPLETED)
                was_in_the_middle = not long.done()
                self.assertEqual(len({tuple(one.result()[0]) for one in short}), 1)
                if was_in_the_middle:
                    # Its prefix cache was not reset meanwhile.
                    self.assertEqual(long.result(), (alone, resets))
                    return
        self.fail("it has never been in the middle")

    def raw(self, body, headers=b"", start=b"POST /v1/completions HTTP/1.1"):
        """The status and the body of the answer to bytes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as client, contextlib.suppress(ConnectionError):
            client.sendall(start + b"\r\nHost: x\r\nContent-Length: %d\r\n" % len(body) + headers + b"\r\n" + body)
            answer = b""
            while part := client.recv(1 << 16):
                answer += part
        head, _, body = answer.partition(b"\r\n\r\n")
        return int(head.split()[1]), body

    def test_odd_requests_are_answered(self):
        for name, wanted, request in (
            ("a list", 404, (b"[1]",)),
            ("a list of models", 404, (b'{"model": []}',)),
            ("an object", 404, (b'{"model": {}}',)),
            ("deep", 400, (b"[" * 100_000,)),
            ("no JSON", 400, (b"{",)),
            ("chunks", 400, (b"", b"Transfer-Encoding: chunked\r\n")),
            ("two lengths", 400, (b"{}", b"Content-Length: 3\r\n")),
            ("a negative length", 400, (b"", b"Content-Length: -5\r\n")),
            ("the models", 200, (b"", b"", b"GET /v1/models HTTP/1.1")),
            ("its health", 200, (b"", b"", b"GET /health HTTP/1.1")),
        ):
            with self.subTest(name):
                status, body = self.raw(*request)
                self.assertEqual(status, wanted, body)
                self.assertTrue(isinstance(json.loads(body), dict))
        status, rest = self.raw(b'{"model": "one", "max_tokens": 1}', b"Expect: 100-continue\r\n")
        self.assertEqual((status, b" 200 " in rest), (100, True))

    def test_however_often_it_is_told_to_end_its_engines_end_with_it(self):
        engines = [process.pid for process in vramctl.processes()]
        self.assertEqual(len(engines), 2)
        while self.router.poll() is None:
            self.router.terminate()
            time.sleep(0.001)
        self.assertEqual([pid for pid in engines if os.path.exists(f"/proc/{pid}")], [])

    def test_a_leave_that_fails_fails_once(self):
        sys.path.insert(0, str(support.ROOT / "examples"))
        self.addCleanup(sys.path.remove, str(support.ROOT / "examples"))
        from many_models import Gpu

        async def leave():
            gpu = Gpu(lambda _: None)
            gpu.leaving = asyncio.get_running_loop().create_future()
            gpu.leaving.set_exception(OSError("no descriptor"))
            with self.assertRaises(OSError):
                await gpu.left()
            await gpu.left()

        asyncio.run(leave())

    def test_who_is_not_there_is_said(self):
        with self.assertRaises(urllib.error.HTTPError) as unknown:
            self.ask("third")
        self.assertEqual(unknown.exception.code, 404)
        self.assertIn("there are one, another", unknown.exception.read().decode())
        unknown.exception.close()
        self.ask("one")
        (dead,) = [process.pid for process in vramctl.processes() if process.name == "another"]
        os.kill(dead, signal.SIGKILL)
        with self.assertRaises(urllib.error.HTTPError) as ended:
            self.ask("another")
        self.assertEqual(ended.exception.code, 503)
        ended.exception.close()
        self.ask("one")
        support.eventually("its health tells", lambda: self.raw(b"", b"", b"GET /health HTTP/1.1")[0] == 503)
        states = json.loads(self.raw(b"", b"", b"GET /health HTTP/1.1")[1])["models"]
        self.assertEqual(states, {"one": "active", "another": "ended"})


if __name__ == "__main__":
    unittest.main()
