/*
 * A program whose signal handlers make calls of CUDA, in a thread that makes some, too. Commands on stdin:
 *
 *   call        the thread launches
 *   interrupt   a handler in the thread makes queries, which it must be able to, then launches. Answered
 *               after the queries
 *   progress    how many launches of the thread and of handlers have returned
 *   verify      whether the memory is as these have written it
 *   bombard     from now on, the thread calls the function of counts.c without a pause, and so do handlers
 *               that interrupt the thread and each other at any moment
 *   counts      how many of these calls have begun, and how many have ended
 *   cease       stops that. Whether all calls have been made once
 *
 * Knows nothing of vramctl.
 */
#define _GNU_SOURCE
#include "check.h"
#include "cudadriver.h"
#include "cudart.h"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { BYTES = 4 << 20, HALF = BYTES / 2, MOST_HANDLERS = 3 };

static struct {
	int (*set)(CUdeviceptr, unsigned char, size_t, cudaStream_t);
	int (*query)(void *event);
	int (*ask)(size_t *unused, size_t *all);
	int (*create)(void **event, unsigned flags);
	int (*count)(CUdeviceptr, unsigned short, size_t, cudaStream_t);
	atomic_ulong *begun, *ended;
} cu;

static pthread_t thread, bombardier;
static cudaStream_t stream;
static void *event;
static unsigned char *memory;

/* How many launches the thread is to make, what it has made, and what handlers have done. */
static atomic_int wanted, made, queried, handled;
static atomic_bool bombarding;
/* How many of the bombardment's calls should have been made, and how often the thread has slept without work. */
static atomic_ulong calls, slept;

static void look_up(void *library, void *slot, const char *name)
{
	void *symbol = dlsym(library, name);
	check(symbol != NULL, name);
	memcpy(slot, &symbol, sizeof symbol);
}

/* Writes a number where nobody else does. */
static void launch(unsigned char *at, int number)
{
	CUdeviceptr to = (CUdeviceptr)(at + number);
	check(cu.set(to, (unsigned char)number, 1, stream) == 0, "a launch");
}

static void query_and_launch(int signal)
{
	size_t unused, all;
	(void)signal;
	check(cu.query(event) == 0 && cu.ask(&unused, &all) == 0 && all > 0, "a query in a handler");
	launch(memory + HALF, atomic_fetch_add(&queried, 1) + 1);
	atomic_fetch_add(&handled, 1);
}

static void count_one(void)
{
	check(cu.count((CUdeviceptr)memory, 0, 1, stream) == 0, "a call that is only counted");
	atomic_fetch_add(&calls, 1);
}

static void count_in_handlers(int signal)
{
	static atomic_int depth;
	(void)signal;
	if (atomic_fetch_add(&depth, 1) < MOST_HANDLERS)
		count_one();
	atomic_fetch_sub(&depth, 1);
}

static void *work(void *nothing)
{
	check(cudaSetDevice(0) == cudaSuccess, "cudaSetDevice");
	for (;;) {
		while (atomic_load(&bombarding))
			count_one();
		if (atomic_load(&made) == atomic_load(&wanted)) {
			usleep(200);
			atomic_fetch_add(&slept, 1);
			continue;
		}
		launch(memory, atomic_load(&made) + 1);
		atomic_fetch_add(&made, 1);
	}
	return nothing;
}

static void *bombard(void *nothing)
{
	unsigned seed = 1;
	while (atomic_load(&bombarding)) {
		check(pthread_kill(thread, SIGUSR2) == 0, "pthread_kill");
		usleep((unsigned)rand_r(&seed) % 100);
	}
	return nothing;
}

static bool is_as_written(void)
{
	static unsigned char found[BYTES];
	check(cudaMemcpyAsync(found, memory, BYTES, cudaMemcpyDeviceToHost, stream) == cudaSuccess, "cudaMemcpyAsync");
	check(cudaStreamSynchronize(stream) == cudaSuccess, "cudaStreamSynchronize");
	for (int i = 0; i < HALF; i++) {
		if (found[i] != (i <= made ? i : 0) || found[HALF + i] != (i <= handled ? i : 0))
			return false;
	}
	return true;
}

