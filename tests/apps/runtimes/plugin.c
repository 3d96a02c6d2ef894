/* A library that is linked with one of several runtimes. Tells of each call what it answers, and what the runtime says then. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef struct { char bytes[64]; } ipc_handle;
int cudaRuntimeGetVersion(int *version);
int cudaSetDevice(int device);
int cudaGetDevice(int *device);
int cudaGetLastError(void);
int cudaMalloc(void **pointer, size_t bytes);
int cudaFree(void *pointer);
int cudaMallocAsync(void **pointer, size_t bytes, void *stream);
int cudaFreeAsync(void *pointer, void *stream);
int cudaIpcGetMemHandle(ipc_handle *handle, void *pointer);
int cudaIpcOpenMemHandle(void **pointer, ipc_handle handle, unsigned flags);
int cudaIpcCloseMemHandle(void *pointer);
int cudaDeviceReset(void);
int cuPointerGetAttribute(void *value, int attribute, uint64_t pointer);

enum { DEVICE_ORDINAL = 9, LAZY = 1, MIB = 1 << 20 };

static const char *name;

static void tell(const char *call, int answer)
{
	int device = -1;
	cudaGetDevice(&device);
	printf("%s: %s %d, last error %d, device %d\n", name, call, answer, cudaGetLastError(), device);
}

void set_name(const char *of_library)
{
	int version = 0;
	name = of_library;
	cudaRuntimeGetVersion(&version);
	printf("%s: runtime %d\n", name, version);
}

void set_device(int device)
{
	tell("cudaSetDevice", cudaSetDevice(device));
}

/* On the current device, large and small, in order and not. */
void allocate(void)
{
	size_t sizes[] = {8 * MIB, 1024};
	for (int i = 0; i < 4; i++) {
		void *pointer = NULL;
		int in_order = i >= 2, device = -1;
		int answer = in_order ? cudaMallocAsync(&pointer, sizes[i % 2], NULL) : cudaMalloc(&pointer, sizes[i % 2]);
		if (answer == 0)
			cuPointerGetAttribute(&device, DEVICE_ORDINAL, (uintptr_t)pointer);
		printf("%s: memory on device %d\n", name, device);
		tell(in_order ? "cudaMallocAsync" : "cudaMalloc", answer);
		tell(in_order ? "cudaFreeAsync" : "cudaFree", in_order ? cudaFreeAsync(pointer, NULL) : cudaFree(pointer));
	}
}

/* Calls that fail, whoever answers them. */
void fail(void)
{
	void *pointer = (void *)1, *own = NULL;
	ipc_handle handle, odd;
	tell("cudaMalloc of too much", cudaMalloc(&pointer, (size_t)1 << 50));
	printf("%s: a pointer %d\n", name, pointer != NULL);
	tell("cudaMallocAsync of too much", cudaMallocAsync(&pointer, (size_t)1 << 50, NULL));
	tell("cudaFree of nothing", cudaFree((void *)64));
	tell("cudaMalloc", cudaMalloc(&own, 8 * MIB));
	tell("cudaIpcGetMemHandle", cudaIpcGetMemHandle(&handle, own));
	tell("cudaIpcOpenMemHandle with odd flags", cudaIpcOpenMemHandle(&pointer, handle, 7));
	tell("cudaIpcOpenMemHandle of its own", cudaIpcOpenMemHandle(&pointer, handle, LAZY));
	memset(&odd, 0x5a, sizeof odd);
	tell("cudaIpcOpenMemHandle of nobody's", cudaIpcOpenMemHandle(&pointer, odd, LAZY));
	tell("cudaIpcCloseMemHandle of nothing", cudaIpcCloseMemHandle((void *)64));
	tell("cudaFree", cudaFree(own));
}

/* What another library's calls have left here. */
void look(void)
{
	tell("nothing", 0);
}

void reset(void)
{
	tell("cudaDeviceReset", cudaDeviceReset());
}
