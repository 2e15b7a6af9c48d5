/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * A program without an interpreter that makes one call and prints its result.
 *
 * waiter handler|default|ignore: how the program handles SIGINT. waiter exit: the program has a
 * context, makes a call while it exits, and prints the result of that call.
 */
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static volatile sig_atomic_t seen;

static void on_interrupt(int number)
{
    seen += number;
}

static int (*synchronise)(void);

static void at_exit(void)
{
    printf("%d\n", synchronise());
}

int main(int argc, char **argv)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    int (*init)(unsigned), (*retain)(void **, int);
    struct sigaction action = {.sa_handler = on_interrupt}, after;
    void *context = NULL;
    if (!driver || argc != 2)
        return 1;
    *(void **)&init = dlsym(driver, "cuInit");
    *(void **)&retain = dlsym(driver, "cuDevicePrimaryCtxRetain");
    if (!strcmp(argv[1], "exit")) {
        *(void **)&synchronise = dlsym(driver, "cuCtxSynchronize");
        atexit(at_exit);
        if (init(0) || retain(&context, 0))
            return 1;
        puts("ready");
        fflush(stdout);
        getchar();
        return 0;
    }
    if (strcmp(argv[1], "handler"))
        action.sa_handler = strcmp(argv[1], "ignore") ? SIG_DFL : SIG_IGN;
    sigaction(SIGINT, &action, NULL);
    if (init(0))
        return 1;
    puts("ready");
    fflush(stdout);
    int error = retain(&context, 0);
    sigaction(SIGINT, NULL, &after);
    printf("%d %d %d\n", error, (int)seen, after.sa_handler == action.sa_handler);
    return 0;
}
