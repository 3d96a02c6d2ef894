"""The Python package with the real torch: verifies what the tests on the simulated GPU assume.

vramctl run -- python3 tests/gpu/torch_package.py

Prints a line per check; exits with 0 if all passed.
"""

import sys
import threading
import time

import torch

import vramctl
from vramctl import _torch

MIB = 1 << 20
failed = []


def expect(what, right, detail=""):
    print(f"{'ok' if right else 'FAILED'}: {what} {detail}".rstrip(), flush=True)
    if not right:
        failed.append(what)


def tensor(mib, value=0):
    return torch.full((mib * MIB,), value, dtype=torch.uint8, device="cuda")


def segment_of(made):
    address = made.data_ptr()
    for segment in torch.cuda.memory_snapshot():
        if 0 <= address - segment["address"] < segment["total_size"]:
            return segment
    raise LookupError(f"{address:#x} is in no segment")


def pool_of(made):
    return tuple(segment_of(made)["segment_pool_id"])


def pools():
    kept = {"weights": [], "kv_cache": [], "outside": []}
    for turn in range(40):
        for tag, tensors in kept.items():
            mib = [3, 1, 24][turn % 3]
            if tag == "outside":
                tensors.append(tensor(mib))
            else:
                with vramctl.region(tag):
                    tensors.append(tensor(mib))
            if turn % 4 == 3:
                del tensors[turn // 2]
    segments = {tag: {segment_of(made)["address"] for made in tensors} for tag, tensors in kept.items()}
    sets = list(segments.values())
    expect("tags share no segment", not (sets[0] & sets[1] or sets[0] & sets[2] or sets[1] & sets[2]))
    by_tag = {tag.tag: tag.bytes for tag in vramctl.status().tags}
    for tag in ("weights", "kv_cache"):
        total = sum(s["total_size"] for s in torch.cuda.memory_snapshot() if s["address"] in segments[tag])
        expect(f"the segments of {tag} have its tag", by_tag.get(tag, 0) >= total, f"{by_tag.get(tag)} {total}")


def nesting():
    with vramctl.region("outer"):
        first = tensor(3)
        with vramctl.region("inner"):
            second = tensor(3)
            with vramctl.region("outer"):
                third = tensor(3)
        fourth = tensor(3)
        with vramctl.unmanaged():
            fifth = tensor(3)
        mine = torch.cuda.MemPool()
        with vramctl.region("mine", pool=False), torch.cuda.use_mem_pool(mine):
            sixth = tensor(3)
    expect("the innermost region wins", pool_of(first) == pool_of(third) == pool_of(fourth) != pool_of(second))
    expect("outside regions, torch uses its own pool", pool_of(tensor(3)) == (0, 0))
    before = vramctl.status()
    vramctl.pause()
    fifth.fill_(7)
    torch.cuda.synchronize()
    vramctl.resume()
    expect("unmanaged memory is usable during a pause", bool((fifth == 7).all()))
    expect("the program's own pool works inside a region", pool_of(sixth) == tuple(mine.id) and before.tag("mine") is not None)


def threads():
    together, made, errors = threading.Barrier(4), [], []

    def work():
        try:
            with vramctl.region("threads"):
                together.wait(30)
                made.append(tensor(3))
                together.wait(30)
        except Exception as error:
            errors.append(error)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    expect("threads may share a region's tag", len(made) == 4 and not errors, str(errors))
    expect("each in a pool", all(pool_of(each) != (0, 0) for each in made))


def contents():
    with vramctl.region("live"):
        kept = [tensor(mib, number + 1) for number, mib in enumerate([1, 3, 24, 100])]
        small = torch.arange(1000, device="cuda")
        del_me = tensor(200)
    del del_me
    addresses = [each.data_ptr() for each in kept]
    free = torch.cuda.mem_get_info()[0]
    report = vramctl.pause("live")
    given = torch.cuda.mem_get_info()[0] - free
    expect("free blocks are not copied", report.bytes - report.kept_bytes >= 200 * MIB, f"{report}")
    # The backup's host memory needs page tables on the GPU: at most 1 byte per 512.
    expect("the memory is free", given >= report.bytes * 255 // 256 - 4 * MIB, f"{given} of {report.bytes}")
    expect("the backup has the contents", bytes(vramctl.backup_of(kept[1])[:100]) == b"\2" * 100)
    vramctl.resume("live")
    right = all(bool((each == number + 1).all()) for number, each in enumerate(kept))
    expect("live blocks are kept", right and bool((small == torch.arange(1000, device="cuda")).all()))
    expect("addresses stay", addresses == [each.data_ptr() for each in kept])


def graphs():
    graph = torch.cuda.CUDAGraph()
    source = torch.arange(4 * MIB, device="cuda", dtype=torch.float32)
    with vramctl.region("around"):
        # Warm up, as a capture requires.
        (source * 2 + 1).flip(0)
        with vramctl.cuda_graph(graph, tag="graphs"):
            # An operation with intermediate memory and a deterministic result, unlike parallel float sums.
            result = (source * 2 + 1).flip(0)
    graph.replay()
    wanted = result.clone()
    tag = vramctl.status().tag("graphs")
    expect("a graph's memory has its tag", tag is not None and tag.bytes >= result.numel() * 4, str(tag))
    expect("and is not in the enclosing region's pool", pool_of(result) == tuple(graph.pool()))
    for _ in range(2):
        vramctl.pause()
        vramctl.resume()
        expect("a graph's results are kept", torch.equal(result, wanted))
        result.zero_()
        graph.replay()
        expect("a graph replays to the same result", torch.equal(result, wanted))


def captured_inside():
    """A plain capture in a region: a pause must not skip blocks that the graph freed, whichever pool holds them."""
    graph = torch.cuda.CUDAGraph()
    source = torch.arange(4 * MIB, device="cuda", dtype=torch.float32)
    with vramctl.region("captured"):
        (source * 2 + 1).flip(0)
        ordinary = tensor(100)
        with torch.cuda.graph(graph):
            result = (source * 2 + 1).flip(0)
    graph.replay()
    torch.cuda.synchronize()
    streams = segment_of(ordinary)["stream"], segment_of(result)["stream"]
    expect("no graph is captured on the default stream", streams[0] == 0 != streams[1], str(streams))
    places = [(each.data_ptr(), each.numel() * each.element_size()) for each in (ordinary, result)]
    del ordinary, result
    left_out = [_torch._overlap(sorted(_torch.free(None, "default").ranges), [place]) for place in places]
    expect("blocks freed by a graph are kept, and only those", left_out == [places[0][1], 0], str(left_out))


def expandable():
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    change("max_split_size_mb:512,expandable_segments:True")
    before = _torch._live_settings(torch)
    expect("the live settings can be read", _torch._is_expandable(before), str(before))
    outside = tensor(30)
    with vramctl.region("expandable"):
        inside = tensor(30)
    expect("outside a region, segments are expandable", bool(segment_of(outside)["is_expandable"]))
    expect("inside they are not", not segment_of(inside)["is_expandable"])
    after = _torch._live_settings(torch)
    settings = [set(_torch._last_settings(each).split(",")) for each in (before, after)]
    expect("the settings are restored", _torch._is_expandable(after) and settings[0] == settings[1], str(after))
    tag = vramctl.status().tag("expandable")
    expect("and are managed", tag is not None and tag.bytes >= 30 * MIB)
    change("expandable_segments:False")


def costs():
    many = [torch.empty(1 << 12, device="cuda") for _ in range(20000)]
    many += [torch.empty(2 * MIB, device="cuda") for _ in range(500)]
    for name, work in {
        "free blocks looked up": lambda: _torch.free(None, "default"),
        "looked whether anybody allocated": lambda: _torch.taken_since(_torch.free(None, "default")),
        "region entered and left": lambda: vramctl.region("costs").__enter__(),
    }.items():
        start = time.perf_counter()
        work()
        print(f"   {name}, {len(many)} tensors: {(time.perf_counter() - start) * 1000:.1f} ms")


def main():
    print(f"torch {torch.__version__}, vramctl {vramctl.library_version()} at {vramctl.library_path()}")
    torch.cuda.init()
    for check in (pools, nesting, threads, contents, graphs, captured_inside, expandable, costs):
        print(f"-- {check.__name__}")
        try:
            check()
        except Exception as error:
            expect(check.__name__, False, f"{type(error).__name__}: {error}")
    print("all checks passed" if not failed else f"{len(failed)} checks failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
