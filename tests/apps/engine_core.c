#define _GNU_SOURCE
#include "engine_core.h"

#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "cudart.h"
#include "pattern.h"

#define MIB ((size_t)1 << 20)
#define MAX_LAYERS 256
/* Bytes per request, per token in the cache, and read from each tensor per
 * answer. */
#define TOKEN_BYTES ((size_t)8 << 10)
#define SLICE_BYTES ((size_t)64 << 10)
/* Each layer's cache begins with a ring of tokens and, behind it, the one that
 * the graph writes: its address is fixed, the place in the ring is not. */
#define RING ((size_t)64)
#define CURRENT RING
#define TOKENS_BYTES ((RING + 1) * TOKEN_BYTES)
#define NO_TOKEN UINT64_MAX

struct tensor {
	const char *role;
	int layer; /* -1: of the whole model */
	void *device;
	size_t bytes;
	uint64_t number; /* of its pattern */
};

struct engine {
	const struct engine_variant *variant;

	/* options */
	int device, layers, threads, check_threads;
	size_t weights_bytes, kv_bytes;
	uint64_t seed;
	const char *socket_path;

	/* device memory */
	struct tensor weights[1 + 3 * MAX_LAYERS];
	int weights_count;
	struct tensor kv[MAX_LAYERS];
	unsigned char *input, *workspace, *output;
	size_t output_bytes;

	/* what the cache's ring should hold: a token, or NO_TOKEN for the pattern */
	uint64_t token[RING + 1];

	struct pattern *pattern;
	cudaStream_t stream;
	cudaGraphExec_t graph;
	int graph_nodes;
	unsigned char *host_input, *host_output; /* pinned */

	/* one request at a time, and what was being done when a call failed */
	pthread_mutex_t busy;
	char doing[160];

	/* requests come in on these */
	pthread_mutex_t reading;
	int listener;
	pthread_mutex_t ending;
	pthread_cond_t ended;
	bool over;
};

/* Returns from the calling function with a failed call's error. `doing` says
 * what the call was part of. */
#define TRY(call) \
	do { \
		cudaError_t try_error = (call); \
		if (try_error != cudaSuccess) \
			return try_error; \
	} while (0)

__attribute__((format(printf, 2, 3)))
static void doing(struct engine *e, const char *format, ...)
{
	va_list arguments;
	va_start(arguments, format);
	vsnprintf(e->doing, sizeof e->doing, format, arguments);
	va_end(arguments);
}

/* ---- building ---- */

static cudaError_t add_weights(struct engine *e, const char *role, int layer, size_t bytes)
{
	struct tensor *t = &e->weights[e->weights_count];
	doing(e, "allocating %zu bytes for the %s weights of layer %d", bytes, role, layer);
	*t = (struct tensor){.role = role, .layer = layer, .bytes = bytes,
	                     .number = (uint64_t)e->weights_count};
	TRY(cudaMalloc(&t->device, bytes));
	e->weights_count++;
	return cudaSuccess;
}

/* The embedding gets an eighth, the layers share the rest: attention, a larger
 * MLP, and a norm too small to be managed. */
static cudaError_t allocate_weights(struct engine *e)
{
	size_t embedding = e->weights_bytes / 8;
	size_t layer = (e->weights_bytes - embedding) / (size_t)e->layers;
	size_t norm = SLICE_BYTES + 512;
	TRY(add_weights(e, "embedding", -1, embedding));
	for (int i = 0; i < e->layers; i++) {
		/* Like real sizes, not multiples of anything large. */
		size_t attention = (layer / 8 * 3) & ~(size_t)255;
		TRY(add_weights(e, "attention", i, attention));
		TRY(add_weights(e, "mlp", i, (layer - attention - norm) & ~(size_t)15));
		TRY(add_weights(e, "norm", i, norm));
	}
	return cudaSuccess;
}

