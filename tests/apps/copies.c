/*
 * Every kind of copy to, from and within memory of device 0, with each device current, in each device's streams, directly and captured.
 * Prints a line for each: what the calls answered, and which memory has changed to what. Two runs on equal memory print the same.
 *
 * usage: copies KIND [peers]
 *   KIND   plain (cuMemAlloc), virtual (cuMemCreate, open to its own device) or pool (cuMemAllocAsync)
 *   peers  enable peer access in both directions
 *
 * Knows nothing of vramctl. Looks the driver's functions up by name; what a driver lacks is left out.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint64_t Word;

enum { BYTES = 64 << 10, ROW = 4096, PITCH = 8192, ROOM = 256 << 10, ALLOCATED = 2 << 20 };
enum { REFUSED_CAPTURE = 10000, REFUSED_INSTANTIATION = 20000, REFUSED_LAUNCH = 30000 };
enum { HOST = 1, DEVICE = 2, ARRAY = 3, UNIFIED = 4 };

/* CUDA_MEMCPY2D, CUDA_MEMCPY3D (CUDA_MEMCPY3D_PEER has contexts in the reserved place), and what batches take. */
typedef struct {
	Word x, y;
	uint32_t kind;
	Word host, device, array, pitch;
} PlaneSide;
typedef struct {
	PlaneSide from, to;
	Word width, height;
} Plane;
typedef struct {
	Word x, y, z, level;
	uint32_t kind;
	Word host, device, array, context, pitch, height;
} VolumeSide;
typedef struct {
	VolumeSide from, to;
	Word width, height, depth;
} Volume;
typedef struct {
	uint32_t kind;
	int id;
} Location;
typedef struct {
	uint32_t order;
	Location from, to;
	uint32_t flags;
} Attributes;
typedef struct {
	uint32_t kind;
	Word address, row, layer;
	Location location;
} BatchSide;
typedef struct {
	BatchSide from, to;
	Word width, height, depth;
	uint32_t order, flags;
} BatchVolume;
typedef struct {
	Word address, pitch;
	uint32_t value, element;
	Word width, height;
} SetNode;

/* The two devices: contexts, a stream of each, an array of each. */
static Word context[2], own_stream[2], array[2];
static int device[2];
/* Two allocations of device 0 and two of device 1; host memory, pinned and pageable. */
static Word here, here_too, there, there_too;
static unsigned char *pinned, *pageable;
/* The case: the current device, and the stream. */
static int current;
static Word stream;

static void *library;
static int is_missing;

/* Calls a function of the driver. Each argument is a word, which the calling convention passes as it does smaller ones. */
static int call(const char *name, const Word *a)
{
	typedef int (*Function)(Word, Word, Word, Word, Word, Word, Word, Word, Word, Word);
	Function function;
	*(void **)&function = dlsym(library, name);
	if (!function) {
		is_missing = 1;
		return -1;
	}
	return function(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9]);
}

#define CALL(name, ...) call(name, (Word[10]){ __VA_ARGS__ })
#define W(pointer) ((Word)(uintptr_t)(pointer))

static void need(int answer, const char *what)
{
	if (answer != 0) {
		fprintf(stderr, "%s: %d\n", what, answer);
		exit(1);
	}
}

enum Way { IN_H, OUT_H, IN, OUT, OWN, IN_ANY, OUT_ANY, TO_ARRAY, FROM_ARRAY };

static Plane plane(enum Way way)
{
	Plane p = { .from = { .pitch = PITCH }, .to = { .pitch = PITCH }, .width = ROW, .height = 16 };
	p.from.kind = p.to.kind = way == IN_ANY || way == OUT_ANY ? UNIFIED : DEVICE;
	p.from.device = here;
	p.to.device = here;
	switch (way) {
	case IN_H: p.from.kind = HOST; p.from.host = W(pinned); break;
	case OUT_H: p.to.kind = HOST; p.to.host = W(pinned); break;
	case IN: p.from.device = there; break;
	case OUT: case OUT_ANY: p.to.device = there; break;
	case OWN: p.from.device = here_too; break;
	case IN_ANY: p.from.device = W(pinned); break;
	case TO_ARRAY: p.to.kind = ARRAY; p.to.array = array[current]; p.height = 1; break;
	case FROM_ARRAY: p.from.kind = ARRAY; p.from.array = array[current]; p.height = 1; break;
	}
	return p;
}

