/* Linked with the driver and with the shared runtime: prints whose functions the loader gave it, and which ones the runtime
 * returns. */
#include "reach.h"

extern int cuInit(unsigned flags);
extern int cuDevicePrimaryCtxRetain(void **context, int device);
extern int cuCtxSetCurrent(void *context);
extern int cuMemAlloc_v2(uint64_t *address, size_t bytes);
extern int cuMemFree_v2(uint64_t address);
extern int cuDeviceGetCount(int *count);
extern int cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags, int *status);
extern int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags, int *status);

int main(void)
{
	void *context = NULL, *function = NULL, *release = NULL;
	if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context))
		return 1;
	printf("linked %s %s\n", owner((void *)cuMemAlloc_v2), owner((void *)cuDeviceGetCount));
	printf("use %d\n", use((void *)cuMemAlloc_v2, (void *)cuMemFree_v2));
	printf("runtime %s %s\n", owner((void *)cudaGetDriverEntryPoint), owner((void *)cudaGetDriverEntryPointByVersion));
	static const char *const names[] = {"cuMemAlloc", "cuMemAllocAsync", "cuDeviceGetCount", "cuGetProcAddress", "cuNoSuchThing"};
	for (unsigned i = 0; i < sizeof names / sizeof *names; i++)
		for (unsigned flags = 0; flags < 3; flags += 2) {
			int status = -1, later = -1;
			int code = cudaGetDriverEntryPoint(names[i], &function, flags, &status);
			printf("entry point %s %u: %d %s %d", names[i], flags, code, owner(function), status);
			code = cudaGetDriverEntryPointByVersion(names[i], &function, 12000, flags, &later);
			printf(", %d %s %d\n", code, owner(function), later);
		}
	cudaGetDriverEntryPoint("cuMemAlloc", &function, 0, NULL);
	cudaGetDriverEntryPoint("cuMemFree", &release, 0, NULL);
	printf("use %d\n", use(function, release));
	return 0;
}
