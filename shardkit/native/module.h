/* What the parts of the Python module share. Python.h must be included before. */
#ifndef SHARDKIT_MODULE_H
#define SHARDKIT_MODULE_H

#include "core.h"

/* module_map.c: map_file(descriptor, size) of the module: a capsule, or None if it cannot be mapped. */
PyObject *sk_map_file(PyObject *module, PyObject *arguments);

/* Take the maps of a list of capsules and None; raises and returns 0 if it is something else. The
 * list must live as long as they are used. */
int sk_set_maps(sk_map *maps, size_t count, PyObject *given);

/* module_convert.c: add its functions; returns -1 with an exception. */
int sk_add_convert(PyObject *module);

#endif
