/*
 * Opens a plug-in and calls it on request.
 *
 *   main HOW PLUGIN
 *
 * HOW is a word for how the plug-in is opened. Says "ready", then for each line of
 * its input what the plug-in's `step` answers.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

int cudaMalloc(void **pointer, unsigned long bytes);
enum { BYTES = 4 << 20 };

/* What a plug-in with its own copy must not get. */
const char *whose(void) { return "the program's"; }

static void *open_it(const char *how, const char *plugin) {
	if (!strcmp(how, "plain")) return dlopen(plugin, RTLD_NOW);
	if (!strcmp(how, "by-name")) return dlopen(strrchr(plugin, '/') + 1, RTLD_NOW); /* in this program's own path */
	if (!strcmp(how, "deep")) return dlopen(plugin, RTLD_NOW | RTLD_DEEPBIND);
	if (!strcmp(how, "deep-lazy")) return dlopen(plugin, RTLD_LAZY | RTLD_DEEPBIND);
	if (!strcmp(how, "again")) { /* it is there already, as the program has it */
		void *first = dlopen(plugin, RTLD_NOW);
		dlopen(plugin, RTLD_NOW | RTLD_DEEPBIND | RTLD_NOLOAD);
		dlopen(NULL, RTLD_NOW | RTLD_DEEPBIND);
		return first;
	}
	if (!strcmp(how, "elsewhere")) return dlmopen(LM_ID_NEWLM, plugin, RTLD_NOW);
	return NULL;
}

int main(int count, char **words) {
	void *memory = NULL;
	char line[64];
	if (count != 3) return 2;
	int made = cudaMalloc(&memory, BYTES);
	void *plugin = open_it(words[1], words[2]);
	const char *(*step)(void *, unsigned long) = plugin ? (const char *(*)(void *, unsigned long))dlsym(plugin, "step") : NULL;
	if (made || !step) {
		printf("%d %s\n", made, dlerror());
		return 1;
	}
	puts("ready");
	fflush(stdout);
	while (fgets(line, sizeof line, stdin)) {
		puts(step(memory, BYTES));
		fflush(stdout);
	}
	return 0;
}
