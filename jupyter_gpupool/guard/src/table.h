/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * What this process holds of the device, by address or handle.
 */
#ifndef GPUPOOL_GUARD_TABLE_H
#define GPUPOOL_GUARD_TABLE_H

#include <stdbool.h>
#include <stdint.h>

#pragma GCC visibility push(hidden)

/* The kind is part of the key: handles may have the value of an address. */
enum own_kind {
    OWN_DEVICE = 1, /* cuMemAlloc, cuMemAllocPitch; owner: the context's number */
    OWN_MANAGED,    /* cuMemAllocManaged; owner: the context's number */
    OWN_ARRAY,      /* arrays and mipmapped arrays, by handle; owner: the context's number */
    OWN_POOLED,     /* cuMemAllocAsync; owner: index of the pool (pools.c), which pays */
    OWN_BLOCK,      /* physical memory of cuMemCreate, by number; count: handles, extra: maps */
    OWN_HANDLE,     /* a handle of a block; owner: the block; count: references */
    OWN_MAP,        /* a mapping of a block; owner: the block */
    OWN_GRAPH,      /* an executable graph with memory nodes, by handle plus ordinal */
    OWN_GREEN,      /* a green context, by handle */
    OWN_CAPTURE,    /* a stream that records a graph; owner: the context's number, count: mode, extra: thread */
    OWN_CONTEXT,    /* a context, by handle; owner: its number, extra: its device */
    OWN_REGISTERED, /* host memory that the program registered; owner: the context's number */
};

struct own {
    uint64_t key; /* never 0 */
    uint64_t bytes;
    uint64_t owner;
    uint32_t count, extra;
    uint16_t kind; /* 0: no entry */
    int16_t ordinal;
};

/* Enter `own`. An older entry with the same key belongs to something that was freed without the guard's
 * knowledge (by the end of its context, or by a call that only the driver sees). It is moved to `stale`, whose
 * kind is 0 if there was no such entry. Returns false if there is no memory: then nothing is entered. */
bool table_put(const struct own *own, struct own *stale);
/* Take an entry out. The caller does this before the driver frees the memory: afterwards another thread may
 * already have the same address. Returns false if the table has no such entry. */
bool table_take(uint16_t kind, uint64_t key, struct own *own);
/* A copy of it. */
bool table_get(uint16_t kind, uint64_t key, struct own *own);
/* Whether an entry of this kind was ever made; if not, a free needs no search. */
bool table_seen(uint16_t kind);
/* Take out all entries that `match` accepts, and pass each to `done`, which may call the table. */
void table_sweep(bool (*match)(const struct own *own, void *with),
                 void (*done)(const struct own *own, void *with), void *with);

#pragma GCC visibility pop
#endif
