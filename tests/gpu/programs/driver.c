/*
 * A program on the CUDA driver API, linked to libcuda, that fills memory, and on request compares and rewrites it.
 *
 * usage: driver --mib N [--virtual] [--small N] [--kernels FILE]
 *
 * Each line `check` on stdin is answered with one line of JSON, as in loop.py. It allocates with cuMemAlloc. With
 * --virtual it manages virtual memory itself: handles of up to 1 GiB behind each other, N (500) handles of 2 MiB of
 * which it releases every second as soon as it is mapped, and a handle that it maps three times. FILE is the PTX of
 * kernels.cuh. Without it the program compares on the host: for a simulated GPU, which runs no kernels.
 */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cudadriver.h"
#include "kernels.cuh"

#define MIB ((size_t)1 << 20)
#define SMALL (2 * MIB)
#define LARGE (1024 * MIB)
#define SHARED (64 * MIB)
#define MAX_BLOCKS 64
#define MAX_HANDLES 4096
/* How much is compared on the host at once. */
#define PIECE (4 * MIB)

struct block {
	CUdeviceptr at;
	size_t bytes;
};

struct result {
	word differing, sum;
};

static CUdevice device;
static CUcontext context;
static CUmodule module;
static CUfunction fill_kernel, compare_kernel;
static CUdeviceptr result_at;
static bool is_virtual;

static struct block blocks[MAX_BLOCKS];
static int block_count;
/* Zero for a handle that is already released. */
static CUmemGenericAllocationHandle handles[MAX_HANDLES];
static int handle_count;
/* The reservations; with --virtual, all of each is mapped. */
static struct block ranges[8];
static int range_count;
/* The second and third mapping of one handle; the first is among the blocks. */
static CUdeviceptr second, third;
static int shared_block = -1;
static bool read_only;
static word seed = 1;
static struct result written;

static void fail(const char *format, ...)
{
	va_list list;
	va_start(list, format);
	printf("{\"error\": \"");
	vprintf(format, list);
	printf("\"}\n");
	fflush(stdout);
	va_end(list);
	_Exit(1);
}

static void need(CUresult error, const char *what)
{
	const char *name = "unknown";
	if (error == 0)
		return;
	cuGetErrorName(error, &name);
	fail("%s: %s (%d)", what, name, error);
}

static void load_kernels(const char *path)
{
	FILE *file = fopen(path, "rb");
	char *text = calloc(1, MIB);
	if (file == NULL || text == NULL || fread(text, 1, MIB - 1, file) == 0)
		fail("cannot read %s", path);
	fclose(file);
	need(cuModuleLoadData(&module, text), "loading the kernels");
	need(cuModuleGetFunction(&fill_kernel, module, "fill"), "finding a kernel");
	need(cuModuleGetFunction(&compare_kernel, module, "compare"), "finding a kernel");
	need(cuMemAlloc_v2(&result_at, sizeof(struct result)), "allocating");
	free(text);
}

static void launch(CUfunction kernel, struct block block, word pattern)
{
	word words = block.bytes / sizeof(word);
	void *arguments[] = {&block.at, &words, &pattern, &result_at};
	need(cuLaunchKernel(kernel, 1024, 1, 1, 256, 1, 1, 0, NULL, arguments, NULL), "starting a kernel");
}

/* Calls work for every piece of a block, copied to a host buffer. */
static void on_host(struct block block, void (*work)(CUdeviceptr at, word *piece, size_t words, word first, void *data),
                    void *data)
{
	word *piece = malloc(PIECE);
	if (piece == NULL)
		fail("no host memory");
	for (size_t at = 0; at < block.bytes; at += PIECE) {
		size_t bytes = block.bytes - at < PIECE ? block.bytes - at : PIECE;
		work(block.at + at, piece, bytes / sizeof(word), at / sizeof(word), data);
	}
	free(piece);
}

static void put(CUdeviceptr at, word *piece, size_t words, word first, void *data)
{
	for (size_t i = 0; i < words; i++)
		piece[i] = pattern_word(*(word *)data, first + i);
	need(cuMemcpyHtoD_v2(at, piece, words * sizeof(word)), "writing");
}

struct reading {
	word pattern;
	struct result found;
};

static void get(CUdeviceptr at, word *piece, size_t words, word first, void *data)
{
	struct reading *reading = data;
	need(cuMemcpyDtoH_v2(piece, at, words * sizeof(word)), "reading");
	for (size_t i = 0; i < words; i++) {
		reading->found.differing += piece[i] != pattern_word(reading->pattern, first + i);
		reading->found.sum += piece[i];
	}
}

static void write_block(struct block block, word pattern)
{
	if (module != NULL)
		launch(fill_kernel, block, pattern);
	else
		on_host(block, put, &pattern);
}

static struct result read_block(struct block block, word pattern)
{
	struct reading reading = {pattern, {0, 0}};
	if (module == NULL) {
		on_host(block, get, &reading);
		return reading.found;
	}
	need(cuMemsetD8_v2(result_at, 0, sizeof reading.found), "clearing the result");
	launch(compare_kernel, block, pattern);
	need(cuMemcpyDtoH_v2(&reading.found, result_at, sizeof reading.found), "comparing");
	return reading.found;
}

