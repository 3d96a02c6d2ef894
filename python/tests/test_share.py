"""Engines that share a GPU by themselves, behind any router: the stand-ins have HTTP, as those of examples/litellm.yaml."""

import concurrent.futures
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import unittest
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import support  # noqa: E402

#: An engine: each token depends on its weights, and on what the tokens before it have left in the KV cache.
ENGINE = """
import http.server, json, sys, threading, time, zlib
sys.path.insert(0, {tests!r})
from support import Cuda, MIB, pattern
import vramctl
from vramctl import engines
name, port, SIZE = sys.argv[1], int(sys.argv[2]), 40
cuda, lock, running = Cuda(), threading.Lock(), []
with vramctl.region("weights"):
    weights = cuda.malloc(SIZE * MIB)
with vramctl.region("kv_cache"):
    cache = cuda.malloc(4 * MIB)
cuda.write(weights, pattern(len(name), SIZE * MIB))
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
        with lock:
            running.append(1)
            cuda.write(cache, zlib.crc32(cuda.read(weights, SIZE * MIB)).to_bytes(4, "little"))
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
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
""".format(tests=str(pathlib.Path(__file__).resolve().parent))


class Sharing(unittest.TestCase):
    """Two engines of 44 MiB on a GPU of 64 MiB."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        engine = pathlib.Path(folder.name) / "engine.py"
        engine.write_text(ENGINE)
        self.ports = {}
        without = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        more = {"PYTHONPATH": str(support.ROOT / "python"), "SIMGPU_DIR": folder.name, "SIMGPU_MEMORY": "64M"}
        more["VRAMCTL_DIR"] = str(pathlib.Path(folder.name) / "sockets")
        self.environment = {**without, **more}
        for name in ("one", "another"):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                self.ports[name] = free.getsockname()[1]
            command = [sys.executable, "-m", "vramctl", "run", "--share", "--name", name, "--"]
            process = subprocess.Popen(
                [*command, sys.executable, str(engine), name, str(self.ports[name])], env=self.environment
            )
            self.addCleanup(process.wait)
            self.addCleanup(process.kill)
        for port in self.ports.values():
            support.eventually("it serves", lambda port=port: socket.socket().connect_ex(("127.0.0.1", port)) == 0)

    def ask(self, model, tokens=3):
        body = json.dumps({"model": model, "max_tokens": tokens}).encode()
        url = f"http://127.0.0.1:{self.ports[model]}/v1/completions"
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=120) as answer:
            return answer.read().decode().split()

    def view(self):
        command = [sys.executable, "-m", "vramctl", "share", "--json"]
        return json.loads(subprocess.check_output(command, env=self.environment))

    def test_each_answers_as_if_alone_whoever_has_the_gpu(self):
        first = {name: self.ask(name) for name in self.ports}
        self.assertNotEqual(first["one"], first["another"])
        for turn in range(2):
            for name, tokens in first.items():
                self.assertEqual(self.ask(name), tokens, f"turn {turn}")
        self.assertTrue(any(change["outcome"] == "changed" and change["came"] for change in self.view()["changes"]))

    def test_requests_at_once_are_all_answered(self):
        alone = {name: self.ask(name, 50) for name in self.ports}
        with concurrent.futures.ThreadPoolExecutor() as threads:
            asked = [(name, threads.submit(self.ask, name, 50)) for name in [*self.ports] * 3]
            for name, answer in asked:
                self.assertEqual(answer.result(), alone[name], name)

    def test_one_that_ends_leaves_its_room_to_the_other(self):
        tokens = self.ask("one")
        (dead,) = [member["pid"] for member in self.view()["members"] if member["name"] == "another"]
        os.kill(dead, signal.SIGKILL)
        self.assertEqual(self.ask("one"), tokens)

    def test_the_example_sends_nothing_twice_and_gives_up_late(self):
        text = (support.ROOT / "examples/litellm.yaml").read_text()
        lines = [line.partition(" #")[0].strip() for line in text.splitlines()]
        for line in ("num_retries: 0", "disable_cooldowns: true", "request_timeout: 900"):
            self.assertIn(line, lines)
        started = re.findall(r"--port (\d+) --served-model-name (\w+)", text)
        served = re.findall(r"hosted_vllm/(\w+).*\n +api_base: http://127.0.0.1:(\d+)/v1", text)
        self.assertEqual([(port, name) for name, port in served], started)
        self.assertEqual(len(started), 2)


if __name__ == "__main__":
    unittest.main()
