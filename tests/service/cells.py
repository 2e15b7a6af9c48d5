# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A program that starts a Pooled GPU kernel and runs cells in it, as a notebook does.

Each line of its input is the code of a cell, as JSON. For each cell, the program prints one line:
whether the cell succeeded, and what the cell printed. The program needs no network.
"""

import json
import sys
import tempfile

from jupyter_client.manager import KernelManager


def main():
    place = tempfile.mkdtemp()
    manager = KernelManager(
        kernel_name="gpupool-python3", transport="ipc", ip=f"{place}/kernel",
        connection_file=f"{place}/kernel.json",
    )  # fmt: skip
    manager.start_kernel()
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=240)
    try:
        for line in sys.stdin:
            text = []

            def hook(message, text=text):
                content = message["content"]
                text.append(content.get("text") or content.get("data", {}).get("text/plain", ""))
                text.append("\n".join(content.get("traceback", [])))

            reply = client.execute_interactive(
                json.loads(line), timeout=240, allow_stdin=False, output_hook=hook
            )
            done = reply["content"]["status"] == "ok", "".join(text).strip()
            print(json.dumps(done), flush=True)
    finally:
        client.stop_channels()
        manager.shutdown_kernel()


main()
