/*
 * A random program: prints what CUDA answers to each of its calls, in words that do not depend on addresses.
 *
 *   differ SEED STEPS MICROSECONDS RUNTIME [RUNTIME]
 *
 * RUNTIME is differ_runtime.c as a library, linked with a CUDA runtime; of two, each makes half of the calls. The program
 * rests between two steps for so long, so that somebody can pause it.
 * Two runs with one seed make the same calls. So what a run under the library prints must be what a run without it
 * prints: tests/differential.rs compares them. Calls are legal or have a defined error; nothing here is undefined on a
 * real driver. Two threads make the calls, one at a time. Devices, contexts, streams and memory have numbers, and a
 * pointer is printed as "memory 3 + 512".
 */
#define _GNU_SOURCE
#include "copy3d.h"
#include "differ.h"
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef struct {
	int type, id;
} Location;

typedef struct {
	int type, handles;
	Location location;
	void *windows;
	unsigned char flags[8];
} Properties;

typedef struct {
	Location location;
	int flags;
} Access;

typedef struct {
	int type, handles;
	Location location;
	void *security;
	size_t most;
	unsigned char reserved[56];
} PoolProperties;

typedef struct {
	size_t x, y;
	int type;
	const void *host;
	Address device;
	void *array;
	size_t pitch;
} Side2D;

typedef struct {
	Side2D from, to;
	size_t width, height;
} Copy2D;

typedef struct {
	Address to;
	size_t pitch;
	unsigned value, element;
	size_t width, height;
} Set;

/* The driver's functions, by the names that libcuda exports. */
#define DRIVER(X) \
	X(cuInit, (unsigned)) \
	X(cuDeviceGetCount, (int *)) \
	X(cuDevicePrimaryCtxRetain, (Handle *, int)) \
	X(cuDevicePrimaryCtxRelease_v2, (int)) \
	X(cuCtxCreate_v2, (Handle *, unsigned, int)) \
	X(cuCtxDestroy_v2, (Handle)) \
	X(cuCtxGetCurrent, (Handle *)) \
	X(cuCtxSetCurrent, (Handle)) \
	X(cuCtxPushCurrent_v2, (Handle)) \
	X(cuCtxPopCurrent_v2, (Handle *)) \
	X(cuCtxGetDevice, (int *)) \
	X(cuCtxSynchronize, (void)) \
	X(cuMemGetInfo_v2, (size_t *, size_t *)) \
	X(cuMemAlloc_v2, (Address *, size_t)) \
	X(cuMemAllocPitch_v2, (Address *, size_t *, size_t, size_t, unsigned)) \
	X(cuMemAllocManaged, (Address *, size_t, unsigned)) \
	X(cuMemFree_v2, (Address)) \
	X(cuMemAllocAsync, (Address *, size_t, Handle)) \
	X(cuMemAllocFromPoolAsync, (Address *, size_t, Handle, Handle)) \
	X(cuMemFreeAsync, (Address, Handle)) \
	X(cuMemPoolCreate, (Handle *, const PoolProperties *)) \
	X(cuMemPoolDestroy, (Handle)) \
	X(cuMemPoolTrimTo, (Handle, size_t)) \
	X(cuMemPoolSetAttribute, (Handle, int, void *)) \
	X(cuMemPoolGetAttribute, (Handle, int, void *)) \
	X(cuDeviceGetDefaultMemPool, (Handle *, int)) \
	X(cuMemGetAddressRange_v2, (Address *, size_t *, Address)) \
	X(cuPointerGetAttribute, (void *, int, Address)) \
	X(cuIpcGetMemHandle, (Ipc *, Address)) \
	X(cuMemHostAlloc, (void **, size_t, unsigned)) \
	X(cuMemFreeHost, (void *)) \
	X(cuMemHostRegister_v2, (void *, size_t, unsigned)) \
	X(cuMemHostUnregister, (void *)) \
	X(cuMemHostGetDevicePointer_v2, (Address *, void *, unsigned)) \
	X(cuMemcpy, (Address, Address, size_t)) \
	X(cuMemcpyAsync, (Address, Address, size_t, Handle)) \
	X(cuMemcpyHtoD_v2, (Address, const void *, size_t)) \
	X(cuMemcpyHtoDAsync_v2, (Address, const void *, size_t, Handle)) \
	X(cuMemcpyDtoH_v2, (void *, Address, size_t)) \
	X(cuMemcpyDtoHAsync_v2, (void *, Address, size_t, Handle)) \
	X(cuMemcpyDtoD_v2, (Address, Address, size_t)) \
	X(cuMemcpyDtoDAsync_v2, (Address, Address, size_t, Handle)) \
	X(cuMemcpy2D_v2, (const Copy2D *)) \
	X(cuMemcpy2DAsync_v2, (const Copy2D *, Handle)) \
	X(cuMemcpy3D_v2, (const Copy3D *)) \
	X(cuMemcpy3DAsync_v2, (const Copy3D *, Handle)) \
	X(cuMemsetD8_v2, (Address, unsigned char, size_t)) \
	X(cuMemsetD8Async, (Address, unsigned char, size_t, Handle)) \
	X(cuMemsetD32_v2, (Address, unsigned, size_t)) \
	X(cuMemsetD32Async, (Address, unsigned, size_t, Handle)) \
	X(cuMemsetD2D8_v2, (Address, size_t, unsigned char, size_t, size_t)) \
	X(cuMemsetD2D8Async, (Address, size_t, unsigned char, size_t, size_t, Handle)) \
	X(cuMemAddressReserve, (Address *, size_t, size_t, Address, uint64_t)) \
	X(cuMemAddressFree, (Address, size_t)) \
	X(cuMemCreate, (Address *, size_t, const Properties *, uint64_t)) \
	X(cuMemRelease, (Address)) \
	X(cuMemMap, (Address, size_t, size_t, Address, uint64_t)) \
	X(cuMemUnmap, (Address, size_t)) \
	X(cuMemSetAccess, (Address, size_t, const Access *, size_t)) \
	X(cuMemGetAccess, (uint64_t *, const Location *, Address)) \
	X(cuMemRetainAllocationHandle, (Address *, void *)) \
	X(cuMemGetAllocationPropertiesFromHandle, (Properties *, Address)) \
	X(cuMemExportToShareableHandle, (int *, Address, int, uint64_t)) \
	X(cuStreamCreate, (Handle *, unsigned)) \
	X(cuStreamDestroy_v2, (Handle)) \
	X(cuStreamSynchronize, (Handle)) \
	X(cuStreamQuery, (Handle)) \
	X(cuStreamGetCtx, (Handle, Handle *)) \
	X(cuStreamWaitEvent, (Handle, Handle, unsigned)) \
	X(cuStreamBeginCapture_v2, (Handle, int)) \
	X(cuStreamEndCapture, (Handle, Handle *)) \
	X(cuStreamIsCapturing, (Handle, int *)) \
	X(cuThreadExchangeStreamCaptureMode, (int *)) \
	X(cuEventCreate, (Handle *, unsigned)) \
	X(cuEventDestroy_v2, (Handle)) \
	X(cuEventRecord, (Handle, Handle)) \
	X(cuEventQuery, (Handle)) \
	X(cuEventSynchronize, (Handle)) \
	X(cuGraphCreate, (Handle *, unsigned)) \
	X(cuGraphDestroy, (Handle)) \
	X(cuGraphAddMemcpyNode, (Handle *, Handle, const Handle *, size_t, const Copy3D *, Handle)) \
	X(cuGraphAddMemsetNode, (Handle *, Handle, const Handle *, size_t, const Set *, Handle)) \
	X(cuGraphExecMemcpyNodeSetParams, (Handle, Handle, const Copy3D *, Handle)) \
	X(cuGraphInstantiateWithFlags, (Handle *, Handle, uint64_t)) \
	X(cuGraphExecDestroy, (Handle)) \
	X(cuGraphLaunch, (Handle, Handle))

