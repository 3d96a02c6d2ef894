/*
 * A plug-in that sets memory with the driver's functions. LINKED: it is linked with
 * them. EARLY: it looks them up in a constructor. CHAIN: it opens the library that
 * does it, in a constructor, deeply, too. OWN: it uses no CUDA, but a function of
 * which it has its own copy in a library of its own.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>

#if defined(OWN)
const char *whose(void);
const char *step(void *memory, unsigned long bytes) {
	(void)memory, (void)bytes;
	return dlsym(RTLD_DEFAULT, "puts") ? whose() : "";
}
#elif defined(CHAIN)
static const char *(*next)(void *, unsigned long);
__attribute__((constructor)) static void begin(void) {
	void *library = dlopen(CHAIN, RTLD_NOW | RTLD_DEEPBIND);
	next = library ? (const char *(*)(void *, unsigned long))dlsym(library, "step") : NULL;
}
const char *step(void *memory, unsigned long bytes) { return next ? next(memory, bytes) : dlerror(); }
#else
typedef int Set(unsigned long address, unsigned char value, unsigned long bytes);
typedef int Wait(void);
static Set *set;
static Wait *wait_for_it;

#ifdef LINKED
Set cuMemsetD8_v2;
Wait cuCtxSynchronize;
static void look(void) { set = cuMemsetD8_v2, wait_for_it = cuCtxSynchronize; }
#else
static void look(void) {
	void *driver = dlopen("libcuda.so.1", RTLD_NOW);
	set = (Set *)dlsym(driver, "cuMemsetD8_v2");
	wait_for_it = (Wait *)dlsym(driver, "cuCtxSynchronize");
}
#endif

#ifdef EARLY
__attribute__((constructor)) static void begin(void) { look(); }
#endif

const char *step(void *memory, unsigned long bytes) {
	static char text[32];
	if (!set) look();
	int was_set = set((unsigned long)memory, 7, bytes), waited = wait_for_it();
	snprintf(text, sizeof text, "%d %d", was_set, waited);
	return text;
}
#endif
