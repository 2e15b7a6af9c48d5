# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Makes ``import debugpy`` fail, so that ipykernel starts without a debugger; see README.md."""

raise ImportError("The tests have no debugger.")
