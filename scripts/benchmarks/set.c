/*
 * Holds a set of allocations and obeys bench.py: fills them with known contents, pauses and
 * resumes them through the preloaded library, changes some, and verifies them. Reads one command
 * per line from stdin and answers each with a line on stdout: `ok …` or `error …`.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "calls.h"
#include "cudart.h"

static const char help[] =
	"usage: set\n\n"
	"Commands, one per line on standard input:\n"
	"  alloc TAG BACKUP FILE   allocates the sizes in the file, in a region with this tag and\n"
	"                          backup (0: from the environment, 1: discard, 2: host)\n"
	"  fill                    fills everything with known contents\n"
	"  scribble                writes one byte everywhere, at the device's speed\n"
	"  pause TAG|* BACKUP      answers with its start and end (ns, monotonic clock) and the\n"
	"                          CPU's slowdown\n"
	"  resume TAG|* MS         the same\n"
	"  change N                changes a few bytes in each of N pieces of 2 MiB\n"
	"  check TAG full|sample|zero\n"
	"  calls MS FILE           with driver calls alone: allocates the sizes in the file, uses\n"
	"                          the memory, rests and releases it; answers with the seconds\n"
	"                          for create, map, access, unmap and release, and the CPU's\n"
	"                          slowdown in both halves\n"
	"  status                  the library's status, as JSON\n"
	"  pin N                   registers N bytes of host memory, as a program without the\n"
	"                          library would\n"
	"  quit\n";

enum { PIECE = 2 << 20, PATTERN_PIECES = 32, STAMP = 64, CHECK_PIECES = 8, CHECKERS = 8 };

struct allocation {
	char *address;
	size_t pieces, first;
	char tag[32];
};

static struct allocation *set;
static size_t count, pieces;
/* The number of changes to each piece. */
static uint32_t *versions;
static char *pattern, *stamps, *seen;
static cudaStream_t stream;
static uint64_t random_state = 0x9e3779b97f4a7c15;

static int32_t (*region_begin)(const char *tag, int32_t backup);
static int32_t (*region_end)(void);
static int32_t (*do_pause)(const char *tag, int64_t timeout_ms, int32_t backup);
static int32_t (*do_resume)(const char *tag, int64_t timeout_ms);
static int32_t (*status_json)(char *buffer, size_t capacity, size_t *needed);
static const char *(*last_error)(void);

static void answer(const char *format, ...)
{
	va_list arguments;
	va_start(arguments, format);
	vprintf(format, arguments);
	va_end(arguments);
	putchar('\n');
	fflush(stdout);
}

static bool good(const char *what, cudaError_t error)
{
	if (error != cudaSuccess)
		answer("error %s: %s", what, cudaGetErrorString(error));
	return error == cudaSuccess;
}

