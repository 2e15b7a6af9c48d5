/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * The gate: what happens when the byte that an entry point tests is not zero, and how the guard
 * counts the calls that a suspend waits for.
 *
 * The broker closes the gate and then waits until the count is zero. A call first counts itself and
 * then reads the gate again. Both write before they read, and the additions are full barriers. So
 * either the broker sees the count, or the call sees the closed gate. When the broker locks the
 * session, no call is inside the driver.
 */
#include "guard.h"
#include "own.h"

#include <stdlib.h>
#include <time.h>

const struct gate_word guard_open = {.gate = GATE_OPEN}, guard_shut = {.gate = GATE_CLOSED};

const uint8_t *guard_gate = &guard_shut.gate, *guard_free_gate = &guard_shut.gate;

/* If a suspend takes longer than this many nanoseconds, the guard assumes that the broker has
 * ended. */
#define LONGEST_SUSPEND 120000000000ull
/* A thread that asks again and again whether its work is done makes a series of queries. During
 * a suspend, a query returns "not ready" if the series began more than PATIENCE nanoseconds ago.
 * If a thread has made no query for ANOTHER_TIME nanoseconds, its next query begins a new
 * series. */
#define PATIENCE 1000000000ull
#define ANOTHER_TIME 10000000000ull

static bool initialised, context, ending;

/* `depth`: how many guarded calls of this thread are nested. `inflight`: the word of the slot that
 * counts the outermost call. `own`: this word is ``first``, and no other thread of the process
 * writes it. So this thread ends the count with a plain store. A locked instruction would take
 * twice the time. */
static __thread struct {
    uint32_t depth;
    bool own;
    uint32_t *inflight;
} inside;

void guard_gates(const uint8_t *gate, const uint8_t *free_gate)
{
    __atomic_store_n(&guard_gate, gate, __ATOMIC_RELEASE);
    __atomic_store_n(&guard_free_gate, free_gate, __ATOMIC_RELEASE);
}

