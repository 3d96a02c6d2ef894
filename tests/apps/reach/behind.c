/* A library with the driver's functions, each of which calls the one that it finds: in the driver by name, through
 * cuGetProcAddress (BY_PROC_ADDRESS), or in the driver that it stands in for (STANDS_IN), whose path is in REAL_DRIVER. */
#include "reach.h"
#include <unistd.h>

typedef uint64_t word;
typedef int (*any_fn)(word, word, word, word, word, word, word, word, word, word, word);

static int calls;

static any_fn find(const char *symbol, const char *name)
{
#ifdef STANDS_IN
	void *driver = dlopen(getenv("REAL_DRIVER"), RTLD_NOW | RTLD_LOCAL);
#else
	void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
#endif
	void *found = driver ? dlsym(driver, symbol) : NULL;
#ifdef BY_PROC_ADDRESS
	get_v2_fn get = FUNCTION(get_v2_fn, dlsym(driver, "cuGetProcAddress_v2"));
	int status = -1;
	if (get(name, &found, 13000, 0, &status))
		found = NULL;
#endif
	if (found == NULL) {
		fprintf(stderr, "behind: no %s (%s)\n", symbol, name);
		_exit(3);
	}
	return FUNCTION(any_fn, found);
}

/* A function that takes the same arguments as the driver's. */
#define FORWARD(symbol, name) \
	int symbol(word a, word b, word c, word d, word e, word f, word g, word h, word i, word j, word k) \
	{ \
		static __thread int depth; \
		static any_fn real; \
		if (real == NULL) \
			real = find(#symbol, name); \
		if (++depth > 100) { \
			fprintf(stderr, "behind: %s comes back\n", #symbol); \
			_exit(42); \
		} \
		calls++; \
		int code = real(a, b, c, d, e, f, g, h, i, j, k); \
		depth--; \
		return code; \
	}
#ifdef STANDS_IN
#define WHOLE(symbol) FORWARD(symbol, #symbol)
#include "driver_names.h"
#else
FORWARD(cuMemAlloc_v2, "cuMemAlloc")
FORWARD(cuMemFree_v2, "cuMemFree")
FORWARD(cuMemsetD8_v2, "cuMemsetD8")
#endif

__attribute__((destructor)) static void tell(void)
{
	if (calls)
		fprintf(stderr, "behind: called\n");
}
