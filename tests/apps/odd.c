/*
 * Things programs do that preloaded libraries tend to overlook, one per mode.
 * Linked to libcudart like any program; knows nothing of vramctl.
 * Prints "ok" at the end, or what went wrong.
 */
#define _GNU_SOURCE
#include "check.h"
#include "cudart.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

enum { BYTES = 4 << 20 };

static void fill(unsigned char *host, unsigned seed)
{
	for (size_t i = 0; i < BYTES; i++)
		host[i] = (unsigned char)((i * 31 + seed) ^ (i >> 8));
}

static void *allocate(unsigned seed)
{
	static _Thread_local unsigned char host[BYTES];
	void *device = NULL;
	cudaStream_t stream;
	check(cudaMalloc(&device, BYTES) == cudaSuccess, "cudaMalloc");
	check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess, "cudaStreamCreate");
	fill(host, seed);
	check(cudaMemcpyAsync(device, host, BYTES, cudaMemcpyHostToDevice, stream) == cudaSuccess, "copy in");
	check(cudaStreamSynchronize(stream) == cudaSuccess, "synchronize");
	cudaStreamDestroy(stream);
	return device;
}

static void verify(const void *device, unsigned seed)
{
	static _Thread_local unsigned char wanted[BYTES], found[BYTES];
	cudaStream_t stream;
	check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess, "cudaStreamCreate");
	check(cudaMemcpyAsync(found, device, BYTES, cudaMemcpyDeviceToHost, stream) == cudaSuccess, "copy out");
	check(cudaStreamSynchronize(stream) == cudaSuccess, "synchronize");
	cudaStreamDestroy(stream);
	fill(wanted, seed);
	check(memcmp(wanted, found, BYTES) == 0, "the contents are not what they were");
}

/* Hands over to the test and waits until it hands back. */
static void turn(const char *line)
{
	char answer[64];
	printf("%s\n", line);
	fflush(stdout);
	check(fgets(answer, sizeof answer, stdin) != NULL, "the test went away");
}

