/*
 * Moments at which a preloaded library must not be noticed, one per mode. Knows nothing of vramctl.
 * Has its own malloc. Prints "ok" at the end, or what went wrong.
 */
#define _GNU_SOURCE
#include "check.h"
#include "cudart.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

enum { BYTES = 4 << 20 };

/* Hands over to the test and waits until it hands back. */
static void turn(const char *line)
{
	char answer[64];
	printf("%s\n", line);
	fflush(stdout);
	check(fgets(answer, sizeof answer, stdin) != NULL, "the test went away");
}

/* Whether this thread has been interrupted in malloc, so that memory can be neither taken nor freed. */
static _Thread_local bool in_malloc;

/* Whether the preloaded library gets no memory any more, as when the process is at a limit of its own. */
static volatile bool is_library_without_memory;

#define REFUSED (is_library_without_memory && is_library(__builtin_return_address(0)))

static bool is_library(const void *caller)
{
	Dl_info its;
	return dladdr(caller, &its) != 0 && strstr(its.dli_fname, "libvramctl") != NULL;
}

static void only_outside_of_malloc(void)
{
	static const char wrong[] = "wrong: memory in the middle of malloc\n";
	if (in_malloc)
		_exit(write(1, wrong, sizeof wrong - 1) > 0 ? 3 : 4);
}

void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t count, size_t bytes);
void *__libc_realloc(void *memory, size_t bytes);
void *__libc_memalign(size_t alignment, size_t bytes);
void __libc_free(void *memory);

void *malloc(size_t bytes)
{
	only_outside_of_malloc();
	return REFUSED ? NULL : __libc_malloc(bytes);
}

void *calloc(size_t count, size_t bytes)
{
	only_outside_of_malloc();
	return REFUSED ? NULL : __libc_calloc(count, bytes);
}

void *realloc(void *memory, size_t bytes)
{
	only_outside_of_malloc();
	return REFUSED ? NULL : __libc_realloc(memory, bytes);
}

void *aligned_alloc(size_t alignment, size_t bytes)
{
	only_outside_of_malloc();
	return REFUSED ? NULL : __libc_memalign(alignment, bytes);
}

int posix_memalign(void **memory, size_t alignment, size_t bytes)
{
	only_outside_of_malloc();
	*memory = REFUSED ? NULL : __libc_memalign(alignment, bytes);
	return *memory == NULL ? ENOMEM : 0;
}

void free(void *memory)
{
	only_outside_of_malloc();
	__libc_free(memory);
}

static void enter_malloc(void)
{
	in_malloc = true;
}

static void leave_malloc(void)
{
	in_malloc = false;
}

static void *allocate(void *nothing)
{
	void *device;
	check(cudaMalloc(&device, BYTES) == cudaSuccess, "cudaMalloc");
	check(cudaMemsetAsync(device, 1, BYTES, NULL) == cudaSuccess, "cudaMemset");
	return nothing;
}

/* Exits as in a signal handler that has interrupted malloc, in a thread that has not worked on the device, and with requests that have
 * just failed. */
static void exit_in_malloc(void)
{
	void *none;
	pthread_t thread;
	/* Ends before the driver's exit handler, and after the library's: those begin to work now, and with the allocation. */
	check(cudaMalloc(&none, 4096) == cudaSuccess, "cudaMalloc");
	atexit(leave_malloc);
	check(pthread_create(&thread, NULL, allocate, NULL) == 0, "pthread_create");
	check(pthread_join(thread, NULL) == 0, "pthread_join");
	turn("ready");
	for (size_t i = 0; i < 5; i++)
		check(cudaMalloc(&none, ((size_t)1 << 40) + i) == cudaErrorMemoryAllocation, "more than there is");
	atexit(enter_malloc);
	exit(0);
}

/* Cancels threads in functions of the driver's. Those of a library that is preloaded beside the other wait where a thread can be
 * cancelled, as the driver's may. */
typedef int call_t(void *a, size_t b, size_t c, void *d);

static void *calls_until_cancelled(void *call)
{
	while (((call_t *)call)(NULL, 0, 0, NULL) == cudaSuccess)
		pthread_testcancel();
	return NULL;
}

