/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Memory and locks that belong to the guard alone. The guard is called from inside allocators and
 * from children of fork(). So it uses no malloc, and no lock that a child of fork() could inherit
 * in the locked state.
 */
#ifndef GPUPOOL_GUARD_OWN_H
#define GPUPOOL_GUARD_OWN_H

#include <stddef.h>
#include <stdint.h>

#pragma GCC visibility push(hidden)

/* Returns `size` zeroed bytes of anonymous pages. In a child of fork() these bytes are zero again,
 * because the child has no context and no allocation of the parent. NULL: the machine has no
 * memory. */
void *own_map(size_t size);

/* Returns the block at *where. The first call makes a block of `size` bytes and stores its address
 * in *where. */
void *own_block(void **where, size_t size);

/* A lock, usually in memory from own_map(). 0: free; 1: held; 2: held, and other threads wait for
 * the lock. A thread holds the lock for a few instructions or a short call of the driver, never
 * while the thread waits for the broker. */
void own_lock(uint32_t *lock);
void own_unlock(uint32_t *lock);

#pragma GCC visibility pop
#endif
