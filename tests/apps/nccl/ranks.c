/* A rank of a job that uses NCCL. Arguments: RANK RANKS ID [PATH]. With PATH, it looks NCCL up there instead of using the linked one.
 * With SPREAD, it is on the GPU of its rank. Reads commands:
 *   sum              a collective over all ranks, in the order of the managed memory's work
 *   config, many     creates the communicator to use from now on with another function
 *   split COLOR      splits, and prints whether this rank got a communicator; color 2 is for all ranks, other colors for one
 *   shrink           shrinks by the last rank
 *   grow             grows by one rank, which is a program with JOINS, and goes on with the larger one
 *   other PATH       creates one of another NCCL
 *   group [all]      creates one in a group, into a variable that is not initialised, and uses it from then on
 *   train [own]      trains until there is a file "stop" in $SIMGPU_DIR: each step adds up what the ranks have, and changes it. With own, the ranks
 *                    add up in buffers that they pass each other by CUDA IPC, as inference engines do. Prints the steps, and what they came to
 *   explain CODE     asks NCCL what an error means
 *   slow MS          makes the driver this slow to say how much is free
 *   child            creates one in a child process, which does not use CUDA before
 *   destroy, fork, exit */
#define _GNU_SOURCE
#include "../cudart.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

typedef struct { char bytes[128]; } unique_id;

extern int ncclCommInitRank(void **made, int ranks, unique_id id, int rank);
extern int ncclCommInitRankConfig(void **made, int ranks, unique_id id, int rank, void *with);
extern int ncclCommInitRankScalable(void **made, int ranks, int rank, int ids, unique_id *of, void *with);
extern int ncclCommSplit(void *c, int color, int key, void **made, void *with);
extern int ncclCommShrink(void *c, int *excluded, int count, void **made, void *with, int flags);
extern int ncclCommGrow(void *c, int ranks, const unique_id *id, int rank, void **made, void *with);
extern int ncclCommGetUniqueId(void *c, unique_id *id);
extern int ncclCommInitAll(void **made, int ranks, const int *devices);
extern int ncclGroupStart(void), ncclGroupEnd(void);
extern int ncclCommDestroy(void *c);
extern const char *ncclGetErrorString(int code);
extern int sum_over_ranks(void *c, long value, long *sum);
extern int sum_in_stream(void *c, void *const *given, long value, long *sum, void *stream);

typedef struct { char bytes[64]; } ipc_handle;
extern cudaError_t cudaIpcGetMemHandle(ipc_handle *handle, void *pointer);
extern cudaError_t cudaIpcOpenMemHandle(void **pointer, ipc_handle handle, unsigned flags);

enum { MOST_RANKS = 16, STOPS = 1 << 30, WEIGHTS = 4 << 20 };

/* Opens the buffers of all ranks. */
static int open_buffers(void *c, int rank, int ranks, void **buffers)
{
	char path[4096];
	ipc_handle handle;
	long sum;
	if (cudaMalloc(&buffers[rank], 2 << 20) || cudaIpcGetMemHandle(&handle, buffers[rank]))
		return 1;
	snprintf(path, sizeof path, "%s/buffer-%d", getenv("SIMGPU_DIR"), rank);
	FILE *file = fopen(path, "w");
	fwrite(&handle, sizeof handle, 1, file);
	fclose(file);
	int answer = sum_over_ranks(c, 0, &sum);
	for (int other = 0; other < ranks && !answer; other++) {
		if (other == rank)
			continue;
		snprintf(path, sizeof path, "%s/buffer-%d", getenv("SIMGPU_DIR"), other);
		file = fopen(path, "r");
		answer = fread(&handle, sizeof handle, 1, file) != 1 || cudaIpcOpenMemHandle(&buffers[other], handle, 1);
		fclose(file);
	}
	return answer;
}

/* All that the next step depends on is in device memory: `weights` is the same in all ranks. */
static void train(void *c, int rank, int ranks, char *memory, int has_own)
{
	void *buffers[MOST_RANKS] = {NULL};
	char stop[4096];
	static unsigned char seen[WEIGHTS - sizeof(long)];
	unsigned char filled = 0;
	long weights[1] = {1}, sum, steps = 0;
	cudaStream_t stream = NULL;
	snprintf(stop, sizeof stop, "%s/stop", getenv("SIMGPU_DIR"));
	int answer = has_own ? open_buffers(c, rank, ranks, buffers) : 0;
	if (!answer)
		answer = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) || cudaMemcpyAsync(memory, weights, sizeof weights, cudaMemcpyHostToDevice, stream) ||
		         cudaMemsetAsync(memory + sizeof weights, filled, sizeof seen, stream);
	for (sum = 0; !answer && sum < STOPS; steps++) {
		answer = cudaMemcpyAsync(weights, memory, sizeof weights, cudaMemcpyDeviceToHost, stream) ||
		         cudaMemcpyAsync(seen, memory + sizeof weights, sizeof seen, cudaMemcpyDeviceToHost, stream) || cudaStreamSynchronize(stream);
		for (size_t at = 0; at < sizeof seen && !answer; at++)
			answer = seen[at] != filled;
		filled = (unsigned char)(weights[0] + rank);
		answer = answer || cudaMemsetAsync(memory + sizeof weights, filled, sizeof seen, stream);
		long value = (weights[0] % 1000) * (rank + 1);
		if (!answer)
			answer = sum_in_stream(c, has_own ? buffers : NULL, value + (rank == 0 && access(stop, F_OK) == 0 ? STOPS : 0), &sum, stream);
		weights[0] = (weights[0] * 31 + sum % STOPS) % 1000003;
		answer = answer || cudaMemcpyAsync(memory, weights, sizeof weights, cudaMemcpyHostToDevice, stream) || cudaStreamSynchronize(stream);
	}
	printf("train %ld steps, %ld, answer %d\n", steps, weights[0], answer);
}

