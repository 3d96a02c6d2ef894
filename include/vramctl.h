// vramctl: pause and resume the GPU memory of this process by tag.
//
// The functions are in libvramctl.so, which is preloaded into the program (`vramctl run`). Look them up at run time, with
// dlsym(RTLD_DEFAULT, "vramctl_pause") in C or ctypes.CDLL(None).vramctl_pause in Python, so that the program also runs
// without the library.
//
// All functions are thread-safe, may be called at any time and never end the process. Unless documented otherwise they
// return a VramctlResult; vramctl_last_error() has the message.


#ifndef VRAMCTL_H
#define VRAMCTL_H

// Generated from src/intercept/abi.rs and src/model/kind.rs by `UPDATE=1 cargo test --test tree header`. Do not edit.

#include <stddef.h>
#include <stdint.h>

// A result code. Codes never change their meaning; new ones may be added.
enum VramctlResult
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // Success.
  VRAMCTL_RESULT_OK = 0,
  // An argument or a request is malformed, too long or too late, or its sender is not allowed to make it.
  VRAMCTL_RESULT_INVALID = 1,
  // No allocation has one of the tags.
  VRAMCTL_RESULT_UNKNOWN_TAG = 2,
  // There is too little device memory.
  VRAMCTL_RESULT_DEVICE_MEMORY = 3,
  // There is too little host memory to keep the contents, or no thread could be started.
  VRAMCTL_RESULT_HOST_MEMORY = 4,
  // The driver refused a call.
  VRAMCTL_RESULT_DRIVER = 5,
  // The program's own GPU work has failed; its context is lost.
  VRAMCTL_RESULT_WORK = 6,
  // A stream is being captured into a graph; try again when the capture has ended.
  VRAMCTL_RESULT_CAPTURING = 7,
  // The device's work had not finished in time, the driver does not answer, or the process has too many clients.
  VRAMCTL_RESULT_BUSY = 8,
  // The device or the driver lacks a required feature, or the program cannot be held (`passing_by` in its status).
  VRAMCTL_RESULT_UNSUPPORTED = 9,
  // A bug in the library; please report it.
  VRAMCTL_RESULT_INTERNAL = 10,
  // The address is not in a paused allocation whose contents are in host memory.
  VRAMCTL_RESULT_NOT_PAUSED = 11,
  // The buffer is too small.
  VRAMCTL_RESULT_BUFFER_TOO_SMALL = 12,
  // A file for contents could not be created, written or read.
  VRAMCTL_RESULT_DISK = 13,
  // The program is exiting: the request was cancelled, and its memory is freed with the program.
  VRAMCTL_RESULT_ENDING = 15,
  // The pause would replace memory whose physical pages another process, a network card or NCCL has registered.
  VRAMCTL_RESULT_REGISTERED = 16,
  // Other processes have memory open that would be paused.
  VRAMCTL_RESULT_SHARED = 17,
  // What was begun has been undone, or nobody waits for it any more.
  VRAMCTL_RESULT_ABORTED = 18,
  // The process is suspended, or is being suspended or restored, and the request needs its driver. `vramctl resume` brings it back.
  VRAMCTL_RESULT_SUSPENDED = 20,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum VramctlResult VramctlResult;
#else
typedef int32_t VramctlResult;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// What a pause does with contents. Passed as an `int32_t`, so that an invalid value is an error and not undefined
// behaviour.
enum VramctlBackup
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // The tag's policy in the environment variable `VRAMCTL_BACKUP`, else `VRAMCTL_BACKUP_HOST`.
  VRAMCTL_BACKUP_DEFAULT = 0,
  // Discard them; after the resume the memory reads as zero.
  VRAMCTL_BACKUP_DISCARD = 1,
  // Keep them in host memory.
  VRAMCTL_BACKUP_HOST = 2,
  // Keep them in a file, in the directory set by `vramctl_set_disk_directory` or `VRAMCTL_DISK_DIR`.
  VRAMCTL_BACKUP_DISK = 3,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum VramctlBackup VramctlBackup;
