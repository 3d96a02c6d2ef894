/* A library with its own functions under CUDA's names. */
int cudnnCreate(void **handle)
{
	*handle = 0;
	return 7;
}

int cuMemAlloc_v2(unsigned long long *address, unsigned long bytes)
{
	*address = bytes;
	return 7;
}
