"""Step time over a network of little bandwidth or much latency: four ranks in two "nodes" of one machine.

    sudo python benchmarks/limited_network.py --name limited-network

Linux, root and iproute2 are needed. A node is a network namespace with two ranks, which reach each other by its
loopback and the other node by one link. Its bandwidth is limited by the kernel (``tc``'s token bucket filter); latency
comes from a relay in user space, a process that holds back every packet, because kernels without netem cannot. What the
relay itself costs is measured: the round trip of a small message with a delay of 0, and its processor time. Contenders,
jobs and ratios are those of ``train_step.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import json
import multiprocessing
import os
import platform
import selectors
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

NODES = ("sg-node0", "sg-node1")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = 29511
PACKET = 65000  # bytes: a relay in Python moves few large packets faster than many small ones


@dataclass(frozen=True)
class Setting:
    """A link between two nodes: its bandwidth in Mbit/s (0: unlimited), what it adds to each way in ms, and the job."""

    name: str
    mbit: int
    delay_ms: float
    job: str


SETTINGS = (
    Setting("latency", 0, 5.0, "small"),
    Setting("bandwidth", 1000, 0.0, "llama"),
    Setting("both", 1000, 1.0, "gpt2"),
)
CONTENDERS = [*(f"shardgraph {preset}" for preset in ("fsdp", "zero2", "ddp")), "FSDP2", "DDP"]


def run(*command: str) -> None:
    subprocess.run(command, check=True)


@contextlib.contextmanager
def two_nodes(setting: Setting) -> Iterator[multiprocessing.Process | None]:
    """Two namespaces with a link as ``setting`` says; the process of its relay, if it has one."""
    relay = None
    remove_nodes()
    try:
        for node in NODES:
            run("ip", "netns", "add", node)
            run("ip", "-n", node, "link", "set", "lo", "up")
        if needs_relay(setting):
            ready = multiprocessing.Event()
            relay = multiprocessing.Process(target=relay_packets, args=(setting.delay_ms / 1e3, ready), daemon=True)
            relay.start()
            ready.wait(10)
        else:
            run("ip", "link", "add", "sg0", "type", "veth", "peer", "name", "sg1")
        for i, (node, address) in enumerate(zip(NODES, ADDRESSES, strict=True)):
            run("ip", "link", "set", f"sg{i}", "netns", node)
            run("ip", "-n", node, "addr", "add", f"{address}/24", "dev", f"sg{i}")
            run("ip", "-n", node, "link", "set", f"sg{i}", "up")
            if setting.mbit:
                bucket = ("rate", f"{setting.mbit}mbit", "burst", "256kb", "latency", "100ms")
                run("ip", "netns", "exec", node, "tc", "qdisc", "add", "dev", f"sg{i}", "root", "tbf", *bucket)
        yield relay
    finally:
        if relay is not None:
            relay.terminate()
            relay.join()
        remove_nodes()


def needs_relay(setting: Setting) -> bool:
    """Whether a link delays its packets; one of the name ``"relay"`` does by 0."""
    return setting.delay_ms > 0 or setting.name == "relay"


def remove_nodes() -> None:
    for node in NODES:
        subprocess.run(("ip", "netns", "del", node), stderr=subprocess.DEVNULL, check=False)


def relay_packets(delay: float, ready: Any) -> None:
    """Make the two ends of a link and carry each packet from one to the other ``delay`` seconds after it came."""
    ends = []
    for i in range(2):
        end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        tun, no_header, make = 0x0001, 0x1000, 0x400454CA  # IFF_TUN, IFF_NO_PI, TUNSETIFF of Linux's if_tun.h
        fcntl.ioctl(end, make, struct.pack("16sH", f"sg{i}".encode(), tun | no_header))
        run("ip", "link", "set", f"sg{i}", "mtu", str(PACKET), "txqueuelen", "5000")
        ends.append(end)
    ready.set()
    selector = selectors.DefaultSelector()
    for end in ends:
        selector.register(end, selectors.EVENT_READ)
    flying: deque[tuple[float, int, bytes]] = deque()  # in the order in which they are due
    while True:
        wait = None if not flying else max(0.0, flying[0][0] - time.monotonic())
        for key, _ in selector.select(wait):
            with contextlib.suppress(BlockingIOError):
                while True:
                    packet = os.read(key.fd, PACKET + 100)
                    flying.append((time.monotonic() + delay, ends[key.fd == ends[0]], packet))
        now = time.monotonic()
        while flying and flying[0][0] <= now:
            _, end, packet = flying.popleft()
            with contextlib.suppress(OSError):  # a full queue drops packets, and TCP sends them again
                os.write(end, packet)


def in_child(function: Callable[[Setting], float], setting: Setting) -> float:
    """Run in a process of its own, which may enter a namespace."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        return pool.submit(function, setting).result()


