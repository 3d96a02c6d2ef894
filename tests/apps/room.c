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
 *   at-exit      checks at exit, as `check` does
 *   free-at-exit frees everything then, and prints CUDA's code
 *   on-term      checks when it is told to end (SIGTERM), and exits
 *   check        whether all that has been taken is as it was written: ok or corrupt
 *   poll         from now on, a thread asks an event and a stream whether they have work
 *   capture, end a relaxed capture
 *   pool         from now on, it is in a pool of torch's, as the Python package tells the library
 *   stop CALL    stops the process, as SIGSTOP does, before the next use of a function of the simulated driver
 *
 * Otherwise knows nothing of vramctl.
 */
#define _GNU_SOURCE
#include "check.h"
#include "cudadriver.h"
#include "cudart.h"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MOST = 128, MIB = 1 << 20, NOT_READY = 600 };

static struct {
	CUdeviceptr at;
	size_t bytes;
} taken[MOST];
static int count;

static CUmodule module;
static CUfunction function;
static CUstream captured;
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

static void *ask_forever(void *context)
{
	struct timespec pause = { 0, 1000000 };
	check(cuCtxSetCurrent(context) == 0, "the context");
	for (;;) {
		int of_stream = cuStreamQuery(NULL);
		check(cuEventQuery(event) == 0 && (of_stream == 0 || of_stream == NOT_READY), "a query");
		nanosleep(&pause, NULL);
	}
	return NULL;
}

static int poll(void)
{
	pthread_t thread;
	CUcontext context;
	int error = cuDevicePrimaryCtxRetain(&context, 0);
	if (error == 0)
		error = cuEventCreate(&event, 0);
	return error == 0 ? pthread_create(&thread, NULL, ask_forever, context) : error;
}

static int capture(void)
{
	int error = captured == NULL ? cuStreamCreate(&captured, 1) : 0;
	return error == 0 ? cuStreamBeginCapture_v2(captured, 2) : error;
}

static int end(void)
{
	void *graph;
	return cuStreamEndCapture(captured, &graph);
}

static void check_at_exit(void)
{
	printf("%s\n", verified());
	fflush(stdout);
}

static void free_at_exit(void)
{
	int error = 0;
	for (int i = 0; i < count && error == 0; i++)
		error = cudaFree((void *)taken[i].at);
	printf("%d\n", error);
	fflush(stdout);
}

static void check_and_exit(int signal)
{
	(void)signal;
	check_at_exit();
	exit(0);
}

static int at_exit(void)
{
	return atexit(check_at_exit);
}

static int frees_at_exit(void)
{
	return atexit(free_at_exit);
}

static int stop_before(const char *call)
{
	int (*fail)(const char *, uint64_t, uint32_t, uint64_t);
	void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
	*(void **)&fail = dlsym(driver, "simgpu_fail");
	check(fail != NULL, "not the simulated driver");
	return fail(call, 1, UINT32_MAX - 3, 1);
}

static int pool(void)
{
	int (*note)(int);
	*(void **)&note = dlsym(RTLD_DEFAULT, "vramctl_note_torch_pool");
	check(note != NULL, "not the library");
	return note(1);
}

static int on_term(void)
{
	return signal(SIGTERM, check_and_exit) == SIG_ERR;
}

int main(void)
{
	static const struct {
		const char *name;
		int (*make)(void);
	} calls[] = { { "first\n", first }, { "context\n", another }, { "load\n", load }, { "launch\n", launch },
		      { "graph\n", graph }, { "stream\n", stream },   { "poll\n", poll },
		      { "capture\n", capture }, { "end\n", end },	   { "pool\n", pool },
		      { "at-exit\n", at_exit }, { "free-at-exit\n", frees_at_exit }, { "on-term\n", on_term } };
	char line[64], call[64];
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
		else if (sscanf(line, "stop %63s", call) == 1)
			answer = stop_before(call);
		if (strcmp(line, "check\n") == 0)
			printf("%s\n", verified());
		else
			printf("%d\n", answer);
		fflush(stdout);
	}
	return 0;
}
