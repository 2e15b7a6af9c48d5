/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * The grammar of EMUCUDA_MACHINE. `specification.py` parses the same grammar to give better
 * messages. A test compares the two parsers on valid and invalid strings.
 */
#include "machine.h"

#include <stdio.h>
#include <string.h>

#define MAX_MEMORY (1ull << 40)       /* bytes of one device */
#define MAX_TOTAL (16ull << 40)       /* bytes of all devices together; the driver needs twice as
                                       * much address space */
#define MIN_BANDWIDTH 1000000ull      /* lowest rate of copies, in bytes/s; lower numbers are
                                       * refused: a user who writes 8 means 8 GB/s */
#define DEFAULT_CONTEXT (64 * MIB)

/* Sources of the rates. Copies and device memory have the published rates of PCIe 5.0 and 4.0 x16,
 * HBM3 and GDDR6X. Rates of suspend and resume come from reports about the driver's checkpoint
 * calls, which use pageable memory. An H100 suspends at 5 GB/s and resumes at 7 GB/s, but the 7
 * GB/s were reported for other boards. An RTX 4090 suspends at 4 GB/s and resumes at 7 GB/s. For
 * the H200, this project measured copies, and suspends and resumes under the guard
 * (benchmarks/results/gpu-h200-*). `specification.py` has the same profile names. */
static const struct {
    const char *name;
    struct rates rates;
} profiles[] = {
    {"cpu", {0, 0, 0, 0, 0, 0}},
    {"h100", {64000000000, 3350000000000, 5000000000, 7000000000, 0, 0}},
    {"h200", {55000000000, 4800000000000, 5100000000, 8500000000, 180000000, 250000000}},
    {"rtx4090", {32000000000, 1008000000000, 4000000000, 7000000000, 0, 0}},
};

const struct rates *spec_rates(const struct spec *spec) { return &profiles[spec->profile].rates; }

static const struct {
    const char *name;
    uint64_t factor;
} units[] = {
    {"KiB", 1ull << 10}, {"MiB", 1ull << 20}, {"GiB", 1ull << 30}, {"TiB", 1ull << 40},
    {"kB", 1000ull}, {"MB", 1000000ull}, {"GB", 1000000000ull}, {"TB", 1000000000000ull},
    {"K", 1ull << 10}, {"M", 1ull << 20}, {"G", 1ull << 30}, {"T", 1ull << 40},
    {"B", 1}, {"", 1},
};

static bool digit(char c) { return c >= '0' && c <= '9'; }

int spec_size(const char *text, size_t length, bool rate, uint64_t *out)
{
    const char *p = text, *end = text + length;
    unsigned __int128 whole = 0, fraction = 0, scale = 1;
    if (p == end || !digit(*p))
        return -1;
    for (int n = 0; p < end && digit(*p); p++) {
        if (++n > 18)
            return -1;
        whole = whole * 10 + (unsigned)(*p - '0');
    }
    if (p < end && *p == '.') {
        p++;
        if (p == end || !digit(*p))
            return -1;
        for (int n = 0; p < end && digit(*p); p++) {
            if (++n > 9)
                return -1;
            fraction = fraction * 10 + (unsigned)(*p - '0');
            scale *= 10;
        }
    }
    if (rate && end - p >= 2 && end[-2] == '/' && end[-1] == 's')
        end -= 2;
    size_t rest = (size_t)(end - p);
    for (size_t i = 0; i < sizeof units / sizeof *units; i++) {
        if (strlen(units[i].name) == rest && !memcmp(units[i].name, p, rest)) {
            unsigned __int128 value = whole * units[i].factor + fraction * units[i].factor / scale;
            if (value > INT64_MAX)
                return -1;
            *out = (uint64_t)value;
            return 0;
        }
    }
    return -1;
}

#define FAIL(...)                                      \
    do {                                               \
        snprintf(error, error_size, __VA_ARGS__);      \
        return -1;                                     \
    } while (0)

static int parse_option(const char *text, size_t length, struct spec *out, unsigned *seen,
                        char *error, size_t error_size)
{
    static const char *const keys[] = {"context", "bandwidth", "reserved"};
    const char *equals = memchr(text, '=', length);
    size_t key = equals ? (size_t)(equals - text) : length;
    if (key == 7 && !memcmp(text, "profile", key)) {
        size_t rest = equals ? length - key - 1 : 0;
        if (*seen & 8)
            FAIL("'profile' is given twice");
        *seen |= 8;
        for (unsigned i = 0; i < sizeof profiles / sizeof *profiles; i++)
            if (strlen(profiles[i].name) == rest && !memcmp(profiles[i].name, equals + 1, rest)) {
                out->profile = i;
                return 0;
            }
        FAIL("'%.*s' is not a profile", (int)length, text);
    }
    for (unsigned i = 0; i < 3; i++) {
        if (strlen(keys[i]) != key || memcmp(keys[i], text, key))
            continue;
        uint64_t value;
        if (!equals || spec_size(equals + 1, length - key - 1, i == 1, &value))
            FAIL("'%.*s' is not a size", (int)length, text);
        if (i == 1 && value && value < MIN_BANDWIDTH)
            FAIL("'%.*s' is less than 1 MB/s", (int)length, text);
        if (*seen & (1u << i))
            FAIL("'%s' is given twice", keys[i]);
        *seen |= 1u << i;
        *(i == 0 ? &out->context : i == 1 ? &out->bandwidth : &out->reserved) = value;
        return 0;
    }
    FAIL("'%.*s' is not an option", (int)key, text);
}

int spec_parse(const char *text, struct spec *out, char *error, size_t error_size)
{
    struct spec spec = {.context = DEFAULT_CONTEXT};
    unsigned seen = 0;
    const char *p = text;
    if (!digit(*p))
        FAIL("'%s' does not start with a number of devices", text);
    for (int n = 0; digit(*p); p++) {
        if (++n > 9)
            FAIL("'%s' asks for too many devices", text);
        spec.count = spec.count * 10 + (unsigned)(*p - '0');
    }
    if (*p++ != 'x')
        FAIL("'%s' does not have the form COUNTxSIZE", text);
    if (spec.count < 1 || spec.count > MAX_DEVICES)
        FAIL("'%s' asks for %llu devices; 1 to %d are possible", text,
             (unsigned long long)spec.count, MAX_DEVICES);
    size_t length = strcspn(p, ",");
    if (spec_size(p, length, false, &spec.memory))
        FAIL("'%.*s' is not a size", (int)length, p);
    spec.memory -= spec.memory % GRANULE;
    for (p += length; *p == ','; p += length) {
        length = strcspn(++p, ",");
        if (parse_option(p, length, &spec, &seen, error, error_size))
            return -1;
    }
    if (spec.memory > MAX_MEMORY || spec.memory * spec.count > MAX_TOTAL)
        FAIL("'%s' is too large; 1 TiB per device and 16 TiB in total are possible", text);
    if (spec.context > MAX_MEMORY || spec.reserved > MAX_MEMORY ||
        spec.context + spec.reserved >= spec.memory)
        FAIL("'%s' leaves no memory to allocate: the context and the driver take it all", text);
    *out = spec;
    return 0;
}

/* The tests call this function to compare this parser with Python's. */
__attribute__((visibility("default"))) int emucuda_parse(const char *text, uint64_t out[6]);
int emucuda_parse(const char *text, uint64_t out[6])
{
    struct spec spec;
    char error[256];
    if (spec_parse(text, &spec, error, sizeof error))
        return -1;
    memcpy(out, &spec, sizeof spec);
    return 0;
}