static void cancelled(void)
{
	static const char *const names[] = {"cuMemAlloc_v2", "cuMemFree_v2", "cuMemsetD8Async", "cuMemGetAddressRange_v2", "ncclCommDestroy"};
	volatile int *calls = dlsym(RTLD_DEFAULT, "calls_that_wait");
	check(calls != NULL, "the library beside the other is missing");
	for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
		pthread_t thread;
		void *call = dlsym(RTLD_DEFAULT, names[i]), *result = NULL;
		int before = *calls;
		check(pthread_create(&thread, NULL, calls_until_cancelled, call) == 0, "pthread_create");
		/* Not in the first call, which differs. */
		while (*calls < before + 3)
			usleep(1000);
		check(pthread_cancel(thread) == 0 && pthread_join(thread, &result) == 0, "pthread_cancel");
		check(result == PTHREAD_CANCELED, "the thread was not cancelled");
	}
}

/* Makes a child by the system call, as sandboxes do: no fork handler runs. Its exit must not be taken for its parent's. */
static void stray_child(void)
{
	int status = -1;
	allocate(NULL);
	turn("ready");
	pid_t child = (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
	if (child == 0)
		exit(0);
	check(waitpid(child, &status, 0) == child && status == 0, "the child did not end well");
	turn("still ready");
}

/* Must not start threads, as in a sandbox or at a limit of its user. */
static void no_threads(void)
{
	struct sock_filter refuse[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone, 1, 0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone3, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EAGAIN),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog filter = {sizeof refuse / sizeof *refuse, refuse};
	int (*pause)(const char *, long, int) = (int (*)(const char *, long, int))dlsym(RTLD_DEFAULT, "vramctl_pause");
	const char *(*error)(void) = (const char *(*)(void))dlsym(RTLD_DEFAULT, "vramctl_last_error");
	void *none;
	check(cudaMalloc(&none, 4096) == cudaSuccess, "cudaMalloc");
	check(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0, "seccomp");
	check(cudaMalloc(&none, BYTES) == cudaSuccess, "cudaMalloc");
	printf("pause: %d", pause(NULL, 5000, 0));
	printf(" %s\n", error());
	check(cudaDeviceSynchronize() == cudaSuccess, "the memory is gone");
}

/* Takes all descriptors that it may have. */
static void take_descriptors(void)
{
	while (dup(0) >= 0)
		;
	check(errno == EMFILE, "the descriptors have not run out");
}

/* Reaches a limit while the test has it held. The contents of its memory are there afterwards. */
static void held_at_limit(void (*reach)(void), void (*again)(void))
{
	static char contents[BYTES];
	char answer[64];
	void *device;
	check(cudaMalloc(&device, BYTES) == cudaSuccess, "cudaMalloc");
	check(cudaMemsetAsync(device, 7, BYTES, NULL) == cudaSuccess, "cudaMemsetAsync");
	turn("ready");
	reach();
	for (;;) {
		printf("at the limit\n");
		fflush(stdout);
		check(fgets(answer, sizeof answer, stdin) != NULL, "the test went away");
		if (strcmp(answer, "end\n") == 0)
			break;
		again();
	}
	check(cudaMemcpyAsync(contents, device, BYTES, cudaMemcpyDeviceToHost, NULL) == cudaSuccess, "cudaMemcpyAsync");
	check(cudaDeviceSynchronize() == cudaSuccess, "cudaDeviceSynchronize");
	for (size_t i = 0; i < BYTES; i++)
		check(contents[i] == 7, "the contents are others");
}

static void take_descriptors_up_to(rlim_t most)
{
	struct rlimit limit = {128, most};
	check(setrlimit(RLIMIT_NOFILE, &limit) == 0, "setrlimit");
	take_descriptors();
}

static void up_to_the_soft_limit(void)
{
	take_descriptors_up_to(1024);
}

static void up_to_the_hard_limit(void)
{
	take_descriptors_up_to(128);
}

static void held_at_soft_limit(void)
{
	held_at_limit(up_to_the_soft_limit, take_descriptors);
}

/* Whether this program gets the number of what the preloaded library closes, as a thread does that asks for one all the time. */
static volatile bool takes_what_is_closed;
static volatile int taken;

int close(int number)
{
	Dl_info caller;
	int closed = (int)syscall(SYS_close, number);
	if (takes_what_is_closed && dladdr(__builtin_return_address(0), &caller) != 0 && strstr(caller.dli_fname, "libvramctl") != NULL)
		taken = dup(0);
	return closed;
}

/* For longer than the library takes to look at its socket. */
static void ask_for_descriptors(void)
{
	takes_what_is_closed = true;
	sleep(5);
	takes_what_is_closed = false;
}

static void held_at_limit_and_asking(void)
{
	held_at_limit(up_to_the_hard_limit, ask_for_descriptors);
}

static void held_at_hard_limit(void)
{
	held_at_limit(up_to_the_hard_limit, take_descriptors);
}

/* Whether the preloaded library starts no thread any more. The simulated GPU goes on: a real driver needs none for a copy. */
static volatile bool are_threads_refused;

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*work)(void *), void *argument)
{
	static int (*real)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
	Dl_info caller;
	if (are_threads_refused && dladdr(__builtin_return_address(0), &caller) != 0 && strstr(caller.dli_fname, "libvramctl") != NULL)
		return EAGAIN;
	if (real == NULL)
		*(void **)&real = dlsym(RTLD_NEXT, "pthread_create");
	return real(thread, attributes, work, argument);
}

