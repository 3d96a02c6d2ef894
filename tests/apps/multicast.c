/* Stands in for the driver's calls about multicast objects. Each succeeds unless the test has it fail. */
#include <stddef.h>
#include <stdint.h>

int multicast_answer;

int cuMulticastBindMem(uint64_t multicast, size_t at, uint64_t handle, size_t from, size_t bytes, uint64_t flags)
{
	return multicast && handle && bytes && at % bytes == 0 && from == 0 && flags == 0 ? multicast_answer : 1;
}

int cuMulticastBindAddr_v2(uint64_t multicast, int device, size_t at, uint64_t pointer, size_t bytes, uint64_t flags)
{
	return multicast && device == 0 && pointer && bytes && at % bytes == 0 && flags == 0 ? multicast_answer : 1;
}

int cuMulticastUnbind(uint64_t multicast, int device, size_t at, size_t bytes)
{
	return multicast && device == 0 && bytes && at % bytes == 0 ? multicast_answer : 1;
}