static cudaError_t allocate_kv(struct engine *e)
{
	for (int i = 0; i < e->layers; i++) {
		struct tensor *t = &e->kv[i];
		*t = (struct tensor){.role = "kv", .layer = i, .bytes = e->kv_bytes / (size_t)e->layers,
		                     .number = 1000000 + (uint64_t)i};
		doing(e, "allocating %zu bytes for the KV cache of layer %d", t->bytes, i);
		TRY(cudaMalloc(&t->device, t->bytes));
	}
	return cudaSuccess;
}

static cudaError_t fill_weights(struct engine *e)
{
	doing(e, "filling the weights");
	for (int i = 0; i < e->weights_count; i++)
		TRY(pattern_fill(e->pattern, e->weights[i].device, e->weights[i].bytes,
		                 e->weights[i].number));
	return cudaSuccess;
}

static cudaError_t fill_kv(struct engine *e)
{
	doing(e, "filling the KV cache");
	for (int i = 0; i < e->layers; i++)
		TRY(pattern_fill(e->pattern, e->kv[i].device, e->kv[i].bytes, e->kv[i].number));
	for (size_t i = 0; i <= RING; i++)
		e->token[i] = NO_TOKEN;
	return cudaSuccess;
}

/* The workspace: the input, a slice of weights and a token of the cache that
 * depend on the request, then three slices a layer that the graph gathers. */
#define GATHERED TOKEN_BYTES
#define PREVIOUS (GATHERED + SLICE_BYTES)
#define LAYERS (PREVIOUS + TOKEN_BYTES)

static unsigned char *slot(const struct engine *e, int layer, size_t index)
{
	return (unsigned char *)e->kv[layer].device + index * TOKEN_BYTES;
}

static cudaError_t copy(struct engine *e, void *to, const void *from, size_t bytes)
{
	return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, e->stream);
}

/* The steps of a replay, as they are captured: every address is fixed. */
static cudaError_t graph_steps(struct engine *e, int *nodes)
{
	unsigned char *at = e->workspace + LAYERS;
	TRY(cudaMemsetAsync(e->output, 0x5a, e->output_bytes, e->stream));
	TRY(copy(e, e->workspace, e->input, TOKEN_BYTES));
	*nodes = 2;
	for (int i = 0; i < e->layers; i++) {
		/* The beginning of attention, the end of the MLP, the cache behind the
		 * tokens: if memory moves, one of them shows it. */
		const struct tensor *attention = &e->weights[1 + 3 * i], *mlp = attention + 1;
		TRY(copy(e, at, attention->device, SLICE_BYTES));
		TRY(copy(e, at + SLICE_BYTES,
		         (unsigned char *)mlp->device + mlp->bytes - SLICE_BYTES, SLICE_BYTES));
		TRY(copy(e, at + 2 * SLICE_BYTES, slot(e, i, CURRENT + 1), SLICE_BYTES));
		TRY(copy(e, slot(e, i, CURRENT), e->workspace, TOKEN_BYTES));
		at += 3 * SLICE_BYTES;
		*nodes += 4;
	}
	*nodes += 1;
	return copy(e, e->output, e->workspace, (size_t)(at - e->workspace));
}

static cudaError_t capture_graph(struct engine *e)
{
	cudaGraph_t graph = NULL;
	doing(e, "capturing the graph");
	TRY(cudaStreamBeginCapture(e->stream, cudaStreamCaptureModeThreadLocal));
	cudaError_t error = graph_steps(e, &e->graph_nodes);
	cudaError_t captured = cudaStreamEndCapture(e->stream, &graph);
	if (error == cudaSuccess)
		error = captured;
	if (error == cudaSuccess) {
		doing(e, "instantiating the graph");
		error = cudaGraphInstantiateWithFlags(&e->graph, graph, 0);
	}
	if (graph != NULL)
		cudaGraphDestroy(graph);
	return error;
}