#define DECLARE(name, arguments) static Code (*name) arguments;
DRIVER(DECLARE)
/* The functions of the runtime that the current step calls, and of both runtimes. */
#define DECLARE_BOTH(name, arguments, values) static Code (*name) arguments, (*name##_of[2]) arguments;
RUNTIME(DECLARE_BOTH)

static void choose_runtime(int which)
{
#define USE(name, arguments, values) name = name##_of[which];
	RUNTIME(USE)
}

enum {
	MIB = 1 << 20,
	GRANULE = 2 * MIB,
	MEMORY = 24,
	STREAMS = 6,
	CONTEXTS = 5,
	GRAPHS = 4,
	EVENTS = 4,
	POOLS = 3,
	RANGES = 4,
	HANDLES = 4,
	HOST = 4,
	RESERVED_GRANULES = 4,
	SUCCESS = 0,
};

enum Kind { NONE, PLAIN, IN_ORDER, UNIFIED };

/* Memory that the program has. */
static struct Memory {
	enum Kind kind;
	Address at;
	size_t bytes, pitch, width, height;
	int context;
	/* A graph may use it. */
	bool in_graph;
	/* It has no contents yet. */
	bool is_raw;
} memory[MEMORY];

static struct {
	Handle handle;
	int device;
	bool created;
} contexts[CONTEXTS];

/* The first two are the legacy default stream and the thread's. */
static struct {
	Handle handle;
	int context;
	bool live, blocking;
} streams[STREAMS];

static struct {
	Handle graph, executable, node;
	int context;
	/* A node of its own, which copies memory. */
	bool by_hand;
} graphs[GRAPHS];

static struct {
	Handle handle;
	int context;
} events[EVENTS];

static struct {
	Handle handle;
	int device;
} pools[POOLS];

static struct Range {
	Address at;
	/* The handle that each granule maps, or -1. */
	int mapped[RESERVED_GRANULES];
	bool open[RESERVED_GRANULES];
} ranges[RANGES];

static struct {
	Address handle;
	int granules, device;
	bool exportable;
} handles[HANDLES];

static struct {
	char *at;
	size_t bytes;
	enum { NOTHING, PAGEABLE, PINNED, REGISTERED } kind;
	int context;
} host[HOST];

static int devices;
static bool has_two_runtimes;
/* The stream that is being captured, or -1; and who began. */
static int capturing = -1, capturing_thread;
/* The stream in which work may be under way, or -1. */
static int busy = -1;
static uint64_t state;
static int thread;
static unsigned step;

static uint64_t any(uint64_t below)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return (state >> 16) % below;
}

static bool one_in(unsigned many)
{
	return any(many) == 0;
}

__attribute__((format(printf, 1, 2))) static void say(const char *format, ...)
{
	va_list arguments;
	va_start(arguments, format);
	vprintf(format, arguments);
	va_end(arguments);
}

#define CALL(name, ...) (say(" " #name), said(#name, name(__VA_ARGS__)))

static Code said(const char *name, Code code)
{
	say("=%d", code);
	if (strncmp(name, "cuda", 4) == 0) {
		Code last = cudaPeekAtLastError();
		if (last != SUCCESS)
			say(" (last %d)", last);
		if (one_in(2))
			cudaGetLastError();
	}
	return code;
}

/* Where an address is, in words. */
static void say_address(Address address)
{
	if (address == 0) {
		say(" null");
		return;
	}
	for (int i = 0; i < MEMORY; i++) {
		if (memory[i].kind != NONE && address >= memory[i].at && address < memory[i].at + memory[i].bytes) {
			say(" memory %d + %zu", i, (size_t)(address - memory[i].at));
			return;
		}
	}
	for (int i = 0; i < RANGES; i++) {
		if (ranges[i].at != 0 && address >= ranges[i].at && address < ranges[i].at + RESERVED_GRANULES * GRANULE) {
			say(" range %d + %zu", i, (size_t)(address - ranges[i].at));
			return;
		}
	}
	for (int i = 0; i < HOST; i++) {
		if (host[i].kind != NOTHING && address >= (Address)host[i].at && address < (Address)host[i].at + host[i].bytes) {
			say(" host %d + %zu", i, (size_t)(address - (Address)host[i].at));
			return;
		}
	}
	say(" elsewhere");
}

static void say_context(Handle context)
{
	for (int i = 0; i < CONTEXTS; i++) {
		if (contexts[i].handle == context && context != NULL) {
			say(" context %d", i);
			return;
		}
	}
	say(context == NULL ? " no context" : " another context");
}

static int current(void)
{
	Handle now = NULL;
	if (cuCtxGetCurrent(&now) != SUCCESS || now == NULL)
		return -1;
	for (int i = 0; i < CONTEXTS; i++)
		if (contexts[i].handle == now)
			return i;
	return -1;
}

/* Waits for what is under way, in a way that no capture minds. */
static void settle(void)
{
	if (busy < 0)
		return;
	int mode = 2;
	cuThreadExchangeStreamCaptureMode(&mode);
	if (busy != capturing)
		CALL(cuStreamSynchronize, streams[busy].handle);
	cuThreadExchangeStreamCaptureMode(&mode);
	busy = -1;
}

/* A stream of the current context, for work. Work in other streams is done first. */
static int some_stream(void)
{
	int now = current(), found = -1, seen = 0;
	for (int i = 0; i < STREAMS; i++) {
		bool fits = i < 2 || (streams[i].live && streams[i].context == now);
		/* The default streams wait for a blocking stream, which a capture forbids: seldom. */
		if (i < 2 && capturing >= 0 && !one_in(8))
			fits = false;
		if (fits && any(++seen) == 0)
			found = i;
	}
	if (capturing >= 0 && streams[capturing].context == now && one_in(2))
		found = capturing;
	if (found < 0)
		return -1;
	if (busy >= 0 && busy != found)
		settle();
	say(" in stream %d", found);
	return found;
}

static void works(int stream)
{
	if (stream == capturing)
		return;
	busy = stream;
	if (one_in(2))
		settle();
}

static int some_memory(bool device_only)
{
	int found = -1, seen = 0, now = current();
	for (int i = 0; i < MEMORY; i++) {
		/* A pool's memory is open to its own device: under the library, to those that it finds a way to. */
		bool reaches = memory[i].kind != IN_ORDER || (now >= 0 && memory[i].context >= 0 && contexts[now].device == contexts[memory[i].context].device);
		bool fits = !device_only || (memory[i].kind != UNIFIED && !memory[i].is_raw);
		if (memory[i].kind != NONE && reaches && fits && any(++seen) == 0)
			found = i;
	}
	return found;
}

