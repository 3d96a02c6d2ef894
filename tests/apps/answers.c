/*
 * Asks what a program can ask about its memory, and what it can be refused, and prints the answers. Two runs print the same, whatever
 * provides the memory.
 *
 * usage: answers PART
 *   captures  calls during a stream capture, in each mode of the capture and of the thread: what they answer, and what becomes of it
 *   lost      calls in a context that failed work has broken
 *   pool      the statistics of the default pool
 *   ranges    what is known at, before and behind the ends of allocations
 *   kinds     copies with each kind between all sorts of memory
 *
 * Knows nothing of vramctl. Looks functions up by name.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint64_t Word;

enum { MIB = 1 << 20, BIG = 4 * MIB, SMALL = 4096 };
enum { GLOBAL, THREAD_LOCAL, RELAXED, MODES };
enum { MISSING = -1 };

static void *driver;
/* The second context is of another device if there is one. */
static Word context, second, captured, other, pool;

/* Each argument is a word, which the calling convention passes as it does smaller ones. */
static int call(void *library, const char *name, const Word *a)
{
	typedef int (*Function)(Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word);
	Function function;
	*(void **)&function = dlsym(library, name);
	return function ? function(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10]) : MISSING;
}

#define DRIVER(name, ...) call(driver, name, (Word[11]){ __VA_ARGS__ })
#define RUNTIME(name, ...) call(RTLD_DEFAULT, name, (Word[11]){ __VA_ARGS__ })
#define W(pointer) ((Word)(uintptr_t)(pointer))

static void need(int answer, const char *what)
{
	if (answer != 0) {
		fprintf(stderr, "%s: %d\n", what, answer);
		exit(1);
	}
}

/* What there is before each call. */
static struct {
	Word big, small, pooled, pooled_here, handed_on;
} have;

static Word taken(int answer, Word address)
{
	need(answer, "memory");
	return address;
}

static Word allocate(Word bytes)
{
	Word address = 0;
	int answer = DRIVER("cuMemAlloc_v2", W(&address), bytes);
	return taken(answer, address);
}

static Word allocate_in(Word stream, Word bytes)
{
	Word address = 0;
	int answer = DRIVER("cuMemAllocAsync", W(&address), bytes, stream);
	return taken(answer, address);
}

static void prepare(void)
{
	need(DRIVER("cuCtxSetCurrent", context), "cuCtxSetCurrent");
	need(DRIVER("cuStreamCreate", W(&captured), 1) | DRIVER("cuStreamCreate", W(&other), 1), "cuStreamCreate");
	have.big = allocate(BIG);
	have.small = allocate(SMALL);
	have.pooled = allocate_in(other, BIG);
	have.pooled_here = allocate_in(captured, BIG);
	/* Freed in the stream before, so that an allocation gets it again; and such memory itself. */
	Word first = allocate_in(other, 2 * BIG), second = allocate_in(other, BIG);
	need(DRIVER("cuMemFreeAsync", second, other), "cuMemFreeAsync");
	have.handed_on = allocate_in(other, BIG);
	need(DRIVER("cuMemFreeAsync", first, other), "cuMemFreeAsync");
}

/* What a call has taken away is an error here. */
static void tidy(void)
{
	const Word all[] = { have.big, have.small, have.pooled, have.pooled_here, have.handed_on };
	for (size_t i = 0; i < sizeof all / sizeof *all; i++)
		DRIVER("cuMemFree_v2", all[i]);
	DRIVER("cuStreamDestroy_v2", captured);
	DRIVER("cuStreamDestroy_v2", other);
	RUNTIME("cudaGetLastError");
}

typedef struct {
	Word width, height, depth;
} Extent;

static int allocate_volume(Word width)
{
	Word pitched[4];
	int (*function)(Word *, Extent);
	*(void **)&function = dlsym(RTLD_DEFAULT, "cudaMalloc3D");
	return function ? function(pitched, (Extent){ width, 1024, 2 }) : MISSING;
}

