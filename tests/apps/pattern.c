#define _GNU_SOURCE
#include "pattern.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Large enough for copies to run at the link's full speed. */
#define BLOCK ((size_t)4 << 20)
/* Where in the strip a block's piece may start: any eighth byte of so many. */
#define WINDOW ((size_t)1 << 20)
/* The granularity at which zeroed memory is distinguished from corrupt memory. */
#define GRAIN ((size_t)4096)
#define MAX_LANES 8

/* One checking thread's buffers: it copies into one half while it checks the other. */
struct lane {
	cudaStream_t stream;
	unsigned char *half[2];
};

struct pattern {
	int device;
	uint64_t seed;
	unsigned char *strip; /* BLOCK + WINDOW bytes, pinned */
	int lanes;
	struct lane lane[MAX_LANES];
};

uint64_t pattern_mix(uint64_t a, uint64_t b)
{
	uint64_t x = a * UINT64_C(0x9e3779b97f4a7c15) + b + UINT64_C(0x632be59bd9b4e019);
	x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
	x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
	return x ^ (x >> 31);
}

/* The piece of the strip that block `index` of pattern `number` holds. */
static size_t start_of(const struct pattern *p, uint64_t number, size_t index)
{
	return (size_t)(pattern_mix(pattern_mix(p->seed, number), index) % (WINDOW / 8)) * 8;
}

cudaError_t pattern_create(struct pattern **out, int device, uint64_t seed, int threads)
{
	struct pattern *p = calloc(1, sizeof *p);
	if (p == NULL)
		return cudaErrorMemoryAllocation;
	p->device = device;
	p->seed = seed;
	if (threads <= 0)
		threads = (int)sysconf(_SC_NPROCESSORS_ONLN);
	if (threads < 1)
		threads = 1;
	if (threads > MAX_LANES)
		threads = MAX_LANES;

	cudaError_t error = cudaMallocHost((void **)&p->strip, BLOCK + WINDOW);
	for (; error == cudaSuccess && p->lanes < threads; p->lanes++) {
		struct lane *lane = &p->lane[p->lanes];
		error = cudaStreamCreateWithFlags(&lane->stream, cudaStreamNonBlocking);
		for (int i = 0; error == cudaSuccess && i < 2; i++)
			error = cudaMallocHost((void **)&lane->half[i], BLOCK);
	}
	if (error != cudaSuccess) {
		pattern_destroy(p);
		return error;
	}
	for (size_t i = 0; i < BLOCK + WINDOW; i += 8) {
		uint64_t word = pattern_mix(seed, i);
		memcpy(p->strip + i, &word, 8);
	}
	*out = p;
	return cudaSuccess;
}

void pattern_destroy(struct pattern *p)
{
	if (p == NULL)
		return;
	for (int i = 0; i < MAX_LANES; i++) {
		for (int half = 0; half < 2; half++)
			if (p->lane[i].half[half] != NULL)
				cudaFreeHost(p->lane[i].half[half]);
		if (p->lane[i].stream != NULL)
			cudaStreamDestroy(p->lane[i].stream);
	}
	if (p->strip != NULL)
		cudaFreeHost(p->strip);
	free(p);
}

cudaError_t pattern_fill(struct pattern *p, void *device, size_t bytes, uint64_t number)
{
	cudaStream_t stream = p->lane[0].stream;
	unsigned char *strip = NULL;
	cudaError_t error = cudaMalloc((void **)&strip, BLOCK + WINDOW);
	if (error != cudaSuccess)
		return error;
	error = cudaMemcpyAsync(strip, p->strip, BLOCK + WINDOW, cudaMemcpyHostToDevice, stream);
	for (size_t at = 0; error == cudaSuccess && at < bytes; at += BLOCK) {
		size_t length = bytes - at < BLOCK ? bytes - at : BLOCK;
		error = cudaMemcpyAsync((unsigned char *)device + at,
		                        strip + start_of(p, number, at / BLOCK), length,
		                        cudaMemcpyDeviceToDevice, stream);
	}
	/* The copies read the strip, so it may be freed only after them, even on error. */
	cudaError_t finished = cudaStreamSynchronize(stream);
	cudaError_t freed = cudaFree(strip);
	if (error == cudaSuccess)
		error = finished;
	return error == cudaSuccess ? freed : error;
}

