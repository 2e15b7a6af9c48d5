/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Host memory that the program has registered with the driver. The end of its context unregisters
 * the memory, and then the program may unmap it. If the guard noted this end for later, the driver
 * would still have the pages pinned, and the restore would register pages that no longer exist. So
 * the guard does not note the end of a context while host memory is registered.
 */
#include "counting.h"
#include "own.h"
#include "wraps.h"

/* In a child of fork() this count is zero again, because the child has registered nothing. */
static void *the_count;

static uint32_t *count(void) { return own_block(&the_count, sizeof(uint32_t)); }

bool registered_any(void)
{
    const uint32_t *n = __atomic_load_n(&the_count, __ATOMIC_ACQUIRE);
    return n && __atomic_load_n(n, __ATOMIC_SEQ_CST);
}

void registered_over(const struct own *own)
{
    (void)own;
    __atomic_sub_fetch(count(), 1, __ATOMIC_SEQ_CST);
}

static CUresult began(CUresult result, void *p)
{
    struct own stale, own = {.key = (uint64_t)p, .kind = OWN_REGISTERED};
    if (result || !guard_page || !count())
        return result;
    own.owner = here_now().number;
    /* If the table has no memory for the entry, the registration counts until the process ends. */
    if (!table_put(&own, &stale) || !stale.kind)
        __atomic_add_fetch(count(), 1, __ATOMIC_SEQ_CST);
    return result;
}

CUresult wrap_cuMemHostRegister(void *p, size_t bytes, unsigned flags)
{
    ENTER;
    return began(REAL(cuMemHostRegister)(p, bytes, flags), p);
}

CUresult wrap_cuMemHostRegister_v2(void *p, size_t bytes, unsigned flags)
{
    ENTER;
    return began(REAL(cuMemHostRegister_v2)(p, bytes, flags), p);
}

CUresult wrap_cuMemHostUnregister(void *p)
{
    ENTER;
    struct own own, stale;
    bool ours = table_seen(OWN_REGISTERED) && table_take(OWN_REGISTERED, (uint64_t)p, &own);
    CUresult result = REAL(cuMemHostUnregister)(p);
    if (ours && !result)
        registered_over(&own);
    else if (ours)
        table_put(&own, &stale);
    return result;
}
