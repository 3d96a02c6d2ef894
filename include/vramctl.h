// vramctl: pause and resume the GPU memory of this process by tag.
//
// The functions are in libvramctl.so, which is preloaded into the program (`vramctl run`), so they are found at run time:
// with dlsym(RTLD_DEFAULT, "vramctl_pause") in C, or ctypes.CDLL(None).vramctl_pause in Python. A program that asks this
// way also runs without the library.
//
// Every function may be called from any thread at any time and never ends the process. Unless it says otherwise it
// returns a VramctlResult; vramctl_last_error() has the text.


#ifndef VRAMCTL_H
#define VRAMCTL_H

// Generated from src/abi.rs by `UPDATE=1 cargo test --test header`. Do not edit.

#include <stddef.h>
#include <stdint.h>

// What the functions return. A code never changes its meaning; new ones may be added.
enum VramctlResult
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // Done.
  VRAMCTL_RESULT_OK = 0,
  // An argument makes no sense.
  VRAMCTL_RESULT_INVALID = 1,
  // No allocation has such a tag.
  VRAMCTL_RESULT_UNKNOWN_TAG = 2,
  // Too little device memory.
  VRAMCTL_RESULT_DEVICE_MEMORY = 3,
  // Too little host memory.
  VRAMCTL_RESULT_HOST_MEMORY = 4,
  // The driver refused a call.
  VRAMCTL_RESULT_DRIVER = 5,
  // The program's own GPU work has failed; its context is lost.
  VRAMCTL_RESULT_WORK = 6,
  // A stream is being captured into a graph.
  VRAMCTL_RESULT_CAPTURING = 7,
  // The device's work had not finished in time.
  VRAMCTL_RESULT_BUSY = 8,
  // The device or driver lacks what is needed.
  VRAMCTL_RESULT_UNSUPPORTED = 9,
  // A defect of the library.
  VRAMCTL_RESULT_INTERNAL = 10,
  // The address is not in a paused allocation whose contents were kept.
  VRAMCTL_RESULT_NOT_PAUSED = 11,
  // The buffer is too small; the size needed was written.
  VRAMCTL_RESULT_BUFFER_TOO_SMALL = 12,
  // A file for contents could not be made, written or read.
  VRAMCTL_RESULT_DISK = 13,
  // Over the socket only: a KV cache would be dropped that the engine's prefix cache still describes.
  VRAMCTL_RESULT_PREFIX_CACHE = 14,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum VramctlResult VramctlResult;
#else
typedef int32_t VramctlResult;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// What becomes of contents while their memory is paused. Passed as an `int32_t`, so that a wrong number is an error and
// not undefined behaviour.
enum VramctlBackup
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // As the environment variable `VRAMCTL_BACKUP` says for the tag, else kept in host memory.
  VRAMCTL_BACKUP_DEFAULT = 0,
  // Dropped; after the resume the memory reads as zero.
  VRAMCTL_BACKUP_DISCARD = 1,
  // Kept in host memory.
  VRAMCTL_BACKUP_HOST = 2,
  // Kept in a file, in the directory of `vramctl_set_disk_directory`, else of `VRAMCTL_DISK_DIR`.
  VRAMCTL_BACKUP_DISK = 3,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum VramctlBackup VramctlBackup;
#else
typedef int32_t VramctlBackup;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// What a pause does with a tag.
typedef struct VramctlTag {
  // The tag, NUL-terminated; null: every tag that is not named beside it.
  const char *tag;
  // A `VramctlBackup` in place of each allocation's own policy; `Default` keeps to the policies.
  int32_t backup;
} VramctlTag;

// A range of device memory.
typedef struct VramctlRange {
  // Its first address.
  const void *address;
  // Its length in bytes.
  size_t bytes;
} VramctlRange;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The library's version, such as `0.1.0`. A string of the library's own, valid for ever.
const char *vramctl_version(void);

