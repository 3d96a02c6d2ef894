/*
 * What the programs write to their memory, and how they compare it. For nvcc and NVRTC, and without the kernels
 * for a C compiler. Needs no header.
 */
typedef unsigned long long word;

#ifdef __CUDACC__
#define EVERYWHERE __host__ __device__
#else
#define EVERYWHERE
#endif

/* Word `index` of pattern `seed`: no two patterns and no two places look alike. */
static inline EVERYWHERE word pattern_word(word seed, word index)
{
	word x = index + seed * 0x9e3779b97f4a7c15ull;
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
	x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
	return x ^ (x >> 31);
}

#ifdef __CUDACC__

extern "C" __global__ void fill(word *at, word words, word seed)
{
	word step = (word)gridDim.x * blockDim.x;
	for (word i = (word)blockIdx.x * blockDim.x + threadIdx.x; i < words; i += step)
		at[i] = pattern_word(seed, i);
}

/* Adds to result[0] how many words differ from the pattern, and to result[1] the sum of all words. */
extern "C" __global__ void compare(const word *at, word words, word seed, word *result)
{
	word step = (word)gridDim.x * blockDim.x, differing = 0, sum = 0;
	for (word i = (word)blockIdx.x * blockDim.x + threadIdx.x; i < words; i += step) {
		differing += at[i] != pattern_word(seed, i);
		sum += at[i];
	}
	if (differing != 0)
		atomicAdd(&result[0], differing);
	atomicAdd(&result[1], sum);
}

#endif
