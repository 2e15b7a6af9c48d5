/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * cuGetProcAddress in both its forms.
 */
#include "cuda_abi.h"

#include <string.h>

enum { FLAG_LEGACY_STREAM = 1, FLAG_PER_THREAD_STREAM = 2 };
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

EXPORT CUresult cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *status)
{
    const struct entry *best = NULL;
    int found = STATUS_NOT_FOUND;
    if (!name || !out || flags > 3 || flags == 3)
        return CUDA_ERROR_INVALID_VALUE;
    *out = NULL;
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++) {
        if (strcmp(entries[i].name, name))
            continue;
        if (entries[i].since > version)
            found = best ? found : STATUS_VERSION;
        else if (!best || entries[i].since > best->since)
            best = &entries[i];
    }
    if (best) {
        found = STATUS_SUCCESS;
        *out = (void *)(flags == FLAG_PER_THREAD_STREAM ? best->per_thread : best->symbol);
    }
    if (status)
        *status = found;
    return best ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

EXPORT CUresult cuGetProcAddress(const char *name, void **out, int version, uint64_t flags)
{
    return cuGetProcAddress_v2(name, out, version, flags, NULL);
}
