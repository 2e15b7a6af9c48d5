# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What the pool costs, each figure against a baseline taken in the same run.

``python -m benchmarks`` runs every module of this folder that has ``main(argv) -> dict``, each in
a process of its own, writes ``results/<name>-<kind of host>-<date>.json`` and prints each figure
beside its budget. ``common`` has what they share.
"""
