/* Looks up the next definition of its own function, as LLVM's OpenMP and many preloaded libraries do. The meaning of RTLD_NEXT
 * depends on the caller. Built as two libraries and a program that is linked with both. */
#include "reach.h"

#if defined(FIRST)
int numbered(void)
{
	int_fn behind = FUNCTION(int_fn, dlsym(RTLD_NEXT, "numbered"));
	return behind == NULL || behind == numbered ? -1 : 10 + behind();
}

/* A name of the table that no library after this one defines. */
int cuMulticastBindMem(void)
{
	return dlsym(RTLD_NEXT, "cuMulticastBindMem") == NULL ? 1 : 2;
}

int versioned(void)
{
	return dlvsym(RTLD_NEXT, "numbered", "NO_SUCH_VERSION") == NULL;
}
#elif defined(SECOND)
int numbered(void)
{
	return 2;
}
#else
extern int numbered(void), versioned(void);

int main(void)
{
	void *first = dlopen("libfirst.so", RTLD_NOW | RTLD_NOLOAD);
	int_fn own = first ? FUNCTION(int_fn, dlsym(first, "cuMulticastBindMem")) : NULL;
	printf("%d %d %d %s\n", numbered(), versioned(), own ? own() : -1, owner((void *)own));
	return 0;
}
#endif