static void refuse_threads(void)
{
	are_threads_refused = true;
}

static void nothing(void)
{
}

static void held_without_threads(void)
{
	held_at_limit(refuse_threads, nothing);
}

/* The memory of a program that ends, and a check of its contents. */
static void *result;

static void *allocate_result(void)
{
	check(cudaMalloc(&result, BYTES) == cudaSuccess, "cudaMalloc");
	check(cudaMemsetAsync(result, 7, BYTES, NULL) == cudaSuccess, "cudaMemsetAsync");
	return result;
}

static void save_result(void *device)
{
	static char contents[BYTES];
	check(cudaMemcpyAsync(contents, device, BYTES, cudaMemcpyDeviceToHost, NULL) == cudaSuccess, "cudaMemcpyAsync");
	check(cudaDeviceSynchronize() == cudaSuccess, "cudaDeviceSynchronize");
	check(contents[0] == 7 && contents[BYTES - 1] == 7, "the contents are others");
}

/* Makes calls while the library gets no memory: those that plain CUDA needs none for succeed. */
static void host_memory_short(void)
{
	void *more[8], *small;
	size_t free_bytes, all_bytes;
	allocate_result();
	turn("ready");
	is_library_without_memory = true;
	for (size_t i = 0; i < sizeof more / sizeof *more; i++) {
		check(cudaMalloc(&more[i], BYTES) == cudaSuccess, "cudaMalloc");
		check(cudaMemsetAsync(more[i], 1, BYTES, NULL) == cudaSuccess, "cudaMemsetAsync");
	}
	check(cudaMalloc(&small, 1000) == cudaSuccess && cudaFree(small) == cudaSuccess, "a small request");
	check(cudaMemGetInfo(&free_bytes, &all_bytes) == cudaSuccess, "cudaMemGetInfo");
	save_result(result);
	for (size_t i = 0; i < sizeof more / sizeof *more; i++)
		check(cudaFree(more[i]) == cudaSuccess, "cudaFree");
	check(cudaMalloc(&small, (size_t)1 << 40) == cudaErrorMemoryAllocation, "more than there is");
	is_library_without_memory = false;
	turn("done");
	save_result(result);
}

/* Has no memory until the test says so. */
static void memory_comes_late(void)
{
	check(cudaMalloc(&result, BYTES) == cudaSuccess && cudaFree(result) == cudaSuccess, "cudaMalloc");
	turn("ready");
	save_result(allocate_result());
	turn("saved");
}

