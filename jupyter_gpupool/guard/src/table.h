/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Everything that this process holds on the device, by address or by handle.
 */
#ifndef GPUPOOL_GUARD_TABLE_H
#define GPUPOOL_GUARD_TABLE_H

#include <stdbool.h>
#include <stdint.h>

#pragma GCC visibility push(hidden)

/* The kinds of entries, and the meaning of `key`, `owner`, `count` and `extra` in each kind. The
 * kind is a part of the key, because a handle may have the same value as an address. */
enum own_kind {
    OWN_DEVICE = 1, /* cuMemAlloc, cuMemAllocPitch; owner: the context's number */
    OWN_MANAGED,    /* cuMemAllocManaged; owner: the context's number */
    OWN_ARRAY,      /* arrays and mipmapped arrays, by handle; owner: the context's number */
    OWN_POOLED,     /* cuMemAllocAsync; owner: address of the pool's account (pools.c) */
    OWN_BLOCK,      /* a block of physical memory (cuMemCreate), by its number; count: number of
                     * handles, extra: number of mappings */
    OWN_HANDLE,     /* a handle of a block; owner: the block's number, count: number of
                     * references */
    OWN_MAP,        /* a mapping of a block; owner: the block */
    OWN_GRAPH,      /* an executable graph with memory nodes, by handle plus ordinal: one entry for
                     * each device */
    OWN_GREEN,      /* a green context, by handle */
    OWN_CAPTURE,    /* a stream that records a graph; owner: the context's number, count: the mode,
                     * extra: the thread */
    OWN_CONTEXT,    /* a context, by handle; owner: its number, extra: its device */
    OWN_REGISTERED, /* host memory that the program registered; owner: the context's number */
};

struct own {
    uint64_t key; /* address, handle or number, as the kind says; never 0 */
    uint64_t bytes;
    uint64_t owner;
    uint32_t count, extra;
    uint16_t kind; /* 0: no entry */
    int16_t ordinal;
};

/* Enter `own`. If the table has an older entry with the same key, the function moves it to `stale`.
 * The guard has then missed the free of the older allocation: its context has ended, or only the
 * driver saw the free. If the table has no older entry, the kind of `stale` is 0. If there is no
 * memory for the entry, the function enters nothing and returns false. */
bool table_put(const struct own *own, struct own *stale);
/* Take an entry out. The caller does this before the driver frees the memory, because another
 * thread may get the same address afterwards. Returns false if the table has no such entry. */
bool table_take(uint16_t kind, uint64_t key, struct own *own);
/* Copy an entry without taking it out. */
bool table_get(uint16_t kind, uint64_t key, struct own *own);
/* Whether the table has ever had an entry of this kind. If not, a free need not search the
 * table. */
bool table_seen(uint16_t kind);
/* Take out all entries that `match` accepts, and call `done` for each. `done` may use the table. */
void table_sweep(bool (*match)(const struct own *own, void *with),
                 void (*done)(const struct own *own, void *with), void *with);

#pragma GCC visibility pop
#endif
