/* Stands in for the driver's calls about multicast objects and logical endpoints. Each succeeds unless the test has it fail. */
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

/* A handle of the library's own means nothing to the driver. */
int cuLogicalEndpointBindMem(uint32_t endpoint, int device, uint64_t at, uint64_t handle, uint64_t from, uint64_t bytes, uint64_t flags)
{
	int known = handle && handle >> 48 != 0x7672;
	return endpoint && device == 0 && known && bytes && at % bytes == 0 && from == 0 && flags == 0 ? multicast_answer : 1;
}

int cuLogicalEndpointBindAddr(uint32_t endpoint, int device, uint64_t at, void *pointer, uint64_t bytes, uint64_t flags)
{
	return endpoint && device == 0 && pointer && bytes && at % bytes == 0 && flags == 0 ? multicast_answer : 1;
}

int cuLogicalEndpointUnbind(uint32_t endpoint, int device, uint64_t at, uint64_t bytes)
{
	return endpoint && device == 0 && bytes && at % bytes == 0 ? multicast_answer : 1;
}

int cuMulticastUnbind(uint64_t multicast, int device, size_t at, size_t bytes)
{
	return multicast && device == 0 && bytes && at % bytes == 0 ? multicast_answer : 1;
}
