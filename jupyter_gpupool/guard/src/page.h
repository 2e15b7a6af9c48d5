/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * The session's shared page: what the broker and the processes of a session exchange without
 * messages. Every process of the session maps the file. The broker uses pread and pwrite, so a
 * session that truncates the page harms only itself. ``page.py`` has the same layout; a test
 * compares the two.
 *
 * Who writes what: the broker writes the header, except for the words marked "guard". The broker
 * and the guard write the word marked "broker and guard". Each process writes its own slot. While
 * a process is suspended or its calls wait, the broker writes ``sees`` and ``landing`` of its slot.
 * The page has separate byte counts for each device of the session, in the order in which its
 * processes see the devices (CUDA ordinals).
 */
#ifndef GPUPOOL_GUARD_PAGE_H
#define GPUPOOL_GUARD_PAGE_H

#include <stdbool.h>
#include <stdint.h>

#define PAGE_MAGIC 0x47505047u /* "GPPG" */
#define PAGE_VERSION 3u
#define PAGE_DEVICES 8
#define PAGE_SLOTS 256
#define PAGE_UUID 48

/* The gate. If the value is zero, a call may pass at once. Otherwise the call must make more
 * checks. */
enum page_gate {
    GATE_OPEN = 0,   /* open, and used since the broker's last check */
    GATE_UNUSED = 1, /* open, and not used since the broker's last check. The first call that uses
                      * the slice changes the value to GATE_OPEN */
    GATE_CLOSED = 2, /* no lease: ask the broker for one and wait */
    GATE_PAUSED = 3, /* a neighbour has its turn: wait at most until pause_until, and do not ask the
                      * broker */
};

enum page_managed { MANAGED_REFUSE = 0, MANAGED_ALLOW = 1 };

/* The reasons why the session cannot be suspended, as bits of a slot's ``pins``. The guard sets a
 * bit, and the bit stays set while the process lives. */
enum page_pins {
    PIN_MANAGED = 1,  /* managed memory */
    PIN_IPC = 2,      /* an exported or imported allocation, event or pool */
    PIN_GRAPHICS = 4, /* a resource shared with a graphics API */
    PIN_MULTICAST = 8,
};

enum slot_state { SLOT_FREE = 0, SLOT_LIVE = 1 };

enum slot_flags {
    SLOT_CUDA = 1,    /* the process has called cuInit: its visible devices are fixed */
    SLOT_CONTEXT = 2, /* the process has had a context: the driver can suspend it */
};

/* ``sees[i]`` of a slot says which device the process sees as the session's device i. It is
 * page_name() of this device, or one of these two values. */
#define SEES_NONE 0ull   /* the process has not called cuInit, or does not see this device */
#define SEES_SLICE 1ull  /* the device of the slice, even after a move: the process has contexts and
                          * moves with the session */

/* ``landing`` of a slot: how far the process has moved from the devices that it saw at cuInit to
 * the devices of the slice (landing.c). During the move, none of its calls reaches the driver.
 * "(guard)" or "(broker)" after a value says which of the two writes the value. */
enum slot_landing {
    LANDING_NONE = 0,    /* no landing, or the landing has ended */
    LANDING_BEGUN = 1,   /* the process may have contexts on devices where the session has no
                          * slice */
    LANDING_MOVES = 2,   /* the broker may suspend the process (guard) */
    LANDING_RESTORE = 3, /* the driver has suspended the process and restores it on the slice
                          * (broker) */
    LANDING_ASIDE = 4,   /* the process has no context, but an admin's pause has suspended it
                          * (broker) */
};

struct page_slot {
    uint32_t state;
    uint32_t pid;
    uint64_t start_time; /* field 22 of /proc/<pid>/stat; together with the pid it identifies the
                          * process */
    uint32_t inflight;   /* number of calls inside the driver, without the call that ``first``
                          * counts. A suspend waits for them */
    uint32_t waiting;    /* threads that wait at the gate */
    uint32_t flags;
    uint32_t pins;
    uint64_t used[PAGE_DEVICES];    /* counted bytes, including the bytes of contexts */
    uint64_t context[PAGE_DEVICES]; /* the part of these bytes that was charged for contexts */
    uint32_t captures;              /* streams that record a graph: a suspend must not interrupt a
                                     * recording */
    uint32_t first;                 /* only one thread of the process uses this word. 1: this thread
                                     * has a call inside the driver */
    uint64_t sees[PAGE_DEVICES];
    uint64_t landing;
    uint32_t nvml; /* NVML calls of the process's main thread: a suspend waits for them, but they do
                    * not count as use */
    uint32_t held; /* 1: a library's thread, unknown to the interpreter, still waits after an
                    * interrupt */
    uint64_t unused;
};

