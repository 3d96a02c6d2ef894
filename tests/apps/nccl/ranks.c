/* A rank of a job that uses NCCL. Arguments: RANK RANKS ID [PATH]. With PATH, it looks NCCL up there instead of using the linked one.
 * With SPREAD, it is on the GPU of its rank. Reads commands:
 *   sum              a collective over all ranks, in the order of the managed memory's work
 *   config, many     creates the communicator to use from now on with another function
 *   split COLOR      splits, and prints whether this rank got a communicator; color 2 is for all ranks, other colors for one
 *   shrink           shrinks by the last rank
 *   other PATH       creates one of another NCCL
 *   group [all]      creates one in a group, into a variable that is not initialised, and uses it from then on
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
extern int ncclCommInitAll(void **made, int ranks, const int *devices);
extern int ncclGroupStart(void), ncclGroupEnd(void);
extern int ncclCommDestroy(void *c);
extern const char *ncclGetErrorString(int code);
extern int sum_over_ranks(void *c, long value, long *sum);

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
	answer = init(&c, ranks, id_of(arguments[3], ""), rank);
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
