/* A library or (with -DPROGRAM) a program that is linked with NCCL, or contains it. */
#include "uses.h"

extern void *nccl_make(void);
struct unique {
	char bytes[128];
};
extern int ncclCommInitRank(void **communicator, int ranks, struct unique id, int rank);
extern int ncclCommRegister(void *communicator, void *address, size_t bytes, void **handle);
extern int ncclCommDeregister(void *communicator, void *handle);
extern int ncclCommWindowRegister(void *communicator, void *address, size_t bytes, void **window, int flags);
extern int ncclCommWindowDeregister(void *communicator, void *window);
extern int ncclCommDestroy(void *communicator);
extern int ncclCommAbort(void *communicator);
extern const char *ncclGetErrorString(int code), *ncclGetLastError(void *communicator);

/* Uses calls instead of the functions' addresses: a caller is identified by the return address. */
static int add(void *c, void *address, size_t bytes, void **handle) { volatile int code = ncclCommRegister(c, address, bytes, handle); return code; }
static int take(void *c, void *handle) { volatile int code = ncclCommDeregister(c, handle); return code; }
static int add_window(void *c, void *address, size_t bytes, void **window, int flags) { volatile int code = ncclCommWindowRegister(c, address, bytes, window, flags); return code; }
static int take_window(void *c, void *window) { volatile int code = ncclCommWindowDeregister(c, window); return code; }
static int destroy(void *c) { volatile int code = ncclCommDestroy(c); return code; }
static int end(void *c) { volatile int code = ncclCommAbort(c); return code; }
static const char *explain(int code) { const char *volatile text = ncclGetErrorString(code); return text; }

void try_linked(const char *name)
{
	try_nccl(name, (struct nccl){nccl_make, add, take, add_window, take_window, destroy, end, explain, ncclGetLastError});
}

/* The same by jumps: the calls return to whoever has called these functions. */
static int jump_to_add(void *c, void *address, size_t bytes, void **handle) { return ncclCommRegister(c, address, bytes, handle); }
static int jump_to_take(void *c, void *handle) { return ncclCommDeregister(c, handle); }
static int jump_to_add_window(void *c, void *address, size_t bytes, void **window, int flags) { return ncclCommWindowRegister(c, address, bytes, window, flags); }
static int jump_to_take_window(void *c, void *window) { return ncclCommWindowDeregister(c, window); }
static int jump_to_destroy(void *c) { return ncclCommDestroy(c); }
static int jump_to_end(void *c) { return ncclCommAbort(c); }

static void *make(void)
{
	void *communicator = NULL;
	volatile int code = ncclCommInitRank(&communicator, 1, (struct unique){{0}}, 0);
	return code ? NULL : communicator;
}

struct nccl by_jumps(void)
{
	return (struct nccl){make, jump_to_add, jump_to_take, jump_to_add_window, jump_to_take_window, jump_to_destroy, jump_to_end, explain, ncclGetLastError};
}

#ifdef PROGRAM
#include <sys/wait.h>
#include <unistd.h>

int main(void)
{
	void *memory = NULL, *handle = NULL, *communicator = nccl_make();
	int state = 1;
	try_linked("linked");
	/* The result that the program itself gets. */
	int (*found)(void *, void *, size_t, void **) = (int (*)(void *, void *, size_t, void **))dlsym(RTLD_DEFAULT, "ncclCommRegister");
	cudaMalloc(&memory, 4 << 20);
	printf("looked up: %d", found(communicator, memory, 4 << 20, &handle));
	printf(" %d\n", pause_answers());
	fflush(stdout);
	pid_t child = fork();
	/* A child starts empty, and its calls go to NCCL. */
	if (child == 0)
		_exit(take(communicator, handle) || add(communicator, memory, 4 << 20, &handle) || destroy(communicator) ? 1 : 0);
	waitpid(child, &state, 0);
	printf("child: %d, parent: %d\n", state, pause_answers());
	printf("taken: %d", take(communicator, handle));
	printf(" %d\n", pause_answers());
	return 0;
}
#endif