/* Whether all threads of the library, of which there are some, may use these processors, as any others may. */
static bool run_freely(const cpu_set_t *processors)
{
	DIR *threads = opendir("/proc/self/task");
	struct dirent *one;
	int found = 0, free = 0;
	check(threads != NULL, "/proc/self/task");
	while ((one = readdir(threads)) != NULL) {
		char path[300], name[16] = "";
		cpu_set_t its;
		int thread = atoi(one->d_name);
		snprintf(path, sizeof path, "/proc/self/task/%s/comm", one->d_name);
		FILE *file = fopen(path, "r");
		if (file == NULL)
			continue;
		bool is_ours = fgets(name, sizeof name, file) != NULL && strncmp(name, "vramctl", 7) == 0;
		fclose(file);
		if (!is_ours || sched_getaffinity(thread, sizeof its, &its) != 0)
			continue;
		found++;
		free += CPU_EQUAL(&its, processors) && sched_getscheduler(thread) == SCHED_OTHER;
	}
	closedir(threads);
	return found > 0 && free == found;
}

/* A thread that has just started may not have got to it. */
static void check_scheduling(const cpu_set_t *processors)
{
	for (int i = 0; i < 10000 && !run_freely(processors); i++)
		usleep(1000);
	check(run_freely(processors), "a thread of the library is bound, or has another policy");
}

/* Its first thread is bound to one processor, and has another policy than it was started with. */
static void bound(void)
{
	int (*pause)(const char *, long, int) = (int (*)(const char *, long, int))dlsym(RTLD_DEFAULT, "vramctl_pause");
	int (*resume)(const char *, long) = (int (*)(const char *, long))dlsym(RTLD_DEFAULT, "vramctl_resume");
	struct sched_param high = {.sched_priority = 1}, none = {0};
	cpu_set_t all, one;
	check(sched_getaffinity(0, sizeof all, &all) == 0, "sched_getaffinity");
	CPU_ZERO(&one);
	for (int processor = 0; CPU_COUNT(&one) == 0; processor++)
		if (CPU_ISSET(processor, &all))
			CPU_SET(processor, &one);
	check(sched_setaffinity(0, sizeof one, &one) == 0, "sched_setaffinity");
	if (sched_setscheduler(0, SCHED_RR, &high) != 0)
		check(sched_setscheduler(0, SCHED_BATCH, &none) == 0, "sched_setscheduler");
	allocate_result();
	check_scheduling(&all);
	check(pause(NULL, 5000, 0) == 0 && resume(NULL, 0) == 0, "vramctl_pause");
	check_scheduling(&all);
	turn("ready");
	check_scheduling(&all);
	save_result(result);
}

/* Goes on when the main thread has ended. */
static void *go_on(void *main_thread)
{
	check(pthread_join(*(pthread_t *)main_thread, NULL) == 0, "pthread_join");
	if (result == NULL)
		allocate_result();
	turn("ready");
	save_result(result);
	printf("ok\n");
	exit(0);
}

static void end_main_thread(void)
{
	static pthread_t this, thread;
	this = pthread_self();
	check(pthread_create(&thread, NULL, go_on, &this) == 0, "pthread_create");
	pthread_exit(NULL);
}

/* The last destructor of the main thread saves a result. */
static void save_at_the_end_of_main_thread(void)
{
	pthread_key_t key;
	/* After what the library may have created, as the destructors run in this order. */
	allocate_result();
	check(pthread_key_create(&key, save_result) == 0 && pthread_setspecific(key, result) == 0, "a key");
	turn("ready");
	end_main_thread();
}

/* The last launch of a program that ends. If its memory is paused, CUDA refuses that. */
static void launch_at_the_end(void)
{
	cudaMemsetAsync(result, 1, BYTES, NULL);
	printf("ok\n");
	fflush(stdout);
}

static void exit_while_held(void)
{
	allocate_result();
	check(atexit(launch_at_the_end) == 0, "atexit");
	turn("ready");
	exit(0);
}

static void exit_quickly_while_held(void)
{
	allocate_result();
	check(at_quick_exit(launch_at_the_end) == 0, "at_quick_exit");
	turn("ready");
	quick_exit(0);
}

/* Has only so much space for files, and its standard error is one that has used it up. */
static void no_space(void)
{
	struct rlimit limit = {64, 64};
	void *device;
	check(cudaMalloc(&device, 4096) == cudaSuccess, "cudaMalloc");
	check(setrlimit(RLIMIT_FSIZE, &limit) == 0, "setrlimit");
	check(cudaMalloc(&device, BYTES) == cudaSuccess, "cudaMalloc");
}

