# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Messages to the broker, by sender, and the answers to them."""
