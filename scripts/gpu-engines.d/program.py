"""Runs a real engine, usually without its own memory saver or sleep mode, and obeys commands on stdin.

    program.py sglang|vllm MODEL FRACTION GPUS [--kv-gib N] [--sleep] [--feature NAME --models DIR]

Each answer is "@ " and a line of JSON, because engines write to stdout, too. `generate`: whether tokens and log-probabilities
equal the first ones; `burst REQUESTS TOKENS` (or `warm`): the same for that many requests in flight at once; `token`: the first token of
one request; `forget`: reset the engine's prefix cache; `tpot`: milliseconds per output token; with `--sleep`, which is the engine's own,
`sleep LEVEL` and `wake LEVEL` (level 2 only with vLLM); `end`.
"""

import argparse
import asyncio
import itertools
import json
import os
import pathlib
import statistics
import sys
import time

from features import ADAPTERS, FEATURES, SPECIAL, VOCABULARY, adapters


def prompt(number, tokens):
    """Tokens that every model has; none of them has a meaning of its own."""
    first = max(SPECIAL.values()) + 1
    return [(number * 7919 + j * 104729) % (VOCABULARY - first) + first for j in range(tokens)]


PROMPTS = [prompt(number, 64) for number in range(4)]
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def picture(number):
    """A picture of noise, another one for each number."""
    import numpy
    from PIL import Image

    return Image.fromarray(numpy.random.default_rng(number).integers(0, 256, (224, 224, 3), dtype=numpy.uint8))


def in_words(prompt):
    """A prompt for the tokenizer of models.py, with an image."""
    return " ".join(["<image>", *(f"t{token}" for token in prompt)])


class Vllm:
    # One prompt at a time: which prompts the engine batches together is random, and batching changes rounding and so tokens.
    BATCHES = [[prompt] for prompt in PROMPTS]

    def __init__(self, options):
        # Run the engine core in a separate process, as `vllm serve` does.
        os.environ.update(
            OFFLINE,
            VLLM_NO_USAGE_STATS="1",
            VLLM_USE_FLASHINFER_SAMPLER="0",
            # With the core in this process, which requests are batched together is not random.
            VLLM_ENABLE_V1_MULTIPROCESSING=os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "1"),
            VLLM_LOGGING_LEVEL="WARNING",
        )
        os.environ.update(FEATURES[options.feature].vllm_env if options.feature else {})
        import vllm

        self.version, self.parameters, self.feature = vllm.__version__, vllm.SamplingParams, options.feature
        self.models = options.models
        arguments = self.arguments(options)
        if arguments.get("data_parallel_size", 1) > 1:
            # vllm.LLM has one worker only.
            from vllm.v1.engine.async_llm import AsyncLLM

            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
            self.loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self.loop)
            self.engine = AsyncLLM.from_engine_args(vllm.AsyncEngineArgs(**arguments))
            self.numbers = itertools.count()
            self.generate, self.forget = self.generate_async, self.forget_async
        else:
            self.engine = vllm.LLM(**arguments)

    @staticmethod
    def arguments(options):
        return {
            "model": options.model,
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "max_model_len": 4096,
            "gpu_memory_utilization": options.fraction,
            "tensor_parallel_size": options.gpus,
            "max_num_seqs": 32,
            "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32]},
            # With the size of the KV cache given, vLLM does not measure free memory, which other engines change while they start.
            **({"kv_cache_memory_bytes": options.kv_gib << 30} if options.kv_gib else {}),
            **({"enable_sleep_mode": True} if options.sleep else {}),
            **(FEATURES[options.feature].vllm(options.models) if options.feature else {}),
        }

    def forget(self):
        self.engine.reset_prefix_cache()

    def sleep(self, level):
        self.engine.sleep(level=level)

    def wake(self, level):
        self.engine.wake_up(tags=["weights"])
        if level == 2:
            # None of these contents were kept.
            self.engine.collective_rpc("reload_weights")
        self.engine.wake_up(tags=["kv_cache"])

    def generate(self, prompts, parameters):
        more = {}
        if self.feature == "lora":
            from vllm.lora.request import LoRARequest

            loaded = [LoRARequest(name, number, path) for number, (name, path) in enumerate(adapters(self.models).items(), 1)]
            # Every third request is one of the base model.
            more["lora_request"] = [[*loaded, None][number % 3] for number in range(len(prompts))]
        return self.engine.generate(prompts, parameters, use_tqdm=False, **more)

    def generate_async(self, prompts, parameters):
        async def one(prompt):
            async for output in self.engine.generate(prompt, parameters, request_id=str(next(self.numbers))):
                last = output
            return last

        async def all_of_them():
            return await asyncio.gather(*map(one, prompts))

        return self.loop.run_until_complete(all_of_them())

    def forget_async(self):
        self.loop.run_until_complete(self.engine.reset_prefix_cache())

    def run(self, prompts, tokens):
        parameters = self.parameters(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0)
        if self.feature == "images":
            asked = [{"prompt": in_words(prompt), "multi_modal_data": {"image": picture(prompt[0])}} for prompt in prompts]
        else:
            asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        done = self.generate(asked, parameters)
        outputs = [one.outputs[0] for one in done]
        return [(list(one.token_ids), [next(iter(chosen.values())).logprob for chosen in one.logprobs]) for one in outputs]


