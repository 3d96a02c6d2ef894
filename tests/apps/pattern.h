/*
 * Device memory with contents that can be checked, byte by byte and fast.
 *
 * Without a compiler for GPU code a program can only copy. So the pattern is
 * one pseudo-random strip of host memory, and every block of device memory
 * holds a piece of it with its own offset: filling is one copy within the
 * device per block, checking is a copy to the host and memcmp. This detects
 * blocks that are swapped, shifted by a few bytes, zeroed or overwritten.
 */
#ifndef APPS_PATTERN_H
#define APPS_PATTERN_H

#include <stddef.h>
#include <stdint.h>

#include "cudart.h"

struct pattern;

/* The result of a check. The three add up to the bytes checked. */
struct pattern_counts {
	uint64_t ok;      /* as they were written */
	uint64_t zero;    /* in 4 KiB blocks that are all zero and should not be */
	uint64_t corrupt; /* neither */
};

/* A well mixed 64-bit number from two. */
uint64_t pattern_mix(uint64_t a, uint64_t b);

/* `threads` threads check in parallel; 0 means one per core, 8 at most. Each
 * uses 8 MiB of pinned host memory and a stream. */
cudaError_t pattern_create(struct pattern **pattern, int device, uint64_t seed, int threads);
void pattern_destroy(struct pattern *pattern);

/* Writes the first `bytes` bytes of pattern `number` to `device` and waits for
 * them. Uses 5 MiB of device memory meanwhile. */
cudaError_t pattern_fill(struct pattern *pattern, void *device, size_t bytes, uint64_t number);

/* Adds to the counts. `device` must be the address that was filled; only the
 * bytes from `skip` on are checked. */
cudaError_t pattern_check(struct pattern *pattern, const void *device, size_t bytes,
                          uint64_t number, size_t skip, struct pattern_counts *counts);

/* Writes bytes [offset, offset + length) of pattern `number` to host memory. */
void pattern_expect(const struct pattern *pattern, uint64_t number, size_t offset,
                    void *out, size_t length);

/* Compares host memory with the pattern. */
void pattern_compare(const void *found, const void *expected, size_t bytes,
                     struct pattern_counts *counts);

#endif
