/* Has reads of files whose path ends with $READ_FAILS answer EIO, as a bad disk does; with $READ_FAILS_WHILE, while there is such a file. */
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static int fails(int file)
{
	const char *ending = getenv("READ_FAILS"), *condition = getenv("READ_FAILS_WHILE");
	char name[64], path[PATH_MAX];
	ssize_t length, wanted;

	if (!ending || (condition && access(condition, F_OK)))
		return 0;
	snprintf(name, sizeof name, "/proc/self/fd/%d", file);
	length = readlink(name, path, sizeof path);
	wanted = (ssize_t)strlen(ending);
	errno = EIO;
	return length >= wanted && !memcmp(path + length - wanted, ending, (size_t)wanted);
}

ssize_t read(int file, void *to, size_t count)
{
	return fails(file) ? -1 : syscall(SYS_read, file, to, count);
}

ssize_t pread64(int file, void *to, size_t count, off64_t at)
{
	return fails(file) ? -1 : syscall(SYS_pread64, file, to, count, at);
}