#define GOOD(call) \
	if (!good(#call, (call))) \
	return

static long long now_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (long long)t.tv_sec * 1000000000 + t.tv_nsec;
}

static uint64_t mix(uint64_t x)
{
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
	x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
	return x ^ (x >> 31);
}

static uint64_t next_random(void)
{
	return mix(random_state += 0x9e3779b97f4a7c15);
}

/* ---- contents: the pattern, and in each piece a stamp that identifies it ---- */

static size_t stamp_at(size_t piece)
{
	return mix(piece) % (PIECE / STAMP) * STAMP;
}

static void write_stamp(char *to, size_t piece)
{
	for (size_t i = 0; i < STAMP / 8; i++) {
		uint64_t word = mix(mix(piece) + versions[piece] * 8191ull + i);
		memcpy(to + i * 8, &word, 8);
	}
}

static const char *pattern_of(size_t piece)
{
	return pattern + piece % PATTERN_PIECES * PIECE;
}

static struct allocation *holder(size_t piece)
{
	size_t low = 0, high = count;
	while (high - low > 1) {
		size_t middle = (low + high) / 2;
		if (set[middle].first <= piece)
			low = middle;
		else
			high = middle;
	}
	return &set[low];
}

static char *address_of(size_t piece)
{
	struct allocation *allocation = holder(piece);
	return allocation->address + (piece - allocation->first) * PIECE;
}

static void allocate(const char *tag, int backup, const char *path)
{
	FILE *file = fopen(path, "r");
	size_t bytes;
	if (file == NULL) {
		answer("error %s cannot be read", path);
		return;
	}
	if (region_begin != NULL && region_begin(tag, backup) != 0) {
		answer("error region: %s", last_error());
		fclose(file);
		return;
	}
	long long from = now_ns();
	while (fscanf(file, "%zu", &bytes) == 1) {
		void *address = NULL;
		cudaError_t error = cudaMalloc(&address, bytes);
		if (error != cudaSuccess || (count % 64 == 0 && (set = realloc(set, (count + 64) * sizeof *set)) == NULL)) {
			answer("error allocation of %zu bytes: %s", bytes, cudaGetErrorString(error));
			fclose(file);
			return;
		}
		set[count] = (struct allocation){.address = address, .pieces = bytes / PIECE, .first = pieces};
		snprintf(set[count].tag, sizeof set->tag, "%s", tag);
		pieces += set[count++].pieces;
	}
	fclose(file);
	if (region_end != NULL)
		region_end();
	free(versions);
	versions = calloc(pieces, sizeof *versions);
	if (versions == NULL)
		answer("error out of host memory");
	else
		answer("ok %zu %zu %lld", count, pieces, now_ns() - from);
}

static void fill(void)
{
	if (pattern == NULL) {
		GOOD(cudaMallocHost((void **)&pattern, (size_t)PATTERN_PIECES * PIECE));
		for (size_t i = 0; i < (size_t)PATTERN_PIECES * PIECE; i += 8) {
			uint64_t word = next_random();
			memcpy(pattern + i, &word, 8);
		}
		GOOD(cudaMallocHost((void **)&stamps, pieces * STAMP));
		GOOD(cudaMallocHost((void **)&seen, pieces * STAMP));
	}
	for (struct allocation *a = set; a < set + count; a++) {
		for (size_t done = 0; done < a->pieces;) {
			size_t from = (a->first + done) % PATTERN_PIECES, run = PATTERN_PIECES - from;
			if (run > a->pieces - done)
				run = a->pieces - done;
			GOOD(cudaMemcpyAsync(a->address + done * PIECE, pattern + from * PIECE, run * PIECE,
			                    cudaMemcpyHostToDevice, stream));
			done += run;
		}
	}
	for (size_t piece = 0; piece < pieces; piece++) {
		write_stamp(stamps + piece * STAMP, piece);
		GOOD(cudaMemcpyAsync(address_of(piece) + stamp_at(piece), stamps + piece * STAMP, STAMP,
		                    cudaMemcpyHostToDevice, stream));
	}
	GOOD(cudaDeviceSynchronize());
	answer("ok");
}

static void scribble(void)
{
	for (struct allocation *a = set; a < set + count; a++)
		GOOD(cudaMemsetAsync(a->address, 0x5a, a->pieces * PIECE, stream));
	GOOD(cudaDeviceSynchronize());
	answer("ok");
}

static void change(size_t wanted)
{
	if (stamps == NULL || wanted > pieces) {
		answer("error too few pieces to change");
		return;
	}
	for (size_t changed = 0; changed < wanted; changed++) {
		/* One in each of `wanted` equal stretches: spread over the set, and none twice. */
		size_t from = changed * pieces / wanted, to = (changed + 1) * pieces / wanted;
		size_t piece = from + next_random() % (to - from);
		versions[piece]++;
		write_stamp(stamps + piece * STAMP, piece);
		GOOD(cudaMemcpyAsync(address_of(piece) + stamp_at(piece), stamps + piece * STAMP, STAMP,
		                    cudaMemcpyHostToDevice, stream));
	}
	GOOD(cudaDeviceSynchronize());
	answer("ok %zu", wanted);
}

static void sample(const char *tag, bool zero)
{
	static char *read;
	static const char nothing[STAMP];
	enum { MOST = 1000 };
	size_t chosen[MOST], places[MOST], found = 0;
	char expected[STAMP];
	if (read == NULL)
		GOOD(cudaMallocHost((void **)&read, (size_t)MOST * STAMP));
	for (int i = 0; i < MOST; i++) {
		size_t piece = next_random() % pieces;
		if (strcmp(tag, "*") != 0 && strcmp(tag, holder(piece)->tag) != 0)
			continue;
		chosen[found] = piece;
		/* The stamp, or another slot. */
		places[found] = i % 2 == 0 ? stamp_at(piece) : next_random() % (PIECE / STAMP) * STAMP;
		GOOD(cudaMemcpyAsync(read + found * STAMP, address_of(piece) + places[found], STAMP,
		                    cudaMemcpyDeviceToHost, stream));
		found++;
	}
	GOOD(cudaDeviceSynchronize());
	for (size_t i = 0; i < found; i++) {
		if (places[i] == stamp_at(chosen[i]) && !zero)
			write_stamp(expected, chosen[i]);
		else if (zero)
			memcpy(expected, nothing, STAMP);
		else
			memcpy(expected, pattern_of(chosen[i]) + places[i], STAMP);
		if (memcmp(expected, read + i * STAMP, STAMP) != 0) {
			answer("error piece %zu (%s) has changed at byte %zu", chosen[i], holder(chosen[i])->tag, places[i]);
			return;
		}
	}
	answer("ok %zu", found);
}

/* ---- every byte, by several threads ---- */

static atomic_size_t next_run;
static atomic_size_t wrong;
static atomic_bool broken;
static const char *wanted_tag;

static void *check_some(void *unused)
{
	char *read = NULL;
	cudaStream_t own = NULL;
	(void)unused;
	if (cudaSetDevice(0) != cudaSuccess || cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking) != cudaSuccess
	    || cudaMallocHost((void **)&read, (size_t)CHECK_PIECES * PIECE) != cudaSuccess) {
		atomic_store(&broken, true);
		return NULL;
	}
	for (;;) {
		size_t from = atomic_fetch_add(&next_run, CHECK_PIECES), to = from + CHECK_PIECES;
		if (from >= pieces)
			break;
		to = to < pieces ? to : pieces;
		cudaError_t error = cudaSuccess;
		for (size_t piece = from; piece < to && error == cudaSuccess; piece++) {
			if (strcmp(wanted_tag, "*") == 0 || strcmp(wanted_tag, holder(piece)->tag) == 0)
				error = cudaMemcpyAsync(read + (piece - from) * PIECE, address_of(piece), PIECE, cudaMemcpyDeviceToHost, own);
		}
		if (error != cudaSuccess || cudaStreamSynchronize(own) != cudaSuccess) {
			atomic_store(&broken, true);
			break;
		}
		for (size_t piece = from; piece < to; piece++) {
			char *here = read + (piece - from) * PIECE, expected[STAMP];
			if (strcmp(wanted_tag, "*") != 0 && strcmp(wanted_tag, holder(piece)->tag) != 0)
				continue;
			size_t at = stamp_at(piece);
			write_stamp(expected, piece);
			if (memcmp(here + at, expected, STAMP) != 0 || memcmp(here, pattern_of(piece), at) != 0
			    || memcmp(here + at + STAMP, pattern_of(piece) + at + STAMP, PIECE - at - STAMP) != 0)
				atomic_fetch_add(&wrong, 1);
		}
	}
	cudaFreeHost(read);
	cudaStreamDestroy(own);
	return NULL;
}

