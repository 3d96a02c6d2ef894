/* Measures calls of the CUDA driver and lookups of its functions, compared with the driver's own functions in the same process. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cudadriver.h"

static const char help[] =
	"Times look-ups and calls of the CUDA driver, each as a program gets them and as the driver\n"
	"has them, in turns.\n\n"
	"usage: overhead_driver [--batches N] [--device N]\n\n"
	"Prints a line per call: `NAME FOUND OWN EXTRA SAME`. FOUND and OWN are ns per call, medians\n"
	"over the batches, EXTRA is the median of their difference, and SAME is 1 where both are the\n"
	"same function: with nothing preloaded, all of them.\n"
	"  dlsym_cuda, dlsym_other    the look-up of a CUDA function and of one of libc\n"
	"  address_alloc, address_other  cuGetProcAddress of cuMemAlloc and of cuDeviceGetCount\n"
	"  alloc_free                 a pair of cuMemAlloc and cuMemFree, 4 KiB\n"
	"  launch                     a kernel that does nothing, where the device runs kernels\n"
	"  launch_refused             a launch of no blocks, which the driver refuses: what is before it, without\n"
	"                             the microseconds of a launch, which vary by more\n"
	"  create, map, access, unmap, release  the program's own virtual memory, 2 MiB\n";

#define HANDLES 64
#define HANDLE_BYTES ((size_t)2 << 20)

/* The functions to time: as dlsym returns them, or as the library defines them. */
struct functions {
	void *(*dlsym)(void *library, const char *name);
	CUresult (*address)(const char *name, void **found, int version, uint64_t flags, int *status);
	CUresult (*alloc)(CUdeviceptr *address, size_t bytes);
	CUresult (*free)(CUdeviceptr address);
	CUresult (*reserve)(CUdeviceptr *address, size_t bytes, size_t alignment, CUdeviceptr hint, uint64_t flags);
	CUresult (*unreserve)(CUdeviceptr address, size_t bytes);
	CUresult (*create)(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *p, uint64_t flags);
	CUresult (*map)(CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, uint64_t flags);
	CUresult (*access)(CUdeviceptr at, size_t bytes, const CUmemAccessDesc *access, size_t count);
	CUresult (*unmap)(CUdeviceptr at, size_t bytes);
	CUresult (*release)(CUmemGenericAllocationHandle handle);
	CUresult (*launch)(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
	                   unsigned shared, CUstream stream, void **arguments, void **extra);
};

static void *driver;
static CUdevice device;

static void fail(const char *what, CUresult error)
{
	fprintf(stderr, "overhead_driver: %s: error %d\n", what, error);
	exit(1);
}

static void need(CUresult error, const char *what)
{
	if (error != 0)
		fail(what, error);
}

/* The number of symbols in a library, from its hash table. */
static size_t symbols_by(const uint32_t *hash, const uint32_t *gnu)
{
	if (hash != NULL)
		return hash[1];
	if (gnu == NULL)
		return 0;
	uint32_t buckets = gnu[0], first = gnu[1], words = gnu[2], last = 0;
	const uint32_t *bucket = gnu + 4 + words * (sizeof(ElfW(Addr)) / sizeof(uint32_t));
	const uint32_t *chain = bucket + buckets;
	for (uint32_t i = 0; i < buckets; i++)
		if (bucket[i] > last)
			last = bucket[i];
	if (last < first)
		return first;
	while ((chain[last - first] & 1) == 0)
		last++;
	return last + 1;
}

