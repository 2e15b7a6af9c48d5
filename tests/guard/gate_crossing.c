/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * The gate (only gate.c) with a broker on another processor. Again and again the broker closes the
 * gate, reads the count, and suspends if the count is zero. Meanwhile this thread enters and
 * leaves. Each side writes before it reads. If a processor executed a read before the write, a call
 * could run in a suspended process.
 */
#include "guard.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

static struct page page;
struct page *guard_page = &page;
static uint32_t suspended, over, suspends, met;

bool guard_settled = true;
struct page_slot *guard_the_slot = &page.slot[0];
__thread bool guard_slot_user = true, guard_first;

static uint32_t get(const uint32_t *word) { return __atomic_load_n(word, __ATOMIC_SEQ_CST); }

/* Acts as the broker. The real broker uses pwrite() and pread(). Their memory order is at least as
 * strict as the order of the atomic stores and loads in this function. */
static void *broker(void *unused)
{
    while (!get(&over)) {
        __atomic_store_n(&page.gate, GATE_CLOSED, __ATOMIC_SEQ_CST);
        if (get(&page.slot[0].inflight) + get(&page.slot[0].first)) {
            met++;
        } else {
            __atomic_store_n(&suspended, 1, __ATOMIC_SEQ_CST);
            suspends++;
            for (int i = 0; i < 20; i++)
                __builtin_ia32_pause();
            __atomic_store_n(&suspended, 0, __ATOMIC_SEQ_CST);
        }
        __atomic_store_n(&page.gate, GATE_OPEN, __ATOMIC_SEQ_CST);
        for (unsigned i = 0; i < suspends % 64; i++)
            __builtin_ia32_pause();
    }
    return unused;
}

CUresult broker_attach(void)
{
    while (__atomic_load_n(&page.gate, __ATOMIC_SEQ_CST) == GATE_CLOSED)
        __builtin_ia32_pause();
    return CUDA_SUCCESS;
}

/* These functions have nothing to do in this test. */
CUresult guard_settle(void) { return 0; }
bool landing_moves(void) { return false; }
bool landing_aside(void) { return false; }
CUresult landing_wait(void) { return 0; }
void guard_use_slot(void) {}
bool later_note(uint32_t entry, const uint64_t *argument) { return entry && argument && false; }
bool later_do(void) { return true; }
bool later_may(uint32_t entry) { return entry != 0; }
CUresult later_sit_out(void) { return CUDA_SUCCESS; }
bool current_differs(void) { return false; }
void current_apply(void) {}
void own_lock(uint32_t *lock) { *lock = 1; }
void own_unlock(uint32_t *lock) { *lock = 0; }
void polite_begin(struct polite *p) { p->interrupts = 0; }
void polite_end(struct polite *p) { (void)p; }
bool polite_interrupted(const struct polite *p) { return p == NULL; }
bool polite_finalizing(void) { return false; }
void polite_nap(struct polite *p) { (void)p; }
void nap(int milliseconds) { (void)milliseconds; }
void cached_fill(void) {}

/* With any argument, this thread counts its calls in `first`, a word that no other thread uses.
 * Without an argument, it counts its calls in `inflight`, which all threads share. */
int main(int argc, char **argv)
{
    pthread_t thread;
    uint64_t slipped = 0, calls = 0;
    (void)argv;
    guard_first = argc > 1;
    page.gate = GATE_OPEN;
    guard_note_init();
    guard_note_context();
    pthread_create(&thread, NULL, broker, NULL);
    for (uint64_t end = monotonic() + 1000000000u; monotonic() < end;)
        for (int i = 0; i < 1000; i++, calls++) {
            if (guard_enter()) {
                puts("refused");
                return 1;
            }
            for (int looks = 0; looks < 4; looks++)
                slipped += get(&suspended);
            guard_leave();
        }
    __atomic_store_n(&over, 1, __ATOMIC_SEQ_CST);
    pthread_join(thread, NULL);
    bool zero = !page.slot[0].inflight && !page.slot[0].first;
    puts(slipped ? "a call ran in a suspended process" : !zero ? "the count is wrong" : "right");
    fprintf(stderr, "%llu calls, %u suspends, %u met a call\n", (unsigned long long)calls, suspends, met);
    return slipped || !zero;
}
