/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * NVML as a session sees it: of its own devices the memory of its slice, everything else as it is.
 * Not preloaded; a program that asks for NVML finds it by LD_LIBRARY_PATH. The driver's own is
 * opened at the first call. Without a page this library only passes on.
 */
#define NVML_NAMES
#include "../find.h"
#include "../info.h"
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

enum { NVML_SUCCESS = 0, NVML_ERROR_LIBRARY_NOT_FOUND = 12, NVML_ERROR_FUNCTION_NOT_FOUND = 13 };

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

extern void *nvml_real[]; /* nvml_gen.S: at first each leads to nvml_load */
static const struct page *page;
static bool loaded;

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

/* Threads that get here at the same time find and write the same. */
__attribute__((visibility("hidden"))) void nvml_load(void)
{
    if (__atomic_load_n(&loaded, __ATOMIC_ACQUIRE))
        return;
    void *library = find_library(SONAME, getenv("GPUPOOL_REAL_LIBNVML"));
    for (int i = 0; i < N_COUNT; i++) {
        void *found = library ? dlsym(library, nvml_names[i]) : (void *)no_library;
        __atomic_store_n(&nvml_real[i], found ? found : (void *)no_function, __ATOMIC_RELEASE);
    }
    find_page();
    __atomic_store_n(&loaded, true, __ATOMIC_RELEASE);
}

/* Ordinal of the device in the session; -1: not one of its devices. */
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

/* What the session uses and may still use: their sum is the total, as tools expect. */
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
    nvml_load();
    int result = ((int (*)(device, struct memory *))nvml_real[N_nvmlDeviceGetMemoryInfo])(d, out);
    if (!result)
        slice(d, out->total, out);
    return result;
}

int wrap_nvmlDeviceGetMemoryInfo_v2(device d, struct memory_v2 *out)
{
    struct memory m;
    nvml_load();
    int result = ((int (*)(device, struct memory_v2 *))nvml_real[N_nvmlDeviceGetMemoryInfo_v2])(d, out);
    if (!result && slice(d, out->total, &m)) {
        out->total = m.total;
        out->used = m.used;
        out->free = m.free;
        out->reserved = 0; /* the driver's own memory, which is not in the slice */
    }
    return result;
}

/* The one function that returns no number, so it must not return an error number. */
const char *wrap_nvmlErrorString(int code)
{
    nvml_load();
    void *real = nvml_real[N_nvmlErrorString];
    if (real != (void *)no_library && real != (void *)no_function)
        return ((const char *(*)(int))real)(code);
    return code == NVML_ERROR_LIBRARY_NOT_FOUND ? "NVML Shared Library Not Found" : "Unknown Error";
}
