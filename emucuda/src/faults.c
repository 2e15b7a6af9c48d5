/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Injected faults. All processes share a table, which is read from `<state>/faults`. Each process
 * also has a private table from EMUCUDA_FAULTS.
 *
 * One fault per line (or between ';'): NAME key=value ...
 *   pid=, device=, count=   the process and device that it strikes, and how often
 *   bandwidth=              slow-copies: bytes/s
 *   code=                   the CUresult (or Xid) to report instead of the usual one
 *   op=                     hang: lock, checkpoint, restore, unlock or state
 *   bytes=, ms=, number=    the size, time or number of a quirk; see `Faults` in faults.py
 *   id=                     identity of the line: it keeps its count when the file is rewritten
 */
#include "machine.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char *const names[FAULT_KINDS] = {
    [FAULT_SLOW_COPIES] = "slow-copies",
    [FAULT_LOCK_TIMEOUT] = "lock-timeout",
    [FAULT_CHECKPOINT_REFUSED] = "checkpoint-refused",
    [FAULT_RESTORE_FAILED] = "restore-failed",
    [FAULT_DEVICE_LOST] = "device-lost",
    [FAULT_NVML_MISSING_PIDS] = "nvml-missing-pids",
    [FAULT_HANG] = "hang",
    [FAULT_RESIDUE] = "residue",
    [FAULT_NVML_LESS] = "nvml-less",
    [FAULT_NVML_WAITS] = "nvml-waits",
    [FAULT_NVML_LATE] = "nvml-late",
    [FAULT_NVML_LAG] = "nvml-lag",
    [FAULT_SUSPEND_KEEPS] = "suspend-keeps",
    [FAULT_RESTORE_KEEPS_STATE] = "restore-keeps-state",
    [FAULT_RESTORE_HIDES_LOSS] = "restore-hides-loss",
    [FAULT_RESTORE_MORE] = "restore-more",
    [FAULT_MIGRATION_REFUSED] = "migration-refused",
    [FAULT_INIT_NOT_ENOUGH] = "init-not-enough",
    [FAULT_LOCK_IGNORES_TIMEOUT] = "lock-ignores-timeout",
    [FAULT_NVML_HOST_PIDS] = "nvml-host-pids",
    [FAULT_CONTEXT_MORE] = "context-more",
    [FAULT_LOADED_CODE] = "loaded-code",
};

static struct fault_table env_table;
static pthread_once_t env_once = PTHREAD_ONCE_INIT;

static bool parse_fault(char *line, struct fault *out)
{
    char *save = NULL, *word;
    struct fault fault = {.kind = FAULT_KINDS, .pid = -1, .device = -1, .count = -1, .number = -1};
    uint64_t id = 0xcbf29ce484222325ull;
    for (const char *p = line; *p; p++)
        id = (id ^ (uint8_t)*p) * 0x100000001b3ull;
    fault.id = id;
    word = strtok_r(line, " \t", &save);
    for (unsigned i = 0; word && i < FAULT_KINDS; i++)
        if (!strcmp(word, names[i]))
            fault.kind = i;
    if (fault.kind == FAULT_KINDS)
        return false;
    while ((word = strtok_r(NULL, " \t", &save))) {
        char *value = strchr(word, '=');
        if (!value)
            continue;
        *value++ = 0;
        if (!strcmp(word, "pid"))
            fault.pid = atoll(value);
        else if (!strcmp(word, "device"))
            fault.device = atoll(value);
        else if (!strcmp(word, "count"))
            fault.count = atoll(value);
        else if (!strcmp(word, "code"))
            fault.code = (uint32_t)atoll(value);
        else if (!strcmp(word, "id"))
            fault.id = strtoull(value, NULL, 10);
        else if (!strcmp(word, "bandwidth"))
            spec_size(value, strlen(value), true, &fault.bandwidth);
        else if (!strcmp(word, "bytes"))
            spec_size(value, strlen(value), false, &fault.bytes);
        else if (!strcmp(word, "number"))
            fault.number = atoll(value);
        else if (!strcmp(word, "ms"))
            fault.ms = strtoull(value, NULL, 10);
        else if (!strcmp(word, "op"))
            snprintf(fault.op, sizeof fault.op, "%s", value);
    }
    *out = fault;
    return true;
}

/* `whose` is the name of the environment variable that contains the text. If `whose` is NULL, the
 * text comes from the faults file, which Python has already checked. */
static void parse_table(char *text, struct fault_table *table, const char *whose)
{
    char *save = NULL;
    table->count = 0;
    for (char *line = strtok_r(text, ";\n", &save); line; line = strtok_r(NULL, ";\n", &save)) {
        line += strspn(line, " \t");
        if (table->count < MAX_FAULTS && parse_fault(line, &table->fault[table->count]))
            table->count++;
        else if (whose && *line)
            dprintf(2, "emucuda: %s: %s '%s'.\n", whose,
                    table->count < MAX_FAULTS ? "unknown fault" : "too many faults; ignored", line);
    }
}

static void read_env(void)
{
    const char *text = getenv("EMUCUDA_FAULTS");
    if (!text || !*text)
        return;
    char *copy = strdup(text);
    if (copy)
        parse_table(copy, &env_table, "EMUCUDA_FAULTS");
    free(copy);
}

/* Returns the fault by which the device is lost, or NULL. Of several faults the last one counts. */
static const struct fault *loss_of(const struct fault_table *table, unsigned device)
{
    const struct fault *found = NULL;
    for (unsigned i = 0; i < table->count; i++)
        if (table->fault[i].kind == FAULT_DEVICE_LOST &&
            (table->fault[i].device < 0 || table->fault[i].device == (int64_t)device))
            found = &table->fault[i];
    return found;
}

