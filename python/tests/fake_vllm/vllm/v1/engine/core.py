from __future__ import annotations

import contextlib
import enum
import multiprocessing
import queue
import threading
import time
import types
import zlib
from typing import Any

from vllm.v1.worker.gpu_worker import Worker

BLOCK = 2 << 20
#: How long a step takes.
STEP_S = 0.003


class EngineCoreRequestType(enum.Enum):
    ADD = b"\x00"
    ABORT = b"\x01"
    UTILITY = b"\x03"
    WAKEUP = b"\x05"


class Request:
    def __init__(self, prompt: str, max_tokens: int) -> None:
        self.prompt, self.max_tokens, self.made = prompt, max_tokens, 0
        self.blocks: list[int] = []
        self.outputs: queue.Queue[int | None] = queue.Queue()


def first(weights: bytes, prompt: str) -> bytes:
    """What a prompt leaves in the KV cache."""
    return zlib.crc32(prompt.encode(), zlib.crc32(weights)).to_bytes(4, "little")


def after(state: bytes) -> bytes:
    """What a token leaves there."""
    return zlib.crc32(state).to_bytes(4, "little")


class Scheduler:
    """Requests and blocks."""

    def __init__(self, blocks: int) -> None:
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.free = list(range(blocks))
        self.blocks = blocks
        #: Blocks by their prompts. They are free as well: reused when no others are left.
        self.cached: dict[str, int] = {}
        self.hits = self.resets = 0

    def has_requests(self) -> bool:
        return bool(self.waiting or self.running)

    def take(self) -> int:
        block = self.free.pop(0)
        self.cached = {prompt: its for prompt, its in self.cached.items() if its != block}
        return block

    def finish(self, request: Request) -> None:
        self.running.remove(request)
        self.free += request.blocks

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        if len(self.free) < self.blocks:
            return False
        self.cached.clear()
        self.resets += 1
        return True


def serve(config: Any, weights: bytes, cache: int, calls: Any) -> None:
    """A worker in a process of its own."""
    worker = Worker(config)
    worker.load_model(weights)
    worker.initialize_cache(cache)
    # It ends with the engine.
    with contextlib.suppress(EOFError, BrokenPipeError):
        calls.send(None)
        while True:
            method, arguments = calls.recv()
            calls.send(getattr(worker, method)(*arguments))


class Executor:
    """Has all workers do the same, and expects the same of all. One is in this process; several have one each, as in vLLM."""

    def __init__(self, config: Any, weights: bytes, cache: int) -> None:
        self.pipes: list[Any] = []
        if config.parallel_config.world_size == 1:
            self.worker = Worker(config)
            self.worker.load_model(weights)
            self.worker.initialize_cache(cache)
            return
        spawn = multiprocessing.get_context("spawn")
        for _ in range(config.parallel_config.world_size):
            ours, theirs = spawn.Pipe()
            spawn.Process(target=serve, args=(config, weights, cache, theirs), daemon=True).start()
            self.pipes.append(ours)
        for pipe in self.pipes:
            pipe.recv()

    def call(self, method: str, *arguments: Any) -> Any:
        if not self.pipes:
            return getattr(self.worker, method)(*arguments)
        for pipe in self.pipes:
            pipe.send((method, arguments))
        first, *others = [pipe.recv() for pipe in self.pipes]
        assert all(other == first for other in others), (method, first, others)
        return first


class EngineCore:
    def __init__(self, weights: bytes, cache: int, workers: int = 1) -> None:
        parallel = types.SimpleNamespace(world_size=workers, tensor_parallel_size=workers)
        model = types.SimpleNamespace(enable_sleep_mode=False, enable_cumem_allocator=False)
        self.vllm_config = types.SimpleNamespace(model_config=model, parallel_config=parallel)
        self.executor = Executor(self.vllm_config, weights, cache)
        self.scheduler = Scheduler(cache // BLOCK)

    def add_request(self, request: Request, request_wave: int = 0) -> None:
        self.scheduler.waiting.append(request)

    def step(self) -> None:
        scheduler, call = self.scheduler, self.executor.call
        while scheduler.waiting:
            scheduler.running.append(scheduler.waiting.pop(0))
        for request in list(scheduler.running):
            if not request.blocks:
                hit = scheduler.cached.get(request.prompt)
                if hit is not None and hit in scheduler.free:
                    scheduler.hits += 1
                    scheduler.free.remove(hit)
                    request.blocks.append(hit)
                else:
                    request.blocks.append(scheduler.take())
                    call("prefill", request.blocks[0] * BLOCK, first(call("contents"), request.prompt))
                scheduler.cached[request.prompt] = request.blocks[0]
                request.blocks.append(scheduler.take())
                call("copy", request.blocks[1] * BLOCK, request.blocks[0] * BLOCK)
            token = after(call("read", request.blocks[1] * BLOCK))
            call("prefill", request.blocks[1] * BLOCK, token)
            request.outputs.put(int.from_bytes(token, "little"))
            request.made += 1
            if request.made == request.max_tokens:
                scheduler.finish(request)
                request.outputs.put(None)
        time.sleep(STEP_S)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        return self.scheduler.reset_prefix_cache(reset_running_requests, reset_connector)


class EngineCoreProc(EngineCore):
    def __init__(self, weights: bytes, cache: int, workers: int = 1) -> None:
        super().__init__(weights, cache, workers)
        self.input_queue = queue.Queue[tuple[EngineCoreRequestType, Any]]()
        self.engines_running = False
        self.batch_queue = None
        self.process_input_queue_block = True

    def has_work(self) -> bool:
        return self.engines_running or self.scheduler.has_requests() or bool(self.batch_queue)

    def is_running(self) -> bool:
        return True

    def run_busy_loop(self) -> None:
        while self.is_running():
            self._process_input_queue()
            self._process_engine_step()

    def _process_input_queue(self) -> None:
        while not self.has_work() and self.is_running():
            block = self.process_input_queue_block
            try:
                req = self.input_queue.get(block=block)
                self._handle_client_request(*req)
            except queue.Empty:
                break
            if not block:
                break
        while not self.input_queue.empty():
            req = self.input_queue.get_nowait()
            self._handle_client_request(*req)

    def _process_engine_step(self) -> None:
        self.step()

    def _handle_client_request(self, request_type: EngineCoreRequestType, request: Any) -> None:
        if request_type == EngineCoreRequestType.WAKEUP:
            return
        if request_type == EngineCoreRequestType.ADD:
            self.add_request(*request)
        elif request_type == EngineCoreRequestType.UTILITY:
            method, arguments = request
            getattr(self, method)(*arguments)
        else:
            raise AssertionError(f"Unrecognized input request type encountered: {request_type}")

    def stall(self, goes_on: threading.Event) -> None:
        """Keeps the loop from all else, without the GPU."""
        goes_on.wait()
