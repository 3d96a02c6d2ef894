/* The engine as a stranger would write it: plain CUDA runtime calls. */
#include "engine_core.h"
#include "cudart.h"

#include <string.h>

static bool stage_begin(const char *stage)
{
	(void)stage;
	return true;
}

static bool stage_end(void)
{
	return true;
}

static bool request(const char *line, FILE *out)
{
	void *pointer;
	cudaError_t error;

	/* No driver can restore this from a checkpoint. */
	if (strcmp(line, "unified") != 0)
		return false;
	error = cudaMallocManaged(&pointer, 4096, cudaMemAttachGlobal);
	fprintf(out, "unified %d\n", error);
	return true;
}

int main(int argc, char **argv)
{
	static const struct engine_variant plain = {
		.name = "engine",
		.about = "A small inference engine made of copies, to try things on.",
		.stage_begin = stage_begin,
		.stage_end = stage_end,
		.request = request,
		.requests_help = "  unified      allocates unified memory and keeps it\n",
	};
	return engine_main(&plain, argc, argv);
}
