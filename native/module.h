/* What the parts of the Python module share. Python.h must be included before. */
#ifndef SHARDKIT_MODULE_H
#define SHARDKIT_MODULE_H

/* module_convert.c: add its functions; returns -1 with an exception. */
int sk_add_convert(PyObject *module);

#endif
