/*
 * Makes one call of the driver all the time, in a thread of its own: what a program may ask at any moment, also while its memory is away.
 *
 * usage: polls CALL [asked]
 *
 * Prints `ready`. Answers each line on its standard input with how often it has made the call, and how many of these calls failed. `asked`: makes
 * the call only then, ten times. Ends with its standard input. Knows nothing of vramctl. Without a CALL, prints the names of all.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cudadriver.h"

typedef void *CUevent;

CUresult cuEventDestroy_v2(CUevent event);
CUresult cuEventRecord(CUevent event, CUstream stream);
CUresult cuEventSynchronize(CUevent event);
CUresult cuEventElapsedTime(float *ms, CUevent from, CUevent to);
CUresult cuStreamDestroy_v2(CUstream stream);
CUresult cuStreamIsCapturing(CUstream stream, int *state);
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags);
CUresult cuMemGetInfo_v2(size_t *available, size_t *total);
CUresult cuMemAllocHost_v2(void **at, size_t bytes);
CUresult cuMemFreeHost(void *at);
CUresult cuMemsetD8Async(CUdeviceptr at, unsigned char value, size_t bytes, CUstream stream);
CUresult cuPointerGetAttribute(void *value, int attribute, CUdeviceptr at);
CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device);
CUresult cuCtxGetCurrent(CUcontext *context);

enum { MIB = 1 << 20, MEMORY = 8 * MIB, SMALL = 4096, EVENT_TIMES = 0, EVENT_UNTIMED = 2, STREAM_DEFAULT = 0, MULTIPROCESSORS = 16, MEMORY_TYPE = 2 };

static CUcontext context;
static CUstream stream;
static CUevent first, second, untimed;
static CUdeviceptr memory;

static CUresult ask_event(void) { return cuEventQuery(first); }
static CUresult ask_untimed_event(void) { return cuEventQuery(untimed); }
static CUresult wait_for_event(void) { return cuEventSynchronize(first); }
static CUresult time_events(void) { float ms; return cuEventElapsedTime(&ms, first, second); }
static CUresult ask_stream(void) { return cuStreamQuery(stream); }
static CUresult wait_for_stream(void) { return cuStreamSynchronize(stream); }
static CUresult wait_for_context(void) { return cuCtxSynchronize(); }
static CUresult order_streams(void) { return cuStreamWaitEvent(stream, first, 0); }
static CUresult ask_capture(void) { int state; return cuStreamIsCapturing(stream, &state); }
static CUresult ask_memory(void) { size_t available, total; return cuMemGetInfo_v2(&available, &total); }
static CUresult ask_pointer(void) { int type; return cuPointerGetAttribute(&type, MEMORY_TYPE, memory); }
static CUresult ask_device(void) { int count; return cuDeviceGetAttribute(&count, MULTIPROCESSORS, 0); }
static CUresult ask_context(void) { CUcontext current; return cuCtxGetCurrent(&current); }
static CUresult record_event(void) { return cuEventRecord(second, stream); }
static CUresult set_memory(void) { return cuMemsetD8Async(memory, 7, SMALL, stream); }

static CUresult make_event(void)
{
	CUevent event;
	CUresult error = cuEventCreate(&event, EVENT_TIMES);
	return error ? error : cuEventDestroy_v2(event);
}

static CUresult make_stream(void)
{
	CUstream made;
	CUresult error = cuStreamCreate(&made, STREAM_DEFAULT);
	return error ? error : cuStreamDestroy_v2(made);
}

static CUresult take_memory(void)
{
	CUdeviceptr at;
	CUresult error = cuMemAlloc_v2(&at, SMALL);
	return error ? error : cuMemFree_v2(at);
}

static CUresult take_host_memory(void)
{
	void *at;
	CUresult error = cuMemAllocHost_v2(&at, SMALL);
	return error ? error : cuMemFreeHost(at);
}

static const struct call {
	const char *name;
	CUresult (*make)(void);
} calls[] = {
	{ "ask_untimed_event", ask_untimed_event },
	{ "ask_event", ask_event },           { "wait_for_event", wait_for_event },     { "time_events", time_events },
	{ "ask_stream", ask_stream },         { "wait_for_stream", wait_for_stream },   { "wait_for_context", wait_for_context },
	{ "order_streams", order_streams },   { "ask_capture", ask_capture },           { "ask_memory", ask_memory },
	{ "ask_pointer", ask_pointer },       { "ask_device", ask_device },             { "ask_context", ask_context },
	{ "record_event", record_event },     { "set_memory", set_memory },             { "make_event", make_event },
	{ "make_stream", make_stream },       { "take_memory", take_memory },           { "take_host_memory", take_host_memory },
};
enum { CALLS = sizeof calls / sizeof *calls };

static const struct call *asked;
static atomic_ulong made, failed;

static void ask(void)
{
	CUresult error = asked->make();
	made++;
	failed += error != 0;
}

static void *poll(void *unused)
{
	(void)unused;
	cuCtxSetCurrent(context);
	for (;;) {
		ask();
		usleep(1000);
	}
	return NULL;
}

static void need(CUresult error, const char *what)
{
	if (error == 0)
		return;
	fprintf(stderr, "polls: %s: error %d\n", what, error);
	exit(1);
}

int main(int count, char **words)
{
	for (int i = 0; i < CALLS && count == 1; i++)
		puts(calls[i].name);
	if (count == 1)
		return 0;
	for (int i = 0; i < CALLS; i++)
		if (strcmp(words[1], calls[i].name) == 0)
			asked = &calls[i];
	if (asked == NULL) {
		fprintf(stderr, "polls: there is no call %s\n", words[1]);
		return 2;
	}
	need(cuInit(0), "cuInit");
	need(cuDevicePrimaryCtxRetain(&context, 0), "a context");
	need(cuCtxSetCurrent(context), "cuCtxSetCurrent");
	need(cuMemAlloc_v2(&memory, MEMORY), "memory");
	need(cuStreamCreate(&stream, STREAM_DEFAULT), "a stream");
	need(cuEventCreate(&first, EVENT_TIMES), "an event");
	need(cuEventCreate(&second, EVENT_TIMES), "an event");
	need(cuEventCreate(&untimed, EVENT_UNTIMED), "an event");
	need(cuEventRecord(untimed, stream), "cuEventRecord");
	need(cuEventRecord(first, stream), "cuEventRecord");
	need(cuEventRecord(second, stream), "cuEventRecord");
	need(cuCtxSynchronize(), "cuCtxSynchronize");
	pthread_t thread;
	int when_asked = count > 2;
	if (!when_asked && pthread_create(&thread, NULL, poll, NULL) != 0)
		return 1;
	puts("ready");
	fflush(stdout);
	for (char line[64]; fgets(line, sizeof line, stdin) != NULL; fflush(stdout)) {
		for (int i = 0; i < 10 && when_asked; i++)
			ask();
		printf("%lu %lu\n", atomic_load(&made), atomic_load(&failed));
	}
	_exit(0);
}
