/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Entry points of every kind, tested without the rest of the guard. The caller passes every kind of
 * argument, and the driver checks all of them. Functions in this file take the part of the guard in
 * between. They overwrite every register that they may overwrite.
 */
#include <execinfo.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "entries_gen.h"

const uint8_t open_byte = 0, shut_byte = 2;
const uint8_t *guard_gate = &open_byte, *guard_free_gate = &open_byte;
uint8_t guard_unloaded;
void *guard_real[E_COUNT + E_SPARES];
extern const int32_t guard_entry_at[];

static int slow, entered, left, answer, failures;

#define CHECK(condition)                                          \
    do {                                                          \
        if (!(condition)) {                                       \
            printf("%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            failures++;                                           \
        }                                                         \
    } while (0)

/* Overwrites registers as any C function may. */
static void overwrite(void)
{
    __asm__ volatile("movq $-1, %%rax; movq %%rax, %%rdi; movq %%rax, %%rsi; movq %%rax, %%rdx\n"
                     "movq %%rax, %%rcx; movq %%rax, %%r8; movq %%rax, %%r9; movq %%rax, %%r10\n"
                     "movq %%rax, %%r11; pxor %%xmm0, %%xmm0; pxor %%xmm1, %%xmm1\n"
                     "pxor %%xmm2, %%xmm2; pxor %%xmm3, %%xmm3; pxor %%xmm4, %%xmm4\n"
                     "pxor %%xmm5, %%xmm5; pxor %%xmm6, %%xmm6; pxor %%xmm7, %%xmm7\n"
                     ::: "rax", "rdi", "rsi", "rdx", "rcx", "r8", "r9", "r10", "r11", "xmm0",
                     "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "memory");
}

/* Returns whether an unwinder can walk the stack frames from here to main(). */
static int unwinds(void)
{
    void *frames[32];
    int n = backtrace(frames, 32);
    char **names = backtrace_symbols(frames, n);
    for (int i = 0; names && i < n; i++)
        if (strstr(names[i], "(main+"))
            return 1;
    return 0;
}

/* Returns whether the stack was aligned at the call. */
static int aligned(void *frame)
{
    return ((uintptr_t)frame & 15) == 0;
}

#define PLAYED(name, count)                       \
    int name(void);                               \
    int name(void)                                \
    {                                             \
        count++;                                  \
        CHECK(unwinds());                         \
        CHECK(aligned(__builtin_frame_address(0))); \
        overwrite();                              \
        return answer;                            \
    }
PLAYED(guard_slow_gate, slow)
PLAYED(guard_slow_free, slow)
PLAYED(guard_slow_never, slow)
PLAYED(guard_slow_refuse, slow)
PLAYED(guard_enter_entry, entered)

void guard_leave(void);
void guard_leave(void)
{
    left++;
    CHECK(aligned(__builtin_frame_address(0)));
    overwrite();
}

/* Replaces the guard's function that runs when a freeing call begins. It checks the arguments: the
 * guard would note them. */
int guard_enter_back(uint32_t entry, const uint64_t *argument);
int guard_enter_back(uint32_t entry, const uint64_t *argument)
{
    entered++;
    CHECK(entry == E_cuBack && argument[0] == 1 && argument[1] == 2 && argument[2] == 3);
    CHECK(unwinds() && aligned(__builtin_frame_address(0)));
    overwrite();
    return answer;
}

int guard_slow_note(uint32_t entry, const uint64_t *argument);
int guard_slow_note(uint32_t entry, const uint64_t *argument)
{
    slow++;
    CHECK(entry == E_cuNote && argument[0] == 1 && argument[1] == 2 && argument[2] == 3);
    CHECK(unwinds() && aligned(__builtin_frame_address(0)));
    overwrite();
    return answer;
}

typedef int (*everything)(long a, long b, long c, long d, long e, long f, double g, double h,
                          double i, double j, double k, double l, double m, double n, long o,
                          long p, long q, long r, long s, long t, long u, long v, long w, long x);

/* Acts as the driver's function: checks its arguments. */
static int look(long a, long b, long c, long d, long e, long f, double g, double h, double i,
                double j, double k, double l, double m, double n, long o, long p, long q, long r,
                long s, long t, long u, long v, long w, long x)
{
    long got[] = {a, b, c, d, e, f, (long)g, (long)h, (long)i, (long)j, (long)k, (long)l,
                  (long)m, (long)n, o, p, q, r, s, t, u, v, w, x};
    int right = 1;
    for (int y = 0; y < 24; y++)
        right = right && got[y] == y + 1;
    return right && aligned(__builtin_frame_address(0)) && unwinds() ? 4711 : 13;
}

static int call(everything entry)
{
    return entry(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22,
                 23, 24);
}

/* If a function has no prototype, its caller puts the number of vector registers with arguments
 * into rax. The guard must pass rax unchanged to the driver. */
__asm__(".pushsection .text\n"
        "give_rax: ret\n"
        "with_rax: movq %rdi, %r11\n movl $0x5a, %eax\n jmp *%r11\n"
        ".popsection\n");
extern void give_rax(void);
extern int with_rax(void *entry);

extern int cuGate(void), cuFree(void), cuNever(void), cuRefuse(void), cuWrap(void), cuSame(void),
    cuWait3(void), cuWait24(void), cuWait17(void), cuBack(void), cuPeek(void), cuNote(void);
int wrap_cuWrap(void), wrap_cuPeek(void);

int wrap_cuWrap(void)
{
    return 99;
}

int wrap_cuPeek(void)
{
    return 98;
}

static int look_at_three(long a, long b, long c)
{
    return a == 1 && b == 2 && c == 3 && aligned(__builtin_frame_address(0)) && unwinds() ? 4711 : 13;
}

static void try_back(void)
{
    guard_real[E_cuBack] = (void *)look_at_three;
    int in = entered, out = left;
    CHECK(call((everything)cuBack) == 4711 && entered == in + 1 && left == out + 1);
    answer = -1; /* the guard notes the call and returns success without a driver call */
    CHECK(call((everything)cuBack) == 0 && left == out + 1);
    answer = 802;
    CHECK(call((everything)cuBack) == 802 && left == out + 1);
    answer = 0;
}

static void try(int index, void *entry, int counted)
{
    int before = slow, in = entered, out = left;
    guard_real[index] = (void *)look;
    CHECK(call((everything)entry) == 4711);
    CHECK(slow == before && entered - in == counted && left - out == counted);
    guard_gate = guard_free_gate = &shut_byte;
    guard_unloaded = 1;
    CHECK(call((everything)entry) == 4711);
    CHECK(slow - before == !counted && entered - in == 2 * counted && left - out == 2 * counted);
    answer = 802;
    CHECK(call((everything)entry) == 802);
    CHECK(slow - before == 2 * !counted && left - out == 2 * counted);
    answer = 0;
    guard_gate = guard_free_gate = &open_byte;
    guard_unloaded = 0;
}

int main(void)
{
    try(E_cuGate, (void *)cuGate, 0);
    try(E_cuFree, (void *)cuFree, 0);
    try(E_cuNever, (void *)cuNever, 0);
    try(E_COUNT + 7, (char *)guard_entry_at + guard_entry_at[E_COUNT + 7], 0);
    CHECK((char *)guard_entry_at + guard_entry_at[E_cuGate] == (char *)cuGate);
    /* These functions get 24 arguments, 10 of them on the stack, and must pass all 24 to the
     * driver. */
    try(E_cuWait24, (void *)cuWait24, 1);
    try(E_cuWait17, (void *)cuWait17, 1);
    guard_real[E_cuWait3] = (void *)give_rax;
    CHECK(with_rax((void *)cuWait3) == 0x5a);
    guard_real[E_cuGate] = (void *)give_rax;
    CHECK(with_rax((void *)cuGate) == 0x5a);
    guard_gate = &shut_byte;
    CHECK(with_rax((void *)cuGate) == 0x5a);
    guard_real[E_cuRefuse] = (void *)look;
    CHECK(call((everything)cuRefuse) == 4711);
    answer = 801;
    CHECK(call((everything)cuRefuse) == 801);
    CHECK(cuWrap() == 99 && cuSame() == 99);
    guard_gate = &open_byte;
    guard_real[E_cuPeek] = (void *)look;
    CHECK(call((everything)cuPeek) == 4711);
    guard_free_gate = &shut_byte;
    CHECK(call((everything)cuPeek) == 98);
    answer = 0;
    try_back();
    guard_gate = guard_free_gate = &open_byte;
    try(E_cuNote, (void *)cuNote, 0);
    guard_gate = &shut_byte;
    answer = -1;
    CHECK(call((everything)cuNote) == 0);
    answer = 0;
    puts(failures ? "FAILED" : "right");
    return failures != 0;
}