static cudaError_t build(struct engine *e, bool *staged)
{
	const struct engine_variant *v = e->variant;
	cudaError_t error;

	doing(e, "choosing device %d", e->device);
	TRY(cudaSetDevice(e->device));
	TRY(cudaStreamCreateWithFlags(&e->stream, cudaStreamNonBlocking));

	doing(e, "taking pinned host memory");
	TRY(pattern_create(&e->pattern, e->device, e->seed, e->check_threads));

	*staged = v->stage_begin("weights");
	error = *staged ? allocate_weights(e) : cudaSuccess;
	if (*staged)
		*staged = v->stage_end();
	if (error != cudaSuccess || !*staged)
		return error;

	*staged = v->stage_begin("kv_cache");
	error = *staged ? allocate_kv(e) : cudaSuccess;
	if (*staged)
		*staged = v->stage_end();
	if (error != cudaSuccess || !*staged)
		return error;

	doing(e, "allocating the workspace");
	size_t used = LAYERS + (size_t)e->layers * 3 * SLICE_BYTES;
	e->output_bytes = (used + 2 * MIB) / MIB * MIB;
	TRY(cudaMalloc((void **)&e->input, TOKEN_BYTES));
	TRY(cudaMalloc((void **)&e->workspace, e->output_bytes));
	TRY(cudaMalloc((void **)&e->output, e->output_bytes));
	TRY(cudaMallocHost((void **)&e->host_input, TOKEN_BYTES));
	TRY(cudaMallocHost((void **)&e->host_output, e->output_bytes));
	TRY(cudaMemsetAsync(e->workspace, 0, e->output_bytes, e->stream));
	TRY(cudaStreamSynchronize(e->stream));

	TRY(fill_weights(e));
	TRY(fill_kv(e));
	return capture_graph(e);
}

static cudaError_t tear_down(struct engine *e)
{
	cudaError_t first = cudaSuccess, error;
#define DROP(call) \
	do { \
		error = (call); \
		first = first == cudaSuccess ? error : first; \
	} while (0)
	if (e->graph != NULL)
		DROP(cudaGraphExecDestroy(e->graph));
	for (int i = 0; i < e->weights_count; i++)
		DROP(cudaFree(e->weights[i].device));
	for (int i = 0; i < e->layers; i++)
		DROP(cudaFree(e->kv[i].device));
	DROP(cudaFree(e->input));
	DROP(cudaFree(e->workspace));
	DROP(cudaFree(e->output));
	if (e->host_input != NULL)
		DROP(cudaFreeHost(e->host_input));
	if (e->host_output != NULL)
		DROP(cudaFreeHost(e->host_output));
	pattern_destroy(e->pattern);
	if (e->stream != NULL)
		DROP(cudaStreamDestroy(e->stream));
#undef DROP
	return first;
}

/* ---- requests ---- */

static void token_contents(uint64_t seed, uint64_t token, void *out)
{
	for (size_t i = 0; i < TOKEN_BYTES; i += 8) {
		uint64_t word = pattern_mix(pattern_mix(seed, token), i);
		memcpy((unsigned char *)out + i, &word, 8);
	}
}

static uint64_t hash(const void *bytes, size_t length)
{
	uint64_t sum = length;
	for (size_t i = 0; i + 8 <= length; i += 8) {
		uint64_t word;
		memcpy(&word, (const unsigned char *)bytes + i, 8);
		sum = (sum ^ word) * UINT64_C(0x100000001b3);
		sum ^= sum >> 29;
	}
	return sum;
}

/* The answer to token N depends on N, on weights (some chosen by N), on the
 * cache, and on what answering N - 1 left there. */
