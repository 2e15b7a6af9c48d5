/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Declarations that the parts of the guard share. ../README.md describes the path of a call. Each
 * declaration stands under the heading that names the file with its definition.
 */
#ifndef GPUPOOL_GUARD_H
#define GPUPOOL_GUARD_H

#include "cuda_abi.h"
#include "entries_gen.h" /* E_<symbol>, E_COUNT, E_SPARES: generated from entries.txt when the guard
                          * is compiled */
#include "page.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define HIDDEN __attribute__((visibility("hidden")))
#pragma GCC visibility push(hidden)

/* ---- the real driver (real.c; the table and its indices are generated: entries_gen.h) */

/* The driver's functions by index of the entry, including the spare entries. Once guard_enter() has
 * returned 0, no pointer is NULL: in place of a function that the driver lacks, the table has a
 * stub that returns CUDA_ERROR_NOT_FOUND. */
extern void *guard_real[E_COUNT + E_SPARES];

/* REAL(cuMemAlloc_v2)(...) calls the driver's own function. REAL takes the function's type from
 * wrap_cuMemAlloc_v2, which wraps.h declares. CALL(type, name) is for entries without a wrapper. */
#define REAL(name) ((__typeof__(&wrap_##name))guard_real[E_##name])
#define CALL(type, name) ((type)guard_real[E_##name])

/* The driver's version: 1000 x major + 10 x minor. INT_MAX if the version is unknown. */
extern unsigned guard_driver_version;

/* Whether the driver has an entry. */
bool guard_has(int entry);

/* The index of the entry that cuGetProcAddress returns for these arguments; -1: entries.txt has no
 * such entry. */
int guard_find(const char *name, int version, bool per_thread);
const char *guard_name(int entry);
/* The exported function of an entry. */
void *guard_exported(int entry);

/* Load the driver and map the page, once. In the child of a fork() take a new slot. Returns 0, or
 * the error for the application. After an error, a later call tries again. */
CUresult guard_settle(void);
extern bool guard_settled; /* whether guard_settle() has succeeded in this process */
/* The entry points of the kind "never" in entries.txt call this function if guard_unloaded is not
 * zero. It only loads the driver. If it returns 0, the entry point calls the driver. */
CUresult guard_slow_never(void);

/* ---- the gate (gate.c) */

/* Called before a call of the driver. Loads the real driver. While the session has no lease, asks
 * the broker for a lease and waits. Then counts the call, so that a suspend waits for the call.
 * Returns 0, or the error for the application. If the result is 0, the caller must call
 * guard_leave() later. Calls may be nested. */
CUresult guard_enter(void);
void guard_leave(void);
/* The same as guard_enter() for a call that frees or destroys; `argument` has the arguments of
 * the call. While the session has no slice, the guard notes the call to make it later (later.c).
 * The function then returns GUARD_NOTED, and the application gets success. */
CUresult guard_enter_back(uint32_t entry, const uint64_t *argument);
/* The same as guard_enter() for a call that queries whether work is done. Returns GUARD_NOTED if
 * the process is suspended, because the work of a suspended process is done. Returns
 * CUDA_ERROR_NOT_READY if a suspend is under way and this thread has had no answer for more than a
 * second. */
CUresult guard_enter_query(void);
#define GUARD_NOTED ((CUresult)-1)

/* The same as guard_enter() for a call that needs no lease (a query for properties). It waits at
 * the gate only if this process may be suspended, because the driver would block in this case. */
CUresult guard_enter_free(void);

/* Whether the driver would block now, because the session may be suspended. The guard then answers
 * from its cache. */
bool guard_blocked(void);
/* guard_note_init is called after a successful cuInit, and guard_note_context after the process has
 * made its first context. */
void guard_note_init(void);
void guard_note_context(void);
bool guard_initialised(void); /* whether this process has called cuInit with success */
bool guard_has_context(void);

/* guard_gate and guard_free_gate point to the two bytes that the entry points test: to bytes of the
 * page, or to constants. guard_gates sets both addresses. */
extern const uint8_t *guard_gate, *guard_free_gate;
void guard_gates(const uint8_t *gate, const uint8_t *free_gate);
/* A constant that can stand in for the gate of the page and the three bytes after it. The entry
 * points of launches also test the fourth byte. In the page this byte is ``contended``. */
