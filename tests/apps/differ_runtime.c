/* A library that calls the CUDA runtime that it is linked with, for differ.c, which may use two. */
#include "differ.h"

#define FORWARD(name, arguments, values) \
	Code name arguments; \
	Code call_##name arguments \
	{ \
		/* Not a jump: the caller is this library. */ \
		volatile Code code = name values; \
		return code; \
	}
RUNTIME(FORWARD)