static cudaError_t generate(struct engine *e, uint64_t token, uint64_t *answer)
{
	doing(e, "generating token %" PRIu64, token);
	uint64_t choice = pattern_mix(e->seed + 1, token);
	const struct tensor *from = &e->weights[choice % (uint64_t)e->weights_count];
	size_t places = (from->bytes - SLICE_BYTES) / 16 + 1;
	size_t offset = (size_t)(choice / 1024 % places) * 16;

	token_contents(e->seed, token, e->host_input);
	TRY(cudaMemcpyAsync(e->input, e->host_input, TOKEN_BYTES, cudaMemcpyHostToDevice,
	                    e->stream));
	TRY(copy(e, e->workspace + GATHERED, (unsigned char *)from->device + offset, SLICE_BYTES));
	TRY(copy(e, e->workspace + PREVIOUS,
	         slot(e, (int)(token % (uint64_t)e->layers), (size_t)((token + RING - 1) % RING)),
	         TOKEN_BYTES));
	TRY(cudaGraphLaunch(e->graph, e->stream));
	for (int i = 0; i < e->layers; i++)
		TRY(copy(e, slot(e, i, (size_t)(token % RING)), slot(e, i, CURRENT), TOKEN_BYTES));
	TRY(cudaMemcpyAsync(e->host_output, e->output, e->output_bytes, cudaMemcpyDeviceToHost,
	                    e->stream));
	TRY(cudaStreamSynchronize(e->stream));

	e->token[token % RING] = e->token[CURRENT] = token;
	*answer = hash(e->host_output, e->output_bytes);
	return cudaSuccess;
}

static cudaError_t verify_tokens(struct engine *e, const struct tensor *kv,
                                 struct pattern_counts *counts)
{
	unsigned char *found = e->host_output; /* at least 1 MiB */
	unsigned char expected[TOKEN_BYTES];
	TRY(cudaMemcpyAsync(found, kv->device, TOKENS_BYTES, cudaMemcpyDeviceToHost, e->stream));
	TRY(cudaStreamSynchronize(e->stream));
	for (size_t i = 0; i <= RING; i++) {
		if (e->token[i] == NO_TOKEN)
			pattern_expect(e->pattern, kv->number, i * TOKEN_BYTES, expected, TOKEN_BYTES);
		else
			token_contents(e->seed, e->token[i], expected);
		pattern_compare(found + i * TOKEN_BYTES, expected, TOKEN_BYTES, counts);
	}
	return cudaSuccess;
}

static cudaError_t verify(struct engine *e, struct pattern_counts *weights,
                          struct pattern_counts *kv)
{
	for (int i = 0; i < e->weights_count; i++) {
		const struct tensor *t = &e->weights[i];
		doing(e, "verifying the %s weights of layer %d", t->role, t->layer);
		TRY(pattern_check(e->pattern, t->device, t->bytes, t->number, 0, weights));
	}
	for (int i = 0; i < e->layers; i++) {
		const struct tensor *t = &e->kv[i];
		doing(e, "verifying the KV cache of layer %d", i);
		TRY(verify_tokens(e, t, kv));
		TRY(pattern_check(e->pattern, t->device, t->bytes, t->number, TOKENS_BYTES, kv));
	}
	return cudaSuccess;
}

/* "weights ok 123 bytes", "kv zero 123 bytes", "kv corrupt 1 bytes, zero 2 bytes, ok 3 bytes" */
static void print_counts(FILE *out, const char *what, const struct pattern_counts *c)
{
	const struct { const char *word; uint64_t bytes; } part[] = {
		{"corrupt", c->corrupt}, {"zero", c->zero}, {"ok", c->ok},
	};
	const char *before = " ";
	fputs(what, out);
	for (int i = 0; i < 3; i++) {
		if (part[i].bytes > 0) {
			fprintf(out, "%s%s %" PRIu64 " bytes", before, part[i].word, part[i].bytes);
			before = ", ";
		}
	}
}

static void print_addresses(const struct engine *e, FILE *out)
{
	fputs("addresses", out);
	for (int i = 0; i < e->weights_count; i++) {
		const struct tensor *t = &e->weights[i];
		if (t->layer < 0)
			fprintf(out, " %s=%p", t->role, t->device);
		else
			fprintf(out, " %s.%d=%p", t->role, t->layer, t->device);
	}
	for (int i = 0; i < e->layers; i++)
		fprintf(out, " kv.%d=%p", i, e->kv[i].device);
	fprintf(out, " input=%p workspace=%p output=%p\n", (void *)e->input,
	        (void *)e->workspace, (void *)e->output);
}

