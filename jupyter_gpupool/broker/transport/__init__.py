# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The socket: access, bytes to messages and back, turns between users."""
