/* A library that allocates. The preloaded library tells by the return address that this one made the call. */
#include <stddef.h>

/* The flags are for unified memory; other functions do not look at their third argument, because they have none. */
int ask(int (*allocate)(void **pointer, size_t bytes, unsigned flags), void **pointer, size_t bytes)
{
	/* Not a tail call: it must return to this library. */
	volatile int code = allocate(pointer, bytes, 1);
	return code;
}

/* The same for physical memory, which takes a description of it. */
int ask_for_piece(int (*create)(void **handle, size_t bytes, const void *properties, unsigned long long flags), void **handle,
	size_t bytes, const void *properties)
{
	volatile int code = create(handle, bytes, properties, 0);
	return code;
}
