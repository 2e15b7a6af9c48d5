/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * The table of everything that this process holds on the device. It uses open addressing in
 * stripes. Each stripe has its own lock and its own pages, so that threads that allocate do not
 * wait for one another.
 */
#include "own.h"
#include "table.h"

#include <linux/futex.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define STRIPES 64
#define FIRST_ROOM 64 /* number of entries of a new stripe; a power of two */

struct stripe {
    uint32_t lock;
    uint32_t used;
    uint64_t room;
    struct own *entry;
    uint8_t apart[40]; /* each stripe has its own cache line */
};

struct table {
    struct stripe stripe[STRIPES];
    uint8_t seen[16];
};

_Static_assert(sizeof(struct stripe) == 64, "each stripe must have its own cache line");

/* ---- memory and locks */

void *own_map(size_t size)
{
    void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return NULL;
    /* MADV_WIPEONFORK needs Linux 4.14. On an older kernel, a child of fork() sees its parent's
     * entries, and its attempts to free them fail. */
    madvise(p, size, MADV_WIPEONFORK);
    return p;
}

void *own_block(void **where, size_t size)
{
    void *found = __atomic_load_n(where, __ATOMIC_ACQUIRE);
    if (found)
        return found;
    void *made = own_map(size);
    if (!made)
        return NULL;
    if (__atomic_compare_exchange_n(where, &found, made, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
        return made;
    munmap(made, size);
    return found;
}

void own_lock(uint32_t *lock)
{
    uint32_t seen = 0;
    if (__atomic_compare_exchange_n(lock, &seen, 1, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
        return;
    for (int i = 0; i < 100; i++) {
        seen = 0;
        if (__atomic_compare_exchange_n(lock, &seen, 1, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
            return;
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }
    while (__atomic_exchange_n(lock, 2, __ATOMIC_ACQUIRE))
        syscall(SYS_futex, lock, FUTEX_WAIT_PRIVATE, 2, NULL, NULL, 0);
}

void own_unlock(uint32_t *lock)
{
    if (__atomic_exchange_n(lock, 0, __ATOMIC_RELEASE) == 2)
        syscall(SYS_futex, lock, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

/* ---- the table */

static void *the_table;

static struct table *table(void) { return own_block(&the_table, sizeof(struct table)); }

/* Mix all bits of the key, because its low bits are always zero: addresses are multiples of 512,
 * and handles are multiples of 16. */
static uint64_t hash(uint16_t kind, uint64_t key)
{
    uint64_t h = (key ^ ((uint64_t)kind << 56)) * 0x9e3779b97f4a7c15ull;
    return h ^ h >> 29;
}

static struct stripe *stripe_of(struct table *t, uint64_t h) { return &t->stripe[h >> 58]; }

/* The place of the entry, or a free place if the table does not have it. The caller holds the
 * lock. */
static struct own *place(const struct stripe *s, uint64_t h, uint16_t kind, uint64_t key)
{
    uint64_t i = h & (s->room - 1);
    while (s->entry[i].kind && (s->entry[i].key != key || s->entry[i].kind != kind))
        i = (i + 1) & (s->room - 1);
    return &s->entry[i];
}

static bool grow(struct stripe *s)
{
    uint64_t room = s->room ? s->room * 2 : FIRST_ROOM;
    struct own *old = s->entry, *entry = own_map(room * sizeof *entry);
    uint64_t before = s->room;
    if (!entry)
        return false;
    s->entry = entry;
    s->room = room;
    for (uint64_t i = 0; i < before; i++)
        if (old[i].kind)
            *place(s, hash(old[i].kind, old[i].key), old[i].kind, old[i].key) = old[i];
    if (old)
        munmap(old, before * sizeof *old);
    return true;
}

/* Remove the entry, and move later entries into the gap. So a search may end at the first free
 * place. */
static void drop(struct stripe *s, struct own *gap)
{
    uint64_t mask = s->room - 1, hole = (uint64_t)(gap - s->entry), i = hole;
    for (;;) {
        i = (i + 1) & mask;
        if (!s->entry[i].kind)
            break;
        uint64_t home = hash(s->entry[i].kind, s->entry[i].key) & mask;
        if (((i - home) & mask) >= ((i - hole) & mask)) {
            s->entry[hole] = s->entry[i];
            hole = i;
        }
    }
    s->entry[hole].kind = 0;
    s->used--;
}

bool table_put(const struct own *own, struct own *stale)
{
    struct table *t = table();
    stale->kind = 0;
    if (!t)
        return false;
    uint64_t h = hash(own->kind, own->key);
    struct stripe *s = stripe_of(t, h);
    bool fits = true;
    own_lock(&s->lock);
    if (s->used * 4ull >= s->room * 3)
        fits = grow(s) || s->used + 1ull < s->room;
    if (fits) {
        struct own *at = place(s, h, own->kind, own->key);
        s->used += !at->kind;
        *stale = *at;
        *at = *own;
    }
    own_unlock(&s->lock);
    if (fits && !__atomic_load_n(&t->seen[own->kind], __ATOMIC_RELAXED))
        __atomic_store_n(&t->seen[own->kind], 1, __ATOMIC_RELAXED);
    return fits;
}

static bool find(uint16_t kind, uint64_t key, struct own *own, bool take)
{
    struct table *t = table();
    if (!t || !key)
        return false;
    uint64_t h = hash(kind, key);
    struct stripe *s = stripe_of(t, h);
    bool found = false;
    own_lock(&s->lock);
    if (s->room) {
        struct own *at = place(s, h, kind, key);
        found = at->kind != 0;
        if (found) {
            *own = *at;
            if (take)
                drop(s, at);
        }
    }
    own_unlock(&s->lock);
    return found;
}

bool table_take(uint16_t kind, uint64_t key, struct own *own) { return find(kind, key, own, true); }

bool table_get(uint16_t kind, uint64_t key, struct own *own) { return find(kind, key, own, false); }

bool table_seen(uint16_t kind)
{
    struct table *t = table();
    return t && __atomic_load_n(&t->seen[kind], __ATOMIC_RELAXED);
}

void table_sweep(bool (*match)(const struct own *own, void *with),
                 void (*done)(const struct own *own, void *with), void *with)
{
    struct table *t = table();
    for (int i = 0; t && i < STRIPES; i++) {
        struct stripe *s = &t->stripe[i];
        own_lock(&s->lock);
        for (uint64_t at = 0; at < s->room;) {
            if (!s->entry[at].kind || !match(&s->entry[at], with)) {
                at++;
                continue;
            }
            struct own own = s->entry[at];
            drop(s, &s->entry[at]); /* drop() may have moved another entry to this place: check the
                                     * place again */
            own_unlock(&s->lock);
            done(&own, with);
            own_lock(&s->lock);
        }
        own_unlock(&s->lock);
    }
}
