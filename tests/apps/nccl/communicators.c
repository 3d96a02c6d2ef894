/* Stands in for an NCCL with communicators across processes, as far as they can be observed from outside: each rank has a buffer that all
 * other ranks have open, by the transport that NCCL would choose (src/transport/p2p.cc, shm.cc):
 *
 *   by default              memory of cuMemCreate, passed by descriptor
 *   NCCL_CUMEM_ENABLE=0     memory of cuMemAlloc, passed by CUDA IPC
 *   NCCL_P2P_DISABLE=1      memory of the host from cuMemCreate, passed by descriptor (NCCL_CUMEM_HOST_ENABLE=1), else
 *                           shared memory of the host, registered with CUDA
 *
 * A collective writes to the others' buffers, and reads what they hold. It finds the driver as NCCL does.
 *
 * With -DVERSION=21210, as NCCL before 2.14, communicators that are made in a group exist only at its end, and their variables are not written
 * before. "sum RANK CODE" in $SIMGPU_DIR/nccl-fail makes a rank's collective fail. */
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
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#ifndef VERSION
#define VERSION 22907
#endif

enum { SUCCESS, CUDA_ERROR, SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, IN_PROGRESS };
enum { MOST_RANKS = 16, MIB = 1 << 20, BUFFER = 2 * MIB, SLOTS = 4096, PATTERN = 0x5a };

typedef struct { char bytes[128]; } unique_id;
enum transport { BY_DESCRIPTOR, BY_IPC, BY_HOST, BY_HOST_DESCRIPTOR };

/* The ranks' shared state, in a file. */
struct world {
	_Atomic int arrived, round, pids[MOST_RANKS];
	CUipcMemHandle passed[MOST_RANKS];
};

