"""Two nodes on one machine: two network namespaces, joined by a virtual cable, each with a torchrun of its own.

Each node has two processes. A small language model is trained with HSDP, weights sharded within a node and gradients
averaged between them; killed on one node, resumed, and compared with one process. Needs root and iproute2.
`python benchmarks/two_nodes.py --out benchmarks/results/training/two_nodes.json`
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from regard.core.files import write_text
from regard.training.metrics import read_metrics

PORT = 29500
FLAGS = [
    *("--embedding-dim", "64", "--num-heads", "4", "--num-layers", "2", "--context", "64", "--batch-size", "16"),
    *("--vocabulary-size", "1024", "--save-every", "10", "--evaluate-every", "20", "--precision", "float64"),
    *("--device", "cpu"),
]
STEPS = 40


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextmanager
def nodes() -> Iterator[list[tuple[str, str, str]]]:
    """Two namespaces: the name, address and network interface of each."""
    mark = os.getpid()
    both = [(f"regard-{mark}-{at}", f"10.77.{mark % 250}.{at + 1}", f"veth{mark % 10000}{at}") for at in range(2)]
    try:
        for name, _, _ in both:
            ip("netns", "add", name)
        ip("link", "add", both[0][2], "type", "veth", "peer", "name", both[1][2])
        for name, address, interface in both:
            ip("link", "set", interface, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", interface)
            ip("-n", name, "link", "set", interface, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield both
    finally:
        for name, _, _ in both:
            with suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)


def start(node: tuple[str, str, str], first: str, words: list[str], log: Path) -> "subprocess.Popen[bytes]":
    """Start a node's torchrun."""
    name, address, interface = node
    command = ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    command += ["--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:{PORT}"]
    # torchrun asks the host's name for its addresses, and a namespace's are not among them.
    command += ["--rdzv-conf", f"is_host={int(address == first)}", "--rdzv-id", "run", "--local-addr", address]
    command += ["-m", "regard", *words, "--strategy", "hsdp"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": interface}
    with log.open("ab") as out:
        return subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(folder) if "loss" in record]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="also write the result to this file, with machine and commit")
    options = parser.parse_args()
    from regard.commands.suite.harness import environment

    with tempfile.TemporaryDirectory() as temporary, nodes() as both:
        folder = Path(temporary)
        begin = ["train", "lm", *FLAGS, "--steps", str(STEPS), "--out"]
        subprocess.run([sys.executable, "-m", "regard", *begin, str(folder / "alone")], check=True, capture_output=True)
        began = time.monotonic()
        killed = 0
        for words in ([*begin, str(folder / "two")], ["train", "resume", str(folder / "two"), "--device", "cpu"]):
            running = [start(node, both[0][1], words, folder / f"{node[0]}.log") for node in both]
            while words[1] == "lm" and len(losses(folder / "two")) < STEPS // 2:
                if any(process.poll() is not None for process in running):
                    break
                time.sleep(0.05)
            if words[1] == "lm":  # the second node is lost
                killed = len(losses(folder / "two"))
                for process in reversed(running):
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
            codes = [process.wait() for process in running]
        if any(codes):
            raise SystemExit("".join((folder / f"{node[0]}.log").read_text()[-3000:] for node in both))
        pairs = list(zip(losses(folder / "alone"), losses(folder / "two"), strict=True))
        result = {
            "nodes": 2,
            "processes": 4,
            "strategy": json.loads((folder / "two/environment.json").read_text())["strategy"],
            "steps": len(pairs),
            "second node killed after step": killed,
            "largest difference of a loss to one process": max(abs(alone - many) for alone, many in pairs),
            "seconds": round(time.monotonic() - began, 1),
        }
    print(json.dumps(result))
    if options.out is not None:
        write_text(options.out, json.dumps({"environment": environment(), **result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
