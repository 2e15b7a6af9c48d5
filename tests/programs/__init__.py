# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