static void print_error(const struct engine *e, FILE *out, cudaError_t error)
{
	fprintf(out, "error %s (%s) while %s\n", cudaGetErrorName(error),
	        cudaGetErrorString(error), e->doing);
	cudaGetLastError(); /* reported; clear the error unless it is sticky */
}

static const char requests_help[] =
	"  generate N   answers token N: a hash of the output of the graph\n"
	"  verify       checks every byte of weights and KV cache\n"
	"  refill       fills the KV cache anew, as at the start\n"
	"  addresses    the device pointers\n"
	"  memory       free and total bytes of the device\n"
	"  help         these lines\n"
	"  quit         frees everything and ends\n";

/* Answers one request; false if it was the last. */
static bool answer(struct engine *e, const char *line, FILE *out)
{
	cudaError_t error = cudaSuccess;
	uint64_t token, value;
	char rest;

	if (sscanf(line, "generate %" SCNu64 " %c", &token, &rest) == 1) {
		error = generate(e, token, &value);
		if (error == cudaSuccess)
			fprintf(out, "answer %" PRIu64 " %016" PRIx64 "\n", token, value);
	} else if (strcmp(line, "verify") == 0) {
		struct pattern_counts weights = {0}, kv = {0};
		error = verify(e, &weights, &kv);
		if (error == cudaSuccess) {
			print_counts(out, "verify: weights", &weights);
			print_counts(out, "; kv", &kv);
			fputc('\n', out);
		}
	} else if (strcmp(line, "refill") == 0) {
		error = fill_kv(e);
		if (error == cudaSuccess)
			fprintf(out, "refilled\n");
	} else if (strcmp(line, "addresses") == 0) {
		print_addresses(e, out);
	} else if (strcmp(line, "memory") == 0) {
		size_t free_bytes = 0, total = 0;
		doing(e, "asking for the device's memory");
		error = cudaMemGetInfo(&free_bytes, &total);
		if (error == cudaSuccess)
			fprintf(out, "memory free=%zu total=%zu\n", free_bytes, total);
	} else if (strcmp(line, "help") == 0) {
		fprintf(out, "requests:\n%s%s", requests_help, e->variant->requests_help);
	} else if (strcmp(line, "quit") == 0) {
		fprintf(out, "bye\n");
		fflush(out);
		return false;
	} else if (!e->variant->request(line, out)) {
		fprintf(out, "error unknown request \"%s\"; `help` lists them\n", line);
	}
	if (error != cudaSuccess)
		print_error(e, out, error);
	fflush(out);
	return true;
}

static void end(struct engine *e)
{
	pthread_mutex_lock(&e->ending);
	e->over = true;
	pthread_cond_broadcast(&e->ended);
	pthread_mutex_unlock(&e->ending);
}

/* A line without its newline; NULL at end of file. */
static char *read_line(FILE *in, char **line, size_t *capacity)
{
	ssize_t length = getline(line, capacity, in);
	if (length < 0)
		return NULL;
	while (length > 0 && ((*line)[length - 1] == '\n' || (*line)[length - 1] == '\r'))
		(*line)[--length] = '\0';
	return *line;
}

/* Serves requests until end of file, or until one asks to quit, which returns
 * false. Several threads may serve one input: they take turns, and answers stay
 * in order. */
static bool serve(struct engine *e, FILE *in, FILE *out, pthread_mutex_t *reading)
{
	char *line = NULL;
	size_t capacity = 0;
	bool more = true, going = true;
	while (more && going) {
		if (reading != NULL)
			pthread_mutex_lock(reading);
		more = read_line(in, &line, &capacity) != NULL;
		pthread_mutex_lock(&e->busy);
		if (reading != NULL)
			pthread_mutex_unlock(reading);
		if (more && line[0] != '\0')
			going = answer(e, line, out);
		pthread_mutex_unlock(&e->busy);
	}
	free(line);
	return going;
}

