/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Macros for checks, and the TAP output, for the cases of conformance.c.
 */
#ifndef CONFORMANCE_H
#define CONFORMANCE_H

#include "conformance_targets.h"

/* ---- TAP ---- */

struct test {
    const char *name;
    void (*run)(void);
};
extern const struct test tests[];
static int failures;
static const char *skipped;

#define IS(got, want)                                                                             \
    do {                                                                                          \
        long long got_ = (long long)(got), want_ = (long long)(want);                             \
        if (got_ != want_) {                                                                      \
            printf("# line %d: %s is %lld, not %lld\n", __LINE__, #got, got_, want_);             \
            failures++;                                                                           \
        }                                                                                         \
    } while (0)
#define OK(call) IS(call, 0)
#define CHECK(condition)                                             \
    do {                                                             \
        if (!(condition)) {                                          \
            printf("# line %d: not %s\n", __LINE__, #condition);     \
            failures++;                                              \
        }                                                            \
    } while (0)

/* Checks that all memory is free again, except for at most OWN bytes: the driver may keep memory
 * for code that it loads at first use. A case must allocate more than OWN bytes. Otherwise this
 * check cannot find a leak. */
#define OWN (16 * MIB)
#define FREE_AGAIN(before) CHECK(free_memory() + OWN >= (before))

static void skip(const char *why) { skipped = why; }

static void run_case(const struct test *t, int number)
{
    int before = failures;
    skipped = NULL;
    t->run();
    if (failures != before)
        printf("not ok %d - %s\n", number, t->name);
    else if (skipped)
        printf("ok %d - %s # SKIP %s\n", number, t->name, skipped);
    else
        printf("ok %d - %s\n", number, t->name);
    fflush(stdout);
}

int main(int argc, char **argv)
{
    load_driver();
    if (argc > 1 && !strcmp(argv[1], "--target"))
        return target_main();
    if (argc == 5 && !strcmp(argv[1], "--op")) {
        struct child c = {atoi(argv[3]), -1, -1};
        cuInit(0);
        return op(&c, *argv[2], (unsigned)atoi(argv[4])) != 0;
    }
    signal(SIGPIPE, SIG_IGN);
    OK(cuInit(0));
    int number = 0, failed = 0;
    bool wanted = false, context = false;
    for (const struct test *t = tests; t->name; t++) {
        bool leave_out = false;
        for (int i = 1; i < argc; i++)
            leave_out = leave_out || !strcmp(argv[i], t->name);
        wanted = wanted || !strcmp(t->name, "copies"); /* the cases before this one need no
                                                        * context */
        number++;
        if (leave_out) {
            printf("ok %d - %s # SKIP by request\n", number, t->name);
            continue;
        }
        if (wanted && !context) {
            OK(open_context());
            context = true;
        }
        int before = failures;
        run_case(t, number);
        failed += failures != before;
    }
    printf("1..%d\n# %d of %d cases failed\n", number, failed, number);
    return failures != 0;
}

#endif
