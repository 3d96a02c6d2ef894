/* Opens libraries that call CUDA: itself, compiled with -DLIBRARY.
 *
 *   loading waits LIBRARY          the constructor waits for a thread that makes its first calls of CUDA's driver and runtime and of NCCL.
 *                                  The program has started CUDA, but has not made such calls. Prints ok
 *   loading closes LIBRARY OTHER   the first one allocates 4 MiB and is closed, then the other one allocates 8 MiB, most likely from the same
 *                                  addresses. Prints ready, and ends with its input
 */
#define _GNU_SOURCE
#include "check.h"
#include "cudadriver.h"
#include "cudart.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS, OUT_OF_MEMORY = 2 };

#ifdef LIBRARY

extern const char *ncclGetErrorString(int code);

CUdeviceptr take(size_t bytes)
{
	CUdeviceptr taken = 0;
	check(cuMemAlloc_v2(&taken, bytes) == SUCCESS, "cuMemAlloc");
	return taken;
}

static void *works(void *nothing)
{
	CUcontext context;
	CUdeviceptr address;
	CUmemGenericAllocationHandle handle;
	void *memory;
	CUmemAllocationProp wanted = { .type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 } };
	check(cuDevicePrimaryCtxRetain(&context, 0) == SUCCESS && cuCtxSetCurrent(context) == SUCCESS, "the context");
	check(cuMemFree_v2(take(4 << 20)) == SUCCESS, "cuMemFree");
	check(cuMemAlloc_v2(&address, (size_t)1 << 40) == OUT_OF_MEMORY, "a refused cuMemAlloc");
	check(cuMemCreate(&handle, (size_t)1 << 40, &wanted, 0) == OUT_OF_MEMORY, "a refused cuMemCreate");
	check(cuCtxSynchronize() == SUCCESS, "cuCtxSynchronize");
	check(cudaMalloc(&memory, 4 << 20) == cudaSuccess && cudaFree(memory) == cudaSuccess, "cudaMalloc");
	check(cudaMalloc(&memory, (size_t)1 << 40) == cudaErrorMemoryAllocation, "a refused cudaMalloc");
	check(cudaGetLastError() == cudaErrorMemoryAllocation, "the last error");
	check(strcmp(ncclGetErrorString(0), "no error") == 0, "ncclGetErrorString");
	return nothing;
}

__attribute__((constructor)) static void construct(void)
{
	pthread_t thread;
	if (getenv("LOADING_WAITS") != NULL)
		check(pthread_create(&thread, NULL, works, NULL) == 0 && pthread_join(thread, NULL) == 0, "a thread");
}

#else

static void *opened(const char *path)
{
	void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	check(library != NULL, dlerror());
	return library;
}

static void take_from(void *library, size_t bytes)
{
	CUdeviceptr (*take)(size_t) = (CUdeviceptr (*)(size_t))dlsym(library, "take");
	check(take != NULL && take(bytes) != 0, "take");
}

int main(int count, char **arguments)
{
	CUcontext context;
	char line[16];
	/* For a constructor that waits for ever. */
	alarm(300);
	check(cuInit(0) == SUCCESS && cudaDeviceSynchronize() == cudaSuccess, "CUDA");
	check(cuDevicePrimaryCtxRetain(&context, 0) == SUCCESS && cuCtxSetCurrent(context) == SUCCESS, "the context");
	if (strcmp(arguments[1], "waits") == 0) {
		setenv("LOADING_WAITS", "1", 1);
		opened(arguments[2]);
		printf("ok\n");
		return 0;
	}
	check(count == 4, "the arguments");
	void *first = opened(arguments[2]);
	take_from(first, 4 << 20);
	check(dlclose(first) == 0, "dlclose");
	take_from(opened(arguments[3]), 8 << 20);
	printf("ready\n");
	fflush(stdout);
	return fgets(line, sizeof line, stdin) != NULL;
}

#endif