static size_t some_size(void)
{
	static const size_t sizes[] = {1, 512, 4096, MIB - 1, MIB, MIB + 1, GRANULE - 512, GRANULE, GRANULE + 1, 3 * MIB, 5 * MIB + 4};
	return sizes[any(sizeof sizes / sizeof *sizes)];
}

static int free_memory(void)
{
	for (int i = 0; i < MEMORY; i++)
		if (memory[i].kind == NONE)
			return i;
	return -1;
}

/* New memory gets known contents, by a copy that waits. */
static void have(int slot, enum Kind kind, Address at, size_t bytes)
{
	static char contents[16 * MIB];
	memory[slot] = (struct Memory){.kind = kind, .at = at, .bytes = bytes, .context = current()};
	memory[slot].is_raw = capturing >= 0;
	if (capturing >= 0)
		return;
	settle();
	memset(contents, 1 + (int)any(250), bytes);
	/* Returns before the memory has all of it. */
	CALL(cuMemcpyHtoD_v2, at, contents, bytes);
	busy = 0;
}

/* What was allocated during a capture gets its contents after it. */
static void fill_raw(void)
{
	for (int i = 0; i < MEMORY && capturing < 0; i++)
		if (memory[i].kind != NONE && memory[i].is_raw && memory[i].context == current())
			have(i, memory[i].kind, memory[i].at, memory[i].bytes);
}

static uint32_t hash(const char *bytes, size_t count)
{
	uint32_t value = 2166136261u;
	for (size_t i = 0; i < count; i++)
		value = (value ^ (unsigned char)bytes[i]) * 16777619u;
	return value;
}

/* ---- What the program does. Each prints its arguments, then the answers. ---- */

static void allocate(void)
{
	int slot = free_memory();
	Address at = 0;
	size_t bytes = one_in(40) ? 0 : some_size(), pitch = 0;
	Code code = 0;
	Pitched pitched = {0};
	if (slot < 0)
		return;
	size_t width = 1 + any(3000), height = 1 + any(900);
	say(" %zu", bytes);
	switch (any(7)) {
	case 0:
	case 1:
		code = CALL(cudaMalloc, &at, bytes);
		break;
	case 2:
	case 3:
		code = CALL(cuMemAlloc_v2, &at, bytes);
		break;
	case 4:
		say(" %zu x %zu", width, height);
		code = CALL(cudaMallocPitch, &at, &pitch, width, height);
		bytes = pitch * height;
		say(" pitch %zu", pitch);
		break;
	case 5:
		say(" %zu x %zu", width, height);
		code = CALL(cuMemAllocPitch_v2, &at, &pitch, width, height, 4 << any(3));
		bytes = pitch * height;
		say(" pitch %zu", pitch);
		break;
	case 6:
		say(" %zu x %zu x 2", width, height / 2 + 1);
		code = CALL(cudaMalloc3D, &pitched, ((Extent){width, height / 2 + 1, 2}));
		at = (Address)pitched.pointer;
		pitch = pitched.pitch;
		height = 2 * (height / 2 + 1);
		bytes = pitch * height;
		say(" pitch %zu, %zu x %zu", pitched.pitch, pitched.width, pitched.height);
		break;
	}
	if (code == SUCCESS && at != 0) {
		have(slot, PLAIN, at, bytes);
		memory[slot].pitch = pitch;
		memory[slot].width = width;
		memory[slot].height = height;
		say(" is memory %d", slot);
	}
}

static void allocate_too_much(void)
{
	Address at = 0;
	if (one_in(2))
		CALL(cudaMalloc, &at, (size_t)1 << 45);
	else
		CALL(cuMemAlloc_v2, &at, (size_t)1 << 45);
	say_address(at);
}

static void allocate_unified(void)
{
	int slot = free_memory();
	Address at = 0;
	size_t bytes = some_size();
	if (slot < 0)
		return;
	Code code = one_in(2) ? CALL(cudaMallocManaged, &at, bytes, 1) : CALL(cuMemAllocManaged, &at, bytes, 1);
	if (code == SUCCESS)
		have(slot, UNIFIED, at, bytes);
}

static void allocate_in_order(void)
{
	int slot = free_memory();
	Address at = 0;
	size_t bytes = some_size();
	int now = current(), pool = (int)any(POOLS);
	if (slot < 0 || now < 0)
		return;
	int stream = some_stream();
	/* Inside a capture this becomes a node of the graph, which the simulated driver does not do. */
	if (stream < 0 || stream == capturing)
		return;
	Code code;
	say(" %zu", bytes);
	if (pools[pool].handle != NULL && pools[pool].device == contexts[now].device && one_in(3)) {
		say(" from pool %d", pool);
		code = CALL(cuMemAllocFromPoolAsync, &at, bytes, pools[pool].handle, streams[stream].handle);
	} else if (one_in(2)) {
		code = CALL(cudaMallocAsync, &at, bytes, streams[stream].handle);
	} else {
		code = CALL(cuMemAllocAsync, &at, bytes, streams[stream].handle);
	}
	if (code == SUCCESS) {
		busy = stream;
		have(slot, IN_ORDER, at, bytes);
		say(" is memory %d", slot);
	}
}

/* Whether a graph or a capture may still use memory is the program's business: graphs go first. */
static void forget_graphs(void)
{
	for (int i = 0; i < GRAPHS; i++) {
		if (graphs[i].executable != NULL)
			CALL(cuGraphExecDestroy, graphs[i].executable);
		if (graphs[i].graph != NULL)
			CALL(cuGraphDestroy, graphs[i].graph);
		memset(&graphs[i], 0, sizeof graphs[i]);
	}
	for (int i = 0; i < MEMORY; i++)
		memory[i].in_graph = false;
}

static void free_some(void)
{
	int i = some_memory(false);
	if (i < 0)
		return;
	struct Memory *what = &memory[i];
	say(" memory %d", i);
	if (one_in(12)) {
		/* Not where it begins. */
		Address inside = what->at + (what->bytes > 512 ? 512 : 1);
		if (one_in(2))
			CALL(cudaFree, inside);
		else
			CALL(cuMemFree_v2, inside);
		return;
	}
	if (capturing >= 0 && (what->in_graph || one_in(2)))
		return;
	settle();
	if (capturing < 0)
		forget_graphs();
	Code code;
	bool twice = one_in(10);
	int stream = -1;
	if (what->kind == IN_ORDER || one_in(4))
		stream = some_stream();
	/* A real driver may crash later where memory of a pool is freed in the order of another context's stream. */
	if (what->kind == IN_ORDER && what->context != current())
		return;
	/* In the default stream during another stream's capture, which error comes first is the driver's business. */
	if (stream >= 0 && stream < 2 && capturing >= 0)
		return;
	if (stream >= 0 && stream != capturing && what->kind != UNIFIED) {
		code = one_in(2) ? CALL(cudaFreeAsync, what->at, streams[stream].handle) : CALL(cuMemFreeAsync, what->at, streams[stream].handle);
		if (code == SUCCESS)
			busy = stream;
	} else {
		bool runtime = one_in(2);
		code = runtime ? CALL(cudaFree, what->at) : CALL(cuMemFree_v2, what->at);
		if (code == SUCCESS && twice) {
			if (one_in(2))
				CALL(cudaFree, what->at);
			else
				CALL(cuMemFree_v2, what->at);
		}
	}
	if (code == SUCCESS)
		what->kind = NONE;
}