static void check_all(const char *tag)
{
	pthread_t threads[CHECKERS];
	int started = 0;
	atomic_store(&next_run, 0);
	atomic_store(&wrong, 0);
	wanted_tag = tag;
	while (started < CHECKERS && pthread_create(&threads[started], NULL, check_some, NULL) == 0)
		started++;
	for (int i = 0; i < started; i++)
		pthread_join(threads[i], NULL);
	if (started == 0 || atomic_load(&broken))
		answer("error contents could not be read");
	else if (atomic_load(&wrong) > 0)
		answer("error %zu of %zu pieces have changed", atomic_load(&wrong), pieces);
	else
		answer("ok %zu", pieces);
}

/* ---- the library ---- */

static void find_library(void)
{
	static const char *const names[] = {
		"vramctl_region_begin", "vramctl_region_end", "vramctl_pause",
		"vramctl_resume", "vramctl_status_json", "vramctl_last_error",
	};
	void *places[] = {&region_begin, &region_end, &do_pause, &do_resume, &status_json, &last_error};
	for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
		void *found = dlsym(RTLD_DEFAULT, names[i]);
		memcpy(places[i], &found, sizeof found);
	}
}

static void transition(bool pausing, const char *tag, long argument)
{
	const char *chosen = strcmp(tag, "*") == 0 ? NULL : tag;
	if (do_pause == NULL || do_resume == NULL) {
		answer("error the library is not preloaded");
		return;
	}
	double before = slowness();
	long long from = now_ns();
	int32_t code = pausing ? do_pause(chosen, -1, (int32_t)argument) : do_resume(chosen, argument);
	long long to = now_ns();
	if (code != 0)
		answer("error %s: %s", pausing ? "pause" : "resume", last_error());
	else
		answer("ok %lld %lld %.3f", from, to, larger(before, slowness()));
}

