# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Leaves ipykernel without its debugger; README.md says why."""

raise ImportError("The tests have no debugger.")
