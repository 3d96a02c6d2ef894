/* Times loops that allocate, set and free memory in the order of a stream. */
#define _GNU_SOURCE
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#include "cudart.h"

static const char help[] =
	"Times loops that allocate, set and free memory in the order of a stream.\n\n"
	"usage: stream_ordered\n\n"
	"Prints a line for each loop: its name, bytes and rounds, and microseconds per round until\n"
	"the host was done and until the GPU was. Loops: `free` does not synchronise, `synced` does\n"
	"so in each round, `kept` too, with a pool that may keep what is freed. Sizes that do not\n"
	"fit are left out. Then `left BYTES`: what is still in use afterwards.\n";

/* The driver cleans large released memory for this long, in microseconds, and slows down whatever
 * runs meanwhile. */
static const useconds_t cleaning = 500000;
static const size_t large = 1024;

enum loop { FREE, SYNCED, KEPT };
static const char *const names[] = {"free", "synced", "kept"};

static double now(void)
{
	struct timespec at;
	clock_gettime(CLOCK_MONOTONIC, &at);
	return (double)at.tv_sec * 1e6 + (double)at.tv_nsec * 1e-3;
}

static size_t free_bytes(void)
{
	size_t left = 0, total = 0;
	cudaMemGetInfo(&left, &total);
	return left;
}

static cudaError_t run(enum loop loop, size_t bytes, int rounds, cudaStream_t stream)
{
	cudaError_t error = cudaSuccess;
	/* The first two rounds warm up, and show how many fit into half a second. */
	const double most = 500000;
	double from = now(), host;
	for (int round = -2; error == cudaSuccess && round < rounds; round++) {
		void *memory = NULL;
		if (round == 0) {
			error = cudaStreamSynchronize(stream);
			double each = (now() - from) / 2;
			if (each * rounds > most)
				rounds = each > most ? 1 : (int)(most / each);
			from = now();
		}
		if (error == cudaSuccess)
			error = cudaMallocAsync(&memory, bytes, stream);
		if (error == cudaSuccess)
			error = cudaMemsetAsync(memory, round, bytes, stream);
		if (error == cudaSuccess)
			error = cudaFreeAsync(memory, stream);
		if (error == cudaSuccess && loop != FREE)
			error = cudaStreamSynchronize(stream);
	}
	host = now() - from;
	if (error == cudaSuccess)
		error = cudaStreamSynchronize(stream);
	if (error == cudaSuccess)
		printf("%s %zu %d %.2f %.2f\n", names[loop], bytes, rounds, host / rounds, (now() - from) / rounds);
	return error;
}

int main(int argc, char **argv)
{
	static const struct {
		enum loop loop;
		size_t mib;
		int rounds;
	} loops[] = {
		{FREE, 2, 3000}, {FREE, 20, 2000}, {FREE, 256, 300}, {FREE, 4096, 40}, {FREE, 30720, 10}, {FREE, 61440, 10},
		{SYNCED, 20, 500}, {SYNCED, 256, 200}, {SYNCED, 30720, 5}, {KEPT, 2, 2000}, {KEPT, 20, 2000}, {KEPT, 256, 300},
	};
	cudaStream_t stream = NULL;
	cudaMemPool_t pool = NULL;
	(void)argv;
	if (argc > 1) {
		fputs(help, stdout);
		return 0;
	}
	cudaError_t error = cudaFree(NULL);
	if (error == cudaSuccess)
		error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
	if (error == cudaSuccess)
		error = cudaDeviceGetDefaultMemPool(&pool, 0);
	size_t before = free_bytes(), last = 0;
	for (size_t i = 0; error == cudaSuccess && i < sizeof loops / sizeof *loops; i++) {
		unsigned long long keep = loops[i].loop == KEPT ? ~0ull : 0;
		size_t bytes = loops[i].mib << 20;
		if (bytes > before / 10 * 9)
			continue;
		if (last >= large)
			usleep(cleaning);
		last = loops[i].mib;
		error = cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep);
		if (error == cudaSuccess)
			error = run(loops[i].loop, bytes, loops[i].rounds, stream);
		if (error == cudaSuccess && loops[i].loop == KEPT)
			error = cudaMemPoolTrimTo(pool, 0);
	}
	if (error != cudaSuccess) {
		fprintf(stderr, "stream_ordered: %s (%s)\n", cudaGetErrorName(error), cudaGetErrorString(error));
		return 1;
	}
	size_t after = free_bytes();
	printf("left %zu\n", before > after ? before - after : 0);
	return 0;
}
