"""Write chosen tiles into the source, then run the GPU tests: `python … chosen.json SECONDS OUT [PROCESSES]`."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

START = time.time()
chosen, seconds, out = json.loads(Path(sys.argv[1]).read_text()), float(sys.argv[2]), Path(sys.argv[3])
processes = int(sys.argv[4]) if len(sys.argv) > 4 else 14
source = Path("src/regard/core/kernels/square_attention.py")
text = source.read_text()
begin = text.index("    elif max(d, v) <= 32:")
end = text.index("    else:", begin)
branch = text[begin:end]
launches = re.findall(r"Launch\([^()]*\)", branch)
for place, name in enumerate(("sums", "square", "near", "far")):
    if name in chosen:
        branch = branch.replace(launches[place], f"Launch({', '.join(map(str, chosen[name]))})XX{place}", 1)
branch = re.sub(r"XX\d", "", branch)
text = text[:begin] + branch + text[end:]
if "parts" in chosen:
    text = text.replace("PARTS = 1536", f"PARTS = {chosen['parts']}")
source.write_text(text)
print(branch, flush=True)
names = Path("benchmarks/tune_tests.txt").read_text().splitlines()
running = []
for place in range(processes):
    log = (out / f"tests_{place}.txt").open("w")
    command = [sys.executable, "-u", "-m", "pytest", "-o", "addopts=", "-m", "gpu", "-v", "-rs", "--tb=short"]
    running.append(subprocess.Popen([*command, *names[place::processes]], stdout=log, stderr=subprocess.STDOUT))
for process in running:
    try:
        process.wait(max(0.1, seconds - (time.time() - START)))
    except subprocess.TimeoutExpired:
        process.terminate()
counts = dict.fromkeys(("PASSED", "SKIPPED", "FAILED", "ERROR"), 0)
bad = []
for log in sorted(out.glob("tests_*.txt")):
    for line in log.read_text().splitlines():
        for word in counts:
            if f" {word} " in f"{line} " and "::" in line and "[" in line:
                counts[word] += 1
                bad += [line] if word in ("FAILED", "ERROR") else []
print(f"{time.time() - START:.0f} s of {len(names)} tests:", counts, flush=True)
print("\n".join(bad[:20]))