uint64_t monotonic(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

bool gate_lets(bool use)
{
    if (landing_moves())
        return false;
    uint8_t gate = __atomic_load_n(&guard_page->gate, __ATOMIC_SEQ_CST);
    if (gate == GATE_OPEN)
        return true;
    if (gate == GATE_UNUSED) {
        /* If the gate has changed since the load above, the exchange fails and stores the new value
         * in `gate`. The function then returns true only if the new value is GATE_OPEN. */
        if (use)
            __atomic_compare_exchange_n(&guard_page->gate, &gate, GATE_OPEN, false,
                                        __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
        return gate == GATE_UNUSED || gate == GATE_OPEN;
    }
    return gate == GATE_PAUSED &&
           monotonic() >= __atomic_load_n(&guard_page->pause_until, __ATOMIC_RELAXED);
}

/* A pause is short: wait for its end, and do not ask the broker. */
static CUresult sit_out(void)
{
    struct polite p;
    CUresult error = CUDA_SUCCESS;
    polite_begin(&p);
    while (__atomic_load_n(&guard_page->gate, __ATOMIC_SEQ_CST) == GATE_PAUSED && !gate_lets(true))
        if (polite_interrupted(&p)) {
            error = CUDA_ERROR_SYSTEM_NOT_READY;
            break;
        } else {
            polite_nap(&p);
        }
    polite_end(&p);
    return error;
}

CUresult gate_pass(void)
{
    while (!gate_lets(true)) {
        /* Before cuInit no call reaches a device: the driver answers with an error. */
        if (!__atomic_load_n(&initialised, __ATOMIC_ACQUIRE))
            return CUDA_SUCCESS;
        /* A process that ends does not wait for a lease, because its end frees everything.
         * Frameworks can handle this error: the driver itself returns it if it is unloaded at exit
         * before the framework. */
        if (gate_ends())
            return CUDA_ERROR_DEINITIALIZED;
        /* If an admin's pause has suspended the process, ask for the slice, so that the broker
         * restores the process. */
        CUresult error = landing_aside()   ? broker_attach()
                         : landing_moves() ? landing_wait()
                         : __atomic_load_n(&guard_page->gate, __ATOMIC_SEQ_CST) == GATE_PAUSED
                             ? sit_out()
                             : broker_attach();
        if (error)
            return error;
    }
    return CUDA_SUCCESS;
}

/* Exit handlers run in reverse order of registration. The guard registers this handler at the first
 * call. So it runs before all handlers that were registered earlier, such as those of cudart and
 * the destructors of objects. */
static void end(void)
{
    __atomic_store_n(&ending, true, __ATOMIC_RELEASE);
}

void gate_at_exit(void)
{
    atexit(end);
}

bool gate_ends(void)
{
    return __atomic_load_n(&ending, __ATOMIC_ACQUIRE) || polite_finalizing();
}

bool gate_inside(void)
{
    return inside.depth > 0;
}

/* ---- calls of the driver that the process must still make: noted calls, and changes of the
 * current context */

uint32_t guard_arrears;
static uint32_t arrears_lock;

/* Choose the two bytes that the entry points test. While the process must still make such calls, or
 * moves to another device, both bytes are GATE_CLOSED. All entry points then take the slow path,
 * even if the gate is open. Otherwise they test the gate. But if the process has no context, the
 * entry points of calls that need no lease test the first byte of `landing`. This byte is not zero
 * if the broker has suspended the process. If the byte is zero, these entry points call the
 * driver. */
static void point(void)
{
    struct page_slot *slot = guard_slot();
    bool shut = __atomic_load_n(&guard_arrears, __ATOMIC_SEQ_CST) != 0 ||
                (landing_moves() && !landing_aside());
    const uint8_t *gate = shut ? &guard_shut.gate : guard_page ? &guard_page->gate : &guard_open.gate;
    bool blocks = __atomic_load_n(&context, __ATOMIC_ACQUIRE);
    guard_gates(gate, shut || blocks ? gate : slot ? (const uint8_t *)&slot->landing : &guard_open.gate);
}

void gate_point(void)
{
    own_lock(&arrears_lock);
    point();
    own_unlock(&arrears_lock);
}

void gate_arrears(enum arrears what, bool more)
{
    own_lock(&arrears_lock);
    uint32_t now = guard_arrears;
    if (what == ARREARS_CALLS)
        now = more ? now | ARREARS_CALLS : now & ~(uint32_t)ARREARS_CALLS;
    else
        now += more ? ARREARS_CONTEXTS : -(uint32_t)ARREARS_CONTEXTS;
    __atomic_store_n(&guard_arrears, now, __ATOMIC_SEQ_CST);
    point();
    own_unlock(&arrears_lock);
}

static bool owing(void)
{
    return __builtin_expect(__atomic_load_n(&guard_arrears, __ATOMIC_ACQUIRE) != 0, 0);
}

static bool owing_calls(void)
{
    return __atomic_load_n(&guard_arrears, __ATOMIC_ACQUIRE) & ARREARS_CALLS;
}

bool gate_closed(void)
{
    return landing_moves() || __atomic_load_n(&guard_page->gate, __ATOMIC_SEQ_CST) == GATE_CLOSED;
}

/* Whether the work of all processes is done: the gate is closed and the lease is gone. The broker
 * removes the lease when all processes of the session are suspended, and the driver suspends a
 * process only after its work is done. */
static bool drained(void)
{
    return !page_has_lease(guard_page) && gate_closed();
}

/* ---- for C functions and counted calls */

enum purpose {
    LOOK_UP, /* needs no lease */
    USE,     /* waits for the lease, and for the noted calls of all threads */
    QUERY,   /* asks whether work is done; waits for the noted calls, because one of them may record
              * the event that the program asks about */
    BACK,    /* frees or destroys */
};

static bool starts(CUresult *error)
{
    *error = CUDA_SUCCESS;
    if (inside.depth) {
        inside.depth++;
        return false;
    }
    if (__builtin_expect(!__atomic_load_n(&guard_settled, __ATOMIC_ACQUIRE), 0) && (*error = guard_settle()))
        return false;
    inside.depth = 1;
    inside.inflight = NULL;
    return guard_page != NULL;
}

/* Count the call, and return whether it may go on. If the gate lets the call pass, first apply this
 * thread's own changes of the current context. Then make the noted calls of all threads, except for
 * LOOK_UP. If the call must wait, remove it from the count. */
static bool in(enum purpose purpose, bool gated)
{
    struct page_slot *slot = guard_slot();
    uint32_t *inflight = guard_first ? &slot->first : &slot->inflight;
    /* The exchange and the addition are full barriers, because the gate must be loaded after the
     * call is counted. */
    if (guard_first)
        __atomic_exchange_n(inflight, 1, __ATOMIC_SEQ_CST);
    else
        __atomic_add_fetch(inflight, 1, __ATOMIC_SEQ_CST);
    inside.own = guard_first;
    inside.depth = 1;
    inside.inflight = inflight;
    /* The usual case: the gate is open, and the process has no other calls to make. The code below
     * would return the same. */
    if (__builtin_expect(__atomic_load_n(&guard_page->gate, __ATOMIC_SEQ_CST) == GATE_OPEN &&
                             __atomic_load_n(&slot->landing, __ATOMIC_SEQ_CST) < LANDING_MOVES && !owing(),
                         1))
        return true;
    /* Frees and queries may also run during a pause, when a neighbour has its turn. */
    bool lets = purpose >= QUERY ? gate_lets(true) || !gate_closed() : gate_lets(purpose == USE);
    if ((!gated && !landing_aside()) || lets || !__atomic_load_n(&initialised, __ATOMIC_ACQUIRE)) {
        if (!owing())
            return true;
        if (lets)
            current_apply();
        if (!lets || purpose == LOOK_UP || !owing_calls() || later_do())
            return true;
    }
    __atomic_sub_fetch(inflight, 1, __ATOMIC_SEQ_CST);
    inside.inflight = NULL;
    inside.depth = 0;
    return false;
}

static CUresult enter(bool gated, bool use)
{
    CUresult error;
    if (!starts(&error))
        return error;
    while (!in(use ? USE : LOOK_UP, gated)) {
        error = gate_pass();
        if (!error && owing())
            error = later_sit_out();
        if (error)
            return error;
    }
    return CUDA_SUCCESS;
}

CUresult guard_enter(void)
{
    return enter(true, true);
}

CUresult guard_enter_entry(uint32_t entry)
{
    (void)entry;
    return enter(true, true);
}

CUresult guard_enter_free(void)
{
    return enter(guard_has_context(), false);
}

CUresult guard_enter_back(uint32_t entry, const uint64_t *argument)
{
    CUresult error;
    if (!starts(&error))
        return error;
    /* The driver cannot suspend a process without a context. In such a process the guard calls the
     * driver, which returns its error. */
    while (!in(BACK, guard_has_context())) {
        if (later_may(entry) && later_note(entry, argument)) {
            /* If the gate is open again, make the noted call now, because the program's next call
             * may come much later. */
            if (!gate_closed() && in(BACK, true))
                guard_leave();
            return GUARD_NOTED;
        }
        error = gate_pass();
        if (error)
            return error;
    }
    return CUDA_SUCCESS;
}

/* `since`: when this thread's present series of unanswered queries began; 0: there is no series.
 * `last`: when the thread made its last query. */
static __thread struct {
    uint64_t since, last;
} unanswered;

CUresult guard_enter_query(void)
{
    CUresult error;
    bool waited = false;
    if (!starts(&error))
        return error;
    while (!in(QUERY, guard_has_context())) {
        if (drained()) {
            unanswered.since = 0;
            return GUARD_NOTED;
        }
        if (__atomic_load_n(&ending, __ATOMIC_ACQUIRE))
            return CUDA_ERROR_DEINITIALIZED;
        /* The broker is suspending the process, or another thread makes the noted calls. The caller
         * may hold the interpreter's lock and a lock of its library. If this wait released the
         * interpreter's lock, another thread could take it and wait for the library's lock, and
         * neither thread could continue. So this wait is short, and releases no lock. */
        uint64_t now = monotonic();
        if (!unanswered.since || now - unanswered.last > ANOTHER_TIME)
            unanswered.since = now;
        unanswered.last = now;
        if (now - unanswered.since > LONGEST_SUSPEND) {
            if ((error = gate_pass()) || (error = later_sit_out()))
                return error;
        } else if (now - unanswered.since > PATIENCE && waited) {
            return CUDA_ERROR_NOT_READY; /* the guard cannot know now whether the work is done */
        }
        nap(1);
        waited = true;
    }
    if (__builtin_expect(unanswered.since != 0, 0))
        unanswered.since = 0;
    return CUDA_SUCCESS;
}

/* ---- functions that the entry points call */

/* Called before the driver gets an uncounted call: apply this thread's own changes of the current
 * context. With `use`, also make the noted calls of all threads. */
static CUresult pay(bool use)
{
    if (!current_differs() && !(use && owing_calls()))
        return CUDA_SUCCESS;
    CUresult error = enter(true, use);
    if (!error)
        guard_leave();
    return error;
}

CUresult guard_slow_gate(uint32_t entry)
{
    (void)entry;
    CUresult error = guard_settle();
    if (error || !guard_page || inside.depth)
        return error;
    error = gate_pass();
    return error ? error : pay(true);
}

CUresult guard_slow_free(uint32_t entry)
{
    (void)entry;
    CUresult error = guard_settle();
    if (error || !guard_page || inside.depth)
        return error;
    if (guard_blocked())
        error = gate_pass();
    return error ? error : pay(false);
}

CUresult guard_slow_note(uint32_t entry, const uint64_t *argument)
{
    CUresult error = guard_settle();
    if (error || !guard_page || inside.depth)
        return error;
    if (guard_has_context() && gate_closed() && later_note(entry, argument))
        return GUARD_NOTED;
    return guard_slow_gate(entry);
}

CUresult guard_slow_refuse(uint32_t entry)
{
    CUresult error = guard_slow_gate(entry);
    if (error)
        return error;
    return guard_page && guard_initialised() ? CUDA_ERROR_NOT_SUPPORTED : CUDA_SUCCESS;
}

void guard_leave(void)
{
    /* The depth is zero only in the child of a fork() during the call: gate_fork() has set it to
     * zero. */
    if (!inside.depth || --inside.depth || !inside.inflight)
        return;
    if (inside.own)
        __atomic_store_n(inside.inflight, 0, __ATOMIC_RELEASE);
    else
        __atomic_sub_fetch(inside.inflight, 1, __ATOMIC_SEQ_CST);
    inside.inflight = NULL;
}

void gate_step_out(void)
{
    if (inside.inflight)
        __atomic_sub_fetch(inside.inflight, 1, __ATOMIC_SEQ_CST);
}

CUresult gate_step_in(void)
{
    if (!inside.inflight)
        return CUDA_SUCCESS;
    for (;;) {
        __atomic_add_fetch(inside.inflight, 1, __ATOMIC_SEQ_CST);
        if (gate_lets(true) || !guard_initialised())
            return CUDA_SUCCESS;
        __atomic_sub_fetch(inside.inflight, 1, __ATOMIC_SEQ_CST);
        CUresult error = gate_pass();
        if (error) {
            /* Count the call again, because the caller will call guard_leave(), as after any
             * other error. */
            __atomic_add_fetch(inside.inflight, 1, __ATOMIC_SEQ_CST);
            return error;
        }
    }
}

void gate_step_back(void)
{
    if (inside.inflight)
        __atomic_add_fetch(inside.inflight, 1, __ATOMIC_SEQ_CST);
}

/* ---- after the first calls */

bool guard_initialised(void)
{
    return __atomic_load_n(&initialised, __ATOMIC_ACQUIRE);
}

bool guard_has_context(void)
{
    return __atomic_load_n(&context, __ATOMIC_ACQUIRE);
}

bool guard_blocked(void)
{
    return guard_page && (guard_has_context() || landing_aside()) && !gate_lets(false);
}

void guard_note_init(void)
{
    struct page_slot *slot = guard_slot();
    if (slot)
        __atomic_or_fetch(&slot->flags, SLOT_CUDA, __ATOMIC_RELEASE);
    if (guard_initialised())
        return;
    cached_fill(); /* an admin's pause may suspend this process, and the guard then answers its
                    * queries from the cache */
    __atomic_store_n(&initialised, true, __ATOMIC_RELEASE);
    gate_point();
}

void guard_note_context(void)
{
    struct page_slot *slot = guard_slot();
    if (!slot || guard_has_context())
        return;
    __atomic_or_fetch(&slot->flags, SLOT_CONTEXT, __ATOMIC_RELEASE);
    cached_fill();
    __atomic_store_n(&context, true, __ATOMIC_RELEASE);
    /* From now on the driver may block in any call while the process is suspended, even if the call
     * needs no lease. */
    gate_point();
}

void gate_fork(enum fork_when when)
{
    if (when != FORK_CHILD)
        return;
    initialised = context = false;
    inside.depth = 0;
    inside.inflight = NULL;
    guard_arrears = arrears_lock = 0;
    if (__atomic_load_n(&guard_gate, __ATOMIC_RELAXED) != &guard_open.gate || guard_page)
        guard_gates(&guard_shut.gate, &guard_shut.gate);
}
