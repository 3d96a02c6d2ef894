/* Stands in for an NCCL with communicators across processes, as far as they can be observed from outside.
 *
 * As in NCCL (src/mem_manager.cc): suspending waits for the device and for all ranks, then copies the memory that must be kept to the
 * host, unmaps and releases; resuming creates new memory at the old addresses, copies back and waits for all ranks. A rank that has ended
 * is a remote error. A collective reads the memory, so it fails on a suspended communicator. It finds the driver as NCCL does.
 *
 * With -DVERSION=21210, as NCCL before 2.14, communicators that are made in a group exist only at its end, and their variables are not written
 * before. With -DVERSION=22703, it cannot suspend. $SIMGPU_DIR/nccl-fail makes a rank's call fail: "suspend RANK CODE" before anything is done,
 * "half RANK CODE" after half of the memory is released, "resume RANK CODE" when the memory is back; "sum RANK CODE". */
#define _GNU_SOURCE
#include "../cudadriver.h"
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#ifndef VERSION
#define VERSION 22907
#endif

enum { SUCCESS, CUDA_ERROR, SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, IN_PROGRESS };
enum { MOST_RANKS = 16, MIB = 1 << 20, SCRATCH = 8 * MIB, OFFLOAD = 2 * MIB, PERSIST = 2 * MIB };

typedef struct { char bytes[128]; } unique_id;
typedef struct { size_t size; unsigned magic, version; int blocking, ctas[3]; const char *net; int split_share; } config;

/* The ranks' shared state, in a file. */
struct world {
	_Atomic int arrived, round, pids[MOST_RANKS];
	_Atomic long values[MOST_RANKS];
};

struct piece {
	CUdeviceptr at;
	size_t bytes;
	CUmemGenericAllocationHandle handle;
	char *kept;
};

struct communicator {
	const void *owner;
	struct world *world;
	int rank, ranks, device, children, shared, suspended;
	char name[160];
	struct piece scratch, offload, persist;
};

static const int own;
static __thread char last_error[200];

static void *cuda(const char *name)
{
	void *function = dlsym(dlopen("libcuda.so.1", RTLD_NOW), name);
	if (!function)
		abort();
	return function;
}
#define CU(name) ((__typeof__(&name))cuda(#name))

static int has_ended(int pid)
{
	char path[64], state = 'X';
	snprintf(path, sizeof path, "/proc/%d/stat", pid);
	FILE *file = fopen(path, "r");
	if (file) {
		if (fscanf(file, "%*d %*[^)]) %c", &state) != 1)
			state = 'X';
		fclose(file);
	}
	return state == 'X' || state == 'Z';
}

/* Waits for all ranks. */
static int barrier(struct communicator *c)
{
	struct world *world = c->world;
	int round = world->round;
	if (atomic_fetch_add(&world->arrived, 1) + 1 == c->ranks) {
		world->arrived = 0;
		world->round++;
		return SUCCESS;
	}
	while (world->round == round) {
		for (int rank = 0; rank < c->ranks; rank++)
			if (world->pids[rank] && has_ended(world->pids[rank]) && world->round == round) {
				snprintf(last_error, sizeof last_error, "rank %d has ended", rank);
				return REMOTE_ERROR;
			}
		nanosleep(&(struct timespec){0, 1000000}, NULL);
	}
	return SUCCESS;
}

static int fill(struct communicator *c, struct piece *piece)
{
	CUmemAllocationProp what = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, c->device}};
	CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, c->device}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
	if (CU(cuMemCreate)(&piece->handle, piece->bytes, &what, 0))
		return CUDA_ERROR;
	return CU(cuMemMap)(piece->at, piece->bytes, 0, piece->handle, 0) || CU(cuMemSetAccess)(piece->at, piece->bytes, &access, 1) ? CUDA_ERROR : SUCCESS;
}

static void empty(struct piece *piece)
{
	CU(cuMemUnmap)(piece->at, piece->bytes);
	CU(cuMemRelease)(piece->handle);
	piece->handle = 0;
}

static int make(struct piece *piece, struct communicator *c, size_t bytes)
{
	piece->bytes = bytes;
	return CU(cuMemAddressReserve)(&piece->at, bytes, 0, 0, 0) ? CUDA_ERROR : fill(c, piece);
}

static struct communicator *check(struct communicator *c) { return c && c->owner == &own ? c : NULL; }