static bool all_zero(const unsigned char *bytes, size_t length)
{
	return length == 0 || (bytes[0] == 0 && memcmp(bytes, bytes + 1, length - 1) == 0);
}

void pattern_compare(const void *found, const void *expected, size_t bytes,
                     struct pattern_counts *counts)
{
	const unsigned char *f = found, *e = expected;
	if (memcmp(f, e, bytes) == 0) {
		counts->ok += bytes;
		return;
	}
	for (size_t at = 0; at < bytes; at += GRAIN) {
		size_t length = bytes - at < GRAIN ? bytes - at : GRAIN;
		if (memcmp(f + at, e + at, length) == 0) {
			counts->ok += length;
		} else if (all_zero(f + at, length)) {
			counts->zero += length;
		} else {
			for (size_t i = at; i < at + length; i++)
				*(f[i] == e[i] ? &counts->ok : &counts->corrupt) += 1;
		}
	}
}

void pattern_expect(const struct pattern *p, uint64_t number, size_t offset, void *out,
                    size_t length)
{
	unsigned char *to = out;
	while (length > 0) {
		size_t within = offset % BLOCK;
		size_t piece = BLOCK - within < length ? BLOCK - within : length;
		memcpy(to, p->strip + start_of(p, number, offset / BLOCK) + within, piece);
		to += piece;
		offset += piece;
		length -= piece;
	}
}

/* One thread's part of a check: every `step`-th block, from block `first` on. */
struct part {
	struct pattern *pattern;
	struct lane *lane;
	const unsigned char *device;
	size_t bytes, skip;
	uint64_t number;
	size_t first, step;
	struct pattern_counts counts;
	cudaError_t error;
};

static size_t block_length(const struct part *part, size_t block)
{
	size_t rest = part->bytes - block * BLOCK;
	return rest < BLOCK ? rest : BLOCK;
}

static void *check_part(void *argument)
{
	struct part *part = argument;
	size_t blocks = (part->bytes + BLOCK - 1) / BLOCK;
	cudaStream_t stream = part->lane->stream;
	int half = 0;

	part->error = cudaSetDevice(part->pattern->device);
	if (part->error == cudaSuccess && part->first < blocks)
		part->error = cudaMemcpyAsync(part->lane->half[0], part->device + part->first * BLOCK,
		                              block_length(part, part->first),
		                              cudaMemcpyDeviceToHost, stream);
	for (size_t block = part->first; part->error == cudaSuccess && block < blocks;
	     block += part->step) {
		part->error = cudaStreamSynchronize(stream);
		if (part->error != cudaSuccess)
			break;
		size_t next = block + part->step;
		if (next < blocks)
			part->error = cudaMemcpyAsync(part->lane->half[!half],
			                              part->device + next * BLOCK,
			                              block_length(part, next),
			                              cudaMemcpyDeviceToHost, stream);
		size_t from = block * BLOCK < part->skip ? part->skip - block * BLOCK : 0;
		size_t length = block_length(part, block);
		if (from < length)
			pattern_compare(part->lane->half[half] + from,
			                part->pattern->strip
			                    + start_of(part->pattern, part->number, block) + from,
			                length - from, &part->counts);
		half = !half;
	}
	cudaStreamSynchronize(stream);
	return NULL;
}

cudaError_t pattern_check(struct pattern *p, const void *device, size_t bytes, uint64_t number,
                          size_t skip, struct pattern_counts *counts)
{
	struct part part[MAX_LANES];
	pthread_t thread[MAX_LANES];
	bool started[MAX_LANES] = {false};
	cudaError_t error = cudaSuccess;

	for (int i = 0; i < p->lanes; i++) {
		part[i] = (struct part){
			.pattern = p, .lane = &p->lane[i], .device = device, .bytes = bytes,
			.skip = skip, .number = number, .first = (size_t)i, .step = (size_t)p->lanes,
		};
		/* This thread does the last part, and any for which no thread could start. */
		if (i + 1 < p->lanes)
			started[i] = pthread_create(&thread[i], NULL, check_part, &part[i]) == 0;
	}
	for (int i = p->lanes - 1; i >= 0; i--) {
		if (started[i])
			pthread_join(thread[i], NULL);
		else
			check_part(&part[i]);
		counts->ok += part[i].counts.ok;
		counts->zero += part[i].counts.zero;
		counts->corrupt += part[i].counts.corrupt;
		if (error == cudaSuccess)
			error = part[i].error;
	}
	return error;
}
