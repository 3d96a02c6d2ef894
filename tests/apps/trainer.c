/* Stands in for a training loop: takes its memory step by step, then is always busy, and knows what each byte should be. */
#define _GNU_SOURCE
#include <getopt.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "cudart.h"

static const char help[] =
	"Takes device memory step by step, and writes and checks one piece after the other without a pause.\n\n"
	"usage: trainer [options]\n\n"
	"  --mib N       how much (64)\n"
	"  --step-mib N  how much at a time (8)\n"
	"  --device N    the GPU (0)\n\n"
	"Prints `ready` once it has all. Commands on stdin: `steps` prints how many pieces it has written, `longest`\n"
	"the longest that one has taken, in milliseconds, since the last time it was asked; `grow N` takes N MiB more;\n"
	"`idle` and `work` end and begin the work; `verify` checks every piece. It ends with stdin. Whatever is wrong ends\n"
	"it with a message and the exit code 1.\n";

#define MIB ((size_t)1 << 20)
enum { MAX_PIECES = 4096 };

static unsigned char *pieces[MAX_PIECES], *host;
static unsigned char values[MAX_PIECES];
static int count, device;
static size_t piece_bytes = 8 * MIB;
/* One at a time: the loop, or a command. */
static pthread_mutex_t busy = PTHREAD_MUTEX_INITIALIZER;
static atomic_bool works, is_commanded;
static atomic_ullong steps, longest;

static void need(cudaError_t error, const char *what)
{
	if (error == cudaSuccess)
		return;
	printf("%s: %s\n", what, cudaGetErrorName(error));
	fflush(stdout);
	_exit(1);
}

static unsigned long long now(void)
{
	struct timespec time;
	clock_gettime(CLOCK_MONOTONIC, &time);
	return (unsigned long long)time.tv_sec * 1000 + (unsigned long long)time.tv_nsec / 1000000;
}

static void write_piece(int piece, unsigned char value)
{
	need(cudaMemsetAsync(pieces[piece], value, piece_bytes, NULL), "cudaMemsetAsync");
	need(cudaStreamSynchronize(NULL), "cudaStreamSynchronize");
	values[piece] = value;
}

static void check_piece(int piece, size_t bytes)
{
	need(cudaMemcpyAsync(host, pieces[piece] + piece_bytes - bytes, bytes, cudaMemcpyDeviceToHost, NULL), "cudaMemcpyAsync");
	need(cudaStreamSynchronize(NULL), "cudaStreamSynchronize");
	for (size_t i = 0; i < bytes; i++)
		if (host[i] != values[piece]) {
			printf("piece %d is %d at %zu, not %d\n", piece, host[i], i, values[piece]);
			fflush(stdout);
			_exit(1);
		}
}

static void grow(size_t bytes)
{
	for (size_t had = 0; had < bytes && count < MAX_PIECES; had += piece_bytes, count++) {
		need(cudaMalloc((void **)&pieces[count], piece_bytes), "cudaMalloc");
		write_piece(count, (unsigned char)(count * 7));
	}
}

static void begin_command(void)
{
	atomic_store(&is_commanded, true);
	pthread_mutex_lock(&busy);
}

static void end_command(void)
{
	pthread_mutex_unlock(&busy);
	atomic_store(&is_commanded, false);
}

static void *work(void *nothing)
{
	need(cudaSetDevice(device), "cudaSetDevice");
	for (unsigned long long step = 0;; step++) {
		while (!atomic_load(&works) || atomic_load(&is_commanded))
			nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
		unsigned long long begun = now();
		pthread_mutex_lock(&busy);
		int piece = (int)(step % (unsigned long long)count);
		check_piece(piece, 64 << 10);
		write_piece(piece, (unsigned char)(values[piece] + 1));
		pthread_mutex_unlock(&busy);
		unsigned long long took = now() - begun;
		if (took > atomic_load(&longest))
			atomic_store(&longest, took);
		atomic_fetch_add(&steps, 1);
	}
	return nothing;
}

int main(int argc, char **argv)
{
	static const struct option options[] = {
		{"mib", 1, NULL, 'm'}, {"step-mib", 1, NULL, 's'}, {"device", 1, NULL, 'd'}, {"help", 0, NULL, 'h'}, {0},
	};
	size_t bytes = 64 * MIB;
	char line[128];
	pthread_t loop;
	for (int option; (option = getopt_long(argc, argv, "", options, NULL)) != -1;)
		switch (option) {
		case 'm': bytes = strtoull(optarg, NULL, 10) * MIB; break;
		case 's': piece_bytes = strtoull(optarg, NULL, 10) * MIB; break;
		case 'd': device = atoi(optarg); break;
		case 'h': fputs(help, stdout); return 0;
		default: fputs(help, stderr); return 2;
		}
	need(cudaSetDevice(device), "cudaSetDevice");
	need(cudaMallocHost((void **)&host, piece_bytes), "cudaMallocHost");
	grow(bytes);
	atomic_store(&works, true);
	pthread_create(&loop, NULL, work, NULL);
	puts("ready");
	fflush(stdout);
	while (fgets(line, sizeof line, stdin) != NULL) {
		line[strcspn(line, "\n")] = 0;
		if (strcmp(line, "steps") == 0) {
			printf("%llu\n", atomic_load(&steps));
		} else if (strcmp(line, "longest") == 0) {
			printf("%llu\n", atomic_exchange(&longest, 0));
		} else if (strncmp(line, "grow ", 5) == 0) {
			begin_command();
			grow(strtoull(line + 5, NULL, 10) * MIB);
			end_command();
			puts("grown");
		} else if (strcmp(line, "idle") == 0 || strcmp(line, "work") == 0) {
			atomic_store(&works, line[0] == 'w');
			puts(line);
		} else if (strcmp(line, "verify") == 0) {
			begin_command();
			for (int piece = 0; piece < count; piece++)
				check_piece(piece, piece_bytes);
			end_command();
			puts("ok");
		} else {
			printf("unknown: %s\n", line);
		}
		fflush(stdout);
	}
	/* The loop may wait for its turn: it is not waited for. */
	_exit(0);
}
