/* Opens libraries, each linked with a CUDA runtime of its own, and has them make calls in turns: NAME=LIBRARY opens one, NAME:FUNCTION[=NUMBER]
   has it make calls, NAME:close closes it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int main(int count, char **arguments)
{
	setvbuf(stdout, NULL, _IOLBF, 0);
	struct { char *name; void *library; } libraries[8];
	size_t opened = 0;
	for (int i = 1; i < count; i++) {
		char *rest = strpbrk(arguments[i], "=:");
		if (rest == NULL)
			return 2;
		int opens = *rest == '=';
		*rest++ = 0;
		if (opens) {
			void *library = dlopen(rest, RTLD_NOW | RTLD_LOCAL);
			if (library == NULL)
				return puts(dlerror()), 1;
			libraries[opened].name = arguments[i];
			libraries[opened++].library = library;
			((void (*)(const char *))dlsym(library, "set_name"))(arguments[i]);
			continue;
		}
		char *number = strchr(rest, '=');
		if (number != NULL)
			*number++ = 0;
		for (size_t k = 0; k < opened; k++) {
			if (strcmp(libraries[k].name, arguments[i]) != 0)
				continue;
			if (strcmp(rest, "close") == 0)
				dlclose(libraries[k].library);
			else
				((void (*)(int))dlsym(libraries[k].library, rest))(number != NULL ? atoi(number) : 0);
		}
	}
	return 0;
}