static void free_nothing(void)
{
	switch (any(4)) {
	case 0: CALL(cudaFree, 0); break;
	case 1: CALL(cuMemFree_v2, 0); break;
	case 2: CALL(cudaFree, 0x1000); break;
	case 3: CALL(cuMemFree_v2, 0x7000000000); break;
	}
}

/* Part of some memory: sometimes more than there is. */
static bool some_part(int *slot, size_t *offset, size_t *bytes, size_t most)
{
	*slot = some_memory(true);
	if (*slot < 0)
		return false;
	*offset = any(memory[*slot].bytes);
	size_t left = memory[*slot].bytes - *offset;
	*bytes = 1 + any(left < most ? left : most);
	say(" memory %d + %zu, %zu bytes", *slot, *offset, *bytes);
	if (capturing >= 0)
		memory[*slot].in_graph = true;
	return true;
}

static void verify(void)
{
	static char contents[16 * MIB];
	int slot;
	size_t offset, bytes;
	if (capturing >= 0 || !some_part(&slot, &offset, &bytes, 64 << 10))
		return;
	settle();
	memset(contents, 0, bytes);
	Code code;
	if (one_in(2))
		code = CALL(cuMemcpyDtoH_v2, contents, memory[slot].at + offset, bytes);
	else
		code = CALL(cudaMemcpy, (Address)contents, memory[slot].at + offset, bytes, one_in(2) ? 2 : 4);
	if (code == SUCCESS)
		say(" hash %08x", hash(contents, bytes));
}

static char scratch[2][64 << 10];

static void copy(void)
{
	int a, b;
	size_t offset, other, bytes, enough;
	if (!some_part(&a, &offset, &bytes, 64 << 10) || !some_part(&b, &other, &enough, 64 << 10))
		return;
	if (bytes > enough)
		bytes = enough;
	Address from = memory[a].at + offset, to = memory[b].at + other;
	if (a == b && from < to + bytes && to < from + bytes)
		return;
	if (one_in(2)) {
		int stream = some_stream();
		if (stream < 0)
			return;
		Handle in = streams[stream].handle;
		switch (any(4)) {
		case 0: CALL(cuMemcpyDtoDAsync_v2, to, from, bytes, in); break;
		case 1: CALL(cuMemcpyAsync, to, from, bytes, in); break;
		case 2: CALL(cudaMemcpyAsync, to, from, bytes, one_in(3) ? 4 : 3, in); break;
		case 3: CALL(cuMemcpyHtoDAsync_v2, to, scratch[0], bytes, in); break;
		}
		works(stream);
	} else {
		settle();
		switch (any(4)) {
		case 0: CALL(cuMemcpyDtoD_v2, to, from, bytes); break;
		case 1: CALL(cuMemcpy, to, from, bytes); break;
		case 2: CALL(cudaMemcpy, to, from, bytes, one_in(3) ? 4 : 3); break;
		case 3: CALL(cuMemcpyHtoD_v2, to, scratch[0], bytes); break;
		}
		busy = 0;
	}
}

/* Each kind of copy with each kind of memory, right or wrong. */
static void copy_of_a_kind(void)
{
	int slot;
	size_t offset, bytes;
	int kind = (int)any(6), side = (int)any(3), place = (int)any(HOST);
	if (!some_part(&slot, &offset, &bytes, 4096))
		return;
	Address device = memory[slot].at + offset;
	Address other = (Address)scratch[1];
	if (host[place].kind != NOTHING)
		other = (Address)host[place].at;
	say(" kind %d, side %d, host %d", kind, side, host[place].kind);
	settle();
	Address to = side == 0 ? device : other, from = side == 1 ? device : side == 0 ? other : (Address)scratch[0];
	/* A copy from one side to the other by the host alone is not asked for on a real GPU: it would not be checked. */
	if (kind == 0 && side != 2)
		return;
	if (one_in(2)) {
		int stream = some_stream();
		if (stream < 0)
			return;
		CALL(cudaMemcpyAsync, to, from, bytes, kind, streams[stream].handle);
		works(stream);
		settle();
	} else {
		CALL(cudaMemcpy, to, from, bytes, kind);
	}
	say(" hash %08x", hash(scratch[1], 4096));
}

static Copy3D shape(int a, int b, size_t *height)
{
	memory[a].in_graph = memory[b].in_graph = true;
	size_t width = 1 + any(memory[a].width < memory[b].width ? memory[a].width : memory[b].width);
	*height = 1 + any(memory[a].height < memory[b].height ? memory[a].height : memory[b].height);
	return (Copy3D){
		.from = {.type = 2, .device = memory[a].at, .pitch = memory[a].pitch, .height = memory[a].height},
		.to = {.type = 2, .device = memory[b].at, .pitch = memory[b].pitch, .height = memory[b].height},
		.width = width,
		.height = *height,
		.depth = 1,
	};
}

static int some_rows(void)
{
	int found = -1, seen = 0;
	for (int i = 0; i < MEMORY; i++)
		if (memory[i].kind == PLAIN && memory[i].pitch != 0 && !memory[i].is_raw && any(++seen) == 0)
			found = i;
	return found;
}

static void copy_rows(void)
{
	int a = some_rows(), b = some_rows();
	size_t height;
	if (a < 0 || a == b)
		return;
	Copy3D solid = shape(a, b, &height);
	Copy2D flat = {
		.from = {.type = 2, .device = solid.from.device, .pitch = solid.from.pitch},
		.to = {.type = 2, .device = solid.to.device, .pitch = solid.to.pitch},
		.width = solid.width,
		.height = height,
	};
	say(" memory %d to %d, %zu x %zu", a, b, solid.width, height);
	if (one_in(2)) {
		settle();
		if (one_in(2))
			CALL(cuMemcpy2D_v2, &flat);
		else
			CALL(cuMemcpy3D_v2, &solid);
		busy = 0;
		return;
	}
	int stream = some_stream();
	if (stream < 0)
		return;
	if (one_in(2))
		CALL(cuMemcpy2DAsync_v2, &flat, streams[stream].handle);
	else
		CALL(cuMemcpy3DAsync_v2, &solid, streams[stream].handle);
	works(stream);
}