struct gate_word {
    uint8_t gate, unused[3];
};
extern const struct gate_word guard_shut, guard_open;

/* Whether the gate lets a call pass: the gate is open, or a pause is over. With `use`, also records
 * that the session uses its slice. */
bool gate_lets(bool use);
/* Wait until the gate lets a call through, without counting the call. Returns 0, or the error for
 * the application. */
CUresult gate_pass(void);
/* Registers what must happen when the process exits. The guard does this once, when it maps the
 * page: usually at the first CUDA call of a session's process. */
void gate_at_exit(void);
/* Whether the process is ending. Then no call may wait for a lease. */
bool gate_ends(void);
/* Whether this thread is inside a call that a suspend waits for. */
bool gate_inside(void);
/* Whether the session has no lease or is about to lose it; false in a pause. */
bool gate_closed(void);
/* gate_step_out and gate_step_in are called before and after a wait for the broker inside a counted
 * call. Between them, a suspend does not wait for this call. */
void gate_step_out(void);
CUresult gate_step_in(void);
/* Set the bytes that the entry points test. Called when a landing has begun or ended. */
void gate_point(void);
/* Called instead of gate_step_in if the call returns an error and does not enter the driver
 * again. */
void gate_step_back(void);

/* The entry points in entries.S call each of these functions for one kind of entries.txt. An entry
 * point of the kinds "free", "gate" and "note" first tests a byte (see guard_gates), and calls its
 * function if the byte is not zero. An entry point of the kind "refuse" always calls its function.
 * If the function returns 0, the entry point calls the driver. */
CUresult guard_slow_free(uint32_t entry);
CUresult guard_slow_gate(uint32_t entry);
CUresult guard_slow_refuse(uint32_t entry);
CUresult guard_slow_note(uint32_t entry, const uint64_t *argument); /* or GUARD_NOTED */
/* The same as guard_enter(). The entry points of the kind "wait" in entries.S call it before they
 * call the driver, and call guard_leave() afterwards. */
CUresult guard_enter_entry(uint32_t entry);

uint64_t monotonic(void); /* ns */

/* ---- the driver's answers about the devices (cached.c) */

/* Cache the driver's answers about the devices. While the driver would block, the guard answers
 * from this cache. */
void cached_fill(void);
/* The size of the whole device's memory. Returns false if the size is unknown in this lease. */
bool cached_total(size_t *bytes, CUdevice device);

/* ---- the launch window (window.c) */

/* Called before a launch. If the slice is contended and too many launches are unfinished, waits for
 * earlier launches. Returns 0, or the error for the application if a wait at the gate ended with an
 * error. */
CUresult window_pass(CUstream stream, bool per_thread);
/* Called when a synchronise has returned. window_synced: all earlier launches are done.
 * window_stream_synced: the earlier launches of this stream are done. */
void window_synced(void);
void window_stream_synced(CUstream stream, bool per_thread);

/* ---- cuGetProcAddress (procaddr.c) */

void procaddr_ready(void); /* called when guard_real is filled */

/* ---- the broker (broker.c) */

/* Questions to the broker. The guard opens a connection for each question, and the thread waits for
 * the answer as wait.c describes. A function of type CUresult returns 0, or the error for the
 * application. */
void broker_remember(void); /* stores the broker's address before any thread waits */
CUresult broker_attach(void);                            /* returns once the lease is granted */
CUresult broker_grow(int ordinal, uint64_t more);        /* returns 0 if the page has a larger grant
                                                          * now */
enum answer { ANSWER_OK, ANSWER_REFUSED, ANSWER_AGAIN, ANSWER_INTERRUPTED, ANSWER_AWAY };
enum answer broker_page(void); /* ANSWER_OK: the broker has restored the page's path or has passed
                                * the page */
/* Asks the broker for one step of a landing: "begin", "move", "cancel", or "stay" (the process
 * keeps its present devices). Returns CUDA_ERROR_DEVICE_UNAVAILABLE if the broker refuses. Returns
 * CUDA_ERROR_NOT_READY if the lease is about to end; the caller must then check the devices again.
 * ``why``, if it is not NULL, gets the broker's sentence for people, or "". */
#define SENTENCE_BYTES 512
CUresult broker_land(const char *step, char *why);
void broker_home(void); /* asks the broker to write to the page the devices that the next lease
                         * would have */

