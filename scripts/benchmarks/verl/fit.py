"""Finds the highest settings that fit, by bisection over short runs: scripts/bench verl --fit."""

import re

MODEL = "actor_rollout_ref"
#: What is tried, lowest first.
VALUES = {
    "gpu_memory_utilization": [0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95],
    "micro_batch": [2, 4, 8, 16, 32, 64],
    "response_length": [512, 1024, 2048, 4096, 7168],
}
#: Tokens of a prompt, in `response_length`.
PROMPT = 512
FITS = "fits"
#: What a refused request for GPU memory looks like: torch's, CUDA's, vLLM's at its start, and this library's. Not vLLM's advice in its log.
OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|CUDA out of memory|CUDA error: out of memory|cudaErrorMemoryAllocation|errors\.DeviceMemory|DeviceMemory\(|"
    r"No available memory for the cache|less than desired GPU memory|is larger than the available KV cache"
)
OUT_OF_HOST_MEMORY = re.compile(r"errors\.HostMemory|HostMemory\(|running low on memory|cgroup out of memory")


def overrides(setting, value):
    if setting == "gpu_memory_utilization":
        return [f"{MODEL}.rollout.gpu_memory_utilization={value}"]
    if setting == "micro_batch":
        return [f"{MODEL}.actor.ppo_micro_batch_size_per_gpu={value}", f"{MODEL}.rollout.log_prob_micro_batch_size_per_gpu={value}"]
    return [f"data.max_response_length={value}", f"{MODEL}.rollout.max_model_len={value + PROMPT}"]


def is_out_of_memory(run):
    return run["ended"].startswith("out of memory")


def bounds(values, runs):
    """The indexes of the highest value that fits (-1: none is known), and of the lowest above it that does not (one past the end)."""
    fits = max((values.index(run["value"]) for run in runs if run["ended"] == FITS and run["value"] in values), default=-1)
    above = [values.index(run["value"]) for run in runs if is_out_of_memory(run) and run["value"] in values]
    return fits, min((index for index in above if index > fits), default=len(values))


def next_value(values, runs):
    """The value to try next, or None if the highest that fits is known."""
    fits, does_not = bounds(values, runs)
    return values[(fits + does_not) // 2] if does_not - fits > 1 else None


def outcome(is_complete, code, found, log, is_late):
    """How a run ended, in words, and the error behind it. `found`: the events of its processes; `is_late`: its time was up."""
    if is_complete:
        return FITS, ""
    failed = next((one for one in found if one.get("failed")), None)
    error = failed.get("error") or "" if failed else ""
    told = OUT_OF_MEMORY.search(error) or OUT_OF_MEMORY.search(log)
    if told:
        line = next((line for line in log.splitlines() if OUT_OF_MEMORY.search(line)), "")
        return f"out of memory in {place(failed, found)}", error or line.strip()[:300]
    if host := OUT_OF_HOST_MEMORY.search(error) or OUT_OF_HOST_MEMORY.search(log):
        return "out of host memory", error or host[0]
    return ("too slow" if is_late else f"other failure (exit code {code})"), error


def place(failed, found):
    """Where a process has failed, as far as its event tells."""
    if failed is None:
        return "an unknown place" if found else "the start"
    what = failed["what"]
    return failed.get("phase") or (f"rollout, at its {what}" if what.split()[0] in ("wake", "sleep") else what)


def verdict(runs):
    """The highest value that fits, as far as runs tell."""
    values = runs[-1]["values"]
    fits, does_not = bounds(values, runs)
    words = []
    if does_not < len(values):
        words = [next(f"{run['value']}: {run['ended']}" for run in runs if is_out_of_memory(run) and run["value"] == values[does_not])]
    elif fits == len(values) - 1:
        words = ["the highest tried"]
    if next_value(values, runs) is not None:
        words.append("not decided yet")
    best = str(values[fits]) if fits >= 0 else f"none from {values[0]}" if does_not == 0 else "?"
    return f"{best} ({'; '.join(words)})" if words else best
