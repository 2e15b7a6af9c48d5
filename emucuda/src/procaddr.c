/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Both forms of cuGetProcAddress.
 */
#include "cuda_abi.h"
#include "machine.h"

#include <stdbool.h>
#include <string.h>

#define FLAGS (PROC_LEGACY_STREAM | PROC_PER_THREAD_STREAM)

/* This file only takes the functions' addresses, so their types do not matter. */
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

/* Since 580, the driver refuses a version above its own version, whatever the name is. The driver
 * compares signed numbers, so it accepts -1, which stands for the newest version. */
static bool refused(int version, uint64_t flags) { return flags > FLAGS || version > CUDA_VERSION; }

/* Returns the address of the function `name` in `version` of the API, or NULL. This function
 * compares versions as unsigned numbers, as NVIDIA's libraries do. The variants for per-thread
 * streams exist since CUDA 7 (tests/driver_records). */
static void *lookup(const char *name, int version, uint64_t flags, int *status)
{
    const bool per_thread = flags & PROC_PER_THREAD_STREAM;
    const struct entry *best = NULL;
    *status = PROC_NOT_FOUND;
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++) {
        const struct entry *e = &entries[i];
        if (strcmp(e->name, name))
            continue;
        int since = per_thread && e->per_thread != e->symbol && e->since < 7000 ? 7000 : e->since;
        if ((unsigned)since > (unsigned)version)
            *status = best ? *status : PROC_TOO_NEW;
        else if (!best || e->since > best->since)
            best = e;
        if (best)
            *status = PROC_FOUND;
    }
    return !best ? NULL : (void *)(per_thread ? best->per_thread : best->symbol);
}

/* If `name` or `out` is null, this call causes a segmentation fault, as in the real driver. */
EXPORT CUresult cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *status)
{
    int found;
    if (refused(version, flags))
        return CUDA_ERROR_INVALID_VALUE;
    *out = lookup(name, version, flags, &found);
    if (status)
        *status = found;
    return CUDA_SUCCESS; /* the result is success even for an unknown name */
}

/* The form of this call in CUDA 11. For an unknown name it returns an error and does not change
 * `out`. */
EXPORT CUresult cuGetProcAddress(const char *name, void **out, int version, uint64_t flags)
{
    int found;
    if (refused(version, flags))
        return CUDA_ERROR_INVALID_VALUE;
    void *address = lookup(name, version, flags, &found);
    if (!address)
        return CUDA_ERROR_NOT_FOUND;
    *out = address;
    return CUDA_SUCCESS;
}
