/*
 * The engine, with its weights and its KV cache marked as regions through
 * vramctl's C ABI: a pause keeps the weights in host memory and discards the
 * cache. It can also pause and resume itself.
 *
 * The functions are looked up at run time, so it needs nothing to build and
 * works like the plain engine if the library is not loaded.
 * See include/vramctl.h.
 */
#define _GNU_SOURCE
#include "engine_core.h"

#include <dlfcn.h>
#include <inttypes.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { BACKUP_DEFAULT = 0, BACKUP_DISCARD = 1, BACKUP_HOST = 2 };

static struct {
	int32_t (*region_begin)(const char *tag, int32_t backup);
	int32_t (*region_end)(void);
	int32_t (*current_tag)(char *buffer, size_t capacity, size_t *needed);
	int32_t (*pause)(const char *tag, int64_t timeout_ms, int32_t backup);
	int32_t (*resume)(const char *tag, int64_t timeout_ms);
	int32_t (*status_json)(char *buffer, size_t capacity, size_t *needed);
	const char *(*last_error)(void);
} abi;

/* POSIX lets dlsym return a function; C has no cast for it. */
static bool look_up(void *slot, const char *name)
{
	void *symbol = dlsym(RTLD_DEFAULT, name);
	memcpy(slot, &symbol, sizeof symbol);
	return symbol != NULL;
}

static bool managed(void)
{
	return abi.region_begin != NULL;
}

static void find_library(void)
{
	bool all = look_up(&abi.region_begin, "vramctl_region_begin");
	if (!all) {
		fprintf(stderr, "engine_regions: vramctl is not loaded, so nothing is marked; "
		                "start me with `vramctl run -- …`\n");
		return;
	}
	all &= look_up(&abi.region_end, "vramctl_region_end");
	all &= look_up(&abi.current_tag, "vramctl_current_tag");
	all &= look_up(&abi.pause, "vramctl_pause");
	all &= look_up(&abi.resume, "vramctl_resume");
	all &= look_up(&abi.status_json, "vramctl_status_json");
	all &= look_up(&abi.last_error, "vramctl_last_error");
	if (!all) {
		fprintf(stderr, "engine_regions: the loaded vramctl lacks functions of its C ABI\n");
		exit(1);
	}
}

static const char *why(void)
{
	const char *message = abi.last_error();
	return message == NULL ? "no message" : message;
}

static bool stage_begin(const char *stage)
{
	if (!managed())
		return true;
	int32_t backup = strcmp(stage, "kv_cache") == 0 ? BACKUP_DISCARD : BACKUP_HOST;
	int32_t code = abi.region_begin(stage, backup);
	char tag[64] = "";
	size_t needed = 0;
	if (code == 0)
		code = abi.current_tag(tag, sizeof tag, &needed);
	if (code != 0) {
		fprintf(stderr, "engine_regions: region %s: code %" PRId32 ": %s\n", stage, code, why());
		return false;
	}
	if (strcmp(tag, stage) != 0) {
		fprintf(stderr, "engine_regions: in region %s the current tag is \"%s\"\n", stage, tag);
		return false;
	}
	return true;
}

static bool stage_end(void)
{
	if (!managed())
		return true;
	int32_t code = abi.region_end();
	if (code != 0)
		fprintf(stderr, "engine_regions: end of a region: code %" PRId32 ": %s\n", code, why());
	return code == 0;
}

/* "paused weights", or "error pause weights: code 2: …" */
static void answer(FILE *out, const char *word, const char *tag, int32_t code)
{
	const char *what = tag == NULL ? "all" : tag;
	if (code == 0)
		fprintf(out, "%sd %s\n", word, what);
	else
		fprintf(out, "error %s %s: code %" PRId32 ": %s\n", word, what, code, why());
}

static void answer_status(FILE *out)
{
	size_t needed = 0;
	char *buffer = NULL;
	int32_t code = abi.status_json(NULL, 0, &needed);
	/* It may grow between two calls, so retry until it fits. */
	for (int attempt = 0; attempt < 8; attempt++) {
		size_t capacity = needed + 64;
		char *larger = realloc(buffer, capacity);
		if (larger == NULL)
			break;
		buffer = larger;
		code = abi.status_json(buffer, capacity, &needed);
		if (code == 0 || needed <= capacity)
			break;
	}
	if (code == 0 && buffer != NULL)
		fprintf(out, "status %s\n", buffer);
	else
		fprintf(out, "error status: code %" PRId32 ": %s\n", code, why());
	free(buffer);
}

static bool request(const char *line, FILE *out)
{
	char word[16] = "", tag[128] = "";
	long long timeout_ms = 60000;
	int fields = sscanf(line, "%15s %127s %lld", word, tag, &timeout_ms);
	const char *which = fields < 2 || strcmp(tag, "all") == 0 ? NULL : tag;
	bool pause = strcmp(word, "pause") == 0, resume = strcmp(word, "resume") == 0;

	if (!pause && !resume && strcmp(word, "status") != 0)
		return false;
	if (!managed())
		fprintf(out, "error %s: vramctl is not loaded\n", word);
	else if (pause)
		answer(out, word, which, abi.pause(which, timeout_ms, BACKUP_DEFAULT));
	else if (resume)
		answer(out, word, which, abi.resume(which, timeout_ms));
	else
		answer_status(out);
	return true;
}

int main(int argc, char **argv)
{
	static const struct engine_variant regions = {
		.name = "engine_regions",
		.about = "The small inference engine, with weights and kv_cache marked as regions:\n"
		         "weights are kept in host memory while paused, kv_cache is discarded.",
		.stage_begin = stage_begin,
		.stage_end = stage_end,
		.request = request,
		.requests_help =
			"  pause [TAG|all [MILLISECONDS]]   pauses its own memory\n"
			"  resume [TAG|all [MILLISECONDS]]  and resumes it\n"
			"  status       the library's status as JSON\n",
	};
	find_library();
	return engine_main(&regions, argc, argv);
}
