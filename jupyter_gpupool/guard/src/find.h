/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Finding the driver's libraries (find.c). Shared by the guard's own two.
 */
#ifndef GPUPOOL_GUARD_FIND_H
#define GPUPOOL_GUARD_FIND_H

/* In the text of both libraries of the guard, exported as gpupool_guard: distinguishes a copy of the guard from
 * the driver, in a process by dlsym() and in a file by its text. */
#define FIND_MARK "gpupool-guard-copy"

/* The opened library, or NULL. `named`: the library's path if the user gives one, otherwise NULL or empty. */
__attribute__((visibility("hidden"))) void *find_library(const char *soname, const char *named);

#endif