static void wait_for(pid_t child)
{
	int status = -1;
	check(waitpid(child, &status, 0) == child, "waitpid");
	check(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child did not end well");
}

/* CUDA first, then fork: the child cannot use CUDA and must not harm the parent's state. It calls exit, so exit handlers
 * run in it. */
static void fork_after_cuda(void)
{
	void *device = allocate(1);
	turn("ready");
	for (int i = 0; i < 20; i++) {
		pid_t child = fork();
		if (child == 0) {
			void *never = NULL;
			check(cudaMalloc(&never, BYTES) != cudaSuccess, "CUDA in a forked child");
			cudaFree(device);
			exit(0);
		}
		wait_for(child);
	}
	turn("forked");
	verify(device, 1);
	check(cudaFree(device) == cudaSuccess, "cudaFree");
}

/* The parent dies while its child lives on. */
static void orphan(void)
{
	void *device = allocate(1);
	pid_t child = fork();
	if (child == 0) {
		close(0);
		close(1);
		close(2);
		sleep(60);
		_exit(0);
	}
	printf("child %d\n", (int)child);
	turn("ready");
	verify(device, 1);
	kill(child, SIGKILL);
	waitpid(child, NULL, 0);
}

/* Fork first, then CUDA in both. */
static void fork_before_cuda(void)
{
	int go[2], done[2];
	char byte = 0;
	check(pipe(go) == 0 && pipe(done) == 0, "pipe");
	pid_t child = fork();
	void *device = allocate(child == 0 ? 2 : 1);
	if (child == 0) {
		check(write(done[1], &byte, 1) == 1 && read(go[0], &byte, 1) == 1, "pipes");
		verify(device, 2);
		exit(cudaFree(device) == cudaSuccess ? 0 : 1);
	}
	check(read(done[0], &byte, 1) == 1, "pipes");
	printf("child %d\n", (int)child);
	turn("ready");
	check(write(go[1], &byte, 1) == 1, "pipes");
	wait_for(child);
	verify(device, 1);
}

/* Forks continuously while being paused and resumed. */
static void forking_all_the_time(void)
{
	void *device = allocate(1);
	printf("ready\n");
	fflush(stdout);
	for (int i = 0; i < 300; i++) {
		pid_t child = fork();
		if (child == 0) {
			free(malloc(100));
			void *never = NULL;
			cudaMalloc(&never, BYTES);
			_exit(0);
		}
		wait_for(child);
	}
	turn("forked");
	verify(device, 1);
}

/* The program's signal handlers must always run on the program's threads. */
static pthread_t own_thread;
static volatile sig_atomic_t handled, elsewhere;

static void on_signal(int number)
{
	(void)number;
	handled++;
	if (!pthread_equal(pthread_self(), own_thread))
		elsewhere++;
}

static void signals(void)
{
	own_thread = pthread_self();
	signal(SIGUSR1, on_signal);
	void *device = allocate(1);
	turn("ready");
	for (int i = 0; i < 1000; i++)
		kill(getpid(), SIGUSR1);
	check(handled > 0, "no signal came");
	check(elsewhere == 0, "a handler ran on another thread");
	verify(device, 1);
}

/* Exits with memory allocated, and frees it in an exit handler registered before CUDA's. */
static void *left;

static void late_free(void)
{
	cudaFree(left);
}

static void exit_with_memory(void)
{
	atexit(late_free);
	left = allocate(1);
	turn("ready");
	exit(0);
}

static void limit(int resource, rlim_t bytes)
{
	struct rlimit limit = {bytes, bytes};
	check(setrlimit(resource, &limit) == 0, "setrlimit");
}

/* Locks all its memory, future and then current, like programs that must never take a page fault. */
static void locked(void)
{
	void *device = allocate(1);
	/* Keeps addresses that are populated by mistake from filling the machine. */
	limit(RLIMIT_AS, (rlim_t)6 << 30);
	turn(mlockall(MCL_FUTURE) == 0 ? "ready" : "not allowed");
	turn(mlockall(MCL_CURRENT) == 0 ? "ready" : "not allowed");
	verify(device, 1);
}

/* Has a low data limit and needs most of it, while paused and after. */
static void little_data(void)
{
	enum { NEEDED = 384 << 20 };
	char line[256];
	size_t kib = 0;
	FILE *status = fopen("/proc/self/status", "r");
	check(status != NULL, "/proc/self/status");
	while (fgets(line, sizeof line, status) != NULL && sscanf(line, "VmData: %zu", &kib) != 1)
		;
	fclose(status);
	limit(RLIMIT_DATA, ((rlim_t)kib << 10) + (512 << 20));
	void *device = allocate(1);
	turn("ready");
	for (int paused = 1; paused >= 0; paused--) {
		void *memory = NULL;
		/* The library frees its host memory in the background. */
		for (int i = 0; i < 1000 && (memory = malloc(NEEDED)) == NULL; i++)
			usleep(10000);
		check(memory != NULL, paused ? "malloc while paused" : "malloc after the resume");
		free(memory);
		if (paused)
			turn("enough");
	}
	verify(device, 1);
}

/* Replays a graph on paused memory: a bug of the program, which must be reported. */
static void use_while_paused(void)
{
	void *from = allocate(1), *to = allocate(2);
	cudaStream_t stream;
	cudaGraph_t graph;
	cudaGraphExec_t exec;
	check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess, "cudaStreamCreate");
	check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess, "capture");
	check(cudaMemcpyAsync(to, from, BYTES, cudaMemcpyDeviceToDevice, stream) == cudaSuccess, "copy");
	check(cudaMemsetAsync(to, 5, BYTES, stream) == cudaSuccess, "memset");
	check(cudaStreamEndCapture(stream, &graph) == cudaSuccess, "capture");
	check(cudaGraphInstantiateWithFlags(&exec, graph, 0) == cudaSuccess, "instantiate");
	turn("ready");
	cudaGraphLaunch(exec, stream);
	turn(cudaStreamSynchronize(stream) == cudaSuccess ? "went well" : "failed");
}

