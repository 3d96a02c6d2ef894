/*
 * Asks for device memory in CUDA's various ways. Each line on stdin is a request, answered with CUDA's code:
 *
 *   first        the driver's start, and the primary context
 *   runtime      the primary context, as the runtime makes it
 *   context      another context
 *   load         a module
 *   launch       its function
 *   graph        an executable graph
 *   stream       a stream
 *   take MIB     an allocation, which is written
 *   order MIB    one in stream order
 *   error        the runtime's last error
 *   check        whether all that has been taken is as it was written: ok or corrupt
 *   poll         asks an event and a stream for half a second whether they have work
 *
 * Knows nothing of vramctl.
 */
#define _GNU_SOURCE
#include "check.h"
#include "cudadriver.h"
#include "cudart.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MOST = 64, MIB = 1 << 20 };

static struct {
	CUdeviceptr at;
	size_t bytes;
} taken[MOST];
static int count;

static CUmodule module;
static CUfunction function;
static void *event;

static int first(void)
{
	CUcontext context;
	int error = cuInit(0);
	if (error == 0)
		error = cuDevicePrimaryCtxRetain(&context, 0);
	return error == 0 ? cuCtxSetCurrent(context) : error;
}

static int another(void)
{
	CUcontext context;
	int error = cuCtxCreate_v2(&context, 0, 0);
	return error == 0 ? cuCtxPopCurrent_v2(&context) : error;
}

static int load(void)
{
	int error = cuModuleLoadData(&module, ".version 8.0\n.entry nothing() { ret; }");
	return error == 0 ? cuModuleGetFunction(&function, module, "nothing") : error;
}

static int launch(void)
{
	int error = cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
	return error == 0 ? cuCtxSynchronize() : error;
}

static int graph(void)
{
	void *graph, *executable;
	int error = cuGraphCreate(&graph, 0);
	return error == 0 ? cuGraphInstantiateWithFlags(&executable, graph, 0) : error;
}

static int stream(void)
{
	CUstream stream;
	return cuStreamCreate(&stream, 0);
}

static int take(size_t bytes, bool in_order)
{
	void *at;
	check(count < MOST, "too many allocations");
	int error = in_order ? cudaMallocAsync(&at, bytes, NULL) : cudaMalloc(&at, bytes);
	if (error != 0)
		return error;
	taken[count].at = (CUdeviceptr)at;
	taken[count].bytes = bytes;
	count++;
	return cuMemsetD8_v2((CUdeviceptr)at, (unsigned char)count, bytes);
}

static const char *verified(void)
{
	for (int i = 0; i < count; i++) {
		unsigned char *found = malloc(taken[i].bytes);
		check(found != NULL && cuMemcpyDtoH_v2(found, taken[i].at, taken[i].bytes) == 0, "a copy");
		for (size_t at = 0; at < taken[i].bytes; at++) {
			if (found[at] != i + 1)
				return "corrupt";
		}
		free(found);
	}
	return "ok";
}

static int poll(void)
{
	struct timespec pause = { 0, 1000000 };
	int error = event == NULL ? cuEventCreate(&event, 0) : 0;
	for (int i = 0; i < 500 && error == 0; i++) {
		error = cuEventQuery(event);
		if (error == 0)
			error = cuStreamQuery(NULL);
		nanosleep(&pause, NULL);
	}
	return error;
}

int main(void)
{
	static const struct {
		const char *name;
		int (*make)(void);
	} calls[] = { { "first\n", first }, { "context\n", another }, { "load\n", load }, { "launch\n", launch },
		      { "graph\n", graph }, { "stream\n", stream },   { "poll\n", poll } };
	char line[64];
	size_t mib;
	printf("ready\n");
	fflush(stdout);
	while (fgets(line, sizeof line, stdin) != NULL) {
		int answer = -1;
		for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
			if (strcmp(line, calls[i].name) == 0)
				answer = calls[i].make();
		}
		if (strcmp(line, "runtime\n") == 0)
			answer = cudaFree(NULL);
		else if (strcmp(line, "error\n") == 0)
			answer = cudaGetLastError();
		else if (sscanf(line, "take %zu", &mib) == 1)
			answer = take(mib * MIB, false);
		else if (sscanf(line, "order %zu", &mib) == 1)
			answer = take(mib * MIB, true);
		if (strcmp(line, "check\n") == 0)
			printf("%s\n", verified());
		else
			printf("%d\n", answer);
		fflush(stdout);
	}
	return 0;
}