/* With the lock held: reads the faults file into the shared table. */
static void load_file(const struct stat *st, int fd)
{
    static struct fault_table table; /* only the thread that holds the machine lock uses this
                                      * table */
    char *text = calloc(1, (size_t)st->st_size + 1);
    if (!text)
        return;
    ssize_t n = fd >= 0 ? read(fd, text, (size_t)st->st_size) : 0;
    text[n > 0 ? n : 0] = 0;
    parse_table(text, &table, NULL);
    free(text);
    for (unsigned i = 0; i < table.count; i++)
        for (unsigned k = 0; k < machine->faults.count; k++)
            if (machine->faults.fault[k].id == table.fault[i].id)
                table.fault[i].used = machine->faults.fault[k].used;
    for (unsigned d = 0; d < machine->spec.count; d++) {
        const struct fault *loss = loss_of(&table, d);
        if (!loss || loss_of(&machine->faults, d))
            continue;
        machine->xid_code[d] = loss->code ? loss->code : 79; /* the GPU has fallen off the bus */
        machine->xid_sequence[d]++;
    }
    machine->faults = table;
}

static void identify(const struct stat *st, uint64_t identity[3])
{
    identity[0] = st->st_ino;
    identity[1] = (uint64_t)st->st_mtim.tv_sec * 1000000000ull + (uint64_t)st->st_mtim.tv_nsec;
    identity[2] = (uint64_t)st->st_size;
}

/* Returns true if the shared table was read from this version of the file. Call this with the lock
 * held. */
static bool same_file(const struct stat *st)
{
    uint64_t identity[3];
    identify(st, identity);
    return !memcmp(identity, machine->faults_identity, sizeof identity);
}

/* Reads the faults file again if it has changed. Python changes faults_touch whenever it changes
 * the file. So without `look`, this function looks at the file only if faults_touch has changed.
 * With `look`, it always calls lstat(), and so notices an edit by hand. NVML and checkpoint calls
 * set `look`, because the time of lstat() does not matter there. */
static void refresh(bool look)
{
    uint64_t touch = __atomic_load_n(&machine->faults_touch, __ATOMIC_ACQUIRE);
    if (!look && touch == __atomic_load_n(&machine->faults_seen, __ATOMIC_ACQUIRE))
        return;
    char path[4096];
    struct stat st;
    snprintf(path, sizeof path, "%s/faults", machine_state_dir());
    if (lstat(path, &st)) /* the file has rarely changed, and lstat() is faster than open() */
        memset(&st, 0, sizeof st);
    machine_lock();
    if (!same_file(&st)) {
        int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
        if (fd < 0 || fstat(fd, &st))
            memset(&st, 0, sizeof st);
        load_file(&st, fd);
        identify(&st, machine->faults_identity);
        if (fd >= 0)
            close(fd);
    }
    /* Store the value that faults_touch had before this function read the file. If Python has
     * changed the file since then, the next call notices the change. */
    __atomic_store_n(&machine->faults_seen, touch, __ATOMIC_RELEASE);
    machine_unlock();
}

bool faults_pending(void)
{
    pthread_once(&env_once, read_env);
    refresh(false);
    return env_table.count || __atomic_load_n(&machine->faults.count, __ATOMIC_RELAXED);
}

static struct fault *search(struct fault_table *table, enum fault_kind kind, pid_t pid, int device,
                            const char *op)
{
    struct fault *found = NULL; /* a fault for this process has priority over a fault for all
                                 * processes */
    for (unsigned i = 0; i < table->count; i++) {
        struct fault *f = &table->fault[i];
        if (f->kind == kind && (f->pid < 0 || pid < 0 || f->pid == pid) &&
            (f->device < 0 || device < 0 || f->device == device) &&
            (f->count < 0 || f->used < f->count) && (!f->op[0] || !op || !strcmp(f->op, op))) {
            if (!found || (found->pid < 0 && f->pid >= 0 && pid >= 0))
                found = f;
        }
    }
    return found;
}

static bool look_up(enum fault_kind kind, pid_t pid, int device, const char *op, bool look, bool use,
                    struct fault *out)
{
    if (look)
        refresh(true);
    if (!faults_pending())
        return false;
    machine_lock();
    struct fault *f = search(&machine->faults, kind, pid, device, op);
    if (!f)
        f = search(&env_table, kind, pid, device, op);
    if (f) {
        if (use)
            f->used++;
        if (out)
            *out = *f;
    }
    machine_unlock();
    return f != NULL;
}

bool fault_hit(enum fault_kind kind, pid_t pid, int device, const char *op, struct fault *out)
{
    return look_up(kind, pid, device, op, true, true, out);
}

bool fault_active(enum fault_kind kind, pid_t pid, int device, struct fault *out)
{
    return look_up(kind, pid, device, NULL, true, false, out);
}

bool device_is_lost(unsigned device)
{
    return look_up(FAULT_DEVICE_LOST, getpid(), (int)device, NULL, false, false, NULL);
}

uint64_t copy_bandwidth(unsigned device, uint64_t profile_rate)
{
    struct fault fault;
    uint64_t bandwidth = machine->spec.bandwidth ? machine->spec.bandwidth : profile_rate;
    if (look_up(FAULT_SLOW_COPIES, getpid(), (int)device, NULL, false, true, &fault) &&
        fault.bandwidth && (!bandwidth || fault.bandwidth < bandwidth))
        bandwidth = fault.bandwidth;
    return bandwidth;
}

uint64_t device_residue(unsigned device)
{
    struct fault fault;
    uint64_t capacity = machine_capacity();
    if (!look_up(FAULT_RESIDUE, -1, (int)device, NULL, false, false, &fault))
        return 0;
    return fault.bytes < capacity ? fault.bytes : capacity;
}
