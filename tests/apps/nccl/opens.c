/* A program that opens libraries: ones that use NCCL, or NCCL itself. Arguments: PATH of a library with try_linked, jump:PATH of one
 * with by_jumps, or lookup:PATH. Without arguments, there is no NCCL. */
#include "uses.h"
#include <string.h>

int main(int count, char **paths)
{
	void *library;
	setvbuf(stdout, NULL, _IONBF, 0);
	if (count == 1) {
		void *found = dlsym(RTLD_DEFAULT, "ncclCommRegister");
		const char *error = dlerror();
		printf("%s, %s\n", found ? "found" : "not found", error && strstr(error, "ncclCommRegister") ? "with an error" : "without an error");
		found = dlsym(dlopen(NULL, RTLD_NOW), "ncclCommDestroy");
		printf("%s\n", found ? "found" : "not found");
	}
	for (int at = 1; at < count; at++) {
		int jumps = !strncmp(paths[at], "jump:", 5);
		const char *path = jumps ? paths[at] + 5 : strncmp(paths[at], "lookup:", 7) ? paths[at] : paths[at] + 7;
		const char *name = strrchr(path, '/') + 1;
		if (!(library = dlopen(path, RTLD_NOW | RTLD_LOCAL))) {
			printf("%s\n", dlerror());
			return 1;
		}
		if (jumps) {
			try_nccl(name, ((struct nccl (*)(void))dlsym(library, "by_jumps"))());
			continue;
		}
		if (path == paths[at]) {
			((void (*)(const char *))dlsym(library, "try_linked"))(name);
			continue;
		}
		struct nccl nccl = {
			(void *(*)(void))dlsym(library, "nccl_make"),
			(int (*)(void *, void *, size_t, void **))dlsym(library, "ncclCommRegister"),
			(int (*)(void *, void *))dlsym(library, "ncclCommDeregister"),
			(int (*)(void *, void *, size_t, void **, int))dlsym(library, "ncclCommWindowRegister"),
			(int (*)(void *, void *))dlsym(library, "ncclCommWindowDeregister"),
			(int (*)(void *))dlsym(library, "ncclCommDestroy"),
			(int (*)(void *))dlsym(library, "ncclCommAbort"),
			(const char *(*)(int))dlsym(library, "ncclGetErrorString"),
			(const char *(*)(void *))dlsym(library, "ncclGetLastError"),
		};
		try_nccl(name, nccl);
	}
	return 0;
}
