# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Hides the package of this name, see README.md."""

raise ImportError("the tests do without rfc3987_syntax")
