/*
 * A host with little memory, preloaded into programs: /proc/meminfo says how much there is left of what the file `total` in
 * $SMALL_HOST says, in bytes, after the anonymous memory that the kernel counts for all programs of this host. The memory itself is
 * real. A file named `fail-PID` there, with a function, a number, a code and a count, injects a fault into the simulated GPU of that
 * program from now on, or with the count 0 removes all faults; the file is removed when that is done.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static int open_really(const char *path, int flags, mode_t mode)
{
	return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

/* Without stdio, which opens by a name that this library has taken. */
static size_t text_of(char *buffer, size_t capacity, const char *path)
{
	int file = open_really(path, O_RDONLY | O_CLOEXEC, 0);
	ssize_t count = file < 0 ? 0 : read(file, buffer, capacity - 1);
	if (file >= 0)
		close(file);
	buffer[count > 0 ? count : 0] = 0;
	return count > 0 ? (size_t)count : 0;
}

static const char *folder(void)
{
	return getenv("SMALL_HOST");
}

static uint64_t anonymous_bytes(const char *pid)
{
	char path[64], text[256];
	unsigned long all, resident, shared;
	snprintf(path, sizeof path, "/proc/%.20s/statm", pid);
	if (text_of(text, sizeof text, path) == 0 || sscanf(text, "%lu %lu %lu", &all, &resident, &shared) != 3)
		return 0;
	return (uint64_t)(resident - shared) * (uint64_t)sysconf(_SC_PAGESIZE);
}

static int meminfo(void)
{
	char path[512], text[256];
	snprintf(path, sizeof path, "%s/total", folder());
	text_of(text, sizeof text, path);
	uint64_t total = strtoull(text, NULL, 10), used = 0;
	DIR *programs = opendir(folder());
	for (struct dirent *entry; programs != NULL && (entry = readdir(programs)) != NULL;)
		if (strspn(entry->d_name, "0123456789") == strlen(entry->d_name))
			used += anonymous_bytes(entry->d_name);
	if (programs != NULL)
		closedir(programs);
	uint64_t available = used < total ? total - used : 0;
	int file = memfd_create("meminfo", MFD_CLOEXEC);
	int length = snprintf(text, sizeof text, "MemTotal: %" PRIu64 " kB\nMemAvailable: %" PRIu64 " kB\n", total >> 10, available >> 10);
	if (file < 0 || write(file, text, (size_t)length) != length)
		abort();
	lseek(file, 0, SEEK_SET);
	return file;
}

static int open_any(const char *path, int flags, mode_t mode)
{
	char total[512];
	if (folder() != NULL && strcmp(path, "/proc/meminfo") == 0) {
		snprintf(total, sizeof total, "%s/total", folder());
		if (access(total, F_OK) == 0)
			return meminfo();
	}
	return open_really(path, flags, mode);
}

#define OPEN(name, more) \
	int name(const char *path, int flags, ...) \
	{ \
		va_list rest; \
		va_start(rest, flags); \
		mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(rest, mode_t) : 0; \
		va_end(rest); \
		return open_any(path, flags | (more), mode); \
	}

OPEN(open, 0)
OPEN(open64, O_LARGEFILE)

static void *watch(void *nothing)
{
	char path[512], text[256], function[64];
	uint64_t nth, count;
	uint32_t code;
	snprintf(path, sizeof path, "%s/fail-%d", folder(), getpid());
	for (;; usleep(2000)) {
		if (text_of(text, sizeof text, path) == 0 ||
		    sscanf(text, "%63s %" SCNu64 " %" SCNu32 " %" SCNu64 "\n", function, &nth, &code, &count) != 4)
			continue;
		void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
		int (*fail)(const char *, uint64_t, uint32_t, uint64_t) = NULL;
		void *symbol = driver == NULL ? NULL : dlsym(driver, "simgpu_fail");
		memcpy(&fail, &symbol, sizeof symbol);
		void (*clear)(void) = NULL;
		symbol = driver == NULL ? NULL : dlsym(driver, "simgpu_clear_faults");
		memcpy(&clear, &symbol, sizeof symbol);
		if (fail == NULL || clear == NULL)
			abort();
		if (count == 0)
			clear();
		else if (fail(function, nth, code, count) != 0)
			abort();
		unlink(path);
	}
	return nothing;
}

__attribute__((constructor)) static void join(void)
{
	char path[512], name[64];
	pthread_t thread;
	if (folder() == NULL)
		return;
	text_of(name, sizeof name, "/proc/self/comm");
	/* The programs, not the commands that start them. */
	if (strncmp(name, "engine", 6) != 0 && strncmp(name, "trainer", 7) != 0)
		return;
	snprintf(path, sizeof path, "%s/%d", folder(), getpid());
	close(open_really(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
	pthread_create(&thread, NULL, watch, NULL);
}