/* ---- a broker that has died (revive.c) */

void revive_remember(void);
/* Starts the user's own broker if it has died. Only one thread does so at a time. Returns the
 * longest total time in nanoseconds that a call may wait while no broker listens. This time is 0 if
 * the last attempts to start a broker have failed. */
uint64_t revive(const char *socket);

/* ---- the page (page.c) */

/* NULL in a process without a session. In such a process the guard only passes calls on. */
extern struct page *guard_page;

/* This process's slot. The process takes it at the first call that needs a slot. NULL if there is
 * no page, or no free slot. The process keeps the slot while any of its threads may still write to
 * the slot. */
extern struct page_slot *guard_the_slot;
extern __thread bool guard_slot_user;
extern __thread bool guard_first; /* this thread owns the word ``first`` of the slot: no other
                                   * thread of the process writes to it */
void guard_use_slot(void);

static inline struct page_slot *guard_slot(void)
{
    if (__builtin_expect(!guard_slot_user, 0))
        guard_use_slot();
    return __atomic_load_n(&guard_the_slot, __ATOMIC_SEQ_CST);
}

void guard_pin(uint32_t pins); /* PIN_* */

/* Map the page and take a slot. This never waits for the broker, because the caller holds a
 * mutex. */
enum page_state {
    PAGE_READY,
    PAGE_LOST,    /* the page was not found. Ask the broker, which restores its path or passes the
                   * page; then call page_settle() again */
    PAGE_REFUSED, /* the guard has written the reason to stderr */
};
enum page_state page_settle(void);
void page_passed(int fd); /* the broker has sent the session's page: keep its descriptor for
                           * page_settle() */
void page_lost(enum answer answer); /* called if the page is still lost; writes the reason to
                                     * stderr */
/* A thread holds this lock while it takes or frees a slot, and on the slow path of a charge, where
 * it adds bytes only if they fit in the grant (charge.c). A thread never calls the driver while it
 * holds this lock. */
void page_lock(void);
void page_unlock(void);
/* Free the slots of processes that have ended. The caller holds the lock. The function is slow,
 * because it reads /proc for each process. */
void page_reap(void);
/* Whether to call page_reap(). If a process of the session has ended and its parent has reaped it,
 * the function returns true at once. It also returns true once every 10 ms, because a zombie may
 * have a slot. */
bool page_deaths(void);

/* ---- the devices that the process sees (init.c) */

/* Translate `device`, a device number in this process, into the session's ordinal; -1: the session
 * does not have the device. The two numbers may differ if the process does not see all devices of
 * the session. */
int guard_ordinal(CUdevice device);
/* The session's ordinal of the current context's device; -1 without a context. */
int guard_current(void);

/* Whether the device that this process sees as the session's device `ordinal` belongs to the slice.
 * cuInit fixes the devices of the process, perhaps before the session has a lease. The session may
 * then get a lease on other devices. The session has no grant on the old devices, so the process
 * must not take memory there. */
bool guard_sees_slice(int ordinal);
/* Write to the slot which devices the process sees. `follows`: the process has contexts, so it
 * moves with the session, and its devices are always the devices of the slice. If `follows` is
 * false, the process has no context and keeps its present devices. */
void guard_follow(bool follows);

/* ---- moving to the slice before the first context (landing.c) */

/* Make the process see the devices of its slice. Called inside a counted call, while the gate is
 * open. Returns 0, or the error for the application. */
CUresult landing(int ordinal);
/* Called after the process has tried to make its context. Releases the contexts that this thread
 * made for the landing. If the guard can only note the release, these contexts move with the
 * session until the driver releases them. */
enum landing_kept { KEPT_NONE, KEPT_RELEASED, KEPT_NOTED };
enum landing_kept landing_over(void);
/* landing_moves: whether the broker may suspend this process to move it. landing_wait: wait until
 * the broker has finished. */
bool landing_moves(void);
/* Whether an admin's pause has suspended this process, although it has no context. In this case
 * landing_moves() is also true. */
bool landing_aside(void);
CUresult landing_wait(void);

/* ---- calls that a process or a thread makes once the gate is open (gate.c, later.c, registered.c,
 * current.c) */