/* A function as a library defines it, whatever dlsym returns. */
static void *own(void *library, const char *name)
{
	struct link_map *map = NULL;
	const ElfW(Sym) *symbols = NULL;
	const char *names = NULL;
	const uint32_t *hash = NULL, *gnu = NULL;
	if (library == NULL || dlinfo(library, RTLD_DI_LINKMAP, &map) != 0)
		return NULL;
	for (const ElfW(Dyn) *entry = map->l_ld; entry->d_tag != DT_NULL; entry++) {
		const void *at = (const void *)entry->d_un.d_ptr;
		switch (entry->d_tag) {
		case DT_SYMTAB: symbols = at; break;
		case DT_STRTAB: names = at; break;
		case DT_HASH: hash = at; break;
		case DT_GNU_HASH: gnu = at; break;
		}
	}
	size_t count = symbols_by(hash, gnu);
	for (size_t i = 0; symbols != NULL && names != NULL && i < count; i++)
		if (symbols[i].st_shndx != SHN_UNDEF && ELF64_ST_TYPE(symbols[i].st_info) == STT_FUNC
		    && strcmp(names + symbols[i].st_name, name) == 0)
			return (void *)(map->l_addr + symbols[i].st_value);
	return NULL;
}

static void *through_dlsym(void *library, const char *name)
{
	return dlsym(library, name);
}

static struct functions functions(void *(*find)(void *library, const char *name))
{
	struct functions f;
	void *libc = dlopen("libc.so.6", RTLD_LAZY | RTLD_NOLOAD);
	void *found[] = {
		find == own ? own(libc, "dlsym") : (void *)dlsym,
		find(driver, "cuGetProcAddress_v2"),
		find(driver, "cuMemAlloc_v2"),
		find(driver, "cuMemFree_v2"),
		find(driver, "cuMemAddressReserve"),
		find(driver, "cuMemAddressFree"),
		find(driver, "cuMemCreate"),
		find(driver, "cuMemMap"),
		find(driver, "cuMemSetAccess"),
		find(driver, "cuMemUnmap"),
		find(driver, "cuMemRelease"),
		find(driver, "cuLaunchKernel"),
	};
	_Static_assert(sizeof found == sizeof f, "one pointer for each function");
	memcpy(&f, found, sizeof f);
	return f;
}

static double now(void)
{
	struct timespec at;
	clock_gettime(CLOCK_MONOTONIC, &at);
	return (double)at.tv_sec * 1e9 + (double)at.tv_nsec;
}