struct communicator {
	const void *owner;
	struct world *world;
	enum transport transport;
	int rank, ranks, device, children;
	char name[160];
	/* The own buffer, and the others'. */
	CUdeviceptr at[MOST_RANKS];
	CUmemGenericAllocationHandle handles[MOST_RANKS];
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

static int is_set(const char *variable, int otherwise)
{
	const char *text = getenv(variable);
	return text ? atoi(text) : otherwise;
}

/* Maps a rank's memory of cuMemCreate. That of the host is for the host, too. */
static int map(struct communicator *c, int rank)
{
	CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, c->device}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
	CUmemAccessDesc of_host = {{CU_MEM_LOCATION_TYPE_HOST_NUMA, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
	CUdeviceptr *at = &c->at[rank];
	return CU(cuMemAddressReserve)(at, BUFFER, 0, 0, 0) || CU(cuMemMap)(*at, BUFFER, 0, c->handles[rank], 0) ||
	       CU(cuMemSetAccess)(*at, BUFFER, &access, 1) ||
	       (c->transport == BY_HOST_DESCRIPTOR && CU(cuMemSetAccess)(*at, BUFFER, &of_host, 1)) ? CUDA_ERROR : SUCCESS;
}

/* Maps a rank's memory of the host. */
static int map_host(struct communicator *c, int rank)
{
	char path[PATH_MAX];
	snprintf(path, sizeof path, "%s/nccl-%s-%d.shm", getenv("SIMGPU_DIR"), c->name, rank);
	int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	if (file < 0 || ftruncate(file, BUFFER))
		return SYSTEM_ERROR;
	void *at = mmap(NULL, BUFFER, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	close(file);
	c->at[rank] = (CUdeviceptr)at;
	return at == MAP_FAILED ? SYSTEM_ERROR : CU(cuMemHostRegister_v2)(at, BUFFER, 0) ? CUDA_ERROR : SUCCESS;
}

/* The address of a rank's socket: in no folder, whose path may be too long. */
static socklen_t address_of(struct communicator *c, int rank, struct sockaddr_un *address)
{
	struct stat folder;
	stat(getenv("SIMGPU_DIR"), &folder);
	*address = (struct sockaddr_un){.sun_family = AF_UNIX};
	int length = snprintf(address->sun_path + 1, sizeof address->sun_path - 1, "nccl-%lu-%.60s-%d", (unsigned long)folder.st_ino, c->name, rank);
	return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
}

/* Sends the own rank and descriptor, or receives another's. */
static int pass(int connection, int *rank, int *file, int sends)
{
	union { char bytes[CMSG_SPACE(sizeof(int))]; struct cmsghdr aligned; } control = {{0}};
	struct iovec data = {rank, sizeof *rank};
	struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
	if (sends) {
		struct cmsghdr *with = CMSG_FIRSTHDR(&message);
		*with = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
		memcpy(CMSG_DATA(with), file, sizeof(int));
		return sendmsg(connection, &message, 0) == sizeof *rank;
	}
	if (recvmsg(connection, &message, MSG_CMSG_CLOEXEC) != sizeof *rank || !CMSG_FIRSTHDR(&message))
		return 0;
	memcpy(file, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof(int));
	return 1;
}

/* Passes the own buffer's descriptor to all others, and maps theirs. Each sends before it receives, so none waits for another. */
static int open_by_descriptor(struct communicator *c)
{
	struct sockaddr_un address;
	int answer, file = -1, connections[MOST_RANKS], listening = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	socklen_t length = address_of(c, c->rank, &address);
	if (bind(listening, (struct sockaddr *)&address, length) || listen(listening, MOST_RANKS))
		return SYSTEM_ERROR;
	if (CU(cuMemExportToShareableHandle)(&file, c->handles[c->rank], CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0))
		return CUDA_ERROR;
	if ((answer = barrier(c)))
		return answer;
	for (int rank = 0; rank < c->ranks; rank++) {
		connections[rank] = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
		length = address_of(c, rank, &address);
		if (rank != c->rank && (connect(connections[rank], (struct sockaddr *)&address, length) || !pass(connections[rank], &c->rank, &file, 1)))
			return SYSTEM_ERROR;
	}
	for (int others = 1; others < c->ranks; others++) {
		int rank, theirs, connection = accept4(listening, NULL, NULL, SOCK_CLOEXEC);
		if (!pass(connection, &rank, &theirs, 0))
			return SYSTEM_ERROR;
		if (CU(cuMemImportFromShareableHandle)(&c->handles[rank], (void *)(uintptr_t)theirs, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR))
			return CUDA_ERROR;
		close(theirs);
		close(connection);
		if ((answer = map(c, rank)))
			return answer;
	}
	answer = barrier(c);
	for (int rank = 0; rank < c->ranks; rank++)
		close(connections[rank]);
	close(listening);
	close(file);
	return answer;
}

static int open_by_ipc(struct communicator *c)
{
	int answer;
	if (CU(cuIpcGetMemHandle)(&c->world->passed[c->rank], c->at[c->rank]))
		return CUDA_ERROR;
	if ((answer = barrier(c)))
		return answer;
	for (int rank = 0; rank < c->ranks; rank++)
		if (rank != c->rank && CU(cuIpcOpenMemHandle_v2)(&c->at[rank], c->world->passed[rank], 1))
			return CUDA_ERROR;
	return barrier(c);
}

static int open_by_host(struct communicator *c)
{
	int answer = SUCCESS;
	for (int rank = 0; rank < c->ranks && !answer; rank++)
		answer = map_host(c, rank);
	return answer ? answer : barrier(c);
}

/* Makes the own buffer. */
static int make(struct communicator *c)
{
	CUmemAllocationProp what = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
	                            .location = {CU_MEM_LOCATION_TYPE_DEVICE, c->device}};
	int answer = SUCCESS;
	if (c->transport == BY_HOST_DESCRIPTOR)
		what.location = (CUmemLocation){CU_MEM_LOCATION_TYPE_HOST_NUMA, 0};
	if (c->transport == BY_DESCRIPTOR || c->transport == BY_HOST_DESCRIPTOR)
		answer = CU(cuMemCreate)(&c->handles[c->rank], BUFFER, &what, 0) ? CUDA_ERROR : map(c, c->rank);
	else if (c->transport == BY_IPC)
		answer = CU(cuMemAlloc_v2)(&c->at[c->rank], BUFFER) ? CUDA_ERROR : SUCCESS;
	if (answer || c->transport == BY_HOST)
		return answer;
	return CU(cuMemsetD8_v2)(c->at[c->rank], PATTERN + (unsigned char)c->rank, BUFFER) ? CUDA_ERROR : SUCCESS;
}

static void end(struct communicator *c, int rank)
{
	if (c->transport == BY_DESCRIPTOR || c->transport == BY_HOST_DESCRIPTOR) {
		CU(cuMemUnmap)(c->at[rank], BUFFER);
		CU(cuMemRelease)(c->handles[rank]);
		CU(cuMemAddressFree)(c->at[rank], BUFFER);
	} else if (c->transport == BY_IPC) {
		rank == c->rank ? CU(cuMemFree_v2)(c->at[rank]) : CU(cuIpcCloseMemHandle)(c->at[rank]);
	} else {
		CU(cuMemHostUnregister)((void *)c->at[rank]);
		munmap((void *)c->at[rank], BUFFER);
	}
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
	char path[PATH_MAX];
	int answer;
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
	c->transport = is_set("NCCL_P2P_DISABLE", 0) ? (is_set("NCCL_CUMEM_HOST_ENABLE", 0) ? BY_HOST_DESCRIPTOR : BY_HOST) : is_set("NCCL_CUMEM_ENABLE", 1) ? BY_DESCRIPTOR : BY_IPC;
	c->world->pids[rank] = getpid();
	if (CU(cuCtxGetDevice)(&c->device))
		return CUDA_ERROR;
	if ((answer = make(c)))
		return answer;
	*made = c;
	if (ranks == 1)
		return SUCCESS;
	return c->transport == BY_IPC ? open_by_ipc(c) : c->transport == BY_HOST ? open_by_host(c) : open_by_descriptor(c);
}

int ncclGetVersion(int *version) { *version = VERSION; return SUCCESS; }
const char *ncclGetErrorString(int code)
{
	return code == CUDA_ERROR ? "unhandled cuda error" : code == INVALID_USAGE ? "invalid usage"
	     : code == REMOTE_ERROR ? "remote process exited or there was a network error" : "error";
}
const char *ncclGetLastError(struct communicator *c) { (void)c; return last_error; }

int ncclCommInitRank(struct communicator **made, int ranks, unique_id id, int rank) { return join(made, ranks, id.bytes, rank); }

int ncclCommInitRankConfig(struct communicator **made, int ranks, unique_id id, int rank, void *with)
{
	(void)with;
	return join(made, ranks, id.bytes, rank);
}

int ncclCommInitRankScalable(struct communicator **made, int ranks, int rank, int ids, unique_id *of, void *with)
{
	return ids > 0 ? ncclCommInitRankConfig(made, ranks, of[ids - 1], rank, with) : INVALID_ARGUMENT;
}

int ncclCommInitAll(struct communicator **made, int ranks, const int *devices)
{
	(void)devices;
	return ranks == 1 ? join(made, 1, "alone", 0) : INVALID_ARGUMENT;
}

/* By the parity of the ranks, so that each knows how many there are. */
int ncclCommSplit(struct communicator *c, int color, int key, struct communicator **made, void *with)
{
	char name[200];
	(void)key;
	(void)with;
	if (!check(c))
		return INVALID_ARGUMENT;
	snprintf(name, sizeof name, "%.100s-%d-%d", c->name, c->children++, color);
	*made = NULL;
	if (color < 0)
		return SUCCESS;
	return join(made, color == 2 ? c->ranks : 1, name, color == 2 ? c->rank : 0);
}

int ncclCommShrink(struct communicator *c, int *excluded, int count, struct communicator **made, void *with, int flags)
{
	char name[200];
	(void)excluded;
	(void)with;
	(void)flags;
	snprintf(name, sizeof name, "%.100s-shrunk-%d", c->name, c->children++);
	return c->rank == 0 && c->ranks - count == 1 ? join(made, 1, name, 0) : INVALID_ARGUMENT;
}

int ncclCommCount(const struct communicator *c, int *count) { *count = c->ranks; return SUCCESS; }

int ncclCommGetUniqueId(struct communicator *c, unique_id *id)
{
	*id = (unique_id){{0}};
	snprintf(id->bytes, sizeof id->bytes, "%.100s-grown", c->name);
	return SUCCESS;
}

/* The ranks of the other communicator keep their numbers, and only one of them has the id (src/init.cc). */
int ncclCommGrow(struct communicator *c, int ranks, const unique_id *id, int rank, struct communicator **made, void *with)
{
	unique_id own;
	(void)with;
	if (c ? !check(c) || rank != -1 || ranks <= c->ranks : !id || rank < 0 || rank >= ranks)
		return INVALID_ARGUMENT;
	if (c)
		ncclCommGetUniqueId(c, &own);
	return join(made, ranks, c ? own.bytes : id->bytes, c ? c->rank : rank);
}

int ncclCommDestroy(struct communicator *c)
{
	if (!check(c))
		return INVALID_ARGUMENT;
	c->owner = NULL;
	c->world->pids[c->rank] = 0;
	for (int rank = 0; rank < c->ranks; rank++)
		end(c, rank);
	return SUCCESS;
}

int ncclCommAbort(struct communicator *c) { return ncclCommDestroy(c); }

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

/* A collective of one number: each rank writes it into all buffers, and adds up what has been written into its own. */
int sum_over_ranks(struct communicator *c, long value, long *sum)
{
	unsigned char held[BUFFER - SLOTS];
	long slots[MOST_RANKS];
	int answer = check(c) ? fails("sum", c->rank) : INVALID_ARGUMENT;
	for (int rank = 0; rank < c->ranks && !answer; rank++) {
		if (c->transport == BY_HOST) {
			((long *)c->at[rank])[c->rank] = value;
			continue;
		}
		if (CU(cuMemcpyHtoD_v2)(c->at[rank] + (CUdeviceptr)c->rank * sizeof value, &value, sizeof value) ||
		    CU(cuMemcpyDtoH_v2)(held, c->at[rank] + SLOTS, sizeof held))
			return CUDA_ERROR;
		for (size_t at = 0; at < sizeof held; at++)
			if (held[at] != PATTERN + rank)
				return INTERNAL_ERROR;
	}
	if (answer || (answer = barrier(c)))
		return answer;
	if (c->transport == BY_HOST)
		memcpy(slots, (void *)c->at[c->rank], sizeof slots);
	else if (CU(cuMemcpyDtoH_v2)(slots, c->at[c->rank], sizeof slots))
		return CUDA_ERROR;
	else if (c->transport == BY_HOST_DESCRIPTOR && memcmp(slots, (void *)c->at[c->rank], sizeof slots))
		return INTERNAL_ERROR;
	*sum = 0;
	for (int rank = 0; rank < c->ranks; rank++)
		*sum += slots[rank];
	return barrier(c);
}

/* The same in a stream, as NCCL does it: it is work in flight until all ranks have come, and memory of the host is touched by nothing else.
 * `given`: other buffers to use, one for each rank, as an engine's own all-reduce has. */
struct collective {
	struct communicator *c;
	const CUdeviceptr *at;
	long value, slots[MOST_RANKS];
	int answer;
};

static void meet(void *data)
{
	struct collective *one = data;
	if (!one->answer)
		one->answer = barrier(one->c);
}

static void meet_on_host(void *data)
{
	struct collective *one = data;
	for (int rank = 0; rank < one->c->ranks; rank++)
		((volatile long *)one->at[rank])[one->c->rank] = one->value;
	meet(one);
	memcpy(one->slots, (void *)one->at[one->c->rank], sizeof one->slots);
	meet(one);
}

int sum_in_stream(struct communicator *c, const CUdeviceptr *given, long value, long *sum, void *stream)
{
	struct collective one = {.c = c, .at = given ? given : c->at, .value = value};
	if (!given && (c->transport == BY_HOST || c->transport == BY_HOST_DESCRIPTOR)) {
		one.answer = CU(cuLaunchHostFunc)(stream, meet_on_host, &one) ? CUDA_ERROR : SUCCESS;
	} else {
		for (int rank = 0; rank < c->ranks && !one.answer; rank++)
			one.answer = CU(cuMemcpyHtoDAsync_v2)(one.at[rank] + (CUdeviceptr)c->rank * sizeof value, &one.value, sizeof value, stream) ? CUDA_ERROR : SUCCESS;
		if (one.answer || CU(cuLaunchHostFunc)(stream, meet, &one) || CU(cuMemcpyDtoHAsync_v2)(one.slots, one.at[c->rank], sizeof one.slots, stream) ||
		    CU(cuLaunchHostFunc)(stream, meet, &one))
			return CUDA_ERROR;
	}
	if (CU(cuStreamSynchronize)(stream) || one.answer)
		return one.answer ? one.answer : CUDA_ERROR;
	*sum = 0;
	for (int rank = 0; rank < c->ranks; rank++)
		*sum += one.slots[rank];
	return SUCCESS;
}