struct page {
    uint32_t magic;
    uint32_t version;
    uint8_t gate;      /* broker and guard: enum page_gate. The guard only changes GATE_UNUSED to
                        * GATE_OPEN */
    uint8_t managed;
    uint8_t unused;
    uint8_t contended; /* 1: another session waits for memory of this session (window.c) */
    uint32_t devices; /* number of devices */
    uint64_t epoch;
    uint64_t pause_until;           /* CLOCK_MONOTONIC, ns; after this time a paused gate counts as
                                     * open */
    uint64_t limit;                 /* the size in bytes to which the grant on each device may
                                     * grow */
    uint64_t context_bytes;         /* bytes charged for the first context of a process on a device */
    uint64_t lock;                  /* guard: the process that may change slots now: pid |
                                     * start_time << 32; 0: free */
    uint64_t slots_used;            /* guard: 1 + the highest index of a slot that has ever had
                                     * bytes */
    uint64_t granted[PAGE_DEVICES]; /* bytes of the lease; 0 without a lease */
    char uuid[PAGE_DEVICES][PAGE_UUID]; /* devices of the lease; before the first lease the home
                                         * devices */
    char session[64];
    /* The number of bytes by which the grant could grow now, plus 1; 0: unknown. */
    uint64_t room[PAGE_DEVICES];
    /* The smallest size of the grant that the broker has refused, in bytes. A process does not ask
     * for this size or more. 0: the broker has refused nothing, so ask it. The broker sets the word
     * to 0 before it acts on any change. After vain_until the word is no longer valid. */
    uint64_t vain[PAGE_DEVICES];
    uint64_t vain_until; /* CLOCK_MONOTONIC, ns */
    uint8_t unused_too[4096 - 72 - 24 * PAGE_DEVICES - PAGE_DEVICES * PAGE_UUID - 64];
    struct page_slot slot[PAGE_SLOTS];
};

/* Whether the driver has suspended the session's processes or is about to suspend them: the gate is
 * closed, and a process has had a context or an admin's pause has suspended it. The driver then
 * also suspends processes that have called only cuInit or NVML. If a session has never had a slice,
 * none of its processes has a context. */
static inline bool page_suspends(const struct page *page)
{
    if (__atomic_load_n(&page->gate, __ATOMIC_SEQ_CST) != GATE_CLOSED)
        return false;
    for (int i = 0; i < PAGE_SLOTS; i++) {
        const struct page_slot *s = &page->slot[i];
        if (__atomic_load_n(&s->state, __ATOMIC_ACQUIRE) == SLOT_LIVE &&
            (__atomic_load_n(&s->flags, __ATOMIC_ACQUIRE) & SLOT_CONTEXT ||
             __atomic_load_n(&s->landing, __ATOMIC_SEQ_CST) == LANDING_ASIDE))
            return true;
    }
    return false;
}

/* Whether the session has a lease: memory on any device. */
static inline bool page_has_lease(const struct page *page)
{
    for (int i = 0; i < PAGE_DEVICES; i++)
        if (__atomic_load_n(&page->granted[i], __ATOMIC_SEQ_CST))
            return true;
    return false;
}

/* A number for a device's UUID (FNV-1a). It never equals SEES_NONE or SEES_SLICE. */
static inline uint64_t page_name(const char *uuid)
{
    uint64_t name = 0xcbf29ce484222325u;
    for (int i = 0; i < PAGE_UUID && uuid[i]; i++)
        name = (name ^ (uint8_t)uuid[i]) * 0x100000001b3u;
    return name > SEES_SLICE ? name : ~name;
}

_Static_assert(sizeof(struct page_slot) == 256, "the layout that page.py has");
_Static_assert(__builtin_offsetof(struct page, contended) == __builtin_offsetof(struct page, gate) + 3,
               "the word that the entry points of launches test");
_Static_assert(__builtin_offsetof(struct page, granted) == 64, "the layout that page.py has");
_Static_assert(__builtin_offsetof(struct page, slot) == 4096, "the layout that page.py has");

#endif
