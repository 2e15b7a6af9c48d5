/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Finding the driver's libraries (find.c). Both libraries of the guard use it.
 */
#ifndef GPUPOOL_GUARD_FIND_H
#define GPUPOOL_GUARD_FIND_H

/* Both libraries of the guard contain this text, exported as gpupool_guard. The guard uses it to
 * distinguish its own copies from the driver. In a process it looks for the symbol with dlsym(). In
 * a file it searches for the text. */
#define FIND_MARK "gpupool-guard-copy"

/* Returns the opened library, or NULL. `named`: the library's path if the user has set it,
 * otherwise NULL or empty. */
__attribute__((visibility("hidden"))) void *find_library(const char *soname, const char *named);

#endif
