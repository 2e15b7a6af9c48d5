# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Runs a Jupyter kernel manager as a user. Each line of standard input calls a method.

``python -m tests.cluster.remote_manager SOCKET HOME``
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
import uuid
from pathlib import Path

from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager

from jupyter_gpupool.remote_provisioner import GPUPoolRemoteProvisioner


def printed(content):
    return content["text"] if content.get("name") == "stdout" else ""


def processor_seconds(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # including ended children


def manager_of(kernel_id, *, remote):
    found = AsyncKernelManager(
        kernel_name="gpupool-python3", kernel_id=kernel_id,
        kernel_spec_manager=KernelSpecManager(),
    )  # fmt: skip
    if remote:
        # the manager must use this provisioner, whatever the kernelspec names
        found.provisioner = GPUPoolRemoteProvisioner(
            kernel_id=kernel_id, kernel_spec=found.kernel_spec, parent=found
        )
    return found


class Manager:
    def __init__(self):
        self.manager = manager_of("a-kernel", remote=True)
        self.client = None

    async def start(self):
        await self.manager.start_kernel(cwd="/")
        await self._connect()
        return self.manager.provisioner._node

    async def _connect(self):
        self.client = self.manager.client()
        self.client.start_channels()
        await self.client.wait_for_ready(timeout=90)

    async def run(self, code):
        said = []
        found = {"content": {"status": "aborted"}}
        # After an error in a cell, ipykernel aborts all requests until its queue is empty. So send
        # the request again.
        while found["content"]["status"] == "aborted":
            found = await self.client.execute_interactive(
                code, timeout=90, output_hook=lambda m: said.append(printed(m["content"]))
            )
        return found["content"].get("ename") or "".join(said).strip()

    async def interrupt(self):
        """Start a cell and interrupt it; return the name of its error."""
        message = self.client.execute("print('on', flush=True); import time; time.sleep(600)")
        while (await self.client.get_iopub_msg(timeout=90))["msg_type"] != "stream":
            pass
        await self.manager.interrupt_kernel()
        while True:
            reply = await self.client.get_shell_msg(timeout=90)
            if reply["parent_header"].get("msg_id") == message:
                return reply["content"].get("ename")

    async def restart(self):
        """Restart the kernel. The client keeps its connection, as a client in a browser does."""
        await self.manager.restart_kernel(now=True)
        await self.client.wait_for_ready(timeout=90)
        return self.manager.provisioner._node

    async def alive(self):
        return await self.manager.is_alive()

    async def died(self):
        """Return once the manager sees that the kernel has ended."""
        return await self.manager.provisioner.wait()

    async def takes_over(self):
        """Return whether a new provisioner with the old one's data finds the kernel alive."""
        info = await self.manager.provisioner.get_provisioner_info()
        other = GPUPoolRemoteProvisioner(
            kernel_id="a-kernel", kernel_spec=self.manager.kernel_spec, parent=self.manager
        )
        await other.load_provisioner_info(info)
        return await other.poll() is None

    async def refused(self, memory):
        """Try to start a kernel with this much memory; return the type and text of the error."""
        self.manager.provisioner.memory = memory
        try:
            await self.manager.start_kernel(cwd="/")
        except Exception as error:
            return [type(error).__name__, str(error)]
        finally:
            self.manager.provisioner.memory = 0

    async def timed(self, remote, memory, beside):
        """Start another kernel; return the elapsed seconds, the processor seconds and the machine.

        Both numbers cover the time from the start of the kernel to its first answer. The processor
        seconds are the sum for the kernel, this process and the processes ``beside``.
        """
        manager = manager_of(str(uuid.uuid4()), remote=remote)
        if remote:
            manager.provisioner.memory = memory
        spent, own = -sum(map(processor_seconds, beside)), time.process_time()
        began = time.perf_counter()
        await manager.start_kernel(cwd="/")
        node = manager.provisioner._node if remote else ""
        client = manager.client()
        client.start_channels()
        await client.wait_for_ready(timeout=90)
        seconds = time.perf_counter() - began
        spent += sum(map(processor_seconds, [*beside, manager.provisioner.pid]))
        spent += time.process_time() - own
        client.stop_channels()
        await manager.shutdown_kernel(now=True)
        return seconds, spent, node

    async def shutdown(self):
        self.client.stop_channels()
        await self.manager.shutdown_kernel(now=True)
        return self.manager.has_kernel


async def main():
    manager = Manager()
    for line in sys.stdin:
        step, *arguments = json.loads(line)
        print(json.dumps(await getattr(manager, step)(*arguments)), flush=True)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)  # a warning of the provisioner has the kernel's log
    socket, home = sys.argv[1:]
    os.environ.update({
        "HOME": home, "GPUPOOL_SOCKET": socket, "JUPYTER_RUNTIME_DIR": f"{home}/runtime",
        "JUPYTER_DATA_DIR": f"{home}/data", "JUPYTER_CONFIG_DIR": f"{home}/config",
    })  # fmt: skip
    asyncio.run(main())
