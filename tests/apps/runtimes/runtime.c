/*
 * A CUDA runtime, as far as plugin.c needs one: with a last error and a current device of its own. As those up to CUDA 11, it makes a device's
 * context current only at the first call that needs it, so that the driver's current device may be another's until then.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

/* Which CUDA it is of, as 1000 times the major version. */
#ifndef VERSION
#define VERSION 12000
#endif

typedef uint64_t address;
typedef struct { char bytes[64]; } ipc_handle;

static __thread int device, last;
static void *primary[8];

/* The driver's function of this name, called with these arguments. */
#define DRIVER(name, types, ...) (((int (*) types)dlsym(dlopen("libcuda.so.1", RTLD_NOW), name))(__VA_ARGS__))

static int keep(int answer)
{
	if (answer != 0)
		last = answer;
	return answer;
}

static int ready(void)
{
	int answer = DRIVER("cuInit", (unsigned), 0);
	if (answer == 0 && primary[device] == NULL)
		answer = DRIVER("cuDevicePrimaryCtxRetain", (void **, int), &primary[device], device);
	return answer != 0 ? answer : DRIVER("cuCtxSetCurrent", (void *), primary[device]);
}

#define WHEN_READY(name, types, ...) \
	int answer = ready(); \
	return keep(answer != 0 ? answer : DRIVER(name, types, __VA_ARGS__))

int cudaRuntimeGetVersion(int *version)
{
	*version = VERSION;
	return 0;
}

int cudaSetDevice(int ordinal)
{
	device = ordinal;
#if VERSION >= 12000
	return keep(ready());
#else
	return 0;
#endif
}

int cudaGetDevice(int *ordinal)
{
	*ordinal = device;
	return 0;
}

int cudaGetLastError(void)
{
	int answer = last;
	last = 0;
	return answer;
}

int cudaPeekAtLastError(void)
{
	return last;
}

int cudaMalloc(void **pointer, size_t bytes)
{
	int answer = ready();
	if (answer == 0)
		answer = DRIVER("cuMemAlloc_v2", (address *, size_t), (address *)pointer, bytes);
	if (answer != 0)
		*pointer = NULL;
	return keep(answer);
}

int cudaFree(void *pointer)
{
	if (pointer == NULL)
		return keep(ready());
	WHEN_READY("cuMemFree_v2", (address), (address)pointer);
}

int cudaMallocAsync(void **pointer, size_t bytes, void *stream)
{
	WHEN_READY("cuMemAllocAsync", (address *, size_t, void *), (address *)pointer, bytes, stream);
}

int cudaFreeAsync(void *pointer, void *stream)
{
	WHEN_READY("cuMemFreeAsync", (address, void *), (address)pointer, stream);
}

int cudaIpcGetMemHandle(ipc_handle *handle, void *pointer)
{
	WHEN_READY("cuIpcGetMemHandle", (ipc_handle *, address), handle, (address)pointer);
}

int cudaIpcOpenMemHandle(void **pointer, ipc_handle handle, unsigned flags)
{
	WHEN_READY("cuIpcOpenMemHandle_v2", (address *, ipc_handle, unsigned), (address *)pointer, handle, flags);
}

int cudaIpcCloseMemHandle(void *pointer)
{
	WHEN_READY("cuIpcCloseMemHandle", (address), (address)pointer);
}

int cudaDeviceReset(void)
{
	int answer = ready();
	primary[device] = NULL;
	return keep(answer != 0 ? answer : DRIVER("cuDevicePrimaryCtxReset_v2", (int), device));
}
