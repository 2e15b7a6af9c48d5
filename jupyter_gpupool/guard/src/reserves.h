/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * The accounts of the memory that the driver reserves (reserves.c), for pools.c. The caller holds
 * the lock for each of these functions except reserves().
 */
#ifndef GPUPOOL_GUARD_RESERVES_H
#define GPUPOOL_GUARD_RESERVES_H

#include "counting.h"
#include "own.h"

#pragma GCC visibility push(hidden)

#define MIB (1ull << 20)
#define ROOM 250

struct reserves {
    uint32_t lock; /* protects this whole struct, also during calls to the driver */
    uint32_t count;
    struct reserves *next;
    struct reserve at[ROOM];
};

/* The reserves of this process. NULL: the machine has no memory. */
struct reserves *reserves(void);

#define EACH(r, all)                                                                 \
    for (struct reserves *part_ = (all); part_; part_ = part_->next)                 \
        for (struct reserve *r = part_->at; r < part_->at + part_->count; r++)       \
            if (r->kind)

/* Returns a free place, which the caller fills. */
struct reserve *reserve_add(struct reserves *all);
struct reserve *reserve_find(struct reserves *all, CUmemoryPool pool);
/* Change the charge of a reserve to the driver's figure. While a call that may grow the reserve is
 * inside the driver, the charge does not shrink: the driver may still reserve the bytes that were
 * charged for this call. */
void reserve_compare(struct reserve *r);

/* Rounds up to the device's pages of 2 MiB, because a reserve grows in such pages. */
static inline uint64_t reserve_round(uint64_t bytes)
{
    return (bytes + 2 * MIB - 1) / (2 * MIB) * (2 * MIB);
}

#pragma GCC visibility pop
#endif
