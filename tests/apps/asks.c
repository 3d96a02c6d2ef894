/* A library that allocates. The preloaded library tells by the return address that this one made the call. */
#include <stddef.h>

/* The flags are for unified memory; other functions do not look at their third argument, because they have none. */
int ask(int (*allocate)(void **pointer, size_t bytes, unsigned flags), void **pointer, size_t bytes)
{
	/* Not a tail call: it must return to this library. */
	volatile int code = allocate(pointer, bytes, 1);
	return code;
}
