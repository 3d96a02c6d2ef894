/* Stands in for NCCL and its registrations: as in NCCL, each range that no known one contains gets a handle, and handles are counted. A
 * communicator of another NCCL is an invalid argument. Each NCCL explains errors with its own NAME. */
#include <stdint.h>
#include <stdlib.h>

#ifndef NAME
#define NAME "NCCL"
#endif

struct registration {
	uintptr_t begin, end;
	int times;
	struct registration *next;
};

struct communicator {
	const int *owner;
	struct registration *first;
};

static int own, failure, called, gives_none;

/* For the tests. */
void *nccl_make(void)
{
	struct communicator *made = calloc(1, sizeof *made);
	made->owner = &own;
	return made;
}

struct unique {
	char bytes[128];
};

int ncclCommInitRank(struct communicator **made, int ranks, struct unique id, int rank)
{
	(void)id;
	called++;
	*made = nccl_make();
	return ranks == 1 && rank == 0 ? 0 : 4;
}

/* The next call fails with this code. */
void nccl_fail(int answer) { failure = answer; }
/* Registrations get no handle, as with NCCL_LOCAL_REGISTER=0. */
void nccl_give_none(int whether) { gives_none = whether; }
int nccl_called(void) { return called; }

const char *ncclGetErrorString(int code) { return code ? NAME : "no error"; }
static const char *last_error = "";
const char *ncclGetLastError(void *communicator) { (void)communicator; return last_error; }

static int check(const struct communicator *communicator)
{
	int answer = communicator->owner == &own ? failure : 4;
	called++;
	failure = 0;
	return answer;
}

int ncclCommRegister(struct communicator *communicator, void *address, size_t bytes, void **handle)
{
	int answer = check(communicator);
	if (answer)
		return answer;
	if (gives_none) {
		*handle = NULL;
		return 0;
	}
	uintptr_t begin = (uintptr_t)address, end = begin + bytes;
	struct registration *known = communicator->first;
	while (known && (known->begin > begin || known->end < end))
		known = known->next;
	if (!known) {
		known = malloc(sizeof *known);
		*known = (struct registration){begin, end, 0, communicator->first};
		communicator->first = known;
	}
	known->times++;
	*handle = known;
	return 0;
}

int ncclCommDeregister(struct communicator *communicator, void *handle)
{
	int answer = check(communicator);
	struct registration **place = &communicator->first;
	if (answer)
		return answer;
	while (*place && *place != handle)
		place = &(*place)->next;
	if (!*place) {
		last_error = ncclGetErrorString(5);
		return 5;
	}
	struct registration *known = *place;
	if (--known->times == 0) {
		*place = known->next;
		free(known);
	}
	return 0;
}

/* One of NCCL's functions calls another through its exported name, with a jump, as a compiler may do. */
int ncclCommWindowRegister(struct communicator *communicator, void *address, size_t bytes, void **window, int flags)
{
	(void)flags;
	return ncclCommRegister(communicator, address, bytes, window);
}

int ncclCommWindowDeregister(struct communicator *communicator, void *window) { return ncclCommDeregister(communicator, window); }

static int end(struct communicator *communicator)
{
	int answer = check(communicator);
	if (answer == 0)
		communicator->owner = NULL;
	return answer;
}

int ncclCommDestroy(struct communicator *communicator) { return end(communicator); }
int ncclCommAbort(struct communicator *communicator) { return end(communicator); }