static VolumeSide deeper(PlaneSide p)
{
	return (VolumeSide){ .kind = p.kind, .host = p.host, .device = p.device, .array = p.array, .pitch = PITCH, .height = 4 };
}

static Volume volume(enum Way way)
{
	Plane p = plane(way);
	Volume v = { .from = deeper(p.from), .to = deeper(p.to), .width = ROW, .height = 3, .depth = 4 };
	v.from.context = context[way == IN];
	v.to.context = context[way == OUT];
	return v;
}

static int batch(const char *name, enum Way way, int old)
{
	Word to[2] = { way == OUT ? there : here, there_too };
	Word from[2] = { way == IN_H ? W(pinned) : way == OWN ? here_too : here, there };
	Word bytes[2] = { BYTES, BYTES }, first = 0, failed;
	Attributes attributes = { .order = 1 };
	if (way == OUT_H)
		to[0] = W(pinned);
	if (way == OUT)
		from[1] = there_too, to[1] = there_too + BYTES;
	if (old)
		return CALL(name, W(to), W(from), W(bytes), 2, W(&attributes), W(&first), 1, W(&failed), stream);
	return CALL(name, W(to), W(from), W(bytes), 2, W(&attributes), W(&first), 1, stream);
}

static int deep_batch(enum Way way)
{
	BatchVolume v = { .from = { .kind = 1, .address = here }, .to = { .kind = 1, .address = here }, .width = ROW, .height = 4, .depth = 2, .order = 1 };
	v.from.location = v.to.location = (Location){ 1, device[0] };
	if (way == IN_H)
		v.from.address = W(pinned), v.from.location = (Location){ 2, 0 };
	if (way == OUT_H)
		v.to.address = W(pinned), v.to.location = (Location){ 2, 0 };
	if (way == OUT)
		v.to.address = there, v.to.location.id = device[1];
	return CALL("cuMemcpy3DBatchAsync_v2", 1, W(&v), 0, stream);
}

/* Instantiates a graph, launches it and waits. */
static int run(Word graph)
{
	Word executable = 0;
	int answer = CALL("cuGraphInstantiateWithFlags", W(&executable), graph, 0);
	if (answer)
		return REFUSED_INSTANTIATION + answer;
	answer = CALL("cuGraphLaunch", executable, stream);
	CALL("cuStreamSynchronize", stream);
	CALL("cuGraphExecDestroy", executable);
	return answer ? REFUSED_LAUNCH + answer : 0;
}

static int copy_node(enum Way way, int of)
{
	Word graph, node;
	Volume v = volume(way);
	v.from.context = v.to.context = 0;
	need(CALL("cuGraphCreate", W(&graph), 0), "cuGraphCreate");
	int answer = CALL("cuGraphAddMemcpyNode", W(&node), graph, 0, 0, W(&v), context[of]);
	if (!answer)
		answer = run(graph);
	CALL("cuGraphDestroy", graph);
	return answer;
}

static int set_node(int of)
{
	Word graph, node;
	SetNode set = { here, PITCH, 0x5a5a5a5a, 4, ROW / 4, 4 };
	need(CALL("cuGraphCreate", W(&graph), 0), "cuGraphCreate");
	int answer = CALL("cuGraphAddMemsetNode", W(&node), graph, 0, 0, W(&set), context[of]);
	if (!answer)
		answer = run(graph);
	CALL("cuGraphDestroy", graph);
	return answer;
}

