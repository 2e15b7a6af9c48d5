/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * cuGetProcAddress in both its forms.
 */
#include "cuda_abi.h"

#include <stdbool.h>
#include <string.h>

enum { FLAG_LEGACY_STREAM = 1, FLAG_PER_THREAD_STREAM = 2, FLAGS = 3 };
enum { STATUS_SUCCESS = 0, STATUS_NOT_FOUND = 1, STATUS_VERSION = 2 };

/* Only addresses are taken here, so the types do not matter. */
#define ENTRY(NAME, SINCE, SYMBOL, PER_THREAD) \
    extern void SYMBOL(void);                  \
    extern void PER_THREAD(void);
#include "entries.h"

extern CUresult cuGetProcAddress(const char *name, void **out, int version, uint64_t flags);
extern CUresult cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *status);

static const struct entry {
    const char *name;
    int since;
    void (*symbol)(void);
    void (*per_thread)(void);
} entries[] = {
#define ENTRY(NAME, SINCE, SYMBOL, PER_THREAD) {NAME, SINCE, SYMBOL, PER_THREAD},
#include "entries.h"
    {"cuGetProcAddress", 11030, (void (*)(void))cuGetProcAddress, (void (*)(void))cuGetProcAddress},
    {"cuGetProcAddress", 12000, (void (*)(void))cuGetProcAddress_v2, (void (*)(void))cuGetProcAddress_v2},
};

/* What a name is at a version, NULL if nothing. As the driver (tests/driver_records): versions
 * are compared without a sign, and the variants for per-thread streams came with CUDA 7. */
static void *lookup(const char *name, int version, uint64_t flags, int *status)
{
    const bool per_thread = flags & FLAG_PER_THREAD_STREAM;
    const struct entry *best = NULL;
    *status = STATUS_NOT_FOUND;
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++) {
        const struct entry *e = &entries[i];
        if (strcmp(e->name, name))
            continue;
        int since = per_thread && e->per_thread != e->symbol && e->since < 7000 ? 7000 : e->since;
        if ((unsigned)since > (unsigned)version)
            *status = best ? *status : STATUS_VERSION;
        else if (!best || e->since > best->since)
            best = e;
        if (best)
            *status = STATUS_SUCCESS;
    }
    return !best ? NULL : (void *)(per_thread ? best->per_thread : best->symbol);
}

/* A null name or a null `out` is a segmentation fault, as in the driver. */
EXPORT CUresult cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *status)
{
    int found;
    if (flags > FLAGS)
        return CUDA_ERROR_INVALID_VALUE;
    *out = lookup(name, version, flags, &found);
    if (status)
        *status = found;
    return CUDA_SUCCESS; /* also for what there is not */
}

/* The form of CUDA 11 says otherwise what there is not, and leaves `out` alone. */
EXPORT CUresult cuGetProcAddress(const char *name, void **out, int version, uint64_t flags)
{
    int found;
    if (flags > FLAGS)
        return CUDA_ERROR_INVALID_VALUE;
    void *address = lookup(name, version, flags, &found);
    if (!address)
        return CUDA_ERROR_NOT_FOUND;
    *out = address;
    return CUDA_SUCCESS;
}
