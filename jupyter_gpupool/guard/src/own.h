/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Memory and locks of the guard's own. The guard is called from inside allocators and from
 * children of fork(), so it uses neither malloc nor locks that a child could inherit locked.
 */
#ifndef GPUPOOL_GUARD_OWN_H
#define GPUPOOL_GUARD_OWN_H

#include <stddef.h>
#include <stdint.h>

#pragma GCC visibility push(hidden)

/* `size` zeroed bytes of anonymous pages that a child of fork() finds zeroed again: it has no
 * context and no allocation of the parent. NULL: the machine has no memory. */
void *own_map(size_t size);

/* The block that `where` points to; the first call makes it. */
void *own_block(void **where, size_t size);

/* A lock in such memory: 0 free, 1 held, 2 held and waited for. Held for a few instructions or a
 * short call of the driver, never while the guard waits for the broker. */
void own_lock(uint32_t *lock);
void own_unlock(uint32_t *lock);

#pragma GCC visibility pop
#endif