static int by_size(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

static double median(double *values, size_t count)
{
	qsort(values, count, sizeof *values, by_size);
	return values[count / 2];
}

/* Each of these times some calls of the given functions, and stores ns per call: one figure, or several. */
typedef void measurement(const struct functions *f, double *ns);

static void look_up(const struct functions *f, void *library, const char *name, double *ns)
{
	double from = now();
	for (int i = 0; i < 1000; i++)
		if (f->dlsym(library, name) == NULL)
			fail(name, -1);
	*ns = (now() - from) / 1000;
}

static void dlsym_cuda(const struct functions *f, double *ns)
{
	look_up(f, driver, "cuMemAlloc_v2", ns);
}

static void dlsym_other(const struct functions *f, double *ns)
{
	look_up(f, RTLD_DEFAULT, "getpid", ns);
}

static void address(const struct functions *f, const char *name, double *ns)
{
	void *found = NULL;
	int status = 0;
	double from = now();
	for (int i = 0; i < 1000; i++)
		need(f->address(name, &found, 12000, 0, &status), "cuGetProcAddress");
	*ns = (now() - from) / 1000;
}

static void address_alloc(const struct functions *f, double *ns)
{
	address(f, "cuMemAlloc", ns);
}

static void address_other(const struct functions *f, double *ns)
{
	address(f, "cuDeviceGetCount", ns);
}

static void alloc_free(const struct functions *f, double *ns)
{
	double from = now();
	for (int i = 0; i < 250; i++) {
		CUdeviceptr at;
		need(f->alloc(&at, 4096), "cuMemAlloc");
		need(f->free(at), "cuMemFree");
	}
	*ns = (now() - from) / 250;
}

static void own_memory(const struct functions *f, double *ns)
{
	CUmemAllocationProp properties;
	CUmemAccessDesc open = {{CU_MEM_LOCATION_TYPE_DEVICE, device}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
	CUmemGenericAllocationHandle handle[HANDLES];
	CUdeviceptr at;
	double times[6];
	memset(&properties, 0, sizeof properties);
	properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
	properties.location = open.location;
	need(f->reserve(&at, HANDLES * HANDLE_BYTES, 0, 0, 0), "cuMemAddressReserve");
	times[0] = now();
	for (int i = 0; i < HANDLES; i++)
		need(f->create(&handle[i], HANDLE_BYTES, &properties, 0), "cuMemCreate");
	times[1] = now();
	for (int i = 0; i < HANDLES; i++)
		need(f->map(at + (size_t)i * HANDLE_BYTES, HANDLE_BYTES, 0, handle[i], 0), "cuMemMap");
	times[2] = now();
	for (int i = 0; i < HANDLES; i++)
		need(f->access(at + (size_t)i * HANDLE_BYTES, HANDLE_BYTES, &open, 1), "cuMemSetAccess");
	times[3] = now();
	for (int i = 0; i < HANDLES; i++)
		need(f->unmap(at + (size_t)i * HANDLE_BYTES, HANDLE_BYTES), "cuMemUnmap");
	times[4] = now();
	for (int i = 0; i < HANDLES; i++)
		need(f->release(handle[i]), "cuMemRelease");
	times[5] = now();
	need(f->unreserve(at, HANDLES * HANDLE_BYTES), "cuMemAddressFree");
	for (int i = 0; i < 5; i++)
		ns[i] = (times[i + 1] - times[i]) / HANDLES;
}

static CUfunction nothing;
static CUresult (*synchronize)(void);

static void launch(const struct functions *f, double *ns)
{
	need(synchronize(), "cuCtxSynchronize");
	double from = now();
	/* Fewer than the queue can hold, so that no launch waits for an earlier one. */
	for (int i = 0; i < 100; i++)
		need(f->launch(nothing, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL), "cuLaunchKernel");
	*ns = (now() - from) / 100;
}

static void launch_refused(const struct functions *f, double *ns)
{
	double from = now();
	for (int i = 0; i < 200; i++)
		if (f->launch(nothing, 0, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL) == 0)
			fail("a launch of no blocks is not refused", -1);
	*ns = (now() - from) / 200;
}

/* A kernel that does nothing, where the device runs kernels. */
static bool load_nothing(void)
{
	static const char ptx[] = ".version 7.0\n.target sm_50\n.address_size 64\n.visible .entry nothing() { ret; }\n";
	CUresult (*load)(CUmodule *, const void *) = (CUresult(*)(CUmodule *, const void *))own(driver, "cuModuleLoadData");
	CUresult (*get)(CUfunction *, CUmodule, const char *) =
		(CUresult(*)(CUfunction *, CUmodule, const char *))own(driver, "cuModuleGetFunction");
	CUmodule module;
	synchronize = (CUresult(*)(void))own(driver, "cuCtxSynchronize");
	return load(&module, ptx) == 0 && get(&nothing, module, "nothing") == 0;
}

/* Measures both alternately, and prints a line for each name. */
static void compare(measurement *measure, const struct functions *both, size_t batches, int count,
                    const char *const *names, const bool *same)
{
	double *figures = calloc(3 * (size_t)count * batches, sizeof *figures), waste[8];
	if (figures == NULL)
		fail("host memory", -1);
	measure(&both[0], waste);
	measure(&both[1], waste);
	for (size_t batch = 0; batch < batches; batch++) {
		double ns[2][2][8];
		/* There and back: whichever comes first is a little slower or faster. */
		for (size_t way = 0; way < 2; way++)
			for (size_t turn = 0; turn < 2; turn++)
				measure(&both[turn ^ way], ns[turn ^ way][way]);
		for (int i = 0; i < count; i++) {
			double *row = figures + 3 * (size_t)i * batches + batch;
			row[0] = (ns[0][0][i] + ns[0][1][i]) / 2;
			row[batches] = (ns[1][0][i] + ns[1][1][i]) / 2;
			row[2 * batches] = row[0] - row[batches];
		}
	}
	for (int i = 0; i < count; i++) {
		double *row = figures + 3 * (size_t)i * batches;
		printf("%s %.1f %.1f %.1f %d\n", names[i], median(row, batches), median(row + batches, batches),
		       median(row + 2 * batches, batches), same[i]);
	}
	free(figures);
}

int main(int argc, char **argv)
{
	size_t batches = 50;
	int ordinal = 0;
	for (int i = 1; i < argc; i++) {
		if (strcmp(argv[i], "--help") == 0) {
			fputs(help, stdout);
			return 0;
		}
		if (strcmp(argv[i], "--batches") == 0 && i + 1 < argc) {
			batches = strtoull(argv[++i], NULL, 10);
		} else if (strcmp(argv[i], "--device") == 0 && i + 1 < argc) {
			ordinal = atoi(argv[++i]);
		} else {
			fputs(help, stderr);
			return 2;
		}
	}
	if (batches == 0 || batches > 1 << 20) {
		fputs(help, stderr);
		return 2;
	}
	driver = dlopen("libcuda.so.1", RTLD_LAZY);
	if (driver == NULL) {
		fprintf(stderr, "overhead_driver: %s\n", dlerror());
		return 1;
	}
	const struct functions both[2] = {functions(through_dlsym), functions(own)};
	void *pointers[2][sizeof both[0] / sizeof(void *)];
	memcpy(pointers, both, sizeof pointers);
	for (size_t i = 0; i < sizeof both[0] / sizeof(void *); i++)
		if (pointers[0][i] == NULL || pointers[1][i] == NULL) {
			fprintf(stderr, "overhead_driver: function %zu of libcuda.so.1 or libc.so.6 is not found\n", i);
			return 1;
		}

	/* Not timed, so use the driver's own. */
	CUresult (*init)(unsigned) = (CUresult(*)(unsigned))own(driver, "cuInit");
	CUresult (*get)(CUdevice *, int) = (CUresult(*)(CUdevice *, int))own(driver, "cuDeviceGet");
	CUresult (*retain)(CUcontext *, CUdevice) = (CUresult(*)(CUcontext *, CUdevice))own(driver, "cuDevicePrimaryCtxRetain");
	CUresult (*set)(CUcontext) = (CUresult(*)(CUcontext))own(driver, "cuCtxSetCurrent");
	CUcontext context;
	CUdeviceptr kept;
	need(init(0), "cuInit");
	need(get(&device, ordinal), "cuDeviceGet");
	need(retain(&context, device), "cuDevicePrimaryCtxRetain");
	need(set(context), "cuCtxSetCurrent");
	/* Keep one small allocation: otherwise each free would give the driver's block of small allocations back. */
	need(both[1].alloc(&kept, 4096), "cuMemAlloc");

#define SAME(f) (pointers[0][offsetof(struct functions, f) / sizeof(void *)] == pointers[1][offsetof(struct functions, f) / sizeof(void *)])
	const bool lookups[] = {SAME(dlsym), SAME(address), SAME(alloc) && SAME(free)};
	const bool memory[] = {SAME(create), SAME(map), SAME(access), SAME(unmap), SAME(release)};
	compare(dlsym_cuda, both, batches, 1, (const char *const[]){"dlsym_cuda"}, &lookups[0]);
	compare(dlsym_other, both, batches, 1, (const char *const[]){"dlsym_other"}, &lookups[0]);
	compare(address_alloc, both, batches, 1, (const char *const[]){"address_alloc"}, &lookups[1]);
	compare(address_other, both, batches, 1, (const char *const[]){"address_other"}, &lookups[1]);
	compare(alloc_free, both, batches, 1, (const char *const[]){"alloc_free"}, &lookups[2]);
	const bool launches[] = {SAME(launch)};
	if (load_nothing()) {
		/* Many short batches: the library's few ns are looked for in microseconds that drift. */
		compare(launch, both, 20 * batches, 1, (const char *const[]){"launch"}, launches);
		compare(launch_refused, both, 20 * batches, 1, (const char *const[]){"launch_refused"}, launches);
	}
	compare(own_memory, both, batches < 10 ? batches : 10, 5,
	        (const char *const[]){"create", "map", "access", "unmap", "release"}, memory);
	return 0;
}
