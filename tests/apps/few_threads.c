/* A limit of threads, as a container's, preloaded into a command: it gets the first $FEW_THREADS that it asks for. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*work)(void *), void *argument)
{
	static atomic_int count;
	int (*real)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);

	*(void **)&real = dlsym(RTLD_NEXT, "pthread_create");
	if (atomic_fetch_add(&count, 1) >= atoi(getenv("FEW_THREADS")))
		return EAGAIN;
	return real(thread, attributes, work, argument);
}