#if VERSION < 21400
/* What the end of the group will make. */
static struct { struct communicator **made; int ranks, rank; char name[160]; } later[MOST_RANKS];
static int groups, waiting;

static int join(struct communicator **made, int ranks, const char *name, int rank);

int ncclGroupStart(void) { groups++; return SUCCESS; }

int ncclGroupEnd(void)
{
	int answer = SUCCESS;
	for (groups--; groups == 0 && waiting > 0 && answer == SUCCESS; waiting--)
		answer = join(later[waiting - 1].made, later[waiting - 1].ranks, later[waiting - 1].name, later[waiting - 1].rank);
	return answer;
}
#else
int ncclGroupStart(void) { return SUCCESS; }
int ncclGroupEnd(void) { return SUCCESS; }
#endif

static int join(struct communicator **made, int ranks, const char *name, int rank)
{
#if VERSION < 21400
	if (groups > 0) {
		later[waiting].made = made;
		later[waiting].ranks = ranks;
		later[waiting].rank = rank;
		snprintf(later[waiting++].name, sizeof later->name, "%s", name);
		return SUCCESS;
	}
#endif
	char path[PATH_MAX], pattern[OFFLOAD];
	struct communicator *c = calloc(1, sizeof *c);
	snprintf(c->name, sizeof c->name, "%s", name);
	snprintf(path, sizeof path, "%s/nccl-%s", getenv("SIMGPU_DIR"), c->name);
	int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	if (file < 0 || ftruncate(file, sizeof *c->world))
		return SYSTEM_ERROR;
	c->world = mmap(NULL, sizeof *c->world, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	close(file);
	c->owner = &own;
	c->rank = rank;
	c->ranks = ranks;
	c->world->pids[rank] = getpid();
	memset(pattern, 0x5a, sizeof pattern);
	if (make(&c->scratch, c, SCRATCH) || make(&c->offload, c, OFFLOAD) || make(&c->persist, c, PERSIST) ||
	    CU(cuMemcpyHtoD_v2)(c->offload.at, pattern, OFFLOAD))
		return CUDA_ERROR;
	*made = c;
	return barrier(c);
}

int ncclGetVersion(int *version) { *version = VERSION; return SUCCESS; }
const char *ncclGetErrorString(int code) { return code == CUDA_ERROR ? "unhandled cuda error" : code == INVALID_USAGE ? "invalid usage" : code == REMOTE_ERROR ? "remote process exited or there was a network error" : "error"; }
const char *ncclGetLastError(struct communicator *c) { (void)c; return last_error; }

int ncclCommInitRank(struct communicator **made, int ranks, unique_id id, int rank) { return join(made, ranks, id.bytes, rank); }

int ncclCommInitRankConfig(struct communicator **made, int ranks, unique_id id, int rank, config *with)
{
	int answer = join(made, ranks, id.bytes, rank);
	return answer == SUCCESS && with && with->blocking == 0 ? IN_PROGRESS : answer;
}

int ncclCommInitRankScalable(struct communicator **made, int ranks, int rank, int ids, unique_id *of, config *with)
{
	return ids > 0 ? ncclCommInitRankConfig(made, ranks, of[ids - 1], rank, with) : INVALID_ARGUMENT;
}

int ncclCommInitAll(struct communicator **made, int ranks, const int *devices)
{
	(void)devices;
	return ranks == 1 ? join(made, 1, "alone", 0) : INVALID_ARGUMENT;
}

/* By the parity of the ranks, so that each knows how many there are. */
int ncclCommSplit(struct communicator *c, int color, int key, struct communicator **made, config *with)
{
	char name[200];
	(void)key;
	if (!check(c))
		return INVALID_ARGUMENT;
	snprintf(name, sizeof name, "%.100s-%d-%d", c->name, c->children++, color);
	*made = NULL;
	if (color < 0)
		return SUCCESS;
	int answer = join(made, color == 2 ? c->ranks : 1, name, color == 2 ? c->rank : 0);
	if (with && with->split_share == 1)
		(*made)->shared = c->shared = 1;
	return answer;
}

int ncclCommShrink(struct communicator *c, int *excluded, int count, struct communicator **made, config *with, int flags)
{
	char name[200];
	(void)excluded;
	(void)with;
	(void)flags;
	snprintf(name, sizeof name, "%.100s-shrunk-%d", c->name, c->children++);
	return c->rank == 0 && c->ranks - count == 1 ? join(made, 1, name, 0) : INVALID_ARGUMENT;
}

int ncclCommCount(struct communicator *c, int *ranks) { return check(c) ? (*ranks = c->ranks, SUCCESS) : INVALID_ARGUMENT; }
int ncclCommCuDevice(struct communicator *c, int *device) { return check(c) ? (*device = c->device, SUCCESS) : INVALID_ARGUMENT; }

int ncclCommDestroy(struct communicator *c)
{
	if (!check(c))
		return INVALID_ARGUMENT;
	c->owner = NULL;
	c->world->pids[c->rank] = 0;
	if (c->scratch.handle)
		empty(&c->scratch);
	if (c->offload.handle)
		empty(&c->offload);
	empty(&c->persist);
	return SUCCESS;
}

int ncclCommAbort(struct communicator *c) { return ncclCommDestroy(c); }
int ncclCommFinalize(struct communicator *c) { return check(c) ? SUCCESS : INVALID_ARGUMENT; }

static int fails(const char *verb, int rank)
{
	char path[PATH_MAX], what[20];
	int which, code;
	snprintf(path, sizeof path, "%s/nccl-fail", getenv("SIMGPU_DIR"));
	FILE *file = fopen(path, "r");
	if (!file)
		return 0;
	int read = fscanf(file, "%19s %d %d", what, &which, &code);
	fclose(file);
	if (read != 3 || strcmp(what, verb) || (which >= 0 && which != rank))
		return 0;
	snprintf(last_error, sizeof last_error, "told to fail at rank %d", rank);
	return code;
}

/* A collective of one number. */
int sum_over_ranks(struct communicator *c, long value, long *sum)
{
	char memory[OFFLOAD];
	int answer = check(c) ? fails("sum", c->rank) : INVALID_ARGUMENT;
	if (answer)
		return answer;
	if (CU(cuMemcpyDtoH_v2)(memory, c->offload.at, OFFLOAD) || CU(cuMemsetD8_v2)(c->scratch.at, 1, SCRATCH))
		return CUDA_ERROR;
	for (size_t at = 0; at < OFFLOAD; at++)
		if (memory[at] != 0x5a)
			return INTERNAL_ERROR;
	c->world->values[c->rank] = value;
	answer = barrier(c);
	for (int rank = *sum = 0; rank < c->ranks; rank++)
		*sum += c->world->values[rank];
	return answer ? answer : barrier(c);
}

#if VERSION >= 22907
int ncclCommSuspend(struct communicator *c, int flags)
{
	int answer;
	last_error[0] = 0;
	if (!check(c) || flags != 1)
		return INVALID_ARGUMENT;
	if (c->shared || c->suspended)
		return INVALID_USAGE;
	if ((answer = fails("suspend", c->rank)))
		return answer;
	if (CU(cuCtxSynchronize)())
		return CUDA_ERROR;
	if ((answer = barrier(c)))
		return answer;
	empty(&c->scratch);
	if ((answer = fails("half", c->rank)))
		return answer;
	c->offload.kept = malloc(OFFLOAD);
	if (CU(cuMemcpyDtoH_v2)(c->offload.kept, c->offload.at, OFFLOAD))
		return CUDA_ERROR;
	empty(&c->offload);
	c->suspended = 1;
	return SUCCESS;
}

int ncclCommResume(struct communicator *c)
{
	int answer;
	last_error[0] = 0;
	if (!check(c))
		return INVALID_ARGUMENT;
	if (!c->suspended)
		return INVALID_USAGE;
	if ((!c->scratch.handle && (answer = fill(c, &c->scratch))) || (!c->offload.handle && (answer = fill(c, &c->offload))))
		return answer;
	if (c->offload.kept && CU(cuMemcpyHtoD_v2)(c->offload.at, c->offload.kept, OFFLOAD))
		return CUDA_ERROR;
	free(c->offload.kept);
	c->offload.kept = NULL;
	if ((answer = fails("resume", c->rank)) || (answer = barrier(c)))
		return answer;
	c->suspended = 0;
	return fails("late", c->rank);
}

int ncclCommMemStats(struct communicator *c, int which, uint64_t *value)
{
	if (!check(c))
		return INVALID_ARGUMENT;
	*value = (uint64_t[]){SCRATCH + OFFLOAD, c->suspended, PERSIST, SCRATCH + OFFLOAD + PERSIST}[which & 3];
	return SUCCESS;
}
#endif
