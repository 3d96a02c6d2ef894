// Copies mapped host memory to device memory with the device's multiprocessors; mod.rs says when and why.
//
// scripts/build-kernel compiles this file to kernel.ptx.

using u64 = unsigned long long;

constexpr int THREADS = 512;  // per block
constexpr int UNDER_WAY = 4;  // 16-byte vectors a thread loads before it stores the first

extern "C" __global__ void __launch_bounds__(THREADS) vramctl_copy(const uint4 *from, uint4 *to, u64 vectors) {
    const u64 threads = u64(gridDim.x) * THREADS;
    u64 at = u64(blockIdx.x) * THREADS + threadIdx.x;
    for (; at + (UNDER_WAY - 1) * threads < vectors; at += UNDER_WAY * threads) {
        uint4 vector[UNDER_WAY];
#pragma unroll
        for (int i = 0; i < UNDER_WAY; i++) vector[i] = __ldcs(from + at + i * threads);
#pragma unroll
        for (int i = 0; i < UNDER_WAY; i++) __stcs(to + at + i * threads, vector[i]);
    }
    for (; at < vectors; at += threads) to[at] = from[at];
}
