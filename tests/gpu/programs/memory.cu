/*
 * A program on the CUDA runtime that fills memory, and on request compares and rewrites it. Compiled several ways
 * (../kinds.py): with the shared and the static runtime, and with per-thread default streams.
 *
 * usage: memory --mib N [--async] [--threads N]
 *
 * Each line `check` on stdin is answered with one line of JSON, as in loop.py. With --async it allocates with
 * cudaMallocAsync. Each of several threads has its share of the blocks, and works in its own default stream if the
 * program was compiled so.
 */
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "kernels.cuh"

static const size_t MIB = (size_t)1 << 20;
static const unsigned GRID = 1024, THREADS = 256;

struct Result {
	word differing = 0, sum = 0;
};

static bool asynchronous = false;
static unsigned threads = 1;

static void need(cudaError_t error, const char *what)
{
	if (error == cudaSuccess)
		return;
	printf("{\"error\": \"%s: %s\"}\n", what, cudaGetErrorString(error));
	fflush(stdout);
	_Exit(1);
}

static void *allocate(size_t bytes)
{
	void *at = nullptr;
	need(asynchronous ? cudaMallocAsync(&at, bytes, 0) : cudaMalloc(&at, bytes), "allocating");
	return at;
}

static void release(void *at)
{
	need(asynchronous ? cudaFreeAsync(at, 0) : cudaFree(at), "freeing");
}

/* Memory, its pattern, and the place for the result of a comparison. */
struct Block {
	word *at, words, *result;

	explicit Block(size_t bytes)
		: at((word *)allocate(bytes)), words(bytes / sizeof(word)), result((word *)allocate(2 * sizeof(word)))
	{
	}

	void free()
	{
		release(at);
		release(result);
	}

	void write(word seed)
	{
		fill<<<GRID, THREADS>>>(at, words, seed);
		need(cudaGetLastError(), "starting to write");
	}

	Result read(word seed)
	{
		Result found;
		need(cudaMemsetAsync(result, 0, sizeof found, 0), "clearing the result");
		compare<<<GRID, THREADS>>>(at, words, seed, result);
		need(cudaGetLastError(), "starting to compare");
		need(cudaMemcpyAsync(&found, result, sizeof found, cudaMemcpyDeviceToHost, 0), "copying the result");
		need(cudaStreamSynchronize(0), "comparing");
		return found;
	}
};

/* Large and small blocks, as in real programs. */
static std::vector<size_t> sizes(size_t total)
{
	const size_t wanted[] = {3072 * MIB, 1024 * MIB, 512 * MIB + 4096, 96 * MIB + 8, 20 * MIB, 3 * MIB + 512};
	std::vector<size_t> found;
	for (size_t i = 0; total > 0; i++) {
		size_t size = wanted[i % 6] < total ? wanted[i % 6] : total;
		if (total - size < 2 * MIB)
			size = total; /* no tiny remainder: those are left to CUDA */
		found.push_back(size);
		total -= size;
	}
	return found;
}

/* Calls work(index) for every block, in the thread that it belongs to. */
template <class Work> static void for_each(size_t count, Work work)
{
	if (threads == 1) {
		for (size_t i = 0; i < count; i++)
			work(i);
		return;
	}
	std::vector<std::thread> running;
	for (unsigned thread = 0; thread < threads; thread++)
		running.emplace_back([=] {
			for (size_t i = thread; i < count; i += threads)
				work(i);
			need(cudaStreamSynchronize(0), "waiting for a thread's stream");
		});
	for (std::thread &thread : running)
		thread.join();
}

struct Program {
	std::vector<Block *> blocks;
	std::mutex lock;
	word seed = 1;
	Result written;

	explicit Program(size_t total)
	{
		std::vector<size_t> all = sizes(total);
		blocks.resize(all.size());
		for_each(all.size(), [this, &all](size_t i) { blocks[i] = new Block(all[i]); });
		write();
	}

	word pattern(size_t block) const { return seed * 1009 + block; }

	Result read()
	{
		Result total;
		for_each(blocks.size(), [this, &total](size_t i) {
			Result one = blocks[i]->read(pattern(i));
			std::lock_guard<std::mutex> held(lock);
			total.differing += one.differing;
			total.sum += one.sum;
		});
		return total;
	}

	void write()
	{
		for_each(blocks.size(), [this](size_t i) { blocks[i]->write(pattern(i)); });
		written = read();
	}

	std::string check()
	{
		Result found = read();
		bool equal = found.sum == written.sum;
		seed++;
		write();
		Block fresh(64 * MIB);
		fresh.write(seed);
		Result anew = fresh.read(seed);
		fresh.free();
		char text[200];
		snprintf(text, sizeof text,
		         "{\"differing\": %llu, \"sum_equal\": %s, \"rewritten_differing\": %llu, \"new_differing\": %llu}",
		         found.differing, equal ? "true" : "false", written.differing, anew.differing);
		return text;
	}

	void free()
	{
		for_each(blocks.size(), [this](size_t i) { blocks[i]->free(); });
		need(cudaDeviceSynchronize(), "freeing");
	}
};

int main(int argc, char **argv)
{
	size_t mib = 0;
	for (int i = 1; i < argc; i++) {
		if (strcmp(argv[i], "--mib") == 0 && i + 1 < argc)
			mib = strtoull(argv[++i], nullptr, 10);
		else if (strcmp(argv[i], "--threads") == 0 && i + 1 < argc)
			threads = (unsigned)strtoul(argv[++i], nullptr, 10);
		else if (strcmp(argv[i], "--async") == 0)
			asynchronous = true;
		else
			mib = 0, i = argc;
	}
	if (mib == 0 || threads == 0) {
		fprintf(stderr, "usage: memory --mib N [--async] [--threads N]\n");
		return 2;
	}
	Program program(mib * MIB);
	printf("{\"ready\": true, \"bytes\": %zu, \"differing\": %llu}\n", mib * MIB, program.written.differing);
	fflush(stdout);
	char line[64];
	while (fgets(line, sizeof line, stdin) != nullptr && strncmp(line, "quit", 4) != 0) {
		puts(strncmp(line, "check", 5) == 0 ? program.check().c_str() : "{\"error\": \"unknown question\"}");
		fflush(stdout);
	}
	program.free();
	return 0;
}