/* Closes unknown sockets, as daemons do, and opens its own under the same numbers, with a client waiting. */
static void close_sockets(void)
{
	enum { MANY = 256 };
	int clients[MANY] = {0};
	void *device = allocate(1);
	turn("ready");
	for (int i = 3; i < MANY; i++) {
		struct stat file;
		if (clients[i] == 0 && fstat(i, &file) == 0 && S_ISSOCK(file.st_mode)) {
			struct sockaddr_un address = {.sun_family = AF_UNIX};
			socklen_t length = sizeof address.sun_family;
			int server = socket(AF_UNIX, SOCK_STREAM, 0), client = socket(AF_UNIX, SOCK_STREAM, 0);
			check(bind(server, (struct sockaddr *)&address, length) == 0 && listen(server, 1) == 0, "listen");
			length = sizeof address;
			check(getsockname(server, (struct sockaddr *)&address, &length) == 0, "getsockname");
			check(connect(client, (struct sockaddr *)&address, length) == 0, "connect");
			check(dup2(server, i) == i, "dup2");
			close(server);
			check(dup2(client, MANY + i) == MANY + i, "dup2");
			close(client);
			clients[i] = MANY + i;
		}
	}
	turn("closed");
	for (int i = 3; i < MANY; i++) {
		if (clients[i] != 0) {
			pid_t child = fork();
			if (child == 0) {
				struct stat file;
				_exit(fstat(i, &file) == 0 ? 0 : 1);
			}
			wait_for(child);
			check(fcntl(i, F_SETFL, O_NONBLOCK) == 0, "a socket of this program was closed");
			int accepted = accept(i, NULL, NULL);
			check(accepted >= 0, "somebody else took a client of this program");
			close(accepted);
		}
	}
	verify(device, 1);
}

/* Becomes a daemon: closes all descriptors but the driver's and opens files of its own under the same numbers, with the
 * standard streams closed or on files. Then the named file, which was empty, has a byte. Runs until the test removes it. */
static void into_the_background(bool closed_streams)
{
	enum { MANY = 256 };
	const char *drivers = getenv("SIMGPU_DIR"), *stop = getenv("ODD_STOP");
	ino_t files[MANY] = {0};
	struct stat file;
	void *device = allocate(1);
	turn("ready");
	for (int i = 0; i < MANY; i++) {
		char place[4096] = "", link[64];
		snprintf(link, sizeof link, "/proc/self/fd/%d", i);
		if (readlink(link, place, sizeof place - 1) < 0 || strncmp(place, drivers, strlen(drivers)) == 0)
			continue;
		close(i);
		if (i < 3 && closed_streams)
			continue;
		/* memfd_create takes the lowest free number, usually i. */
		int mine = memfd_create("mine", 0);
		if ((mine != i && (dup2(mine, i) != i || close(mine) != 0)) || fstat(i, &file) != 0 || write(i, "mine", 4) != 4)
			_exit(2);
		files[i] = file.st_ino;
	}
	if (truncate(stop, 1) != 0)
		_exit(5);
	while (access(stop, F_OK) == 0)
		usleep(10000);
	for (int i = 0; i < MANY; i++) {
		/* Whatever is on standard error gets messages. */
		if (files[i] != 0 && (fstat(i, &file) != 0 || file.st_ino != files[i] || (i != 2 && file.st_size != 4)))
			_exit(3);
		if (i < 3 && closed_streams && fcntl(i, F_GETFD) != -1)
			_exit(4);
	}
	verify(device, 1);
}

static void daemon_with_files(void)
{
	into_the_background(false);
}

static void daemon_without_streams(void)
{
	into_the_background(true);
}

