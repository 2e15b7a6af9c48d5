/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * NVML as a session sees it. For the session's devices, NVML reports the memory of the slice. All
 * other answers are unchanged. The library is not preloaded: a program that asks for NVML finds
 * this library by LD_LIBRARY_PATH. The library opens the driver's NVML at the first call. In a
 * process without a page, the library only passes calls on. In a suspended process, the main
 * thread's calls wait for the slice at the guard's gate (../nvml_calls.c).
 */
#define NVML_NAMES
#include "../find.h"
#include "../info.h"
#include "calls.h"
#include "nvml_gen.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define SONAME "libnvidia-ml.so.1"
#define UUID_BYTES 96

enum {
    NVML_SUCCESS = 0,
    NVML_ERROR_UNINITIALIZED = 1,
    NVML_ERROR_LIBRARY_NOT_FOUND = 12,
    NVML_ERROR_FUNCTION_NOT_FOUND = 13,
    NVML_ERROR_NOT_READY = 27, /* "System is not in ready state" */
};

/* After these two results of nvml_enter(), call the driver's function. Return any other result to
 * the application. nvml/entries.S has the same numbers. */
enum { GO_ON = -2, GO_ON_COUNTED = -1 };

typedef void *device;

struct memory {
    unsigned long long total, free, used;
};

struct memory_v2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};

__attribute__((visibility("default"))) extern const char gpupool_guard[];
const char gpupool_guard[] = FIND_MARK " nvml";

#define HIDDEN __attribute__((visibility("hidden")))

extern HIDDEN void *nvml_real[]; /* in nvml_gen.S; load() fills it */
/* If this byte is not zero, the entry points call nvml_enter() first. load() sets it to zero in a
 * process without the guard. */
HIDDEN uint8_t nvml_slow = 1;
static const struct page *page;
static bool loaded;

static struct {
    int (*enter)(const struct page *seen, bool waits);
    void (*leave)(void);
} guard;

static int no_function(void) { return NVML_ERROR_FUNCTION_NOT_FOUND; }
static int no_library(void) { return NVML_ERROR_LIBRARY_NOT_FOUND; }

static void find_page(void)
{
    const char *path = getenv("GPUPOOL_PAGE");
    struct stat st;
    if (path && !strcmp(path, "passed")) {
        const struct page *(*ask)(void) = (const struct page *(*)(void))dlsym(RTLD_DEFAULT, "gpupool_page");
        page = ask ? ask() : NULL;
        return;
    }
    int fd = path && *path ? open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK) : -1;
    if (fd < 0)
        return;
    if (!fstat(fd, &st) && S_ISREG(st.st_mode) && st.st_size >= (off_t)sizeof *page) {
        const struct page *found = mmap(NULL, sizeof *found, PROT_READ, MAP_SHARED, fd, 0);
        if (found != MAP_FAILED && found->magic == PAGE_MAGIC && found->version == PAGE_VERSION &&
            found->devices <= PAGE_DEVICES)
            page = found;
    }
    close(fd);
}

/* The guard is preloaded, so dlsym finds its functions by name in the whole process. */
static void find_guard(void)
{
    *(void **)&guard.enter = dlsym(RTLD_DEFAULT, "gpupool_nvml_enter");
    *(void **)&guard.leave = dlsym(RTLD_DEFAULT, "gpupool_nvml_leave");
    if (!guard.enter || !guard.leave)
        __atomic_store_n(&nvml_slow, 0, __ATOMIC_RELEASE);
}

/* Threads that get here at the same time find the same functions and write the same values. */
static void load(void)
{
    if (__atomic_load_n(&loaded, __ATOMIC_ACQUIRE))
        return;
    void *library = find_library(SONAME, getenv("GPUPOOL_REAL_LIBNVML"));
    for (int i = 0; i < N_COUNT; i++) {
        void *found = library ? dlsym(library, nvml_names[i]) : (void *)no_library;
        __atomic_store_n(&nvml_real[i], found ? found : (void *)no_function, __ATOMIC_RELEASE);
    }
    find_page();
    find_guard();
    __atomic_store_n(&loaded, true, __ATOMIC_RELEASE);
}

