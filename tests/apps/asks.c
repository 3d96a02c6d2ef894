/* A library that allocates. The preloaded library tells by the return address that this one made the call. */
#include <stddef.h>

int ask(int (*allocate)(void **pointer, size_t bytes), void **pointer, size_t bytes)
{
	/* Not a tail call: it must return to this library. */
	volatile int code = allocate(pointer, bytes);
	return code;
}
