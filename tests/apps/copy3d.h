/* CUDA_MEMCPY3D, with names of our own. */
#ifndef APPS_COPY3D_H
#define APPS_COPY3D_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
	size_t x, y, z, lod;
	int type;
	const void *host;
	uint64_t device;
	void *array, *reserved;
	size_t pitch, height;
} Side3D;

typedef struct {
	Side3D from, to;
	size_t width, height, depth;
} Copy3D;

#endif
