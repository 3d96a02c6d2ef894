/* Another preloaded library that replaces dlsym in the usual way: it finds the C library's by version, and calls it. It counts
 * the lookups, and replaces the driver's cuMemFree by its own function. */
#include "reach.h"

static int lookups, frees;
static free_fn real_free;

static int counting_free(uint64_t address)
{
	frees++;
	return real_free(address);
}

void *dlsym(void *handle, const char *name)
{
	static dlsym_fn real;
	static const char *const versions[] = {"GLIBC_2.34", "GLIBC_2.2.5", "GLIBC_2.17"};
	for (int i = 0; real == NULL && i < 3; i++)
		real = FUNCTION(dlsym_fn, dlvsym(RTLD_NEXT, "dlsym", versions[i]));
	void *found = real(handle, name);
	if (strncmp(name, "cuMem", 5) == 0)
		lookups++;
	if (strcmp(name, "cuMemFree_v2") == 0 && found != NULL) {
		real_free = FUNCTION(free_fn, found);
		return (void *)counting_free;
	}
	return found;
}

__attribute__((destructor)) static void tell(void)
{
	if (lookups)
		fprintf(stderr, "interposer: %s, %s\n", lookups ? "lookups" : "no lookups", frees ? "frees" : "no frees");
}
