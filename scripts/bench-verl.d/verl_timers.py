"""Times verl's transitions from inside its processes, in all modes alike. verl imports this module itself (VERL_USE_EXTERNAL_MODULES).

Writes a line of JSON for each call to a file of this process in the folder $BENCH_VERL_EVENTS. The GPU's work is waited for before and
after, because verl copies without waiting.
"""

import functools
import importlib.util
import json
import os
import pathlib
import sys
import time

ENGINE = "verl.workers.engine.fsdp.transformer_impl"
MOVES = ("offload_fsdp_model_to_cpu", "load_fsdp_model_to_gpu", "offload_fsdp_optimizer", "load_fsdp_optimizer")


def _imports():
    """This project's import hooks, under another name: `vramctl` itself is not on the path of every mode."""
    path = pathlib.Path(os.environ["BENCH_VERL_PACKAGE"]) / "_imports.py"
    spec = importlib.util.spec_from_file_location("bench_verl_imports", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def note(what, **found):
    line = json.dumps({"what": what, "pid": os.getpid(), **found})
    with open(pathlib.Path(os.environ["BENCH_VERL_EVENTS"]) / f"{os.getpid()}.jsonl", "a") as file:
        file.write(line + "\n")


def settle():
    """Waits for the GPU. Returns how much of its memory is in use, by all processes, and what torch has reserved here."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None, None
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free, torch.cuda.memory_reserved()


def timed(function, what, size=None):
    """`function`, timed. `what` and `size` are functions of its arguments: the name, and the bytes that it is about."""

    @functools.wraps(function)
    def call(*arguments, **keywords):
        before, reserved_before = settle()
        began, clock = time.time(), time.perf_counter()
        failed = True
        try:
            result = function(*arguments, **keywords)
            failed = False
            return result
        finally:
            after, reserved = settle()
            found = {"began": began, "seconds": time.perf_counter() - clock, "used_before": before, "used_after": after}
            try:
                found["bytes"] = size(*arguments, **keywords) if size is not None else None
            except Exception as error:  # verl must not fail because of this
                found["error"] = repr(error)
            note(what(*arguments, **keywords), **found, reserved_before=reserved_before, reserved=reserved, failed=failed)

    return call


def timed_coroutine(function, what):
    @functools.wraps(function)
    async def call(*arguments, **keywords):
        began, clock = time.time(), time.perf_counter()
        try:
            return await function(*arguments, **keywords)
        finally:
            note(what, began=began, seconds=time.perf_counter() - clock)

    return call


def bytes_of(owner, *_, **__):
    """The bytes of a module's parameters or an optimizer's state in this process."""
    if hasattr(owner, "parameters"):
        tensors = list(owner.parameters())
    else:
        tensors = [one for state in owner.state.values() for one in state.values() if hasattr(one, "element_size")]
    return sum(local.numel() * local.element_size() for one in tensors for local in [getattr(one, "_local_tensor", one)])


def time_trainer(module):
    engine = module.FSDPEngine
    initialize = engine.initialize

    @functools.wraps(initialize)
    def first(self, *arguments, **keywords):
        # Not before: an adapter that replaces the functions must find verl's own.
        for name in MOVES:
            if not hasattr(getattr(module, name), "_bench_verl"):
                wrapped = timed(getattr(module, name), lambda *_, name=name, **__: name, bytes_of)
                wrapped._bench_verl = True
                setattr(module, name, wrapped)
        return initialize(self, *arguments, **keywords)

    def move(self, device, model=True, optimizer=True, grad=True):
        return f"to {device}: {'+'.join(name for name, moved in (('model', model), ('optimizer', optimizer)) if moved) or 'nothing'}"

    engine.initialize = first
    engine.to = timed(engine.to, move)


def time_vllm(module):
    def woken(self, tags=None):
        return f"wake {'+'.join(tags or ['all'])}"

    module.Worker.sleep = timed(module.Worker.sleep, lambda self, level=1: f"sleep level {level}")
    module.Worker.wake_up = timed(module.Worker.wake_up, woken)


def time_sending(module):
    module.ServerAdapter.update_weights = timed_coroutine(module.ServerAdapter.update_weights, "send weights")


if "BENCH_VERL_EVENTS" in os.environ:
    when_imported = _imports().when_imported
    when_imported(ENGINE, time_trainer)
    when_imported("vllm.v1.worker.gpu_worker", time_vllm)
    when_imported("verl.workers.rollout.vllm_rollout.vllm_rollout", time_sending)