#else
typedef int32_t VramctlBackup;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// A task for the program's own allocator, from `vramctl_cache_wait`.
enum VramctlCacheTask
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // Report what there is.
  VRAMCTL_CACHE_TASK_REPORT = 1,
  // Report the allocator's memory, return what can be returned to CUDA, and report again.
  VRAMCTL_CACHE_TASK_TRIM = 2,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum VramctlCacheTask VramctlCacheTask;
#else
typedef int32_t VramctlCacheTask;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// What a pause does with a tag.
typedef struct VramctlTag {
  // The tag, NUL-terminated; null means all tags not listed.
  const char *tag;
  // A `VramctlBackup` that overrides the allocations' own policies; `VRAMCTL_BACKUP_DEFAULT` does not.
  int32_t backup;
} VramctlTag;

// A range of device memory.
typedef struct VramctlRange {
  // First address.
  const void *address;
  // Length in bytes.
  size_t bytes;
} VramctlRange;

// What to pause, and how. Set all of it to zero, and `size` to `sizeof(VramctlPauseOptions)`; later versions may add fields at the end, and
// zero means that a field is not used.
typedef struct VramctlPauseOptions {
  // `sizeof(VramctlPauseOptions)`.
  size_t size;
  // `tag_count` tags; none means all, with the allocations' own policies. A tag that no allocation has is
  // `VRAMCTL_RESULT_UNKNOWN_TAG`, unless a null tag is listed too.
  const struct VramctlTag *tags;
  // How many.
  size_t tag_count;
  // How long to wait for the device's work, in milliseconds; a negative value means no limit.
  int64_t timeout_ms;
  // `unused_count` ranges whose contents are not needed, such as the free blocks of the program's own allocator. Whole 2 MiB pages in them
  // read as zero after the resume, unless their contents are kept anyway (on disk, or because the tag is retained). They must stay unused
  // until the call returns. Ranges may overlap; unmanaged parts are ignored.
  const struct VramctlRange *unused;
  // How many.
  size_t unused_count;
} VramctlPauseOptions;

// What to resume, and how. As with `VramctlPauseOptions`, zero means that a field is not used.
typedef struct VramctlResumeOptions {
  // `sizeof(VramctlResumeOptions)`.
  size_t size;
  // `tag_count` tags; none, or a null tag, means all.
  const char *const *tags;
  // How many.
  size_t tag_count;
  // How long to wait for memory held by other processes, for all tags together, in milliseconds; a negative value means no limit.
  int64_t timeout_ms;
} VramctlResumeOptions;

// A piece of memory that the program's own allocator got from CUDA.
typedef struct VramctlSegment {
  // First address.
  const void *address;
  // Length in bytes.
  size_t bytes;
  // Bytes of it that are in use. If 0, all of it counts as cached; else the rest counts as fragmented.
  size_t live_bytes;
} VramctlSegment;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The library's version, such as `0.1.0`. The string is static.
const char *vramctl_version(void);

// Begins a region: until the matching `vramctl_region_end`, allocations of the calling thread get the tag `tag`.
// Regions nest; the innermost one applies. With a null `tag`, allocations in the region are left to CUDA.
//
// `tag` is UTF-8 of at most 128 bytes, without commas, equals signs and control characters. It is copied. `backup` is
// a `VramctlBackup`.
//
// `tag` must be null or NUL-terminated.
VramctlResult vramctl_region_begin(const char *tag, int32_t backup);

// Ends the calling thread's innermost region. Returns `VRAMCTL_RESULT_INVALID` if there is none.
VramctlResult vramctl_region_end(void);

