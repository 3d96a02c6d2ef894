"""`python server.py NAME PORT WEIGHTS CACHE [WORKERS]`: serves the stand-in's engine, each worker with weights and a KV cache of so many MiB."""

import http.server
import json
import pathlib
import sys
import threading

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "fake_torch")]

from vllm.v1.engine.core import EngineCoreProc, EngineCoreRequestType, Request, after, first  # noqa: E402

from support import MIB, pattern  # noqa: E402


def weights(name: str, mib: int) -> bytes:
    return pattern(sum(name.encode()), mib * MIB)


def tokens(name: str, mib: int, prompt: str, count: int) -> "list[int]":
    """What an engine answers."""
    state, made = first(weights(name, mib), prompt), []
    for _ in range(count):
        state = after(state)
        made.append(int.from_bytes(state, "little"))
    return made


def main() -> None:
    name, port, size, cache, *workers = sys.argv[1], *map(int, sys.argv[2:])
    engine = EngineCoreProc(weights(name, size), cache * MIB, *workers)
    goes_on = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            scheduler = engine.scheduler
            counts = {"hits": scheduler.hits, "resets": scheduler.resets, "running": len(scheduler.running)}
            self.wfile.write(json.dumps(counts).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            request = None
            if self.path == "/stall":
                goes_on.clear()
                engine.input_queue.put((EngineCoreRequestType.UTILITY, ("stall", (goes_on,))))
            elif self.path == "/go-on":
                goes_on.set()
            else:
                request = Request(body["prompt"], body["max_tokens"])
                engine.input_queue.put((EngineCoreRequestType.ADD, (request, 0)))
            # Whoever asks hears of it when it is in the engine's queue.
            self.send_response(200)
            self.end_headers()
            while request is not None and (token := request.outputs.get()) is not None:
                self.wfile.write(b"%d " % token)
                self.wfile.flush()

        def log_message(self, *_: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    engine.run_busy_loop()


if __name__ == "__main__":
    main()
