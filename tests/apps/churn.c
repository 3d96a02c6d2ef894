/* A program that allocates and frees constantly, in bursts, and prints how long each burst took. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cudart.h"

static const char help[] =
	"Allocates and frees device memory in bursts: has 32 blocks of 2 to 8 MiB, and repeatedly frees one\n"
	"and allocates another in its place.\n\n"
	"usage: churn\n\n"
	"Reads the number of allocations and frees of the next burst from stdin. Prints `ready`, and for\n"
	"each burst its processor time and its duration, in nanoseconds. Ends with stdin.\n";

enum { BLOCKS = 32 };

static void *blocks[BLOCKS];
static unsigned long long state = 88172645463325252ULL;

static unsigned next(unsigned limit)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return (unsigned)(state >> 33) % limit;
}

static long long now(clockid_t clock)
{
	struct timespec time;
	clock_gettime(clock, &time);
	return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static void need(cudaError_t error, const char *what)
{
	if (error == 0)
		return;
	fprintf(stderr, "churn: %s: %s\n", what, cudaGetErrorName(error));
	exit(1);
}

static void allocate(void **block)
{
	need(cudaMalloc(block, (size_t)(1 + next(4)) << 21), "cudaMalloc");
}

int main(int argc, char **argv)
{
	long count;
	if (argc > 1) {
		fputs(help, strcmp(argv[1], "--help") == 0 ? stdout : stderr);
		return strcmp(argv[1], "--help") == 0 ? 0 : 2;
	}
	for (int i = 0; i < BLOCKS; i++)
		allocate(&blocks[i]);
	puts("ready");
	fflush(stdout);
	while (scanf("%ld", &count) == 1) {
		long long processor = now(CLOCK_THREAD_CPUTIME_ID), clock = now(CLOCK_MONOTONIC);
		for (; count > 0; count -= 2) {
			void **block = &blocks[next(BLOCKS)];
			need(cudaFree(*block), "cudaFree");
			allocate(block);
		}
		printf("%lld %lld\n", now(CLOCK_THREAD_CPUTIME_ID) - processor, now(CLOCK_MONOTONIC) - clock);
		fflush(stdout);
	}
	return 0;
}
