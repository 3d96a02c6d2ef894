/* A user of NCCL: registers managed memory, and checks what a pause does with it. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

struct nccl {
	void *(*make)(void);
	int (*add)(void *communicator, void *address, size_t bytes, void **handle);
	int (*take)(void *communicator, void *handle);
	int (*add_window)(void *communicator, void *address, size_t bytes, void **window, int flags);
	int (*take_window)(void *communicator, void *window);
	int (*destroy)(void *communicator);
	int (*abort)(void *communicator);
	const char *(*explain)(int code), *(*last_error)(void *communicator);
};

extern int cudaMalloc(void **pointer, size_t bytes);
extern int cudaFree(void *pointer);

/* The result of a pause: 16 if something is registered. */
static int pause_answers(void)
{
	int (*pause)(const char *, long long, int) = (int (*)(const char *, long long, int))dlsym(RTLD_DEFAULT, "vramctl_pause");
	int (*resume)(const char *, long long) = (int (*)(const char *, long long))dlsym(RTLD_DEFAULT, "vramctl_resume");
	int answer = pause(NULL, 10000, 0);
	return answer ? answer : resume(NULL, 10000);
}

/* Prints the results of calls and pauses. */
static inline void try_nccl(const char *name, struct nccl nccl)
{
	void *memory = NULL, *handle = NULL, *window = NULL, *one = nccl.make(), *other = nccl.make();
	printf("%s: malloc %d", name, cudaMalloc(&memory, 4 << 20));
	printf(", add %d", nccl.add(one, memory, 1 << 20, &handle));
	printf(" %d", pause_answers());
	printf(", take %d", nccl.take(one, handle));
	printf(" %d", pause_answers());
	printf(", window %d", nccl.add_window(one, memory, 4 << 20, &window, 1));
	printf(" %d", pause_answers());
	printf(", take %d", nccl.take_window(one, window));
	printf(" %d", pause_answers());
	nccl.add(one, memory, 4 << 20, &handle);
	nccl.add(other, memory, 4 << 20, &handle);
	printf(", destroy %d", nccl.destroy(one));
	printf(" %d", pause_answers());
	nccl.take(other, NULL);
	printf(", abort %d", nccl.abort(other));
	printf(" %d", pause_answers());
	printf(", %s, %s, %s\n", nccl.explain(0), nccl.explain(1), nccl.last_error(NULL));
	cudaFree(memory);
}