// Writes the tag that an allocation of the calling thread would get now to `buffer`, NUL-terminated. The string is
// empty if the allocation would be left to CUDA.
//
// If `needed` is not null, it receives the string's size in bytes, including the NUL. If `capacity` is smaller,
// returns `VRAMCTL_RESULT_BUFFER_TOO_SMALL` and leaves `buffer` unchanged.
//
// `buffer` must be writable for `capacity` bytes, and `needed` null or writable.
VramctlResult vramctl_current_tag(char *buffer, size_t capacity, size_t *needed);

// Pauses: waits for the device's work, keeps or discards contents, and gives the memory back to the driver. All or
// nothing. Pausing paused memory changes only one thing: if another process has paused it, it stays paused when that process
// resumes the program. The program must not use the addresses until `vramctl_resume`.
//
// `tag`: one tag, or null for all. `timeout_ms`: how long to wait for the device's work, in milliseconds; a negative
// value means no limit. `backup`: a `VramctlBackup` that overrides the allocations' own policies; `VRAMCTL_BACKUP_DEFAULT` does not.
//
// `tag` must be null or NUL-terminated.
VramctlResult vramctl_pause(const char *tag,
                            int64_t timeout_ms,
                            int32_t backup);

// Pauses several tags at once, as `vramctl_pause` does one. After an error, none of them is paused. `options`: null means everything,
// without a limit.
//
// `options` must be null or readable for its size, `tags` for as many entries whose tags are null or NUL-terminated, and `unused` for as many
// ranges.
VramctlResult vramctl_pause_with(const struct VramctlPauseOptions *options);

// Resumes: maps new memory at the same addresses and restores kept contents; discarded contents read as zero. All or
// nothing. Resuming active memory is a no-op.
//
// `tag`: one tag, or null for all. `timeout_ms`: how long to wait for memory held by other processes, in milliseconds;
// 0 means not at all, a negative value no limit.
//
// `tag` must be null or NUL-terminated.
VramctlResult vramctl_resume(const char *tag, int64_t timeout_ms);

// Resumes several tags at once, as `vramctl_resume` does one. After an error, none of them is resumed. `options`: null means everything that
// has room now.
//
// `options` must be null or readable for its size, and `tags` for as many pointers, each null or to a NUL-terminated string.
VramctlResult vramctl_resume_with(const struct VramctlResumeOptions *options);

// Writes the report of the calling thread's last successful pause, resume or trim to `buffer`, as a NUL-terminated JSON
// object: the fields of the control protocol's `done` or `trimmed` reply (`docs/protocol.md`), in bytes and milliseconds; `{}` if
// there was none.
//
// If `needed` is not null, it receives the string's size in bytes, including the NUL. If `capacity` is smaller,
// returns `VRAMCTL_RESULT_BUFFER_TOO_SMALL` and leaves `buffer` unchanged.
//
// `buffer` must be writable for `capacity` bytes (or null if `capacity` is 0), and `needed` null or writable.
VramctlResult vramctl_last_report_json(char *buffer,
                                       size_t capacity,
                                       size_t *needed);

// Writes the state of the managed memory to `buffer`, as a NUL-terminated JSON object: the memory fields of the
// control protocol's `status` reply (`docs/protocol.md`), sizes in bytes.
//
// If `needed` is not null, it receives the string's size in bytes, including the NUL; the size may change between
// calls. If `capacity` is smaller, returns `VRAMCTL_RESULT_BUFFER_TOO_SMALL` and leaves `buffer` unchanged.
//
// `buffer` must be writable for `capacity` bytes (or null if `capacity` is 0), and `needed` null or writable.
VramctlResult vramctl_status_json(char *buffer, size_t capacity, size_t *needed);

// The error message of the calling thread's last failed call; empty if none has failed. Owned by the library and valid
// until the thread's next failed call.
const char *vramctl_last_error(void);