/* NAME, whether it is in a stream, whether it may be captured, and the call. */
#define OPERATIONS(_) \
	_(HtoD, 0, 0, CALL("cuMemcpyHtoD_v2", here, W(pinned), BYTES)) \
	_(HtoD_pageable, 0, 0, CALL("cuMemcpyHtoD_v2", here, W(pageable), BYTES)) \
	_(DtoH, 0, 0, CALL("cuMemcpyDtoH_v2", W(pinned), here, BYTES)) \
	_(DtoH_pageable, 0, 0, CALL("cuMemcpyDtoH_v2", W(pageable), here, BYTES)) \
	_(DtoD_in, 0, 0, CALL("cuMemcpyDtoD_v2", here, there, BYTES)) \
	_(DtoD_out, 0, 0, CALL("cuMemcpyDtoD_v2", there, here, BYTES)) \
	_(DtoD_own, 0, 0, CALL("cuMemcpyDtoD_v2", here, here_too, BYTES)) \
	_(DtoD_pageable, 0, 0, CALL("cuMemcpyDtoD_v2", here, W(pageable), BYTES)) \
	_(any_HtoD, 0, 0, CALL("cuMemcpy", here, W(pinned), BYTES)) \
	_(any_DtoH, 0, 0, CALL("cuMemcpy", W(pageable), here, BYTES)) \
	_(any_in, 0, 0, CALL("cuMemcpy", here, there, BYTES)) \
	_(any_out, 0, 0, CALL("cuMemcpy", there, here, BYTES)) \
	_(thread_DtoH, 0, 0, CALL("cuMemcpyDtoH_v2_ptds", W(pinned), here, BYTES)) \
	_(thread_out, 0, 0, CALL("cuMemcpyDtoD_v2_ptds", there, here, BYTES)) \
	_(peer_in, 0, 0, CALL("cuMemcpyPeer", here, context[0], there, context[1], BYTES)) \
	_(peer_out, 0, 0, CALL("cuMemcpyPeer", there, context[1], here, context[0], BYTES)) \
	_(peer_wrong, 0, 0, CALL("cuMemcpyPeer", there, context[1], here, context[1], BYTES)) \
	_(set8, 0, 0, CALL("cuMemsetD8_v2", here, 0x5a, BYTES)) \
	_(set_2d, 0, 0, CALL("cuMemsetD2D32_v2", here, PITCH, 0x5a5b5c5d, ROW / 4, 16)) \
	_(DtoA, 0, 0, CALL("cuMemcpyDtoA_v2", array[current], 0, here, ROW)) \
	_(AtoD, 0, 0, CALL("cuMemcpyAtoD_v2", here, array[current], 0, ROW)) \
	_(async_HtoD, 1, 1, CALL("cuMemcpyHtoDAsync_v2", here, W(pinned), BYTES, stream)) \
	_(async_HtoD_pageable, 1, 1, CALL("cuMemcpyHtoDAsync_v2", here, W(pageable), BYTES, stream)) \
	_(async_DtoH, 1, 1, CALL("cuMemcpyDtoHAsync_v2", W(pinned), here, BYTES, stream)) \
	_(async_DtoH_pageable, 1, 1, CALL("cuMemcpyDtoHAsync_v2", W(pageable), here, BYTES, stream)) \
	_(async_in, 1, 1, CALL("cuMemcpyDtoDAsync_v2", here, there, BYTES, stream)) \
	_(async_out, 1, 1, CALL("cuMemcpyDtoDAsync_v2", there, here, BYTES, stream)) \
	_(async_own, 1, 1, CALL("cuMemcpyDtoDAsync_v2", here, here_too, BYTES, stream)) \
	_(async_any_HtoD, 1, 1, CALL("cuMemcpyAsync", here, W(pinned), BYTES, stream)) \
	_(async_any_out, 1, 1, CALL("cuMemcpyAsync", there, here, BYTES, stream)) \
	_(async_thread_out, 1, 0, CALL("cuMemcpyDtoDAsync_v2_ptsz", there, here, BYTES, stream)) \
	_(async_peer_in, 1, 1, CALL("cuMemcpyPeerAsync", here, context[0], there, context[1], BYTES, stream)) \
	_(async_peer_out, 1, 1, CALL("cuMemcpyPeerAsync", there, context[1], here, context[0], BYTES, stream)) \
	_(async_peer_wrong, 1, 1, CALL("cuMemcpyPeerAsync", there, context[1], here, context[1], BYTES, stream)) \
	_(async_peer_pageable, 1, 1, CALL("cuMemcpyPeerAsync", W(pageable), context[0], here, context[0], BYTES, stream)) \
	_(async_set8, 1, 1, CALL("cuMemsetD8Async", here, 0x5a, BYTES, stream)) \
	_(async_set_2d, 1, 1, CALL("cuMemsetD2D32Async", here, PITCH, 0x5a5b5c5d, ROW / 4, 16, stream)) \
	_(batch_HtoD, 1, 0, batch("cuMemcpyBatchAsync", IN_H, 1)) \
	_(batch_DtoH, 1, 1, batch("cuMemcpyBatchAsync_v2", OUT_H, 0)) \
	_(batch_out, 1, 1, batch("cuMemcpyBatchAsync_v2", OUT, 0)) \
	_(batch_own, 1, 1, batch("cuMemcpyBatchAsync_v2", OWN, 0)) \
	_(batch_3d_HtoD, 1, 0, deep_batch(IN_H)) \
	_(batch_3d_DtoH, 1, 0, deep_batch(OUT_H)) \
	_(batch_3d_out, 1, 0, deep_batch(OUT)) \
	_(set_write32, 1, 1, CALL("cuStreamWriteValue32_v2", stream, here, 0x12345678, 0)) \
	_(set_wait32, 1, 1, CALL("cuStreamWaitValue32_v2", stream, here + 8, 0, 0)) \
	_(node_HtoD, 1, 0, copy_node(IN_H, 0)) \
	_(node_in, 1, 0, copy_node(IN, 0)) \
	_(node_HtoD_there, 1, 0, copy_node(IN_H, 1)) \
	_(node_DtoH_there, 1, 0, copy_node(OUT_H, 1)) \
	_(node_out_there, 1, 0, copy_node(OUT, 1)) \
	_(node_own_there, 1, 0, copy_node(OWN, 1)) \
	_(node_set, 1, 0, set_node(0)) \
	_(node_set_there, 1, 0, set_node(1))

