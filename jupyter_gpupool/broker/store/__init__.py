# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What outlives a broker: the journal, the files beside the socket, and how they are read back."""
