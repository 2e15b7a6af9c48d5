/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * What the parts of the guard share. See README.md for how a call travels.
 */
#ifndef GPUPOOL_GUARD_H
#define GPUPOOL_GUARD_H

#include "cuda_abi.h"
#include "entries_gen.h" /* E_<symbol>, E_COUNT, E_SPARES: made from entries.txt at build */
#include "page.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define HIDDEN __attribute__((visibility("hidden")))
#pragma GCC visibility push(hidden)

/* ---- the real driver (real.c; the table and its indices are generated: entries_gen.h) */

/* The driver's functions by index of the entry, spares included. No pointer is NULL once a call has entered: if
 * the driver lacks an entry, its place has a stub that returns CUDA_ERROR_NOT_FOUND. */
extern void *guard_real[E_COUNT + E_SPARES];

/* REAL(cuMemAlloc_v2)(...): the driver's own. The prototype is that of wrap_cuMemAlloc_v2; wraps.h declares one
 * for every wrapped entry. For an entry that is not wrapped, use CALL(type, name). */
#define REAL(name) ((__typeof__(&wrap_##name))guard_real[E_##name])
#define CALL(type, name) ((type)guard_real[E_##name])

/* The driver's version: 1000 x major + 10 x minor. The largest number if unknown. */
extern unsigned guard_driver_version;

/* Whether the driver has an entry. */
bool guard_has(int entry);

/* The index of the entry that cuGetProcAddress returns for a name; -1: not in entries.txt. */
int guard_find(const char *name, int version, bool per_thread);
const char *guard_name(int entry);
/* The exported function of an entry. */
void *guard_exported(int entry);

/* Load the driver and map the page, once; in the child of a fork() take a new slot. 0, or the error to return.
 * After an error, a later call tries again. */
CUresult guard_settle(void);
extern bool guard_settled; /* stands for no call; its value is 0 */
/* The entry points of each kind call these if the byte of the gate is not zero. 0: go on to the driver. The
 * first function only loads the driver. */
CUresult guard_slow_never(void);
CUresult guard_slow_free(uint32_t entry);
CUresult guard_slow_gate(uint32_t entry);
CUresult guard_slow_refuse(uint32_t entry);
CUresult guard_slow_note(uint32_t entry, const uint64_t *argument); /* or GUARD_NOTED */

/* ---- the gate (gate.c, wait.c) */

/* Enter the driver: loads the real driver, waits while the session has no lease (asks the broker for one), and
 * counts the call among those that a suspend waits for. Returns 0, or the error for the application. The caller
 * must call guard_leave() after 0, and only then. Calls may be nested. */
CUresult guard_enter(void);
void guard_leave(void);
/* The same for a call that frees or destroys, with its arguments. While the session has no slice, the guard
 * notes the call and makes it later (later.c): GUARD_NOTED, and the application gets success. */
CUresult guard_enter_back(uint32_t entry, const uint64_t *argument);
/* The same for a query whether work is done. GUARD_NOTED: the process is suspended, so the work is done.
 * CUDA_ERROR_NOT_READY: the suspend has been under way for more than a second. */
CUresult guard_enter_query(void);
#define GUARD_NOTED ((CUresult)-1)

/* For calls that need no lease (properties): loads the driver and, if this process may be suspended so that the
 * driver would block, waits at the gate like guard_enter. Needs guard_leave afterwards. */
CUresult guard_enter_free(void);

/* Whether the driver would block now, because the session may be suspended. The caller then answers from the
 * cache. */
bool guard_blocked(void);
/* The first is called after a successful cuInit, the second after the first context was made. */
void guard_note_init(void);
void guard_note_context(void);
bool guard_initialised(void); /* this process has called cuInit, and it succeeded */
bool guard_has_context(void);

/* Set the two bytes that the entry points test: bytes of the page, or constants. */
extern const uint8_t *guard_gate, *guard_free_gate;
void guard_gates(const uint8_t *gate, const uint8_t *free_gate);
/* Entry points of launches also test the fourth byte, which is ``contended`` in the page. */
struct gate_word {
    uint8_t gate, unused[3];
};
extern const struct gate_word guard_shut, guard_open;

/* Whether a call may go on: the gate is open, or a pause is over. Records the use if `use`. */
bool gate_lets(bool use);
/* Wait until the gate lets a call through, without counting it. 0, or the error to return. */
CUresult gate_pass(void);
/* Called once, at the first call of a session's process. */
void gate_at_exit(void);
/* Whether the process is ending, so that no call may wait for a lease. */
bool gate_ends(void);
/* Whether this thread is inside a call that a suspend waits for. */
bool gate_inside(void);
/* Whether the lease is gone or about to go; false in a pause. */
bool gate_closed(void);
/* Called before and after a wait for the broker inside a counted call, so that a suspend need not wait for the
 * call. */