// Begins a region of the calling thread: until the matching `vramctl_region_end`, its allocations get the tag `tag`.
// Regions nest; the innermost counts. With a null `tag`, allocations in the region are left to CUDA.
//
// `tag` is UTF-8 of at most 128 bytes without commas, equals signs and control characters, and is copied. `backup` is a
// `VramctlBackup`. With `Discard`, neighbours share physical memory after a resume: what is freed of them goes back to the
// driver with the last of them, at the next pause at the latest.
//
// # Safety
// `tag` must be null or NUL-terminated.
VramctlResult vramctl_region_begin(const char *tag,
                                   int32_t backup);

// Ends the calling thread's innermost region. `Invalid`: it is in none.
VramctlResult vramctl_region_end(void);

// The tag that an allocation of the calling thread would get now, as a NUL-terminated string in `buffer`; the empty
// string: it would be left to CUDA.
//
// `needed`, where not null, gets the string's size in bytes with its NUL. `BufferTooSmall`: `capacity` is less than
// that, and nothing was written to `buffer`.
//
// # Safety
// `buffer` must be writable for `capacity` bytes, and `needed` null or writable.
VramctlResult vramctl_current_tag(char *buffer, size_t capacity, size_t *needed);

// Pauses: waits for the device's work, keeps or discards contents, and gives the memory back to the driver. All or
// nothing; what is paused already is left alone. The addresses must not be used until `vramctl_resume`.
//
// `tag`: one tag, or null for all. `timeout_ms`: how long to wait for the device's work, in milliseconds; negative:
// without limit. `backup`: a `VramctlBackup` for all of it, in place of each allocation's own policy; `Default` keeps
// to the policies.
//
// # Safety
// `tag` must be null or NUL-terminated.
VramctlResult vramctl_pause(const char *tag, int64_t timeout_ms, int32_t backup);

// Pauses several tags at once, as `vramctl_pause` does one: all of them or, after an error, none.
//
// `tags`: `count` of them, at least one. Beside a null tag, a named one need not be there; else it is `UnknownTag`.
// `timeout_ms`: as for `vramctl_pause`.
//
// `unused`: `unused_count` ranges of memory that nobody needs, such as what an allocator of the program's own holds as
// free. Their contents are not kept: the whole pages of 2 MiB in them read as zero after the resume, unless they were kept
// all the same (on disk, and where a tag's contents are retained). They must stay unused until this returns, whoever
// waits for the device meanwhile. Ranges may overlap, and what of them is not managed is ignored.
//
// # Safety
// `tags` must be readable for `count` entries whose tags are null or NUL-terminated, and `unused` readable for
// `unused_count` ranges (or null with an `unused_count` of 0).
VramctlResult vramctl_pause_tags(const struct VramctlTag *tags,
                                 size_t count,
                                 int64_t timeout_ms,
                                 const struct VramctlRange *unused,
                                 size_t unused_count);

// Resumes: puts new memory at the same addresses, and the kept contents into it; discarded contents read as zero. All
// or nothing; what is active already is left alone.
//
// `tag`: one tag, or null for all. `timeout_ms`: how long to wait for memory that other processes hold, in
// milliseconds; 0: not at all; negative: without limit.
//
// # Safety
// `tag` must be null or NUL-terminated.
VramctlResult vramctl_resume(const char *tag, int64_t timeout_ms);

// Resumes several tags at once, as `vramctl_resume` does one: all of them or, after an error, none.
//
// `tags`: `count` of them, at least one; null among them means all. `timeout_ms`: as for `vramctl_resume`, for all of it.
//
// # Safety
// `tags` must be readable for `count` pointers that are null or to NUL-terminated strings.
VramctlResult vramctl_resume_tags(const char *const *tags,
                                  size_t count,
                                  int64_t timeout_ms);