/* Has standard input closed when the library opens its files. */
static void closed_input(void)
{
	void *before = NULL;
	int input = dup(0);
	char byte = 0;
	/* Descriptors opened by the driver do not count. */
	check(cudaMalloc(&before, 4096) == cudaSuccess, "cudaMalloc");
	close(0);
	void *device = allocate(1);
	printf("ready\n");
	fflush(stdout);
	while (byte != '\n')
		check(read(input, &byte, 1) == 1, "the test went away");
	check(fcntl(0, F_GETFD) == -1, "standard input is a file that this program has not opened");
	check(dup2(input, 0) == 0, "standard input is taken");
	turn("free");
	verify(device, 1);
}

/* Exits on request, even during a pause or resume. */
static void ends_by_exit(void)
{
	allocate(1);
	turn("ready");
	exit(0);
}

/* Exits in a thread that works on the device for the first time in an exit handler. */
static void *at_the_end;

static void late_work(void)
{
	cudaMemsetAsync(at_the_end, 5, BYTES, NULL);
}

static void *early_work(void *nothing)
{
	at_the_end = allocate(1);
	return nothing;
}

static void ends_while_held(void)
{
	pthread_t thread;
	pthread_attr_t attributes;
	pthread_attr_init(&attributes);
	// glibc places a thread's local arrays there, too: without this, few kilobytes would be left.
	check(pthread_attr_setstacksize(&attributes, 4 * BYTES) == 0, "pthread_attr_setstacksize");
	check(pthread_create(&thread, &attributes, early_work, NULL) == 0, "pthread_create");
	check(pthread_join(thread, NULL) == 0, "pthread_join");
	atexit(late_work);
	turn("ready");
	exit(0);
}

static void on_termination(int number)
{
	exit(number == SIGTERM ? 0 : 1);
}

static void ends_by_signal(void)
{
	signal(SIGTERM, on_termination);
	allocate(1);
	printf("ready\n");
	fflush(stdout);
	for (;;)
		pause();
}

static void for_ever(void *nothing)
{
	(void)nothing;
	for (;;)
		pause();
}

static void ends_with_endless_work(void)
{
	cudaStream_t stream;
	allocate(1);
	check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess, "cudaStreamCreate");
	check(cudaLaunchHostFunc(stream, for_ever, NULL) == cudaSuccess, "cudaLaunchHostFunc");
	turn("ready");
}

/* Returns from main. */
static void ends(void)
{
	allocate(1);
	turn("ready");
}

/* Holds memory until told to exit. */
static void plain(void)
{
	void *device = allocate(7);
	turn("ready");
	verify(device, 7);
	check(cudaFree(device) == cudaSuccess, "cudaFree");
}

/* Writes a title over its environment, as setproctitle does. */
static void overwritten(void)
{
	void *device = allocate(7);
	for (char **variable = environ; *variable; variable++)
		memset(*variable, 0, strlen(*variable));
	turn("ready");
	cudaFree(device);
}

int main(int argc, char **argv)
{
	static const struct mode modes[] = {
		{"plain", plain},
		{"overwritten", overwritten},
		{"fork-after-cuda", fork_after_cuda},
		{"fork-before-cuda", fork_before_cuda},
		{"forking-all-the-time", forking_all_the_time},
		{"orphan", orphan},
		{"signals", signals},
		{"exit-with-memory", exit_with_memory},
		{"locked", locked},
		{"little-data", little_data},
		{"use-while-paused", use_while_paused},
		{"close-sockets", close_sockets},
		{"closed-input", closed_input},
		{"daemon-with-files", daemon_with_files},
		{"daemon-without-streams", daemon_without_streams},
		{"ends", ends},
		{"ends-by-exit", ends_by_exit},
		{"ends-by-signal", ends_by_signal},
		{"ends-while-held", ends_while_held},
		{"ends-with-endless-work", ends_with_endless_work},
	};
	return run_mode(modes, sizeof modes / sizeof *modes, argc, argv);
}
