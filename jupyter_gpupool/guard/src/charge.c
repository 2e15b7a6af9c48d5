/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * The session's bytes. Each process counts its bytes in its own slot of the page, and adds bytes to
 * no other slot. So a process that is killed at any instruction leaves nothing to repair: another
 * process frees its slot, and this frees exactly the bytes of the dead process.
 *
 * An allocation that fits takes no lock: the process first adds the bytes, and then sums the slots.
 * If two processes add the last bytes at once, both sums may be too large. In this case both
 * processes subtract their bytes and try again under the lock, where a process adds only bytes that
 * fit.
 */
#include "counting.h"
#include "guard.h"

/* Another process of the session may take the bytes that the broker has granted for this
 * allocation. This thread then asks again. After this many repetitions, the allocation fails. */
#define TRIES 8

#define LOAD(x) __atomic_load_n(&(x), __ATOMIC_SEQ_CST)

/* Raise ``slots_used`` to include the slot, before the slot gets its first bytes. A sum reads only
 * the first ``slots_used`` slots, and not all 256. */
static void reach(const struct page_slot *slot)
{
    uint64_t wanted = (uint64_t)(slot - guard_page->slot) + 1, seen = LOAD(guard_page->slots_used);
    if (wanted > PAGE_SLOTS)
        return; /* this process is ending, and has already given its slot back */
    while (seen < wanted &&
           !__atomic_compare_exchange_n(&guard_page->slots_used, &seen, wanted, false, __ATOMIC_SEQ_CST,
                                        __ATOMIC_SEQ_CST))
        ;
}

uint64_t guard_used(int ordinal)
{
    uint64_t sum = 0, count = guard_page ? LOAD(guard_page->slots_used) : 0;
    if (ordinal < 0 || ordinal >= PAGE_DEVICES)
        return 0;
    if (count > PAGE_SLOTS)
        count = PAGE_SLOTS;
    for (uint64_t i = 0; i < count; i++) {
        const struct page_slot *s = &guard_page->slot[i];
        if (__atomic_load_n(&s->state, __ATOMIC_RELAXED) == SLOT_LIVE)
            sum += LOAD(s->used[ordinal]);
    }
    return sum;
}

static bool fits(int ordinal, uint64_t more)
{
    uint64_t sum;
    return !__builtin_add_overflow(guard_used(ordinal), more, &sum) &&
           sum <= LOAD(guard_page->granted[ordinal]);
}

static void add(struct page_slot *slot, int ordinal, uint64_t bytes)
{
    __atomic_add_fetch(&slot->used[ordinal], bytes, __ATOMIC_SEQ_CST);
}

/* If an accounting error makes `bytes` larger than the count, the count becomes 0. An unsigned
 * count below zero would show 16 EiB in use. */
static void subtract(struct page_slot *slot, int ordinal, uint64_t bytes)
{
    uint64_t seen = LOAD(slot->used[ordinal]);
    while (!__atomic_compare_exchange_n(&slot->used[ordinal], &seen, seen > bytes ? seen - bytes : 0,
                                        false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
        ;
}

/* Holds the lock, and adds the bytes to the slot if they fit in the grant. Returns whether they
 * fit. `reap`: first free the slots of dead processes. */
static bool take_locked(struct page_slot *slot, int ordinal, uint64_t bytes, bool reap)
{
    page_lock();
    if (reap)
        page_reap();
    bool taken = fits(ordinal, bytes);
    if (taken)
        add(slot, ordinal, bytes);
    page_unlock();
    return taken;
}

/* By how many bytes the grant must grow for the request, but at least 1. 0: the request is too
 * large for any grant. */
static uint64_t missing(int ordinal, uint64_t bytes)
{
    uint64_t wanted, granted = LOAD(guard_page->granted[ordinal]);
    if (__builtin_add_overflow(guard_used(ordinal), bytes, &wanted))
        return 0;
    return wanted > granted ? wanted - granted : 1;
}

/* Whether the request needs a grant that is at least as large as a grant that the broker has just
 * refused, and nothing has changed since then. */
static bool in_vain(int ordinal, uint64_t bytes)
{
    uint64_t wanted, from = LOAD(guard_page->vain[ordinal]);
    if (!from || monotonic() >= LOAD(guard_page->vain_until))
        return false;
    return __builtin_add_overflow(guard_used(ordinal), bytes, &wanted) || wanted >= from;
}

static CUresult charge_slowly(struct page_slot *slot, int ordinal, uint64_t bytes)
{
    /* Before cuInit the driver refuses the call anyway, so do not ask the broker. */
    if (!guard_initialised())
        return CUDA_ERROR_NOT_INITIALIZED;
    /* Look for the bytes in this order: the present grant, the bytes of dead processes of the
     * session, the idle reserves of this process's pools, and at last growth from the broker. */
    if (take_locked(slot, ordinal, bytes, !in_vain(ordinal, bytes) || page_deaths()))
        return CUDA_SUCCESS;
    if (pools_reclaim(ordinal) && take_locked(slot, ordinal, bytes, false))
        return CUDA_SUCCESS;
    for (int tries = 0;; tries++) {
        uint64_t more = in_vain(ordinal, bytes) ? 0 : missing(ordinal, bytes);
        CUresult refused = more ? broker_grow(ordinal, more) : CUDA_ERROR_OUT_OF_MEMORY;
        /* If broker_grow() failed for another reason than a refusal, the process may be suspended.
         * In this case take no bytes, even if they fit in the grant. */
        bool inside = !refused || refused == CUDA_ERROR_OUT_OF_MEMORY;
        if (more && inside && take_locked(slot, ordinal, bytes, true))
            return CUDA_SUCCESS;
        if (refused || tries == TRIES)
            return refused ? refused : CUDA_ERROR_OUT_OF_MEMORY;
        /* The broker granted the bytes, but another process of the session took them: ask for the rest. */
    }
}

CUresult guard_charge(int ordinal, uint64_t bytes)
{
    if (!guard_page || ordinal < 0 || ordinal >= PAGE_DEVICES || !bytes)
        return CUDA_SUCCESS;
    struct page_slot *slot = guard_slot();
    if (!slot)
        /* The session has 256 living processes, so the page has no slot for this one. */
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (LOAD(guard_page->slots_used) <= (uint64_t)(slot - guard_page->slot))
        reach(slot);
    if (bytes <= LOAD(guard_page->granted[ordinal])) {
        add(slot, ordinal, bytes);
        if (fits(ordinal, 0))
            return CUDA_SUCCESS;
        subtract(slot, ordinal, bytes);
    }
    return charge_slowly(slot, ordinal, bytes);
}

void guard_credit(int ordinal, uint64_t bytes)
{
    struct page_slot *slot = guard_page && bytes ? guard_slot() : NULL;
    if (slot && ordinal >= 0 && ordinal < PAGE_DEVICES)
        subtract(slot, ordinal, bytes);
}

void charge_fact(int ordinal, uint64_t bytes)
{
    struct page_slot *slot = guard_page && bytes ? guard_slot() : NULL;
    if (!slot || ordinal < 0 || ordinal >= PAGE_DEVICES)
        return;
    reach(slot);
    add(slot, ordinal, bytes);
}
