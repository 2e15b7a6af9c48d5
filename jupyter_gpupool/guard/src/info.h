/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * The memory of a slice, from the page: the same figures for CUDA and for NVML.
 */
#ifndef GPUPOOL_GUARD_INFO_H
#define GPUPOOL_GUARD_INFO_H

#include "page.h"

#include <errno.h>
#include <signal.h>
#include <stdbool.h>
#include <sys/types.h>

struct slice_memory {
    uint64_t total;     /* the largest size that the slice can reach */
    uint64_t used;      /* bytes that all processes of the session use together */
    uint64_t available; /* bytes that the session may still allocate now */
};

/* Fills *out. Returns false if the page has no figures yet.
 *
 * total: the larger of limit and grant, and at most the device's total. The grant is larger only if
 * somebody has lowered the limit since the grant.
 *
 * available: the unused bytes of the grant, plus the bytes by which the grant can grow. The broker
 * keeps the bytes of the grant for the session. The grant can grow up to the limit, but only by
 * bytes that are free on the device and not guaranteed to a neighbour. The broker computes this
 * growth in page->room. A framework that chooses its size by `available` really gets these bytes.
 *
 * real_free, real_total: the driver's figures; UINT64_MAX if the guard cannot ask the driver. */
static inline bool slice_memory(const struct page *page, int ordinal, uint64_t real_free, uint64_t real_total,
                                struct slice_memory *out)
{
    uint64_t limit = __atomic_load_n(&page->limit, __ATOMIC_RELAXED);
    uint64_t granted = __atomic_load_n(&page->granted[ordinal], __ATOMIC_RELAXED);
    uint64_t count = __atomic_load_n(&page->slots_used, __ATOMIC_RELAXED), used = 0;
    uint64_t total = limit > granted ? limit : granted;
    if (!total)
        return false;
    for (uint64_t i = 0; i < count && i < PAGE_SLOTS; i++) {
        const struct page_slot *slot = &page->slot[i];
        if (__atomic_load_n(&slot->state, __ATOMIC_ACQUIRE) != SLOT_LIVE)
            continue;
        /* A killed process leaves its slot in use until another process frees it. Do not count the
         * bytes of such a slot. */
        uint64_t bytes = __atomic_load_n(&slot->used[ordinal], __ATOMIC_RELAXED);
        if (bytes && kill((pid_t)slot->pid, 0) && errno == ESRCH)
            continue;
        used += bytes;
    }
    if (total > real_total)
        total = real_total;
    uint64_t rest = total > used ? total - used : 0, kept = granted > used ? granted - used : 0;
    uint64_t available = rest < real_free ? rest : real_free;
    uint64_t room = __atomic_load_n(&page->room[ordinal], __ATOMIC_RELAXED);
    if (room && available > kept && available - kept > room - 1)
        available = kept + room - 1;
    if (available < kept)
        available = kept;
    *out = (struct slice_memory){total, used, available < total ? available : total};
    return true;
}

#endif
