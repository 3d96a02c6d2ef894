/*
 * Driver calls that allocate and release the physical memory of a set of allocations, for raw.c
 * and set.c.
 */
#pragma once

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* ---- the part of the driver API used here ---- */

typedef unsigned long long pointer;
typedef struct { int type, id; } location;
/* CUmemAllocationProp; 32 bytes. */
typedef struct {
	int type, handle_types;
	location where;
	void *win32;
	struct { unsigned char compression, rdma; unsigned short usage; unsigned char reserved[4]; } flags;
} properties;
typedef struct { location where; int flags; } access_flags;

#define CALLS(X) \
	X(cuInit, (unsigned flags)) \
	X(cuDeviceGet, (int *device, int ordinal)) \
	X(cuDeviceGetAttribute, (int *value, int attribute, int device)) \
	X(cuDevicePrimaryCtxRetain, (void **context, int device)) \
	X(cuCtxSetCurrent, (void *context)) \
	X(cuStreamCreate, (void **stream, unsigned flags)) \
	X(cuStreamSynchronize, (void *stream)) \
	X(cuMemAlloc_v2, (pointer * out, size_t bytes)) \
	X(cuMemFree_v2, (pointer address)) \
	X(cuMemAllocHost_v2, (void **out, size_t bytes)) \
	X(cuMemcpyHtoDAsync_v2, (pointer to, const void *from, size_t bytes, void *stream)) \
	X(cuMemcpyDtoHAsync_v2, (void *to, pointer from, size_t bytes, void *stream)) \
	X(cuMemcpyDtoDAsync_v2, (pointer to, pointer from, size_t bytes, void *stream)) \
	X(cuMemsetD8Async, (pointer to, unsigned char value, size_t bytes, void *stream)) \
	X(cuMemAddressReserve, (pointer * out, size_t bytes, size_t align, pointer wish, unsigned long long flags)) \
	X(cuMemAddressFree, (pointer address, size_t bytes)) \
	X(cuMemCreate, (unsigned long long *handle, size_t bytes, const properties *wanted, unsigned long long flags)) \
	X(cuMemRelease, (unsigned long long handle)) \
	X(cuMemMap, (pointer at, size_t bytes, size_t offset, unsigned long long handle, unsigned long long flags)) \
	X(cuMemUnmap, (pointer at, size_t bytes)) \
	X(cuMemSetAccess, (pointer at, size_t bytes, const access_flags *access, size_t count))

#define DECLARE(name, arguments) static int (*name) arguments;
CALLS(DECLARE)

static void fail(const char *what, int code)
{
	fprintf(stderr, "bench: %s failed with %d\n", what, code);
	exit(1);
}

#define TRY(call) \
	do { \
		int code_ = (call); \
		if (code_ != 0) \
			fail(#call, code_); \
	} while (0)

static void find_driver(void)
{
	void *driver = dlopen("libcuda.so.1", RTLD_NOW);
	if (driver == NULL) {
		fprintf(stderr, "bench: %s\n", dlerror());
		exit(1);
	}
#define FIND(name, arguments) \
	{ \
		void *found = dlsym(driver, #name); \
		if (found == NULL) { \
			fprintf(stderr, "bench: the driver has no %s\n", #name); \
			exit(1); \
		} \
		memcpy(&name, &found, sizeof found); \
	}
	CALLS(FIND)
}

static double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* ---- the processor ---- */

static double trips(void)
{
	double from = now();
	for (int i = 0; i < 1000; i++)
		(void)getppid();
	return now() - from;
}

/*
 * The CPU's slowdown: the time of a thousand system calls, relative to the best in this process. On a virtual machine,
 * another tenant may be using the other half of the core. The driver's calls, which are pure CPU work, then take 1.3 to
 * 1.5 times as long.
 */
static double slowness(void)
{
	static double best;
	if (best == 0) {
		best = trips();
		for (int i = 0; i < 50; i++) {
			double took = trips();
			best = took < best ? took : best;
		}
	}
	double took = trips();
	best = took < best ? took : best;
	return took / best;
}

static double larger(double a, double b)
{
	return a > b ? a : b;
}

/* ---- a set ---- */

/* Right after a large release, one piece of 96 GiB takes twice as long as pieces of 8 GiB. */
static const size_t LARGEST = (size_t)8 << 30;

struct piece {
	size_t bytes;
	unsigned long long handle;
};

static struct piece *read_set(const char *path, size_t *count, size_t *total)
{
	struct piece *pieces = NULL;
	size_t room = 0, bytes;
	FILE *file = fopen(path, "r");
	if (file == NULL)
		fail(path, errno);
	*count = *total = 0;
	while (fscanf(file, "%zu", &bytes) == 1) {
		*total += bytes;
		while (bytes > 0) {
			size_t take = bytes > LARGEST ? LARGEST : bytes;
			if (*count == room) {
				room = room * 2 + 64;
				pieces = realloc(pieces, room * sizeof *pieces);
				if (pieces == NULL)
					fail("realloc", errno);
			}
			pieces[(*count)++] = (struct piece){take, 0};
			bytes -= take;
		}
	}
	fclose(file);
	return pieces;
}

/* GPUDirect RDMA for virtual memory, which the library requests if the device supports it. */
static bool has_rdma(int device)
{
	int rdma = 0;
	TRY(cuDeviceGetAttribute(&rdma, 110, device));
	return rdma != 0;
}

/* Seconds, and the CPU's slowdown. */
struct times {
	double create, map, access, unmap, release, slow_taking, slow_giving;
};

/* Ends a stretch of time, adds it, and begins the next. */
static void lap(double *from, double *sum)
{
	double to = now();
	*sum += to - *from;
	*from = to;
}

/*
 * Allocates the physical memory of a set in the current context, uses it, rests and releases it, as the library does: memory that GPUDirect RDMA
 * can reach and that other processes can open, and as few calls as the driver allows.
 */
static struct times take_and_give(struct piece *pieces, size_t count, pointer base, size_t total, bool rdma, long rest_ms, void *stream)
{
	struct times times = {0};
	properties wanted = {.type = 1, .handle_types = 1, .where = {1, 0}};
	access_flags access = {{1, 0}, 3};
	pointer at = base;
	wanted.flags.rdma = rdma;
	double slow = slowness(), from = now();
	for (size_t i = 0; i < count; i++)
		TRY(cuMemCreate(&pieces[i].handle, pieces[i].bytes, &wanted, 0));
	lap(&from, &times.create);
	for (size_t i = 0; i < count; at += pieces[i++].bytes)
		TRY(cuMemMap(at, pieces[i].bytes, 0, pieces[i].handle, 0));
	lap(&from, &times.map);
	TRY(cuMemSetAccess(base, total, &access, 1));
	lap(&from, &times.access);
	times.slow_taking = larger(slow, slowness());
	/* Use the memory, as a program would. */
	TRY(cuMemsetD8Async(base, 0x5a, total, stream));
	TRY(cuStreamSynchronize(stream));
	struct timespec rest = {rest_ms / 1000, rest_ms % 1000 * 1000000};
	nanosleep(&rest, NULL);
	slow = slowness();
	from = now();
	TRY(cuMemUnmap(base, total));
	lap(&from, &times.unmap);
	for (size_t i = 0; i < count; i++)
		TRY(cuMemRelease(pieces[i].handle));
	lap(&from, &times.release);
	times.slow_giving = larger(slow, slowness());
	return times;
}