static void answer(const char *command)
{
	if (strcmp(command, "call\n") == 0) {
		atomic_fetch_add(&wanted, 1);
		printf("ok\n");
	} else if (strcmp(command, "interrupt\n") == 0) {
		int before = atomic_load(&queried);
		check(pthread_kill(thread, SIGUSR1) == 0, "pthread_kill");
		while (atomic_load(&queried) == before)
			usleep(100);
		printf("ok\n");
	} else if (strcmp(command, "progress\n") == 0) {
		printf("%d %d\n", atomic_load(&made), atomic_load(&handled));
	} else if (strcmp(command, "verify\n") == 0) {
		printf("%s\n", is_as_written() ? "ok" : "corrupt");
	} else if (strcmp(command, "bombard\n") == 0) {
		atomic_store(&bombarding, true);
		/* The first call allocates, and a handler that waits while `malloc` is interrupted keeps all others from that. */
		while (atomic_load(&calls) == 0)
			usleep(100);
		check(pthread_create(&bombardier, NULL, bombard, NULL) == 0, "pthread_create");
		printf("ok\n");
	} else if (strcmp(command, "counts\n") == 0) {
		unsigned long begun = atomic_load(cu.begun);
		printf("%lu %lu\n", begun, atomic_load(cu.ended));
	} else if (strcmp(command, "cease\n") == 0) {
		atomic_store(&bombarding, false);
		check(pthread_join(bombardier, NULL) == 0, "pthread_join");
		/* The last signal may not have been handled, but it is before the thread has slept from beginning to end. */
		unsigned long before = atomic_load(&slept);
		while (atomic_load(&slept) < before + 2)
			usleep(100);
		unsigned long begun = atomic_load(cu.begun);
		bool is_over = atomic_load(&calls) == begun && atomic_load(cu.ended) == begun;
		printf("%s\n", is_over ? "ok" : "calls are missing, or somebody is still inside");
	} else {
		printf("what?\n");
	}
	fflush(stdout);
}

int main(void)
{
	char line[64];
	struct sigaction to_one = {.sa_handler = query_and_launch, .sa_flags = SA_NODEFER};
	struct sigaction to_many = {.sa_handler = count_in_handlers, .sa_flags = SA_NODEFER | SA_RESTART};
	check(cudaMalloc((void **)&memory, BYTES) == cudaSuccess, "cudaMalloc");
	void *driver = dlopen("libcuda.so.1", RTLD_NOW);
	check(driver != NULL, "no libcuda.so.1");
	look_up(driver, &cu.set, "cuMemsetD8Async");
	look_up(driver, &cu.query, "cuEventQuery");
	look_up(driver, &cu.ask, "cuMemGetInfo_v2");
	look_up(driver, &cu.create, "cuEventCreate");
	look_up(RTLD_DEFAULT, &cu.count, "cuMemsetD16Async");
	look_up(RTLD_DEFAULT, &cu.begun, "calls_begun");
	look_up(RTLD_DEFAULT, &cu.ended, "calls_ended");
	check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess, "cudaStreamCreate");
	check(cu.create(&event, 0) == 0, "cuEventCreate");
	check(cudaMemsetAsync(memory, 0, BYTES, stream) == cudaSuccess, "cudaMemsetAsync");
	check(cudaStreamSynchronize(stream) == cudaSuccess, "cudaStreamSynchronize");
	check(sigaction(SIGUSR1, &to_one, NULL) == 0 && sigaction(SIGUSR2, &to_many, NULL) == 0, "sigaction");
	check(pthread_create(&thread, NULL, work, NULL) == 0, "pthread_create");
	printf("ready\n");
	fflush(stdout);
	while (fgets(line, sizeof line, stdin) != NULL)
		answer(line);
	return 0;
}