/* Memory that the program maps itself. */
static Word mapped(Word bytes)
{
	struct {
		int kind, handles, location, device;
		Word rest[2];
	} what = { 1, 0, 1, 0, { 0, 0 } };
	struct {
		int location, device, flags;
	} access = { 1, 0, 3 };
	Word handle, address = 0;
	need(DRIVER("cuMemCreate", W(&handle), bytes, W(&what), 0), "cuMemCreate");
	need(DRIVER("cuMemAddressReserve", W(&address), bytes, 0, 0, 0), "cuMemAddressReserve");
	need(DRIVER("cuMemMap", address, bytes, 0, handle, 0), "cuMemMap");
	need(DRIVER("cuMemSetAccess", address, bytes, W(&access), 1), "cuMemSetAccess");
	return address;
}

static int map_and_unmap(void)
{
	Word handle = 0, address = mapped(2 * MIB);
	int answer = DRIVER("cuMemRetainAllocationHandle", W(&handle), address);
	answer = answer ? answer : DRIVER("cuMemUnmap", address, 2 * MIB);
	answer = answer ? answer : DRIVER("cuMemAddressFree", address, 2 * MIB);
	answer = answer ? answer : DRIVER("cuMemRelease", handle);
	return answer ? answer : DRIVER("cuMemRelease", handle);
}

static int make_a_stream(void)
{
	Word made = 0;
	int answer = DRIVER("cuStreamCreate", W(&made), 1);
	return answer ? answer : DRIVER("cuStreamDestroy_v2", made);
}

static int make_a_context(void)
{
	Word made = 0;
	int answer = DRIVER("cuCtxCreate_v2", W(&made), 0, 0);
	answer = answer ? answer : DRIVER("cuCtxDestroy_v2", made);
	DRIVER("cuCtxSetCurrent", context);
	return answer;
}

static int use_peers(void)
{
	int answer = DRIVER("cuCtxEnablePeerAccess", second, 0);
	return answer ? answer : DRIVER("cuCtxDisablePeerAccess", second);
}

/* While another device is current. */
static int from_another_device(void)
{
	unsigned char bytes[64];
	DRIVER("cuCtxSetCurrent", second);
	int answer = DRIVER("cuMemcpyDtoH_v2", W(bytes), have.big, sizeof bytes);
	DRIVER("cuCtxSetCurrent", context);
	return answer;
}

static int wait_for_another_device(void)
{
	DRIVER("cuCtxSetCurrent", second);
	int answer = DRIVER("cuCtxSynchronize", 0);
	DRIVER("cuCtxSetCurrent", context);
	return answer;
}