class Sglang:
    BATCHES = [PROMPTS]

    def __init__(self, options):
        assert not options.kv_gib, "only for vLLM"
        os.environ.update(OFFLINE)
        import sglang

        self.version, self.feature = sglang.__version__, options.feature
        self.engine = sglang.Engine(**self.arguments(options))

    @staticmethod
    def arguments(options):
        return {
            "model_path": options.model,
            "skip_tokenizer_init": True,
            "attention_backend": "triton",
            "sampling_backend": "pytorch",
            "mem_fraction_static": options.fraction,
            "tp_size": options.gpus,
            "cuda_graph_max_bs_decode": 32,
            "log_level": "warning",
            **({"enable_memory_saver": True, "enable_weights_cpu_backup": True} if options.sleep else {}),
            **(FEATURES[options.feature].sglang(options.models) if options.feature else {}),
        }

    def forget(self):
        self.engine.flush_cache()

    def sleep(self, level):
        assert level == 1
        self.engine.release_memory_occupation(tags=["kv_cache", "weights"])

    def wake(self, level):
        self.engine.resume_memory_occupation(tags=["weights", "kv_cache"])

    def run(self, prompts, tokens):
        parameters = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
        if self.feature == "images":
            asked = {"prompt": [in_words(prompt) for prompt in prompts], "image_data": [picture(prompt[0]) for prompt in prompts]}
        else:
            asked = {"input_ids": prompts}
        if self.feature == "lora":
            # Every third request is one of the base model.
            asked["lora_path"] = [[*ADAPTERS, None][number % 3] for number in range(len(prompts))]
        done = self.engine.generate(**asked, return_logprob=True, sampling_params=parameters)
        chosen = [one["meta_info"]["output_token_logprobs"] for one in done]
        return [([token[1] for token in tokens], [token[0] for token in tokens]) for tokens in chosen]


def milliseconds_per_token(engine, tokens=256, repeats=5):
    """Excludes the fixed cost of a request."""

    def seconds(count):
        start = time.perf_counter()
        engine.run(PROMPTS, count)
        return time.perf_counter() - start

    engine.run(PROMPTS, tokens)
    return statistics.median((seconds(tokens + 1) - seconds(1)) / tokens * 1e3 for _ in range(repeats))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    engines = {"vllm": Vllm, "sglang": Sglang}
    parser.add_argument("engine", choices=engines)
    parser.add_argument("model")
    parser.add_argument("fraction", type=float)
    parser.add_argument("gpus", type=int)
    parser.add_argument("--kv-gib", type=int)
    parser.add_argument("--sleep", action="store_true")
    parser.add_argument("--feature", choices=FEATURES)
    parser.add_argument("--models", type=pathlib.Path)
    options = parser.parse_args()
    if options.feature:
        options.model = str(options.models / FEATURES[options.feature].model)
    start = time.perf_counter()
    engine = engines[options.engine](options)
    first, bursts = None, {}

    def answer(**fields):
        print("@ " + json.dumps(fields), flush=True)

    answer(version=engine.version, start_s=time.perf_counter() - start)
    for line in sys.stdin:
        request = line.strip()
        try:
            if request == "generate":
                engine.forget()
                outputs = [output for prompts in engine.BATCHES for output in engine.run(prompts, 48)]
                first = first or outputs
                tokens = [one[0] for one in outputs] == [one[0] for one in first]
                answer(tokens=tokens, logprobs=outputs == first, sample=outputs[0][0][:6])
            elif request.startswith(("burst ", "warm ")):
                count, tokens = map(int, request.split()[1:])
                engine.forget()
                began = time.perf_counter()
                outputs = engine.run([prompt(number, 200) for number in range(count)], tokens)
                took = time.perf_counter() - began
                want = bursts.setdefault(request, outputs)
                differ = [number for number in range(count) if outputs[number] != want[number]]
                answer(s=took, complete=all(len(one[0]) == tokens for one in outputs), differ=differ, sample=outputs[-1][0][:6])
            elif request == "token":
                # After a cached prefix, results may differ by rounding.
                engine.forget()
                began = time.perf_counter()
                ((tokens, _),) = engine.run(PROMPTS[:1], 1)
                answer(s=time.perf_counter() - began, same=first is None or tokens == first[0][0][:1])
            elif request == "forget":
                engine.forget()
                answer(done=True)
            elif request.startswith(("sleep ", "wake ")):
                what, level = request.split()
                began = time.perf_counter()
                getattr(engine, what)(int(level))
                answer(s=time.perf_counter() - began)
            elif request == "tpot":
                answer(ms=milliseconds_per_token(engine))
            elif request == "end":
                break
        except Exception as error:  # report it and go on
            answer(error=f"{type(error).__name__}: {error}")
    # Engines shut down slowly, and some never do.
    os._exit(0)


if __name__ == "__main__":
    main()
