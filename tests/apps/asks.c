/* A library that allocates: whose memory it is, the library preloaded beside it sees from where the call comes. */
#include <stddef.h>

int ask(int (*allocate)(void **pointer, size_t bytes), void **pointer, size_t bytes)
{
	/* Not the last thing that happens here, so that the call returns here. */
	volatile int code = allocate(pointer, bytes);
	return code;
}
