/* A library whose functions of the driver and of NCCL wait where the thread can be cancelled. */
#include <poll.h>
#include <stddef.h>

volatile int calls_that_wait;

static int wait(void)
{
	calls_that_wait++;
	poll(NULL, 0, 20);
	return 0;
}

#define WAITS(name)                                                                                                    \
	int name(void)                                                                                                 \
	{                                                                                                              \
		return wait();                                                                                         \
	}

WAITS(cuMemAlloc_v2)
WAITS(cuMemFree_v2)
WAITS(cuMemsetD8Async)
WAITS(cuMemGetAddressRange_v2)
WAITS(ncclCommDestroy)
