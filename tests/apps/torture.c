/*
 * Programs that are never idle, to pause at any moment:
 *
 *   torture threads SEED THREADS [ahead|both]
 *                                   threads that at random launch, capture, replay, allocate, free,
 *                                   fork, load modules, build graphs, have contexts of their own and queue
 *                                   host functions. With `ahead`, they also
 *                                   allocate and free in stream order without waiting, with `both` they
 *                                   copy while a second device is current, too
 *   torture rank ID RANK RANKS [ROUNDS [REST]]
 *                                   a process in collectives with others, which rests for so many
 *                                   microseconds before each. The numbers that they
 *                                   add up depend on all earlier rounds. `grow MIB` has it take more
 *                                   memory between two rounds, `check` checks all of that
 *   torture ahead WRITES            a loop that keeps this many writes queued
 *
 * It needs kernels of the simulated GPU (tests/simgpu/src/waiting.rs). Knows nothing of vramctl but the
 * names of its regions. Commands on stdin: progress, queued, verify, stop, quit, fail FUNCTION
 * NTH, clear.
 */
#define _GNU_SOURCE
#include "copy3d.h"
#include "cudadriver.h"
#include "cudart.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* Of each block of ROOM bytes, BYTES are used. vramctl does not manage smaller blocks. */
enum { MOST_THREADS = 16, BLOCKS = 6, BYTES = 96 << 10, ROOM = 1 << 20, INJECTED = 999 };

static const char ptx[] = ".version 7.0\n.target sm_50\n.address_size 64\n"
                          ".visible .entry nothing() { ret; }\n"
                          ".visible .entry simgpu_collective(\n"
                          ".visible .entry simgpu_persistent(\n";

static struct {
	CUresult (*load)(CUmodule *, const void *);
	CUresult (*unload)(CUmodule);
	CUresult (*function)(CUfunction *, CUmodule, const char *);
	CUresult (*launch)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, cudaStream_t, void **,
	                   void **);
	CUresult (*to_device)(CUdeviceptr, const void *, size_t);
	CUresult (*to_host)(void *, CUdeviceptr, size_t);
	CUresult (*alloc_async)(CUdeviceptr *, size_t, cudaStream_t);
	CUresult (*free_async)(CUdeviceptr, cudaStream_t);
	CUresult (*context)(CUcontext *, unsigned, CUdevice);
	CUresult (*end_context)(CUcontext);
	CUresult (*current)(CUcontext *);
	CUresult (*make_current)(CUcontext);
	CUresult (*alloc)(CUdeviceptr *, size_t);
	CUresult (*free)(CUdeviceptr);
	CUresult (*graph)(cudaGraph_t *, unsigned);
	CUresult (*add_copy)(cudaGraphNode_t *, cudaGraph_t, const cudaGraphNode_t *, size_t, const Copy3D *, CUcontext);
	int (*fail)(const char *, uint64_t, uint32_t, uint64_t);
	void (*clear)(void);
	int32_t (*region_begin)(const char *, int32_t);
	int32_t (*region_end)(void);
} cu;

static atomic_bool stopping;
/* Whether faults have been injected into the driver: then calls may fail, and are retried. */
static atomic_bool faulty;

/*
 * Writes a line, without stdio: a child that is forked while another thread prints has a copy of the stream in the middle of that,
 * also if the stream has no buffer, and its `exit` would write the rest once more.
 */
__attribute__((format(printf, 1, 2))) static void say(const char *format, ...)
{
	char line[512];
	va_list arguments;
	va_start(arguments, format);
	int length = vsnprintf(line, sizeof line - 1, format, arguments);
	va_end(arguments);
	if (length < 0 || length > (int)sizeof line - 2)
		length = (int)sizeof line - 2;
	line[length++] = '\n';
	if (write(STDOUT_FILENO, line, (size_t)length) != length)
		_exit(1);
}

static void wrong(const char *what, int code)
{
	say("wrong: %s (%d)", what, code);
	_exit(1);
}

