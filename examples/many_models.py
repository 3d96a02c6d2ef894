"""One GPU, many models: a router in front of engines that take turns.

    python examples/many_models.py --port 8000 MODEL… -- vllm serve {model} --port {port} --served-model-name {name}

Starts the command after `--` once for each MODEL, under `vramctl run --name NAME`: {model} is MODEL, {name} its last part, {port} a free port. Each engine is suspended once it serves, so that the next one finds an empty GPU. Then each request goes to the engine named in the field `model` of its JSON body, as in OpenAI's API. If that engine is suspended, it is resumed and the active one is suspended:

    curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d '{"model": "NAME", "prompt": "Hello"}'

It prints a line when an engine has started and for each switch: `NAME is active after 1.23 s`. Ctrl-C ends the engines, too.

A switch does first what delays the first token. The old engine pauses: its weights are in host memory already, and its KV cache is discarded after its prefix cache has been reset. Then the new one resumes. Only then is the old one's CUDA context removed. Requests that are still in flight after --patience seconds are held with their KV cache kept, and continue when it is their engine's turn again. docs/many-models.md says how much host memory this needs. `scripts/gpu-engines --part many` measures it.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

import vramctl

#: Weights do not change, so their copy in host memory is retained. The KV cache is discarded when an engine is paused.
SETTINGS = {"VRAMCTL_RETAIN": "weights", "VRAMCTL_BACKUP": "kv_cache=discard", "VLLM_SERVER_DEV_MODE": "1"}


class Model:
    """An engine, and the requests to it."""

    def __init__(self, name, url=None):
        self.name, self.url = name, url
        self.job = vramctl.Job(name)
        self.in_flight, self.process = 0, None
        #: Requests that wait for its turn, and whether it is in the router's queue.
        self.waiting, self.queued = [], False

    async def pause(self):
        """Releases nearly all of its GPU memory, at once: nothing is copied, unless requests are in flight."""
        if self.in_flight == 0:
            # An engine that is not idle after all, or cannot reset its prefix cache, keeps its KV cache.
            with contextlib.suppress(vramctl.errors.Error):
                await self.job.pause_async(engine=self.url)
                return
        await self.job.pause_async(backup="host")


class Gpu:
    """Gives the GPU to one model at a time."""

    def __init__(self, say=print):
        self.say = say
        self.active = None
        #: The task that suspends the previously active engine.
        self.leaving = None

    async def give_to(self, model):
        """Returns when `model` can answer. If that fails, no engine is active, and the next request's engine gets the GPU."""
        if model is self.active:
            return
        await self.left()
        old = self.active
        if old is not None:
            try:
                await old.pause()
            except vramctl.errors.NoProcess:
                old = None  # it has ended, so nothing of it is on the GPU
        self.active = None
        # Only the CUDA context of `old` is left. It is removed last: doing both at once takes longer.
        coming = asyncio.ensure_future(model.job.resume_async(timeout=60))
        if old is not None:
            self.leaving = asyncio.ensure_future(self._leave(old, coming))
        await coming
        self.active = model

    async def _leave(self, old, coming):
        await asyncio.wait([coming])
        try:
            await old.job.suspend_async()
        except vramctl.errors.Error as error:
            # It stays paused; only its context stays on the GPU.
            self.say(f"{old.name} stays on the GPU with its CUDA context: {error}")

    async def left(self):
        """Waits until the model that was active before is off the GPU."""
        if self.leaving is not None:
            await self.leaving


