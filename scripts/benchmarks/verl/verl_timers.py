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
FAILED = "failed"
#: What vLLM's worker does before it serves, and when it does.
STARTS = ("init_device", "load_model", "determine_available_memory", "initialize_from_config", "compile_or_warm_up_model")
ROLLS_OUT = ("execute_model", "sample_tokens")
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
    """Waits for the GPU. Returns how much of its memory is in use, by all processes; what torch has reserved of it here; and what torch has
    pinned of the host's, which no figure of the process counts."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None, None, None
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    pinned = getattr(torch.cuda, "host_memory_stats", dict)().get("allocated_bytes.current")
    return total - free, torch.cuda.memory_reserved(), pinned


def timed(function, what, size=None):
    """`function`, timed. `what` and `size` are functions of its arguments: the name, and the bytes that it is about."""

    @functools.wraps(function)
    def call(*arguments, **keywords):
        before, reserved_before, _ = settle()
        began, clock = time.time(), time.perf_counter()
        failed = None
        try:
            return function(*arguments, **keywords)
        except BaseException as one:
            failed = one
            raise
        finally:
            after, reserved, pinned = settle()
            found = {"began": began, "seconds": time.perf_counter() - clock, "used_before": before, "used_after": after, "pinned": pinned}
            try:
                found["bytes"] = size(*arguments, **keywords) if size is not None else None
            except Exception as error:  # verl must not fail because of this
                found["size_error"] = repr(error)
            note(what(*arguments, **keywords), **found, reserved_before=reserved_before, reserved=reserved, **failure(failed))

    return call


def timed_coroutine(function, what):
    @functools.wraps(function)
    async def call(*arguments, **keywords):
        began, clock = time.time(), time.perf_counter()
        failed = None
        try:
            return await function(*arguments, **keywords)
        except BaseException as one:
            failed = one
            raise
        finally:
            note(what, began=began, seconds=time.perf_counter() - clock, **failure(failed))

    return call


def failure(error):
    return {"failed": error is not None, **({"error": repr(error)[:500]} if error is not None else {})}


def telling_failures(owner, name, phase):
    """Writes a line if a method fails: in which phase, and why. `phase` is a function of its arguments."""
    function = getattr(owner, name, None)
    if function is None:
        return

    @functools.wraps(function)
    def call(*arguments, **keywords):
        began = time.time()
        try:
            return function(*arguments, **keywords)
        except Exception as error:
            note(FAILED, phase=phase(*arguments, **keywords), began=began, seconds=time.time() - began, **failure(error))
            raise

    setattr(owner, name, call)


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

    def batch(self, data, loss_function, forward_only=False):
        return "log-probabilities" if forward_only else "update"

    engine.initialize = first
    engine.to = timed(engine.to, move)
    telling_failures(engine, "forward_backward_batch", batch)
    telling_failures(engine, "optimizer_step", lambda *_: "update")


def time_vllm(module):
    def woken(self, tags=None):
        return f"wake {'+'.join(tags or ['all'])}"

    module.Worker.sleep = timed(module.Worker.sleep, lambda self, level=1: f"sleep level {level}")
    module.Worker.wake_up = timed(module.Worker.wake_up, woken)
    for phase, names in (("the rollout's start", STARTS), ("rollout", ROLLS_OUT)):
        for name in names:
            telling_failures(module.Worker, name, lambda *_, phase=phase, **__: phase)


def time_sending(module):
    module.ServerAdapter.update_weights = timed_coroutine(module.ServerAdapter.update_weights, "send weights")


if "BENCH_VERL_EVENTS" in os.environ:
    when_imported = _imports().when_imported
    when_imported(ENGINE, time_trainer)
    when_imported("vllm.v1.worker.gpu_worker", time_vllm)
    when_imported("verl.workers.rollout.vllm_rollout.vllm_rollout", time_sending)
