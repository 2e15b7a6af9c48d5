# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``python -m tests.kubernetes`` writes what the manifests are once kustomize has made them."""

from .test_manifests import RENDERED, rendered

RENDERED.write_text(rendered())
