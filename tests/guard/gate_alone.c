/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * The gate with a broker that may close it between any two instructions. The test executes a call
 * step by step, and closes the gate after a given number of steps. From then on the broker reads
 * the count after each step. When no call is inside, the broker suspends the session, and then no
 * call may enter.
 */
#include "guard.h"

#include <signal.h>
#include <stdio.h>

static struct page page;
struct page *guard_page = &page;
static volatile bool closing, suspended;
static volatile int steps, strike_at;
static int asked, made, failures;
static uint8_t strike_with;
static CUresult answer;

#define CHECK(condition)                                           \
    do {                                                           \
        if (!(condition) && failures++ < 10) {                     \
            printf("%s:%d: %s\n", __FILE__, __LINE__, #condition); \
        }                                                          \
    } while (0)

static uint32_t counted(void)
{
    return page.slot[0].inflight + page.slot[0].first;
}

bool guard_settled = true;

CUresult guard_settle(void)
{
    return 0;
}

bool landing_moves(void)
{
    return false;
}

bool landing_aside(void)
{
    return false;
}

CUresult landing_wait(void)
{
    return 0;
}

struct page_slot *guard_the_slot = &page.slot[0];
__thread bool guard_slot_user = true, guard_first;

void guard_use_slot(void)
{
}

static void step(int number)
{
    (void)number;
    if (steps++ == strike_at) {
        page.pause_until = UINT64_MAX;
        page.gate = strike_with;
        closing = true;
    }
    if (closing && !counted())
        suspended = true;
}

/* From here to stop(), the processor traps after each instruction. */
static inline void start(int strike)
{
    steps = 0;
    strike_at = strike;
    __asm__ volatile("lea -128(%%rsp), %%rsp; pushfq; orq $0x100, (%%rsp); popfq\n"
                     "lea 128(%%rsp), %%rsp" ::: "memory", "cc");
}

static inline void stop(void)
{
    __asm__ volatile("lea -128(%%rsp), %%rsp; pushfq; andq $~0x100, (%%rsp); popfq\n"
                     "lea 128(%%rsp), %%rsp" ::: "memory", "cc");
}

/* Resumes the session. */
static void open_again(void)
{
    closing = false; /* clear this first: step() may set `suspended` while `closing` is true */
    suspended = false;
    page.gate = GATE_UNUSED;
}

CUresult broker_attach(void)
{
    asked++;
    CHECK(counted() == 0); /* a call that waits does not count as inside */
    if (!answer)
        open_again();
    return answer;
}

/* This test replaces later.c: later_note() notes no call, and later_do() only counts how often it
 * runs. */
bool later_note(uint32_t entry, const uint64_t *argument) { return entry && argument && false; }
bool later_do(void)
{
    made++;
    return true;
}
bool later_may(uint32_t entry) { return entry != 0; }
CUresult later_sit_out(void) { return CUDA_SUCCESS; }
bool current_differs(void) { return false; }
void current_apply(void) {}
void own_lock(uint32_t *lock) { *lock = 1; }
void own_unlock(uint32_t *lock) { *lock = 0; }

void polite_begin(struct polite *p)
{
    p->interrupts = 0;
    CHECK(counted() == 0);
}

void polite_end(struct polite *p)
{
    (void)p;
}

bool polite_interrupted(const struct polite *p)
{
    (void)p;
    return answer != 0;
}

bool polite_finalizing(void)
{
    return false;
}

void polite_nap(struct polite *p)
{
    (void)p;
    open_again();
}

void nap(int milliseconds)
{
    (void)milliseconds;
    open_again();
}

void cached_fill(void)
{
}

/* With any argument, this thread counts its calls in `first`, a word that no other thread uses.
 * Without an argument, it counts its calls in `inflight`, which all threads share. */
int main(int argc, char **argv)
{
    (void)argv;
    guard_first = argc > 1;
    guard_note_init();
    signal(SIGTRAP, step);
    const uint8_t ways[] = {GATE_CLOSED, GATE_PAUSED};
    int tries = 0, waited = 0;
    for (int way = 0; way < 2; way++)
        for (int gate = GATE_OPEN; gate <= GATE_UNUSED; gate++)
            for (int refused = 0; refused < 2; refused++) {
                bool struck;
                int strike = 0;
                do {
                    answer = refused ? CUDA_ERROR_SYSTEM_NOT_READY : 0;
                    strike_with = ways[way];
                    page.gate = (uint8_t)gate;
                    closing = suspended = false;
                    int before = asked;
                    start(strike++);
                    CUresult error = guard_enter();
                    stop();
                    struck = steps > strike;
                    CHECK(error ? refused && !counted()
                                : !suspended && counted() == 1);
                    waited += asked - before;
                    tries++;
                    /* While this thread is inside a call, a nested call ignores the gate. */
                    page.gate = GATE_CLOSED;
                    before = asked;
                    if (!error) {
                        CHECK(guard_enter() == 0 && guard_slow_gate(0) == 0);
                        guard_leave();
                        CHECK(asked == before && counted() == 1);
                        guard_leave();
                    }
                    CHECK(counted() == 0);
                } while (struck);
            }
    signal(SIGTRAP, SIG_DFL);
    CHECK(tries > 100 && waited > 20);
    page.pause_until = 0;
    answer = 0;
    /* A call inside may have to wait for the broker. Before this wait, the call steps out and no
     * longer counts as inside. After the wait, it steps in again as soon as the gate is open. */
    page.gate = GATE_OPEN;
    CHECK(guard_enter() == 0);
    gate_step_out();
    CHECK(counted() == 0);
    page.gate = GATE_CLOSED;
    CHECK(gate_step_in() == 0 && page.gate != GATE_CLOSED && counted() == 1);
    gate_step_out();
    page.gate = GATE_CLOSED;
    answer = CUDA_ERROR_SYSTEM_NOT_READY;
    CHECK(gate_step_in() == CUDA_ERROR_SYSTEM_NOT_READY);
    guard_leave();
    CHECK(counted() == 0);
    guard_leave(); /* without a call inside, guard_leave() has no effect */
    CHECK(counted() == 0);
    /* A query about devices needs no lease, and does not mark the gate as used. But it counts as a
     * call inside. */
    page.gate = GATE_UNUSED;
    CHECK(guard_enter_free() == 0 && page.gate == GATE_UNUSED && counted() == 1);
    guard_leave();
    /* Pretend that another thread, which sleeps, must still set its context in the driver. No call
     * is noted yet, so this thread must not run later_do(). */
    page.gate = GATE_OPEN;
    gate_arrears(ARREARS_CONTEXTS, true);
    made = steps = 0;
    strike_at = -1;
    for (int i = 0; i < 1000; i++) {
        CHECK(guard_slow_gate(0) == 0 && guard_slow_free(0) == 0);
        CHECK(guard_enter() == 0);
        guard_leave();
    }
    CHECK(made == 0);
    gate_arrears(ARREARS_CALLS, true);
    CHECK(guard_slow_gate(0) == 0 && made == 1);
    CHECK(guard_slow_free(0) == 0 && made == 1);
    CHECK(page.slot[0].inflight == 0 && page.slot[0].first == 0);
    puts(failures ? "FAILED" : "right");
    return failures != 0;
}
