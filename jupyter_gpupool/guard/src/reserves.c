/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Memory that the driver reserves by its own rules: the pools of stream-ordered allocation, and the
 * memory from which graphs with memory nodes allocate. The guard counts the reserved bytes instead
 * of the allocated bytes: other kernels cannot use memory that a pool keeps for its next
 * allocation.
 *
 * Before an allocation that may make a pool grow, the guard charges the least growth that it needs.
 * After the call the guard asks the driver how much is reserved, and charges or gives back the
 * difference. A pool shrinks when the program synchronises. So the guard asks the driver after
 * synchronising calls, before it refuses an allocation, and before it reports free memory.
 */
#include "reserves.h"
#include "wraps.h"

enum { POOL_ATTR_RESERVED = 5, GRAPH_ATTR_RESERVED = 2 };

static void *the_reserves;
uint32_t graph_trims;

struct reserves *reserves(void) { return own_block(&the_reserves, sizeof(struct reserves)); }

/* ---- the accounts; the caller holds the lock */

struct reserve *reserve_add(struct reserves *all)
{
    struct reserves *r = all;
    for (;; r = r->next) {
        for (uint32_t i = 0; i < r->count; i++)
            if (!r->at[i].kind)
                return &r->at[i];
        if (r->count < ROOM) {
            /* Store the count atomically, because pools_settle() and others first read it without
             * the lock. */
            __atomic_store_n(&r->count, r->count + 1, __ATOMIC_RELAXED);
            return &r->at[r->count - 1];
        }
        if (!r->next && !(r->next = own_map(sizeof *r)))
            return NULL;
    }
}

struct reserve *reserve_find(struct reserves *all, CUmemoryPool pool)
{
    EACH(r, all)
        if (r->kind == RESERVE_POOL && r->pool == pool && r->ended == ALIVE)
            return r;
    return NULL;
}

/* Gets the size of the reserve from the driver. Returns false if the size is unknown. */
static bool ask(const struct reserve *r, uint64_t *bytes)
{
    typedef CUresult (*pool_attribute)(CUmemoryPool, int, void *);
    typedef CUresult (*graph_attribute)(CUdevice, int, void *);
    *bytes = 0;
    if (r->ended == ENDING)
        return false; /* the handle may already be invalid */
    if (r->ended)
        *bytes = reserve_round(r->live); /* the handle is gone, so the driver cannot be asked */
    else if (r->kind == RESERVE_POOL)
        return !CALL(pool_attribute, cuMemPoolGetAttribute)(r->pool, POOL_ATTR_RESERVED, bytes);
    else
        return !CALL(graph_attribute, cuDeviceGetGraphMemAttribute)(r->device, GRAPH_ATTR_RESERVED, bytes);
    return true;
}

void reserve_compare(struct reserve *r)
{
    uint64_t now;
    if (r->ordinal < 0 || !ask(r, &now))
        return;
    r->unseen = 0;
    if (now > r->charged) {
        charge_fact(r->ordinal, now - r->charged);
        r->charged = now;
    } else if (!r->calls) {
        /* Give back only bytes that the page already counts, so not the pending bytes. The thread
         * that is charging the pending bytes calls this function again afterwards. */
        uint64_t less = r->charged - now, there = r->charged - r->pending;
        less = less < there ? less : there;
        guard_credit(r->ordinal, less);
        r->charged -= less;
    }
    if (r->ended && !r->live && !r->calls && !r->pending)
        r->kind = 0;
}

/* ---- growth */

CUresult reserve_begin(struct reserve *r, uint64_t growth)
{
    struct reserves *all = reserves();
    CUresult result = guard_charge(r->ordinal, growth);
    if (result)
        return result;
    own_lock(&all->lock);
    r->charged += growth;
    r->calls++;
    own_unlock(&all->lock);
    return CUDA_SUCCESS;
}

CUresult reserve_end(struct reserve *r, bool look)
{
    struct reserves *all = reserves();
    uint64_t now = 0, more = 0;
    own_lock(&all->lock);
    r->calls--;
    if (look && ask(r, &now) && now > r->charged) {
        /* Store the driver's figure at once, so that no other thread charges the same growth. */
        more = now - r->charged;
        r->charged = now;
        r->pending += more;
    } else if (look) {
        reserve_compare(r);
    }
    own_unlock(&all->lock);
    if (!more)
        return CUDA_SUCCESS;
    CUresult result = guard_charge(r->ordinal, more);
    own_lock(&all->lock);
    r->pending -= more;
    if (result)
        r->charged -= more;
    else
        reserve_compare(r); /* the reserve may have shrunk while this thread charged these bytes to
                             * the page */
    own_unlock(&all->lock);
    return result;
}

void reserve_settle(struct reserve *r)
{
    struct reserves *all = reserves();
    own_lock(&all->lock);
    reserve_compare(r);
    own_unlock(&all->lock);
}

struct reserve *reserve_graphs(struct here h)
{
    struct reserves *all = reserves();
    struct reserve *found = NULL;
    if (!all || h.ordinal < 0)
        return NULL;
    own_lock(&all->lock);
    EACH(r, all)
        if (r->kind == RESERVE_GRAPHS && r->ordinal == h.ordinal)
            found = r;
    if (!found && (found = reserve_add(all)))
        *found = (struct reserve){.kind = RESERVE_GRAPHS, .ordinal = h.ordinal, .device = h.device};
    own_unlock(&all->lock);
    return found;
}

void pools_settle(int ordinal)
{
    struct reserves *all = __atomic_load_n(&the_reserves, __ATOMIC_ACQUIRE);
    if (!all || !__atomic_load_n(&all->count, __ATOMIC_RELAXED))
        return;
    own_lock(&all->lock);
    EACH(r, all)
        if (ordinal < 0 || r->ordinal == ordinal)
            reserve_compare(r);
    own_unlock(&all->lock);
}

bool pools_reclaim(int ordinal)
{
    typedef CUresult (*trim)(CUmemoryPool, size_t);
    typedef CUresult (*trim_graphs)(CUdevice);
    struct reserves *all = __atomic_load_n(&the_reserves, __ATOMIC_ACQUIRE);
    bool any = false;
    if (!all || !__atomic_load_n(&all->count, __ATOMIC_RELAXED))
        return false;
    own_lock(&all->lock);
    EACH(r, all) {
        if (r->ordinal != ordinal || !r->charged)
            continue;
        any = true;
        if (r->kind == RESERVE_GRAPHS) {
            __atomic_add_fetch(&graph_trims, 1, __ATOMIC_ACQ_REL);
            CALL(trim_graphs, cuDeviceGraphMemTrim)(r->device);
        } else if (r->ended == ALIVE) {
            CALL(trim, cuMemPoolTrimTo)(r->pool, 0);
        }
        reserve_compare(r);
    }
    own_unlock(&all->lock);
    return any;
}

void pools_synced(void)
{
    struct reserves *all = __atomic_load_n(&the_reserves, __ATOMIC_ACQUIRE);
    if (!all || !__atomic_load_n(&all->count, __ATOMIC_RELAXED))
        return;
    own_lock(&all->lock);
    EACH(r, all)
        if (r->kind == RESERVE_POOL && r->charged > reserve_round(r->live))
            reserve_compare(r); /* perhaps the guard can give back a part of the charge */
    own_unlock(&all->lock);
}