static void serve_connections(struct engine *e)
{
	for (;;) {
		int connection = accept(e->listener, NULL, NULL);
		if (connection < 0) {
			if (errno == EINTR || errno == ECONNABORTED)
				continue;
			return;
		}
		FILE *in = fdopen(connection, "r");
		FILE *out = fdopen(dup(connection), "w");
		bool going = in == NULL || out == NULL || serve(e, in, out, NULL);
		if (out != NULL)
			fclose(out);
		if (in != NULL)
			fclose(in);
		if (!going)
			return;
	}
}

static void *worker(void *argument)
{
	struct engine *e = argument;
	cudaError_t error = cudaSetDevice(e->device);
	if (error != cudaSuccess)
		fprintf(stderr, "%s: a worker cannot choose device %d: %s\n", e->variant->name,
		        e->device, cudaGetErrorName(error));
	else if (e->listener >= 0)
		serve_connections(e);
	else
		serve(e, stdin, stdout, &e->reading);
	end(e);
	return NULL;
}

static bool listen_on(struct engine *e)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	if (strlen(e->socket_path) >= sizeof address.sun_path) {
		fprintf(stderr, "%s: a socket's path has at most %zu bytes: %s\n", e->variant->name,
		        sizeof address.sun_path - 1, e->socket_path);
		return false;
	}
	strcpy(address.sun_path, e->socket_path);
	e->listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (e->listener < 0 || bind(e->listener, (struct sockaddr *)&address, sizeof address) != 0
	    || listen(e->listener, 16) != 0) {
		fprintf(stderr, "%s: cannot listen on %s: %s\n", e->variant->name, e->socket_path,
		        strerror(errno));
		return false;
	}
	return true;
}

/* ---- the program ---- */

static void usage(const struct engine_variant *v, FILE *to)
{
	fprintf(to,
	        "%s\n\n"
	        "usage: %s [options]\n\n"
	        "  --weights-mib N   device memory for weights (64)\n"
	        "  --kv-mib N        device memory for the KV cache (32)\n"
	        "  --layers N        number of layers (4)\n"
	        "  --device N        the GPU (0)\n"
	        "  --seed N          seed of contents and answers (1)\n"
	        "  --threads N       serve from N threads, none of which allocated anything;\n"
	        "                    0: from the main thread, which did (0)\n"
	        "  --check-threads N threads for `verify` (one per core, at most 8)\n"
	        "  --socket PATH     serve on a Unix socket, in place of stdin and stdout\n\n"
	        "Prints `ready` on stdout, then answers each line with a line (`help` with several):\n%s%s\n"
	        "Errors are answers too (`error cudaError… while …`); the engine continues.\n",
	        v->about, v->name, requests_help, v->requests_help);
}

static bool number(const struct engine_variant *v, const char *option, const char *text,
                   unsigned long long least, unsigned long long most, unsigned long long *value)
{
	char *rest = NULL;
	errno = 0;
	*value = strtoull(text, &rest, 10);
	if (errno != 0 || rest == text || *rest != '\0' || *text == '-' || *value < least
	    || *value > most) {
		fprintf(stderr, "%s: --%s takes a number from %llu to %llu, not \"%s\"\n", v->name,
		        option, least, most, text);
		return false;
	}
	return true;
}