#define FUNCTION(name, in_stream, captured, body) static int op_##name(void) { return body; }
#define PLANE_CALLS(_) \
	_(IN_H) _(OUT_H) _(IN) _(OUT) _(OWN) _(IN_ANY) _(OUT_ANY) _(TO_ARRAY) _(FROM_ARRAY)
#define SHAPED(way) \
	static int op_2d_##way(void) { Plane p = plane(way); return CALL("cuMemcpy2D_v2", W(&p)); } \
	static int op_2d_unaligned_##way(void) { Plane p = plane(way); return CALL("cuMemcpy2DUnaligned_v2", W(&p)); } \
	static int op_3d_##way(void) { Volume v = volume(way); v.from.context = v.to.context = 0; return CALL("cuMemcpy3D_v2", W(&v)); } \
	static int op_async_2d_##way(void) { Plane p = plane(way); return CALL("cuMemcpy2DAsync_v2", W(&p), stream); } \
	static int op_async_3d_##way(void) { Volume v = volume(way); v.from.context = v.to.context = 0; return CALL("cuMemcpy3DAsync_v2", W(&v), stream); }
#define NAMED(way) \
	static int op_3d_peer_##way(void) { Volume v = volume(way); return CALL("cuMemcpy3DPeer", W(&v)); } \
	static int op_3d_peer_wrong_##way(void) { Volume v = volume(way); v.from.context = v.to.context = context[current]; return CALL("cuMemcpy3DPeer", W(&v)); } \
	static int op_async_3d_peer_##way(void) { Volume v = volume(way); return CALL("cuMemcpy3DPeerAsync", W(&v), stream); }

OPERATIONS(FUNCTION)
PLANE_CALLS(SHAPED)
NAMED(IN_H) NAMED(OUT_H) NAMED(IN) NAMED(OUT) NAMED(OWN)

