/*
 * What the machine itself can do, asked of the driver alone: copies between pinned host memory
 * and the device, a pass over device memory, and the calls that take and give back the physical
 * memory of a set of allocations. Prints one JSON object a line.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static const char help[] =
	"usage: raw [--repeat N] [--bytes N] [--rest MS] limits | calls NAME FILE… | host BYTES SPARE THREADS\n\n"
	"  limits   copies of --bytes (8 GiB) each way in pieces of 16 and 64 MiB; a device copy\n"
	"           and a memset of half as much\n"
	"  calls    for each set, named, and described by a file with one size a line: the time\n"
	"           of unmap and release, then of create, map and access, right after that and\n"
	"           after a rest (500 ms); with calls for each allocation, and with as few as the\n"
	"           driver allows\n"
	"  host     touches so much fresh host memory, leaving so much spare, and some of it again:\n"
	"           a virtual machine may get its own memory only then\n";

/* ---- the driver's part that is used here ---- */

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
	X(cuCtxSynchronize, (void)) \
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
	fprintf(stderr, "raw: %s failed with %d\n", what, code);
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
		fprintf(stderr, "raw: %s\n", dlerror());
		exit(1);
	}
#define FIND(name, arguments) \
	{ \
		void *found = dlsym(driver, #name); \
		if (found == NULL) { \
			fprintf(stderr, "raw: the driver has no %s\n", #name); \
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

/* ---- copies ---- */

static void *stream;

static void say(const char *what, const char *unit, size_t chunk, double bytes, double seconds)
{
	printf("{\"what\":\"%s\",\"unit\":\"%s\",\"chunk\":%zu,\"bytes\":%.0f,\"seconds\":%.9f}\n", what,
	       unit, chunk, bytes, seconds);
	fflush(stdout);
}

static void limits(int repeat, size_t bytes)
{
	static const size_t chunks[] = {16u << 20, 64u << 20};
	/* So much is enough for no cache to hold it, and quickly made. */
	size_t host_bytes = bytes < (1u << 30) ? bytes : 1u << 30;
	char *host;
	pointer device, other;
	TRY(cuMemAllocHost_v2((void **)&host, host_bytes));
	memset(host, 1, host_bytes);
	TRY(cuMemAlloc_v2(&device, host_bytes));
	for (int round = -1; round < repeat; round++) {
		for (size_t c = 0; c < sizeof chunks / sizeof *chunks; c++) {
			size_t chunk = chunks[c] < host_bytes ? chunks[c] : host_bytes;
			size_t places = host_bytes / chunk;
			for (int out = 0; out < 2; out++) {
				double from = now();
				size_t moved = 0;
				for (size_t i = 0; moved + chunk <= bytes; i++, moved += chunk) {
					size_t at = i % places * chunk;
					if (out)
						TRY(cuMemcpyDtoHAsync_v2(host + at, device + at, chunk, stream));
					else
						TRY(cuMemcpyHtoDAsync_v2(device + at, host + at, chunk, stream));
				}
				TRY(cuStreamSynchronize(stream));
				if (round >= 0)
					say(out ? "copy_out" : "copy_in", "moved", chunk, (double)moved, now() - from);
			}
		}
	}
	TRY(cuMemFree_v2(device));

	size_t half = bytes / 2;
	TRY(cuMemAlloc_v2(&device, half));
	TRY(cuMemAlloc_v2(&other, half));
	for (int round = -1; round < repeat; round++) {
		double from = now();
		TRY(cuMemcpyDtoDAsync_v2(other, device, half, stream));
		TRY(cuStreamSynchronize(stream));
		if (round >= 0)
			say("device_copy", "read and written", half, 2.0 * (double)half, now() - from);
		from = now();
		TRY(cuMemsetD8Async(device, 1, half, stream));
		TRY(cuStreamSynchronize(stream));
		if (round >= 0)
			say("device_set", "written", half, (double)half, now() - from);
	}
	TRY(cuMemFree_v2(device));
	TRY(cuMemFree_v2(other));
}

/* ---- the calls for a set ---- */

/* Right after much was released, one piece of 96 GiB takes twice as long as pieces of 8 GiB. */
static const size_t LARGEST = (size_t)8 << 30;

struct piece {
	size_t bytes;
	unsigned long long handle;
};

static struct piece *read_set(const char *path, bool cut, size_t *count, size_t *total)
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
			size_t take = cut && bytes > LARGEST ? LARGEST : bytes;
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

static void calls_for(const char *name, const char *path, bool joined, bool rdma, int repeat, int rested, int rest_ms)
{
	size_t count, total;
	struct piece *pieces = read_set(path, joined, &count, &total);
	properties wanted = {.type = 1, .where = {1, 0}};
	access_flags access = {{1, 0}, 3};
	pointer base;
	wanted.flags.rdma = rdma;
	TRY(cuMemAddressReserve(&base, total, 0, 0, 0));
	/* The first turn takes and gives without being counted. */
	for (int turn = -1; turn < repeat + rested; turn++) {
		double create = 0, map = 0, open = 0, unmap = 0, release = 0, from = now();
		pointer at = base;
		for (size_t i = 0; i < count; i++)
			TRY(cuMemCreate(&pieces[i].handle, pieces[i].bytes, &wanted, 0));
		create = now() - from;
		from = now();
		for (size_t i = 0; i < count; at += pieces[i++].bytes)
			TRY(cuMemMap(at, pieces[i].bytes, 0, pieces[i].handle, 0));
		map = now() - from;
		from = now();
		at = base;
		if (joined)
			TRY(cuMemSetAccess(base, total, &access, 1));
		else
			for (size_t i = 0; i < count; at += pieces[i++].bytes)
				TRY(cuMemSetAccess(at, pieces[i].bytes, &access, 1));
		open = now() - from;
		/* It is used, as it would be. */
		TRY(cuMemsetD8Async(base, 0x5a, total, stream));
		TRY(cuStreamSynchronize(stream));
		from = now();
		at = base;
		if (joined)
			TRY(cuMemUnmap(base, total));
		else
			for (size_t i = 0; i < count; at += pieces[i++].bytes)
				TRY(cuMemUnmap(at, pieces[i].bytes));
		unmap = now() - from;
		from = now();
		for (size_t i = 0; i < count; i++)
			TRY(cuMemRelease(pieces[i].handle));
		release = now() - from;
		if (turn >= 0) {
			printf("{\"what\":\"calls\",\"set\":\"%s\",\"joined\":%s,\"rdma\":%s,\"rested\":%s,"
			       "\"create\":%.9f,\"map\":%.9f,\"access\":%.9f,\"unmap\":%.9f,\"release\":%.9f}\n",
			       name, joined ? "true" : "false", rdma ? "true" : "false",
			       turn >= repeat ? "true" : "false", create, map, open, unmap, release);
			fflush(stdout);
		}
		if (turn + 1 >= repeat)
			usleep((useconds_t)rest_ms * 1000);
	}
	TRY(cuMemAddressFree(base, total));
	free(pieces);
}

/* ---- host memory ---- */

struct part {
	char *at;
	size_t bytes;
};

static void *touch(void *argument)
{
	struct part *part = argument;
	for (size_t i = 0; i < part->bytes; i += 4096)
		part->at[i] = 1;
	return NULL;
}

static size_t available(void)
{
	char line[256];
	size_t kib = 0;
	FILE *file = fopen("/proc/meminfo", "r");
	while (file != NULL && fgets(line, sizeof line, file) != NULL && sscanf(line, "MemAvailable: %zu", &kib) != 1)
		;
	if (file != NULL)
		fclose(file);
	return kib << 10;
}

/* Touches it in steps, for as long as enough is left: a machine whose memory grows has more after each. */
static void host(size_t bytes, size_t spare, size_t threads)
{
	const size_t step = (size_t)4 << 30;
	for (int round = 0; round < 2; round++) {
		size_t goal = round == 0 || bytes < 4 * step ? bytes : 4 * step, done = 0;
		char *memory = mmap(NULL, goal, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
		struct part parts[64];
		pthread_t started[64];
		if (memory == MAP_FAILED)
			fail("mmap", errno);
		madvise(memory, goal, MADV_HUGEPAGE);
		double from = now();
		while (done < goal) {
			size_t now_bytes = goal - done < step ? goal - done : step, each = now_bytes / threads;
			if (available() < spare + now_bytes)
				break;
			for (size_t i = 0; i < threads; i++) {
				parts[i] = (struct part){memory + done + i * each, each};
				if (pthread_create(&started[i], NULL, touch, &parts[i]) != 0)
					fail("pthread_create", errno);
			}
			for (size_t i = 0; i < threads; i++)
				pthread_join(started[i], NULL);
			done += now_bytes;
		}
		if (done > 0)
			say("host_touch", round == 0 ? "first" : "again", step, (double)done, now() - from);
		munmap(memory, goal);
	}
}

int main(int argc, char **argv)
{
	int repeat = 5, rest_ms = 500, device = 0, rdma = 0, at = 1;
	size_t bytes = (size_t)8 << 30;
	for (; at + 1 < argc && strncmp(argv[at], "--", 2) == 0; at += 2) {
		if (strcmp(argv[at], "--repeat") == 0)
			repeat = atoi(argv[at + 1]);
		else if (strcmp(argv[at], "--bytes") == 0)
			bytes = strtoull(argv[at + 1], NULL, 10);
		else if (strcmp(argv[at], "--rest") == 0)
			rest_ms = atoi(argv[at + 1]);
		else
			break;
	}
	const char *mode = at < argc ? argv[at++] : "";
	if (strcmp(mode, "host") == 0 && argc - at == 3) {
		size_t threads = strtoull(argv[at + 2], NULL, 10);
		host(strtoull(argv[at], NULL, 10), strtoull(argv[at + 1], NULL, 10), threads < 1 ? 1 : threads > 64 ? 64 : threads);
		return 0;
	}
	if ((strcmp(mode, "limits") != 0 || at != argc) && (strcmp(mode, "calls") != 0 || at == argc || (argc - at) % 2 != 0)) {
		fputs(help, stderr);
		return 2;
	}
	void *context;
	find_driver();
	TRY(cuInit(0));
	TRY(cuDeviceGet(&device, 0));
	TRY(cuDevicePrimaryCtxRetain(&context, device));
	TRY(cuCtxSetCurrent(context));
	TRY(cuStreamCreate(&stream, 1));
	if (strcmp(mode, "limits") == 0) {
		limits(repeat, bytes);
		return 0;
	}
	/* GPUDirect RDMA with virtual memory: what the library asks for where the device has it. */
	TRY(cuDeviceGetAttribute(&rdma, 110, device));
	for (; at < argc; at += 2) {
		calls_for(argv[at], argv[at + 1], false, false, repeat, 0, rest_ms);
		calls_for(argv[at], argv[at + 1], true, false, repeat, rdma ? 0 : repeat < 3 ? repeat : 3, rest_ms);
		if (rdma)
			calls_for(argv[at], argv[at + 1], true, true, repeat, repeat < 3 ? repeat : 3, rest_ms);
	}
	return 0;
}
