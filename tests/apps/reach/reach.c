/* Reaches the driver in the way that the first argument names, and prints whose functions it got. Needs only the C library.
 * See tests/processes/reach.rs. */
#include "reach.h"
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

static void *open_driver(void)
{
	void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
	if (driver == NULL) {
		printf("no driver: %s\n", dlerror());
		exit(1);
	}
	return driver;
}

/* dlsym, through the driver's handle. */
static int by_dlsym(char **names)
{
	void *driver = open_driver();
	if (start(driver))
		return 1;
	for (; *names; names++) {
		void *found = dlsym(driver, *names);
		for (int again = 0; again < 3; again++)
			if (dlsym(driver, *names) != found)
				return 2;
		printf("%s %s\n", *names, owner(found));
	}
	printf("use %d\n", use(dlsym(driver, "cuMemAlloc_v2"), dlsym(driver, "cuMemFree_v2")));
	return 0;
}

/* Both versions of cuGetProcAddress, with this version and these flags. */
static int by_proc_address(char **arguments)
{
	void *driver = open_driver();
	get_v1_fn v1 = FUNCTION(get_v1_fn, dlsym(driver, "cuGetProcAddress"));
	get_v2_fn v2 = FUNCTION(get_v2_fn, dlsym(driver, "cuGetProcAddress_v2"));
	if (start(driver))
		return 1;
	int version = atoi(arguments[0]);
	uint64_t flags = strtoull(arguments[1], NULL, 0);
	for (char **names = arguments + 2; *names; names++) {
		void *first = NULL, *second = NULL;
		int status = -1;
		int code1 = v1(*names, &first, version, flags), code2 = v2(*names, &second, version, flags, &status);
		Dl_info info = {0};
		if (second != NULL)
			dladdr(second, &info);
		printf("%s %d %s, %d %s status %d\n", *names, code1, owner(first), code2, owner(second), status);
		/* Without a status, the result is the same. */
		void *third = NULL;
		if (v2(*names, &third, version, flags, NULL) != code2 || third != second)
			return 2;
	}
	void *allocate = NULL, *release = NULL;
	if (v2("cuMemAlloc", &allocate, 13000, 0, NULL) == 0 && v2("cuMemFree", &release, 13000, 0, NULL) == 0)
		printf("use %d\n", use(allocate, release));
	return 0;
}

/* Allocates, writes and frees memory, managed and too small to be managed, through dlsym and through cuGetProcAddress. */
static int by_both(void)
{
	static const char *const symbols[] = {"cuMemAlloc_v2", "cuMemsetD8_v2", "cuMemFree_v2"};
	static const char *const names[] = {"cuMemAlloc", "cuMemsetD8", "cuMemFree"};
	void *driver = open_driver(), *functions[3] = {NULL};
	get_v2_fn get = FUNCTION(get_v2_fn, dlsym(driver, "cuGetProcAddress_v2"));
	if (start(driver))
		return 1;
	for (int way = 0; way < 2; way++) {
		for (int i = 0; i < 3; i++)
			if (way == 0)
				functions[i] = dlsym(driver, symbols[i]);
			else if (get(names[i], &functions[i], 13000, 0, NULL))
				return 2;
		for (size_t bytes = 64; bytes <= 4 << 20; bytes <<= 16) {
			uint64_t address = 0;
			int allocated = FUNCTION(alloc_fn, functions[0])(&address, bytes);
			int set = FUNCTION(set_fn, functions[1])(address, 1, bytes);
			printf("%s %s %s: %d %d %d\n", owner(functions[0]), owner(functions[1]), owner(functions[2]), allocated, set,
			       FUNCTION(free_fn, functions[2])(address));
		}
	}
	return 0;
}

/* The default scope and the program's own handle, before and after the driver is loaded for everybody. */
static int by_scope(void)
{
	for (int loaded = 0; loaded < 2; loaded++) {
		dlerror();
		void *found = dlsym(RTLD_DEFAULT, "cuMemAlloc_v2");
		const char *error = dlerror();
		printf("default %s, %s\n", owner(found), error ? "error" : "no error");
		void *program = dlopen(NULL, RTLD_NOW);
		found = dlsym(program, "cuMemAlloc_v2");
		error = dlerror();
		printf("program %s, %s\n", owner(found), error ? "error" : "no error");
		dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
	}
	return 0;
}

/* A library's handle: the first argument is its path, the others are names. */
static int by_library(char **arguments)
{
	void *library = dlopen(arguments[0], RTLD_NOW | RTLD_LOCAL);
	if (library == NULL) {
		printf("%s\n", dlerror());
		return 1;
	}
	for (char **names = arguments + 1; *names; names++)
		printf("%s %s\n", *names, owner(dlsym(library, *names)));
	return 0;
}

static void say_error(const char *what, void *found)
{
	const char *error = dlerror();
	printf("%s: %s, %s\n", what, owner(found), error ? error : "no error");
}