/* NAME and the call, which may use these. */
#define CALLS(X) \
	X("cuMemAlloc", DRIVER("cuMemAlloc_v2", W(&made), BIG)) \
	X("cuMemAlloc, small", DRIVER("cuMemAlloc_v2", W(&made), SMALL)) \
	X("cuMemAlloc, nothing", DRIVER("cuMemAlloc_v2", W(&made), 0)) \
	X("cuMemAlloc, too much", DRIVER("cuMemAlloc_v2", W(&made), 1ULL << 44)) \
	X("cuMemAlloc, nowhere", DRIVER("cuMemAlloc_v2", 0, BIG)) \
	X("cuMemAllocPitch", DRIVER("cuMemAllocPitch_v2", W(&made), W(&size), 4096, 1024, 4)) \
	X("cuMemAllocPitch, nothing", DRIVER("cuMemAllocPitch_v2", W(&made), W(&size), 0, 1024, 4)) \
	X("cuMemAllocPitch, wrong", DRIVER("cuMemAllocPitch_v2", W(&made), W(&size), 4096, 1024, 3)) \
	X("cuMemFree", DRIVER("cuMemFree_v2", have.big)) \
	X("cuMemFree, small", DRIVER("cuMemFree_v2", have.small)) \
	X("cuMemFree, nothing", DRIVER("cuMemFree_v2", 0)) \
	X("cuMemFree, inside", DRIVER("cuMemFree_v2", have.big + 512)) \
	X("cuMemFree, of a pool", DRIVER("cuMemFree_v2", have.pooled)) \
	X("cuMemAllocAsync, other stream", DRIVER("cuMemAllocAsync", W(&made), BIG, other)) \
	X("cuMemAllocAsync, again", DRIVER("cuMemAllocAsync", W(&made), 2 * BIG, other)) \
	X("cuMemAllocAsync, small", DRIVER("cuMemAllocAsync", W(&made), SMALL, other)) \
	X("cuMemAllocAsync, captured stream", DRIVER("cuMemAllocAsync", W(&made), BIG, captured)) \
	X("cuMemAllocFromPoolAsync, other stream", DRIVER("cuMemAllocFromPoolAsync", W(&made), BIG, pool, other)) \
	X("cuMemFreeAsync, other stream", DRIVER("cuMemFreeAsync", have.pooled, other)) \
	X("cuMemFreeAsync, again", DRIVER("cuMemFreeAsync", have.handed_on, other)) \
	X("cuMemFreeAsync, of no pool", DRIVER("cuMemFreeAsync", have.big, other)) \
	X("cuMemFreeAsync, captured stream", DRIVER("cuMemFreeAsync", have.pooled_here, captured)) \
	X("cuMemPoolTrimTo", DRIVER("cuMemPoolTrimTo", pool, 0)) \
	X("cuMemPoolGetAttribute", DRIVER("cuMemPoolGetAttribute", pool, 5, W(&made))) \
	X("cuMemGetInfo", DRIVER("cuMemGetInfo_v2", W(&made), W(&size))) \
	X("cuMemGetAddressRange", DRIVER("cuMemGetAddressRange_v2", W(&made), W(&size), have.big)) \
	X("cuPointerGetAttribute", DRIVER("cuPointerGetAttribute", W(&made), 11, have.big)) \
	X("cuIpcGetMemHandle", DRIVER("cuIpcGetMemHandle", W(handle), have.big)) \
	X("cuMemcpyDtoH, another device current", from_another_device()) \
	X("cuCtxSynchronize, another device current", wait_for_another_device()) \
	X("memory of its own", map_and_unmap()) \
	X("a stream", make_a_stream()) \
	X("a context", make_a_context()) \
	X("peer access", use_peers()) \
	X("cuPointerSetAttribute", DRIVER("cuPointerSetAttribute", W(&one), 6, have.big)) \
	X("cuMemPoolSetAttribute", DRIVER("cuMemPoolSetAttribute", pool, 8, W(&made))) \
	X("cuMemsetD8Async, captured stream", DRIVER("cuMemsetD8Async", have.big, 1, SMALL, captured)) \
	X("cudaMalloc", RUNTIME("cudaMalloc", W(&made), BIG)) \
	X("cudaMalloc, small", RUNTIME("cudaMalloc", W(&made), SMALL)) \
	X("cudaMallocPitch", RUNTIME("cudaMallocPitch", W(&made), W(&size), 4096, 1024)) \
	X("cudaMalloc3D", allocate_volume(4096)) \
	X("cudaMallocAsync, other stream", RUNTIME("cudaMallocAsync", W(&made), BIG, other)) \
	X("cudaFree", RUNTIME("cudaFree", have.big)) \
	X("cudaFree, nothing", RUNTIME("cudaFree", 0)) \
	X("cudaFreeAsync, other stream", RUNTIME("cudaFreeAsync", have.pooled, other)) \
	X("cudaIpcGetMemHandle", RUNTIME("cudaIpcGetMemHandle", W(handle), have.big))

static const char *const names[] = {
#define NAME(name, call) name,
	CALLS(NAME)
};
enum { COUNT = sizeof names / sizeof *names };

static int answer_of(int number)
{
	Word made = 0, size = 0, one = 1;
	char handle[64];
	int at = 0, answer = MISSING;
	(void)size;
	(void)one;
	(void)handle;
#define MAKE(name, call) if (number == at++) answer = call;
	CALLS(MAKE)
	return answer;
}

struct attempt {
	int number, mode, answer, last;
};

static void attempt(struct attempt *a)
{
	unsigned mode = a->mode;
	DRIVER("cuThreadExchangeStreamCaptureMode", W(&mode));
	a->answer = answer_of(a->number);
	a->last = RUNTIME("cudaGetLastError");
	DRIVER("cuThreadExchangeStreamCaptureMode", W(&mode));
}