def round_trip(setting: Setting) -> float:
    """The median seconds of a small message there and back."""
    with two_nodes(setting):
        ping = multiprocessing.Process(target=echo, daemon=True)
        ping.start()
        time.sleep(0.5)
        enter(NODES[0])
        with socket.create_connection((ADDRESSES[1], PORT), timeout=20) as link:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            times = []
            for _ in range(50):
                started = time.perf_counter()
                link.sendall(b"x")
                link.recv(1)
                times.append(time.perf_counter() - started)
        ping.join()
    return statistics.median(times)


def echo() -> None:
    enter(NODES[1])
    with socket.create_server((ADDRESSES[1], PORT)) as server:
        link, _ = server.accept()
        with link:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while data := link.recv(1):
                link.sendall(data)


def enter(node: str) -> None:
    """Move this process into a namespace."""
    with open(f"/var/run/netns/{node}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {node}")


def timed(setting: Setting, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of all contenders over a link, as ``train_step.measure`` gives them on rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        command = [__file__, "--worker", str(file), "--job", setting.job, "--rounds", str(options.rounds)]
        busy = on_two_nodes(setting, [*command, "--contenders", *options.contenders], 4, options.timeout)
        return {"figures": json.loads(file.read_text()), "relay_busy": busy}


def on_two_nodes(setting: Setting, command: Sequence[str], ranks: int, timeout: float) -> float:
    """Run a Python command as each of so many ranks; the part of a core that the relay took, if there is one."""
    with two_nodes(setting) as relay:
        before, started, per_node = processor_seconds(relay), time.monotonic(), ranks // 2
        running = []
        for rank in range(ranks):
            node = rank // per_node
            environment = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank % per_node),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(per_node),
                "MASTER_ADDR": ADDRESSES[0],
                "MASTER_PORT": str(PORT),
                "GLOO_SOCKET_IFNAME": f"sg{node}",
            }
            inside = ["ip", "netns", "exec", NODES[node], sys.executable]
            running.append(subprocess.Popen([*inside, *command], env=environment))
        try:
            codes = [rank.wait(max(1.0, started + timeout - time.monotonic())) for rank in running]
        finally:
            for rank in running:
                rank.kill()
        if any(codes):
            raise SystemExit(f"{setting.name}: ranks ended with {codes}")
        return (processor_seconds(relay) - before) / (time.monotonic() - started)


def processor_seconds(process: multiprocessing.Process | None) -> float:
    if process is None:
        return 0.0
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def work(options: argparse.Namespace) -> None:
    """What each rank does."""
    import torch.distributed as dist

    from benchmarks.train_step import measure

    dist.init_process_group("gloo")
    figures = measure(options)
    if dist.get_rank() == 0:
        Path(options.worker).write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


def show(setting: Setting, found: dict[str, Any]) -> None:
    limit = f"{setting.mbit} Mbit/s" if setting.mbit else "no limit"
    print(f"{setting.name}: {setting.job}, {limit}, {setting.delay_ms} ms each way", end="")
    print(f", relay busy {found['relay_busy']:.0%}" if needs_relay(setting) else "")
    for name, figures in found["figures"].items():
        middle, low, high = figures["of_base"]
        print(f"  {name:<24}{figures['median_s'] * 1e3:>10.1f} ms{middle:>8.2f}   {low:.2f} to {high:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="limited-network", help="results/NAME.json is written")
    parser.add_argument("--rounds", type=int, default=9)
    names = [setting.name for setting in SETTINGS]
    parser.add_argument("--settings", nargs="+", default=names, choices=names)
    parser.add_argument("--contenders", nargs="+", default=CONTENDERS)
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one setting")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.threads, options.optimizer = 1, "adamw"
    if options.worker:
        return work(options)
    if os.geteuid() != 0:
        raise SystemExit("network namespaces are made by root: run this with sudo")
    direct, relayed = (in_child(round_trip, Setting(name, 0, 0.0, "")) for name in ("direct", "relay"))
    print(f"round trip of one byte: {direct * 1e6:.0f} us directly, {relayed * 1e6:.0f} us through the relay")
    results: dict[str, Any] = {}
    for setting in SETTINGS:
        if setting.name in options.settings:
            results[setting.name] = asdict(setting) | timed(setting, options)
            show(setting, results[setting.name])
    configuration = {
        "command": " ".join(["python", *sys.argv]),
        "cpus": os.cpu_count(),
        "device": platform.machine(),
        "round_trip_s": {"direct": direct, "relay": relayed},
        **vars(options),
    }
    path = Path(__file__).parent / "results" / f"{options.name}.json"
    path.write_text(json.dumps({"configuration": configuration, "settings": results}, indent=1) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