/* The errors of lookups that fail, and what happens to a pending error. */
static int errors(void)
{
	void *driver = open_driver(), *libc = dlopen("libc.so.6", RTLD_NOW);
	say_error("unknown", dlsym(driver, "cuNoSuchThing"));
	say_error("unlike CUDA", dlsym(driver, "nothing"));
	say_error("elsewhere", dlsym(libc, "cuMemAlloc_v2"));
	say_error("empty", dlsym(driver, ""));
	say_error("short", dlsym(driver, "c"));
	say_error("shorter than the prefix", dlsym(driver, "cu"));
	say_error("default", dlsym(RTLD_DEFAULT, "cuNoSuchThing"));
	say_error("next", dlsym(RTLD_NEXT, "cuNoSuchThing"));
	say_error("version", dlvsym(libc, "cuMemAlloc_v2", "GLIBC_2.2.5"));
	say_error("version of the default", dlvsym(RTLD_DEFAULT, "cuNoSuchThing", "GLIBC_2.2.5"));
	dlsym(libc, "cuMemFree_v2");
	dlsym(libc, "malloc");
	say_error("after a success", NULL);
	return 0;
}

/* Meaningless arguments. The results must be the same with and without the library. */
static int garbage(void)
{
	static const char *const parts[] = {"cu", "cuda", "Mem", "Alloc", "Free", "Get", "ProcAddress", "_v2", "_ptsz", "Async", "", "x", "\xff", "Map", "C"};
	void *driver = open_driver();
	get_v1_fn v1 = FUNCTION(get_v1_fn, dlsym(driver, "cuGetProcAddress"));
	get_v2_fn v2 = FUNCTION(get_v2_fn, dlsym(driver, "cuGetProcAddress_v2"));
	uint64_t state = 88172645463325252ull;
	for (int round = 0; round < 5000; round++) {
		char name[64] = "";
		uint64_t dice[8];
		for (int i = 0; i < 8; i++) {
			state ^= state << 13;
			state ^= state >> 7;
			state ^= state << 17;
			dice[i] = state >> 16;
		}
		for (uint64_t i = 0; i < 1 + dice[0] % 5; i++)
			strcat(name, i == 0 && dice[6] % 4 ? "cu" : parts[dice[1 + i] % (sizeof parts / sizeof *parts)]);
		void *first = (void *)1, *second = (void *)1, *third = dlsym(driver, name);
		int status = -7;
		int version = dice[6] % 3 ? (int)(dice[6] % 14000) : (int)dice[6];
		uint64_t flags = dice[7] % 3 ? dice[7] % 5 : dice[7];
		int code1 = v1(name, &first, version, flags), code2 = v2(name, &second, version, flags, &status);
		printf("%s %d %d: %d %d, %d %d %d\n", name, third == NULL, version, code1, first == (void *)1 ? 2 : first == NULL, code2,
		       second == (void *)1 ? 2 : second == NULL, status);
	}
	void *function = (void *)1;
	int status = -7;
	printf("%d\n", v1(NULL, &function, 13000, 0));
	printf("%d\n", v1("cuMemAlloc", NULL, 13000, 0));
	printf("%d\n", v2(NULL, &function, 13000, 0, &status));
	printf("%d\n", v2("cuMemAlloc", NULL, 13000, 0, &status));
	printf("%d\n", v2(NULL, NULL, 0, 0, NULL));
	printf("%d\n", function == (void *)1);
	return 0;
}

static void *look_up(void *driver)
{
	for (int round = 0; round < 2000; round++) {
		void *found = dlsym(driver, round % 2 ? "cuMemAlloc_v2" : "cuDeviceGet");
		void *none = dlsym(driver, "cuNoSuchThing");
		if (found == NULL || none != NULL || strcmp(owner(found), round % 2 ? "libvramctl.so" : "libcuda.so.1") != 0)
			return found;
	}
	return driver;
}

/* Many threads at once, from the first lookups on, and a child forked meanwhile. */
static int threads(void)
{
	pthread_t all[8];
	void *driver = open_driver(), *answer = NULL;
	int failed = 0;
	for (int i = 0; i < 8; i++)
		pthread_create(&all[i], NULL, look_up, driver);
	pid_t child = fork();
	if (child == 0)
		_exit(look_up(driver) != driver);
	for (int i = 0; i < 8; i++) {
		pthread_join(all[i], &answer);
		failed |= answer != driver;
	}
	int status = -1;
	waitpid(child, &status, 0);
	printf("%d %d\n", failed, status);
	return 0;
}

int main(int count, char **arguments)
{
	const char *way = count > 1 ? arguments[1] : "";
	setvbuf(stdout, NULL, _IOFBF, 1 << 16);
	if (strcmp(way, "dlsym") == 0)
		return by_dlsym(arguments + 2);
	if (strcmp(way, "proc") == 0)
		return by_proc_address(arguments + 2);
	if (strcmp(way, "both") == 0)
		return by_both();
	if (strcmp(way, "scope") == 0)
		return by_scope();
	if (strcmp(way, "library") == 0)
		return by_library(arguments + 2);
	if (strcmp(way, "errors") == 0)
		return errors();
	if (strcmp(way, "garbage") == 0)
		return garbage();
	if (strcmp(way, "threads") == 0)
		return threads();
	return 9;
}