#define TRY(call)                                                     \
	do {                                                          \
		int code_;                                            \
		do                                                    \
			code_ = (call);                               \
		while (code_ == INJECTED && atomic_load(&faulty));    \
		if (code_ != 0)                                       \
			wrong(#call, code_);                          \
	} while (0)

static void look_up(void *library, void *slot, const char *name)
{
	void *symbol = dlsym(library, name);
	memcpy(slot, &symbol, sizeof symbol);
}

static void look_all_up(void)
{
	void *driver = dlopen("libcuda.so.1", RTLD_NOW);
	if (driver == NULL)
		wrong("no libcuda.so.1", 0);
	look_up(driver, &cu.load, "cuModuleLoadData");
	look_up(driver, &cu.unload, "cuModuleUnload");
	look_up(driver, &cu.function, "cuModuleGetFunction");
	look_up(driver, &cu.launch, "cuLaunchKernel");
	look_up(driver, &cu.to_device, "cuMemcpyHtoD_v2");
	look_up(driver, &cu.to_host, "cuMemcpyDtoH_v2");
	look_up(driver, &cu.alloc_async, "cuMemAllocAsync");
	look_up(driver, &cu.free_async, "cuMemFreeAsync");
	look_up(driver, &cu.context, "cuCtxCreate_v2");
	look_up(driver, &cu.end_context, "cuCtxDestroy_v2");
	look_up(driver, &cu.current, "cuCtxGetCurrent");
	look_up(driver, &cu.make_current, "cuCtxSetCurrent");
	look_up(driver, &cu.alloc, "cuMemAlloc_v2");
	look_up(driver, &cu.free, "cuMemFree_v2");
	look_up(driver, &cu.graph, "cuGraphCreate");
	look_up(driver, &cu.add_copy, "cuGraphAddMemcpyNode");
	look_up(driver, &cu.fail, "simgpu_fail");
	look_up(driver, &cu.clear, "simgpu_clear_faults");
	look_up(RTLD_DEFAULT, &cu.region_begin, "vramctl_region_begin");
	look_up(RTLD_DEFAULT, &cu.region_end, "vramctl_region_end");
}

static void launch(const char *name, cudaStream_t stream, void **arguments, CUmodule module)
{
	CUfunction function;
	TRY(cu.function(&function, module, name));
	TRY(cu.launch(function, 1, 1, 1, 1, 1, 1, 0, stream, arguments, NULL));
}

/* Memory that has one value in all bytes. */
struct block {
	void *at;
	int value;
};

struct worker {
	pthread_t thread;
	int number;
	uint64_t random;
	atomic_ulong rounds;
	cudaStream_t stream, of_second_device;
	struct block blocks[BLOCKS];
	/* The first two are never freed: the graph writes one and copies it to the other. */
	cudaGraphExec_t graph;
	int graph_value;
	atomic_ulong called;
	unsigned long calls;
	unsigned *word;
	unsigned char found[BYTES];
};

static struct worker workers[MOST_THREADS];
static int threads;
static bool runs_ahead, uses_both_devices;

static unsigned below(struct worker *w, unsigned limit)
{
	w->random ^= w->random << 13;
	w->random ^= w->random >> 7;
	w->random ^= w->random << 17;
	return (unsigned)((w->random >> 20) % limit);
}

static void settle(struct worker *w)
{
	TRY(cudaStreamSynchronize(w->stream));
}

static void fill(struct worker *w, struct block *block, int value)
{
	block->value = value;
	TRY(cudaMemsetAsync(block->at, value, BYTES, w->stream));
}

static void verify(struct worker *w, const struct block *block)
{
	TRY(cudaMemcpyAsync(w->found, block->at, BYTES, cudaMemcpyDeviceToHost, w->stream));
	settle(w);
	if (w->found[0] != block->value || memcmp(w->found, w->found + 1, BYTES - 1) != 0)
		wrong("the contents are not what they were", block->value);
}

static void allocate(struct worker *w, struct block *block)
{
	bool marked = cu.region_begin != NULL && below(w, 2) == 0;
	if (marked)
		TRY(cu.region_begin(w->number % 2 == 0 ? "even" : "odd", 0));
	TRY(cudaMalloc(&block->at, below(w, 8) == 0 ? BYTES : ROOM));
	if (marked)
		TRY(cu.region_end());
	fill(w, block, (int)below(w, 256));
}

/*
 * Loading and unloading waits for the device's work and keeps others from launching, and so does freeing what CUDA has allocated (after the
 * driver has failed): nobody does it while work waits for a thread that is still to launch something. That program would stop without
 * vramctl, too.
 */
static pthread_rwlock_t launching = PTHREAD_RWLOCK_INITIALIZER;

static cudaError_t waiting_free(void *at)
{
	pthread_rwlock_wrlock(&launching);
	cudaError_t error = cudaFree(at);
	pthread_rwlock_unlock(&launching);
	return error;
}

static void called(void *argument)
{
	atomic_fetch_add(&((struct worker *)argument)->called, 1);
}

static void wait_for_word(void *argument)
{
	volatile unsigned *word = argument;
	while (*word == 0)
		usleep(50);
}

static void capture(struct worker *w)
{
	cudaGraph_t graph;
	if (w->graph != NULL)
		TRY(cudaGraphExecDestroy(w->graph));
	w->graph_value = (int)below(w, 256);
	TRY(cudaStreamBeginCapture(w->stream, cudaStreamCaptureModeThreadLocal));
	TRY(cudaMemsetAsync(w->blocks[0].at, w->graph_value, BYTES, w->stream));
	if (below(w, 4) == 0)
		usleep(2000);
	TRY(cudaMemcpyAsync(w->blocks[1].at, w->blocks[0].at, BYTES, cudaMemcpyDeviceToDevice, w->stream));
	TRY(cudaLaunchHostFunc(w->stream, called, w));
	TRY(cudaStreamEndCapture(w->stream, &graph));
	TRY(cudaGraphInstantiateWithFlags(&w->graph, graph, 0));
	TRY(cudaGraphDestroy(graph));
}

static void replay(struct worker *w)
{
	if (w->graph == NULL)
		return;
	for (unsigned i = 1 + below(w, 3); i > 0; i--, w->calls++)
		TRY(cudaGraphLaunch(w->graph, w->stream));
	w->blocks[0].value = w->blocks[1].value = w->graph_value;
	verify(w, &w->blocks[1]);
	if (atomic_load(&w->called) != w->calls)
		wrong("a graph's host function was not called as often as the graph was launched", 0);
}

/* Builds a graph node by node, which the driver checks against the memory that is there, and runs it once. */
static void build(struct worker *w)
{
	cudaGraph_t graph;
	cudaGraphExec_t executable;
	cudaGraphNode_t node;
	CUcontext own;
	Copy3D copy = {.from.type = 2, .to.type = 2, .width = BYTES, .height = 1, .depth = 1};
	settle(w);
	memcpy(&copy.from.device, &w->blocks[0].at, sizeof copy.from.device);
	memcpy(&copy.to.device, &w->blocks[1].at, sizeof copy.to.device);
	TRY(cu.current(&own));
	TRY(cu.graph(&graph, 0));
	TRY(cu.add_copy(&node, graph, NULL, 0, &copy, own));
	if (below(w, 4) == 0)
		usleep(2000);
	TRY(cudaGraphInstantiateWithFlags(&executable, graph, 0));
	TRY(cudaGraphLaunch(executable, w->stream));
	w->blocks[1].value = w->blocks[0].value;
	verify(w, &w->blocks[1]);
	TRY(cudaGraphExecDestroy(executable));
	TRY(cudaGraphDestroy(graph));
}

/* Has a context for a while, and leaves half of its memory to the end of the context. */
static void have_a_context(struct worker *w)
{
	CUcontext usual, own;
	CUdeviceptr at[2];
	int value = (int)below(w, 256);
	TRY(cu.current(&usual));
	TRY(cu.context(&own, 0, 0));
	for (int i = 0; i < 2; i++)
		TRY(cu.alloc(&at[i], ROOM));
	memset(w->found, value, BYTES);
	TRY(cu.to_device(at[0], w->found, BYTES));
	if (below(w, 4) == 0)
		usleep(below(w, 3000));
	memset(w->found, value + 1, BYTES);
	TRY(cu.to_host(w->found, at[0], BYTES));
	if (w->found[0] != value || memcmp(w->found, w->found + 1, BYTES - 1) != 0)
		wrong("the contents in a context of its own", value);
	/* Both wait for all work of the device: see `launching`. */
	pthread_rwlock_wrlock(&launching);
	TRY(cu.free(at[1]));
	TRY(cu.end_context(own));
	pthread_rwlock_unlock(&launching);
	TRY(cu.make_current(usual));
}

static void use_module(struct worker *w)
{
	CUmodule module;
	pthread_rwlock_wrlock(&launching);
	TRY(cu.load(&module, ptx));
	pthread_rwlock_unlock(&launching);
	if (below(w, 2) == 0) {
		launch("nothing", w->stream, NULL, module);
	} else {
		void *word = w->word, *at = w->blocks[0].at;
		uint64_t bytes = BYTES;
		*(volatile unsigned *)word = 0;
		launch("simgpu_persistent", w->stream, (void *[]){&word, &at, &bytes}, module);
		usleep(below(w, 1000));
		*(volatile unsigned *)word = 1;
	}
	settle(w);
	pthread_rwlock_wrlock(&launching);
	TRY(cu.unload(module));
	pthread_rwlock_unlock(&launching);
}

static void use_host_function(struct worker *w)
{
	bool launches = below(w, 8) == 0;
	if (launches)
		pthread_rwlock_rdlock(&launching);
	*(volatile unsigned *)w->word = 0;
	TRY(cudaLaunchHostFunc(w->stream, wait_for_word, w->word));
	/* If this thread is held here, the device waits for it, so the program cannot be paused at such a moment. */
	if (launches)
		fill(w, &w->blocks[0], (int)below(w, 256));
	*(volatile unsigned *)w->word = 1;
	if (launches)
		pthread_rwlock_unlock(&launching);
	settle(w);
}

static void have_a_child(struct worker *w)
{
	int status = -1;
	unsigned end = below(w, 3);
	pid_t child = fork();
	if (child == 0) {
		if (end == 0)
			execl("/bin/true", "true", (char *)NULL);
		if (end == 1)
			exit(0);
		_exit(0);
	}
	if (child < 0 || waitpid(child, &status, 0) != child || status != 0)
		wrong("a child did not end well", status);
}

static void use_stream_order(struct worker *w)
{
	struct block block = {.value = 0};
	CUdeviceptr at;
	TRY(cu.alloc_async(&at, ROOM, w->stream));
	memcpy(&block.at, &at, sizeof at);
	fill(w, &block, (int)below(w, 256));
	verify(w, &block);
	TRY(cu.free_async(at, w->stream));
}

/* Allocates, writes and frees over and over, and nobody waits for it: neither in a stream of its own nor in the thread's default one. */
static void run_ahead_in_stream_order(struct worker *w)
{
	cudaStream_t stream = below(w, 2) == 0 ? w->stream : cudaStreamPerThread;
	struct block block = {.value = 0};
	CUdeviceptr at;
	settle(w);
	for (unsigned i = 2 + below(w, 10); i > 0; i--) {
		block.value = (int)below(w, 256);
		TRY(cu.alloc_async(&at, ROOM << below(w, 4), stream));
		memcpy(&block.at, &at, sizeof at);
		TRY(cudaMemsetAsync(block.at, block.value, BYTES, stream));
		TRY(cudaMemcpyAsync(w->blocks[0].at, block.at, BYTES, cudaMemcpyDeviceToDevice, stream));
		TRY(cu.free_async(at, stream));
	}
	w->blocks[0].value = block.value;
	TRY(cudaStreamSynchronize(stream));
	verify(w, &w->blocks[0]);
}

/* Plain memory can be copied whatever device is current, without access between the devices. */
static void use_second_device(struct worker *w)
{
	struct block *block = &w->blocks[below(w, 2)];
	CUdeviceptr at;
	settle(w);
	memcpy(&at, &block->at, sizeof at);
	block->value = (int)below(w, 256);
	memset(w->found, block->value, BYTES);
	TRY(cudaSetDevice(1));
	if (w->of_second_device == NULL)
		TRY(cudaStreamCreateWithFlags(&w->of_second_device, cudaStreamNonBlocking));
	if (below(w, 2) == 0) {
		TRY(cu.to_device(at, w->found, BYTES));
		memset(w->found, block->value + 1, BYTES);
		TRY(cu.to_host(w->found, at, BYTES));
	} else {
		TRY(cudaMemcpyAsync(block->at, w->found, BYTES, cudaMemcpyHostToDevice, w->of_second_device));
		TRY(cudaStreamSynchronize(w->of_second_device));
		memset(w->found, block->value + 1, BYTES);
		TRY(cudaMemcpyAsync(w->found, block->at, BYTES, cudaMemcpyDeviceToHost, w->of_second_device));
		TRY(cudaStreamSynchronize(w->of_second_device));
	}
	if (w->found[0] != block->value || memcmp(w->found, w->found + 1, BYTES - 1) != 0)
		wrong("what the second device's stream copied", block->value);
	TRY(cudaSetDevice(0));
}

static void turn(struct worker *w)
{
	struct block *block = &w->blocks[2 + below(w, BLOCKS - 2)];
	unsigned what = below(w, 44);
	if (what < 14) {
		if (block->at == NULL) {
			allocate(w, block);
		} else {
			verify(w, block);
			TRY(waiting_free(block->at));
			block->at = NULL;
		}
	} else if (what < 22) {
		if (block->at != NULL) {
			TRY(cudaMemcpyAsync(w->blocks[0].at, block->at, BYTES, cudaMemcpyDeviceToDevice, w->stream));
			w->blocks[0].value = block->value;
			verify(w, &w->blocks[0]);
		}
	} else if (what < 25) {
		capture(w);
	} else if (what < 31) {
		replay(w);
	} else if (what < 33) {
		use_module(w);
	} else if (what < 35) {
		use_host_function(w);
	} else if (what < 36) {
		have_a_child(w);
	} else if (what >= 42) {
		have_a_context(w);
	} else if (what >= 40) {
		build(w);
	} else if (what < 38 || !runs_ahead) {
		use_stream_order(w);
	} else if (what < 39 || !uses_both_devices) {
		run_ahead_in_stream_order(w);
	} else {
		use_second_device(w);
	}
}

static void *work(void *argument)
{
	struct worker *w = argument;
	TRY(cudaSetDevice(0));
	TRY(cudaStreamCreateWithFlags(&w->stream, cudaStreamNonBlocking));
	TRY(cudaMallocHost((void **)&w->word, sizeof *w->word));
	allocate(w, &w->blocks[0]);
	allocate(w, &w->blocks[1]);
	for (; !atomic_load(&stopping); atomic_fetch_add(&w->rounds, 1))
		turn(w);
	for (int i = 0; i < BLOCKS; i++) {
		if (w->blocks[i].at == NULL)
			continue;
		verify(w, &w->blocks[i]);
		TRY(cudaFree(w->blocks[i].at));
	}
	return NULL;
}

/* This rank: its memory, and how far it has come. */
static struct {
	uint64_t communicator;
	unsigned rank, ranks;
	unsigned long last;
	unsigned rest;
	atomic_ulong queued, rounds;
	atomic_bool over;
	uint64_t value;
	unsigned char *numbers;
} rank;

/* What it has taken beside, each filled with its own number. The others wait in a collective meanwhile. */
static struct {
	void *at[16];
	size_t bytes[16];
	atomic_int count;
	atomic_ulong wanted;
} grown;

static void grow(struct worker *w)
{
	size_t bytes = atomic_load(&grown.wanted) << 20;
	int count = atomic_load(&grown.count);
	if (bytes == 0 || count == (int)(sizeof grown.at / sizeof *grown.at))
		return;
	TRY(cudaMalloc(&grown.at[count], bytes));
	TRY(cudaMemsetAsync(grown.at[count], count + 1, bytes, w->stream));
	settle(w);
	grown.bytes[count] = bytes;
	atomic_store(&grown.wanted, 0);
	atomic_store(&grown.count, count + 1);
}

static void check_grown(void)
{
	for (int i = 0; i < atomic_load(&grown.count); i++) {
		unsigned char *found = malloc(grown.bytes[i]);
		CUdeviceptr at;
		memcpy(&at, &grown.at[i], sizeof at);
		TRY(cu.to_host(found, at, grown.bytes[i]));
		if (found[0] != i + 1 || memcmp(found, found + 1, grown.bytes[i] - 1) != 0)
			wrong("what it has taken beside", i);
		free(found);
	}
}

static void *collect(void *argument)
{
	struct worker *w = argument;
	CUmodule module;
	TRY(cudaSetDevice(0));
	TRY(cu.load(&module, ptx));
	uint64_t at = (uint64_t)rank.numbers, flag = at + 8, pair[2];
	rank.value = rank.rank + 1;
	for (bool stop = false; !stop;) {
		unsigned long round = atomic_load(&rank.rounds) + 1;
		grow(w);
		pair[0] = rank.value;
		/* The first rank decides, and all learn of it in the same round. */
		pair[1] = rank.rank == 0 && (atomic_load(&stopping) || round == rank.last);
		/* Not by the functions that the library copies with, so that a fault in those is the library's. */
		TRY(cu.to_device(at, pair, sizeof pair));
		if (rank.rest > 0)
			usleep(rank.rest);
		else if (below(w, 4) == 0)
			usleep(below(w, 500));
		launch("simgpu_collective", w->stream, (void *[]){&rank.communicator, &rank.rank, &rank.ranks, &at}, module);
		launch("simgpu_collective", w->stream, (void *[]){&rank.communicator, &rank.rank, &rank.ranks, &flag}, module);
		atomic_store(&rank.queued, round);
		settle(w);
		TRY(cu.to_host(pair, at, sizeof pair));
		rank.value = pair[0] * UINT64_C(2862933555777941757) + rank.rank + round;
		stop = pair[1] != 0;
		atomic_store(&rank.rounds, round);
	}
	atomic_store(&rank.over, true);
	return NULL;
}

static unsigned long most_queued;

/* As a training loop whose results nobody reads for a while. */
static void *run_ahead(void *argument)
{
	struct worker *w = argument;
	TRY(cudaSetDevice(0));
	TRY(cudaStreamCreateWithFlags(&w->stream, cudaStreamNonBlocking));
	TRY(cudaMalloc(&w->blocks[0].at, ROOM));
	while (!atomic_load(&stopping)) {
		if (w->calls - atomic_load(&w->called) < most_queued) {
			fill(w, &w->blocks[0], 1);
			TRY(cudaLaunchHostFunc(w->stream, called, w));
			w->calls++;
		} else {
			atomic_fetch_add(&w->rounds, 1);
			usleep(1000);
		}
	}
	return NULL;
}

/* Answers one command. */
static void answer(char *line)
{
	char name[64];
	unsigned long nth;
	if (strncmp(line, "progress", 8) == 0) {
		char counts[MOST_THREADS * 21 + 1];
		int end = 0;
		for (int i = 0; i < threads; i++)
			end += sprintf(counts + end, "%lu ", atomic_load(rank.ranks > 0 ? &rank.rounds : &workers[i].rounds));
		if (atomic_load(&rank.over))
			say("%sover %llu", counts, (unsigned long long)rank.value);
		else
			say("%s", counts);
	} else if (sscanf(line, "grow %lu", &nth) == 1) {
		int count = atomic_load(&grown.count);
		atomic_store(&grown.wanted, nth);
		while (atomic_load(&grown.count) == count)
			usleep(1000);
		say("grown");
	} else if (strncmp(line, "check", 5) == 0) {
		check_grown();
		say("ok");
	} else if (strncmp(line, "queued", 6) == 0) {
		say("%lu", atomic_load(&rank.queued));
	} else if (strncmp(line, "verify", 6) == 0) {
		/* While the other threads work. */
		static struct worker own;
		if (own.stream == NULL)
			TRY(cudaStreamCreateWithFlags(&own.stream, cudaStreamNonBlocking));
		verify(&own, &workers[0].blocks[0]);
		say("ok");
	} else if (sscanf(line, "fail %63s %lu", name, &nth) == 2) {
		atomic_store(&faulty, true);
		say(cu.fail(name, nth, INJECTED, 1) == 0 ? "ok" : "unknown");
	} else if (strncmp(line, "clear", 5) == 0) {
		cu.clear();
		say("ok");
	} else if (strncmp(line, "stop", 4) == 0) {
		atomic_store(&stopping, true);
		for (int i = 0; rank.ranks == 0 && i < threads; i++)
			pthread_join(workers[i].thread, NULL);
		say("ok");
	} else {
		say("what?");
	}
}

int main(int argc, char **argv)
{
	char line[128];
	void *(*begin)(void *) = NULL;
	look_all_up();
	if ((argc == 4 || argc == 5) && strcmp(argv[1], "threads") == 0) {
		threads = atoi(argv[3]);
		runs_ahead = argc == 5;
		uses_both_devices = runs_ahead && strcmp(argv[4], "both") == 0;
		begin = work;
	} else if (argc >= 5 && strcmp(argv[1], "rank") == 0) {
		rank.communicator = strtoull(argv[2], NULL, 10);
		rank.rank = (unsigned)atoi(argv[3]);
		rank.ranks = (unsigned)atoi(argv[4]);
		rank.last = argc > 5 ? strtoul(argv[5], NULL, 10) : 0;
		rank.rest = argc > 6 ? (unsigned)atoi(argv[6]) : 0;
		threads = 1;
		begin = collect;
	} else if (argc == 3 && strcmp(argv[1], "ahead") == 0) {
		most_queued = strtoul(argv[2], NULL, 10);
		threads = 1;
		begin = run_ahead;
	}
	if (threads < 1 || threads > MOST_THREADS) {
		fprintf(stderr, "usage: torture threads SEED THREADS [ahead|both] | torture rank ID RANK RANKS [ROUNDS [REST]] | torture ahead WRITES\n");
		return 2;
	}
	if (rank.ranks > 0) {
		struct worker *w = &workers[0];
		TRY(cudaStreamCreateWithFlags(&w->stream, cudaStreamNonBlocking));
		TRY(cudaMalloc((void **)&rank.numbers, ROOM));
		TRY(cudaMalloc(&w->blocks[0].at, ROOM));
		fill(w, &w->blocks[0], (int)rank.rank + 1);
		settle(w);
	}
	for (int i = 0; i < threads; i++) {
		workers[i].number = i;
		workers[i].random = (strtoull(argv[2], NULL, 10) + (uint64_t)i + 1) * UINT64_C(0x9e3779b97f4a7c15) | 1;
		if (pthread_create(&workers[i].thread, NULL, begin, &workers[i]) != 0)
			wrong("pthread_create", 0);
	}
	for (int i = 0; rank.ranks == 0 && i < threads; i++)
		while (atomic_load(&workers[i].rounds) == 0)
			usleep(100);
	say("ready");
	while (fgets(line, sizeof line, stdin) != NULL && strcmp(line, "quit\n") != 0)
		answer(line);
	return 0;
}
