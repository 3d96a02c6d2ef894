/* Opens a library whose constructor uses the GPU: itself, compiled with -DLIBRARY, as the first argument. Whoever waits in a constructor
 * has the loader's lock. Takes these commands, a line each:
 *
 *   open   opens it in a thread
 *   end    prints whether the constructor is through and the memory as it left it, and ends
 */
#define _GNU_SOURCE
#include "check.h"
#include "cudart.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { BYTES = 8 << 20, LAUNCHES = 100 };

#ifdef LIBRARY

unsigned char *constructed;

__attribute__((constructor)) static void construct(void)
{
	void *memory;
	check(cudaMalloc(&memory, BYTES) == cudaSuccess, "cudaMalloc");
	for (int i = 1; i <= LAUNCHES; i++) {
		check(cudaMemsetAsync(memory, i, BYTES, NULL) == cudaSuccess, "cudaMemsetAsync");
		usleep(5000);
	}
	constructed = memory;
}

#else

static void *open_library(void *path)
{
	return dlopen(path, RTLD_NOW | RTLD_GLOBAL);
}

int main(int count, char **arguments)
{
	static unsigned char expected[BYTES], found[BYTES];
	char line[16];
	void *memory, *library = NULL;
	pthread_t thread;
	check(count == 2 && cudaMalloc(&memory, BYTES) == cudaSuccess, "cudaMalloc");
	printf("ready\n");
	while (fflush(stdout), fgets(line, sizeof line, stdin)) {
		if (strcmp(line, "open\n") == 0) {
			check(pthread_create(&thread, NULL, open_library, arguments[1]) == 0, "pthread_create");
			printf("ok\n");
			continue;
		}
		check(pthread_join(thread, &library) == 0 && library != NULL, "dlopen");
		memset(expected, LAUNCHES, BYTES);
		memory = *(unsigned char **)dlsym(library, "constructed");
		check(cudaMemcpyAsync(found, memory, BYTES, cudaMemcpyDeviceToHost, NULL) == cudaSuccess, "cudaMemcpyAsync");
		check(cudaStreamSynchronize(NULL) == cudaSuccess, "cudaStreamSynchronize");
		check(memcmp(found, expected, BYTES) == 0, "what the constructor has left");
		printf("ok\n");
		return 0;
	}
}

#endif
