/* Shared by the programs in this folder: who defines a function, and the driver's prototypes. */
#ifndef REACH_H
#define REACH_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int (*init_fn)(unsigned flags);
typedef int (*retain_fn)(void **context, int device);
typedef int (*set_current_fn)(void *context);
typedef int (*alloc_fn)(uint64_t *address, size_t bytes);
typedef int (*free_fn)(uint64_t address);
typedef int (*set_fn)(uint64_t address, unsigned char value, size_t bytes);
typedef int (*get_v1_fn)(const char *name, void **function, int version, uint64_t flags);
typedef int (*get_v2_fn)(const char *name, void **function, int version, uint64_t flags, int *status);
typedef void *(*dlsym_fn)(void *handle, const char *name);
typedef int (*int_fn)(void);

/* The file name of the object that contains an address; "null" for null. */
static inline const char *owner(void *address)
{
	Dl_info info;
	if (address == NULL)
		return "null";
	if (dladdr(address, &info) == 0 || info.dli_fname == NULL)
		return "nobody";
	const char *slash = strrchr(info.dli_fname, '/');
	return slash ? slash + 1 : info.dli_fname;
}

/* POSIX lets dlsym return a function; C has no cast for it. */
#define FUNCTION(type, pointer) (*(type *)&(void *){pointer})

/* Makes the first device's primary context current, through a handle of the driver. */
static inline int start(void *driver)
{
	void *context = NULL;
	return FUNCTION(init_fn, dlsym(driver, "cuInit"))(0) ||
	       FUNCTION(retain_fn, dlsym(driver, "cuDevicePrimaryCtxRetain"))(&context, 0) ||
	       FUNCTION(set_current_fn, dlsym(driver, "cuCtxSetCurrent"))(context);
}

/* Allocates and frees through these functions. Returns the first code other than 0. */
static inline int use(void *allocate, void *release)
{
	uint64_t address = 0;
	int code = FUNCTION(alloc_fn, allocate)(&address, 4 << 20);
	if (code)
		return code;
	return address == 0 ? -1 : FUNCTION(free_fn, release)(address);
}
#endif
