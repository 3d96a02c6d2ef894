/*
 * Device memory with contents that can be checked, byte by byte and fast.
 *
 * Without a compiler for GPU code a program can only copy. So the pattern is
 * one pseudo-random strip of host memory, and every block of device memory
 * holds a piece of it that starts at a place of its own: filling is a copy
 * within the device for each block, checking is a copy to the host and memcmp.
 * Blocks that change places, move by a few bytes, turn to zero or keep
 * somebody else's contents are all noticed.
 */
#ifndef APPS_PATTERN_H
#define APPS_PATTERN_H

#include <stddef.h>
#include <stdint.h>

#include "cudart.h"

struct pattern;

/* What a check found. The three add up to the bytes that were looked at. */
struct pattern_counts {
	uint64_t ok;      /* as they were written */
	uint64_t zero;    /* in pieces of 4 KiB that are zero throughout, and should not be */
	uint64_t corrupt; /* neither */
};

/* A well mixed 64-bit number from two. */
uint64_t pattern_mix(uint64_t a, uint64_t b);

/* `threads` check at the same time; 0 stands for one each core, 8 at most.
 * Uses pinned host memory of 8 MiB a thread, and a stream each. */
cudaError_t pattern_create(struct pattern **pattern, int device, uint64_t seed, int threads);
void pattern_destroy(struct pattern *pattern);

/* `bytes` of the pattern numbered `number`, from its byte 0, put at `device`.
 * Returns when they are there. Takes 5 MiB of device memory meanwhile. */
cudaError_t pattern_fill(struct pattern *pattern, void *device, size_t bytes, uint64_t number);

/* Counts are added to, not set. `device` must be where the fill began; only the
 * bytes from `skip` on are looked at. */
cudaError_t pattern_check(struct pattern *pattern, const void *device, size_t bytes,
                          uint64_t number, size_t skip, struct pattern_counts *counts);

/* The bytes [offset, offset + length) of pattern `number`, into host memory. */
void pattern_expect(const struct pattern *pattern, uint64_t number, size_t offset,
                    void *out, size_t length);

/* Compares host memory with what it should be. */
void pattern_compare(const void *found, const void *expected, size_t bytes,
                     struct pattern_counts *counts);

#endif
