/* A competing program: allocates device memory, writes all of it, verifies it and keeps it. */
#define _GNU_SOURCE
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <poll.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "cudart.h"
#include "pattern.h"

static const char help[] =
	"Takes device memory, fills it with a pattern, verifies every byte, and holds it.\n\n"
	"usage: hog --mib N [options]\n\n"
	"  --mib N       how much, in allocations of at most 16 GiB\n"
	"  --seconds S   how long to hold it; without this, until stdin ends\n"
	"  --device N    the GPU (0)\n"
	"  --seed N      seed of the pattern (7)\n\n"
	"Prints `holding BYTES` and, after another check at the end, `verified BYTES`. Exit code:\n"
	"0 if all of it was correct, 3 if the GPU has too little free memory, 1 otherwise.\n";

#define PIECE ((size_t)16 << 30)
#define MAX_PIECES 256

static int failed(const char *what, cudaError_t error)
{
	fprintf(stderr, "hog: %s: %s (%s)\n", what, cudaGetErrorName(error),
	        cudaGetErrorString(error));
	return error == cudaErrorMemoryAllocation ? 3 : 1;
}

static bool number(const char *text, unsigned long long *value)
{
	char *rest = NULL;
	errno = 0;
	*value = strtoull(text, &rest, 10);
	return errno == 0 && rest != text && *rest == '\0' && *text != '-';
}

/* Waits for end of file on stdin, or for the given number of seconds. */
static void hold(double seconds)
{
	struct timespec start, now;
	char waste[256];
	clock_gettime(CLOCK_MONOTONIC, &start);
	for (;;) {
		double left = -1;
		if (seconds >= 0) {
			clock_gettime(CLOCK_MONOTONIC, &now);
			left = seconds - (double)(now.tv_sec - start.tv_sec)
			     - (double)(now.tv_nsec - start.tv_nsec) / 1e9;
			if (left <= 0)
				return;
			poll(NULL, 0, (int)(left * 1000) + 1);
			continue;
		}
		ssize_t got = read(STDIN_FILENO, waste, sizeof waste);
		if (got == 0 || (got < 0 && errno != EINTR))
			return;
	}
}

static int check(struct pattern *pattern, void *const *piece, const size_t *bytes, int pieces)
{
	struct pattern_counts counts = {0};
	for (int i = 0; i < pieces; i++) {
		cudaError_t error =
			pattern_check(pattern, piece[i], bytes[i], (uint64_t)i, 0, &counts);
		if (error != cudaSuccess)
			return failed("verifying", error);
	}
	if (counts.corrupt + counts.zero > 0) {
		fprintf(stderr, "hog: corrupt %" PRIu64 " bytes, zero %" PRIu64 " bytes, ok %" PRIu64
		        " bytes\n", counts.corrupt, counts.zero, counts.ok);
		return 1;
	}
	return 0;
}

int main(int argc, char **argv)
{
	static const struct option options[] = {
		{"mib", required_argument, NULL, 'm'},
		{"seconds", required_argument, NULL, 's'},
		{"device", required_argument, NULL, 'd'},
		{"seed", required_argument, NULL, 'S'},
		{"help", no_argument, NULL, 'h'},
		{NULL, 0, NULL, 0},
	};
	unsigned long long mib = 0, device = 0, seed = 7;
	double seconds = -1;
	char *rest;
	int letter;
	bool good = true;
	while ((letter = getopt_long(argc, argv, "h", options, NULL)) != -1) {
		switch (letter) {
		case 'm': good &= number(optarg, &mib); break;
		case 'd': good &= number(optarg, &device) && device < 1024; break;
		case 'S': good &= number(optarg, &seed); break;
		case 's':
			seconds = strtod(optarg, &rest);
			good &= *rest == '\0' && rest != optarg && seconds >= 0 && seconds < 1e6;
			break;
		case 'h':
			fputs(help, stdout);
			return 0;
		default: good = false;
		}
	}
	if (!good || mib == 0 || mib > MAX_PIECES * (unsigned long long)(PIECE >> 20)
	    || optind < argc) {
		fputs(help, stderr);
		return 2;
	}

	struct pattern *pattern = NULL;
	cudaError_t error = cudaSetDevice((int)device);
	if (error == cudaSuccess)
		error = pattern_create(&pattern, (int)device, seed, 0);
	if (error != cudaSuccess)
		return failed("starting", error);

	static void *piece[MAX_PIECES];
	static size_t bytes[MAX_PIECES];
	int pieces = 0;
	size_t wanted = (size_t)mib << 20;
	for (size_t rest_bytes = wanted; rest_bytes > 0; pieces++) {
		bytes[pieces] = rest_bytes < PIECE ? rest_bytes : PIECE;
		error = cudaMalloc(&piece[pieces], bytes[pieces]);
		if (error != cudaSuccess) {
			size_t free_bytes = 0, total = 0;
			int code = failed("allocating", error);
			cudaMemGetInfo(&free_bytes, &total);
			fprintf(stderr, "hog: out of memory: %zu of %zu bytes allocated, %zu free\n",
			        wanted - rest_bytes, wanted, free_bytes);
			return code;
		}
		rest_bytes -= bytes[pieces];
	}
	for (int i = 0; i < pieces; i++) {
		error = pattern_fill(pattern, piece[i], bytes[i], (uint64_t)i);
		if (error != cudaSuccess)
			return failed("filling", error);
	}
	int code = check(pattern, piece, bytes, pieces);
	if (code != 0)
		return code;
	printf("holding %zu\n", wanted);
	fflush(stdout);

	if (seconds != 0) {
		hold(seconds);
		code = check(pattern, piece, bytes, pieces);
		if (code != 0)
			return code;
	}
	printf("verified %zu\n", wanted);
	for (int i = 0; i < pieces; i++) {
		error = cudaFree(piece[i]);
		if (error != cudaSuccess)
			return failed("freeing", error);
	}
	pattern_destroy(pattern);
	return 0;
}
