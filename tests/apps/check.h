/* How a sample program says what went wrong. */
#ifndef APPS_CHECK_H
#define APPS_CHECK_H

#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* Ends the program unless it is so. */
static void check(bool fine, const char *what)
{
	if (!fine) {
		printf("wrong: %s\n", what);
		fflush(stdout);
		_exit(1);
	}
}

/* What a program does, by the name that it is told. */
struct mode {
	const char *name;
	void (*run)(void);
};

static inline int run_mode(const struct mode *modes, size_t count, int argc, char **argv)
{
	for (size_t i = 0; argc == 2 && i < count; i++) {
		if (strcmp(argv[1], modes[i].name) == 0) {
			modes[i].run();
			printf("ok\n");
			return 0;
		}
	}
	fprintf(stderr, "usage: %s MODE; the modes:", argv[0]);
	for (size_t i = 0; i < count; i++)
		fprintf(stderr, " %s", modes[i].name);
	fprintf(stderr, "\n");
	return 2;
}

#endif
