# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Makes the import of this package fail; see README.md."""

raise ImportError("the tests do without rfc3987_syntax")