static void set(void)
{
	int slot;
	size_t offset, bytes;
	if (!some_part(&slot, &offset, &bytes, MIB))
		return;
	/* Another device's memory is refused without peer access: under the library, unless a copy has opened it. */
	int now = current();
	if (now < 0 || memory[slot].context < 0 || contexts[now].device != contexts[memory[slot].context].device)
		return;
	Address to = memory[slot].at + offset;
	unsigned value = (unsigned)any(256);
	bool waits = one_in(2);
	int stream = -1;
	if (waits)
		settle();
	else if ((stream = some_stream()) < 0)
		return;
	Handle in = stream < 0 ? NULL : streams[stream].handle;
	size_t words = bytes / 4;
	Address whole = to & ~(Address)3;
	switch (any(4)) {
	case 0: waits ? CALL(cuMemsetD8_v2, to, (unsigned char)value, bytes) : CALL(cuMemsetD8Async, to, (unsigned char)value, bytes, in); break;
	case 1: waits ? CALL(cudaMemset, to, (int)value, bytes) : CALL(cudaMemsetAsync, to, (int)value, bytes, in); break;
	case 2: waits ? CALL(cuMemsetD32_v2, whole, value, words) : CALL(cuMemsetD32Async, whole, value, words, in); break;
	case 3:
		if (memory[slot].pitch == 0)
			return;
		waits ? CALL(cuMemsetD2D8_v2, memory[slot].at, memory[slot].pitch, (unsigned char)value, memory[slot].width, memory[slot].height)
		      : CALL(cuMemsetD2D8Async, memory[slot].at, memory[slot].pitch, (unsigned char)value, memory[slot].width, memory[slot].height, in);
		break;
	}
	if (waits)
		busy = 0;
	else
		works(stream);
}

static void past_the_end(void)
{
	int i = some_memory(true);
	if (i < 0 || capturing >= 0)
		return;
	Address base = 0;
	size_t bytes = 0;
	Address inside = memory[i].at + any(memory[i].bytes);
	say(" memory %d", i);
	if (CALL(cuMemGetAddressRange_v2, &base, &bytes, inside) == SUCCESS && memory[i].kind == PLAIN) {
		say_address(base);
		say(" %zu bytes", bytes);
	}
}

static void ask_about_pointers(void)
{
	/* Context, type, device and host pointer, managed, ordinal, begin, size, mapped. */
	static const int attributes[] = {1, 2, 3, 4, 8, 9, 11, 12, 13};
	int i = some_memory(false), place = (int)any(HOST);
	Address at = 0;
	if (one_in(4) && host[place].kind != NOTHING)
		at = (Address)host[place].at + any(host[place].bytes);
	else if (i >= 0)
		at = memory[i].at + any(memory[i].bytes);
	if (at == 0)
		return;
	say_address(at);
	if (one_in(3)) {
		Attributes answer = {0};
		if (CALL(cudaPointerGetAttributes, &answer, at) == SUCCESS) {
			say(" type %d, device %d", answer.type, answer.device);
			say_address((Address)answer.device_pointer);
			say_address((Address)answer.host_pointer);
		}
		return;
	}
	int attribute = attributes[any(sizeof attributes / sizeof *attributes)];
	/* What the driver places of a pool or of managed memory is its own business. */
	if ((attribute == 11 || attribute == 12) && (i < 0 || memory[i].kind != PLAIN))
		return;
	uint64_t value = 0;
	say(" attribute %d", attribute);
	if (CALL(cuPointerGetAttribute, &value, attribute, at) != SUCCESS)
		return;
	if (attribute == 1)
		say_context((Handle)value);
	else if (attribute == 3 || attribute == 4 || attribute == 11)
		say_address(value);
	else
		say(" %llu", (unsigned long long)value);
}

static void share(void)
{
	int i = some_memory(true);
	Ipc one, two;
	if (i < 0 || memory[i].kind == IN_ORDER)
		return;
	say(" memory %d", i);
	memset(&one, 0, sizeof one);
	memset(&two, 0, sizeof two);
	Code code = one_in(2) ? CALL(cuIpcGetMemHandle, &one, memory[i].at) : CALL(cudaIpcGetMemHandle, &one, memory[i].at);
	if (code == SUCCESS && CALL(cuIpcGetMemHandle, &two, memory[i].at + any(memory[i].bytes)) == SUCCESS)
		say(memcmp(&one, &two, sizeof one) == 0 ? " the same" : " another");
}