class Router:
    """Forwards requests to the engines, and decides which one is active: first come, first served."""

    def __init__(self, models, patience):
        self.models, self.patience, self.gpu = {model.name: model for model in models}, patience, Gpu()
        #: One task per request. Kept here, since asyncio may drop a task that nothing else references.
        self.tasks = set()
        #: Models with requests that wait.
        self.queue = asyncio.Queue()
        #: Whether the active model accepts more requests: not while another waits for its turn.
        self.open = False

    @contextlib.asynccontextmanager
    async def turn(self, model):
        """A request's time on the GPU."""
        if not (self.open and model is self.gpu.active):
            admitted = asyncio.get_running_loop().create_future()
            model.waiting.append(admitted)
            self.ask_for(model)
            await admitted
        else:
            model.in_flight += 1
        try:
            yield
        finally:
            model.in_flight -= 1

    def ask_for(self, model):
        if not model.queued:
            model.queued = True
            self.queue.put_nowait(model)

    async def give_turns(self):
        while True:
            model = await self.queue.get()
            model.queued, old, began = False, self.gpu.active, time.monotonic()
            try:
                if model is not old:
                    self.open = False
                    await self.drain(old)
                    await self.gpu.give_to(model)
                    print(f"{model.name} is active after {time.monotonic() - began:.2f} s", flush=True)
                error = None
            except (vramctl.errors.Error, OSError) as failure:
                error = failure
                print(f"{model.name} cannot be active: {failure}", flush=True)
            waiting, model.waiting = model.waiting, []
            for admitted in waiting:
                if admitted.cancelled():
                    continue
                if error is None:
                    model.in_flight += 1
                    admitted.set_result(None)
                else:
                    admitted.set_exception(Unavailable(str(error)))
            self.open = self.gpu.active is not None
            if old is not None and old is not self.gpu.active and old.in_flight:
                self.ask_for(old)  # its requests are held

    async def drain(self, old):
        """Gives requests in flight some time to finish."""
        end = time.monotonic() + self.patience
        while old is not None and old.in_flight and time.monotonic() < end:
            await asyncio.sleep(0.01)

    def accept(self, reader, writer):
        task = asyncio.ensure_future(self.serve(reader, writer))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def serve(self, reader, writer):
        """Handles one HTTP/1.1 request of a client: the engine answers it, then the connection is closed."""
        try:
            head, body = await read_request(reader)
            name = json.loads(body or b"{}").get("model")
            if name not in self.models:
                await refuse(writer, 404, f"no model {name!r}; there are {', '.join(self.models)}")
                return
            async with self.turn(self.models[name]):
                await forward(head, body, self.models[name].port, writer)
        except Unavailable as error:
            await refuse(writer, 503, str(error))
        except (ValueError, AttributeError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            await refuse(writer, 400, f"not a request with a JSON body: {error}")
        except OSError as error:  # the client or the engine has gone
            print(f"a request broke off: {error}", flush=True)
        finally:
            writer.close()


class Unavailable(Exception):
    """A model could not be made active."""


async def read_request(reader):
    head = await reader.readuntil(b"\r\n\r\n")
    lengths = [line.partition(b":")[2] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    return head, await reader.readexactly(int(lengths[0]) if lengths else 0)


async def refuse(writer, status, message):
    body = json.dumps({"error": {"message": message, "code": status}}).encode()
    writer.write(b"HTTP/1.1 %d -\r\nContent-Type: application/json\r\nContent-Length: %d\r\n" % (status, len(body)))
    writer.write(b"Connection: close\r\n\r\n" + body)
    with contextlib.suppress(OSError):
        await writer.drain()


async def forward(head, body, port, writer):
    """Sends a request to an engine, and streams its answer back, token by token."""
    lines = [line for line in head.rstrip().split(b"\r\n") if not line.lower().startswith((b"connection:", b"host:"))]
    try:
        answer, engine = await asyncio.open_connection("127.0.0.1", port)
    except OSError as error:
        raise Unavailable(f"the engine does not answer: {error}") from None
    try:
        engine.write(b"\r\n".join([*lines, b"Host: 127.0.0.1", b"Connection: close", b"", body]))
        while part := await answer.read(1 << 16):
            writer.write(part)
            await writer.drain()
    finally:
        engine.close()


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


async def start(model, command):
    """Starts an engine, waits until it serves, and suspends it."""
    began = time.monotonic()
    model.port = free_port()
    model.url = f"http://127.0.0.1:{model.port}"
    filled = [word.format(model=model.path, name=model.name, port=model.port) for word in command]
    model.process = subprocess.Popen(
        [sys.executable, "-m", "vramctl", "run", "--name", model.name, "--", *filled],
        env={**SETTINGS, **os.environ},
        start_new_session=True,
    )
    while not await serves(model.port):
        if model.process.poll() is not None:
            sys.exit(f"{model.name} has ended with {model.process.returncode} before it served")
        await asyncio.sleep(0.2)
    await model.pause()
    await model.job.suspend_async()
    print(f"{model.name} has started and is suspended after {time.monotonic() - began:.0f} s", flush=True)


async def serves(port):
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    try:
        writer.write(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        return b" 200 " in await reader.readline()
    except OSError:
        return False
    finally:
        writer.close()


async def run(options):
    models = [Model(path.rstrip("/").rsplit("/", 1)[-1]) for path in options.models]
    if len({model.name for model in models}) < len(models):
        sys.exit("the last parts of the MODELs must differ")
    try:
        for model, path in zip(models, options.models):
            model.path = path
            await start(model, options.command)
        router = Router(models, options.patience)
        server = await asyncio.start_server(router.accept, options.host, options.port)
        print(f"serving {', '.join(router.models)} on {options.host}:{server.sockets[0].getsockname()[1]}", flush=True)
        await router.give_turns()
    finally:
        for model in models:
            if model.process is not None:
                # A held engine ends by nothing less than SIGKILL. The group contains the processes that it has started.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(model.process.pid, signal.SIGKILL)
                model.process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--patience", type=float, default=5.0, help="seconds for requests in flight to end, before a switch (5)"
    )
    parser.add_argument("models", nargs="+", metavar="MODEL")
    given = sys.argv[1:]
    split = given.index("--") if "--" in given else len(given)
    options = parser.parse_args(given[:split])
    options.command = given[split + 1 :]
    if not options.command:
        parser.error("which command starts an engine? Give it after --")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run(options))


if __name__ == "__main__":
    main()
