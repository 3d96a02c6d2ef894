/*
 * Allocates memory in every way that the runtime has, writes to it, and prints
 * the result codes: one word for each way, which is "0 0 0 0" where all is
 * well: the allocation, a memset, a synchronisation, the free. Then waits for
 * the end of its input.
 */
#include "cudart.h"
#include <stdio.h>

struct pitched { void *pointer; size_t pitch, width, height; };
struct extent { size_t width, height, depth; };
cudaError_t cudaMallocPitch(void **pointer, size_t *pitch, size_t width, size_t height);
cudaError_t cudaMalloc3D(struct pitched *pitched, struct extent extent);
cudaError_t cudaMallocAsync(void **pointer, size_t bytes, cudaStream_t stream);
cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream);

enum { MIB = 1 << 20 };

static void use(const char *way, cudaError_t allocated, void *pointer, int in_order) {
	cudaError_t set = -1, waited = -1, freed = -1;
	if (allocated == cudaSuccess) {
		set = cudaMemsetAsync(pointer, 1, 2 * MIB, NULL);
		waited = cudaDeviceSynchronize();
		freed = in_order ? cudaFreeAsync(pointer, NULL) : cudaFree(pointer);
	}
	printf("%s: %d %d %d %d\n", way, allocated, set, waited, freed);
}

int main(void) {
	void *pointer = NULL, *kept = NULL;
	size_t pitch = 0;
	struct pitched pitched = {0};
	cudaError_t made;
	for (int i = 0; i < 4; i++) {
		made = cudaMalloc(&pointer, 8 * MIB);
		use("cudaMalloc", made, pointer, 0);
	}
	made = cudaMallocPitch(&pointer, &pitch, 4096, 1024);
	use("cudaMallocPitch", made, pointer, 0);
	made = cudaMalloc3D(&pitched, (struct extent){4096, 64, 16});
	use("cudaMalloc3D", made, pitched.pointer, 0);
	made = cudaMallocAsync(&pointer, 8 * MIB, NULL);
	use("cudaMallocAsync", made, pointer, 1);
	made = cudaMalloc(&kept, 8 * MIB);
	printf("ready %d %d\n", made, cudaGetLastError());
	fflush(stdout);
	while (getchar() != EOF)
		;
	return 0;
}
