/*
 * Looks for CUDA in every way that needs no handle of its libraries, and tells what it finds: before any is loaded, after they were opened for
 * another's use, and for everybody's. The arguments are libraries to open so. As a library, it looks on behalf of itself.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>

void cudaMalloc(void) __attribute__((weak));
void cudaFree(void) __attribute__((weak));
void cuMemAlloc_v2(void) __attribute__((weak));
void cuLaunchKernel(void) __attribute__((weak));
void ncclCommInitRank(void) __attribute__((weak));

void look_up(const char *who)
{
	static const char *const names[] = {"cudaMalloc", "cudaFree", "cudaGetDevice", "cuMemAlloc_v2", "cuLaunchKernel", "cuGetProcAddress_v2",
					    "cuInit", "ncclCommInitRank", "nothing"};
	void *program = dlopen(NULL, RTLD_LAZY);
	const struct { const char *name; void *handle; } ways[] = {{"default", RTLD_DEFAULT}, {"next", RTLD_NEXT}, {"program", program}};
	for (size_t i = 0; i < sizeof names / sizeof *names; i++)
		for (size_t k = 0; k < sizeof ways / sizeof *ways; k++)
			for (int versioned = 0; versioned < 2; versioned++) {
				dlerror();
				errno = 77;
				void *found = versioned ? dlvsym(ways[k].handle, names[i], "CUDA_0") : dlsym(ways[k].handle, names[i]);
				int number = errno;
				const char *error = dlerror();
				/* With a version, the real one's text names both. */
				if (versioned && error != NULL)
					error = "an error";
				printf("%s: %s %s %d: %s, %s, %d\n", who, ways[k].name, names[i], versioned, found != NULL ? "found" : "null",
				       error != NULL ? error : "no error", number);
			}
}

#ifndef LIBRARY
/* The loader writes this into memory that is only read from then on. */
static void (*const constant)(void) = cudaMalloc;

static void look(const char *who)
{
	look_up(who);
	void (*volatile declared[])(void) = {cudaMalloc, cudaFree, cuMemAlloc_v2, cuLaunchKernel, ncclCommInitRank, constant};
	for (size_t i = 0; i < sizeof declared / sizeof *declared; i++)
		printf("%s: declared %zu: %s\n", who, i, declared[i] != NULL ? "found" : "null");
}

int main(int count, char **arguments)
{
	look("at first");
	void *library = dlopen("libabsent.so", RTLD_NOW | RTLD_LOCAL);
	if (library == NULL)
		return puts(dlerror()), 1;
	void (*library_looks_up)(const char *) = (void (*)(const char *))dlsym(library, "look_up");
	library_looks_up("a library, at first");
	for (int i = 1; i < count; i++)
		dlopen(arguments[i], RTLD_NOW | RTLD_LOCAL);
	look("when others have it");
	for (int i = 1; i < count; i++)
		dlopen(arguments[i], RTLD_NOW | RTLD_GLOBAL);
	look("when all have it");
	library_looks_up("a library, when all have it");
	return 0;
}
#endif
