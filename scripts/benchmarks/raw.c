/*
 * Measures the machine's own limits with plain driver calls: copies between pinned host memory
 * and the device, a pass over device memory, and allocating and releasing the physical memory of
 * a set of allocations. Prints one JSON object per line.
 */
#define _GNU_SOURCE
#include "calls.h"

#include <sys/mman.h>

static const char help[] =
	"usage: raw [--repeat N] [--bytes N] [--rest MS] limits | calls NAME FILE… | host BYTES SPARE THREADS\n\n"
	"  limits   copies --bytes (default: 8 GiB) each way in pieces of 16 and 64 MiB; a device\n"
	"           copy and a memset of half as much\n"
	"  calls    for each FILE (a set, one size per line): times create, map and access after a\n"
	"           rest, then unmap and release\n"
	"  host     touches BYTES of fresh host memory, leaving SPARE, and part of it again: a\n"
	"           virtual machine may get its own memory only then\n";

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
	/* Larger than any cache, but quick to allocate. */
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

static void calls_for(const char *name, const char *path, int device, int repeat, long rest_ms)
{
	size_t count, total;
	pointer base;
	struct piece *pieces = read_set(path, &count, &total);
	TRY(cuMemAddressReserve(&base, total, 0, 0, 0));
	/* The first turn is a warm-up. */
	for (int turn = -1; turn < repeat; turn++) {
		struct timespec rest = {rest_ms / 1000, rest_ms % 1000 * 1000000};
		nanosleep(&rest, NULL);
		struct times times = take_and_give(pieces, count, base, total, has_rdma(device), 0, stream);
		if (turn >= 0) {
			printf("{\"what\":\"calls\",\"set\":\"%s\",\"create\":%.9f,\"map\":%.9f,\"access\":%.9f,"
			       "\"unmap\":%.9f,\"release\":%.9f,\"slow_resume\":%.3f,\"slow_pause\":%.3f}\n",
			       name, times.create, times.map, times.access, times.unmap, times.release, times.slow_taking,
			       times.slow_giving);
			fflush(stdout);
		}
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

/* Touches memory in steps while enough is left: on a machine whose memory grows, each step may add more. */
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
	int repeat = 5, device = 0, at = 1;
	long rest_ms = 0;
	size_t bytes = (size_t)8 << 30;
	for (; at + 1 < argc && strncmp(argv[at], "--", 2) == 0; at += 2) {
		if (strcmp(argv[at], "--repeat") == 0)
			repeat = atoi(argv[at + 1]);
		else if (strcmp(argv[at], "--bytes") == 0)
			bytes = strtoull(argv[at + 1], NULL, 10);
		else if (strcmp(argv[at], "--rest") == 0)
			rest_ms = atol(argv[at + 1]);
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
	for (; at < argc; at += 2)
		calls_for(argv[at], argv[at + 1], device, repeat, rest_ms);
	return 0;
}