static void status(void)
{
	static char buffer[1 << 16];
	size_t needed = 0;
	if (status_json == NULL || status_json(buffer, sizeof buffer, &needed) != 0)
		answer("error no status");
	else
		answer("ok %s", buffer);
}

/* Compares the library with the driver in the same process and close in time. */
static void calls(long rest_ms, const char *path)
{
	static size_t listed, total;
	static struct piece *taken;
	static pointer base;
	static char known[4000];
	if (strcmp(known, path) != 0) {
		if (taken != NULL) {
			TRY(cuMemAddressFree(base, total));
			free(taken);
		}
		find_driver();
		taken = read_set(path, &listed, &total);
		TRY(cuMemAddressReserve(&base, total, 0, 0, 0));
		snprintf(known, sizeof known, "%s", path);
	}
	struct times times = take_and_give(taken, listed, base, total, has_rdma(0), rest_ms, (void *)stream);
	answer("ok %.9f %.9f %.9f %.9f %.9f %.3f %.3f", times.create, times.map, times.access, times.unmap, times.release,
	       times.slow_taking, times.slow_giving);
}

static void pin(size_t bytes)
{
	const size_t step = 64u << 20;
	cudaError_t (*host_register)(void *, size_t, unsigned);
	void *found = dlsym(RTLD_DEFAULT, "cudaHostRegister");
	char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	memcpy(&host_register, &found, sizeof found);
	if (memory == MAP_FAILED || found == NULL) {
		answer("error host memory cannot be registered");
		return;
	}
	madvise(memory, bytes, MADV_HUGEPAGE);
	for (size_t at = 0; at < bytes; at += step) {
		size_t now = bytes - at < step ? bytes - at : step;
		memset(memory + at, 1, now);
		GOOD(host_register(memory + at, now, 1));
	}
	answer("ok");
}

int main(int argc, char **argv)
{
	static char line[4096];
	char word[16], tag[32], rest[4000];
	long number;
	(void)argv;
	if (argc > 1) {
		fputs(help, stdout);
		return 2;
	}
	find_library();
	if (!good("cudaSetDevice", cudaSetDevice(0))
	    || !good("cudaStreamCreate", cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)))
		return 1;
	answer("ok %s", do_pause == NULL ? "without the library" : "with the library");
	while (fgets(line, sizeof line, stdin) != NULL) {
		if (sscanf(line, "alloc %31s %ld %3999s", tag, &number, rest) == 3)
			allocate(tag, (int)number, rest);
		else if (sscanf(line, "pause %31s %ld", tag, &number) == 2)
			transition(true, tag, number);
		else if (sscanf(line, "resume %31s %ld", tag, &number) == 2)
			transition(false, tag, number);
		else if (sscanf(line, "calls %ld %3999s", &number, rest) == 2)
			calls(number, rest);
		else if (sscanf(line, "change %ld", &number) == 1)
			change((size_t)number);
		else if (sscanf(line, "pin %ld", &number) == 1)
			pin((size_t)number);
		else if (sscanf(line, "check %31s %15s", tag, rest) == 2) {
			if (strcmp(rest, "full") == 0)
				check_all(tag);
			else
				sample(tag, strcmp(rest, "zero") == 0);
		} else if (sscanf(line, "%15s", word) != 1)
			continue;
		else if (strcmp(word, "fill") == 0)
			fill();
		else if (strcmp(word, "scribble") == 0)
			scribble();
		else if (strcmp(word, "status") == 0)
			status();
		else if (strcmp(word, "quit") == 0)
			break;
		else
			answer("error unknown command %s", word);
	}
	return 0;
}
