"""The page under load: how long a light request takes alone and beside heavy ones, and how soon abandoned work stops.

    python bench/page.py [--heavy 50] [--rounds 20]

Starts `zeropipe app` in a process of its own. A light request simulates 1f1b and zbv with 4 ranks and 8 microbatches; a
heavy one simulates zbv with 64 ranks and 2,600 microbatches, a million actions.
"""

import argparse
import asyncio
import re
import subprocess
import sys
import time
from statistics import median

import httpx

LIGHT = {"schedules": [{"name": "1f1b"}, {"name": "zbv"}]}
HEAVY = {"ranks": 64, "microbatches": 2600, "schedules": [{"name": "zbv"}]}
COMMAND = [sys.executable, "-c", "from zeropipe.cli import main; main()", "app", "--no-browser", "--port", "0"]


async def light_times(client, rounds):
    """Seconds of each light request, one after the other."""
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        (await client.post("/api/simulate", json=LIGHT)).raise_for_status()
        times.append(time.perf_counter() - begun)
        await asyncio.sleep(0.05)
    return times


async def num_heavy(client):
    load = (await client.get("/api/load")).json()["large"]
    return load["running"] + load["waiting"]


async def measure(address, heavy, rounds):
    async with httpx.AsyncClient(base_url=address, timeout=None) as light:
        await light_times(light, 3)
        report("a light request alone", await light_times(light, rounds))
        begun = time.perf_counter()
        (await light.post("/api/simulate", json=HEAVY)).raise_for_status()
        print(f"{'a heavy request alone':44} {time.perf_counter() - begun:8.3f} s")
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=address, timeout=None, limits=limits) as crowd:
            tasks = [asyncio.create_task(crowd.post("/api/simulate", json=HEAVY)) for _ in range(heavy)]
            while await num_heavy(light) + sum(task.done() for task in tasks) < heavy:
                await asyncio.sleep(0.01)
            report(f"a light request beside {heavy} heavy ones", await light_times(light, rounds))
            print(f"{'heavy requests still open':44} {sum(not task.done() for task in tasks):8}")
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            begun = time.perf_counter()
        while await num_heavy(light):
            await asyncio.sleep(0.005)
        print(f"{'from disconnect until all of them have stopped':44} {time.perf_counter() - begun:8.3f} s")


def report(what, times):
    print(f"{what:44} {median(times):8.3f} s   (worst of {len(times)}: {max(times):.3f} s)")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heavy", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    server = subprocess.Popen(COMMAND, stdout=subprocess.PIPE, text=True)
    try:
        address = re.search(r"http://\S+/", server.stdout.readline())[0]
        asyncio.run(measure(address, options.heavy, options.rounds))
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