void gate_step_out(void);
CUresult gate_step_in(void);
/* Make the entry points check the gate again: a landing has begun or ended. */
void gate_point(void);
/* Called in place of gate_step_in if the call returns an error without entering the driver again. */
void gate_step_back(void);

/* Cache the driver's answers about the devices, to answer while it would block (cached.c). */
void cached_fill(void);
/* The memory of the whole device; false: not known in this lease. */
bool cached_total(size_t *bytes, CUdevice device);

/* ---- the launch window (window.c) */

/* Before a launch: wait for earlier ones if there are too many, while the slice is contended. 0, or the
 * error to return (the gate was closed, and the wait for it ended). */
CUresult window_pass(CUstream stream, bool per_thread);
/* A synchronise has returned: the earlier launches are done, all of them or those of that stream. */
void window_synced(void);
void window_stream_synced(CUstream stream, bool per_thread);

/* ---- cuGetProcAddress (procaddr.c) */
void procaddr_ready(void); /* guard_real is filled */

/* ---- the page (page.c) */

/* NULL in a process without a session: then nothing is limited, gated or counted. */
extern struct page *guard_page;

/* This process's slot, taken at the first call that needs one; NULL if there is no page or no room. The slot is
 * not given back while a thread that has asked for it may write. */
extern struct page_slot *guard_the_slot;
extern __thread bool guard_slot_user;
extern __thread bool guard_first; /* no other thread writes to ``first`` of the slot while this one lives */
void guard_use_slot(void);

static inline struct page_slot *guard_slot(void)
{
    if (__builtin_expect(!guard_slot_user, 0))
        guard_use_slot();
    return __atomic_load_n(&guard_the_slot, __ATOMIC_SEQ_CST);
}

/* The session's ordinal of this process's CUdevice (the two differ if the process does not see all devices).
 * -1: none. */
int guard_ordinal(CUdevice device);
/* The session's ordinal of the current context's device; -1 without a context. */
int guard_current(void);

/* Whether this process sees the slice as the session's device `ordinal`. cuInit binds a process to devices,
 * without a lease. The session may then get other devices before the process has a context. The process must
 * not take memory on its old devices, for which the session has no grant. */
bool guard_sees_slice(int ordinal);
/* While a process has contexts, its devices are those of the slice, even after moves. After the end of its last
 * context it keeps seeing these devices. */
void guard_follow(bool follows);

/* ---- moving to the slice before the first context (landing.c) */

/* Called inside a counted call, with the gate open: make the process see the slice. 0, or the error to return.
 * */
CUresult landing(int ordinal);
/* Called after the attempt to make the context: release the contexts that this thread kept. If the release is
 * only noted, these contexts move with the session until it is made. */
enum landing_kept { KEPT_NONE, KEPT_RELEASED, KEPT_NOTED };
enum landing_kept landing_over(void);
/* The first: whether the broker may suspend this process to move it. The second: wait until the broker has
 * finished. */
bool landing_moves(void);
/* Whether this process is suspended although it has no context; then landing_moves() is also true. */
bool landing_aside(void);
CUresult landing_wait(void);

void guard_pin(uint32_t pins); /* PIN_* */

/* Map the page and take a slot. Never waits for the broker: the caller holds a mutex. */
enum page_state {
    PAGE_READY,
    PAGE_LOST,    /* the broker may give the page its name again, or pass it: ask the broker, and look once more
                   * */
    PAGE_REFUSED, /* the reason is on stderr */
};
enum page_state page_settle(void);
void page_passed(int fd); /* the broker has sent the session's page: keep it for page_settle() */
/* A thread holds this while it changes sums over slots: for a few instructions, without driver calls. */
void page_lock(void);
void page_unlock(void);
/* Free the slots of processes that have ended; the caller holds the lock. Slow, because it reads /proc for each
 * process. */
void page_reap(void);
/* Whether page_reap() may find a slot to free. Sees at once that a process has ended and its parent has reaped
 * it, otherwise up to 10 ms late. */
bool page_deaths(void);

/* ---- calls owed to the driver once the gate is open (gate.c, later.c, current.c) */

