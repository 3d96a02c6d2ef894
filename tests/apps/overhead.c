/* Measures a small cudaMalloc and cudaFree. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <getopt.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cudart.h"

static const char help[] =
	"Times pairs of cudaMalloc and cudaFree.\n\n"
	"usage: overhead [options]\n\n"
	"  --bytes N        size of each allocation (4096)\n"
	"  --batch N        number of pairs that are timed together (250)\n"
	"  --batches N      number of batches (200)\n"
	"  --hold N         number of allocations of 2 MiB that exist meanwhile (0)\n"
	"  --device N       the GPU (0)\n\n"
	"Prints `ns_per_pair MEDIAN MINIMUM` over the batches, then `ns_extra MEDIAN`: how much\n"
	"longer a pair takes than with the runtime's own functions, measured alternately. With\n"
	"nothing preloaded, both are the same functions.\n";

typedef cudaError_t (*malloc_function)(void **pointer, size_t bytes);
typedef cudaError_t (*free_function)(void *pointer);

static int failed(const char *what, cudaError_t error)
{
	fprintf(stderr, "overhead: %s: %s (%s)\n", what, cudaGetErrorName(error),
	        cudaGetErrorString(error));
	return 1;
}

static bool number(const char *text, unsigned long long most, unsigned long long *value)
{
	char *rest = NULL;
	errno = 0;
	*value = strtoull(text, &rest, 10);
	return errno == 0 && rest != text && *rest == '\0' && *text != '-' && *value <= most;
}

static int by_size(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

/* Runs the given number of pairs; returns the time of one. */
static cudaError_t pairs(malloc_function allocate, free_function release,
                         unsigned long long count, size_t bytes, double *ns)
{
	struct timespec from, to;
	cudaError_t error = cudaSuccess;
	clock_gettime(CLOCK_MONOTONIC, &from);
	for (unsigned long long i = 0; error == cudaSuccess && i < count; i++) {
		void *pointer = NULL;
		error = allocate(&pointer, bytes);
		if (error == cudaSuccess)
			error = release(pointer);
	}
	clock_gettime(CLOCK_MONOTONIC, &to);
	*ns = ((double)(to.tv_sec - from.tv_sec) * 1e9 + (double)(to.tv_nsec - from.tv_nsec))
	    / (double)count;
	return error;
}

/* The runtime's own functions, not interposed ones. */
static bool runtimes_own(malloc_function *allocate, free_function *release)
{
	static const char *const names[] = {
		"libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0", "libcudart.so",
	};
	for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
		void *runtime = dlopen(names[i], RTLD_LAZY | RTLD_NOLOAD);
		void *symbols[2];
		if (runtime == NULL)
			continue;
		symbols[0] = dlsym(runtime, "cudaMalloc");
		symbols[1] = dlsym(runtime, "cudaFree");
		memcpy(allocate, &symbols[0], sizeof *allocate);
		memcpy(release, &symbols[1], sizeof *release);
		return symbols[0] != NULL && symbols[1] != NULL;
	}
	return false;
}

int main(int argc, char **argv)
{
	static const struct option options[] = {
		{"bytes", required_argument, NULL, 'b'},
		{"batch", required_argument, NULL, 'n'},
		{"batches", required_argument, NULL, 'r'},
		{"hold", required_argument, NULL, 'o'},
		{"device", required_argument, NULL, 'd'},
		{"help", no_argument, NULL, 'h'},
		{NULL, 0, NULL, 0},
	};
	unsigned long long bytes = 4096, batch = 250, batches = 200, held = 0, device = 0;
	bool good = true;
	int letter;
	while ((letter = getopt_long(argc, argv, "h", options, NULL)) != -1) {
		switch (letter) {
		case 'b': good &= number(optarg, 1ull << 40, &bytes); break;
		case 'n': good &= number(optarg, 1ull << 30, &batch); break;
		case 'r': good &= number(optarg, 1ull << 20, &batches); break;
		case 'o': good &= number(optarg, 1ull << 16, &held); break;
		case 'd': good &= number(optarg, 1023, &device); break;
		case 'h':
			fputs(help, stdout);
			return 0;
		default: good = false;
		}
	}
	if (!good || bytes == 0 || batch == 0 || batches == 0 || optind < argc) {
		fputs(help, stderr);
		return 2;
	}

	cudaError_t error = cudaSetDevice((int)device);
	/* Keep one small allocation: without it, every cudaFree would give the
	 * runtime's block of small allocations back to the driver. */
	void *kept = NULL;
	if (error == cudaSuccess)
		error = cudaMalloc(&kept, bytes);
	for (unsigned long long i = 0; error == cudaSuccess && i < held; i++) {
		void *pointer = NULL;
		error = cudaMalloc(&pointer, (size_t)2 << 20);
	}
	malloc_function own_malloc;
	free_function own_free;
	double warm_up;
	if (!runtimes_own(&own_malloc, &own_free)) {
		fprintf(stderr, "overhead: the loaded libcudart is not found by its name\n");
		return 1;
	}
	if (error == cudaSuccess)
		error = pairs(cudaMalloc, cudaFree, batch, bytes, &warm_up);
	if (error != cudaSuccess)
		return failed("starting", error);

	double *linked = calloc((size_t)batches, sizeof *linked);
	double *extra = calloc((size_t)batches, sizeof *extra);
	if (linked == NULL || extra == NULL) {
		fprintf(stderr, "overhead: no memory for %llu figures\n", batches);
		return 1;
	}
	for (unsigned long long i = 0; i < batches; i++) {
		double own = 0;
		/* Alternates which comes first. */
		if (i % 2 == 0)
			error = pairs(own_malloc, own_free, batch, bytes, &own);
		if (error == cudaSuccess)
			error = pairs(cudaMalloc, cudaFree, batch, bytes, &linked[i]);
		if (error == cudaSuccess && i % 2 != 0)
			error = pairs(own_malloc, own_free, batch, bytes, &own);
		if (error != cudaSuccess)
			return failed("a pair", error);
		extra[i] = linked[i] - own;
	}
	qsort(linked, (size_t)batches, sizeof *linked, by_size);
	qsort(extra, (size_t)batches, sizeof *extra, by_size);
	printf("ns_per_pair %.1f %.1f\nns_extra %.1f\n", linked[batches / 2], linked[0],
	       extra[batches / 2]);
	free(linked);
	free(extra);
	return 0;
}
