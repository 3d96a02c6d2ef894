/*
 * A small "inference engine": what engine.c and engine_regions.c have in common.
 *
 * It does with the GPU what a real engine does, with copies in place of
 * kernels: it loads weights, sets a KV cache aside, captures a CUDA graph over
 * fixed addresses and then answers requests by replaying it.
 */
#ifndef APPS_ENGINE_CORE_H
#define APPS_ENGINE_CORE_H

#include <stdbool.h>
#include <stdio.h>

/* The differences between the two programs. */
struct engine_variant {
	const char *name;
	const char *about;
	/* Called around the allocations of "weights" and "kv_cache". A failure is
	 * reported on stderr and aborts the start. */
	bool (*stage_begin)(const char *stage);
	bool (*stage_end)(void);
	/* Handles a request unknown to the engine: prints one line and returns true,
	 * or returns false. */
	bool (*request)(const char *line, FILE *out);
	/* More lines for the `help` answer, each with its end of line. */
	const char *requests_help;
};

int engine_main(const struct engine_variant *variant, int argc, char **argv);

#endif