static void add_block(CUdeviceptr at, size_t bytes)
{
	if (block_count == MAX_BLOCKS)
		fail("too many blocks");
	blocks[block_count++] = (struct block){at, bytes};
}

/* Large and small blocks, as in real programs, and one with a pitch. */
static void allocate(size_t total)
{
	static const size_t wanted[] = {3072 * MIB, 1024 * MIB, 512 * MIB + 4096, 96 * MIB + 8, 20 * MIB, 3 * MIB + 512};
	CUdeviceptr at;
	if (total > 128 * MIB) {
		size_t pitch = 0;
		need(cuMemAllocPitch_v2(&at, &pitch, MIB, 64, 16), "allocating with a pitch");
		add_block(at, pitch * 64);
		total -= 64 * MIB;
	}
	for (int i = 0; total > 0; i++) {
		size_t size = wanted[i % 6] < total ? wanted[i % 6] : total;
		if (total - size < 2 * MIB)
			size = total;
		need(cuMemAlloc_v2(&at, size), "allocating");
		add_block(at, size);
		total -= size;
	}
}

static CUmemGenericAllocationHandle create(size_t bytes)
{
	CUmemAllocationProp properties;
	CUmemGenericAllocationHandle handle;
	memset(&properties, 0, sizeof properties);
	properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
	properties.location = (CUmemLocation){CU_MEM_LOCATION_TYPE_DEVICE, device};
	need(cuMemCreate(&handle, bytes, &properties, 0), "cuMemCreate");
	return handle;
}

static CUdeviceptr reserve(size_t bytes)
{
	CUdeviceptr at;
	need(cuMemAddressReserve(&at, bytes, 0, 0, 0), "cuMemAddressReserve");
	ranges[range_count++] = (struct block){at, bytes};
	return at;
}

static CUresult open_range(CUdeviceptr at, size_t bytes, int flags)
{
	CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, device}, flags};
	return cuMemSetAccess(at, bytes, &access, 1);
}

/* One block of many adjacent handles, opened in one call. */
static void map_many(size_t total, size_t each, bool release_some)
{
	CUdeviceptr at = reserve(total);
	for (size_t offset = 0; offset < total; offset += each) {
		size_t bytes = total - offset < each ? total - offset : each;
		if (handle_count == MAX_HANDLES)
			fail("too many handles");
		CUmemGenericAllocationHandle handle = create(bytes);
		need(cuMemMap(at + offset, bytes, 0, handle, 0), "cuMemMap");
		/* From now on only the mapping keeps the memory. */
		if (release_some && handle_count % 2 == 0) {
			need(cuMemRelease(handle), "cuMemRelease");
			handle = 0;
		}
		handles[handle_count++] = handle;
	}
	need(open_range(at, total, CU_MEM_ACCESS_FLAGS_PROT_READWRITE), "cuMemSetAccess");
	add_block(at, total);
}

static void map_own(size_t total, size_t small)
{
	if (total < SHARED + (small + 1) * SMALL)
		fail("too little for %zu handles of 2 MiB and one of 64 MiB", small);
	map_many(small * SMALL, SMALL, true);
	map_many(total - SHARED - small * SMALL, LARGE, false);

	CUmemGenericAllocationHandle handle = create(SHARED);
	CUdeviceptr first = reserve(SHARED);
	second = reserve(SHARED);
	third = reserve(SHARED);
	need(cuMemMap(first, SHARED, 0, handle, 0), "the first cuMemMap of a handle");
	need(cuMemMap(second, SHARED, 0, handle, 0), "the second cuMemMap of a handle");
	need(cuMemMap(third, SHARED, 0, handle, 0), "the third cuMemMap of a handle");
	need(open_range(first, SHARED, CU_MEM_ACCESS_FLAGS_PROT_READWRITE), "cuMemSetAccess");
	need(open_range(second, SHARED, CU_MEM_ACCESS_FLAGS_PROT_READWRITE), "cuMemSetAccess");
	/* Not all drivers have it. */
	read_only = open_range(third, SHARED, CU_MEM_ACCESS_FLAGS_PROT_READ) == 0;
	if (!read_only)
		need(open_range(third, SHARED, CU_MEM_ACCESS_FLAGS_PROT_READWRITE), "cuMemSetAccess");
	handles[handle_count++] = handle;
	shared_block = block_count;
	add_block(first, SHARED);
}

static word pattern_of(int block)
{
	return seed * 1009 + (word)block;
}

static struct result read_all(void)
{
	struct result total = {0, 0};
	for (int i = 0; i < block_count; i++) {
		struct result one = read_block(blocks[i], pattern_of(i));
		total.differing += one.differing;
		total.sum += one.sum;
	}
	/* All mappings of a handle show the same contents. */
	for (int i = 0; shared_block >= 0 && i < 2; i++) {
		struct block other = {i == 0 ? second : third, SHARED};
		total.differing += read_block(other, pattern_of(shared_block)).differing;
	}
	return total;
}