static unique_id id_of(const char *name, const char *suffix)
{
	unique_id id = {{0}};
	snprintf(id.bytes, sizeof id.bytes, "%.60s%.20s", name, suffix);
	return id;
}

int main(int count, char **arguments)
{
	int rank = atoi(arguments[1]), ranks = atoi(arguments[2]), number, answer, state, others = 0;
	char line[4096], *text;
	void *c = NULL, *memory = NULL;
	long sum;
	__typeof__(&ncclCommInitRank) init = ncclCommInitRank;
	__typeof__(&sum_over_ranks) add = sum_over_ranks;
	__typeof__(&ncclGetErrorString) explain = ncclGetErrorString;

	setvbuf(stdout, NULL, _IONBF, 0);
	if (count > 4) {
		void *library = dlopen(arguments[4], RTLD_NOW | RTLD_LOCAL);
		init = (__typeof__(init))dlsym(library, "ncclCommInitRank");
		add = (__typeof__(add))dlsym(library, "sum_over_ranks");
		explain = (__typeof__(explain))dlsym(library, "ncclGetErrorString");
	}
	if ((getenv("SPREAD") && cudaSetDevice(rank)) || cudaMalloc(&memory, 4 << 20))
		return 1;
	unique_id grown = id_of(arguments[3], "-grown");
	answer = getenv("JOINS") ? ncclCommGrow(NULL, ranks, &grown, rank, &c, NULL) : init(&c, ranks, id_of(arguments[3], ""), rank);
	printf("ready %d\n", answer);
	while (fgets(line, sizeof line, stdin)) {
		line[strcspn(line, "\n")] = 0;
		text = strchrnul(line, ' ');
		if (*text)
			*text++ = 0;
		void *made = NULL;
		if (!strcmp(line, "sum")) {
			cudaMemsetAsync(memory, rank, 4 << 20, NULL);
			answer = cudaDeviceSynchronize();
			if (!answer)
				answer = add(c, rank + 1, &sum);
			printf("sum %ld, answer %d\n", sum, answer);
		} else if (!strcmp(line, "train")) {
			train(c, rank, ranks, memory, !strcmp(text, "own"));
		} else if (!strcmp(line, "config")) {
			answer = ncclCommInitRankConfig(&c, ranks, id_of(arguments[3], "-config"), rank, NULL);
			printf("config %d\n", answer);
		} else if (!strcmp(line, "many")) {
			unique_id ids[2] = {id_of(arguments[3], "-first"), id_of(arguments[3], "-second")};
			answer = ncclCommInitRankScalable(&c, ranks, rank, 2, ids, NULL);
			printf("many %d\n", answer);
		} else if (!strcmp(line, "split")) {
			answer = ncclCommSplit(c, atoi(text), rank, &made, NULL);
			printf("split %d %s\n", answer, made ? "one" : "none");
		} else if (!strcmp(line, "shrink")) {
			number = ranks - 1;
			answer = ncclCommShrink(c, &number, 1, &made, NULL, 0);
			printf("shrink %d\n", answer);
		} else if (!strcmp(line, "grow")) {
			if (rank == 0)
				ncclCommGetUniqueId(c, &grown);
			answer = ncclCommGrow(c, ++ranks, rank == 0 ? &grown : NULL, -1, &made, NULL);
			ncclCommDestroy(c);
			c = made;
			printf("grow %d\n", answer);
		} else if (!strcmp(line, "other")) {
			init = (__typeof__(init))dlsym(dlopen(text, RTLD_NOW | RTLD_LOCAL), "ncclCommInitRank");
			snprintf(line, sizeof line, "-other-%d", others++);
			printf("other %d\n", init(&made, ranks, id_of(arguments[3], line), rank));
		} else if (!strcmp(line, "group")) {
			memset(&made, 0xa5, sizeof made);
			void *garbage = made;
			snprintf(line, sizeof line, "-group-%d", others++);
			ncclGroupStart();
			answer = *text ? ncclCommInitAll(&made, 1, NULL) : ncclCommInitRank(&made, ranks, id_of(arguments[3], line), rank);
			printf("group %d, %s", answer, made == garbage ? "not written" : "written");
			answer = ncclGroupEnd();
			printf(", %d, %s\n", answer, made == garbage ? "not written" : "written");
			c = made;
		} else if (!strcmp(line, "explain")) {
			printf("%s\n", explain(atoi(text)));
		} else if (!strcmp(line, "slow")) {
			int (*slow_down)(const char *, unsigned long) = (int (*)(const char *, unsigned long))dlsym(dlopen("libcuda.so.1", RTLD_NOW), "simgpu_slow_down");
			printf("slow %d\n", slow_down("cuMemGetInfo_v2", atoi(text)));
		} else if (!strcmp(line, "destroy")) {
			printf("destroy %d\n", ncclCommDestroy(c));
		} else if (!strcmp(line, "fork")) {
			pid_t child = fork();
			if (child == 0)
				_exit(ncclCommDestroy(NULL) == 4 ? 0 : 1);
			waitpid(child, &state, 0);
			printf("fork %d\n", state);
		} else if (!strcmp(line, "child")) {
			pid_t child = fork();
			if (child == 0)
				_exit(ncclCommInitRankConfig(&made, ranks, id_of(arguments[3], "-config"), rank, NULL));
			waitpid(child, &state, 0);
			printf("child %d\n", WEXITSTATUS(state));
		} else if (!strcmp(line, "exit")) {
			exit(0);
		} else {
			printf("unknown\n");
		}
	}
	return 0;
}