static void have_host_memory(void)
{
	int i = (int)any(HOST);
	settle();
	if (host[i].kind != NOTHING) {
		if (capturing >= 0)
			return;
		forget_graphs();
		switch (host[i].kind) {
		case PINNED:
			if ((one_in(2) ? CALL(cuMemFreeHost, host[i].at) : CALL(cudaFreeHost, host[i].at)) != SUCCESS)
				return;
			break;
		case REGISTERED:
			if ((one_in(2) ? CALL(cuMemHostUnregister, host[i].at) : CALL(cudaHostUnregister, host[i].at)) != SUCCESS)
				return;
			/* fall through */
		default:
			munmap(host[i].at, host[i].bytes);
		}
		host[i].kind = NOTHING;
		return;
	}
	host[i].bytes = (1 + any(64)) << 12;
	if ((host[i].context = current()) < 0)
		return;
	if (one_in(3)) {
		void *at = NULL;
		Code code = one_in(2) ? CALL(cuMemHostAlloc, &at, host[i].bytes, 0) : CALL(cudaMallocHost, &at, host[i].bytes);
		if (code == SUCCESS) {
			host[i].at = at;
			host[i].kind = PINNED;
			memset(at, 7, host[i].bytes);
		}
		return;
	}
	host[i].at = mmap(NULL, host[i].bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (host[i].at == MAP_FAILED)
		abort();
	memset(host[i].at, 9, host[i].bytes);
	host[i].kind = PAGEABLE;
	Code code = one_in(2) ? CALL(cuMemHostRegister_v2, host[i].at, host[i].bytes, 0) : CALL(cudaHostRegister, host[i].at, host[i].bytes, 0);
	if (code == SUCCESS)
		host[i].kind = REGISTERED;
	if (one_in(4) && CALL(cuMemHostRegister_v2, host[i].at, host[i].bytes, 0) == SUCCESS)
		host[i].kind = REGISTERED;
}

/* ---- Streams, events, captures, graphs. ---- */

static void change_streams(void)
{
	int i = 2 + (int)any(STREAMS - 2), now = current();
	say(" stream %d", i);
	if (streams[i].live) {
		if (i == capturing)
			return;
		settle();
		if (CALL(cuStreamDestroy_v2, streams[i].handle) == SUCCESS)
			streams[i].live = false;
	} else if (now >= 0) {
		streams[i].blocking = one_in(3);
		if (CALL(cuStreamCreate, &streams[i].handle, streams[i].blocking ? 0 : 1) == SUCCESS) {
			streams[i].live = true;
			streams[i].context = now;
		}
	}
}

static void wait_for_work(void)
{
	int stream;
	switch (any(4)) {
	case 0:
		if (capturing < 0 || one_in(10))
			CALL(cuCtxSynchronize);
		break;
	case 1:
		if (capturing < 0 || one_in(10))
			CALL(cudaDeviceSynchronize);
		break;
	default:
		if (capturing >= 0 && !one_in(10))
			return;
		stream = some_stream();
		if (stream >= 0)
			CALL(cuStreamSynchronize, streams[stream].handle);
	}
	if (capturing < 0)
		settle();
}

static void change_events(void)
{
	int i = (int)any(EVENTS), now = current();
	say(" event %d", i);
	if (events[i].handle == NULL) {
		if (now >= 0 && CALL(cuEventCreate, &events[i].handle, one_in(2) ? 2 : 0) == SUCCESS)
			events[i].context = now;
	} else if (one_in(6) && capturing < 0) {
		settle();
		if (CALL(cuEventDestroy_v2, events[i].handle) == SUCCESS)
			events[i].handle = NULL;
	} else if (events[i].context == now) {
		int stream = some_stream();
		if (stream < 0 || stream == capturing)
			return;
		CALL(cuEventRecord, events[i].handle, streams[stream].handle);
		works(stream);
		if (capturing < 0 || one_in(8)) {
			settle();
			CALL(cuEventQuery, events[i].handle);
			CALL(cuEventSynchronize, events[i].handle);
		}
	}
}

static int free_graph(void)
{
	for (int i = 0; i < GRAPHS; i++)
		if (graphs[i].graph == NULL)
			return i;
	return -1;
}

static void end_capture(void)
{
	Handle graph = NULL;
	int i = free_graph(), stream = capturing;
	if (thread != capturing_thread)
		return;
	say(" of stream %d", stream);
	Code code = CALL(cuStreamEndCapture, streams[stream].handle, &graph);
	int is_capturing = 0;
	CALL(cuStreamIsCapturing, streams[stream].handle, &is_capturing);
	say(" %d", is_capturing);
	if (is_capturing != 0)
		return;
	capturing = -1;
	if (code != SUCCESS || graph == NULL)
		return;
	if (i < 0) {
		CALL(cuGraphDestroy, graph);
		return;
	}
	graphs[i].graph = graph;
	graphs[i].by_hand = false;
	graphs[i].context = streams[stream].context;
	if (CALL(cuGraphInstantiateWithFlags, &graphs[i].executable, graph, 0) != SUCCESS)
		graphs[i].executable = NULL;
}

static void capture(void)
{
	if (capturing >= 0) {
		end_capture();
		return;
	}
	int now = current(), i = 2 + (int)any(STREAMS - 2);
	if (!streams[i].live || streams[i].context != now)
		return;
	settle();
	int mode = (int)any(3);
	say(" stream %d, mode %d", i, mode);
	if (CALL(cuStreamBeginCapture_v2, streams[i].handle, mode) == SUCCESS) {
		capturing = i;
		capturing_thread = thread;
	}
}

static void exchange_mode(void)
{
	int mode = (int)any(3);
	say(" %d", mode);
	CALL(cuThreadExchangeStreamCaptureMode, &mode);
	say(" was %d", mode);
}

static void build_graph(void)
{
	int i = free_graph(), a = some_rows(), b = some_rows(), now = current();
	size_t height;
	if (i < 0 || a < 0 || a == b || now < 0)
		return;
	Copy3D solid = shape(a, b, &height);
	say(" graph %d of memory %d to %d", i, a, b);
	if (CALL(cuGraphCreate, &graphs[i].graph, 0) != SUCCESS)
		return;
	graphs[i].by_hand = CALL(cuGraphAddMemcpyNode, &graphs[i].node, graphs[i].graph, NULL, 0, &solid, contexts[now].handle) == SUCCESS;
	if (cuGraphAddMemsetNode != NULL) {
		Handle node = NULL;
		Set where = {.to = memory[b].at, .value = (unsigned)any(250), .element = 1, .width = 1 + any(memory[b].width), .height = 1};
		CALL(cuGraphAddMemsetNode, &node, graphs[i].graph, &graphs[i].node, graphs[i].by_hand, &where, contexts[now].handle);
	}
	graphs[i].context = now;
	if (CALL(cuGraphInstantiateWithFlags, &graphs[i].executable, graphs[i].graph, 0) != SUCCESS)
		graphs[i].executable = NULL;
}

static void use_graph(void)
{
	int i = (int)any(GRAPHS), now = current();
	if (graphs[i].executable == NULL || graphs[i].context != now)
		return;
	say(" graph %d", i);
	if (graphs[i].by_hand && cuGraphExecMemcpyNodeSetParams != NULL && one_in(3)) {
		int a = some_rows(), b = some_rows();
		size_t height;
		if (a >= 0 && a != b) {
			Copy3D solid = shape(a, b, &height);
			CALL(cuGraphExecMemcpyNodeSetParams, graphs[i].executable, graphs[i].node, &solid, contexts[now].handle);
		}
	}
	int stream = some_stream();
	if (stream < 0 || stream == capturing)
		return;
	CALL(cuGraphLaunch, graphs[i].executable, streams[stream].handle);
	works(stream);
}

/* ---- Contexts. ---- */

/* The context that each thread has, or -1, as it was last seen. */
static int seen_current[2] = {-1, -1};

/* A pool's memory that was allocated in a context goes before the context: a real driver crashes later otherwise. */
static void free_in_order(int context)
{
	for (int i = 0; i < MEMORY; i++) {
		if (memory[i].kind == IN_ORDER && memory[i].context == context) {
			CALL(cuMemFreeAsync, memory[i].at, NULL);
			CALL(cuStreamSynchronize, NULL);
			memory[i].kind = NONE;
		}
	}
}

/* All of a context is gone. */
static void forget_context(int context)
{
	for (int i = 0; i < MEMORY; i++)
		if (memory[i].context == context)
			memory[i].kind = NONE;
	for (int i = 2; i < STREAMS; i++)
		if (streams[i].context == context)
			streams[i].live = false;
	for (int i = 0; i < EVENTS; i++)
		if (events[i].context == context)
			events[i].handle = NULL;
	for (int i = 0; i < HOST; i++) {
		if (host[i].context != context)
			continue;
		if (host[i].kind == REGISTERED || host[i].kind == PAGEABLE)
			munmap(host[i].at, host[i].bytes);
		host[i].kind = NOTHING;
	}
}

static void change_contexts(void)
{
	if (capturing >= 0)
		return;
	settle();
	int i = (int)any(CONTEXTS), device = (int)any((uint64_t)devices);
	say(" context %d", i);
	if (i < devices) {
		if (one_in(2)) {
			say(" by cudaSetDevice");
			CALL(cudaSetDevice, i);
		} else {
			CALL(cuCtxSetCurrent, contexts[i].handle);
		}
	} else if (contexts[i].handle == NULL) {
		Handle made = NULL;
		if (CALL(cuCtxCreate_v2, &made, 0, device) == SUCCESS) {
			contexts[i].handle = made;
			contexts[i].device = device;
			contexts[i].created = true;
			/* A thread's stack stays one deep, so that none that has ended comes up. */
			Handle popped = NULL;
			CALL(cuCtxPopCurrent_v2, &popped);
			say_context(popped);
			if (one_in(2))
				CALL(cuCtxSetCurrent, made);
		}
	} else if (one_in(3) && seen_current[1 - thread] != i) {
		forget_graphs();
		Handle gone = contexts[i].handle;
		/* Nobody's stack may have it below. */
		CALL(cuCtxSetCurrent, gone);
		free_in_order(i);
		if (CALL(cuCtxDestroy_v2, gone) == SUCCESS) {
			forget_context(i);
			contexts[i].handle = NULL;
		}
		CALL(cudaSetDevice, device);
	} else {
		CALL(cuCtxSetCurrent, contexts[i].handle);
	}
	int now = current(), id = -1;
	say(" now %d", now);
	if (now >= 0 && CALL(cuCtxGetDevice, &id) == SUCCESS)
		say(" device %d", id);
	if (CALL(cudaGetDevice, &id) == SUCCESS)
		say(" runtime's %d", id);
}

static void reset(void)
{
	int now = current();
	/* A second runtime would go on with the context that is gone. */
	if (capturing >= 0 || now < 0 || now >= devices || has_two_runtimes || !one_in(4))
		return;
	settle();
	forget_graphs();
	say(" device %d", now);
	free_in_order(now);
	if (CALL(cudaDeviceReset) != SUCCESS)
		return;
	forget_context(now);
	/* The context is not active until somebody asks for it. */
	CALL(cudaSetDevice, now);
	CALL(cudaFree, 0);
	CALL(cuDevicePrimaryCtxRetain, &contexts[now].handle, now);
}

/* ---- Pools. ---- */

static void ask_about_pools(void)
{
	/* The release threshold; what is used now, and at most. */
	static const int attributes[] = {4, 7, 8};
	int now = current(), i = (int)any(POOLS);
	Handle pool = NULL;
	if (now < 0 || capturing >= 0)
		return;
	settle();
	if (pools[i].handle != NULL && one_in(2)) {
		pool = pools[i].handle;
		say(" pool %d", i);
	} else {
		CALL(cuDeviceGetDefaultMemPool, &pool, contexts[now].device);
	}
	int attribute = attributes[any(3)];
	uint64_t value = 0;
	say(" attribute %d", attribute);
	if (one_in(3)) {
		value = attribute == 4 ? (one_in(2) ? 0 : UINT64_MAX) : any(2);
		say(" to %llu", (unsigned long long)value);
		CALL(cuMemPoolSetAttribute, pool, attribute, &value);
	} else if (CALL(cuMemPoolGetAttribute, pool, attribute, &value) == SUCCESS) {
		/* Under the library, the most that was used is that of managed memory and that of the rest, at any two moments. */
		if (attribute != 8)
			say(" %llu", (unsigned long long)value);
	}
}

static void change_pools(void)
{
	int i = (int)any(POOLS), now = current();
	if (now < 0 || capturing >= 0)
		return;
	settle();
	say(" pool %d", i);
	if (pools[i].handle == NULL) {
		PoolProperties properties = {.type = 1, .location = {1, contexts[now].device}};
		if (CALL(cuMemPoolCreate, &pools[i].handle, &properties) == SUCCESS)
			pools[i].device = contexts[now].device;
	} else if (one_in(2)) {
		CALL(cuMemPoolTrimTo, pools[i].handle, any(4) << 20);
	} else if (CALL(cuMemPoolDestroy, pools[i].handle) == SUCCESS) {
		pools[i].handle = NULL;
	}
}

/* ---- Virtual memory. ---- */

static void change_ranges(void)
{
	int i = (int)any(RANGES);
	struct Range *range = &ranges[i];
	say(" range %d", i);
	if (range->at == 0) {
		if (CALL(cuMemAddressReserve, &range->at, RESERVED_GRANULES * GRANULE, 0, 0, 0) != SUCCESS)
			range->at = 0;
		for (int part = 0; part < RESERVED_GRANULES; part++)
			range->mapped[part] = -1;
		return;
	}
	for (int part = 0; part < RESERVED_GRANULES; part++)
		if (range->mapped[part] >= 0)
			return;
	if (CALL(cuMemAddressFree, range->at, RESERVED_GRANULES * GRANULE) == SUCCESS)
		range->at = 0;
}

static void change_handles(void)
{
	int i = (int)any(HANDLES), now = current();
	say(" handle %d", i);
	if (handles[i].handle == 0 && now >= 0) {
		handles[i].granules = 1 + (int)any(2);
		handles[i].device = contexts[now].device;
		handles[i].exportable = one_in(3);
		Properties properties = {.type = 1, .handles = handles[i].exportable ? 1 : 0, .location = {1, handles[i].device}};
		size_t bytes = (size_t)handles[i].granules * GRANULE - (one_in(12) ? 512 : 0);
		if (CALL(cuMemCreate, &handles[i].handle, bytes, &properties, 0) != SUCCESS)
			handles[i].handle = 0;
		return;
	}
	if (handles[i].handle == 0)
		return;
	if (one_in(3)) {
		int file = -1;
		if (CALL(cuMemExportToShareableHandle, &file, handles[i].handle, 1, 0) == SUCCESS)
			close(file);
		return;
	}
	if (one_in(2)) {
		Properties answer = {0};
		if (CALL(cuMemGetAllocationPropertiesFromHandle, &answer, handles[i].handle) == SUCCESS)
			say(" type %d, handles %d, location %d %d", answer.type, answer.handles, answer.location.type, answer.location.id);
		return;
	}
	/* Only unmapped ones, so that the numbers stay right. */
	for (int r = 0; r < RANGES; r++)
		for (int part = 0; part < RESERVED_GRANULES; part++)
			if (ranges[r].at != 0 && ranges[r].mapped[part] == i)
				return;
	if (CALL(cuMemRelease, handles[i].handle) == SUCCESS)
		handles[i].handle = 0;
}

static void map(void)
{
	int r = (int)any(RANGES), i = (int)any(HANDLES);
	struct Range *range = &ranges[r];
	if (range->at == 0 || handles[i].handle == 0)
		return;
	int first = (int)any(RESERVED_GRANULES), count = handles[i].granules;
	if (first + count > RESERVED_GRANULES)
		return;
	bool taken = false;
	for (int part = first; part < first + count; part++)
		taken |= range->mapped[part] >= 0;
	say(" handle %d at range %d, granule %d%s", i, r, first, taken ? ", taken" : "");
	Address at = range->at + (Address)first * GRANULE;
	if (taken && !one_in(3))
		return;
	if (CALL(cuMemMap, at, (size_t)count * GRANULE, 0, handles[i].handle, 0) != SUCCESS)
		return;
	for (int part = first; part < first + count; part++) {
		range->mapped[part] = i;
		range->open[part] = false;
	}
	Access access = {{1, handles[i].device}, 3};
	if (!one_in(4) && CALL(cuMemSetAccess, at, (size_t)count * GRANULE, &access, 1) == SUCCESS)
		for (int part = first; part < first + count; part++)
			range->open[part] = true;
}

static void use_range(void)
{
	int r = (int)any(RANGES), part = (int)any(RESERVED_GRANULES), now = current();
	struct Range *range = &ranges[r];
	if (range->at == 0 || now < 0 || capturing >= 0)
		return;
	settle();
	Address at = range->at + (Address)part * GRANULE;
	int mapped = range->mapped[part];
	say(" range %d, granule %d, handle %d%s", r, part, mapped, range->open[part] ? "" : ", closed");
	if (one_in(3)) {
		Location location = {1, (int)any((uint64_t)devices)};
		uint64_t flags = 0;
		if (mapped >= 0 && CALL(cuMemGetAccess, &flags, &location, at) == SUCCESS)
			say(" access %llu", (unsigned long long)flags);
		return;
	}
	if (mapped < 0 || !range->open[part])
		return;
	if (one_in(2)) {
		/* Does not wait for the device. */
		CALL(cuMemsetD8_v2, at + 512, (unsigned char)any(256), 1024);
		busy = 0;
	} else if (CALL(cuMemcpyDtoH_v2, scratch[1], at, 2048) == SUCCESS) {
		say(" hash %08x", hash(scratch[1], 2048));
	}
}

static void unmap(void)
{
	int r = (int)any(RANGES), part = (int)any(RESERVED_GRANULES);
	struct Range *range = &ranges[r];
	if (range->at == 0 || range->mapped[part] < 0 || capturing >= 0)
		return;
	settle();
	int i = range->mapped[part];
	/* Where this mapping begins. */
	int first = part;
	if (handles[i].granules == 2 && first > 0 && range->mapped[first - 1] == i)
		first--;
	int count = handles[i].granules;
	/* Mapped twice side by side: where one begins is not known. */
	for (int other = 0; other < RESERVED_GRANULES; other++)
		if (range->mapped[other] == i && (other < first || other >= first + count))
			return;
	say(" range %d, granule %d, handle %d", r, first, i);
	if (count == 2 && one_in(6)) {
		CALL(cuMemUnmap, range->at + (Address)first * GRANULE, GRANULE);
		return;
	}
	if (CALL(cuMemUnmap, range->at + (Address)first * GRANULE, (size_t)count * GRANULE) == SUCCESS)
		for (int other = first; other < first + count; other++)
			range->mapped[other] = -1;
}

static void retain(void)
{
	Address handle = 0;
	int r = (int)any(RANGES), part = (int)any(RESERVED_GRANULES);
	if (ranges[r].at == 0 || ranges[r].mapped[part] < 0)
		return;
	say(" range %d, granule %d", r, part);
	if (CALL(cuMemRetainAllocationHandle, &handle, (void *)(ranges[r].at + (Address)part * GRANULE)) == SUCCESS) {
		say(handle == handles[ranges[r].mapped[part]].handle ? " the same" : " another");
		CALL(cuMemRelease, handle);
	}
}

static void ask_for_room(void)
{
	size_t free_bytes = 0, total = 0;
	if (CALL(cuMemGetInfo_v2, &free_bytes, &total) == SUCCESS)
		say(" total %zu", total);
}

static const struct {
	const char *name;
	unsigned weight;
	void (*act)(void);
} actions[] = {
	{"allocate", 40, allocate},
	{"allocate too much", 2, allocate_too_much},
	{"allocate unified", 4, allocate_unified},
	{"allocate in order", 25, allocate_in_order},
	{"free", 50, free_some},
	{"free nothing", 4, free_nothing},
	{"verify", 60, verify},
	{"copy", 40, copy},
	{"copy of a kind", 15, copy_of_a_kind},
	{"copy rows", 20, copy_rows},
	{"set", 30, set},
	{"range of", 10, past_the_end},
	{"pointer", 25, ask_about_pointers},
	{"share", 6, share},
	{"host memory", 12, have_host_memory},
	{"streams", 12, change_streams},
	{"wait", 10, wait_for_work},
	{"events", 12, change_events},
	{"capture", 16, capture},
	{"capture mode", 4, exchange_mode},
	{"build graph", 8, build_graph},
	{"use graph", 20, use_graph},
	{"contexts", 12, change_contexts},
	{"reset", 4, reset},
	{"pool's figures", 10, ask_about_pools},
	{"pools", 6, change_pools},
	{"ranges", 8, change_ranges},
	{"handles", 16, change_handles},
	{"map", 20, map},
	{"use range", 20, use_range},
	{"unmap", 10, unmap},
	{"retain", 5, retain},
	{"room", 3, ask_for_room},
};

/* ---- Two threads, one at a time. ---- */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int turn, steps;
static useconds_t rest;

static void act(void)
{
	unsigned total = 0, i = 0;
	for (size_t a = 0; a < sizeof actions / sizeof *actions; a++)
		total += actions[a].weight;
	unsigned chosen = (unsigned)any(total);
	while (chosen >= actions[i].weight)
		chosen -= actions[i++].weight;
	bool second = one_in(2);
	choose_runtime(second);
	say("%u.%d %s%s:", step, thread, actions[i].name, second ? "'" : "");
	fill_raw();
	actions[i].act();
	turn = one_in(6) ? 1 - thread : thread;
	/* The default streams of another thread may be other ones. */
	if (turn != thread)
		settle();
	say("\n");
	seen_current[thread] = current();
}

/* A thread's part: acts while it is its turn. */
static void *play(void *which)
{
	int own = *(int *)which;
	pthread_mutex_lock(&lock);
	cuCtxSetCurrent(contexts[0].handle);
	while (steps > 0) {
		if (turn != own) {
			pthread_cond_wait(&changed, &lock);
			continue;
		}
		if (rest > 0)
			usleep(rest);
		thread = own;
		step++;
		steps--;
		act();
		pthread_cond_broadcast(&changed);
	}
	pthread_mutex_unlock(&lock);
	return NULL;
}

int main(int argc, char **argv)
{
	if (argc < 5) {
		fprintf(stderr, "usage: differ SEED STEPS MICROSECONDS RUNTIME [RUNTIME]\n");
		return 2;
	}
	state = strtoull(argv[1], NULL, 10) * 0x9E3779B97F4A7C15u | 1;
	steps = atoi(argv[2]);
	rest = (useconds_t)atoi(argv[3]);
	has_two_runtimes = argc > 5;
	void *driver = dlopen("libcuda.so.1", RTLD_NOW);
	if (driver == NULL) {
		fprintf(stderr, "differ: %s\n", dlerror());
		return 2;
	}
#define FIND_IN_DRIVER(name, arguments) name = (Code(*) arguments)dlsym(driver, #name);
#define FIND(name, arguments, values) name##_of[which] = (Code(*) arguments)dlsym(runtime, "call_" #name);
	DRIVER(FIND_IN_DRIVER)
	for (int which = 0; which < 2; which++) {
		/* The second one may be the first. */
		void *runtime = dlopen(argv[which + 4 < argc ? which + 4 : 4], RTLD_NOW | RTLD_LOCAL);
		if (runtime == NULL) {
			fprintf(stderr, "differ: %s\n", dlerror());
			return 2;
		}
		RUNTIME(FIND)
	}
	choose_runtime(0);
	/* Should a call crash, its name is the last word. */
	setvbuf(stdout, NULL, _IONBF, 0);
	memset(scratch, 3, sizeof scratch);
	for (int i = 0; i < MEMORY; i++)
		memory[i].context = -1;
	streams[0].live = streams[1].live = true;
	streams[1].handle = (Handle)2;
	if (cuInit(0) != SUCCESS || cuDeviceGetCount(&devices) != SUCCESS)
		return 2;
	if (devices > 2)
		devices = 2;
	for (int i = 0; i < devices; i++) {
		contexts[i].device = i;
		if (cuDevicePrimaryCtxRetain(&contexts[i].handle, i) != SUCCESS)
			return 2;
	}
	static int numbers[] = {0, 1};
	pthread_t other;
	if (pthread_create(&other, NULL, play, &numbers[1]) != 0)
		return 2;
	play(&numbers[0]);
	pthread_join(other, NULL);
	say("end\n");
	return 0;
}