static bool read_options(struct engine *e, int argc, char **argv)
{
	static const struct option options[] = {
		{"weights-mib", required_argument, NULL, 'w'},
		{"kv-mib", required_argument, NULL, 'k'},
		{"layers", required_argument, NULL, 'l'},
		{"device", required_argument, NULL, 'd'},
		{"seed", required_argument, NULL, 's'},
		{"threads", required_argument, NULL, 't'},
		{"check-threads", required_argument, NULL, 'c'},
		{"socket", required_argument, NULL, 'S'},
		{"help", no_argument, NULL, 'h'},
		{NULL, 0, NULL, 0},
	};
	int letter, index = 0;
	unsigned long long value = 0;
	while ((letter = getopt_long(argc, argv, "h", options, &index)) != -1) {
		const char *name = options[index].name;
		bool good = true;
		switch (letter) {
		case 'w':
			good = number(e->variant, name, optarg, 1, 1u << 24, &value);
			e->weights_bytes = (size_t)value * MIB;
			break;
		case 'k':
			good = number(e->variant, name, optarg, 1, 1u << 24, &value);
			e->kv_bytes = (size_t)value * MIB;
			break;
		case 'l':
			good = number(e->variant, name, optarg, 1, MAX_LAYERS, &value);
			e->layers = (int)value;
			break;
		case 'd':
			good = number(e->variant, name, optarg, 0, 1023, &value);
			e->device = (int)value;
			break;
		case 's':
			good = number(e->variant, name, optarg, 0, UINT64_MAX, &value);
			e->seed = value;
			break;
		case 't':
			good = number(e->variant, name, optarg, 0, 64, &value);
			e->threads = (int)value;
			break;
		case 'c':
			good = number(e->variant, name, optarg, 0, 64, &value);
			e->check_threads = (int)value;
			break;
		case 'S':
			e->socket_path = optarg;
			break;
		case 'h':
			usage(e->variant, stdout);
			exit(0);
		default:
			good = false;
			break;
		}
		if (!good)
			return false;
	}
	if (optind < argc) {
		fprintf(stderr, "%s: unexpected argument \"%s\" (see --help)\n",
		        e->variant->name, argv[optind]);
		return false;
	}
	/* A layer's tensors must be larger than the slices read from them. */
	if (e->weights_bytes / (size_t)e->layers < MIB || e->kv_bytes / (size_t)e->layers < MIB) {
		fprintf(stderr, "%s: give at least 1 MiB of weights and of KV cache a layer\n",
		        e->variant->name);
		return false;
	}
	return true;
}

int engine_main(const struct engine_variant *variant, int argc, char **argv)
{
	static struct engine engine;
	struct engine *e = &engine;
	*e = (struct engine){
		.variant = variant, .layers = 4, .weights_bytes = 64 * MIB, .kv_bytes = 32 * MIB,
		.seed = 1, .listener = -1,
		.busy = PTHREAD_MUTEX_INITIALIZER, .reading = PTHREAD_MUTEX_INITIALIZER,
		.ending = PTHREAD_MUTEX_INITIALIZER, .ended = PTHREAD_COND_INITIALIZER,
	};
	if (!read_options(e, argc, argv))
		return 2;
	/* A client may hang up in the middle of an answer. */
	signal(SIGPIPE, SIG_IGN);

	bool staged = true;
	cudaError_t error = build(e, &staged);
	if (error != cudaSuccess || !staged) {
		if (error != cudaSuccess) {
			fprintf(stderr, "%s: ", variant->name);
			print_error(e, stderr, error);
		}
		return 1;
	}
	if (e->socket_path != NULL && !listen_on(e))
		return 1;

	printf("ready device=%d weights=%zu kv=%zu allocations=%d graph-nodes=%d\n", e->device,
	       e->weights_bytes, e->kv_bytes, e->weights_count + e->layers + 3, e->graph_nodes);
	fflush(stdout);

	if (e->threads == 0 && e->listener < 0) {
		serve(e, stdin, stdout, NULL);
	} else if (e->threads == 0) {
		serve_connections(e);
	} else {
		pthread_t thread;
		for (int i = 0; i < e->threads; i++) {
			int failed = pthread_create(&thread, NULL, worker, e);
			if (failed != 0) {
				fprintf(stderr, "%s: cannot start a thread: %s\n", variant->name,
				        strerror(failed));
				return 1;
			}
			pthread_detach(thread);
		}
		pthread_mutex_lock(&e->ending);
		while (!e->over)
			pthread_cond_wait(&e->ended, &e->ending);
		pthread_mutex_unlock(&e->ending);
	}

	/* Never unlocked: no thread starts another request, and the process exits. */
	pthread_mutex_lock(&e->busy);
	if (e->socket_path != NULL)
		unlink(e->socket_path);
	error = tear_down(e);
	if (error != cudaSuccess) {
		fprintf(stderr, "%s: freeing everything: %s\n", variant->name, cudaGetErrorName(error));
		return 1;
	}
	return 0;
}
