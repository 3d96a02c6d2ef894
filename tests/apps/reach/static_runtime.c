/* Stands in for a program with a static runtime: its own cudaMalloc, which no preloaded library can replace, gets everything from
 * the driver by name, version and flags. */
#include "reach.h"

static get_v2_fn get;

static void *driver_function(const char *name)
{
	void *function = NULL;
	int status = -1;
	return get(name, &function, 12080, 0, &status) == 0 && status == 0 ? function : NULL;
}

int cudaMalloc(void **pointer, size_t bytes)
{
	if (get == NULL) {
		void *driver = dlopen("libcuda.so.1", RTLD_NOW);
		if (driver == NULL || start(driver))
			return 35;
		get = FUNCTION(get_v2_fn, dlsym(driver, "cuGetProcAddress_v2"));
		/* As the real one does: from then on it uses the function that this returned. */
		get = FUNCTION(get_v2_fn, driver_function("cuGetProcAddress"));
	}
	uint64_t address = 0;
	int code = FUNCTION(alloc_fn, driver_function("cuMemAlloc"))(&address, bytes);
	*pointer = (void *)(uintptr_t)address;
	return code;
}

int main(void)
{
	void *pointer = NULL;
	int code = cudaMalloc(&pointer, 4 << 20);
	printf("runtime %s\n", owner((void *)cudaMalloc));
	printf("driver %s %s\n", owner(driver_function("cuMemAlloc")), owner(driver_function("cuMemFree")));
	printf("use %d %d\n", code, FUNCTION(free_fn, driver_function("cuMemFree"))((uint64_t)(uintptr_t)pointer));
	return 0;
}
