/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * What the parts of the guard share. See README.md for how a call travels.
 */
#ifndef GPUPOOL_GUARD_H
#define GPUPOOL_GUARD_H

#include "cuda_abi.h"
#include "page.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define HIDDEN __attribute__((visibility("hidden")))
#pragma GCC visibility push(hidden)

/* ---- the real driver (real.c; the table and its indices are generated: entries_gen.h) */

/* By index of the entry. Never NULL once a call has entered: what the driver lacks is a stub that
 * returns CUDA_ERROR_NOT_FOUND. */
extern void *guard_real[];

/* REAL(cuMemAlloc_v2)(...): the driver's own. The prototype is that of wrap_cuMemAlloc_v2, declared in
 * wraps.h for every wrapped entry; use CALL(type, name) for one that is not wrapped. */
#define REAL(name) ((__typeof__(&wrap_##name))guard_real[E_##name])
#define CALL(type, name) ((type)guard_real[E_##name])

/* Whether the driver has an entry at all. */
bool guard_has(int entry);

/* ---- the gate (gate.c, wait.c) */

/* Enter the driver: waits while the session has no lease (asks the broker for one), counts the call
 * among those that a suspend waits for. 0, or the error to return to the application; only after 0
 * guard_leave() must be called. Loads the real driver. Nests. */
CUresult guard_enter(void);
void guard_leave(void);

/* For calls that need no lease (properties): loads the driver and, where this process may be
 * suspended and the driver would block, waits at the gate like guard_enter. Pairs with guard_leave. */
CUresult guard_enter_free(void);

/* ---- the page (page.c) */

/* NULL in a process of no session: then nothing is limited, gated or counted. */
extern struct page *guard_page;

/* This process's slot, taken at the first call that needs one; NULL if there is no page or no room. */
struct page_slot *guard_slot(void);

/* Ordinal in the session of this process's CUdevice; they differ if the process sees a part. -1: none. */
int guard_ordinal(CUdevice device);
/* Ordinal in the session of the current context's device; -1 if there is none. */
int guard_current(void);

void guard_pin(uint32_t pins); /* PIN_* */

/* ---- bytes (charge.c) */

/* Take `bytes` of the session's grant on `ordinal`; asks the broker for growth if they do not fit.
 * CUDA_ERROR_OUT_OF_MEMORY if refused (counted in the slot). Before the driver is asked. */
CUresult guard_charge(int ordinal, uint64_t bytes);
/* Give them back. */
void guard_credit(int ordinal, uint64_t bytes);
/* Bytes of the session on `ordinal`, over all living processes. */
uint64_t guard_used(int ordinal);

/* ---- the broker (broker.c) */

/* One question on a connection of its own; waits politely (wait.c). 0, or the error to return. */
CUresult broker_attach(void);                            /* until the lease is there */
CUresult broker_grow(int ordinal, uint64_t more);        /* 0: the page has a larger grant now */

#pragma GCC visibility pop
#endif
