# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Data that outlives a broker: the journal, the files beside the socket, and their recovery."""