// Writes the calling thread's last error to `buffer`, as a NUL-terminated JSON object: the fields of the control
// protocol's `error` reply (`docs/protocol.md`), such as `code`, `message` and, if memory was short, `shortage` in
// bytes; `{}` if none has failed.
//
// If `needed` is not null, it receives the string's size in bytes, including the NUL. If `capacity` is smaller,
// returns `VRAMCTL_RESULT_BUFFER_TOO_SMALL`, leaves `buffer` unchanged and keeps the last error.
//
// `buffer` must be writable for `capacity` bytes (or null if `capacity` is 0), and `needed` null or writable.
VramctlResult vramctl_last_error_json(char *buffer, size_t capacity, size_t *needed);

// Gives read access to the kept contents of a paused allocation: `*pointer` receives the host address of the byte that
// was at `address` and, if `bytes` is not null, `*bytes` the number of bytes from there to the end of the allocation.
//
// `address` may be anywhere in the allocation. The memory belongs to the library and is valid until the allocation is
// resumed or freed. Returns `VRAMCTL_RESULT_NOT_PAUSED` unless the address is in a paused allocation whose contents are in host
// memory.
//
// `pointer` must be writable, and `bytes` null or writable.
VramctlResult vramctl_backup_pointer(const void *address,
                                     const void **pointer,
                                     size_t *bytes);

// Sets a margin: a managed allocation that would leave less than `bytes` free on its device fails with out of memory.
// The default is 0.
VramctlResult vramctl_set_memory_margin(uint64_t bytes);

// For a program whose own allocator caches free memory: waits for a request to report it (`vramctl gpus`) or to return it
// (`vramctl trim`, `vramctl_trim`), and writes a `VramctlCacheTask` to `task`. The Python package does all this for torch.
//
// One thread of the program calls this in a loop and does nothing else. After each call it does the task, calling `vramctl_cache_report`
// before and after it returns memory, and then calls `vramctl_cache_answer`. From the first task on, its stream capture mode
// (`cuThreadExchangeStreamCaptureMode`) is relaxed, so that its frees do not invalidate captures of other threads. If a report fails,
// nobody waits for the task any more: skip the work and call `vramctl_cache_answer`.
//
// `task` must be writable.
VramctlResult vramctl_cache_wait(int32_t *task);

// For the thread that calls `vramctl_cache_wait`: reports the memory that the allocator has from CUDA now.
//
// `segments` must be readable for `count` entries (or null if `count` is 0).
VramctlResult vramctl_cache_report(const struct VramctlSegment *segments, size_t count);

// For the thread that calls `vramctl_cache_wait`: finishes the task; `problem` is null if it succeeded, else it says why not. A call
// before the first task announces that the thread exists, even if it does not wait yet.
//
// `problem` must be null or NUL-terminated.
VramctlResult vramctl_cache_answer(const char *problem);

// For an inference engine in a program that shares its GPUs or is to be saved (`vramctl run --share`, `--image`): waits until somebody is about to
// take memory of it, and writes the request's number to `number`. The Python package does all this for the engines that it knows.
//
// One thread of the program calls this in a loop and does nothing but pass the number on to the engine's own loop. If no request uses the KV
// cache, that loop resets the engine's prefix cache, and then calls `vramctl_prefix_cache_answer`, within 0.2 s. Then the contents of the tag
// `kv_cache` are not kept, unless a call has started device work meanwhile.
//
// `number` must be writable.
VramctlResult vramctl_prefix_cache_wait(uint64_t *number);

// For an inference engine's loop: answers a request (`vramctl_prefix_cache_wait`). `is_reset`: 1 if it has just reset its prefix cache, and no
// request uses the KV cache; else 0. After a 1, this waits until the program is held, at most 0.2 s, so that the loop does not use the KV cache
// again at once.
VramctlResult vramctl_prefix_cache_answer(uint64_t number,
                                          int32_t is_reset);

// For an inference engine's loop: whether it has no requests now (1) or has some (0). Called when that changes; until the first call, it has
// some. `VRAMCTL_RESULT_INVALID`: the program neither shares its GPUs nor was started for images, or keeps its cache (`--keep-cache`),
// so nobody will ask.
VramctlResult vramctl_prefix_cache_idle(int32_t is_idle);