static void write_all(void)
{
	for (int i = 0; i < block_count; i++) {
		struct block block = blocks[i];
		/* Through each of its writable mappings in turn. */
		if (i == shared_block && seed % 2 == 0)
			block.at = second;
		write_block(block, pattern_of(i));
	}
	written = read_all();
}

/* Allocates memory between checks, as programs do. Returns how many of its words differ. */
static word use_new(void)
{
	struct block block = {0, 32 * MIB};
	CUmemGenericAllocationHandle handle = 0;
	if (is_virtual) {
		handle = create(block.bytes);
		need(cuMemAddressReserve(&block.at, block.bytes, 0, 0, 0), "cuMemAddressReserve");
		need(cuMemMap(block.at, block.bytes, 0, handle, 0), "cuMemMap");
		need(open_range(block.at, block.bytes, CU_MEM_ACCESS_FLAGS_PROT_READWRITE), "cuMemSetAccess");
	} else {
		need(cuMemAlloc_v2(&block.at, block.bytes), "allocating");
	}
	write_block(block, seed);
	word differing = read_block(block, seed).differing;
	if (is_virtual) {
		need(cuCtxSynchronize(), "cuCtxSynchronize");
		need(cuMemUnmap(block.at, block.bytes), "cuMemUnmap");
		need(cuMemRelease(handle), "cuMemRelease");
		need(cuMemAddressFree(block.at, block.bytes), "cuMemAddressFree");
	} else {
		need(cuMemFree_v2(block.at), "freeing");
	}
	return differing;
}

static void check(void)
{
	struct result found = read_all();
	bool equal = found.sum == written.sum;
	seed++;
	write_all();
	printf("{\"differing\": %llu, \"sum_equal\": %s, \"rewritten_differing\": %llu, \"new_differing\": %llu}\n",
	       found.differing, equal ? "true" : "false", written.differing, use_new());
}

static void give_back(void)
{
	need(cuCtxSynchronize(), "cuCtxSynchronize");
	for (int i = 0; i < range_count; i++)
		need(cuMemUnmap(ranges[i].at, ranges[i].bytes), "cuMemUnmap");
	for (int i = 0; i < handle_count; i++)
		if (handles[i] != 0)
			need(cuMemRelease(handles[i]), "cuMemRelease");
	for (int i = 0; i < range_count; i++)
		need(cuMemAddressFree(ranges[i].at, ranges[i].bytes), "cuMemAddressFree");
	for (int i = 0; !is_virtual && i < block_count; i++)
		need(cuMemFree_v2(blocks[i].at), "cuMemFree");
	if (result_at != 0)
		need(cuMemFree_v2(result_at), "cuMemFree");
	if (module != NULL)
		need(cuModuleUnload(module), "cuModuleUnload");
	if (is_virtual)
		need(cuDevicePrimaryCtxRelease_v2(device), "cuDevicePrimaryCtxRelease");
	else
		need(cuCtxDestroy_v2(context), "cuCtxDestroy");
}

int main(int argc, char **argv)
{
	size_t mib = 0, small = 500;
	const char *kernels = NULL;
	bool good = true;
	for (int i = 1; i < argc; i++) {
		if (strcmp(argv[i], "--mib") == 0 && i + 1 < argc)
			mib = strtoull(argv[++i], NULL, 10);
		else if (strcmp(argv[i], "--small") == 0 && i + 1 < argc)
			small = strtoull(argv[++i], NULL, 10);
		else if (strcmp(argv[i], "--kernels") == 0 && i + 1 < argc)
			kernels = argv[++i];
		else if (strcmp(argv[i], "--virtual") == 0)
			is_virtual = true;
		else
			good = false;
	}
	if (!good || mib == 0 || small == 0) {
		fprintf(stderr, "usage: driver --mib N [--virtual] [--small N] [--kernels FILE]\n");
		return 2;
	}
	need(cuInit(0), "cuInit");
	need(cuDeviceGet(&device, 0), "cuDeviceGet");
	/* Its own context, or the runtime's. */
	if (is_virtual) {
		need(cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
		need(cuCtxSetCurrent(context), "cuCtxSetCurrent");
	} else {
		need(cuCtxCreate_v2(&context, 0, device), "cuCtxCreate");
	}
	if (kernels != NULL)
		load_kernels(kernels);
	if (is_virtual)
		map_own(mib * MIB, small);
	else
		allocate(mib * MIB);
	write_all();
	printf("{\"ready\": true, \"bytes\": %zu, \"differing\": %llu, \"read_only_mapping\": %s}\n", mib * MIB,
	       written.differing, read_only ? "true" : "false");
	fflush(stdout);
	char line[64];
	while (fgets(line, sizeof line, stdin) != NULL && strncmp(line, "quit", 4) != 0) {
		if (strncmp(line, "check", 5) == 0)
			check();
		else
			printf("{\"error\": \"unknown question\"}\n");
		fflush(stdout);
	}
	give_back();
	return 0;
}
