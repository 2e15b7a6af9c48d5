# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The costs of the pool, each figure against a baseline of the same run.

``python -m benchmarks`` runs every module of this folder that has ``main(argv) -> dict``, each in
its own process, writes ``results/<name>-<kind of host>-<date>.json`` and prints each figure beside
its budget. ``common`` has their shared functions.
"""
