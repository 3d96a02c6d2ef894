/*
 * The CUDA runtime's functions that differ.c calls, and their types. It calls them through a library, differ_runtime.c,
 * that is linked with the runtime: so a process can have two, each called from a library that knows only its own.
 */
#ifndef APPS_DIFFER_H
#define APPS_DIFFER_H

#include <stddef.h>
#include <stdint.h>

typedef int Code;
typedef uint64_t Address;
typedef void *Handle;

typedef struct {
	void *pointer;
	size_t pitch, width, height;
} Pitched;

typedef struct {
	size_t width, height, depth;
} Extent;

typedef struct {
	int type, device;
	void *device_pointer, *host_pointer;
	long reserved[8];
} Attributes;

typedef struct {
	char bytes[64];
} Ipc;

#define RUNTIME(X) \
	X(cudaSetDevice, (int a), (a)) \
	X(cudaGetDevice, (int *a), (a)) \
	X(cudaDeviceReset, (void), ()) \
	X(cudaDeviceSynchronize, (void), ()) \
	X(cudaMalloc, (Address *a, size_t b), (a, b)) \
	X(cudaMallocPitch, (Address *a, size_t *b, size_t c, size_t d), (a, b, c, d)) \
	X(cudaMalloc3D, (Pitched *a, Extent b), (a, b)) \
	X(cudaMallocAsync, (Address *a, size_t b, Handle c), (a, b, c)) \
	X(cudaMallocManaged, (Address *a, size_t b, unsigned c), (a, b, c)) \
	X(cudaMallocHost, (void **a, size_t b), (a, b)) \
	X(cudaFreeHost, (void *a), (a)) \
	X(cudaHostRegister, (void *a, size_t b, unsigned c), (a, b, c)) \
	X(cudaHostUnregister, (void *a), (a)) \
	X(cudaFree, (Address a), (a)) \
	X(cudaFreeAsync, (Address a, Handle b), (a, b)) \
	X(cudaMemcpy, (Address a, Address b, size_t c, int d), (a, b, c, d)) \
	X(cudaMemcpyAsync, (Address a, Address b, size_t c, int d, Handle e), (a, b, c, d, e)) \
	X(cudaMemset, (Address a, int b, size_t c), (a, b, c)) \
	X(cudaMemsetAsync, (Address a, int b, size_t c, Handle d), (a, b, c, d)) \
	X(cudaPointerGetAttributes, (Attributes *a, Address b), (a, b)) \
	X(cudaIpcGetMemHandle, (Ipc *a, Address b), (a, b)) \
	X(cudaGetLastError, (void), ()) \
	X(cudaPeekAtLastError, (void), ())

#endif
