/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * The session's shared page: what the broker and the processes of a session tell each other without a
 * message. Every process of the session maps the file. The broker uses pread and pwrite, so a session
 * that truncates the page harms only itself.
 * ``page.py`` has the same layout; a test compares the two.
 *
 * Who writes what: the header belongs to the broker, except for the words marked "guard"; a slot
 * belongs to its process, except that the broker writes ``sees`` and ``landing`` while it has the
 * process suspended or its calls held back. Bytes are counted for each device of the session, in the order in which
 * its processes see the devices (CUDA ordinals).
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

/* The gate. Zero is the only value that lets a call through without a second look. */
enum page_gate {
    GATE_OPEN = 0,   /* open, and used since the broker's last check */
    GATE_UNUSED = 1, /* open, not used since: the first call changes it to GATE_OPEN (guard) */
    GATE_CLOSED = 2, /* no lease: ask the broker for one and wait */
    GATE_PAUSED = 3, /* a neighbour's turn: wait until pause_until at most, without a question */
};

enum page_managed { MANAGED_REFUSE = 0, MANAGED_ALLOW = 1 };

/* Why the session cannot be suspended; set by the guard, never cleared while a process lives. */
enum page_pins {
    PIN_MANAGED = 1,  /* managed memory */
    PIN_IPC = 2,      /* an exported or imported allocation, event or pool */
    PIN_GRAPHICS = 4, /* a resource shared with a graphics API */
    PIN_MULTICAST = 8,
};

enum slot_state { SLOT_FREE = 0, SLOT_LIVE = 1 };

enum slot_flags {
    SLOT_CUDA = 1,    /* the process has called cuInit: its visible devices are settled */
    SLOT_CONTEXT = 2, /* the process has had a context: the driver can suspend it */
};

/* ``sees`` of a slot: page_name() of the device that the process sees as the session's device i, or one of
 * these. */
#define SEES_NONE 0ull   /* it has not called cuInit, or does not see this device */
#define SEES_SLICE 1ull  /* the slice, wherever it is: it has state, which moves with the session */

/* ``landing`` of a slot: the progress of the process on its way from the devices at cuInit to those of the
 * slice (landing.c). While it moves, none of its calls reaches the driver. */
enum slot_landing {
    LANDING_NONE = 0,    /* no landing, or it has ended (broker) */
    LANDING_BEGUN = 1,   /* it may have contexts on devices without a slice */
    LANDING_MOVES = 2,   /* the broker may suspend it (guard) */
    LANDING_RESTORE = 3, /* the driver has suspended it and restores it on the slice (broker) */
    LANDING_ASIDE = 4,   /* it has no context but is suspended: an admin's pause (broker) */
};

struct page_slot {
    uint32_t state;
    uint32_t pid;
    uint64_t start_time; /* field 22 of /proc/<pid>/stat: with the pid, its identity */
    uint32_t inflight;   /* calls inside the driver that must return before a suspend; also see ``first`` */
    uint32_t waiting;    /* threads that wait at the gate */
    uint32_t flags;
    uint32_t pins;
    uint64_t used[PAGE_DEVICES];    /* counted bytes, with contexts */
    uint64_t context[PAGE_DEVICES]; /* the part of the used bytes that contexts are charged */
    uint32_t captures;              /* streams that record a graph: a suspend must not fall inside */
    uint32_t first;                 /* 1: the process's first thread is also inside a call */
    uint64_t sees[PAGE_DEVICES];
    uint64_t landing;
    uint32_t nvml; /* NVML calls of the process's main thread: a suspend waits for them, but they do not count
                    * as use */
    uint32_t held; /* 1: an interrupt has not ended the wait of a thread that the interpreter does not know */
    uint64_t unused;
};

struct page {
    uint32_t magic;
    uint32_t version;
    uint8_t gate;
    uint8_t managed;
    uint8_t unused;
    uint8_t contended; /* 1: another session waits for memory that this one holds (window.c) */
    uint32_t devices; /* how many */
    uint64_t epoch;
    uint64_t pause_until;           /* CLOCK_MONOTONIC, ns; later a paused gate counts as open */
    uint64_t limit;                 /* bytes per device up to which the grant may grow */
    uint64_t context_bytes;         /* bytes charged for the first context of a process on a device */
    uint64_t lock;                  /* guard: the process that changes slots: pid | start_time << 32; 0: free */
    uint64_t slots_used;            /* guard: one more than the highest slot that has had bytes; only grows */
    uint64_t granted[PAGE_DEVICES]; /* bytes of the lease; 0 without a lease */
    char uuid[PAGE_DEVICES][PAGE_UUID]; /* the devices of the lease, or the home devices before the first lease
                                         * */
    char session[64];
    /* Bytes by which the grant could grow now, plus 1; 0: not known. */
    uint64_t room[PAGE_DEVICES];
    /* The broker refused growth to this many bytes in all, and nothing has changed since. 0: ask the broker.
     * The broker clears the word before it acts on any change, and the word expires at vain_until. */
    uint64_t vain[PAGE_DEVICES];
    uint64_t vain_until; /* CLOCK_MONOTONIC, ns */
    uint8_t unused_too[4096 - 72 - 24 * PAGE_DEVICES - PAGE_DEVICES * PAGE_UUID - 64];
    struct page_slot slot[PAGE_SLOTS];
};

/* Whether the driver has suspended the session's processes or is about to: the gate is closed, and a process
 * has had a context. The driver then also suspends processes that have called only cuInit or NVML. In a session
 * that has never had a slice no process has a context. */
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

/* A number for a device's UUID (FNV-1a), none of those above. */
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