// What the calling thread's last successful pause or resume did, as a JSON object in `buffer`, NUL-terminated: the
// fields of the control protocol's `done` reply (`docs/protocol.md`), in bytes and milliseconds; `{}` if there was none.
//
// `needed`, where not null, gets the string's size in bytes with its NUL. `BufferTooSmall`: `capacity` is less than
// that, and nothing was written to `buffer`.
//
// # Safety
// `buffer` must be writable for `capacity` bytes (or null with a `capacity` of 0), and `needed` null or writable.
VramctlResult vramctl_last_report_json(char *buffer,
                                       size_t capacity,
                                       size_t *needed);

// What is under management, as a JSON object in `buffer`, NUL-terminated: the fields of the control protocol's
// `status` reply that concern memory (`docs/protocol.md`), sizes in bytes.
//
// `needed`, where not null, gets the string's size in bytes with its NUL; it may differ at the next call.
// `BufferTooSmall`: `capacity` is less than that, and nothing was written to `buffer`.
//
// # Safety
// `buffer` must be writable for `capacity` bytes (or null with a `capacity` of 0), and `needed` null or writable.
VramctlResult vramctl_status_json(char *buffer, size_t capacity, size_t *needed);

// What the calling thread's last failed call of this library failed on, for a reader; the empty string if none has
// failed. Owned by the library and valid until the thread's next failed call.
const char *vramctl_last_error(void);

// The same with its numbers, as a JSON object in `buffer`, NUL-terminated: the fields of the control protocol's `error`
// reply (`docs/protocol.md`), such as `code`, `message` and, where memory was short, `shortage` in bytes; `{}` if none has
// failed.
//
// `needed`, where not null, gets the string's size in bytes with its NUL. `BufferTooSmall`: `capacity` is less than
// that, nothing was written to `buffer`, and the last error is still the one before.
//
// # Safety
// `buffer` must be writable for `capacity` bytes (or null with a `capacity` of 0), and `needed` null or writable.
VramctlResult vramctl_last_error_json(char *buffer,
                                      size_t capacity,
                                      size_t *needed);

// The kept contents of a paused allocation, to read: `*pointer` gets the host address that holds what `address` held,
// and `*bytes`, where not null, how many bytes follow there up to the allocation's end.
//
// `address` may be anywhere in the allocation. The memory is the library's, and valid until the allocation is resumed or
// freed. `NotPaused`: the address is in no paused allocation whose contents were kept in host memory.
//
// # Safety
// `pointer` must be writable, and `bytes` null or writable.
VramctlResult vramctl_backup_pointer(const void *address,
                                     const void **pointer,
                                     size_t *bytes);

// From now on, a managed allocation that would leave less than `bytes` of its device free is answered with out of
// memory. 0, as at first: no such margin.
VramctlResult vramctl_set_memory_margin(uint64_t bytes);

// Says that an inference engine lives in this process, by its name (`vllm`, `sglang`): `vramctl status` shows it, and
// `vramctl pause` does not discard the engine's `kv_cache` unless the engine forgets what its prefix cache says of it.
// Null: none does any more.
//
// `name` has 1 to 64 letters, digits, dots, dashes and underscores, and is copied.
//
// # Safety
// `name` must be null or NUL-terminated.
VramctlResult vramctl_set_engine(const char *name);

// Says whether the contents that a pause saves of a tag in host memory stay there after the resume, so that the next
// pause copies only what has changed since. What is not to stay any more is given up at once.
//
// `tag`: one tag, or null for every tag without a setting of its own. `retain`: 1 they stay, 0 they do not, -1 takes the
// setting back: what is said of every tag counts, and `VRAMCTL_RETAIN` where nothing is.
//
// # Safety
// `tag` must be null or NUL-terminated.
VramctlResult vramctl_set_retain(const char *tag,
                                 int32_t retain);

// Where the pauses to come keep contents whose policy is `Disk`: an existing directory on a drive, not a `tmpfs`. Null:
// as `VRAMCTL_DISK_DIR` says. What is in files already stays where it is. `Disk`: it is no directory.
//
// # Safety
// `directory` must be null or NUL-terminated.
VramctlResult vramctl_set_disk_directory(const char *directory);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* VRAMCTL_H */