enum arrears { ARREARS_CALLS = 1, ARREARS_CONTEXTS = 2 /* for each thread */ };
/* Zero: nothing. Otherwise every entry point takes its slow path. */
extern uint32_t guard_arrears;
void gate_arrears(enum arrears what, bool more);

#define LATER_ARGUMENTS 3
/* Note a call, to be made later with the context that is current now. false: no memory for it. */
bool later_note(uint32_t entry, const uint64_t *argument);
/* Whether the call may be noted: not the end of a context while host memory is registered. */
bool later_may(uint32_t entry);
/* Whether this process has host memory registered with the driver (registered.c). */
bool registered_any(void);
/* Make the noted calls; the caller is counted, and the gate is open. false: some are left, because another
 * thread makes them or the gate was closed. */
bool later_do(void);
/* Wait until no other thread makes noted calls. 0, or the error to return. */
CUresult later_sit_out(void);

/* The calling thread's current context, as the application sees it. */
CUcontext current_context(void);
/* Take over the context that the driver reports, because calls other than cuCtxSetCurrent also change it. */
void current_seen(CUcontext context);
void current_pushed(CUcontext context);
void current_destroyed(CUcontext context);
void current_destroyed_later(CUcontext context);
/* Whether the driver does not know this thread's context yet; set it in the driver. */
bool current_differs(void);
void current_apply(void);

/* ---- NVML (nvml_calls.c) */

/* Called at the first use of CUDA or NVML, and at each later use of NVML: notes whether the session was
 * suspended at the first use, because the driver has then not suspended this process. */
void nvml_calls_began(const struct page *page);
void nvml_calls_thread_ends(void);

/* ---- waiting (wait.c) */

/* From begin to end, the interpreter's other threads can run (if this process has an interpreter and this
 * thread held its lock), an interrupt (SIGINT with a handler) is noticed, and the slot counts a wait. */
struct polite {
    void *thread;
    struct page_slot *slot;
    uint32_t interrupts, forced, naps;
    bool foreign;
};
void polite_begin(struct polite *p);
void polite_end(struct polite *p);
bool polite_interrupted(const struct polite *p);
/* Whether the interpreter of this process, if there is one, is being torn down. */
bool polite_finalizing(void);
/* The first lets the interpreter's other threads run, if this thread holds its lock; the second takes the lock
 * back. */
void *interpreter_release(void);
void interpreter_take(void *thread);
void polite_nap(struct polite *p); /* 1 ms at first, 10 ms after a second */
void nap(int milliseconds);
uint64_t monotonic(void); /* ns */

/* ---- fork(): the handlers of each part, called from init.c */
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
void guard_at_fork(void); /* registers them */

/* ---- bytes (charge.c) */

/* Take `bytes` of the session's grant on `ordinal`; asks the broker for growth if they do not fit.
 * CUDA_ERROR_OUT_OF_MEMORY if refused. Callers do this before the driver's call. */
CUresult guard_charge(int ordinal, uint64_t bytes);
/* Give them back. */
void guard_credit(int ordinal, uint64_t bytes);
/* Bytes of the session on `ordinal`, over all living processes. */
uint64_t guard_used(int ordinal);

/* ---- the broker (broker.c) */

/* Each question has its own connection and waits as in wait.c. 0, or the error to return. */
void broker_remember(void); /* finds the broker's address, before any thread waits */
CUresult broker_attach(void);                            /* returns once the lease is granted */
CUresult broker_grow(int ordinal, uint64_t more);        /* 0: the page has a larger grant now */
enum answer { ANSWER_OK, ANSWER_REFUSED, ANSWER_AGAIN, ANSWER_INTERRUPTED, ANSWER_AWAY };
enum answer broker_page(void); /* OK: the session's page has its name again, or the broker has passed it */
void page_lost(enum answer answer); /* the page is still lost: writes the reason to stderr */
/* One step of a landing: "begin", "move" or "cancel", or "stay" on the present device.
 * CUDA_ERROR_DEVICE_UNAVAILABLE: refused; CUDA_ERROR_NOT_READY: the lease is about to end; check again.
 * ``why``, if it is not NULL, gets the broker's sentence for people, or "". */
#define SENTENCE_BYTES 512
CUresult broker_land(const char *step, char *why);
void broker_home(void); /* the broker may write the devices of the next lease to the page */

/* ---- a broker that has died (revive.c) */

void revive_remember(void);
/* Starts the user's own broker if it has died, one attempt at a time. Returns how many nanoseconds to wait in
 * all while no broker listens; 0: none can be started. */
uint64_t revive(const char *socket);

#pragma GCC visibility pop
#endif