enum arrears { ARREARS_CALLS = 1, ARREARS_CONTEXTS = 2 /* added once for each thread */ };
/* What the process must still do: ARREARS_CALLS if it must make noted calls, plus ARREARS_CONTEXTS
 * for each thread whose changes of the current context are not yet made in the driver. If the value
 * is not 0, every entry point takes its slow path. */
extern uint32_t guard_arrears;
void gate_arrears(enum arrears what, bool more);

#define LATER_ARGUMENTS 3
/* Note a call, to make it later with the context that is current now. Returns false if there is no
 * memory for it. */
bool later_note(uint32_t entry, const uint64_t *argument);
/* Whether the guard may note a call of this entry. While host memory is registered, the guard must
 * not note a call that ends a context (see registered.c). */
bool later_may(uint32_t entry);
/* Whether this process has host memory registered with the driver. */
bool registered_any(void);
/* Make the noted calls. The calling thread is inside a counted call, and the gate is open.
 * Returns false if some calls are left, because another thread makes them or the gate closed. */
bool later_do(void);
/* Wait until no other thread makes noted calls. Returns 0, or the error for the application. */
CUresult later_sit_out(void);

/* The calling thread's current context, as the application sees it. */
CUcontext current_context(void);
/* Whether current_context() is right. It may be wrong if the thread's stack is too deep for the
 * guard's copy. */
bool current_known(void);
/* Record the context that the driver reports as current, because calls other than cuCtxSetCurrent
 * also change it. */
void current_seen(CUcontext context);
void current_pushed(CUcontext context);
void current_destroyed(CUcontext context);
void current_destroyed_later(CUcontext context);
/* current_differs: whether the driver's stack of contexts for this thread differs from the stack
 * that the application sees. current_apply: change the driver's stack, so that it does not
 * differ. */
bool current_differs(void);
void current_apply(void);

/* ---- NVML (nvml_calls.c) */

/* Called at the first use of CUDA or NVML, and at each later use of NVML. Records whether the
 * session was already suspended at the first use: in that case the driver has not suspended this
 * process. */
void nvml_calls_began(const struct page *page);
void nvml_calls_thread_ends(void);

/* ---- waiting (wait.c) */

/* polite_begin begins a wait, and polite_end ends it. If this process has an interpreter and this
 * thread holds its lock, the thread releases the lock during the wait. So other threads of the
 * interpreter can run. During the wait, this thread notices an interrupt (SIGINT with a handler),
 * and the slot counts this thread as waiting. */
struct polite {
    void *thread;
    struct page_slot *slot;
    uint32_t interrupts, forced, naps;
    bool foreign;
};
void polite_begin(struct polite *p);
void polite_end(struct polite *p);
bool polite_interrupted(const struct polite *p);
/* Whether this process has an interpreter that is shutting down. */
bool polite_finalizing(void);
/* interpreter_release lets the interpreter's other threads run, if this thread holds the
 * interpreter's lock. interpreter_take takes the lock back. */
void *interpreter_release(void);
void interpreter_take(void *thread);
void polite_nap(struct polite *p); /* naps of 1 ms in the first second, then of 10 ms */
void nap(int milliseconds);

/* ---- fork(): the handlers of each part, which init.c registers (real.c, page.c, wait.c,
 * procaddr.c, gate.c, cached.c, current.c, landing.c, nvml_calls.c, init.c) */

enum fork_when { FORK_PREPARE, FORK_PARENT, FORK_CHILD };
void real_fork(enum fork_when when);
void page_fork(enum fork_when when);
void wait_fork(enum fork_when when);
void procaddr_fork(enum fork_when when);
void gate_fork(enum fork_when when);
void cached_fork(enum fork_when when);
void current_fork(enum fork_when when);
void landing_fork(enum fork_when when);
void nvml_calls_fork(enum fork_when when);
void guard_at_fork(void); /* registers the handlers */

/* ---- bytes (charge.c) */

/* Take `bytes` of the session's grant on `ordinal`. If they do not fit, ask the broker to grow the
 * grant. Returns CUDA_ERROR_OUT_OF_MEMORY if the broker refuses. Callers charge before they call
 * the driver. */
CUresult guard_charge(int ordinal, uint64_t bytes);
/* Give bytes back that guard_charge took. */
void guard_credit(int ordinal, uint64_t bytes);
/* Bytes of the session on `ordinal`, summed over all living processes. */
uint64_t guard_used(int ordinal);

#pragma GCC visibility pop
#endif
