// Digests of pieces of device memory, at the speed of the memory. docs/performance.md says what is computed and why, and how
// likely it is to miss a change; src/backup/digest/mod.rs computes the same on the CPU.
//
// scripts/build-kernel compiles this file to kernel.ptx.

using u32 = unsigned int;
using u64 = unsigned long long;

constexpr int THREADS = 256;  // per block; one block per piece
constexpr int VECTORS = 16;   // of 16 bytes, per thread and group
constexpr int GROUPS = 32;    // per thread: 32 groups x 16 vectors x 256 threads x 16 bytes = one piece of 2 MiB
constexpr int SUMS = 2;       // per group, in each half of a digest

constexpr u64 PRIME = (1ull << 61) - 1;

// The key for one half of a digest.
struct Half {
    u32 sums[SUMS][4 * VECTORS];
    u64 point;  // below 2^60
};

struct Key {
    Half halves[2];
};

// value * point + next modulo PRIME, for value and point up to 2^61 + 2 and any next; the result is at most 2^61 + 2.
__device__ __forceinline__ u64 step(u64 value, u64 point, u64 next) {
    u64 low = value * point, high = __umul64hi(value, point);
    // 2^61 is 1 modulo PRIME, so a number is congruent to the sum of its 61-bit parts. The sum stays below 2^63.
    u64 sum = (low & PRIME) + (high << 3 | low >> 61) + (next & PRIME) + (next >> 61);
    return (sum & PRIME) + (sum >> 61);
}

// Adds a vector to one of a group's sums: two 64-bit products, modulo 2^64.
__device__ __forceinline__ u64 add(u64 sum, uint4 vector, const u32 *key) {
    sum += u64(vector.x + key[0]) * u64(vector.y + key[1]);
    return sum + u64(vector.z + key[2]) * u64(vector.w + key[3]);
}

extern "C" __global__ void __launch_bounds__(THREADS)
vramctl_digest(const Key key, const uint4 *const *pieces, ulonglong2 *digests, u32 count) {
    if (blockIdx.x >= count) return;
    const uint4 *next = pieces[blockIdx.x] + threadIdx.x;

    // Each thread evaluates the polynomial of its groups' sums by Horner's rule.
    u64 value[2] = {0, 0};
#pragma unroll 1
    for (int group = 0; group < GROUPS; group++) {
        u64 sums[2][SUMS] = {};
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            uint4 vector = __ldcs(next + i * THREADS);  // unrolled, so that several loads are in flight
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int sum = 0; sum < SUMS; sum++)
                    sums[half][sum] = add(sums[half][sum], vector, &key.halves[half].sums[sum][4 * i]);
        }
        next += VECTORS * THREADS;
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int sum = 0; sum < SUMS; sum++) value[half] = step(value[half], key.halves[half].point, sums[half][sum]);
    }

    // All threads' values combine into one polynomial, in thread order. A thread's value covers GROUPS * SUMS coefficients,
    // so joining it to the one before takes the point to that power; joining two threads' takes its square, and so on.
    __shared__ u64 shared[2][THREADS];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u64 power = key.halves[half].point;
        for (int reached = 1; reached < GROUPS * SUMS; reached *= 2) power = step(power, power, 0);
        for (int width = 1; width < THREADS; width *= 2) {
            shared[half][threadIdx.x] = value[half];
            __syncthreads();
            if (threadIdx.x % (2 * width) == 0) value[half] = step(value[half], power, shared[half][threadIdx.x + width]);
            power = step(power, power, 0);
            __syncthreads();
        }
        if (value[half] >= PRIME) value[half] -= PRIME;
    }
    if (threadIdx.x == 0) digests[blockIdx.x] = make_ulonglong2(value[0], value[1]);
}