// For an inference engine that is about to allocate its KV cache (tag `kv_cache`), and to fill it with zeros: until
// `vramctl_cache_unused_end`, whatever is written there is worth nothing, because there has been no request. So others get its memory without
// a copy (`vramctl run --share`), a save does not write it (`--image`), and it is zero when it is back. Writes to `counts` whether that is
// so: 0 if there is memory of that tag already, which may be another engine's. `VRAMCTL_RESULT_INVALID` as for `vramctl_prefix_cache_idle`.
//
// `counts` must be writable.
VramctlResult vramctl_cache_unused_begin(int32_t *counts);

// For an inference engine that is about to use its KV cache for its first request: from then on it is worth something.
VramctlResult vramctl_cache_unused_end(void);

// Has the program's own allocator return cached memory to CUDA, and waits for that. Must not be called from the thread that calls
// `vramctl_cache_wait`, which does the work. `vramctl_last_report_json` then has the fields of the control protocol's `trimmed` reply
// (`docs/protocol.md`).
//
// `timeout_ms`: how long to wait, in milliseconds; a negative value means 10 seconds. Returns `VRAMCTL_RESULT_BUSY` after that, and
// `VRAMCTL_RESULT_INVALID` if no thread serves or the program is held.
VramctlResult vramctl_trim(int64_t timeout_ms);

// Watches how much memory is free on each device: when less than `below` bytes are free, logs once who uses the memory. Logs again only
// after free memory has recovered. 0 ends the watch. `VRAMCTL_WATCH` sets it from the start.
//
// `trim`: 1 to also have the program's own allocator return what it has cached (`vramctl_cache_wait`), 0 not to.
VramctlResult vramctl_set_watch(uint64_t below,
                                int32_t trim);

// Declares that this process runs an inference engine (`vllm`, `sglang`). `vramctl status` shows its name, and
// `vramctl pause` refuses to discard the engine's `kv_cache` unless the engine resets its prefix cache. Null withdraws
// the declaration.
//
// `name` has 1 to 64 letters, digits, dots, dashes and underscores. It is copied.
//
// `name` must be null or NUL-terminated.
VramctlResult vramctl_set_engine(const char *name);

// Declares whether all of the engine's KV cache has the tag `kv_cache`. Without this, `vramctl pause` takes everything but `weights` and
// `cuda_graph` for the cache, and refuses to discard it.
//
// `tags`: 1 if it does, 0 if not.
VramctlResult vramctl_set_engine_tags_cache(int32_t tags);

// Declares that a thread has entered a memory pool of torch's, or has left it. While any thread of the process is in one, torch returns no free
// memory to CUDA and does not ask again after an error. So in a program that shares its GPUs (`vramctl run --share`), torch's requests then wait
// for room at once, instead of getting an error first. The Python package declares its own pools.
//
// `entered`: 1 if it has entered the pool, 0 if it has left it.
VramctlResult vramctl_note_torch_pool(int32_t entered);

// Sets whether a tag's backups in host memory are retained after a resume, so that the next pause copies only what has
// changed. Drops retained backups that are no longer wanted.
//
// `tag`: one tag, or null for every tag without a setting of its own. `retain`: 1 to retain, 0 not to, -1 to remove
// the setting. Without one, the setting for null applies, then `VRAMCTL_RETAIN`.
//
// `tag` must be null or NUL-terminated.
VramctlResult vramctl_set_retain(const char *tag, int32_t retain);

// Sets the directory in which future pauses keep contents with the policy `VRAMCTL_BACKUP_DISK`. It must exist and should be on a
// drive, not a `tmpfs`. Null restores `VRAMCTL_DISK_DIR`. Existing backups stay where they are. Returns `VRAMCTL_RESULT_DISK` if it
// is not a directory.
//
// `directory` must be null or NUL-terminated.
VramctlResult vramctl_set_disk_directory(const char *directory);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* VRAMCTL_H */