static void *on_a_thread(void *a)
{
	DRIVER("cuCtxSetCurrent", context);
	attempt(a);
	return NULL;
}

static void captures(void)
{
	for (int number = 0; number < COUNT; number++)
		for (int of = GLOBAL; of < MODES; of++)
			for (int mode = GLOBAL; mode < MODES; mode++)
				for (int elsewhere = 0; elsewhere < 2; elsewhere++) {
					struct attempt a = { .number = number, .mode = mode };
					unsigned status = 9;
					Word graph = 0;
					prepare();
					need(DRIVER("cuStreamBeginCapture_v2", captured, of), "cuStreamBeginCapture");
					if (elsewhere) {
						pthread_t thread;
						need(pthread_create(&thread, NULL, on_a_thread, &a), "a thread");
						pthread_join(thread, NULL);
					} else
						attempt(&a);
					DRIVER("cuStreamIsCapturing", captured, W(&status));
					int end = DRIVER("cuStreamEndCapture", captured, W(&graph));
					printf("%s, capture %d, thread %d%s: %d, last %d, then %u, ends with %d\n", names[number], of, mode,
					       elsewhere ? " another" : "", a.answer, a.last, status, end);
					if (graph)
						DRIVER("cuGraphDestroy", graph);
					tidy();
				}
}

