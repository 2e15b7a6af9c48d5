# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Measurements of what the pool costs. Each figure has a baseline from the same run.

``python -m benchmarks`` runs every module of this folder that has ``main(argv) -> dict``, each in
its own process, writes ``results/<name>-<kind of host>-<date>.json`` and prints each figure beside
its budget. ``common`` has the functions that the benchmarks share.
"""
