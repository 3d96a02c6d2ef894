/* A library whose function of the driver may be called in signal handlers, at any moment: it only counts. */
#include <stdatomic.h>

atomic_ulong calls_begun, calls_ended;

int cuMemsetD16Async(void)
{
	atomic_fetch_add(&calls_begun, 1);
	for (volatile int i = 0; i < 100; i++)
		;
	atomic_fetch_add(&calls_ended, 1);
	return 0;
}
