# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``python -m tests.kubernetes`` writes the manifests that kustomize makes from the example."""

from .test_manifests import RENDERED, rendered

RENDERED.write_text(rendered())