/* Whether the call waits for events. The program chooses how long such a call may take, so a
 * suspend must not wait for the call. */
static bool waits_for_events(int index)
{
    return index == N_nvmlEventSetWait || index == N_nvmlEventSetWait_v2 || index == N_nvmlEventSetWait_v3 ||
           index == N_nvmlSystemEventSetWait;
}

HIDDEN void nvml_leave(void)
{
    guard.leave();
}

/* Called before the driver's function. Returns GO_ON, GO_ON_COUNTED, or the result to return to the
 * application. After GO_ON_COUNTED, the caller calls the driver's function and then
 * nvml_leave(). */
HIDDEN int nvml_enter(int index)
{
    load();
    /* In a suspended process, nvmlShutdown does nothing. A program usually calls it at its end,
     * when the end of the process shuts NVML down anyway. */
    bool waits = index != N_nvmlShutdown;
    switch (guard.enter && guard.leave ? guard.enter(page, waits) : NVML_CALL_PASSES) {
    case NVML_CALL_COUNTED:
        if (!waits_for_events(index))
            return GO_ON_COUNTED;
        nvml_leave();
        return GO_ON;
    case NVML_CALL_FAILS:
        return NVML_ERROR_NOT_READY;
    case NVML_CALL_ENDS:
        return waits ? NVML_ERROR_UNINITIALIZED : NVML_SUCCESS;
    default:
        return GO_ON;
    }
}

static int left(int entered, int result)
{
    if (entered == GO_ON_COUNTED)
        nvml_leave();
    return result;
}

/* The session's ordinal of the device; -1: the session does not have the device. */
static int ordinal_of(device d)
{
    char uuid[UUID_BYTES] = "";
    int (*get)(device, char *, unsigned) = (int (*)(device, char *, unsigned))nvml_real[N_nvmlDeviceGetUUID];
    if (!page || get(d, uuid, sizeof uuid))
        return -1;
    for (unsigned i = 0; i < page->devices && i < PAGE_DEVICES; i++)
        if (!strncmp(uuid, page->uuid[i], PAGE_UUID))
            return (int)i;
    return -1;
}

/* Fills *out with the memory of the slice; returns false if the page has no figures for the device.
 * Tools expect that `used` and `free` add up to `total`. */
static bool slice(device d, unsigned long long real_total, struct memory *out)
{
    struct slice_memory m;
    int ordinal = ordinal_of(d);
    if (ordinal < 0 || !slice_memory(page, ordinal, UINT64_MAX, real_total, &m))
        return false;
    out->total = m.total;
    out->used = m.used < m.total ? m.used : m.total;
    out->free = out->total - out->used;
    return true;
}

int wrap_nvmlDeviceGetMemoryInfo(device d, struct memory *out)
{
    int entered = nvml_enter(N_nvmlDeviceGetMemoryInfo);
    if (entered >= 0)
        return entered;
    int result = ((int (*)(device, struct memory *))nvml_real[N_nvmlDeviceGetMemoryInfo])(d, out);
    if (!result)
        slice(d, out->total, out);
    return left(entered, result);
}

int wrap_nvmlDeviceGetMemoryInfo_v2(device d, struct memory_v2 *out)
{
    struct memory m;
    int entered = nvml_enter(N_nvmlDeviceGetMemoryInfo_v2);
    if (entered >= 0)
        return entered;
    int result = ((int (*)(device, struct memory_v2 *))nvml_real[N_nvmlDeviceGetMemoryInfo_v2])(d, out);
    if (!result && slice(d, out->total, &m)) {
        out->total = m.total;
        out->used = m.used;
        out->free = m.free;
        out->reserved = 0; /* the driver's own memory, which is not in the slice */
    }
    return left(entered, result);
}

/* This function returns a text, so it cannot return the error of nvml_enter(). It needs no device,
 * so it does not call nvml_enter(). */
const char *wrap_nvmlErrorString(int code)
{
    load();
    void *real = nvml_real[N_nvmlErrorString];
    if (real != (void *)no_library && real != (void *)no_function)
        return ((const char *(*)(int))real)(code);
    return code == NVML_ERROR_LIBRARY_NOT_FOUND ? "NVML Shared Library Not Found" : "Unknown Error";
}
