/* An NVML that never answers, as of a machine with a GPU in trouble. */
#include <unistd.h>

int nvmlInit_v2(void)
{
	for (;;)
		pause();
}

#define NEVER(name) int name(void) { return nvmlInit_v2(); }
NEVER(nvmlShutdown)
NEVER(nvmlDeviceGetCount_v2)
NEVER(nvmlDeviceGetName)
NEVER(nvmlDeviceGetPciInfo_v3)
NEVER(nvmlDeviceGetMemoryInfo)
NEVER(nvmlDeviceGetHandleByIndex_v2)
NEVER(nvmlDeviceGetUUID)
NEVER(nvmlDeviceGetHandleByUUID)
NEVER(nvmlDeviceGetComputeRunningProcesses_v3)