/* A kernel that writes where no memory is; on the simulated GPU, which has no compiler, work whose memory is unmapped before it begins. */
static void fail(void)
{
	static const char code[] = ".version 6.0\n.target sm_50\n.address_size 64\n"
				   ".visible .entry fails() { .reg .u64 at; mov.u64 at, 16; st.global.u64 [at], at; ret; }\n";
	Word module = 0, function = 0;
	if (DRIVER("cuModuleLoadData", W(&module), W(code)) == 0 && DRIVER("cuModuleGetFunction", W(&function), module, W("fails")) == 0) {
		need(DRIVER("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, other, 0, 0), "cuLaunchKernel");
		return;
	}
	Word doomed = mapped(2 * MIB);
	DRIVER("simgpu_set_op_delay_ms", 300);
	DRIVER("cuMemsetD8Async", doomed, 1, SMALL, other);
	DRIVER("cuMemUnmap", doomed, 2 * MIB);
	DRIVER("simgpu_set_op_delay_ms", 0);
}

static void lost(void)
{
	prepare();
	fail();
	printf("the failed work: %d\n", DRIVER("cuStreamSynchronize", other));
	for (int number = 0; number < COUNT; number++) {
		RUNTIME("cudaGetLastError");
		int answer = answer_of(number);
		printf("%s: %d, last %d\n", names[number], answer, RUNTIME("cudaGetLastError"));
	}
}

enum { THRESHOLD = 4, RESERVED, RESERVED_HIGH, USED, USED_HIGH, ATTRIBUTES = 10 };

static void show(const char *when)
{
	printf("%s:", when);
	for (int attribute = 0; attribute <= ATTRIBUTES; attribute++) {
		Word value = 0;
		int answer = DRIVER("cuMemPoolGetAttribute", pool, attribute, W(&value));
		printf(" %d %llu", answer, (unsigned long long)value);
	}
	putchar('\n');
}

static void set(int attribute, Word value)
{
	char when[64];
	snprintf(when, sizeof when, "set %d to %llu: %d", attribute, (unsigned long long)value,
	         DRIVER("cuMemPoolSetAttribute", pool, attribute, W(&value)));
	show(when);
}

static void free_in(Word stream, Word address, const char *when)
{
	need(DRIVER("cuMemFreeAsync", address, stream), "cuMemFreeAsync");
	show(when);
}

static void pool_of(const char *what, Word address)
{
	Word found = 7, of_context = 7;
	int answer = DRIVER("cuPointerGetAttribute", W(&found), 17, address);
	DRIVER("cuPointerGetAttribute", W(&of_context), 1, address);
	printf("%s: %d, %s, %s context\n", what, answer, found == pool ? "the pool" : found ? "another" : "none",
	       of_context == context ? "the" : of_context ? "another" : "no");
}

static void statistics(void)
{
	show("start");
	need(DRIVER("cuStreamCreate", W(&other), 1), "cuStreamCreate");
	Word big = allocate_in(other, 64 * MIB), small = allocate_in(other, SMALL);
	show("two");
	pool_of("of the large one", big);
	pool_of("inside", big + MIB);
	pool_of("of the small one", small);
	pool_of("of no pool", allocate(BIG));
	pool_of("of mapped memory", mapped(2 * MIB));
	free_in(other, big, "one freed");
	DRIVER("cuStreamSynchronize", other);
	show("synchronised");
	set(USED_HIGH, 0);
	set(RESERVED_HIGH, 0);
	set(USED_HIGH, 5);
	set(RESERVED_HIGH, 5);
	set(USED, 0);
	set(RESERVED, 0);
	set(THRESHOLD, ~0ULL);
	set(9, 0);
	big = allocate_in(other, 32 * MIB);
	show("a smaller one");
	free_in(other, big, "freed");
	DRIVER("cuCtxSynchronize", 0);
	show("synchronised, and kept");
	Word again = allocate_in(other, 32 * MIB);
	show("reused");
	set(THRESHOLD, 0);
	free_in(other, again, "freed again");
	DRIVER("cuMemPoolTrimTo", pool, 0);
	DRIVER("cuCtxSynchronize", 0);
	show("given back");
	free_in(other, small, "all freed");
	need(DRIVER("cuMemAllocFromPoolAsync", W(&big), 8 * MIB, pool, other), "cuMemAllocFromPoolAsync");
	show("by name");
	free_in(other, big, "freed by name");
}

static void look_at(const char *what, Word base, Word offset)
{
	static const int asked[] = { 2, 11, 12 };
	Word first = 7, size = 7;
	int answer = DRIVER("cuMemGetAddressRange_v2", W(&first), W(&size), base + offset);
	printf("%s + %llu: %d at %lld of %llu;", what, (unsigned long long)offset, answer, first ? (long long)(first - base) : -1, (unsigned long long)size);
	for (size_t i = 0; i < sizeof asked / sizeof *asked; i++) {
		Word value = 0;
		answer = DRIVER("cuPointerGetAttribute", W(&value), (Word)asked[i], base + offset);
		printf(" %d %lld;", answer, (long long)(value >= base ? value - base : value));
	}
	Word values[3] = { 7, 7, 7 }, *places[3] = { &values[0], &values[1], &values[2] };
	values[0] = 0;
	answer = DRIVER("cuPointerGetAttributes", 3, W(asked), W(places), base + offset);
	printf(" all %d:", answer);
	for (int i = 0; i < 3; i++)
		printf(" %lld", (long long)(values[i] >= base ? values[i] - base : values[i]));
	printf("; of the host %d\n", DRIVER("cuMemHostGetDevicePointer_v2", W(&size), base + offset, 0));
}

static void ranges(void)
{
	static const Word sizes[] = { 1, SMALL, MIB, MIB + 1, 2 * MIB - 512, 3000001, 5 * MIB };
	need(DRIVER("cuStreamCreate", W(&other), 1), "cuStreamCreate");
	for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
		for (int of_pool = 0; of_pool < 2; of_pool++) {
			Word bytes = sizes[i], base = of_pool ? allocate_in(other, bytes) : allocate(bytes);
			const char *what = of_pool ? "of a pool" : "plain";
			printf("%llu bytes\n", (unsigned long long)bytes);
			look_at(what, base, 0);
			look_at(what, base, bytes - 1);
			look_at(what, base, bytes);
			look_at(what, base, bytes + 1);
			printf("without places: %d\n", DRIVER("cuMemGetAddressRange_v2", 0, 0, base));
			DRIVER("cuCtxSetCurrent", 0);
			printf("without a context: %d\n", DRIVER("cuMemGetAddressRange_v2", 0, 0, base));
			DRIVER("cuCtxSetCurrent", context);
			need(DRIVER("cuMemFree_v2", base), "cuMemFree");
			look_at("freed", base, 0);
		}
}

static void kinds(void)
{
	enum { SORTS = 7, BYTES = 3 * MIB };
	static const char *const sorts[SORTS] = { "pageable", "pinned", "device", "of a pool", "unified", "inside", "mapped" };
	static const char *const forms[] = { "cudaMemcpyAsync", "cuMemcpy", "cuMemcpyHtoD_v2", "cuMemcpyDtoH_v2", "cuMemcpyDtoD_v2",
		"cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuMemcpyDtoDAsync_v2", "cuMemcpy2D_v2" };
	enum { FORMS = sizeof forms / sizeof *forms };
	Word memory[SORTS][2];
	need(DRIVER("cuStreamCreate", W(&other), 1), "cuStreamCreate");
	for (int i = 0; i < 2; i++) {
		memory[0][i] = W(calloc(1, BYTES));
		need(DRIVER("cuMemHostAlloc", W(&memory[1][i]), BYTES, 0), "cuMemHostAlloc");
		memory[2][i] = allocate(BYTES);
		memory[3][i] = allocate_in(other, BYTES);
		need(DRIVER("cuMemAllocManaged", W(&memory[4][i]), BYTES, 1), "cuMemAllocManaged");
		memory[5][i] = allocate(2 * BYTES) + BYTES + 512;
		memory[6][i] = mapped(BIG);
	}
	for (int device = 0; device < 2; device++) {
		Word of_device;
		if (DRIVER("cuDevicePrimaryCtxRetain", W(&of_device), device) != 0)
			return;
		for (int form = 0; form < FORMS; form++)
			for (int from = 0; from < SORTS; from++)
				for (int to = 0; to < SORTS; to++)
					for (int kind = 0; kind < (form == 0 ? 5 : 1); kind++) {
						Word a = memory[from][0], b = memory[to][1];
						/* x, y, whose, host, device, array, pitch; twice; then the shape. */
						Word plane[16] = { 0, 0, 2, 0, a, 0, 512, 0, 0, 2, 0, b, 0, 512, 256, 4 };
						int answer;
						DRIVER("cuCtxSetCurrent", of_device);
						if (form == 0)
							answer = RUNTIME("cudaMemcpyAsync", b, a, SMALL, kind, 0);
						else if (form == FORMS - 1)
							answer = DRIVER(forms[form], W(plane));
						else
							answer = DRIVER(forms[form], b, a, SMALL, 0);
						int ended = DRIVER("cuCtxSynchronize", 0), last = RUNTIME("cudaGetLastError");
						printf("%s from %s to %s, kind %d, device %d: %d, %d, last %d\n", forms[form], sorts[from], sorts[to], kind,
						       device, answer, ended, last);
					}
	}
}

int main(int count, char **arguments)
{
	static const struct {
		const char *name;
		void (*run)(void);
	} parts[] = { { "captures", captures }, { "lost", lost }, { "pool", statistics }, { "ranges", ranges }, { "kinds", kinds } };
	static const char *const runtimes[] = { "libcudart.so", "libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0" };
	int is_there = 0;
	for (size_t i = 0; !is_there && i < sizeof runtimes / sizeof *runtimes; i++)
		is_there = dlopen(runtimes[i], RTLD_NOW | RTLD_GLOBAL) != NULL;
	driver = dlopen("libcuda.so.1", RTLD_NOW);
	need(!driver, "libcuda.so.1");
	need(DRIVER("cuInit", 0), "cuInit");
	need(DRIVER("cuDevicePrimaryCtxRetain", W(&context), 0), "cuDevicePrimaryCtxRetain");
	if (DRIVER("cuDevicePrimaryCtxRetain", W(&second), 1) != 0)
		second = context;
	need(DRIVER("cuCtxSetCurrent", context), "cuCtxSetCurrent");
	need(DRIVER("cuDeviceGetDefaultMemPool", W(&pool), 0), "cuDeviceGetDefaultMemPool");
	for (size_t i = 0; count > 1 && i < sizeof parts / sizeof *parts; i++)
		if (strcmp(arguments[1], parts[i].name) == 0) {
			parts[i].run();
			return 0;
		}
	return 2;
}