#define ENTRY(name, in_stream, captured, body) { #name, op_##name, in_stream, captured },
#define SHAPED_ENTRY(way) \
	{ "2d_" #way, op_2d_##way, 0, 0 }, { "2d_unaligned_" #way, op_2d_unaligned_##way, 0, 0 }, { "3d_" #way, op_3d_##way, 0, 0 }, \
	{ "async_2d_" #way, op_async_2d_##way, 1, 1 }, { "async_3d_" #way, op_async_3d_##way, 1, 1 },
#define NAMED_ENTRY(way) \
	{ "3d_peer_" #way, op_3d_peer_##way, 0, 0 }, { "3d_peer_wrong_" #way, op_3d_peer_wrong_##way, 0, 0 }, { "async_3d_peer_" #way, op_async_3d_peer_##way, 1, 1 },

static const struct {
	const char *name;
	int (*make)(void);
	int in_stream, captured;
} operations[] = {
	OPERATIONS(ENTRY)
	PLANE_CALLS(SHAPED_ENTRY)
	NAMED_ENTRY(IN_H) NAMED_ENTRY(OUT_H) NAMED_ENTRY(IN) NAMED_ENTRY(OUT) NAMED_ENTRY(OWN)
};

static void enter(int of)
{
	need(CALL("cuCtxSetCurrent", context[of]), "cuCtxSetCurrent");
}

static Word allocate(const char *kind, int of)
{
	Word address = 0, handle;
	enter(of);
	if (!strcmp(kind, "plain"))
		need(CALL("cuMemAlloc_v2", W(&address), ALLOCATED), "cuMemAlloc");
	else if (!strcmp(kind, "pool")) {
		need(CALL("cuMemAllocAsync", W(&address), ALLOCATED, own_stream[of]), "cuMemAllocAsync");
		need(CALL("cuStreamSynchronize", own_stream[of]), "cuStreamSynchronize");
	} else {
		struct {
			uint32_t kind, handles;
			Location location;
			Word windows, flags;
		} wanted = { 1, 0, { 1, device[of] }, 0, 0 };
		struct {
			Location location;
			uint32_t flags;
		} access = { { 1, device[of] }, 3 };
		need(CALL("cuMemCreate", W(&handle), ALLOCATED, W(&wanted), 0), "cuMemCreate");
		need(CALL("cuMemAddressReserve", W(&address), ALLOCATED, 0, 0, 0), "cuMemAddressReserve");
		need(CALL("cuMemMap", address, ALLOCATED, 0, handle, 0), "cuMemMap");
		need(CALL("cuMemSetAccess", address, ALLOCATED, W(&access), 1), "cuMemSetAccess");
	}
	return address;
}

enum { BUFFERS = 8 };
static const char *const names[BUFFERS] = { "here", "here_too", "there", "there_too", "pinned", "pageable", "array0", "array1" };
static uint32_t before[BUFFERS][ROOM / 4], now[ROOM / 4];

static Word *buffer(int index)
{
	static Word *const all[] = { &here, &here_too, &there, &there_too };
	return all[index];
}

static void fill_all(void)
{
	for (int b = 0; b < 4; b++) {
		enter(b >= 2);
		need(CALL("cuMemcpyHtoD_v2", *buffer(b), W(before[b]), ROOM), "fill");
	}
	memcpy(pinned, before[4], ROOM);
	memcpy(pageable, before[5], ROOM);
	for (int d = 0; d < 2; d++)
		if (array[d]) {
			enter(d);
			need(CALL("cuMemcpyHtoA_v2", array[d], 0, W(before[6 + d]), ROW), "fill an array");
		}
}

static uint32_t hash(const uint32_t *words, size_t bytes)
{
	uint32_t h = 2166136261u;
	for (size_t i = 0; i < bytes / 4; i++)
		h = (h ^ words[i]) * 16777619u;
	return h;
}

static void print_changes(void)
{
	for (int b = 0; b < BUFFERS; b++) {
		size_t bytes = b < 6 ? ROOM : ROW;
		if (b < 4) {
			enter(b >= 2);
			need(CALL("cuMemcpyDtoH_v2", W(now), *buffer(b), ROOM), "read");
		} else if (b < 6)
			memcpy(now, b == 4 ? pinned : pageable, ROOM);
		else if (array[b - 6]) {
			enter(b - 6);
			need(CALL("cuMemcpyAtoH_v2", W(now), array[b - 6], 0, ROW), "read an array");
		} else
			continue;
		if (memcmp(now, before[b], bytes))
			printf(" %s=%08x", names[b], hash(now, bytes));
	}
}

static void try(size_t index, int of, int in, int captured)
{
	static const char *const streams[] = { "stream0", "stream1", "null", "thread" };
	int answer;
	fill_all();
	current = of;
	stream = in < 2 ? own_stream[in] : in == 2 ? 0 : 2;
	enter(of);
	is_missing = 0;
	if (captured) {
		Word graph = 0;
		need(CALL("cuStreamBeginCapture_v2", stream, 1), "cuStreamBeginCapture");
		answer = operations[index].make();
		int ended = CALL("cuStreamEndCapture", stream, W(&graph));
		if (!answer && ended)
			answer = REFUSED_CAPTURE + ended;
		if (graph) {
			int ran = run(graph);
			answer = answer ? answer : ran;
			CALL("cuGraphDestroy", graph);
		}
	} else
		answer = operations[index].make();
	CALL("cuStreamSynchronize", stream);
	for (int d = 0; d < 2; d++) {
		enter(d);
		need(CALL("cuCtxSynchronize", 0), operations[index].name);
	}
	if (is_missing)
		return;
	printf("%s current%d %s %s: %d", operations[index].name, of, operations[index].in_stream ? streams[in] : "-", captured ? "captured" : "direct", answer);
	print_changes();
	putchar('\n');
}

int main(int count, char **arguments)
{
	struct {
		Word width, height;
		uint32_t format, channels;
	} shape = { ROW, 0, 1, 1 };
	if (count < 2)
		return 2;
	library = dlopen("libcuda.so.1", RTLD_NOW);
	need(!library, "libcuda.so.1");
	need(CALL("cuInit", 0), "cuInit");
	for (int d = 0; d < 2; d++) {
		need(CALL("cuDeviceGet", W(&device[d]), (Word)d), "cuDeviceGet");
		need(CALL("cuDevicePrimaryCtxRetain", W(&context[d]), (Word)device[d]), "cuDevicePrimaryCtxRetain");
		enter(d);
		need(CALL("cuStreamCreate", W(&own_stream[d]), 1), "cuStreamCreate");
		/* The simulated GPU has arrays, but does not copy them. */
		if (dlsym(library, "cuMemcpyHtoA_v2"))
			need(CALL("cuArrayCreate_v2", W(&array[d]), W(&shape)), "cuArrayCreate");
	}
	for (int d = 0; count > 2 && d < 2; d++) {
		enter(d);
		need(CALL("cuCtxEnablePeerAccess", context[!d], 0), "cuCtxEnablePeerAccess");
	}
	here = allocate(arguments[1], 0);
	here_too = allocate(arguments[1], 0);
	there = allocate(arguments[1], 1);
	there_too = allocate(arguments[1], 1);
	need(CALL("cuMemHostAlloc", W(&pinned), ROOM, 1), "cuMemHostAlloc");
	pageable = malloc(ROOM);
	need(!pageable, "malloc");
	for (uint32_t b = 0; b < BUFFERS; b++)
		for (uint32_t i = 0; i < ROOM / 4; i++)
			before[b][i] = (b + 1) << 24 | i;
	/* What streams wait for. */
	before[0][2] = 0;
	for (size_t index = 0; index < sizeof operations / sizeof *operations; index++)
		for (int captured = 0; captured <= operations[index].captured; captured++)
			for (int in = 0; in < (!operations[index].in_stream ? 1 : captured ? 2 : 4); in++)
				for (int of = 0; of < 2; of++)
					try(index, of, in, captured);
	return 0;
}