/* Bytes that the messages of a child bring to the other end of what it has in the place of its standard error. */
static int said_into(int file, int flags, int other_end)
{
	int status = -1, bytes = -1;
	pid_t child = fork();
	if (child == 0) {
		check(dup3(file, 2, flags) == 2, "dup3");
		allocate(NULL);
		_exit(0);
	}
	check(waitpid(child, &status, 0) == child && status == 0, "the child did not end well");
	check(ioctl(other_end, FIONREAD, &bytes) == 0, "FIONREAD");
	return bytes;
}

static int said_into_file(int mode, int flags)
{
	char path[] = "/tmp/guest-XXXXXX";
	int made = mkstemp(path), file = open(path, O_WRONLY | mode);
	check(made >= 0 && file > 2 && unlink(path) == 0, "a file");
	return said_into(file, flags, made);
}

/* Has closed its standard error, and another file has the number. */
static void another_error(void)
{
	int ends[2];
	check(said_into_file(0, 0) == 0, "a message in a file that may be data");
	check(said_into_file(O_APPEND, O_CLOEXEC) == 0, "a message in a file that is no child's");
	check(said_into_file(O_APPEND, 0) > 0, "no message in a log");
	check(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0 && said_into(ends[0], 0, ends[1]) == 0, "a message in a connection");
	check(pipe(ends) == 0 && said_into(ends[1], 0, ends[0]) > 0, "no message in a pipe");
}

/* Was started without a standard error, and its log may be data. */
static void without_error(void)
{
	int ends[2], first = open("/dev/null", O_RDONLY);
	check(first == 2, "there is a standard error");
	check(said_into_file(O_APPEND, 0) == 0, "a message in a file");
	check(pipe(ends) == 0 && said_into(ends[1], 0, ends[0]) == 0, "a message in a pipe");
}

/* Runs in the background of a terminal that stops those who write to it from there (stty tostop). */
static void in_the_background(void)
{
	int terminal = posix_openpt(O_RDWR | O_NOCTTY), status = -1;
	check(terminal >= 0 && grantpt(terminal) == 0 && unlockpt(terminal) == 0, "posix_openpt");
	pid_t leader = fork();
	if (leader == 0) {
		struct termios settings;
		setsid();
		/* The first terminal that a leader of a session opens becomes the session's. */
		check(dup2(open(ptsname(terminal), O_RDWR), 2) == 2 && tcgetattr(2, &settings) == 0, "the terminal");
		settings.c_lflag |= TOSTOP;
		check(tcsetattr(2, TCSANOW, &settings) == 0, "tcsetattr");
		pid_t background = fork();
		if (background == 0) {
			setpgid(0, 0);
			allocate(NULL);
			_exit(0);
		}
		check(waitpid(background, &status, WUNTRACED) == background, "waitpid");
		if (WIFSTOPPED(status))
			kill(background, SIGKILL);
		_exit(WIFEXITED(status) && WEXITSTATUS(status) == 0 ? 0 : 1);
	}
	check(waitpid(leader, &status, 0) == leader && status == 0, "a message has stopped the program");
}

int main(int argc, char **argv)
{
	static const struct mode modes[] = {
		{"another-error", another_error},
		{"bound", bound},
		{"cancelled", cancelled},
		{"end-main-thread", end_main_thread},
		{"exit-in-malloc", exit_in_malloc},
		{"exit-quickly-while-held", exit_quickly_while_held},
		{"exit-while-held", exit_while_held},
		{"held-at-hard-limit", held_at_hard_limit},
		{"held-at-limit-and-asking", held_at_limit_and_asking},
		{"held-at-soft-limit", held_at_soft_limit},
		{"held-without-threads", held_without_threads},
		{"host-memory-short", host_memory_short},
		{"in-the-background", in_the_background},
		{"memory-comes-late", memory_comes_late},
		{"no-space", no_space},
		{"no-threads", no_threads},
		{"save-at-the-end-of-main-thread", save_at_the_end_of_main_thread},
		{"stray-child", stray_child},
		{"without-error", without_error},
	};
	return run_mode(modes, sizeof modes / sizeof *modes, argc, argv);
}
